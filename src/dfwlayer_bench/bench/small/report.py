"""From the cells of the small suite to rows, tables, files and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfwlayer_bench.bench.report import median, settings_by_system
from dfwlayer_bench.bench.small.run import SmallCell
from dfwlayer_bench.bench.small.systems import SYSTEMS
from dfwlayer_bench.report import text
from dfwlayer_bench.report.figures import Bars, Panel, look_of, save_figure
from dfwlayer_bench.report.files import table_of_texts, write_results
from dfwlayer_bench.report.machine import machine_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["SmallRow", "groups_of", "rows_of", "settings_of", "table_of", "write_files"]

OURS = "dfwlayer"
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
    ratio: float | None  # of both passes to dfwlayer's; of the forward pass where there is no other
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
    ratio = None
    if ours is not None:
        base = median(ours.forward_seconds if both is None else ours.both_seconds)
        own = forward if both is None else both
        ratio = None if own is None or base is None else own / base
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
        ratio=ratio,
        error=cell.error,
        gradient_error=cell.gradient_error,
        violation=cell.violation,
    )


def groups_of(rows: Sequence[SmallRow]) -> list[tuple[str, list[SmallRow]]]:
    """The rows by set and size, each group with its title."""
    groups: dict[str, list[SmallRow]] = {}
    for row in rows:
        groups.setdefault(f"{row.set}, {size_text(row)}", []).append(row)
    return list(groups.items())


def size_text(row: SmallRow) -> str:
    """The size of a problem or a batch, as printed."""
    return f"{'one' if row.count == 1 else row.count}×{row.n}"


def _texts(row: SmallRow) -> tuple[str, ...]:
    return (
        row.label,
        text.time(row.both_seconds),
        text.time(row.forward_seconds),
        text.NOTHING if row.ratio is None else f"{row.ratio:.2g}",
        text.small(row.error),
        text.small(row.gradient_error),
        text.small(row.violation),
        f"{row.status}: {row.detail}" if row.detail else row.status,
    )


def table_of(rows: Sequence[SmallRow], title: str) -> Table:
    """The rows of one set and size, for the terminal."""
    styled = [
        (_texts(row), "bold" if row.system == OURS else ("" if row.status == "ok" else "dim"))
        for row in rows
    ]
    return table_of_texts(HEADER, styled, title)


def settings_of(cells: Sequence[SmallCell]) -> dict[str, str]:
    """What each system was told."""
    return settings_by_system(SYSTEMS, cells)


def write_files(
    folder: Path, cells: Sequence[SmallCell], rows: Sequence[SmallRow], about: dict[str, Any]
) -> None:
    """small.csv (rows), small.json (everything), small.md (tables) and the figures."""
    write_results(folder, "small", SmallRow, rows, cells, about, _markdown(cells, rows, about))
    for name, label, attribute in (
        ("small", "forward + backward (s)", "both_seconds"),
        ("small-forward", "forward (s)", "forward_seconds"),
    ):
        panels = _panels(rows, label, attribute)
        if panels:
            save_figure(folder, name, panels, panel_size=(8.6, 2.3))


def _markdown(cells: Sequence[SmallCell], rows: Sequence[SmallRow], about: dict[str, Any]) -> str:
    lines = [f"`{about['command']}`", "", f"{machine_text(about['machine'])}; float64 on the CPU."]
    for title, group in groups_of(rows):
        lines += ["", f"### {title}", ""]
        lines += text.markdown_table(HEADER, [_texts(row) for row in group])
    lines += ["", "### Settings", ""]
    lines += [f"- {name}: {settings}" for name, settings in settings_of(cells).items()]
    return "\n".join(lines) + "\n"


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
