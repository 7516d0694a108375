"""From the cells of the lasso suite to rows, tables and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfwlayer_bench.bench.lasso.run import LassoCell
from dfwlayer_bench.bench.lasso.systems import SYSTEMS
from dfwlayer_bench.bench.report import median, settings_by_system
from dfwlayer_bench.report import text
from dfwlayer_bench.report.files import table_of_texts, write_results
from dfwlayer_bench.report.machine import machine_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LassoRow", "groups_of", "rows_of", "settings_of", "table_of", "write_files"]

OURS = "dfwlayer"
HEADER = (
    "system",
    "forward",
    "forward + backward",
    "× dfwlayer",
    "relative gap",
    "non-zeros",
    "status",
)


@dataclass(frozen=True)
class LassoRow:
    """One system on one problem; times are medians over the repetitions."""

    problem: str
    system: str
    label: str
    status: str
    detail: str
    rows: int | None
    columns: int | None
    radii: int | None
    calls: int
    forward_seconds: float | None
    both_seconds: float | None
    ratio: float | None  # of the forward pass to dfwlayer's
    gap: float | None
    nonzeros: int | None


def rows_of(cells: Sequence[LassoCell]) -> list[LassoRow]:
    """One row for each cell that was begun."""
    ours = {cell.problem: median(cell.forward_seconds) for cell in cells if cell.system == OURS}
    return [_row(cell, ours.get(cell.problem)) for cell in cells if cell.status != "pending"]


def _row(cell: LassoCell, base: float | None) -> LassoRow:
    forward = median(cell.forward_seconds)
    return LassoRow(
        problem=cell.problem,
        system=cell.system,
        label=SYSTEMS[cell.system].label,
        status=cell.status,
        detail=cell.detail,
        rows=cell.rows,
        columns=cell.columns,
        radii=cell.radii,
        calls=len(cell.forward_seconds),
        forward_seconds=forward,
        both_seconds=median(cell.both_seconds),
        ratio=None if forward is None or base is None else forward / base,
        gap=cell.gap,
        nonzeros=cell.nonzeros,
    )


def groups_of(rows: Sequence[LassoRow]) -> list[tuple[str, list[LassoRow]]]:
    """The rows by problem, each group with its title."""
    groups: dict[str, list[LassoRow]] = {}
    for row in rows:
        groups.setdefault(row.problem, []).append(row)
    return [(_title(group[0]), group) for group in groups.values()]


def _title(row: LassoRow) -> str:
    if row.rows is None:
        return row.problem
    radii = "" if row.radii == 1 else f", {row.radii} radii"
    return f"{row.problem}, {row.rows}×{row.columns}{radii}"


def _texts(row: LassoRow) -> tuple[str, ...]:
    return (
        row.label,
        text.time(row.forward_seconds),
        text.time(row.both_seconds),
        text.NOTHING if row.ratio is None else f"{row.ratio:.2g}",
        text.small(row.gap),
        text.NOTHING if row.nonzeros is None else str(row.nonzeros),
        f"{row.status}: {row.detail}" if row.detail else row.status,
    )


def table_of(rows: Sequence[LassoRow], title: str) -> Table:
    """The rows of one problem, for the terminal."""
    styled = [
        (_texts(row), "bold" if row.system == OURS else ("" if row.status == "ok" else "dim"))
        for row in rows
    ]
    return table_of_texts(HEADER, styled, title)


def settings_of(cells: Sequence[LassoCell]) -> dict[str, str]:
    """What each system was told."""
    return settings_by_system(SYSTEMS, cells)


def write_files(
    folder: Path, cells: Sequence[LassoCell], rows: Sequence[LassoRow], about: dict[str, Any]
) -> None:
    """lasso.csv (rows), lasso.json (everything) and lasso.md (tables)."""
    lines = [f"`{about['command']}`", "", f"{machine_text(about['machine'])}; float64 on the CPU."]
    for title, group in groups_of(rows):
        lines += ["", f"### {title}", ""]
        lines += text.markdown_table(HEADER, [_texts(row) for row in group])
    lines += ["", "### Settings", ""]
    lines += [f"- {name}: {settings}" for name, settings in settings_of(cells).items()]
    write_results(folder, "lasso", LassoRow, rows, cells, about, "\n".join(lines) + "\n")
