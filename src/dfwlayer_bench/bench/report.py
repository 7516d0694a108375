"""From cells to rows: medians and spread, a table to read, CSV, JSON and Markdown to keep."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfwlayer_bench.bench.store import Cell
from dfwlayer_bench.report import text
from dfwlayer_bench.report.files import table_of_texts, write_results
from dfwlayer_bench.report.machine import clock_text, machine_text
from dfwlayer_bench.systems import FLOOR, label_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Outcome",
    "Row",
    "by_system",
    "groups_of",
    "median",
    "outcome_of",
    "rows_of",
    "settings_text",
    "table_of",
    "write_files",
]


@dataclass(frozen=True)
class Outcome:
    """How one system fared on one family and size, over all trials."""

    family: str
    n: int
    system: str
    label: str
    status: str
    detail: str
    trials: int  # that ended well


@dataclass(frozen=True)
class Row(Outcome):
    """An outcome in numbers.

    Times are over every timed call; errors are medians over the trials, the violation and the
    memory are the largest.
    """

    active: int  # trials with an active constraint
    calls: int
    seconds: float | None
    seconds_low: float | None  # quartiles
    seconds_high: float | None
    ratio: float | None  # to the floor on the same problem, median over the trials
    error: float | None
    cosine: float | None
    gradient_error: float | None
    violation: float | None
    memory_mb: float | None
    settings: str


def rows_of(cells: Sequence[Cell]) -> list[Row]:
    """One row for each family, size and system, in the order they were first met."""
    floors = {
        (cell.family, cell.n, cell.trial): statistics.median(cell.seconds)
        for cell in cells
        if cell.system == FLOOR and cell.seconds
    }
    return [_row(group, floors) for group in by_system(cells)]


def by_system(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The trials of each family, size and system, in the order they were first met."""
    groups: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.family, cell.n, cell.system), []).append(cell)
    return list(groups.values())


def _row(cells: list[Cell], floors: dict[tuple[str, int, int], float]) -> Row:
    good, outcome = outcome_of(cells)
    times = [second for cell in good for second in cell.seconds]
    ratios = [
        statistics.median(cell.seconds) / floors[cell.family, cell.n, cell.trial]
        for cell in good
        if (cell.family, cell.n, cell.trial) in floors
    ]
    low, high = _quartiles(times)
    return Row(
        **vars(outcome),
        active=sum(bool(cell.constraint_active) for cell in good),
        calls=len(times),
        seconds=median(times),
        seconds_low=low,
        seconds_high=high,
        ratio=median(ratios),
        error=median(cell.error for cell in good),
        cosine=median(cell.cosine for cell in good),
        gradient_error=median(cell.gradient_error for cell in good),
        violation=max((c.violation for c in good if c.violation is not None), default=None),
        memory_mb=max((c.memory_mb for c in good if c.memory_mb is not None), default=None),
        settings=settings_text([cell.settings for cell in good]),
    )


def outcome_of(cells: Sequence[Cell]) -> tuple[list[Cell], Outcome]:
    """Those trials of a system that have results, and what to say of all of them."""
    first = cells[0]
    good = [cell for cell in cells if cell.status == "ok" and cell.seconds]
    bad = [cell for cell in cells if cell.status not in ("ok", "pending")]
    status = "ok" if good and not bad else (bad[0].status if bad else "pending")
    if good and bad:
        status = f"{status} in {len(bad)} of {len(cells)}"
    detail = "; ".join(dict.fromkeys(cell.detail for cell in (bad or good) if cell.detail))
    label = label_of(first.system)
    return good, Outcome(first.family, first.n, first.system, label, status, detail, len(good))


def settings_text(settings: Sequence[dict[str, Any]]) -> str:
    """The settings as text; a value that was tuned for each problem shows as its range."""
    values: dict[str, list[Any]] = {}
    for own in settings:
        for name, value in own.items():
            values.setdefault(name, []).append(value)
    parts = []
    for name, found in values.items():
        distinct = list(dict.fromkeys(found))
        if len(distinct) > 1 and all(isinstance(value, int | float) for value in distinct):
            parts.append(f"{name}={min(distinct):g}…{max(distinct):g}")
        else:
            parts.append(f"{name}={'/'.join(str(value) for value in distinct)}")
    return ", ".join(parts)


def median(values: Iterable[float | None]) -> float | None:
    """That of those that are known, None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _quartiles(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


HEADER = (
    "system",
    "time",
    "IQR",
    "× floor",
    "error of x",
    "cosine",
    "gradient error",
    "violation / t",
    "memory",
    "status",
)


def _texts(row: Row) -> tuple[str, ...]:
    """A row as it is printed."""
    spread = text.NOTHING
    if row.seconds_low is not None and row.seconds_high is not None:
        spread = f"{text.time(row.seconds_low)} – {text.time(row.seconds_high)}"
    return (
        row.label,
        text.time(row.seconds),
        spread,
        text.times(row.ratio, 3),
        text.small(row.error),
        text.NOTHING if row.cosine is None else f"{row.cosine:.6f}",
        text.small(row.gradient_error),
        text.small(row.violation),
        text.NOTHING if row.memory_mb is None else f"{row.memory_mb:.0f} MB",
        text.status(row.status, row.detail),
    )


COMPACT = ("system", "time", "× floor", "error of x", "gradient error", "status")


def table_of(rows: Sequence[Row], title: str, *, compact: bool = False) -> Table:
    """The rows of one family and size, for the terminal; compact where that is narrow."""
    chosen = COMPACT if compact else HEADER
    shown = []
    for row in rows:
        style = "bold" if row.system == "dfwlayer" else ("" if row.status == "ok" else "dim")
        texts = dict(zip(HEADER, _texts(row), strict=True))
        shown.append(([texts[name] for name in chosen], style))
    return table_of_texts(chosen, shown, title)


def groups_of(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by family and size, each group with its title."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.family, row.n), []).append(row)
    titled = []
    for (family, n), group in groups.items():
        trials = max(row.trials for row in group)
        active = max(row.active for row in group)
        title = f"{family}, n = {n} (constraint active in {active} of {trials} trials)"
        titled.append((title, group))
    return titled


def write_files(
    folder: Path, cells: Sequence[Cell], rows: Sequence[Row], about: dict[str, Any]
) -> None:
    """bench.csv (rows), bench.json (everything) and bench.md (tables and settings)."""
    write_results(folder, "bench", Row, rows, cells, about, _markdown(rows, about))


def _markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    lines = [
        f"`{about['command']}`",
        "",
        f"{machine_text(about['machine'])}; {about['dtype']} on {about['device']}. "
        "One forward and one backward pass a call." + clock_text(about),
    ]
    for title, group in groups_of(rows):
        lines += ["", f"### {title}", ""]
        lines += text.markdown_table(HEADER, [_texts(row) for row in group])
    lines += ["", "### Settings", ""]
    for name in dict.fromkeys(row.system for row in rows):
        found = [r.settings for r in rows if r.system == name and r.settings]
        lines += [f"- {name}: {settings}" for settings in dict.fromkeys(found)]
    return "\n".join(lines) + "\n"
