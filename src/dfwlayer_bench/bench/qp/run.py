"""Running the cells of the suite of collected quadratic programs."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dfwlayer_bench.bench.qp.problems import Collected, read, size_of
from dfwlayer_bench.bench.qp.rivals import Said
from dfwlayer_bench.bench.qp.systems import SYSTEMS
from dfwlayer_bench.bench.store import Store
from dfwlayer_bench.bench.turns import (
    NamedCell,
    Passes,
    TimedPlan,
    cells_of,
    no_problem,
    prepared,
    run_groups,
)
from dfwlayer_bench.report.progress import Report

__all__ = ["QpCell", "QpPlan", "run_qp", "saved_qp", "size_or_none"]

UNREADABLE = (OSError, ValueError, KeyError, zipfile.BadZipFile, ModuleNotFoundError)


@dataclass(frozen=True, kw_only=True)
class QpPlan(TimedPlan):
    """What to run: every problem of a folder, up to a size, by every system."""

    folder: Path
    problems: dict[str, Path]
    largest: int

    def groups(self) -> list[tuple[Any, ...]]:
        """(problem,)."""
        return [(problem,) for problem in self.problems]


@dataclass
class QpCell(NamedCell):
    """One system on one problem."""

    variables: int | None = None
    inequalities: int | None = None
    equations: int | None = None
    answer: str = ""  # what the solver says of it
    value: float | None = None  # f(x)
    gap: float | None = None  # f(x) − f* is no more, for solvers that prove it
    residual: float | None = None  # see `Collected.residual`


def size_or_none(path: Path) -> int | None:
    """The number of variables, None for a file that cannot be read."""
    try:
        return size_of(path)
    except UNREADABLE:
        return None


def run_qp(plan: QpPlan, store: Store, report: Report) -> list[QpCell]:
    """Finish every cell of the plan, saving each as it grows; returns all of them."""
    return run_groups(plan, _cells(plan, store), store, report, lambda c: _ready(plan, c))


def saved_qp(plan: QpPlan, store: Store) -> list[QpCell]:
    """The cells of the plan as they are on disk, those never begun left out."""
    return [cell for group in _cells(plan, store) for cell in group if cell.status != "pending"]


def _cells(plan: QpPlan, store: Store) -> list[list[QpCell]]:
    """Those of each problem, as saved where that still holds."""
    return cells_of(plan, store, QpCell, SYSTEMS)


def _ready(plan: QpPlan, first: QpCell) -> Callable[[QpCell], Passes | None]:
    """What prepares the systems for the problem of a cell."""
    try:
        problem = read(plan.problems[first.problem])
    except UNREADABLE as error:
        return no_problem("missing", f"cannot be read: {error}"[:200])
    return lambda cell: _prepare(cell, problem)


def _prepare(cell: QpCell, problem: Collected) -> Passes | None:
    system, said = SYSTEMS[cell.system], Said()
    cell.variables, cell.inequalities = len(problem.q), len(problem.h)
    cell.equations = len(problem.b)

    def measure(x: Tensor, _: Tensor | None) -> None:
        array = x.numpy()
        cell.answer, cell.gap = said.answer, said.gap
        cell.value, cell.residual = problem.value(array), problem.residual(array)

    unsupported = ""
    if system.largest is not None and cell.variables > system.largest:
        unsupported = f"more than {system.largest} variables"
    passes = prepared(cell, system, unsupported, lambda: system.prepare(problem, said), measure)
    cell.answer = said.answer
    return passes
