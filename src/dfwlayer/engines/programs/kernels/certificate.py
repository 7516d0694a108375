"""A point of a set in normal form as it is returned: rounded, feasible, with its gap.

See `dfwlayer.engines.compiled.kernels.certificate`, whose rules these are.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants
from dfwlayer.engines.programs.kernels.blocks import count, exact_sum, jit, number, rounded
from dfwlayer.engines.programs.kernels.projection import BUDGET, EQUATION, FREE, NOTHING, slope_of

__all__ = ["gap_of", "settle"]

_DOUBLE = tl.constexpr(constants.DOUBLE)


@jit
def _first_total(a, x, KIND: tl.constexpr):
    """What the first row adds up to, and its largest term."""
    term = a * (tl.abs(x) if KIND == BUDGET else x)
    return exact_sum(term)


@jit
def _missing(a, target, x, eps, KIND: tl.constexpr):
    """What x lacks in a row, 0 where that is no more than rounding."""
    total, size = _first_total(a, x, KIND)
    rest = target - total
    if KIND == BUDGET:  # inside is fine, so a nudge goes a little further
        return tl.where(rest < 0, rest - eps * size, 0.0)
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        off = tl.abs(rest) > 0.5 * eps * tl.maximum(size, tl.abs(target))
        return tl.where(off, rest, 0.0)


@jit
def _off(a, target, x, eps, KIND: tl.constexpr):
    """Whether a row is off by more than rounding."""
    total, size = _first_total(a, x, KIND)
    off = total - target
    if KIND == EQUATION:
        off = tl.abs(off)
    return (off <= 2 * eps * tl.maximum(size, tl.abs(target))) == 0


@jit
def _most(give, free, N: tl.constexpr):
    """The free coordinate that has most to give, as a mask; none where all have nothing."""
    lane = tl.arange(0, N)
    give = tl.where(free, give, 0.0)
    best = tl.max(give)
    chosen = tl.where(best > 0, tl.min(tl.where(give == best, lane, N)), N)
    return lane == chosen, chosen < N


@jit
def settle(
    out,
    places,
    x,
    a,
    target,
    c,
    goal,
    low,
    high,
    eps,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
    N: tl.constexpr,
):
    """x rounded to its dtype such that it is feasible; whether that took no more than a nudge.

    A coordinate, or two, that has room takes up what rounding left of the rows.
    """
    free = places == FREE
    sides = x
    x = tl.minimum(tl.maximum(rounded(x, out), low), high)
    sound = count(x != x) == 0
    if KIND != NOTHING:
        slopes = slope_of(a, sides, KIND)
        for _ in range(3):
            here = _missing(a, target, x, eps, KIND)
            there = _missing(c, goal, x, eps, EQUATION) if CUT else number(0.0, x)
            if (here != 0) | (there != 0):
                one, found = _most(tl.abs(a * x), free, N)
                sound = sound & found
                slope = tl.sum(tl.where(one, slopes, 0.0))
                if CUT:
                    other = tl.sum(tl.where(one, c, 0.0))
                    cross = slope * c - other * slopes
                    two, found = _most(tl.abs(cross), free, N)
                    sound = sound & found
                    b, d = tl.sum(tl.where(two, slopes, 0.0)), tl.sum(tl.where(two, c, 0.0))
                    whole = slope * d - b * other
                    whole = tl.where(whole != 0, whole, 1.0)
                    x += tl.where(one, (d * here - b * there) / whole, 0.0)
                    x += tl.where(two, (slope * there - other * here) / whole, 0.0)
                else:
                    x += tl.where(one, here / tl.where(slope != 0, slope, 1.0), 0.0)
                x = rounded(x, out)
        sound = sound & (_off(a, target, x, eps, KIND) == 0)
    if CUT:
        sound = sound & (_off(c, goal, x, eps, EQUATION) == 0)
    return x, sound & (count((low <= x) & (x <= high)) == N)


@jit
def _bounded(g, a, c, first, second, low, high, KIND: tl.constexpr, CUT: tl.constexpr):
    """A multiplier next to that of the first row for which the bound of `gap_of` is finite."""
    infinite = float("inf")
    if KIND == BUDGET:
        r = g + second * c if CUT else g
        way = tl.where(r < 0, high, -low)
        need = tl.abs(r) * (1 + 2 * _DOUBLE) / tl.where(a > 0, a, 1.0)
        first = tl.maximum(first, tl.max(tl.where((way == infinite) & (a > 0), need, 0.0)))
    elif KIND == EQUATION and not CUT:
        up, down = high == infinite, low == -infinite
        at = -g / tl.where(a == 0, 1.0, a)
        above = ((a > 0) & up) | ((a < 0) & down)
        below = ((a > 0) & down) | ((a < 0) & up)
        first = tl.maximum(first, tl.max(tl.where(above, at, -infinite)))
        first = tl.minimum(first, tl.min(tl.where(below, at, infinite)))
    return first


@jit
def gap_of(
    x, g, a, target, c, goal, first, second, low, high, KIND: tl.constexpr, CUT: tl.constexpr
):
    """A bound of f(x) − f* by Lagrangian duality: valid for any multipliers, tight for the right.

    ⟨g, x⟩ + Σ λ_j t_j − min over the bounds of ⟨g, s⟩ + Σ λ_j h_j(s), term by term, so that
    nothing cancels.
    """
    gap = number(0.0, x)
    r, hold = g, tl.zeros_like(x)
    if KIND != NOTHING:
        first = _bounded(g, a, c, first, second, low, high, KIND, CUT)
        total, _ = _first_total(a, x, KIND)
        rest = first * (target - total)
        gap += rest if KIND == BUDGET else tl.abs(rest)
    if KIND == EQUATION:
        r += first * a
    if KIND == BUDGET:
        hold = first * a
    if CUT:
        total, _ = _first_total(c, x, EQUATION)
        gap += tl.abs(second * (goal - total))
        r += second * c
    # the best s is at a bound, or at zero or the point next to it
    s = tl.where(r > 0, low, high)
    nearest = tl.where(low > 0, low, tl.where(high < 0, high, 0.0))
    s = tl.where(tl.abs(r) <= hold, nearest, s)
    idle = (r == 0) & (hold == 0)
    s = tl.where(idle, x, s)
    endless = count((tl.abs(s) < float("inf")) == 0)
    s = tl.where(tl.abs(s) < float("inf"), s, 0.0)
    gap += tl.sum(tl.maximum(r * (x - s) + hold * (tl.abs(x) - tl.abs(s)), 0.0))
    gap = tl.maximum(gap, 0.0) + tl.sum(tl.abs(r * x)) * _DOUBLE
    return tl.where(endless > 0, float("inf"), gap)
