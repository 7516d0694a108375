"""The rivals on small problems that know their sets; those that take rows are in `systems.rows`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.bench.small.problems import (
    Ball,
    Bounds,
    Problem,
    Turnover,
    bounds_of,
    rows_of,
)
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Setting, load
from dfwlayer_bench.systems.jaxopt import value_and_gradient
from dfwlayer_bench.systems.rows.from_jax import Solve, jax_passes

__all__ = ["prepare_daqp", "prepare_jaxopt"]


def prepare_jaxopt(problem: Problem) -> Passes:
    """Projected gradient with the step 1/L and the implicit gradient.

    L is the largest eigenvalue of the batch. ProjectedGradient is a wrapper of ProximalGradient
    that drops ``implicit_diff_solve``; the latter is used directly, to solve for the gradient by
    LU, an exact solve at this size. Without acceleration, which rarely saves time on these
    problems; with it, two steps in a row that end in the same corner of a set are taken for the
    end, however far that is.
    """
    jaxopt = load("jaxopt")
    high = float(torch.linalg.eigvalsh(problem.P)[..., -1].max())
    tol, max_steps = 1e-10, 3000
    project, parameters = _jax_projection(problem.set)
    solver = jaxopt.ProximalGradient(
        fun=value_and_gradient,
        prox=lambda y, parameter, _=1.0: project(y, parameter),
        value_and_grad=True,
        stepsize=1 / high,
        acceleration=False,
        tol=tol,
        maxiter=max_steps,
        implicit_diff_solve=jaxopt.linear_solve.solve_lu,
    )

    def x_of(q: Any, P: Any, *parameter: Any) -> Any:
        return solver.run(0 * q, parameter[0] if parameter else None, P, q).params

    settings: dict[str, Setting] = {
        "step": "1/L",
        "acceleration": False,
        "tol": tol,
        "max_steps": max_steps,
        "gradient": "implicit, LU",
    }
    return jax_passes(x_of, problem.q, problem.v, (problem.P, *parameters), settings)


def _jax_projection(given: Ball | Bounds | Turnover) -> tuple[Solve, tuple[Tensor, ...]]:
    """The projection of (y, parameter), and that parameter where problems have their own.

    All are jaxopt's but the one for bounds and a total, which finds its shift to 1e-5 only.
    """
    projection = load("jaxopt").projection
    if isinstance(given, Ball):
        ball = projection.projection_l1_ball if given.p == 1 else projection.projection_l2_ball
        return ball, (given.radius,)
    if isinstance(given, Turnover):
        raise TypeError("there is no projection onto such a set")
    lower, upper, total = given.lower, given.upper, given.total
    if total is None:
        return lambda y, _: projection.projection_box(y, (lower, upper)), ()
    if math.isinf(upper):
        return lambda y, _: projection.projection_simplex(y, total), ()
    jnp = load("jax").numpy

    def section(y: Any, _: Any) -> Any:
        # the sum of clip(y − shift) falls with the shift, linearly between these kinks
        kinks = jnp.concatenate([y - lower, y - upper])
        enough = jnp.clip(y - kinks[:, None], lower, upper).sum(1) >= total
        left = jnp.where(enough, kinks, -jnp.inf).max()
        right = jnp.where(enough, jnp.inf, kinks).min()
        moved = y - (left + right) / 2
        free = (moved > lower) & (moved < upper)
        fixed = jnp.where(free, 0, jnp.where(moved >= upper, upper, lower)).sum()
        shift = (jnp.where(free, y, 0).sum() + fixed - total) / jnp.maximum(free.sum(), 1)
        return jnp.clip(y - shift, lower, upper)

    return section, ()


def prepare_daqp(problem: Problem) -> Passes:
    """A dual active-set method in C, one problem after the other; it has no gradients."""
    if isinstance(problem.set, Turnover):
        return _daqp_on_rows(problem)
    solve = load("daqp").solve
    bounds, n = bounds_of(problem), problem.n
    lower, upper = np.full(n, bounds.lower), np.full(n, min(bounds.upper, 1e30))
    A, sense = np.zeros((0, n)), np.zeros(n, dtype=np.intc)
    if bounds.total is not None:
        equal = 5  # its code for an equation
        A, sense = np.ones((1, n)), np.append(sense, np.intc(equal))
        lower, upper = np.append(lower, bounds.total), np.append(upper, bounds.total)
    P, q = problem.P.reshape(-1, n, n).numpy(), problem.q.reshape(-1, n).numpy()

    def forward() -> Tensor:
        found = np.empty_like(q)
        for i in range(len(q)):
            found[i], _, flag, _ = solve(P[i], q[i], A, upper, lower, sense)
            if flag != 1:
                raise RuntimeError(f"exit flag {flag}")
        return torch.from_numpy(found).view_as(problem.q)

    return Passes(forward, None, {"primal_tol": 1e-6})


def _daqp_on_rows(problem: Problem) -> Passes:
    """The same with all rows, by proximal steps, as P is singular in what changes hands."""
    solve, rows, n = load("daqp").solve, rows_of(problem), problem.n
    A = torch.cat([rows.G, rows.A]).numpy()
    low, high = (torch.cat([side, rows.b]) for side in (rows.low, rows.high))
    lower, upper = low.clamp_min(-1e30).numpy(), high.clamp_max(1e30).numpy()
    sense = np.array([0] * len(rows.G) + [5] * len(rows.A), dtype=np.intc)
    P, q = rows.P.reshape(-1, rows.n, rows.n).numpy(), rows.q.reshape(-1, rows.n).numpy()
    prox = 1e-6

    def forward() -> Tensor:
        found = np.empty((len(q), n))
        for i in range(len(q)):
            x, _, flag, _ = solve(P[i], q[i], A, upper, lower, sense, eps_prox=prox)
            if flag != 1:
                raise RuntimeError(f"exit flag {flag}")
            found[i] = x[:n]
        return torch.from_numpy(found).view_as(problem.q)

    return Passes(forward, None, {"primal_tol": 1e-6, "eps_prox": prox})
