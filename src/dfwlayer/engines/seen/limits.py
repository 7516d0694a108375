"""Projection onto bounds with a total or a budget, from the coordinates that it leaves free.

x = clip(z − θ, l, u) with Σ x = b, or m + sign(z − m) clip(|z − m| − θw) with Σ w|x| ≤ t, where m
is the point of the box next to zero. Which coordinates are free is found without a gradient, by the
formulas of exported layers; with these held, θ is a quotient of two sums, whose derivative is that
of the projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.plain import PlainFlat

__all__ = ["PAIRS", "Limits", "project_onto_limits", "settled_at"]

# up to so many coordinates all pairs are compared; for 6 of them that was quicker than a sort, for
# which compilers have no code of their own, and at 32 there are more pairs than a sort costs
PAIRS = 16


class Limits(NamedTuple):
    """{x : l ≤ x ≤ u}, with Σ w|x| ≤ t or Σ x = b, in double precision.

    Entries are (), (n,), (..., 1) or (..., n); numbers (1,) or (..., 1).
    """

    lower: Tensor
    upper: Tensor
    weight: Tensor | None = None  # w ≥ 0
    budget: Tensor | None = None  # t
    total: Tensor | None = None  # b
    sound: Tensor | None = None  # (1,) or (..., 1), whether what they are made of can be

    def plain(self) -> PlainFlat:
        """As exported layers have it."""
        equations = () if self.total is None else ((1.0, self.total),)
        budget = 0.0 if self.budget is None else self.budget
        return PlainFlat(self.lower, self.upper, self.weight, budget, equations)


def project_onto_limits(q: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:  # q (..., n)
    """The point nearest to −q, and whether there are numbers that cannot be.

    Problems with such numbers become NaN, and have no gradient.
    """
    z = -q.double()
    sound = z.isfinite().all(-1, keepdim=True) & _sound(limits, torch.finfo(q.dtype).eps, z)
    z = torch.where(sound, z, 0.0)
    lower, upper, weight, budget, total, _ = limits
    ends = torch.where(sound, lower, 0.0), torch.where(sound, upper, 1.0)
    if weight is not None and budget is not None:
        weight = torch.where(sound, weight, 1.0).expand(z.shape)
        own = Limits(*ends, weight, torch.where(sound, budget, 1.0))
        x = _within(z, own)
    elif total is not None:
        own = Limits(*ends, total=torch.where(sound, total, 0.0))
        x = _with_total(z, own)
    else:
        own = Limits(*ends)
        x = _clipped(z, own)
    with torch.no_grad():
        inner = own.plain().inside(x.to(q.dtype))
    return settled_at(x, inner, sound), ~sound.all()


def settled_at(x: Tensor, value: Tensor, sound: Tensor) -> Tensor:
    """``value``, with the derivative of x, next to which it is; NaN where it is not sound."""
    # in double precision what the sum is off vanishes with the last conversion
    moved = x + (value.double() - x.detach())
    return torch.where(sound, moved, torch.nan).to(value.dtype)


def _sound(limits: Limits, eps: float, like: Tensor) -> Tensor:
    """Which problems have a point, with numbers that are some: (1,) or (..., 1)."""
    lower, upper, weight, budget, total, known = limits
    fine = ((upper - lower) >= 0).expand(like.shape).all(-1, keepdim=True)
    if known is not None:
        fine = fine & known
    if weight is not None and budget is not None:
        least = (weight * _nearest_to_zero(lower, upper).abs()).expand(like.shape)
        least = least.sum(-1, keepdim=True)
        fine = fine & weight.isfinite().expand(like.shape).all(-1, keepdim=True)
        fine = fine & budget.isfinite() & (budget >= 0) & (least * (1 - 4 * eps) <= budget)
    if total is not None:
        most = upper.expand(like.shape).sum(-1, keepdim=True)
        fine = fine & total.isfinite() & (total >= 0) & (total - most <= 2 * eps * total)
    return fine


def _nearest_to_zero(lower: Tensor, upper: Tensor) -> Tensor:
    """m; as ∞ is no bound it has no part in this, nor in derivatives."""
    return torch.where(lower > 0, lower, torch.where(upper < 0, upper, 0.0))


def _clipped(z: Tensor, at: Limits) -> Tensor:
    """Next to z; a z on a bound is free."""
    lower, upper = at.lower, at.upper
    return torch.where(z < lower, lower, torch.where(z > upper, upper, z))


def _with_total(z: Tensor, at: Limits) -> Tensor:
    """Σ x = b."""
    lower, upper, total = at.lower, at.upper, at.total
    assert total is not None
    with torch.no_grad():
        free, high = _sides(z, torch.ones_like(z), lower, upper, total)
        top = _top(z, free)
    held = torch.where(free, 0.0, torch.where(high, upper, lower))
    apart = torch.where(free, z - top, 0.0)  # of which the digits do not depend on how far z is
    count = free.sum(-1, keepdim=True).clamp_min(1)
    theta = (apart.sum(-1, keepdim=True) + held.sum(-1, keepdim=True) - total) / count
    return torch.where(free, apart - theta, held)


def _within(z: Tensor, at: Limits) -> Tensor:
    """Σ w|x| ≤ t, of which a coordinate y = |x − m| of those that go away from m uses w y."""
    weight, budget = at.weight, at.budget
    assert weight is not None
    assert budget is not None
    near, m = _clipped(z, at), _nearest_to_zero(at.lower, at.upper)
    spare = budget - (weight * m.abs()).sum(-1, keepdim=True)
    side = torch.sign(z - m).detach()
    bound = torch.where(side < 0, at.lower, at.upper)
    with torch.no_grad():
        heavy = weight > budget / torch.finfo(torch.float32).max
        felt = heavy & ((weight * near.abs()).sum(-1, keepdim=True) > budget)
    unit = torch.where(heavy, weight, 1.0)
    pull = side * (z - m) / unit
    with torch.no_grad():
        reach = torch.where(heavy & (side != 0), side * (bound - m), 0.0)
        free, high = _sides(pull * unit, unit, torch.zeros_like(z), reach, spare)
        free, high = free & felt, high & felt & (reach > 0)
        top = _top(pull, free)
    spent = torch.where(high, weight * side * (bound - m), 0.0).sum(-1, keepdim=True)
    delta, square = torch.where(free, top - pull, 0.0), torch.where(free, unit * unit, 0.0)
    share = square.sum(-1, keepdim=True)
    eta = ((square * delta).sum(-1, keepdim=True) + spare - spent) / torch.where(
        share > 0, share, 1
    )
    moved = torch.where(free, m + side * unit * (eta - delta), torch.where(high, bound, m))
    return torch.where(felt, moved, near)


def _top(values: Tensor, free: Tensor) -> Tensor:
    """The largest of some entries, 0 where there are none: (..., 1)."""
    top = torch.where(free, values, -torch.inf).amax(-1, keepdim=True)
    return torch.where(top > -torch.inf, top, 0.0)


def _sides(
    z: Tensor, slope: Tensor, lower: Tensor, upper: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """For x = clip(z − θa, l, u) with Σ a x = b, a > 0: which are free, and which of others are u.

    Σ a x falls with θ and is straight between the θ at which a coordinate meets a bound.
    """
    if z.shape[-1] > PAIRS:
        x = PlainFlat(lower, upper, None, 0.0, ((slope, total),)).nearest(z, 0)
        return (x > lower) & (x < upper), x >= upper
    kinks = torch.cat([(z - upper) / slope, (z - lower) / slope], -1)
    there = kinks.unsqueeze(-1)
    a, low, high, at = (each.expand(z.shape).unsqueeze(-2) for each in (slope, lower, upper, z))
    sums = (a * torch.minimum(torch.maximum(at - there * a, low), high)).sum(-1)
    above, finite = sums >= total, kinks.isfinite()
    before = torch.where(finite & above, kinks, -torch.inf).amax(-1, keepdim=True)
    after = torch.where(finite & ~above, kinks, torch.inf).amin(-1, keepdim=True)
    # beyond the outermost kinks nothing changes any more
    before, after = (
        torch.where(before > -torch.inf, before, after - after.abs() - 1),
        torch.where(after < torch.inf, after, before + before.abs() + 1),
    )
    y = z - 0.5 * (before + after) * slope
    return (y > lower) & (y < upper), y >= upper
