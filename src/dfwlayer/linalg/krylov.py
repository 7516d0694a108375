"""Conjugate gradients for a batch of systems, each of which stops on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.subspaces import Orthogonal, Tangent
from dfwlayer.ops import fused
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    absolute,
    any_row,
    axpy,
    fill,
    inner,
    interval,
    maximum,
    minimum,
    ratio,
    select,
    select_mask,
)

__all__ = ["Krylov", "conjugate_gradient"]


class Krylov(NamedTuple):
    """What conjugate gradients found."""

    u: Tensor  # (..., n)
    flat: Mask  # a descent direction without curvature was met: the model has no minimum
    steps: Scalar  # products each row took
    steepest: Scalar  # largest and
    flattest: Scalar  # least Rayleigh quotient met, in the preconditioner's norm
    unfinished: Mask  # the steps were not enough


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor],
    rhs: Tensor,  # (..., n)
    *,
    tol: float,
    max_steps: int,
    cap: Scalar | None = None,
    subspace: Tangent | Orthogonal | None = None,
    precondition: Callable[[Tensor], Tensor] | None = None,
    stop: Callable[[Tensor], Mask] | None = None,
    ask: int = 8,
    floor: Scalar = 0.0,
) -> Krylov:
    """Solve the positive semi-definite systems matvec(u) = rhs to ‖residual‖ ≤ tol · ‖rhs‖.

    A residual below ``floor`` is rounding and will do as well. The system may be restricted to a
    subspace, which ``precondition`` maps to itself; the norm is the preconditioner's. Each row
    stops on its own, also where it meets a direction without curvature, so that a singular
    system gives the finite solution found in its range, and where ``stop``, asked after ``ask``
    steps and ever more rarely then, tells from u that it has gone far enough. ``cap`` is a
    limit for each row beside ``max_steps``.
    """
    eps = torch.finfo(rhs.dtype).eps
    residual = rhs if subspace is None else subspace(rhs)
    direction = residual if precondition is None else precondition(residual)
    rho = inner(residual, direction)
    target = maximum(tol * tol * rho, floor * floor)
    if isinstance(subspace, Tangent) and precondition is None:
        fields = fused.conjugate_gradient(
            matvec, residual, *subspace, target, max_steps, cap, stop, ask
        )
        if fields is not None:
            return Krylov(*fields)
    going: Mask = rho > 0
    flat: Mask = rho < 0
    u = torch.zeros_like(rhs)
    length = rho  # ⟨direction, direction⟩ in the preconditioner's norm
    steepest = steps = fill(0.0, rho)  # the steepest is the scale of "flat"
    flattest = fill(torch.inf, rho)
    every = interval(rhs, 8)
    for step in range(max_steps):
        going = going & (rho > target)
        if cap is not None:
            going = going & (cap > step)
        if stop is not None and step == ask:
            ask *= 2
            going = select_mask(stop(u), False, going)
        if step % every == 0 and not any_row(going):
            break
        product = matvec(direction)
        curvature = inner(direction, product)
        quotient = ratio(curvature, length, 0.0)
        steepest = maximum(steepest, absolute(quotient))
        least = eps * steepest * length
        flattest = select(going, minimum(flattest, quotient), flattest)
        steps = steps + going
        flat = flat | (going & (curvature <= least))
        going = going & (curvature > least)
        alpha = select(going, ratio(rho, curvature, 0.0), 0.0)
        u = axpy(u, alpha, direction)
        residual = axpy(residual, -alpha, product)
        if subspace is not None:  # what is left beside it would swamp a small residual
            residual = subspace(residual)
        conditioned = residual if precondition is None else precondition(residual)
        following = inner(residual, conditioned)
        beta = ratio(following, rho, 0.0)
        direction = axpy(conditioned, beta, direction)
        length = following + beta * beta * length
        rho = following
    return Krylov(u, flat, steps, steepest, flattest, going & (rho > target))
