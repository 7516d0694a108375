"""Rows of a benchmark as a table for the terminal, and as CSV, JSON and Markdown to keep."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.table import Table

__all__ = ["table_of_texts", "write_results"]


def table_of_texts(
    header: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], title: str
) -> Table:
    """Rows of texts, each with its style; the first and the last column are words."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    for name in header:
        if name == "status":
            table.add_column(name, justify="left", overflow="fold")
        else:
            table.add_column(name, justify="left" if name == "system" else "right", no_wrap=True)
    for texts, style in rows:
        table.add_row(*texts, style=style)
    return table


def write_results(
    folder: Path,
    name: str,
    row: type[DataclassInstance],
    rows: Sequence[DataclassInstance],
    cells: Sequence[DataclassInstance],
    about: dict[str, Any],
    markdown: str,
) -> None:
    """name.csv (rows), name.json (everything) and name.md."""
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    content = {
        **about,
        "rows": [asdict(row) for row in rows],
        "cells": [asdict(cell) for cell in cells],
    }
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")
