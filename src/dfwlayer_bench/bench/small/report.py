"""From the cells of the small suite to rows, their tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dfwlayer_bench.bench import tables
from dfwlayer_bench.bench.small.run import SmallCell
from dfwlayer_bench.bench.small.systems import SYSTEMS
from dfwlayer_bench.report.figures import Bars, Panel, look_of, save_figure

__all__ = ["TABLES", "SmallRow"]


@dataclass(frozen=True, kw_only=True)
class SmallRow(tables.TimedRow):
    """One system on one set and size; times are medians over the repetitions."""

    set: str
    count: int
    n: int
    error: float | None
    gradient_error: float | None
    violation: float | None


def size_text(row: SmallRow) -> str:
    """The size of a problem or a batch, as printed."""
    return f"{'one' if row.count == 1 else row.count}×{row.n}"


def _draw(folder: Path, rows: Sequence[SmallRow]) -> None:
    """A figure of both passes, and one of the first alone."""
    for name, label, attribute in (
        ("small", "forward + backward (s)", "both_seconds"),
        ("small-forward", "forward (s)", "forward_seconds"),
    ):
        panels = _panels(rows, label, attribute)
        if panels:
            save_figure(folder, name, panels, panel_size=(8.6, 2.3))


def _panels(rows: Sequence[SmallRow], label: str, attribute: str) -> list[Panel]:
    """One panel a set: at each size a bar for every system that was timed."""
    timed = [row for row in rows if getattr(row, attribute) is not None]
    systems = [name for name in SYSTEMS if any(row.system == name for row in timed)]
    sizes = list(dict.fromkeys(size_text(row) for row in timed))
    width = 0.8 / max(1, len(systems))
    panels = []
    for name in dict.fromkeys(row.set for row in timed):
        own = [row for row in timed if row.set == name]
        bars = [
            Bars(
                SYSTEMS[system].label,
                [
                    sizes.index(size_text(row)) + (i - (len(systems) - 1) / 2) * width
                    for row in rows_
                ],
                [getattr(row, attribute) for row in rows_],
                look_of(list(SYSTEMS).index(system)),
                width,
            )
            for i, system in enumerate(systems)
            if (rows_ := [row for row in own if row.system == system])
        ]
        least = min(getattr(row, attribute) for row in own)
        panels.append(
            Panel(
                "problems × variables",
                label,
                (),
                title=name,
                y_log=True,
                ticks={float(place): size for place, size in enumerate(sizes)},
                y_range=(least / 2, None),
                bars=bars,
            )
        )
    return panels


def _title(row: SmallRow) -> str:
    return f"{row.set}, {size_text(row)}"


TABLES = tables.Tables(
    name="small",
    cell=SmallCell,
    row=SmallRow,
    systems=SYSTEMS,
    columns=(
        tables.SYSTEM,
        tables.BOTH,
        tables.FORWARD,
        tables.RATIO,
        tables.ERROR,
        tables.GRADIENT_ERROR,
        tables.VIOLATION,
        tables.STATUS,
    ),
    width=140,
    title=_title,
    draw=_draw,
)
