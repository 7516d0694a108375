"""From the cells of the layer suite to rows and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dfwlayer_bench.bench.layers.run import LayerCell
from dfwlayer_bench.bench.layers.systems import SYSTEMS
from dfwlayer_bench.bench.report import median
from dfwlayer_bench.bench.tables import OURS, Tables, ratio_of
from dfwlayer_bench.report import text

__all__ = ["TABLES", "LayerRow", "rows_of"]

HEADER = (
    "system",
    "forward + backward",
    "forward",
    "× dfwlayer",
    "error of x",
    "gradient error",
    "violation",
    "above f*",
    "status",
)


@dataclass(frozen=True)
class LayerRow:
    """One system on one problem; times are medians over the repetitions."""

    problem: str
    system: str
    label: str
    status: str
    detail: str
    count: int | None
    n: int | None
    calls: int
    both_seconds: float | None
    forward_seconds: float | None
    ratio: float | None  # see `ratio_of`
    error: float | None
    gradient_error: float | None
    violation: float | None
    excess: float | None


def rows_of(cells: Sequence[LayerCell]) -> list[LayerRow]:
    """One row for each cell that was begun."""
    ours = {cell.problem: cell for cell in cells if cell.system == OURS}
    return [_row(cell, ours.get(cell.problem)) for cell in cells if cell.status != "pending"]


def _row(cell: LayerCell, ours: LayerCell | None) -> LayerRow:
    return LayerRow(
        problem=cell.problem,
        system=cell.system,
        label=SYSTEMS[cell.system].label,
        status=cell.status,
        detail=cell.detail,
        count=cell.count,
        n=cell.n,
        calls=len(cell.forward_seconds),
        both_seconds=median(cell.both_seconds),
        forward_seconds=median(cell.forward_seconds),
        ratio=ratio_of(cell, ours),
        error=cell.error,
        gradient_error=cell.gradient_error,
        violation=cell.violation,
        excess=cell.excess,
    )


def _title(row: LayerRow) -> str:
    return row.problem if row.n is None else f"{row.problem}, {row.count}×{row.n}"


def _texts(row: LayerRow) -> tuple[str, ...]:
    return (
        row.label,
        text.time(row.both_seconds),
        text.time(row.forward_seconds),
        text.times(row.ratio),
        text.small(row.error),
        text.small(row.gradient_error),
        text.small(row.violation),
        text.small(row.excess),
        text.status(row.status, row.detail),
    )


TABLES = Tables(
    name="layers",
    cell=LayerCell,
    row=LayerRow,
    systems=SYSTEMS,
    header=HEADER,
    width=150,
    rows=rows_of,
    problem=lambda row: row.problem,
    title=_title,
    texts=_texts,
)
