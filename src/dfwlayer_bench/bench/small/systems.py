"""The systems compared on small problems, and the one signature they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import dfwlayer
from dfwlayer.engines import compiled
from dfwlayer_bench.bench.small import rivals
from dfwlayer_bench.bench.small.problems import SETS, Problem
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Packaged

__all__ = ["SYSTEMS", "SmallSystem"]


@dataclass(frozen=True)
class SmallSystem(Packaged):
    """One row of the registry.

    Attributes:
        name: What ``--systems`` accepts.
        label: What tables and figures print.
        prepare: Makes the passes ready; what it does (compiling, finding a step size, converting
            numbers) is not timed.
        packages: Distributions it needs beside torch.
        sets: The keys of ``SETS`` that it takes.

    """

    name: str
    label: str
    prepare: Callable[[Problem], Passes]
    packages: tuple[str, ...] = ()
    sets: tuple[str, ...] = tuple(SETS)


def prepare_compiled(problem: Problem) -> Passes:
    """The library as it comes; compiled beforehand."""
    if not dfwlayer.warm_up():
        raise RuntimeError("there is no compiled code without Numba")
    return _ours(problem, compiles=True)


def prepare_eager(problem: Problem) -> Passes:
    """The library with tensor operations alone."""
    return _ours(problem, compiles=False)


def _ours(problem: Problem, *, compiles: bool) -> Passes:
    constraint = problem.set.constraint()

    def x_of(q: Tensor) -> Tensor:
        with compiled.using(compiles):
            return dfwlayer.solve(dfwlayer.Quadratic(problem.P, q), constraint, tol=TOL).x

    def both() -> tuple[Tensor, Tensor]:
        q = problem.q.detach().requires_grad_()
        x = x_of(q)
        (gradient,) = torch.autograd.grad((problem.v * x).sum(), q)
        return x.detach(), gradient

    return Passes(lambda: x_of(problem.q), both, {"tol": TOL, "compiled": compiles})


TOL = 1e-12  # of the gap, relative to f
POLYHEDRA = ("box", "simplex", "capped-simplex")

SYSTEMS: dict[str, SmallSystem] = {
    system.name: system
    for system in (
        SmallSystem("dfwlayer", "dfwlayer", prepare_compiled, ("numba",)),
        SmallSystem("dfwlayer-eager", "dfwlayer, not compiled", prepare_eager),
        SmallSystem("jaxopt", "jaxopt", rivals.prepare_jaxopt, ("jaxopt", "jax")),
        SmallSystem("qpax", "qpax", rivals.prepare_qpax, ("qpax", "jax"), POLYHEDRA),
        SmallSystem(
            "proxqp", "QPLayer (proxsuite)", rivals.prepare_proxqp, ("proxsuite",), POLYHEDRA
        ),
        SmallSystem("daqp", "DAQP, forward only", rivals.prepare_daqp, ("daqp",), POLYHEDRA),
    )
}
