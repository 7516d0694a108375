"""Rivals without gradients on quadratic programs with rows, one problem after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.systems.base import Passes, Setting, load
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = ["prepare_clarabel", "prepare_osqp", "prepare_piqp"]

EPS, TIGHT = 1e-9, 1e-12  # the latter where 1e-9 leaves errors of 1e-6 in x
Array = np.ndarray[Any, np.dtype[np.float64]]


def _passes(
    rows: Rows, solve: Callable[[Array, Array, Array], Array], settings: dict[str, Setting]
) -> Passes:
    """``solve`` finds x for one P, q and b."""
    q, b = (part.reshape(rows.count, -1).numpy() for part in rows.split(rows.data))
    P = rows.P.reshape(-1, rows.n, rows.n).numpy()

    def forward() -> Tensor:
        found = [solve(P[i % len(P)], q[i], b[i]) for i in range(len(q))]
        return torch.from_numpy(np.stack(found)).view_as(rows.q)

    return Passes(forward, None, settings)


def prepare_clarabel(rows: Rows) -> Passes:
    """Clarabel: interior point; equations first, then all inequalities as one cone."""
    clarabel, sparse = load("clarabel"), load("scipy.sparse")
    G, h = (part.numpy() for part in rows.one_sided())
    matrix = sparse.csc_matrix(np.concatenate([rows.A.numpy(), G]))
    cones = [clarabel.ZeroConeT(len(rows.A)), clarabel.NonnegativeConeT(len(G))]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = EPS

    def solve(P: Array, q: Array, b: Array) -> Array:
        upper, right = sparse.csc_matrix(np.triu(P)), np.concatenate([b, h])
        found = clarabel.DefaultSolver(upper, q, matrix, right, cones, settings).solve()
        return _checked(found.x, str(found.status), "Solved")

    return _passes(rows, solve, {"tol_gap": EPS, "tol_feas": EPS})


def prepare_piqp(rows: Rows) -> Passes:
    """PIQP, dense: interior point; set up anew for every problem."""
    piqp = load("piqp")
    A, G, low, high = (part.numpy() for part in (rows.A, rows.G, rows.low, rows.high))

    def solve(P: Array, q: Array, b: Array) -> Array:
        solver = piqp.DenseSolver()
        solver.settings.eps_abs, solver.settings.eps_rel = TIGHT, 0.0
        solver.settings.eps_duality_gap_abs = TIGHT
        solver.setup(P, q, A, b, G, low, high)
        status = solver.solve()
        return _checked(solver.result.x, status.name, "PIQP_SOLVED")

    return _passes(
        rows, solve, {"eps_abs": TIGHT, "eps_duality_gap_abs": TIGHT, "backend": "dense"}
    )


def prepare_osqp(rows: Rows) -> Passes:
    """OSQP: operator splitting, polished; set up anew for every problem."""
    osqp, sparse = load("osqp"), load("scipy.sparse")
    matrix = sparse.csc_matrix(np.concatenate([rows.A.numpy(), rows.G.numpy()]))
    low, high = rows.low.numpy(), rows.high.numpy()
    told: dict[str, Setting] = {
        "eps_abs": EPS,
        "eps_rel": EPS,
        "max_iter": 20_000,
        "polishing": True,
    }

    def solve(P: Array, q: Array, b: Array) -> Array:
        solver = osqp.OSQP()
        upper = sparse.csc_matrix(np.triu(P))
        sides = np.concatenate([b, low]), np.concatenate([b, high])
        solver.setup(upper, q, matrix, *sides, verbose=False, **told)
        found = solver.solve(raise_error=False)
        return _checked(found.x, found.info.status, "solved")

    return _passes(rows, solve, told)


def _checked(x: Any, status: str, good: str) -> Array:
    """x, unless the solver says that it is none."""
    if status != good:
        raise RuntimeError(status)
    return np.array(x)
