"""Bounds, a budget and equations: boxes, simplices, ℓ1 balls and what lies in planes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dfwlayer.constraints.plain.base import Plain, less, shrunk, wide
from dfwlayer.constraints.plain.thresholds import LARGEST, above_zero, between
from dfwlayer.constraints.region import Flat
from dfwlayer.ops.rows import quotient
from dfwlayer.ops.values import Value, are_numbers, equal, within

__all__ = ["PlainFlat"]

FAR = 2.0**24  # times the size of the numbers, where a projection has all that it can have along a


@dataclass(frozen=True)
class PlainFlat(Plain):
    """{x : l ≤ x ≤ u, Σ |w_i x_i| ≤ t, ⟨a, x⟩ = b, …}; a formula for one constraint beside bounds.

    With a second one it is the last equation whose multiplier is looked for, in a bracket whose
    ends are projections onto the rest of the set: a mix of the two is in the plane, and in the set,
    after any number of steps.
    """

    lower: Value
    upper: Value
    weight: Value | None
    radius: Value  # a number or (..., 1), as all totals here
    equations: tuple[tuple[Value, Value], ...]

    @classmethod
    def of(cls, form: Flat) -> PlainFlat:
        """From the normal form of a set."""
        return cls(form.lower, form.upper, form.weight, form.radius, form.equations)

    @property
    def exact(self) -> bool:
        """Whether there is one constraint beside the bounds, or none."""
        return len(self.equations) + (self.weight is not None) <= 1

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """By thresholds, and a search for the last multiplier where there are two."""
        if not self.exact:
            return self._in_plane(z, steps)
        if self.weight is not None:
            return self._within_budget(z, self.weight)
        if not self.equations:
            return self._clipped(z)
        ((slope, total),) = self.equations
        b = wide(total, z)
        if equal(self.lower, 0.0) and equal(self.upper, math.inf) and equal(slope, 1.0):
            return above_zero(z, None, b)
        even = equal(slope, 1.0)
        a, (lower, upper) = wide(slope, z), self._bounds(z)
        # On the way from the point of the box next to z all terms of ⟨a, x⟩ move in one direction,
        # so that no coordinate goes further than it would alone. That is for bounds so far away
        # that sums of them have no digits left, or that are none.
        near = torch.minimum(torch.maximum(z, lower), upper)
        excess = (near if even else a * near).sum(-1, keepdim=True) - b
        alone = 2 * excess.abs()
        if not even:
            alone = alone / torch.where(a != 0, a.abs(), 1.0)
        lower, upper = torch.maximum(lower, near - alone), torch.minimum(upper, near + alone)
        return between(z, None if even else a, lower, upper, b)

    def inside(self, x: Tensor) -> Tensor:
        """Within the bounds, scaled into the budget, with what an equation lacks on one entry."""
        if not (equal(self.lower, -math.inf) and equal(self.upper, math.inf)):
            lower, upper = (end.to(x.dtype) for end in self._bounds(x))
            x = torch.minimum(torch.maximum(x, lower), upper)
        if self.weight is not None:
            x = self._shrunk(x, wide(self.weight, x).abs(), wide(self.radius, x))
        for slope, total in self.equations:
            x = self._settled(x, wide(slope, x), wide(total, x))
        return x

    def _bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return wide(self.lower, like), wide(self.upper, like)

    def _clipped(self, z: Tensor) -> Tensor:
        lower, upper = self._bounds(z)
        return torch.minimum(torch.maximum(z, lower), upper)

    @property
    def _origin(self) -> PlainFlat | None:
        """The bounds where the point next to zero may not be zero, None where it is."""
        if within(self.lower, -math.inf, 0) and within(self.upper, 0, math.inf):
            return None
        return PlainFlat(self.lower, self.upper, None, 0.0, ())

    def _heavy(self, w: Tensor, t: Tensor) -> Tensor | None:
        """Where t/w is within the range, as elsewhere there is no limit; None for everywhere."""
        if equal(self.weight, 1.0):
            return None
        return w > t / torch.finfo(torch.float32).max

    def _within_budget(self, z: Tensor, weight: Value) -> Tensor:
        """sign(z)(|z| − θw)₊ within the bounds; seen from the point of the box next to zero."""
        w, t = wide(weight, z).abs(), wide(self.radius, z)
        heavy = self._heavy(w, t)
        if equal(self.lower, -math.inf) and equal(self.upper, math.inf):
            if heavy is None:
                size = z.abs()
                return torch.sign(z) * torch.minimum(above_zero(size, None, t), size)
            size = torch.where(heavy, z.abs(), 0.0)
            moved = torch.minimum(above_zero(size, torch.where(heavy, w, 1.0), t), size)
            return torch.where(heavy, torch.sign(z) * moved, z)
        lower, upper = self._bounds(z)
        y, left = z, t
        if (box := self._origin) is not None:
            m = box._clipped(z.new_zeros(z.shape[-1]))
            y, lower, upper = z - m, lower - m, upper - m
            left = (t - (w * m.abs()).sum(-1, keepdim=True)).clamp_min(0.0)
        reach = upper if self._even else torch.where(y < 0, -lower, upper)
        # no coordinate can use more than the whole budget; what has no weight is not moved by it
        if heavy is None:
            slope, alone = None, left
        else:
            slope = torch.where(heavy, w, 0.0)
            alone = torch.where(heavy, left / torch.where(heavy, w, 1.0), LARGEST)
        reach = torch.minimum(reach, alone)
        moved = torch.sign(y) * between(y.abs(), slope, torch.zeros_like(t), reach, left, least=0.0)
        return moved if box is None else moved + m

    @property
    def _even(self) -> bool:
        """Whether the bounds are l = −u, whatever the data."""
        return are_numbers(self.lower, self.upper) and bool(self.lower == -self.upper)

    def _shrunk(self, x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        """Scaled towards the point of the box next to zero."""
        heavy = self._heavy(w, t)
        cost = None if heavy is None else torch.where(heavy, w, 0.0)

        def spent(part: Tensor) -> Tensor:
            size = part.abs() if cost is None else cost * part.abs()
            return size.sum(-1, keepdim=True)

        if (box := self._origin) is None:
            inner = shrunk(x, spent(x.double()), t)
            return inner if heavy is None else torch.where(heavy, inner, x)
        at, (lower, upper) = x.double(), self._bounds(x)
        m = box._clipped(at.new_zeros(x.shape[-1]))
        size, left = spent(at - m), (t - spent(m)).clamp_min(0.0)
        eps = wide(torch.finfo(x.dtype).eps, x)
        outside = size > less(left, eps)
        factor = less(left, 2 * eps) / torch.where(outside, size, 1.0)
        inner = torch.minimum(torch.maximum(m + (at - m) * factor, lower), upper).to(x.dtype)
        return torch.where(outside if heavy is None else heavy & outside, inner, x)

    def _settled(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """x, and what rounding leaves of ⟨a, x⟩ − b on the entry with the most room for it."""
        lower, upper = self._bounds(x)
        at = x.double()
        missing = b - (a * at).expand_as(at).sum(-1, keepdim=True)
        room = torch.minimum(at - lower, upper - at) * torch.where(a != 0, a.abs(), 1.0)
        room = torch.where(a != 0, room, -1.0).expand_as(at)
        index = room.argmax(-1, keepdim=True)
        step = missing / torch.where(a != 0, a, 1.0)
        chosen = torch.arange(x.shape[-1], device=x.device) == index
        moved = (at + torch.where(chosen, step, 0.0)).to(x.dtype)
        bounds = lower.to(x.dtype), upper.to(x.dtype)
        return torch.minimum(torch.maximum(moved, bounds[0]), bounds[1])

    def _in_plane(self, z: Tensor, steps: int) -> Tensor:
        """The projection of z − μa onto the rest, with the μ for which it is in the plane.

        False position (Illinois) and halving in turns. Both ends are points of the rest, and their
        mix in the plane is the answer; it is exact once both are on one piece.
        """
        rest = PlainFlat(self.lower, self.upper, self.weight, self.radius, self.equations[:-1])
        slope, total = self.equations[-1]
        a, b = wide(slope, z), wide(total, z)

        def along(x: Tensor) -> Tensor:
            return (a * x).expand_as(z).sum(-1, keepdim=True) - b

        def at(mu: Tensor) -> tuple[Tensor, Tensor]:
            x = rest.nearest(z - mu * a, steps)
            return x, along(x)

        steep = a.abs().expand_as(z).amax(-1, keepdim=True)
        size = z.abs().amax(-1, keepdim=True) + self._size(z) + 1.0
        far = FAR * size / torch.where(steep > 0, steep, 1.0)
        left, right = -far, far
        (high, over), (low, under) = at(left), at(right)
        height, depth = over, under  # what false position takes for the excess at the ends
        for step in range(steps):
            fall = height - depth
            share = torch.where(fall > 0, height / torch.where(fall > 0, fall, 1.0), 0.5)
            share = share.clamp(0.0, 1.0) if step % 3 else torch.full_like(share, 0.5)
            mu = left + share * (right - left)
            x, excess = at(mu)
            above = excess >= 0
            left, right = torch.where(above, mu, left), torch.where(above, right, mu)
            high, low = torch.where(above, x, high), torch.where(above, low, x)
            over, under = torch.where(above, excess, over), torch.where(above, under, excess)
            # an end that stays counts half the next time
            height = torch.where(above, over, 0.5 * height)
            depth = torch.where(above, 0.5 * depth, under)
        return low + quotient(-under, over - under).clamp(0.0, 1.0) * (high - low)

    def _size(self, z: Tensor) -> Tensor:
        """The size of the numbers of the set, (1,) or (..., 1)."""
        totals = [wide(total, z).abs() for _, total in self.equations]
        budget = [] if self.weight is None else [wide(self.radius, z)]
        ends = [torch.where(torch.isinf(end), 0.0, end.abs()) for end in self._bounds(z)]
        reach = [end.amax(-1, keepdim=True) if end.dim() else end for end in ends]
        return reduce(torch.add, [*totals, *budget, *reach])
