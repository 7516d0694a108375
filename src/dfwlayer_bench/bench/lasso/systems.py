"""The systems compared on sparse least squares, and the one signature they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import dfwlayer
from dfwlayer.engines import compiled
from dfwlayer_bench.bench.lasso import rivals
from dfwlayer_bench.bench.lasso.problems import Penalised
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Packaged

__all__ = ["SYSTEMS", "LassoSystem"]

TOL = 1e-10  # of the gap, relative to f


@dataclass(frozen=True)
class LassoSystem(Packaged):
    """One row of the registry.

    Attributes:
        name: What ``--systems`` accepts.
        label: What tables and figures print.
        prepare: Makes the passes ready; what it does (compiling, converting A) is not timed.
        packages: Distributions it needs beside torch.

    """

    name: str
    label: str
    prepare: Callable[[Penalised], Passes]
    packages: tuple[str, ...] = ()


def prepare_compiled(given: Penalised) -> Passes:
    """The library as it comes; compiled beforehand."""
    if not dfwlayer.warm_up():
        raise RuntimeError("there is no compiled code without Numba")
    return _ours(given, compiles=True)


def prepare_eager(given: Penalised) -> Passes:
    """The library with tensor operations alone."""
    return _ours(given, compiles=False)


def _ours(given: Penalised, *, compiles: bool) -> Passes:
    problem = given.problem
    ball = dfwlayer.LpBall(1, problem.radius)

    def x_of(b: Tensor) -> Tensor:
        with compiled.using(compiles):
            return dfwlayer.solve(dfwlayer.LeastSquares(problem.A, b), ball, tol=TOL).x

    def both() -> tuple[Tensor, Tensor]:
        b = problem.b.detach().requires_grad_()
        x = x_of(b)
        (gradient,) = torch.autograd.grad(x.sum(), b)
        return x.detach(), gradient

    return Passes(lambda: x_of(problem.b), both, {"tol": TOL, "compiled": compiles})


SYSTEMS: dict[str, LassoSystem] = {
    system.name: system
    for system in (
        LassoSystem("dfwlayer", "dfwlayer", prepare_compiled, ("numba",)),
        LassoSystem("dfwlayer-eager", "dfwlayer, not compiled", prepare_eager),
        LassoSystem("celer", "celer", rivals.prepare_celer, ("celer",)),
        LassoSystem("skglm", "skglm", rivals.prepare_skglm, ("skglm",)),
        LassoSystem("adelie", "adelie", rivals.prepare_adelie, ("adelie",)),
        LassoSystem("spgl1", "SPGL1", rivals.prepare_spgl1, ("spgl1",)),
        LassoSystem("sklearn", "scikit-learn", rivals.prepare_sklearn, ("scikit-learn",)),
    )
}
