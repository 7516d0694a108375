"""What tables of recorded numbers are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Table", "bold", "error", "minus", "record", "rows_by"]

RESULTS = Path(__file__).parents[3] / "docs/results"  # of the repository
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # the header, and the rows


@cache
def record(path: str) -> Any:
    """What a run has kept."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


@cache
def rows_by(path: str, *keys: str) -> dict[Any, Any]:
    """The rows of a record, each by what it is about."""
    return {tuple(row[key] for key in keys): row for row in record(path)["rows"]}


def error(value: float) -> str:
    """Like 2e-07, but 0.58 and 0 as they are."""
    if value == 0:
        return "0"
    return f"{value:.0e}" if value < 0.095 else f"{value:#.2g}"


def minus(text: str) -> str:
    """With the sign of mathematics."""
    return text.replace("-", "−")


def bold(text: str, yes: bool = True) -> str:
    """In bold type."""
    return f"**{text}**" if yes else text
