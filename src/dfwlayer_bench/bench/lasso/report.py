"""From the cells of the lasso suite to rows and their tables."""

from __future__ import annotations

from dataclasses import dataclass

from dfwlayer_bench.bench.lasso.run import LassoCell
from dfwlayer_bench.bench.lasso.systems import SYSTEMS
from dfwlayer_bench.bench.tables import BOTH, FORWARD, RATIO, STATUS, SYSTEM, Column, Tables
from dfwlayer_bench.report import text

__all__ = ["TABLES", "LassoRow"]


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
    ratio: float | None  # see `ratio_of`
    gap: float | None
    nonzeros: int | None


def _title(row: LassoRow) -> str:
    if row.rows is None:
        return row.problem
    radii = "" if row.radii == 1 else f", {row.radii} radii"
    return f"{row.problem}, {row.rows}×{row.columns}{radii}"


GAP = Column("relative gap", lambda row: text.small(row.gap))
NONZEROS = Column(
    "non-zeros", lambda row: text.NOTHING if row.nonzeros is None else str(row.nonzeros)
)

TABLES = Tables(
    name="lasso",
    cell=LassoCell,
    row=LassoRow,
    systems=SYSTEMS,
    columns=(SYSTEM, FORWARD, BOTH, RATIO, GAP, NONZEROS, STATUS),
    width=120,
    title=_title,
)
