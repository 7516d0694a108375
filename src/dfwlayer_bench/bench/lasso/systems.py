"""The systems compared on sparse least squares, and the one signature they share."""

from __future__ import annotations

from torch import Tensor

import dfwlayer
from dfwlayer_bench.bench.lasso import rivals
from dfwlayer_bench.bench.lasso.problems import Penalised
from dfwlayer_bench.bench.ours import compiled_ahead, not_compiled
from dfwlayer_bench.bench.turns import Passes, TimedSystem

__all__ = ["SYSTEMS"]

TOL = 1e-10  # of the gap, relative to f


def _ours(given: Penalised) -> Passes:
    problem = given.problem
    ball = dfwlayer.LpBall(1, problem.radius)

    def x_of(b: Tensor) -> Tensor:
        return dfwlayer.solve(dfwlayer.LeastSquares(problem.A, b), ball, tol=TOL).x

    return Passes.of(x_of, problem.b, Tensor.sum, {"tol": TOL})


SYSTEMS: dict[str, TimedSystem[Penalised]] = {
    system.name: system
    for system in (
        TimedSystem("dfwlayer", "dfwlayer", compiled_ahead(_ours), ("numba",)),
        TimedSystem("dfwlayer-eager", "dfwlayer, not compiled", not_compiled(_ours)),
        TimedSystem("celer", "celer", rivals.prepare_celer, ("celer",)),
        TimedSystem("skglm", "skglm", rivals.prepare_skglm, ("skglm",)),
        TimedSystem("adelie", "adelie", rivals.prepare_adelie, ("adelie",)),
        TimedSystem("spgl1", "SPGL1", rivals.prepare_spgl1, ("spgl1",)),
        TimedSystem("sklearn", "scikit-learn", rivals.prepare_sklearn, ("scikit-learn",)),
    )
}
