"""The rivals on collected quadratic programs, each as its authors call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.bench.qp.problems import Array, Collected
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Setting, load

__all__ = [
    "Said",
    "is_thin",
    "prepare_clarabel",
    "prepare_daqp",
    "prepare_osqp",
    "prepare_piqp",
    "prepare_proxqp",
]

EPS = 1e-9  # that every one is asked for
THIN = 0.1  # share of entries up to which matrices are handed over as sparse ones
FAR = 1e20  # what ProxQP takes for no bound at all
MOST = 1000  # iterations
STEPS = 100_000  # of OSQP, whose steps cost little


@dataclass
class Said:
    """What a solver says of its last answer."""

    answer: str = ""
    gap: float | None = None  # f(x) − f* is no more, where that is proven


def prepare_proxqp(problem: Collected, said: Said) -> Passes:
    """ProxQP, its sparse backend for matrices that are; bounds are rows."""
    proxqp = load("proxsuite").proxqp
    rows, low, high = _two_sided(problem)
    sparse = is_thin(problem)
    module = proxqp.sparse if sparse else proxqp.dense
    P, A, C = (_matrix(part, sparse) for part in (problem.P, problem.A, rows))
    settings = {"eps_abs": EPS, "eps_rel": 0.0, "max_iter": MOST}

    def forward() -> Tensor:
        found = module.solve(P, problem.q, A, problem.b, C, low, high, **settings)
        return _answer(said, found.x, found.info.status.name, "PROXQP_SOLVED")

    return Passes(forward, None, {**settings, "backend": "sparse" if sparse else "dense"})


def prepare_piqp(problem: Collected, said: Said) -> Passes:
    """PIQP, its sparse solver for matrices that are."""
    piqp = load("piqp")
    sparse = is_thin(problem)
    P, A, G = (_matrix(part, sparse) for part in (problem.P, problem.A, problem.G))
    low = np.full_like(problem.h, -np.inf)

    def forward() -> Tensor:
        solver = piqp.SparseSolver() if sparse else piqp.DenseSolver()
        solver.settings.eps_abs, solver.settings.eps_rel = EPS, 0.0
        solver.setup(P, problem.q, A, problem.b, G, low, problem.h, problem.lower, problem.upper)
        status = solver.solve()
        return _answer(said, solver.result.x, status.name, "PIQP_SOLVED")

    return Passes(forward, None, {"eps_abs": EPS, "backend": "sparse" if sparse else "dense"})


def prepare_daqp(problem: Collected, said: Said) -> Passes:
    """A dual active-set method, dense; a P that is singular is regularised by itself."""
    solve = load("daqp").solve
    rows = np.ascontiguousarray(np.concatenate((problem.G, problem.A)))
    low = np.concatenate((problem.lower, np.full_like(problem.h, -np.inf), problem.b))
    high = np.concatenate((problem.upper, problem.h, problem.b))
    low, high = np.maximum(low, -1e30), np.minimum(high, 1e30)
    sense = np.zeros(len(low), dtype=np.intc)
    sense[low == high] = 5  # its code for an equation

    def forward() -> Tensor:
        x, _, flag, _ = solve(
            problem.P, problem.q, rows, high, low, sense.copy(), primal_tol=EPS, eps_prox=-1.0
        )
        return _answer(said, x, str(flag), "1")

    return Passes(forward, None, {"primal_tol": EPS, "eps_prox": -1.0})


def prepare_clarabel(problem: Collected, said: Said) -> Passes:
    """Clarabel, always sparse; equations first, then all inequalities as one cone."""
    clarabel, sparse = load("clarabel"), load("scipy.sparse")
    eye = np.eye(len(problem.q))
    above, below = np.isfinite(problem.upper), np.isfinite(problem.lower)
    rows = (problem.A, problem.G, eye[above], -eye[below])
    limits = (problem.b, problem.h, problem.upper[above], -problem.lower[below])
    A, b = sparse.csc_matrix(np.concatenate(rows)), np.concatenate(limits)
    P = sparse.csc_matrix(np.triu(problem.P))
    equations = len(problem.b)
    cones = [clarabel.ZeroConeT(equations), clarabel.NonnegativeConeT(len(b) - equations)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = EPS

    def forward() -> Tensor:
        found = clarabel.DefaultSolver(P, problem.q, A, b, cones, settings).solve()
        return _answer(said, np.array(found.x), str(found.status), "Solved")

    return Passes(forward, None, {"tol_gap": EPS, "tol_feas": EPS})


def prepare_osqp(problem: Collected, said: Said) -> Passes:
    """OSQP, always sparse, polished; bounds are rows."""
    osqp, sparse = load("osqp"), load("scipy.sparse")
    rows, low, high = _two_sided(problem)
    matrix = sparse.csc_matrix(np.concatenate((problem.A, rows)))
    sides = np.concatenate((problem.b, low)), np.concatenate((problem.b, high))
    P = sparse.csc_matrix(np.triu(problem.P))
    settings: dict[str, Setting] = {"eps_abs": EPS, "eps_rel": 0.0, "polishing": True}
    settings["max_iter"] = STEPS

    def forward() -> Tensor:
        solver = osqp.OSQP()
        solver.setup(P, problem.q, matrix, *sides, verbose=False, **settings)
        found = solver.solve(raise_error=False)
        return _answer(said, found.x, found.info.status, "solved")

    return Passes(forward, None, settings)


def _answer(said: Said, x: Array, status: str, good: str) -> Tensor:
    """x, unless the solver says that it is none."""
    said.answer = status
    if status != good:
        raise RuntimeError(status)
    return torch.from_numpy(np.array(x))


def _two_sided(problem: Collected) -> tuple[Array, Array, Array]:
    """Rows and bounds as one list l ≤ C x ≤ u."""
    counts = np.isfinite(problem.lower) | np.isfinite(problem.upper)
    rows = np.concatenate((problem.G, np.eye(len(problem.q))[counts]))
    low = np.concatenate((np.full_like(problem.h, -FAR), problem.lower[counts]))
    high = np.concatenate((problem.h, problem.upper[counts]))
    return rows, np.maximum(low, -FAR), np.minimum(high, FAR)


def is_thin(problem: Collected) -> bool:
    """Whether most entries are zero."""
    parts = (problem.P, problem.G, problem.A)
    filled = sum(int(np.count_nonzero(part)) for part in parts)
    return filled < THIN * sum(part.size for part in parts)


def _matrix(part: Array, sparse: bool) -> Any:
    return load("scipy.sparse").csc_matrix(part) if sparse else part
