"""From the cells of the layer suite to rows and their tables."""

from __future__ import annotations

from dataclasses import dataclass

from dfwlayer_bench.bench import tables
from dfwlayer_bench.bench.layers.run import LayerCell
from dfwlayer_bench.bench.layers.systems import SYSTEMS
from dfwlayer_bench.report import text

__all__ = ["TABLES", "LayerRow"]


@dataclass(frozen=True, kw_only=True)
class LayerRow(tables.TimedRow):
    """One system on one problem; times are medians over the repetitions."""

    count: int | None
    n: int | None
    error: float | None
    gradient_error: float | None
    violation: float | None
    excess: float | None


def _title(row: LayerRow) -> str:
    return row.problem if row.n is None else f"{row.problem}, {row.count}×{row.n}"


EXCESS = tables.Column("above f*", lambda row: text.small(row.excess))

TABLES = tables.Tables(
    name="layers",
    cell=LayerCell,
    row=LayerRow,
    systems=SYSTEMS,
    columns=(*tables.MEASURED, EXCESS, tables.STATUS),
    width=150,
    title=_title,
)
