"""A step over the hull of the points in use: to the minimum of a model of f, or next to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.hull.points import Hull, Mixture
from dfwlayer.ops.matrices import lu_solved
from dfwlayer.ops.rows import dot, or_one, where_rows
from dfwlayer.ops.scale import ROUNDING, Scale

if TYPE_CHECKING:
    from dfwlayer.objectives.base import Objective

__all__ = ["corrective_step"]

NEWTON = 3  # models of an f that is not quadratic before the oracle is asked again
TRIALS = 40  # lengths that a line search may try; each is up to four times shorter than the last
FURTHEST = 2.0**20  # times the step to a model's minimum that a line search may go
ARMIJO = 0.1  # the part of the decrease that the slope promises which a step has to keep
FLAT = 0.5  # a step is long enough where this part of the slope is gone
RIDGE = 1e-13  # relative curvature that is added in the space of weights


class _Model(NamedTuple):
    """f(x + p) − f(x) ≈ ⟨slope, p⟩ + ½⟨p, hessian p⟩ for steps p = Σ δ_i place_i.

    Places are coordinates of the points as seen from x: with sides of a set that differ by many
    orders of magnitude, products of ways to its points would hide the curvature along short ones.
    """

    places: Tensor  # (..., m, k), double
    hessian: Tensor  # (..., k, k), double
    slope: Tensor  # (..., k), double

    @classmethod
    def of(cls, objective: Objective, state: Mixture) -> _Model:
        """From products of ∇²f with a basis, that of all coordinates or of the points' span."""
        places = state.hull.points.double() - state.hull.mean().unsqueeze(-2)
        m, n = places.shape[-2:]
        slope, like = state.gradient.double(), state.x
        basis = torch.eye(n, dtype=torch.float64, device=like.device).expand(*like.shape[:-1], n, n)
        if m < n:
            basis = torch.linalg.svd(places, full_matrices=False).Vh
        products = objective.hvps(like, basis.movedim(-2, 0).to(like.dtype))
        hessian = basis @ products.movedim(0, -1).double()
        if m < n:
            places, slope = places @ basis.mT, (basis @ slope.unsqueeze(-1)).squeeze(-1)
        return cls(places, torch.nan_to_num(0.5 * (hessian + hessian.mT)), slope)

    def step(self, change: Tensor) -> Tensor:  # (..., m) -> (..., k)
        """p for changes of the weights."""
        return (change.unsqueeze(-2) @ self.places).squeeze(-2)

    def times(self, step: Tensor) -> Tensor:  # (..., k) -> (..., k)
        """∇²f p."""
        return (self.hessian @ step.unsqueeze(-1)).squeeze(-1)

    def lowered(self, change: Tensor) -> Tensor:  # (..., m) -> (...)
        """How much a change of the weights lowers the model."""
        step = self.step(change)
        return -dot(self.slope + 0.5 * self.times(step), step)


def corrective_step(
    objective: Objective, state: Mixture, toward: Tensor, scale: Scale, going: Tensor
) -> tuple[Mixture, Tensor]:
    """One step with a vertex that is in the hull, and whether it lowered f beyond rounding."""
    before, open_ = state, going
    eps = torch.finfo(state.x.dtype).eps
    lowered = torch.zeros_like(going)
    for k in range(1 if objective.quadratic else NEWTON):
        model = _Model.of(objective, state)
        weights = state.hull.weights
        new = toward if k == 0 else torch.zeros_like(toward)
        target = _corrected(model, weights, new, open_, eps)
        short = torch.zeros_like(going)
        if k == 0:
            plain = toward - weights
            way = model.step(plain)
            slope, bend = dot(model.slope, way), dot(way, model.times(way))
            length = torch.where(bend > -slope, -slope / or_one(bend), 1)
            vertexwards = weights + length.clamp(0, 1).unsqueeze(-1) * plain
            promised = model.lowered(vertexwards - weights)
            short = open_ & ~(model.lowered(target - weights) >= 0.5 * promised)
            target = where_rows(short, vertexwards, target)
        found, kept, reached = _searched(objective, state, target, open_)
        poor = open_ & ~short & (reached < 0.25)
        if k == 0 and bool(poor.any()):
            other, too, _ = _searched(objective, state, toward, poor, length.clamp(0, 1))
            lower = too & (~kept | (other.value < found.value))
            found, kept = other.where(lower, found), kept | lower
        d = found.hull.mean() - state.hull.mean()
        down = -0.5 * dot(state.gradient.double() + found.gradient.double(), d)
        moved = (found.x != state.x).any(-1) & (down > 4 / ROUNDING * scale.blur(d).squeeze(-1))
        lowered = lowered | (open_ & kept & (moved | (found.value < before.value)))
        # a model that is good for a small part of its step only is not worth another one
        state, open_ = found, open_ & kept & moved & (reached >= 0.25)
        if not bool(open_.any()):
            break
    return state, lowered


def _corrected(model: _Model, weights: Tensor, toward: Tensor, going: Tensor, eps: float) -> Tensor:
    """Weights (..., m) that minimise the model, for the problems that go on."""
    if not bool(going.any()):
        return weights
    lead, m = going.shape, weights.shape[-1]
    out = weights.reshape(-1, m).clone()
    left = going.reshape(-1).nonzero().squeeze(-1)  # the problems that are not done
    places, hessian, slope = (part[going] for part in model)
    weights, used = weights[going], (weights[going] > 0) | (toward[going] > 0)
    # a little more curvature makes up for products with ∇²f that are off by eps, or for an f that
    # is not convex
    eigenvalues = torch.linalg.eigvalsh(hessian)
    largest = torch.where((top := eigenvalues.abs().amax(-1, keepdim=True)) > 0, top, 1)
    ridge = max(RIDGE, 8 * eps) * largest + 2 * (-eigenvalues[..., :1]).clamp_min(0)
    hessian = hessian + torch.diag_embed(ridge.expand_as(slope))
    for _ in range(m):
        change = _affine_step(places, hessian, slope, used)
        falling = used & (change < 0)
        room = torch.where(falling, weights / torch.where(falling, -change, 1), torch.inf)
        limit = room.amin(-1, keepdim=True)
        length = limit.clamp(max=1)
        weights = (weights + length * change).clamp_min(0)
        dropped = (room <= limit) & (limit < 1)
        weights, used = torch.where(dropped, 0, weights), used & ~dropped
        out[left] = weights / weights.sum(-1, keepdim=True)
        rest = (limit < 1).squeeze(-1).nonzero().squeeze(-1)
        if len(rest) == 0:
            break
        step = length.unsqueeze(-1) * (change.unsqueeze(-2) @ places)
        slope = slope + (step @ hessian).squeeze(-2)
        if len(rest) < len(left):
            kept = (left, places, hessian, slope, weights, used)
            left, places, hessian, slope, weights, used = (part[rest] for part in kept)
    return out.reshape(*lead, m)


def _affine_step(places: Tensor, hessian: Tensor, slope: Tensor, used: Tensor) -> Tensor:
    """δ with sum 0 that leaves the unused at 0, of the least ⟨slope, p⟩ + ½⟨p, hessian p⟩.

    With C = USVᵀ the used places around their middle, p = Vz for δ = US⁻¹z. A direction that is
    rounding in C is none; where points are dependent, δ is the shortest of those with that p.
    """
    mask = used.to(places.dtype).unsqueeze(-1)
    count = mask.sum(-2, keepdim=True).clamp_min(1)
    middle = (mask * places).sum(-2, keepdim=True) / count
    left, sizes, axes = torch.linalg.svd(mask * (places - middle), full_matrices=False)
    rounding = 16 * torch.finfo(sizes.dtype).eps * places.shape[-2] ** 0.5
    sure = sizes > rounding * sizes.amax(-1, keepdim=True)
    axes = axes * sure.unsqueeze(-1)
    inner = axes @ hessian @ axes.mT + torch.diag_embed((~sure).to(sizes.dtype))
    z = -lu_solved(inner, axes @ slope.unsqueeze(-1), sound=False)
    change = mask * (left @ (z / torch.where(sure, sizes, 1).unsqueeze(-1)))
    # what rounding has left of its sum is a way to the middle, which may be far
    change = (change - mask * (change.sum(-2, keepdim=True) / count)).squeeze(-1)
    step = (change.unsqueeze(-2) @ places).squeeze(-2)
    sound = torch.isfinite(change).all(-1) & (dot(slope, step) < 0)
    return where_rows(sound, change, 0)


def _searched(
    objective: Objective,
    state: Mixture,
    target: Tensor,  # (..., m), weights
    going: Tensor,
    first: Tensor | None = None,  # (...), the part of the way that is tried first
) -> tuple[Mixture, Tensor, Tensor]:
    """A point on the way to the target with a lower f; whether there is one; the part of the way.

    With s the slope of f along the way, a step of length γ is taken if

        f(x + γd) ≤ f(x) + 0.1 γ s(0),  or  s(γ) ≤ 0,  or  s(γ) ≤ 0.8 |s(0)| and f does not rise.

    The second proves that a convex f did not rise; the third is the first one as slopes see it
    for a quadratic f, and slopes see changes that are lost in the rounding of f.
    """
    hull, old = state.hull, state.hull.weights
    change = target - old
    # of sum zero to the last digit, as a multiple of it may be taken
    change = change.scatter_add(-1, old.argmax(-1, keepdim=True), -change.sum(-1, keepdim=True))
    # from x, as what the points have in common would only add its rounding
    d = Hull(hull.points.double() - hull.mean().unsqueeze(-2), old).sum_of(change)
    slope = dot(state.gradient.double(), d)
    finfo = torch.finfo(state.x.dtype)
    value = state.value.double()
    slack = (
        4 * finfo.eps * (value.abs() + dot(state.gradient.double().abs(), state.x.double().abs()))
    )
    length = torch.ones_like(slope) if first is None else first
    # beyond the target, where the slope says so, up to where a weight is zero
    room = torch.where(change < 0, -old / torch.where(change < 0, change, 1), FURTHEST)
    most = room.amin(-1).clamp(1, FURTHEST)
    low, high = torch.zeros_like(slope), torch.full_like(slope, torch.inf)
    found, reached = state, torch.zeros_like(slope)
    searching = going & (slope < 0)
    for _ in range(TRIALS):
        weights = (old + length.unsqueeze(-1) * change).clamp_min(0)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = Hull(hull.points, where_rows(searching, weights, found.hull.weights))
        x = where_rows(searching, mixed.combination(), found.x)
        f, gradient = objective.value_and_gradient(x)
        after = dot(gradient.double(), d)
        flat = (after <= -(1 - 2 * ARMIJO) * slope) & (f.double() <= value + slack)
        lower = f.double() <= value + ARMIJO * length * slope
        sound = torch.isfinite(f) & torch.isfinite(gradient).all(-1)
        taken = searching & sound & (lower | (after <= 0) | flat)
        found = Mixture(mixed, x, f, gradient).where(taken, found)
        reached = torch.where(taken, length, reached)
        low, high = torch.where(taken, length, low), torch.where(taken, high, length)
        short = taken & (after < FLAT * slope) & (length < most) & (high > 2 * low)
        # a step that is lost in the rounding of x is the last one to be tried: others are shorter
        moved = (x != state.x).any(-1)
        searching = searching & (short | (~taken & moved & ~((low > 0) & (high <= 2 * low))))
        if not bool(searching.any()):
            break
        further = torch.minimum(4 * length, most)
        beyond = torch.where(torch.isfinite(high), 0.5 * (low + high), further)
        length = torch.where(low > 0, beyond, 0.25 * length)
    return found, reached > 0, reached
