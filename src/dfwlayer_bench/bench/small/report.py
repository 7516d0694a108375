"""From the cells of the small suite to rows, their tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dfwlayer_bench.bench.report import median
from dfwlayer_bench.bench.small.run import SmallCell
from dfwlayer_bench.bench.small.systems import SYSTEMS
from dfwlayer_bench.bench.tables import OURS, Tables, ratio_of
from dfwlayer_bench.report import text
from dfwlayer_bench.report.figures import Bars, Panel, look_of, save_figure

__all__ = ["TABLES", "SmallRow", "rows_of"]

HEADER = (
    "system",
    "forward + backward",
    "forward",
    "× dfwlayer",
    "error of x",
    "gradient error",
    "violation",
    "status",
)


@dataclass(frozen=True)
class SmallRow:
    """One system on one set and size; times are medians over the repetitions."""

    set: str
    count: int
    n: int
    system: str
    label: str
    status: str
    detail: str
    calls: int
    both_seconds: float | None
    forward_seconds: float | None
    ratio: float | None  # see `ratio_of`
    error: float | None
    gradient_error: float | None
    violation: float | None


def rows_of(cells: Sequence[SmallCell]) -> list[SmallRow]:
    """One row for each cell that was begun."""
    ours = {(cell.set, cell.count, cell.n): cell for cell in cells if cell.system == OURS}
    return [
        _row(cell, ours.get((cell.set, cell.count, cell.n)))
        for cell in cells
        if cell.status != "pending"
    ]


def _row(cell: SmallCell, ours: SmallCell | None) -> SmallRow:
    both, forward = median(cell.both_seconds), median(cell.forward_seconds)
    return SmallRow(
        set=cell.set,
        count=cell.count,
        n=cell.n,
        system=cell.system,
        label=SYSTEMS[cell.system].label,
        status=cell.status,
        detail=cell.detail,
        calls=len(cell.forward_seconds),
        both_seconds=both,
        forward_seconds=forward,
        ratio=ratio_of(cell, ours),
        error=cell.error,
        gradient_error=cell.gradient_error,
        violation=cell.violation,
    )


def size_text(row: SmallRow) -> str:
    """The size of a problem or a batch, as printed."""
    return f"{'one' if row.count == 1 else row.count}×{row.n}"


def _texts(row: SmallRow) -> tuple[str, ...]:
    return (
        row.label,
        text.time(row.both_seconds),
        text.time(row.forward_seconds),
        text.times(row.ratio),
        text.small(row.error),
        text.small(row.gradient_error),
        text.small(row.violation),
        text.status(row.status, row.detail),
    )


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


TABLES = Tables(
    name="small",
    cell=SmallCell,
    row=SmallRow,
    systems=SYSTEMS,
    header=HEADER,
    width=140,
    rows=rows_of,
    problem=_title,
    title=_title,
    texts=_texts,
    draw=_draw,
)
