"""The certificate of a point: the Frank-Wolfe gap, and what it says about how a solve ended."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.linalg.krylov import conjugate_gradient
from dfwlayer.methods.base import Outcome, Problem, gap_of
from dfwlayer.ops.rows import as_rows, dot, or_one
from dfwlayer.solution import Status

__all__ = ["certified", "certify"]


def certified(problem: Problem, outcome: Outcome, tol: float) -> Outcome:
    """The outcome with f, the gap, and the status that follows from them."""
    if outcome.gap is not None:
        return outcome
    x, value, gradient = outcome.x.detach(), outcome.value, outcome.gradient
    if value is None or gradient is None:
        with torch.no_grad():
            value, gradient = problem.objective.value_and_gradient(x)
        if outcome.x.requires_grad:  # through the steps that were taken
            value = problem.objective.value(outcome.x)
    gap, status = certify(problem, x, value, gradient, outcome.status, tol)
    return outcome._replace(value=value, gap=gap, status=status)


def certify(
    problem: Problem,
    x: Tensor,  # (..., n)
    value: Tensor,  # (...)
    gradient: Tensor,  # (..., n)
    status: Tensor,  # (...)
    tol: float,
    rounding: Tensor | None = None,  # (..., n)
) -> tuple[Tensor, Tensor]:
    """The gap, and the status that follows from it.

    ``rounding`` is by how much x may be off, where that is more than the rounding of its dtype.

    Where coordinates F are unbounded, the certificate is that of the problem with them minimised
    out: with u = (∇²f)_FF⁻¹ g_F, minimising them lowers f by ½⟨g_F, u⟩ and changes the gradient
    by −∇²f u, so f(x) − f* ≤ ½⟨g_F, u⟩ + the gap for that gradient. Exact for quadratics.
    """
    objective, constraint, unbounded = problem
    with torch.no_grad():
        shift: Tensor | None = None
        if unbounded is not None:
            g = torch.where(unbounded, gradient, 0)
            # in units of the largest entry squares stay within range
            size = or_one(g.abs().amax(-1, keepdim=True))
            found = conjugate_gradient(
                lambda v: torch.where(unbounded, objective.hvp(x, v), 0),
                g / size,
                tol=torch.finfo(x.dtype).eps,
                max_steps=2 * x.shape[-1] + 20,
            )
            # rounding leaves a slope of this size that has no meaning along a flat direction
            noise = objective.scale(x, gradient).noise + 64 * torch.finfo(x.dtype).eps * g.abs()
            flat = as_rows(found.flat, torch.bool) & (g.abs() > 8 * noise).any(-1)
            u = found.u * size
            shift = torch.where(flat, torch.inf, 0.5 * dot(g, u))
            status = torch.where(flat, int(Status.UNBOUNDED), status)
            gradient = gradient - objective.hvp(x, u)
        gap = gap_of(constraint, x, gradient, unbounded)
        # a point far better than the best vertex says that this was none: nothing is proven then
        terms = gradient * (x if unbounded is None else torch.where(unbounded, 0, x))
        low = constraint.lowest(gradient)
        size = terms.abs().sum(-1) + low.abs()
        allowed = 1e-3 * size
        if rounding is not None:  # which may have carried x out of a small set
            allowed = allowed + dot(gradient.abs(), rounding)
        gap = torch.where(terms.sum(-1) - low < -allowed, torch.inf, gap)
        if shift is not None:
            gap = gap + shift
        finite = torch.isfinite(value) & torch.isfinite(gap)
        proven = finite & (gap <= tol * value.abs().clamp_min(torch.finfo(x.dtype).tiny))
        open_ended = (status == Status.MAX_STEPS) | (status == Status.ROUNDING_FLOOR)
        open_ended = open_ended | (status == Status.STALLED) | (status == Status.STOPPED)
        status = torch.where(open_ended & proven, int(Status.CONVERGED), status)
        status = torch.where(open_ended & ~finite, int(Status.OUT_OF_RANGE), status)
    return gap, status
