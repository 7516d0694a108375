"""From the cells of the lasso suite to rows and their tables."""

from __future__ import annotations

from dataclasses import dataclass

from dfwlayer_bench.bench import tables
from dfwlayer_bench.bench.lasso.run import LassoCell
from dfwlayer_bench.bench.lasso.systems import SYSTEMS
from dfwlayer_bench.report import text

__all__ = ["TABLES", "LassoRow"]


@dataclass(frozen=True, kw_only=True)
class LassoRow(tables.TimedRow):
    """One system on one problem; times are medians over the repetitions."""

    rows: int | None
    columns: int | None
    radii: int | None
    gap: float | None
    nonzeros: int | None


def _title(row: LassoRow) -> str:
    if row.rows is None:
        return row.problem
    radii = "" if row.radii == 1 else f", {row.radii} radii"
    return f"{row.problem}, {row.rows}×{row.columns}{radii}"


TIMES = tables.SYSTEM, tables.FORWARD, tables.BOTH, tables.RATIO  # forward is what most rivals have
GAP = tables.Column("relative gap", lambda row: text.small(row.gap))
NONZEROS = tables.Column(
    "non-zeros", lambda row: text.NOTHING if row.nonzeros is None else str(row.nonzeros)
)

TABLES = tables.Tables(
    name="lasso",
    cell=LassoCell,
    row=LassoRow,
    systems=SYSTEMS,
    columns=(*TIMES, GAP, NONZEROS, tables.STATUS),
    width=120,
    title=_title,
)
