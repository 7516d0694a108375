"""A point of a set in normal form as it is returned: rounded, feasible, with its gap, compiled."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.constants import BUDGET, DOUBLE, EQUATION, FREE
from dfwlayer.engines.compiled.kernels.dense import kernel
from dfwlayer.engines.compiled.kernels.faces import slope
from dfwlayer.engines.compiled.kernels.numbers import rounded
from dfwlayer.engines.compiled.kernels.polytope import KIND, LOWER, ROWS, TOTAL, UPPER

__all__ = ["gap_of", "settle"]


@kernel
def _total(body, row, x):
    """What a row adds up to, with the rounding of the sum carried along, and its largest term."""
    total = carried = size = 0.0
    budget = body[row, KIND] == BUDGET
    for i in range(len(x)):
        a = body[row, i]
        term = a * abs(x[i]) if budget else a * x[i]
        size = max(size, abs(term))
        new = total + term
        carried += (total - new) + term if abs(total) >= abs(term) else (term - new) + total
        total = new
    return total + carried, size


@kernel
def _missing(body, row, x, eps):
    """What x lacks in a row, 0 where that is no more than rounding."""
    total, size = _total(body, row, x)
    rest = body[row, TOTAL] - total
    if body[row, KIND] == BUDGET:  # inside is fine, so a nudge goes a little further
        return rest - eps * size if rest < 0 else 0.0
    return rest if abs(rest) > 0.5 * eps * max(size, abs(body[row, TOTAL])) else 0.0


@kernel
def settle(body, blocks, places, x, eps, sides):
    """Round x to its dtype such that it is feasible; False where that takes more than a nudge.

    In every block a coordinate, or two, that has room takes up what rounding left of the rows.
    """
    n = len(x)
    for i in range(n):
        low, high = body[LOWER, i], body[UPPER, i]
        v = rounded(x[i], eps)
        x[i] = low if v < low else (high if v > high else v)
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        for _ in range(3 if last > row else 0):
            here = _missing(body, row, x, eps)
            there = _missing(body, row + 1, x, eps) if last - row > 1 else 0.0
            if here == 0 and there == 0:
                break
            one = two = -1
            best = 0.0
            for i in range(first, end):  # the coordinate with most to give
                if places[i] == FREE and abs(body[row, i] * x[i]) > best:
                    best, one = abs(body[row, i] * x[i]), i
            if one < 0:
                return False
            a = slope(body, row, one, sides)
            if last - row == 1:
                x[one] = rounded(x[one] + here / a, eps)
                continue
            best = 0.0
            c = body[row + 1, one]
            for i in range(first, end):
                cross = a * body[row + 1, i] - c * slope(body, row, i, sides)
                if places[i] == FREE and abs(cross) > best:
                    best, two = abs(cross), i
            if two < 0:
                return False
            b, d = slope(body, row, two, sides), body[row + 1, two]
            x[one] = rounded(x[one] + (d * here - b * there) / (a * d - b * c), eps)
            x[two] = rounded(x[two] + (a * there - c * here) / (a * d - b * c), eps)
    for row in range(ROWS, len(body)):
        total, size = _total(body, row, x)
        off = total - body[row, TOTAL]
        if body[row, KIND] == EQUATION:
            off = abs(off)
        if off > 2 * eps * max(size, abs(body[row, TOTAL])):
            return False
    within = True
    for i in range(n):
        within = within and body[LOWER, i] <= x[i] <= body[UPPER, i]
    return within


@kernel
def _bounded_multipliers(body, blocks, g, multipliers):
    """Multipliers next to these for which the bound of `gap_of` is finite, where there are some."""
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        if last == row:
            continue
        if body[row, KIND] == EQUATION and last - row == 1:
            least, most = -np.inf, np.inf
            for i in range(first, end):
                a = body[row, i]
                if a == 0:
                    continue
                up, down = body[UPPER, i] == np.inf, body[LOWER, i] == -np.inf
                if up if a > 0 else down:
                    least = max(least, -g[i] / a)
                if down if a > 0 else up:
                    most = min(most, -g[i] / a)
            multipliers[row] = min(max(multipliers[row], least), most)
        elif body[row, KIND] == BUDGET:
            need = max(multipliers[row], 0.0)
            for i in range(first, end):
                r = g[i]
                if last - row == 2:
                    r += multipliers[row + 1] * body[row + 1, i]
                way = body[UPPER, i] if r < 0 else -body[LOWER, i]
                if way == np.inf and body[row, i] > 0:
                    need = max(need, (1 + 2 * DOUBLE) * abs(r) / body[row, i])
            multipliers[row] = need


@kernel
def gap_of(body, blocks, x, g, multipliers):
    """A bound of f(x) − f* by Lagrangian duality: valid for any multipliers, tight for the right.

    ⟨g, x⟩ + Σ λ_j t_j − min over the bounds of ⟨g, s⟩ + Σ λ_j h_j(s), term by term, so that
    nothing cancels.
    """
    _bounded_multipliers(body, blocks, g, multipliers)
    gap = terms = 0.0
    k = len(body)
    for row in range(ROWS, k):
        total, _ = _total(body, row, x)
        rest = multipliers[row] * (body[row, TOTAL] - total)
        gap += rest if body[row, KIND] == BUDGET else abs(rest)
    for i in range(len(x)):
        r, hold = g[i], 0.0
        for row in range(ROWS, k):
            if body[row, KIND] == BUDGET:
                hold += multipliers[row] * body[row, i]
            else:
                r += multipliers[row] * body[row, i]
        if r == 0 and hold == 0:
            continue
        low, high = body[LOWER, i], body[UPPER, i]
        # the best s is at a bound, or at zero or the point next to it
        s = low if r > 0 else high
        if abs(r) <= hold:
            s = low if low > 0 else (high if high < 0 else 0.0)
        if not np.isfinite(s):
            return np.inf
        gap += max(r * (x[i] - s) + hold * (abs(x[i]) - abs(s)), 0.0)
        terms += abs(r * x[i])
    return max(gap, 0.0) + DOUBLE * terms
