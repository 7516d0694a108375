"""Minimisers of a quadratic model on faces of a region, from one face to the next."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dfwlayer.constraints.region import Region
from dfwlayer.linalg.bordered import bordered, combined, dots
from dfwlayer.methods.interior_point import Pair, Shape
from dfwlayer.objectives.model import Model
from dfwlayer.ops.scale import TINY

__all__ = ["on_face"]

CORRECTIONS = 12  # of the face
FITTING = 1e-6  # of a budget or of the terms of an equation, by which a point on a face may miss it
LINEAR = 1e-6  # curvature, in units of slope by length, below which f is as good as linear


@dataclass(frozen=True)
class _Face:
    """What is thought to hold at the solution, for each coordinate and budget."""

    low: Tensor  # (B, n), at the lower bound
    high: Tensor  # (B, n), at the upper bound
    zero: Tensor  # (B, n), at the kink of a budget that is used up
    used: Tensor  # (B, k), budgets that are
    sign: Tensor  # (B, n), of x

    @classmethod
    def of(cls, shape: Shape, at: Pair, curvature: Tensor) -> _Face:
        """Of a slack and its multiplier, the larger in units of the curvature tells."""
        held, slack, force = shape.held, at.slack, at.force
        low = held[:, 0] & (force[:, 0] > curvature * slack[:, 0])
        high = held[:, 1] & (force[:, 1] > curvature * slack[:, 1])
        along = (curvature * at.x.abs() * at.size).sum(-1, keepdim=True).clamp_min(TINY)
        radii = shape.region.radii
        used = shape.spent & (at.price * radii * radii > at.room * along)
        kinked = _any(shape.weights, used)
        zero = kinked & (torch.minimum(force[:, 2], force[:, 3]) > curvature * at.x.abs())
        return cls(low & ~zero, high & ~low & ~zero, zero, used, at.x.sign())

    def same(self, other: _Face) -> Tensor:  # (B,)
        """Whether both say the same."""
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        # the sign of what is held at zero says nothing
        return torch.stack([(a == b).all(-1) for a, b in pairs[:-1]]).all(0)

    def fits(self, shape: Shape, x: Tensor) -> Tensor:  # (B,)
        """Whether x spends what it should and satisfies the equations.

        It may not where no coordinate is free to.
        """
        region = shape.region
        unspent = (region.radii - dots(shape.weights, x.abs())) > FITTING * region.radii
        missed = (dots(region.slopes, x) - region.totals).abs()
        terms = dots(region.slopes.abs(), x.abs()) + region.totals.abs()
        return ~(self.used & unspent).any(-1) & ~(missed > FITTING * terms).any(-1)


def _any(weights: Tensor, used: Tensor) -> Tensor:  # (B, k, n), (B, k) -> (B, n)
    """Coordinates with a weight in one of these budgets."""
    return ((weights > 0) & used.unsqueeze(-1)).any(-2)


def on_face(model: Model, region: Region, at: Pair) -> tuple[Tensor, Tensor]:
    """The minimiser on the face that a pair tells, the face being corrected where it is wrong.

    Coordinates that leave the set are held where they do, and those whose multiplier has the
    wrong sign let go, all at once (a primal-dual active set method).

    Returns:
        x (B, n), and whether nothing was left to correct (B,).

    """
    shape = Shape.of(region)
    curvature = model.diagonal().expand_as(at.x)
    # where there is next to none, slopes and lengths tell which of two sizes is the larger
    steep, long = (v.abs().amax(-1, keepdim=True) for v in (model.gradient(at.x), at.x))
    least = LINEAR * steep / long.clamp_min(TINY)
    largest = torch.maximum(curvature.amax(-1, keepdim=True), least).clamp_min(TINY)
    curvature = torch.where(curvature > 0, torch.maximum(curvature, least), largest)
    face = _Face.of(shape, at, curvature)
    x, result = at.x, at.x
    y = torch.cat((at.price, at.tension), -1)
    settled = torch.zeros_like(x[:, 0], dtype=torch.bool)
    for _ in range(CORRECTIONS):
        x, y, following = _minimised(model, shape, face, x, y)
        same = face.same(following) & following.fits(shape, x) & torch.isfinite(x.sum(-1))
        result = torch.where((same & ~settled).unsqueeze(-1), x, result)
        settled = settled | same
        if bool(settled.all()):
            break
        face = following
    return result, settled


def _minimised(
    model: Model, shape: Shape, face: _Face, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, _Face]:
    """The minimiser on a face, its multipliers, and the face that both tell.

    Where no coordinate is free to tell a multiplier, the last one ``y`` stands.
    """
    region = shape.region
    free = ~(shape.still | face.low | face.high | face.zero)
    held = torch.where(face.low, region.lower, torch.where(face.high, region.upper, 0))
    x = torch.where(free, x, torch.where(shape.still, shape.single, held))
    weights = shape.weights * face.used.unsqueeze(-1)
    side = torch.where(x != 0, x.sign(), face.sign)
    signed = weights * torch.where(free, face.sign, side).unsqueeze(-2)
    rows = torch.cat((signed, region.slopes), -2)
    totals = torch.cat((torch.where(face.used, region.radii, 0), region.totals), -1)
    border = torch.where(free.unsqueeze(-2), rows, 0)
    felt = (border != 0).any(-1)
    corner = torch.diag_embed((~felt).to(x.dtype))
    inverse = model.inverse_on(free)

    def apply(u: Tensor) -> Tensor:
        return torch.where(free, model.product(u.unsqueeze(-1)).squeeze(-1), 0)

    solve = bordered(apply, inverse, border, corner)
    for _ in range(2):  # the second time from a gradient at the result
        missed = torch.where(felt, totals - dots(rows, x), 0)
        u, found = solve(torch.where(free, -model.gradient(x), 0), missed)
        x = x + torch.where(free, u, 0)
        y = torch.where(felt, found, y)
    return x, y, _told(model, shape, face, x, y)


def _told(model: Model, shape: Shape, face: _Face, x: Tensor, y: Tensor) -> _Face:
    """The face that x and the multipliers y of budgets and equations tell."""
    region, weights, k = shape.region, shape.weights, shape.weights.shape[-2]
    gradient = model.gradient(x)
    pull = gradient + combined(y[:, k:], region.slopes)
    price = torch.where(face.used, y[:, :k], 0)
    charge = combined(price, weights)
    rounding = 1e-11 * (gradient.abs() + model.slope.abs()).amax(-1, keepdim=True)
    extent = 1e-12 * torch.maximum(x.abs().amax(-1, keepdim=True), x.abs())
    free = ~(shape.still | face.low | face.high | face.zero)
    # a bound that is zero is left towards the other side
    up = torch.where(region.lower >= 0, charge, -charge)
    down = torch.where(region.upper <= 0, -charge, charge)
    low = torch.where(face.low, pull + up > -rounding, free & (x < region.lower - extent))
    high = torch.where(face.high, pull + down < rounding, free & (x > region.upper + extent))
    norms = dots(weights, x.abs())
    used = shape.spent & torch.where(face.used, price >= 0, norms > region.radii * (1 + 1e-12))
    kinked = _any(weights, used)
    crossed = free & kinked & (x * face.sign < 0) & ~low & ~high
    # without the budget there is no kink to be held at
    zero = kinked & torch.where(face.zero, pull.abs() <= charge + rounding, crossed)
    released = face.zero & ~zero
    sign = torch.where(released, -pull.sign(), torch.where(free, x.sign(), face.sign))
    newly = used & ~face.used
    sign = torch.where(_any(weights, newly), x.sign(), sign)
    return _Face(low & shape.held[:, 0], high & shape.held[:, 1], zero, used, sign)
