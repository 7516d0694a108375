"""The certificate of a point: the Frank-Wolfe gap, and what it says about how a solve ended."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.linalg.krylov import Krylov, conjugate_gradient
from dfwlayer.linalg.subspaces import Normals, Orthogonal
from dfwlayer.methods.base import Outcome, Problem, gap_of
from dfwlayer.methods.recession import falls_for_ever, is_far_out
from dfwlayer.ops.rows import as_rows, dot, or_one, where_rows
from dfwlayer.solution import Status

__all__ = ["certified", "certify"]

GROWTHS = 64  # of the coordinates that are minimised out; each adds all that are found to be open
PART = 0.01  # of the rounding of ∇f, below which the slope along them need not be brought


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

    Where the set has no vertex for ∇f(x), the certificate is that of the problem with the
    coordinates in question minimised out, see `_Closed`.
    """
    constraint = problem.constraint
    with torch.no_grad():
        shift: Tensor | None = None
        if problem.unbounded is not None:
            closed = _Closed.of(problem, x, gradient)
            constraint, gradient, shift = closed.constraint, closed.gradient, closed.shift
            asked = (closed.flat & ~closed.known) | is_far_out(problem, x)
            endless = closed.flat & closed.known
            if bool(asked.any()):
                endless = endless | falls_for_ever(problem, x, asked)
            status = torch.where(endless, int(Status.UNBOUNDED), status)
            shift = torch.where(status == Status.UNBOUNDED, torch.inf, shift)
        gap = gap_of(constraint, x, gradient)
        # a point far better than the best vertex says that this was none: nothing is proven then
        terms = gradient * x
        low = constraint.lowest(gradient)
        size = terms.abs().sum(-1) + low.abs()
        # a vertex is found to the rounding of ∇f times such a set, where all its entries count
        wide = gradient.abs().sum(-1) * x.abs().amax(-1) if x.shape[-1] else size
        allowed = 1e-3 * size + 4 * torch.finfo(x.dtype).eps * wide
        if rounding is not None:  # which may have carried x out of a small set
            allowed = allowed + dot(gradient.abs(), rounding)
        gap = torch.where(terms.sum(-1) - low < -allowed, torch.inf, gap)
        finite = torch.isfinite(value) & torch.isfinite(gap)
        if shift is not None:
            gap = gap + shift
        proven = finite & (gap <= tol * value.abs().clamp_min(torch.finfo(x.dtype).tiny))
        open_ended = (status == Status.MAX_STEPS) | (status == Status.ROUNDING_FLOOR)
        open_ended = open_ended | (status == Status.STALLED) | (status == Status.STOPPED)
        status = torch.where(open_ended & proven, int(Status.CONVERGED), status)
        status = torch.where(open_ended & ~finite, int(Status.OUT_OF_RANGE), status)
    return gap, status


class _Closed(NamedTuple):
    """A problem at x without the coordinates M along which its set is open.

    With M unconstrained, which is a larger set, and u = (∇²f)_MM⁻¹ g_M, minimising over M lowers f
    by ½⟨g_M, u⟩ and changes the gradient to g' = g − ∇²f u, which is zero on M. So
    f(x) − f* ≤ ½⟨g_M, u⟩ + the gap for g', exactly for a quadratic f. M holds the coordinates that
    are open on the side to which −g points. Where others are for g', they join. In planes
    ⟨a_j, x⟩ = b_j, u is along them, and what is left on M is −Σ μ_j a_j: the Lagrangian
    f + Σ μ_j (⟨a_j, x⟩ − b_j) has the gradient g' + Σ μ_j a_j.
    """

    constraint: Constraint
    gradient: Tensor  # (..., n), that of the Lagrangian after M was minimised out
    shift: Tensor  # (...), by how much this lowers f, ∞ where there is no minimum
    flat: Tensor  # (...), there is none as f falls along a line
    known: Tensor  # (...), which is in the set, as M has no bounds at all

    @classmethod
    def of(cls, problem: Problem, x: Tensor, gradient: Tensor) -> _Closed:
        objective, constraint, _ = problem
        eps = torch.finfo(x.dtype).eps
        slope, normals = gradient, None
        missed = torch.zeros_like(gradient[..., 0])
        noise = objective.scale(x, gradient).noise + 64 * eps * gradient.abs()
        relaxed = constraint.relaxation(x, gradient)
        if relaxed is not None:
            constraint = relaxed.constraint
            normals = torch.stack([a.expand_as(x) for a in relaxed.normals], -2)
            slope = slope + (relaxed.multiplier.unsqueeze(-2) @ normals).squeeze(-2)
            terms = (relaxed.multiplier.unsqueeze(-1) * normals).abs().sum(-2)
            noise = noise + 64 * eps * terms
            missed = dot(relaxed.multiplier, relaxed.excess).abs()
        mask = _open(constraint, slope)
        shift = torch.zeros_like(missed)
        flat = grown = torch.zeros_like(missed, dtype=torch.bool)
        rest, hvp = slope, partial(objective.hvp, x)
        for _ in range(GROWTHS):
            within, restrict = None, partial(_restricted, mask)
            if normals is not None:
                within = Normals.of((normals * mask.unsqueeze(-2)).unbind(-2))
            plane = Orthogonal(restrict, within)
            g = plane(slope)
            # in units of the largest entry squares stay within range
            size = or_one(g.abs().amax(-1, keepdim=True))
            floor = (torch.where(mask, noise, 0) / size).square().sum(-1, keepdim=True).sqrt()
            found = conjugate_gradient(
                hvp,
                g / size,
                tol=eps,
                max_steps=2 * x.shape[-1] + 20,
                subspace=plane,
                floor=PART * (floor if x.dim() > 1 else float(floor)),
            )
            # rounding leaves a slope of this size that has no meaning along a flat direction
            steep = (g.abs() > 8 * noise).any(-1)
            stuck = as_rows(found.flat, torch.bool)
            u = where_rows(stuck & ~steep, 0 * g, found.u * size)
            rest = slope - hvp(u)
            if within is not None and normals is not None:
                c = within.coefficients(restrict(rest))
                rest = rest - (c.unsqueeze(-2) @ normals).squeeze(-2)
            left = restrict(rest)
            lost = noise + 64 * eps * (size + rest.abs())
            flat = stuck & steep & (left.abs() > 8 * lost).any(-1)
            shift = 0.5 * dot(g, u) + _remaining(left, found)
            grown = (_open(constraint, torch.where(mask, 0, rest)) & ~mask).any(-1)
            if not bool((grown & ~flat).any()):
                break
            mask = mask | (_open(constraint, rest) & (grown & ~flat).unsqueeze(-1))
        known = ~(mask & ~(_open(constraint, slope) & _open(constraint, -slope))).any(-1)
        shift = torch.where(flat | grown, torch.inf, shift) + missed
        return cls(constraint, torch.where(mask, 0, rest), shift, flat, known)


def _open(constraint: Constraint, slope: Tensor) -> Tensor:  # (..., n)
    """The coordinates along which a set is open on the side of −slope."""
    mask = constraint.open_ended(slope)
    return torch.zeros_like(slope, dtype=torch.bool) if mask is None else mask.expand_as(slope)


def _restricted(mask: Tensor, v: Tensor) -> Tensor:
    return torch.where(mask, v, 0)


def _remaining(left: Tensor, found: Krylov) -> Tensor:  # (...)
    """½‖slope‖² / the least curvature met: what conjugate gradients left where they ran out."""
    dtype = left.dtype
    least, short = as_rows(found.flattest, dtype), as_rows(found.unfinished, torch.bool)
    return torch.where(short & (least > 0), 0.5 * dot(left, left) / or_one(least), 0)
