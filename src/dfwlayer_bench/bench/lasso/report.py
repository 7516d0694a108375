"""From the cells of the lasso suite to rows and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dfwlayer_bench.bench.lasso.run import LassoCell
from dfwlayer_bench.bench.lasso.systems import SYSTEMS
from dfwlayer_bench.bench.report import median
from dfwlayer_bench.bench.tables import OURS, Tables
from dfwlayer_bench.report import text

__all__ = ["TABLES", "LassoRow", "rows_of"]

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
        text.times(row.ratio),
        text.small(row.gap),
        text.NOTHING if row.nonzeros is None else str(row.nonzeros),
        text.status(row.status, row.detail),
    )


TABLES = Tables(
    name="lasso",
    cell=LassoCell,
    row=LassoRow,
    systems=SYSTEMS,
    header=HEADER,
    width=120,
    rows=rows_of,
    problem=lambda row: row.problem,
    title=_title,
    texts=_texts,
)
