"""The cells of the small suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from dfwlayer_bench.bench.turns import Passes, TimedCell, TimedPlan, no_problem, prepared
from dfwlayer_bench.systems.base import absent

__all__ = ["SmallCell", "SmallPlan", "ready"]


@dataclass(frozen=True, kw_only=True)
class SmallPlan(TimedPlan):
    """Every set with every size (problems, variables) by every system."""

    sets: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]

    def groups(self) -> list[tuple[Any, ...]]:
        """(set, problems, variables)."""
        return [(name, count, n) for count, n in self.sizes for name in self.sets]


@dataclass
class SmallCell(TimedCell):
    """One system on one set and size."""

    set: str
    count: int
    n: int
    error: float | None = None  # the largest of x, see `largest_error`
    gradient_error: float | None = None
    violation: float | None = None
    residual: float | None = None  # of the reference

    @property
    def given(self) -> str:
        return f"{self.set} {self.count}×{self.n}"


def ready(seed: int, first: SmallCell) -> Callable[[SmallCell], Passes | None]:
    """What prepares the systems for the problem of a cell."""
    try:
        problem = make(first.set, first.count, first.n, seed)
    except ModuleNotFoundError as error:
        return no_problem("missing", f"no data, {absent([error.name or 'its package'])}")
    except ValueError as error:
        return no_problem("unsupported", str(error))
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

    unsupported = "" if cell.set in system.sets else "takes " + ", ".join(system.sets)
    return prepared(cell, system, unsupported, lambda: system.prepare(problem), measure)
