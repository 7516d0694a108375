"""Rivals in JAX: mapped over the batch, jitted, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.systems.base import Passes, Setting, load
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = ["Solve", "jax_passes", "prepare_qpax", "to_tensor", "wide"]

Solve = Callable[..., Any]  # of JAX arrays, for one problem
AT_ONCE = 64


def wide() -> Any:
    """The context in which JAX has float64."""
    return load("jax").enable_x64(True)


def prepare_qpax(rows: Rows) -> Passes:
    """Interior point, gradients of the problem relaxed by κ, as small as the tolerance of x.

    κ = 1e-10, as gradients at a vertex can be NaN with 1e-12.

    At most 64 problems are mapped at once: with 128 of 50 variables and an equation, what XLA
    makes of it on 2 cores never returns.
    """
    jnp, primal = load("jax").numpy, load("qpax").solve_qp_primal
    tol = kappa = 1e-10
    own = rows.P.dim() == 3 or not rows.batched  # a P for each problem
    constants = [part.numpy() for part in (rows.A, *rows.one_sided(), rows.P, rows.b, rows.q)]

    def x_of(data: Any, *more: Any) -> Any:
        A, G, h, P, b, q = (jnp.asarray(array) for array in constants)
        given = [data, b] if rows.given == "q" else [q, data]
        if rows.given == "b" and rows.batched:
            given[0] = more[-1]
        return primal(
            more[0] if own else P, given[0], A, given[1], G, h, solver_tol=tol, target_kappa=kappa
        )

    rest = [rows.P] if own else []
    if rows.given == "b" and rows.batched:
        rest.append(rows.q)
    settings: dict[str, Setting] = {"solver_tol": tol, "target_kappa": kappa, "at_once": AT_ONCE}
    return jax_passes(x_of, rows.data, rows.v, tuple(rest), settings, at_once=AT_ONCE)


def jax_passes(
    x_of: Solve,
    data: Tensor,  # (..., k), what is differentiated in
    v: Tensor,  # (..., n)
    rest: tuple[Tensor, ...],  # further arguments, each with the batch in front
    settings: dict[str, Setting],
    at_once: int | None = None,
) -> Passes:
    """Mapped over the batch if there is one, all of it or so many ``at_once``, and compiled."""
    jax = load("jax")

    def mapped(function: Solve) -> Solve:
        if at_once is None or len(data) <= at_once:
            return cast("Solve", jax.vmap(function))
        return lambda *batches: jax.lax.map(
            lambda given: function(*given), batches, batch_size=at_once
        )

    def functional(data: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
        x = x_of(data, *rest)
        return v @ x, x

    solve, differentiate = x_of, jax.value_and_grad(functional, has_aux=True)
    if data.dim() == 2:
        solve, differentiate = mapped(solve), mapped(differentiate)
    solve, differentiate = jax.jit(solve), jax.jit(differentiate)
    with wide():
        given, weights, *others = (jax.numpy.asarray(tensor.numpy()) for tensor in (data, v, *rest))

    def forward() -> Tensor:
        with wide():
            return to_tensor(jax.block_until_ready(solve(given, *others)))

    def both() -> tuple[Tensor, Tensor]:
        with wide():
            found = jax.block_until_ready(differentiate(given, weights, *others))
        (_, x), gradient = found
        return to_tensor(x), to_tensor(gradient)

    forward(), both()
    return Passes(forward, both, settings)


def to_tensor(array: Any) -> Tensor:
    """A JAX array as a tensor of its own."""
    return torch.from_numpy(np.array(array))
