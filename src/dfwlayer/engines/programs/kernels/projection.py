"""Projections onto a set in normal form, one problem in one Triton program.

The set is l ≤ x ≤ u with at most two rows: a budget Σ w_i |x_i| ≤ t or an equation ⟨a, x⟩ = b, and
an equation. The point nearest to z is, with one multiplier for each row,

    x_i = clip(soft(z_i − Σ λ_eq a_i, λ_budget w_i), l_i, u_i),

see `dfwlayer.engines.compiled.kernels.polytope`, whose method this is.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.compiled.kernels import place
from dfwlayer.engines.programs.kernels.blocks import jit, number, sums, yes

__all__ = ["BUDGET", "EQUATION", "FREE", "HIGH", "LOW", "NOTHING", "ZERO", "project", "slope_of"]

# what the first row is
NOTHING, BUDGET, EQUATION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

FREE, LOW = tl.constexpr(place.FREE), tl.constexpr(place.LOW)
HIGH, ZERO = tl.constexpr(place.HIGH), tl.constexpr(place.ZERO)

_TRIALS = tl.constexpr(100)  # most values of a multiplier; about five are needed


@jit
def slope_of(a, x, KIND: tl.constexpr):
    """The derivative of the first row's sum in x."""
    if KIND == BUDGET:
        return tl.where(x > 0, a, tl.where(x < 0, -a, 0.0))
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return a


@jit
def _walk(at, z, a, low, high, KIND: tl.constexpr):
    """x for a multiplier of the first row; what that adds up to, how fast it falls, its size."""
    if KIND == BUDGET:
        y = tl.abs(z) - at * a
        y = tl.where((y <= 0) & (a > 0), 0.0, tl.where(z >= 0, y, -y))
        moves = (y != 0) & (low <= y) & (y <= high)
    else:
        y = z - at * a
        moves = (low <= y) & (y <= high)
    x = tl.minimum(tl.maximum(y, low), high)
    term = a * (tl.abs(x) if KIND == BUDGET else x)
    total, slope, size = sums(term, tl.where(moves, a * a, 0.0), tl.abs(term))
    return x, total, slope, size


@jit
def _next_bend(at, z, a, low, high, up, KIND: tl.constexpr):
    """The nearest multiplier in that direction where the row's sum moves again, NaN if none."""
    steep = tl.where(a == 0, 1.0, a)
    if KIND == BUDGET:
        one, two = (tl.abs(z) - tl.abs(low)) / steep, (tl.abs(z) - tl.abs(high)) / steep
    else:
        one, two = (z - low) / steep, (z - high) / steep
    infinite = float("inf")
    towards = tl.where(up, 1.0, -1.0).to(z.dtype)
    one, two = (one - at) * towards, (two - at) * towards
    one = tl.where((a != 0) & (one > 0) & (one < infinite), one, infinite)
    two = tl.where((a != 0) & (two > 0) & (two < infinite), two, infinite)
    nearest = tl.min(tl.minimum(one, two))
    return tl.where(nearest < infinite, at + towards * nearest, float("nan"))


@jit
def _meet(start, z, a, target, low, high, close, KIND: tl.constexpr):
    """The multiplier for which the first row holds, NaN if there is none; x for it.

    The start is a guess; that of a budget is not negative.
    """
    least, most = number(float("-inf"), z), number(float("inf"), z)
    at = start
    x, total, slope, size = _walk(at, z, a, low, high, KIND)
    going = (tl.abs(total - target) <= close * (size + tl.abs(target))) == 0
    if KIND == BUDGET:  # it may not hold
        going = going & ((at > 0) | (total > target))
    trial = 0
    while going:
        excess = total - target
        least = tl.where(excess > 0, at, least)
        most = tl.where(excess > 0, most, at)
        new = at + excess / tl.where(slope > 0, slope, 1.0)
        if slope <= 0:
            new = _next_bend(at, z, a, low, high, excess > 0, KIND)
            if KIND == BUDGET:
                new = tl.where(excess > 0, new, 0.0)
        lost = new != new
        if KIND == BUDGET:
            new = tl.maximum(new, 0.0)
        same = new == at
        outside = (new <= least) | (new >= most)
        # finite, as no step goes beyond an end that is not there
        new = tl.where(outside, 0.5 * (least + most), new)
        same = same | (outside & (((least < new) & (new < most)) == 0))
        trial += 1
        lost = lost | (trial > _TRIALS)
        at = tl.where(lost, float("nan"), tl.where(same, at, new))
        going = (same | lost) == 0
        if going:
            x, total, slope, size = _walk(at, z, a, low, high, KIND)
            going = (tl.abs(total - target) <= close * (size + tl.abs(target))) == 0
            if KIND == BUDGET:
                going = going & ((at > 0) | (total > target))
    return at, x


@jit
def _meet_both(inner, outer, z, a, target, c, goal, low, high, close, KIND: tl.constexpr):
    """The multipliers of two rows, the second an equation, NaN where there are none; x for them."""
    least, most, reach = number(float("-inf"), z), number(float("inf"), z), number(1.0, z)
    at = outer
    widest = tl.max(tl.abs(c))
    widest = tl.where(widest > 0, widest, 1.0)
    x = z
    going = yes()
    trial = 0
    while going:
        inner, x = _meet(inner, z - at * c, a, target, low, high, close, KIND)
        inside = (low < x) & (x < high)
        s = a
        if KIND == BUDGET:
            inside = inside & (((inner * a > 0) & (x == 0)) == 0)
            s = tl.where(x >= 0, a, -a)
        total, own, size = sums(c * x, tl.where(inside, c * c, 0.0), tl.abs(c * x))
        mixed, other, _ = sums(
            tl.where(inside, c * s, 0.0), tl.where(inside, s * s, 0.0), tl.zeros_like(x)
        )
        ties = other > 0
        if KIND == BUDGET:
            ties = ties & (inner > 0)
        slope = own - tl.where(ties, mixed * mixed / tl.where(ties, other, 1.0), 0.0)
        excess = total - goal
        met = tl.abs(excess) <= 2 * close * (size + tl.abs(goal))
        least = tl.where(excess > 0, at, least)
        most = tl.where(excess > 0, most, at)
        steep = slope > 1e-4 * own
        jump = tl.where(excess > 0, reach, -reach) / widest
        new = at + tl.where(steep, excess / tl.where(steep, slope, 1.0), jump)
        reach = tl.where(steep, reach, 4 * reach)
        same = new == at
        outside = (new <= least) | (new >= most)
        new = tl.where(outside, 0.5 * (least + most), new)
        same = same | (outside & ((new <= least) | (new >= most) | (new != new)))
        trial += 1
        lost = (inner != inner) | (excess != excess) | (trial > _TRIALS)
        going = (met | same | lost) == 0
        at = tl.where(lost & (met == 0), float("nan"), tl.where(going, new, at))
    return inner, at, x


@jit
def project(
    z, first, second, a, target, c, goal, low, high, close, KIND: tl.constexpr, CUT: tl.constexpr
):
    """The point next to z, the multipliers of the rows, and where coordinates are held.

    The multipliers that are given are a guess; NaN among those that are found means there are none.
    ``close`` is the rounding of a sum of n terms.
    """
    if KIND == NOTHING:
        x = tl.minimum(tl.maximum(z, low), high)
    elif CUT:
        first, second, x = _meet_both(first, second, z, a, target, c, goal, low, high, close, KIND)
    else:
        first, x = _meet(first, z, a, target, low, high, close, KIND)
    y = z - second * c if CUT else z
    kinked = y != y
    if KIND == EQUATION:
        y = y - first * a
    if KIND == BUDGET:
        hold = first * a
        kinked = (hold > 0) & (tl.abs(y) <= hold)
        y = tl.where(kinked, 0.0, y - tl.where(y > 0, hold, -hold))
    places = tl.where(kinked, ZERO, FREE)
    places = tl.where(y >= high, HIGH, places)
    places = tl.where(y <= low, LOW, places)
    return x, first, second, places
