"""Running the cells of the small suite: the same problems, one process, the systems in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dfwlayer_bench.bench.small.problems import (
    Problem,
    Reference,
    largest_error,
    make,
    reference_of,
)
from dfwlayer_bench.bench.small.systems import SYSTEMS
from dfwlayer_bench.bench.store import Store
from dfwlayer_bench.bench.turns import Passes, prepared, restored, run_groups
from dfwlayer_bench.report.progress import Report

__all__ = ["SmallCell", "SmallPlan", "run_small", "saved_small"]


@dataclass(frozen=True)
class SmallPlan:
    """What to run: every set with every size (problems, variables) by every system."""

    sets: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    systems: tuple[str, ...]
    repeats: int
    seed: int
    threads: int

    def groups(self) -> list[tuple[str, int, int]]:
        """(set, problems, variables)."""
        return [(name, count, n) for count, n in self.sizes for name in self.sets]

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.groups()) * len(self.systems)


@dataclass
class SmallCell:
    """One system on one set and size; ``status`` as of `bench.store.Cell`."""

    set: str
    count: int
    n: int
    system: str
    status: str = "pending"
    detail: str = ""
    forward_seconds: list[float] = field(default_factory=list)
    both_seconds: list[float] = field(default_factory=list)
    error: float | None = None  # the largest of x, see `largest_error`
    gradient_error: float | None = None
    violation: float | None = None
    residual: float | None = None  # of the reference
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.set}-{self.count}x{self.n}-{self.system}"

    @property
    def where(self) -> str:
        return f"{self.set} {self.count}×{self.n}: {self.system}"


def run_small(plan: SmallPlan, store: Store, report: Report) -> list[SmallCell]:
    """Finish every cell of the plan, saving each as it grows; returns all of them."""
    groups = _cells(plan, store)
    run_groups(groups, plan.repeats, store, report, lambda cell: _ready(plan, cell))
    return [cell for group in groups for cell in group]


def saved_small(plan: SmallPlan, store: Store) -> list[SmallCell]:
    """The cells of the plan as they are on disk, those never begun left out."""
    return [cell for group in _cells(plan, store) for cell in group if cell.status != "pending"]


def _cells(plan: SmallPlan, store: Store) -> list[list[SmallCell]]:
    """Those of each set and size, as saved where that still holds."""
    return [
        [
            restored(store, SmallCell(*group, name, versions=SYSTEMS[name].versions()))
            for name in plan.systems
        ]
        for group in plan.groups()
    ]


def _ready(plan: SmallPlan, first: SmallCell) -> Callable[[SmallCell], Passes | None]:
    """What prepares the systems for the problem of a cell."""
    problem = make(first.set, first.count, first.n, plan.seed)
    reference = reference_of(problem)
    return lambda cell: _prepare(cell, problem, reference)


def _prepare(cell: SmallCell, problem: Problem, reference: Reference) -> Passes | None:
    system = SYSTEMS[cell.system]

    def measure(x: Tensor, gradient: Tensor | None) -> None:
        cell.residual = reference.residual
        cell.error = largest_error(x, reference.x)
        cell.violation = problem.set.violation(x)
        if gradient is not None:
            cell.gradient_error = largest_error(gradient, reference.gradient)

    unsupported = "" if cell.set in system.sets else "no such set"
    return prepared(cell, system, unsupported, lambda: system.prepare(problem), measure)
