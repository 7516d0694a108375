"""From the cells of the layer suite to rows and their tables."""

from __future__ import annotations

from dataclasses import dataclass

from dfwlayer_bench.bench.layers.run import LayerCell
from dfwlayer_bench.bench.layers.systems import SYSTEMS
from dfwlayer_bench.bench.tables import (
    BOTH,
    ERROR,
    FORWARD,
    GRADIENT_ERROR,
    RATIO,
    STATUS,
    SYSTEM,
    VIOLATION,
    Column,
    Tables,
)
from dfwlayer_bench.report import text

__all__ = ["TABLES", "LayerRow"]


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


def _title(row: LayerRow) -> str:
    return row.problem if row.n is None else f"{row.problem}, {row.count}×{row.n}"


EXCESS = Column("above f*", lambda row: text.small(row.excess))

TABLES = Tables(
    name="layers",
    cell=LayerCell,
    row=LayerRow,
    systems=SYSTEMS,
    columns=(SYSTEM, BOTH, FORWARD, RATIO, ERROR, GRADIENT_ERROR, VIOLATION, EXCESS, STATUS),
    width=150,
    title=_title,
)
