"""jaxopt's projected gradient: accelerated, step 1/L given, compiled, implicit gradient.

jaxopt's own projection onto the ℓ1 ball has no weights, so a weighted one by sorting is passed in.
ProjectedGradient is a wrapper of ProximalGradient that drops ``implicit_diff_solve``; the latter
is used directly so that the linear solver can be chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready, Setting, load

__all__ = ["prepare_jaxopt", "value_and_gradient"]

MAX_STEPS = 3000
GRID = (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # tolerances, relative to ‖q‖


def prepare_jaxopt(problem: Instance) -> Ready:
    """The problem's dtype where the method gets somewhere in it, float64 otherwise.

    L is the largest eigenvalue. The tolerance is the smallest of a grid that the method reaches
    on this very problem, so that it neither stops early nor runs to its cap for nothing. None of
    this is timed.
    """
    ready = _prepare(problem, problem.dtype)
    if ready is None and problem.dtype != torch.float64:
        ready = _prepare(problem, torch.float64)
    if ready is None:
        raise RuntimeError(f"no tolerance of the grid was reached within {MAX_STEPS} steps")
    return ready


def _prepare(problem: Instance, dtype: torch.dtype) -> Ready | None:
    jax, jaxopt = load("jax"), load("jaxopt")
    wide = dtype == torch.float64
    high = float(torch.linalg.eigvalsh(problem.P.double())[-1])
    size = float(problem.q.double().norm())
    with jax.enable_x64(wide):
        data = [problem.P, problem.q, problem.w, problem.t, problem.v]
        P, q, w, t, v = (jax.numpy.asarray(tensor.to(dtype).cpu().numpy()) for tensor in data)
        solver = partial(
            jaxopt.ProximalGradient,
            fun=value_and_gradient,
            prox=_Projection(jax),
            value_and_grad=True,
            stepsize=1 / high,
            maxiter=MAX_STEPS,
            implicit_diff_solve=partial(
                jaxopt.linear_solve.solve_bicgstab, tol=1e-10 if wide else 1e-6, maxiter=1000
            ),
        )
        reached = _history(jax, solver(tol=0.0), (w, t), P, q)
        floor = 1e-10 if wide else 1e-6
        usable = [e for e in GRID if e >= floor and reached <= e * size]
        if not usable:
            return None
        run = solver(tol=usable[0] * size).run

        def functional(q: Any, P: Any, w: Any, t: Any, v: Any) -> tuple[Any, Any]:
            found = run(jax.numpy.zeros_like(q), (w, t), P, q)
            return v @ found.params, found.params

        both = jax.jit(jax.value_and_grad(functional, has_aux=True))

        def call() -> Answer:
            with jax.enable_x64(wide):
                (_, x), gradient = jax.block_until_ready(both(q, P, w, t, v))
            return Answer(_tensor(x), _tensor(gradient))

        call()
    settings: dict[str, Setting] = {
        "step": "1/L",
        "acceleration": True,
        "tol": float(f"{usable[0] * size:.3g}"),
        "max_steps": MAX_STEPS,
        "gradient": "implicit, bicgstab",
        "dtype": str(dtype).removeprefix("torch."),
    }
    return Ready(call, settings)


def _history(jax: Any, solver: Any, ball: tuple[Any, Any], P: Any, q: Any) -> float:
    """The smallest error seen in a whole run."""

    def step(carry: Any, _: Any) -> tuple[Any, Any]:
        params, state = carry
        params, state = solver.update(params, state, ball, P, q)
        return (params, state), state.error

    def errors(q: Any) -> Any:
        start = jax.numpy.zeros_like(q)
        begin = (start, solver.init_state(start, ball, P, q))
        return jax.lax.scan(step, begin, None, length=MAX_STEPS)[1]

    return float(jax.numpy.nanmin(jax.jit(errors)(q)))


def value_and_gradient(x: Any, P: Any, q: Any) -> tuple[Any, Any]:
    """f and ∇f by one product with P."""
    product = P @ x
    return 0.5 * x @ product + q @ x, product + q


class _Projection:
    """Projection onto ‖w ∘ x‖₁ ≤ t by sorting the kinks |y|/w, traceable and differentiable."""

    def __init__(self, jax: Any) -> None:
        self.np = jax.numpy

    def __call__(self, y: Any, ball: tuple[Any, Any], scaling: float = 1.0) -> Any:
        w, t = ball
        size = self.np.abs(y)
        order = self.np.argsort(-size / w)
        weights, sizes = w[order], size[order]
        levels = (self.np.cumsum(weights * sizes) - t) / self.np.cumsum(weights * weights)
        last = self.np.sum(sizes / weights > levels) - 1
        level = self.np.maximum(levels[last], 0)
        return self.np.sign(y) * self.np.maximum(size - level * w, 0)


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))
