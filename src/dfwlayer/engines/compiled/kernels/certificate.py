"""A point of a set in normal form as it is returned: rounded, feasible, with its gap, compiled."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, LARGEST
from dfwlayer.engines.compiled.kernels.dense import add, fill, kernel, product, solve_with, summing
from dfwlayer.engines.compiled.kernels.faces import free_in, slope
from dfwlayer.engines.compiled.kernels.numbers import number_of, ordered, rounded

__all__ = ["gap_beside", "gap_of", "relaxed_gap", "settle", "total_of"]

DIGITS = 52  # of a float64 behind the first, in front of which its bits have the exponent
FAINTEST = 1e-200  # a number whose last digits' last digits are none of the smallest numbers
BLOCK = 1024  # terms of a row that are added up at once, so that N³/2¹⁰² is nothing


@kernel
def _plus(total, term):
    """A sum and its rounding (Knuth), without a branch."""
    new = total + term
    part = new - total
    return new, (total - (new - part)) + (term - part)


@kernel
def _largest_term(slopes, x):
    """The largest |a_i x_i|, NaN if one is."""
    key = ordered(0.0)
    for i in range(len(x)):
        key = max(key, ordered(abs(slopes[i] * x[i])))
    return number_of(key)


@kernel
def _beyond(value):
    """A power of two that is larger than a number."""
    bits = np.float64(value).view(np.int64)
    return np.int64(((bits >> DIGITS) + 1) << DIGITS).view(np.float64)


@kernel
def _in_units(slopes, x, budget, coarse, fine):
    """Σ of some terms of a row, in whole units of the last digits of two numbers, see `total_of`.

    Such a number rounds what is added to it to its last digit, and keeps its exponent, so that the
    bits count these units. Integers have one sum in any order, which vector registers can take.
    """
    units = rests = np.int64(0)
    one, two = np.float64(coarse).view(np.int64), np.float64(fine).view(np.int64)
    for i in range(len(x)):
        term = slopes[i] * x[i]
        term = abs(term) if budget else term
        there = term + coarse
        rest = (term - (there - coarse)) + fine
        units += np.float64(there).view(np.int64) - one
        rests += np.float64(rest).view(np.int64) - two
    return units, rests


@kernel
def _carried(slopes, x, budget):
    """The same for terms of any size, one after the other."""
    total = lost = 0.0
    for i in range(len(x)):
        term = slopes[i] * x[i]
        total, part = _plus(total, abs(term) if budget else term)
        lost += part
    return total + lost


@kernel
def total_of(body, row, x):
    """What a row adds up to, as exact as float64 can tell, and its largest term.

    With S a power of two beyond 2N times the largest of N terms, each term t and any sum of them
    leave 3/2 S between S and 2S. So t is a number of units S/2⁵² and half a unit at most, of which
    the same is made with a smaller S. What that leaves is N³/2¹⁰² of the largest term.
    """
    slopes, n, budget = body[row], len(x), body[row, table.KIND] == table.BUDGET
    size = _largest_term(slopes, x)
    if not FAINTEST < size < LARGEST:
        return _carried(slopes, x, budget), size
    count = min(n, BLOCK)
    most = _beyond(2 * count * size)
    rest = _beyond(count * DOUBLE * most)
    total = lost = 0.0
    for first in range(0, n, BLOCK):
        end = min(first + BLOCK, n)
        terms = slopes[first:end], x[first:end]
        units, rests = _in_units(*terms, budget, 1.5 * most, 1.5 * rest)
        total, part = _plus(total, DOUBLE * most * units)
        lost += part + DOUBLE * rest * rests
    return total + lost, size


@kernel
def _missing(body, row, x, eps):
    """What x lacks in a row, 0 where that is no more than rounding."""
    total, size = total_of(body, row, x)
    rest = body[row, table.TOTAL] - total
    if body[row, table.KIND] == table.BUDGET:  # inside is fine, so a nudge goes a little further
        return rest - eps * size if rest < 0 else 0.0
    return rest if abs(rest) > 0.5 * eps * max(size, abs(body[row, table.TOTAL])) else 0.0


@kernel
def _off(body, row, x, eps):
    """Whether a row is off by more than rounding."""
    total, size = total_of(body, row, x)
    off = total - body[row, table.TOTAL]
    if body[row, table.KIND] == table.EQUATION:
        off = abs(off)
    return off > 2 * eps * max(size, abs(body[row, table.TOTAL]))


@summing
def _inside(low, high, x, eps):
    """Round x to its dtype, between bounds."""
    for i in range(len(x)):
        v, least, most = rounded(x[i], eps), low[i], high[i]
        v = most if v > most else v
        x[i] = least if v < least else v


@summing
def _is_inside(low, high, x):
    """Whether x is between bounds."""
    outside = 0.0
    for i in range(len(x)):
        outside += 0.0 if (x[i] >= low[i]) & (x[i] <= high[i]) else 1.0
    return outside == 0


@kernel
def settle(body, blocks, places, x, eps, sides):
    """Round x to its dtype such that it is feasible; False where that takes more than a nudge.

    In every block a coordinate, or two, that has room takes up what rounding left of the rows.
    """
    _inside(body[table.LOWER], body[table.UPPER], x, eps)
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        if last == row:
            continue
        for trial in range(4):
            here = _missing(body, row, x, eps)
            there = _missing(body, row + 1, x, eps) if last - row > 1 else 0.0
            if here == 0 and there == 0:
                break
            if trial == 3:
                if _off(body, row, x, eps) or (last - row > 1 and _off(body, row + 1, x, eps)):
                    return False
                break
            one = two = -1
            best = 0.0
            for i in range(first, end):  # the coordinate with most to give
                size = abs(body[row, i] * x[i])
                size = size if places[i] == place.FREE else 0.0
                if size > best:
                    best, one = size, i
            if one < 0:  # bounds alone hold this row
                if _off(body, row, x, eps) or (last - row > 1 and _off(body, row + 1, x, eps)):
                    return False
                break
            a = slope(body, row, one, sides)
            if last - row == 1:
                x[one] = rounded(x[one] + here / a, eps)
                continue
            best = 0.0
            c = body[row + 1, one]
            for i in range(first, end):
                cross = a * body[row + 1, i] - c * slope(body, row, i, sides)
                if places[i] == place.FREE and abs(cross) > best:
                    best, two = abs(cross), i
            if two < 0:
                return False
            b, d = slope(body, row, two, sides), body[row + 1, two]
            x[one] = rounded(x[one] + (d * here - b * there) / (a * d - b * c), eps)
            x[two] = rounded(x[two] + (a * there - c * here) / (a * d - b * c), eps)
    return _is_inside(body[table.LOWER], body[table.UPPER], x)


@kernel
def _enough(low, high, slopes, g, push, second):
    """The least multiplier of a budget that keeps all coordinates that lack a bound at zero.

    The gradient is g + push · second, of an equation beside the budget. Without a branch.
    """
    need = none = ordered(0.0)
    for i in range(len(g)):
        r = g[i] + push * second[i]
        missing = (high[i] == np.inf) if r < 0 else (low[i] == -np.inf)
        counts = missing & (slopes[i] > 0)
        share = abs(r) / (slopes[i] if counts else 1.0)
        need = max(need, ordered(share) if counts else none)
    return (1 + 2 * DOUBLE) * number_of(need)


@kernel
def _between(low, high, slopes, g):
    """The multipliers of an equation for which no coordinate that lacks a bound would leave.

    They are between two numbers. Without a branch.
    """
    least = lowest = ordered(-np.inf)
    most = highest = ordered(np.inf)
    for i in range(len(g)):
        a = slopes[i]
        up, down = high[i] == np.inf, low[i] == -np.inf
        key = ordered(-g[i] / (a if a != 0 else 1.0))
        least = max(least, key if (up & (a > 0)) | (down & (a < 0)) else lowest)
        most = min(most, key if (down & (a > 0)) | (up & (a < 0)) else highest)
    return number_of(least), number_of(most)


@summing
def _are_bounded(low, high):
    """Whether no bound is absent; without a branch."""
    absent = 0.0
    for i in range(len(low)):
        absent += 1.0 if (low[i] == -np.inf) | (high[i] == np.inf) else 0.0
    return absent == 0


@kernel
def _bounded_multipliers(body, blocks, g, multipliers):
    """Multipliers next to these for which the bound of `gap_of` is finite, where there are some."""
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        if last == row:
            continue
        # parts, as a number that may be negative counts from the end of a line, so that several
        # coordinates could not be done at once
        low, high = body[table.LOWER, first:end], body[table.UPPER, first:end]
        if _are_bounded(low, high):
            continue
        slopes, force = body[row, first:end], g[first:end]
        if body[row, table.KIND] == table.EQUATION and last - row == 1:
            least, most = _between(low, high, slopes, force)
            multipliers[row] = min(max(multipliers[row], least), most)
        elif body[row, table.KIND] == table.BUDGET:
            push, second = 0.0, slopes
            if last - row == 2:
                push, second = multipliers[row + 1], body[row + 1, first:end]
            need = _enough(low, high, slopes, force, push, second)
            multipliers[row] = max(multipliers[row], need)


@summing
def _lagrangian(low, high, x, r, hold, round_):
    """Σ of r_i (x_i − s_i) + h_i (|x_i| − |s_i|) with the best s between bounds, and of |r_i x_i|.

    The best s is at a bound, or at zero or the point next to it. Where there is none, as the bound
    is absent, what ½ s² adds to it has a minimum, ½ r_i² below, if f is ``round_``.
    """
    gap = terms = endless = 0.0
    for i in range(len(x)):
        least, most, at, slope, h = low[i], high[i], x[i], r[i], hold[i]
        zero = least if least > 0 else (most if most < 0 else 0.0)
        s = least if slope > 0 else most
        s = zero if abs(slope) <= h else s
        s = at if (slope == 0) & (h == 0) else s
        missing = abs(s) == np.inf
        away = missing & round_ & (h == 0)
        s = at if away else s
        endless += 1.0 if missing & (not away) else 0.0
        term = slope * (at - s) + h * (abs(at) - abs(s))
        term = 0.5 * slope * slope if away else term
        gap += term if term > 0 else 0.0
        terms += abs(slope * at)
    return (np.inf if endless > 0 else gap), terms


@kernel
def _reduced(body, x, g, multipliers, hold):
    """g + Σ λ_j a_j of the equations in the place of g, Σ λ_j w of the budgets in ``hold``.

    Returns what the rows themselves add to the gap.
    """
    fill(0.0, hold)
    rows = 0.0
    for row in range(table.ROWS, len(body)):
        total, _ = total_of(body, row, x)
        rest = multipliers[row] * (body[row, table.TOTAL] - total)
        budget = body[row, table.KIND] == table.BUDGET
        rows += rest if budget else abs(rest)
        add(hold if budget else g, multipliers[row], body[row], len(x))
    return rows


@kernel
def gap_of(body, blocks, x, g, multipliers, hold, round_):
    """A bound of f(x) − f* by Lagrangian duality: valid for any multipliers, tight for the right.

    ⟨g, x⟩ + Σ λ_j t_j − min over the bounds of ⟨g, s⟩ + Σ λ_j h_j(s), term by term, so that
    nothing cancels. The slopes of that take the place of g; ``hold`` (n,) is scratch. Infinite
    where a bound is absent, unless f is ``round_``: with the identity for a Hessian.
    """
    _bounded_multipliers(body, blocks, g, multipliers)
    rows = _reduced(body, x, g, multipliers, hold)
    gap, terms = _lagrangian(body[table.LOWER], body[table.UPPER], x, g, hold, round_)
    return max(gap + rows, 0.0) + DOUBLE * terms


@kernel
def relaxed_gap(P, body, x, g, multipliers, places, sides, L, index, hold, u, change):
    """The same without the bounds of the coordinates that are free, which makes the set larger.

    f is minimised over them: with r the slope of the Lagrangian there and L Lᵀ = P, it falls by
    ½⟨r, u⟩ with P u = r, and the slope along the others changes by −P u. Finite if those that lack
    a bound are held by the other one. ``index`` is the order of the free coordinates in L;
    ``hold``, ``u`` and ``change`` (n,) are scratch.
    """
    free, shift = free_in(places), 0.0
    rows = _reduced(body, x, g, multipliers, hold)
    for a in range(free):
        i = index[a]
        change[a] = g[i] + hold[i] * sides[i]
    if len(P) > 0:
        solve_with(L, change, free)
    fill(0.0, u)
    for a in range(free):
        i = index[a]
        u[i] = change[a]
        shift += 0.5 * (g[i] + hold[i] * sides[i]) * u[i]
    product(P, u, change)
    return shift + _closed_gap(body, x, g, hold, rows, places, change)


@kernel
def _closed_gap(body, x, g, hold, rows, places, change):
    """The gap where free coordinates were minimised out, after which the slope is g − change."""
    for i in range(len(x)):
        inside = places[i] == place.FREE
        g[i] = 0.0 if inside else g[i] - change[i]
        hold[i] = 0.0 if inside else hold[i]
    gap, terms = _lagrangian(body[table.LOWER], body[table.UPPER], x, g, hold, False)
    return max(gap + rows, 0.0) + DOUBLE * terms


@kernel
def gap_beside(body, x, g, multipliers, places, hold, change):
    """The same as `relaxed_gap` for a change P u that is known, without ½⟨r, u⟩."""
    rows = _reduced(body, x, g, multipliers, hold)
    return _closed_gap(body, x, g, hold, rows, places, change)
