"""The rivals on small problems, each told to be about as exact as the library where it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.bench.small.problems import Ball, Bounds, Problem
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Setting, load
from dfwlayer_bench.systems.jaxopt import value_and_gradient

__all__ = ["jax_passes", "prepare_daqp", "prepare_jaxopt", "prepare_proxqp", "prepare_qpax"]

Solve = Callable[..., Any]  # of JAX arrays, for one problem


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
    return jax_passes(problem, x_of, parameters, settings)


def _jax_projection(given: Ball | Bounds) -> tuple[Solve, tuple[Tensor, ...]]:
    """The projection of (y, parameter), and that parameter where problems have their own.

    All are jaxopt's but the one for bounds and a total, which finds its shift to 1e-5 only.
    """
    projection = load("jaxopt").projection
    if isinstance(given, Ball):
        ball = projection.projection_l1_ball if given.p == 1 else projection.projection_l2_ball
        return ball, (given.radius,)
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


def prepare_qpax(problem: Problem) -> Passes:
    """Interior point, gradients of the problem relaxed by κ, as small as the tolerance of x.

    κ = 1e-10, as gradients at a vertex can be NaN with 1e-12.

    At most 64 problems are mapped at once: with 128 of 50 variables and an equation, what XLA
    makes of it on 2 cores never returns.
    """
    jnp, primal = load("jax").numpy, load("qpax").solve_qp_primal
    tol = kappa = 1e-10
    bounds, n = _bounds(problem), problem.n
    eye = np.eye(n)
    rows, limits = [-eye], [np.full(n, -bounds.lower)]
    if not math.isinf(bounds.upper):
        rows, limits = [*rows, eye], [*limits, np.full(n, bounds.upper)]
    equations = 0 if bounds.total is None else 1
    data = np.ones((equations, n)), np.full(equations, bounds.total or 0.0)
    constants = (*data, np.concatenate(rows), np.concatenate(limits))

    def x_of(q: Any, P: Any) -> Any:
        A, b, G, h = (jnp.asarray(array) for array in constants)
        return primal(P, q, A, b, G, h, solver_tol=tol, target_kappa=kappa)

    settings: dict[str, Setting] = {"solver_tol": tol, "target_kappa": kappa, "at_once": 64}
    return jax_passes(problem, x_of, (), settings, at_once=64)


def jax_passes(
    problem: Problem,
    x_of: Solve,
    parameters: tuple[Tensor, ...],
    settings: dict[str, Setting],
    at_once: int | None = None,
) -> Passes:
    """Mapped over the batch if there is one, all of it or so many ``at_once``, and compiled."""
    jax = load("jax")

    def mapped(function: Solve) -> Solve:
        if at_once is None or len(problem.q) <= at_once:
            return cast("Solve", jax.vmap(function))
        return lambda *batches: jax.lax.map(
            lambda given: function(*given), batches, batch_size=at_once
        )

    def functional(q: Any, v: Any, P: Any, *rest: Any) -> tuple[Any, Any]:
        x = x_of(q, P, *rest)
        return v @ x, x

    solve, differentiate = x_of, jax.value_and_grad(functional, has_aux=True)
    if problem.batched:
        solve, differentiate = mapped(solve), mapped(differentiate)
    solve, differentiate = jax.jit(solve), jax.jit(differentiate)
    wide = partial(jax.enable_x64, True)
    with wide():
        given = (problem.P, problem.q, problem.v, *parameters)
        P, q, v, *rest = (jax.numpy.asarray(tensor.numpy()) for tensor in given)

    def forward() -> Tensor:
        with wide():
            return _tensor(jax.block_until_ready(solve(q, P, *rest)))

    def both() -> tuple[Tensor, Tensor]:
        with wide():
            (_, x), gradient = jax.block_until_ready(differentiate(q, v, P, *rest))
        return _tensor(x), _tensor(gradient)

    forward(), both()
    return Passes(forward, both, settings)


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))


def prepare_proxqp(problem: Problem) -> Passes:
    """QPLayer, the bounds as rows; one problem after the other inside, as is its default."""
    eps, eps_backward = 1e-9, 1e-9
    solve = load("proxsuite.torch.qplayer").QPFunction(eps=eps, eps_backward=eps_backward)
    bounds, n = _bounds(problem), problem.n
    like = problem.q.new_ones(n)
    # 1e20 and beyond is what it takes for no bound at all
    lower, upper = like * bounds.lower, (like * bounds.upper).clamp_max(1e20)
    A = b = like.new_empty(0)
    if bounds.total is not None:
        A, b = like.unsqueeze(0), like.new_tensor([bounds.total])
    G = torch.eye(n, dtype=like.dtype)

    def x_of(q: Tensor) -> Tensor:
        found: Tensor = solve(problem.P, q, A, b, G, lower, upper)[0]
        return found.view_as(q)

    settings: dict[str, Setting] = {"eps": eps, "eps_backward": eps_backward}
    return Passes.of(x_of, problem.q, problem.value, settings)


def prepare_daqp(problem: Problem) -> Passes:
    """A dual active-set method in C, one problem after the other; it has no gradients."""
    solve = load("daqp").solve
    bounds, n = _bounds(problem), problem.n
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


def _bounds(problem: Problem) -> Bounds:
    if not isinstance(problem.set, Bounds):
        raise TypeError("only for sets of bounds and a total")
    return problem.set
