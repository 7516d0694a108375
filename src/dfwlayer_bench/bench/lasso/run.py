"""Running the cells of the lasso suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from typing import Any

from torch import Tensor

from dfwlayer_bench.bench.lasso.problems import Penalised, make, penalised
from dfwlayer_bench.bench.lasso.systems import SYSTEMS
from dfwlayer_bench.bench.store import Store
from dfwlayer_bench.bench.turns import Passes, prepared, restored, run_groups
from dfwlayer_bench.report.progress import Report

__all__ = ["LassoCell", "LassoPlan", "run_lasso", "saved_lasso"]


@dataclass(frozen=True)
class LassoPlan:
    """What to run: every problem by every system."""

    problems: tuple[str, ...]
    systems: tuple[str, ...]
    repeats: int
    seed: int
    threads: int

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.problems) * len(self.systems)


@dataclass
class LassoCell:
    """One system on one problem; ``status`` as of `bench.store.Cell`."""

    problem: str
    system: str
    status: str = "pending"
    detail: str = ""
    rows: int | None = None
    columns: int | None = None
    radii: int | None = None
    nonzeros: int | None = None  # the most at a radius
    forward_seconds: list[float] = field(default_factory=list)
    both_seconds: list[float] = field(default_factory=list)
    gap: float | None = None  # see `Penalised.gap`
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.problem}-{self.system}"

    @property
    def where(self) -> str:
        return f"{self.problem}: {self.system}"


def run_lasso(plan: LassoPlan, store: Store, report: Report) -> list[LassoCell]:
    """Finish every cell of the plan, saving each as it grows; returns all of them."""
    groups = _cells(plan, store)
    run_groups(groups, plan.repeats, store, report, lambda cell: _ready(plan, cell))
    return [cell for group in groups for cell in group]


def saved_lasso(plan: LassoPlan, store: Store) -> list[LassoCell]:
    """The cells of the plan as they are on disk, those never begun left out."""
    return [cell for group in _cells(plan, store) for cell in group if cell.status != "pending"]


def _cells(plan: LassoPlan, store: Store) -> list[list[LassoCell]]:
    """Those of each problem, as saved where that still holds."""
    return [
        [
            restored(store, LassoCell(problem, name, versions=SYSTEMS[name].versions()))
            for name in plan.systems
        ]
        for problem in plan.problems
    ]


def _ready(plan: LassoPlan, first: LassoCell) -> Callable[[LassoCell], Passes | None]:
    """What prepares the systems for the problem of a cell."""
    try:
        given = penalised(make(first.problem, plan.seed))
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        missing = error.name

        def absent(cell: LassoCell) -> None:
            cell.status, cell.detail = "missing", f"no data, not installed: {missing}"

        return absent
    return lambda cell: _prepare(cell, given)


def _prepare(cell: LassoCell, given: Penalised) -> Passes | None:
    system, problem = SYSTEMS[cell.system], given.problem
    cell.rows, cell.columns = problem.A.shape
    cell.radii = max(1, problem.radius.numel())

    def measure(x: Tensor, _: Tensor | None) -> None:
        cell.gap = given.gap(x)
        cell.nonzeros = int((x != 0).sum(-1).max())

    return prepared(cell, system, "", lambda: system.prepare(given), measure)
