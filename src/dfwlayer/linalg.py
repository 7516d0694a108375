"""Small batched vector helpers shared by objectives, sets and methods; vectors are (..., n)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["conjugate_gradient", "dot", "norm", "scaled_norm", "where_rows"]


def dot(a: Tensor, b: Tensor) -> Tensor:  # (..., n), (..., n) -> (...)
    """⟨a, b⟩ of each pair of rows."""
    return (a * b).sum(-1)


def norm(a: Tensor) -> Tensor:  # (..., n) -> (...)
    """Euclidean norm of each row, free of overflow and underflow."""
    return scaled_norm(a, 2.0)


def scaled_norm(a: Tensor, p: float) -> Tensor:  # (..., n) -> (...)
    """‖a‖_p of each row, free of overflow and underflow: m · ‖a/m‖_p with m = max |a|."""
    largest = a.abs().amax(-1)
    if p == torch.inf:
        return largest
    scale = torch.where(largest > 0, largest, 1).unsqueeze(-1)
    return largest * ((a / scale).abs() ** p).sum(-1) ** (1 / p)


def where_rows(mask: Tensor, a: Tensor, b: Tensor | float) -> Tensor:  # (B,), (B, n) -> (B, n)
    """Rows of a where the mask holds, rows of b elsewhere."""
    return torch.where(mask.unsqueeze(-1), a, b)


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor],
    rhs: Tensor,  # (B, n)
    *,
    tol: float,
    max_steps: int | Tensor,
    precondition: Callable[[Tensor], Tensor] = lambda r: r,
    clean: Callable[[Tensor], Tensor] = lambda r: r,
    stop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the positive semi-definite systems matvec(u) = rhs to ‖residual‖ ≤ tol · ‖rhs‖.

    The norm is the preconditioner's. A preconditioner that projects keeps u in its range, and
    the system is then the one restricted to that subspace; ``clean`` should then remove from a
    residual what the preconditioner annihilates, which would otherwise swamp the rest with its
    rounding. Each row stops on its own, also
    where it meets a direction without curvature, so that a singular system gives the finite
    solution found in its range, and where ``stop``, asked every few steps, tells from u (B, n)
    that it has gone far enough. ``max_steps`` may be a tensor (B,), a cap for each row.

    Returns:
        u (B, n); a mask (B,) of the rows that met a descent direction without curvature: there
        the quadratic model has no minimum; and the steps (B,) each row took.

    """
    eps = torch.finfo(rhs.dtype).eps
    u = torch.zeros_like(rhs)
    residual = clean(rhs)
    direction = precondition(residual)
    rho = dot(residual, direction)
    target = tol * tol * rho
    active = rho > 0
    flat = torch.zeros_like(active)
    largest = torch.zeros_like(rho)  # the largest Rayleigh quotient seen, the scale of "flat"
    every = 1 if rhs.device.type == "cpu" else 8
    steps = torch.zeros_like(active, dtype=torch.long)
    most = max_steps if isinstance(max_steps, int) else int(max_steps.amax()) if len(u) else 0
    for step in range(most):
        active = active & (step < torch.as_tensor(max_steps, device=u.device))
        if stop is not None and step % 5 == 4:
            active = active & ~stop(u)
        if step % every == 0 and not bool(active.any()):
            break
        steps = steps + active
        product = matvec(direction)
        curvature = dot(direction, product)
        length = dot(direction, direction)
        rayleigh = curvature / torch.where(length > 0, length, 1)
        largest = torch.maximum(largest, rayleigh.abs())
        without = active & ~(rayleigh > eps * largest)
        flat = flat | without
        active = active & ~without
        alpha = torch.where(active, rho / torch.where(active, curvature, 1), 0).unsqueeze(-1)
        u = u + alpha * direction
        residual = clean(residual - alpha * product)
        conditioned = precondition(residual)
        next_rho = torch.where(active, dot(residual, conditioned), rho)
        beta = torch.where(active, next_rho / torch.where(rho > 0, rho, 1), 0)
        direction = conditioned + beta.unsqueeze(-1) * direction
        rho = next_rho
        active = active & (rho > target)
    return u, flat, steps
