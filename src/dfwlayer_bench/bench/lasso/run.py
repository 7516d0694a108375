"""The cells of the lasso suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError

from torch import Tensor

from dfwlayer_bench.bench.lasso.problems import Penalised, make, penalised
from dfwlayer_bench.bench.lasso.systems import SYSTEMS
from dfwlayer_bench.bench.turns import NamedCell, Passes, no_problem, prepared
from dfwlayer_bench.systems.base import absent

__all__ = ["LassoCell", "ready"]


@dataclass
class LassoCell(NamedCell):
    """One system on one problem."""

    rows: int | None = None
    columns: int | None = None
    radii: int | None = None
    nonzeros: int | None = None  # the most at a radius
    gap: float | None = None  # see `Penalised.gap`


def ready(seed: int, first: LassoCell) -> Callable[[LassoCell], Passes | None]:
    """What prepares the systems for the problem of a cell."""
    try:
        given = penalised(make(first.problem, seed))
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        return no_problem("missing", f"no data, {absent([error.name or 'its package'])}")
    return lambda cell: _prepare(cell, given)


def _prepare(cell: LassoCell, given: Penalised) -> Passes | None:
    system, problem = SYSTEMS[cell.system], given.problem
    cell.rows, cell.columns = problem.A.shape
    cell.radii = max(1, problem.radius.numel())

    def measure(x: Tensor, _: Tensor | None) -> None:
        cell.gap = given.gap(x)
        cell.nonzeros = int((x != 0).sum(-1).max())

    return prepared(cell, system, "", lambda: system.prepare(given), measure)
