"""From the cells of the suite of collected quadratic programs to rows, tables and files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfwlayer_bench.bench.qp.run import QpCell
from dfwlayer_bench.bench.qp.systems import SYSTEMS
from dfwlayer_bench.bench.report import median
from dfwlayer_bench.bench.tables import OURS, row_of, settings_of_systems
from dfwlayer_bench.report import text
from dfwlayer_bench.report.files import table_of_texts, write_results
from dfwlayer_bench.report.machine import clock_text, machine_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["QpRow", "Summary", "rows_of", "settings_of", "shifted_mean", "summaries", "tables_of"]
__all__ += ["write_files"]

GAP, RESIDUAL = 1e-6, 1e-9  # up to which a problem is solved
SHIFTS = 10.0, 0.01  # seconds; the first one as in the benchmark of qpsolvers
HEADER = ("problem", "system", "time", "relative gap", "residual", "answer", "status")
SUMMARY = ("system", "solved", "mean, shift 10 s", "mean, shift 10 ms", "× dfwlayer", "problems")


@dataclass(frozen=True)
class QpRow:
    """One system on one problem; the time is the median over the repetitions.

    The relative gap is f(x) minus the largest lower bound of f* that a system has proven, over
    max(1, |f(x)|): the certificate of dfwlayer. It is negative for a point that is below f* as it
    is not feasible.
    """

    problem: str
    system: str
    label: str
    status: str
    detail: str
    variables: int | None
    inequalities: int | None
    equations: int | None
    calls: int
    seconds: float | None
    answer: str
    value: float | None
    gap: float | None
    residual: float | None

    @property
    def solved(self) -> bool:
        """Whether gap and residual are small enough."""
        known = self.status == "ok" and self.gap is not None and self.residual is not None
        return known and abs(self.gap or 0.0) <= GAP and (self.residual or 0.0) <= RESIDUAL


def rows_of(cells: Sequence[QpCell]) -> list[QpRow]:
    """One row for each cell that was begun."""
    bounds: dict[str, float] = {}
    for cell in cells:
        if cell.value is not None and cell.gap is not None and math.isfinite(cell.gap):
            proven = cell.value - cell.gap
            bounds[cell.problem] = max(proven, bounds.get(cell.problem, -math.inf))
    return [_row(cell, bounds.get(cell.problem)) for cell in cells if cell.status != "pending"]


def _row(cell: QpCell, bound: float | None) -> QpRow:
    gap = None
    if cell.value is not None and bound is not None:
        gap = (cell.value - bound) / max(1.0, abs(cell.value))
    return row_of(QpRow, cell, SYSTEMS, seconds=median(cell.forward_seconds), gap=gap)


@dataclass(frozen=True)
class Summary:
    """One system on all problems.

    Attributes:
        system: Its name.
        solved: Problems that it solved, of ``problems``.
        problems: That could be read.
        means: The shifted geometric means of its times over what it solved, one for each shift.
        ratio: Of the mean with the first shift to that of dfwlayer, on what both solved.
        common: How many those are.

    """

    system: str
    solved: int
    problems: int
    means: tuple[float | None, ...]
    ratio: float | None
    common: int


def shifted_mean(seconds: Sequence[float], shift: float) -> float | None:
    """exp(mean log(t + shift)) − shift."""
    if not seconds:
        return None
    return math.exp(sum(math.log(t + shift) for t in seconds) / len(seconds)) - shift


def summaries(rows: Sequence[QpRow]) -> list[Summary]:
    """One for each system, in the order of the registry."""
    ours = {row.problem: row.seconds for row in rows if row.system == OURS and row.solved}
    found = []
    for name in SYSTEMS:
        own = [row for row in rows if row.system == name and row.variables is not None]
        if not own:
            continue
        times = {row.problem: row.seconds or 0.0 for row in own if row.solved}
        common = [problem for problem in times if problem in ours]
        mine = shifted_mean([times[problem] for problem in common], SHIFTS[0])
        base = shifted_mean([ours[problem] or 0.0 for problem in common], SHIFTS[0])
        means = tuple(shifted_mean(list(times.values()), shift) for shift in SHIFTS)
        ratio = mine / base if mine is not None and base else None
        found.append(Summary(name, len(times), len(own), means, ratio, len(common)))
    return found


def _texts(row: QpRow) -> tuple[str, ...]:
    return (
        row.problem,
        row.label,
        text.time(row.seconds),
        text.small(row.gap),
        text.small(row.residual),
        row.answer or text.NOTHING,
        f"{row.status}: {row.detail}" if row.detail else row.status,
    )


def _summary_texts(summary: Summary) -> tuple[str, ...]:
    return (
        SYSTEMS[summary.system].label,
        f"{summary.solved} of {summary.problems}",
        *(text.time(mean) for mean in summary.means),
        text.NOTHING if summary.ratio is None else f"{summary.ratio:.2g}",
        str(summary.common),
    )


def tables_of(rows: Sequence[QpRow]) -> list[Table]:
    """For the terminal: every problem, then the systems."""
    styled = [
        (_texts(row), "bold" if row.system == OURS else ("" if row.status == "ok" else "dim"))
        for row in rows
    ]
    totals = [(_summary_texts(summary), "") for summary in summaries(rows)]
    return [
        table_of_texts(HEADER, styled, "problems"),
        table_of_texts(SUMMARY, totals, "systems"),
    ]


def settings_of(cells: Sequence[QpCell]) -> dict[str, str]:
    """What each system was told."""
    return settings_of_systems(SYSTEMS, cells)


def write_files(
    folder: Path, cells: Sequence[QpCell], rows: Sequence[QpRow], about: dict[str, Any]
) -> None:
    """qp.csv (rows), qp.json (everything) and qp.md (tables)."""
    machine = f"{machine_text(about['machine'])}; float64 on the CPU." + clock_text(about)
    lines = [f"`{about['command']}`", "", machine]
    lines += ["", "### Systems", ""]
    lines += text.markdown_table(SUMMARY, [_summary_texts(one) for one in summaries(rows)])
    lines += ["", "### Problems", ""]
    lines += text.markdown_table(HEADER, [_texts(row) for row in rows])
    lines += ["", "### Settings", ""]
    lines += [f"- {name}: {settings}" for name, settings in settings_of(cells).items()]
    write_results(folder, "qp", QpRow, rows, cells, about, "\n".join(lines) + "\n")
