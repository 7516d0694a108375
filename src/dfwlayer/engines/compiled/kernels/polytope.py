"""Projections onto a set in normal form, compiled.

A set of one problem is a list of blocks of coordinates, each with bounds l ≤ x ≤ u and at most two
rows that tie its coordinates together: a budget Σ w_i |x_i| ≤ t or an equation ⟨a, x⟩ = b, and an
equation. The point nearest to z is, with one multiplier λ for each row,

    x_i = clip(soft(z_i − Σ λ_eq a_i, λ_budget w_i), l_i, u_i),

and what a row adds up to falls with its multiplier, in straight pieces. So one multiplier is found
by Newton's method within a bracket, which ends on the right piece exactly, and two by doing that
for each trial of the second one.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.constants import LARGEST, SMALLEST
from dfwlayer.engines.compiled.kernels.dense import kernel, summing
from dfwlayer.engines.compiled.kernels.numbers import number_of, ordered

__all__ = ["meet", "project", "sound"]

TRIALS = 100  # most values of a multiplier; about five are needed


@kernel
def _clip(y, low, high):
    return low if y < low else (high if y > high else y)


@summing
def _walk(low, high, slopes, budget, multiplier, z):
    """For a multiplier of a row: what it adds up to, how fast that falls, its size.

    Without a branch, so that several coordinates are done at once.
    """
    total = slope = size = 0.0
    if budget:
        for i in range(len(z)):
            a = slopes[i]
            y = abs(z[i]) - multiplier * a
            y = y if y > 0 else 0.0
            y = y if z[i] >= 0 else -y
            c = high[i] if y > high[i] else y
            c = low[i] if c < low[i] else c
            total += a * abs(c)
            slope += a * a if (y != 0) & (c == y) else 0.0
        return total, slope, total
    for i in range(len(z)):
        a = slopes[i]
        y = z[i] - multiplier * a
        c = high[i] if y > high[i] else y
        c = low[i] if c < low[i] else c
        total += a * c
        size += abs(a * c)
        slope += a * a if c == y else 0.0
    return total, slope, size


@kernel
def _points(low, high, slopes, budget, multiplier, z, x, first, end):
    """x for a multiplier of a row."""
    for i in range(first, end):
        y = z[i] - multiplier * slopes[i]
        if budget:
            y = abs(z[i]) - multiplier * slopes[i]
            y = y if y > 0 else 0.0
            y = y if z[i] >= 0 else -y
        x[i] = _clip(y, low[i], high[i])


@kernel
def _next_bend(low, high, slopes, budget, multiplier, z, up):
    """The nearest multiplier in that direction where the row's sum moves again, NaN if none.

    Without a branch, so that several coordinates are done at once.
    """
    way = 1.0 if up else -1.0
    here, none = way * multiplier, ordered(np.inf)
    found = none
    for i in range(len(z)):
        a = slopes[i]
        y, least, most = z[i], low[i], high[i]
        y = abs(y) if budget else y
        least, most = abs(least) if budget else least, abs(most) if budget else most
        across = way * (a if a != 0 else 1.0)
        one, two = (y - least) / across, (y - most) / across
        found = min(found, ordered(one) if (one > here) & (a != 0) else none)
        found = min(found, ordered(two) if (two > here) & (a != 0) else none)
    return np.nan if found == none else way * number_of(found)


@kernel
def meet(body, row, start, z, first, end):
    """The multiplier for which a row holds, NaN if there is none."""
    eps = np.finfo(np.float64).eps
    # parts, as a number that may be negative counts from the end of a line, so that several
    # coordinates could not be done at once
    low, high = body[table.LOWER, first:end], body[table.UPPER, first:end]
    slopes, near = body[row, first:end], z[first:end]
    target = body[row, table.TOTAL]
    budget = body[row, table.KIND] == table.BUDGET
    least, most = -np.inf, np.inf
    over = under = 0.0  # the excess at these ends
    side = 0  # the one that was moved last
    at = 0.0 if budget else start
    close = eps * (2 + 0.25 * (end - first))  # rounding of the sum
    for trial in range(TRIALS):
        total, slope, size = _walk(low, high, slopes, budget, at, near)
        excess = total - target
        if budget and trial == 0 and excess <= 0:
            return 0.0
        if abs(excess) <= close * (size + abs(target)):
            return at
        if excess > 0:
            under *= 0.5 if side > 0 else 1.0  # an end that stays counts less (Illinois)
            least, over, side = at, excess, 1
        else:
            over *= 0.5 if side < 0 else 1.0
            most, under, side = at, excess, -1
        between = least > -np.inf and most < np.inf
        if slope > 0:
            new = at + excess / slope
            if new == at:
                return at
        elif between:
            new = np.inf
        else:
            new = _next_bend(low, high, slopes, budget, at, near, excess > 0)
            if np.isnan(new):
                return np.nan
        if between and not abs(new - at) < 0.5 * (most - least):
            # the piece ends before; over many pieces the sum is not far from a straight line
            new = least + (most - least) * (over / (over - under))
        if not least < new < most:
            new = 0.5 * (least + most)  # finite, as no step goes beyond an end that is not there
            if not least < new < most:
                return at  # to the last digit
        at = new
    return np.nan


@kernel
def _meet_both(body, first_row, start, z, x, first, end, shifted):
    """The multipliers of two rows, the second an equation, NaN where there are none; x for them."""
    eps = np.finfo(np.float64).eps
    outer = first_row + 1
    target = body[outer, table.TOTAL]
    least, most = -np.inf, np.inf
    at, inner = start[outer], start[first_row]
    close = eps * (4 + 0.5 * (end - first))
    reach = 1.0
    low, high, slopes = body[table.LOWER], body[table.UPPER], body[first_row]
    budget = body[first_row, table.KIND] == table.BUDGET
    for _ in range(TRIALS):
        for i in range(first, end):
            shifted[i] = z[i] - at * body[outer, i]
        inner = meet(body, first_row, inner, shifted, first, end)
        if np.isnan(inner):
            return np.nan, np.nan
        _points(low, high, slopes, budget, inner, shifted, x, first, end)
        total = size = own = mixed = other = widest = 0.0
        for i in range(first, end):
            a, c = body[outer, i], x[i]
            total += a * c
            size += abs(a * c)
            widest = max(widest, abs(a))
            if body[table.LOWER, i] < c < body[table.UPPER, i]:
                s = body[first_row, i]
                if budget:
                    if inner > 0 and s > 0 and c == 0:
                        continue
                    s = s if c >= 0 else -s
                own += a * a
                mixed += a * s
                other += s * s
        slope = own
        if other > 0 and (not budget or inner > 0):
            slope -= mixed * mixed / other
        excess = total - target
        if abs(excess) <= close * (size + abs(target)):
            return inner, at
        if excess > 0:
            least = at
        else:
            most = at
        if slope > 1e-10 * own:
            new = at + excess / slope
        else:
            new = at + (reach if excess > 0 else -reach) / max(widest, 1e-300)
            reach *= 4
        if new == at:
            return inner, at
        if not least < new < most:
            new = 0.5 * (least + most)
            if not least < new < most:
                return inner, at
        at = new
    return np.nan, np.nan


@kernel
def project(body, blocks, z, x, multipliers, places, shifted):
    """The point x next to z; multipliers are a guess and the result. False if none was found.

    ``places`` says which coordinates are held where, ``shifted`` is scratch, all (n,).
    """
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        count = last - row
        if count == 0:
            for i in range(first, end):
                y, low, high = z[i], body[table.LOWER, i], body[table.UPPER, i]
                x[i] = _clip(y, low, high)
                below = y <= low or low == high
                places[i] = place.LOW if below else (place.HIGH if y >= high else place.FREE)
            continue
        if count == 1:
            at = meet(body, row, multipliers[row], z, first, end)
            if np.isnan(at):
                return False
            budget = body[row, table.KIND] == table.BUDGET
            _points(body[table.LOWER], body[table.UPPER], body[row], budget, at, z, x, first, end)
            multipliers[row] = at
        else:
            both = _meet_both(body, row, multipliers, z, x, first, end, shifted)
            multipliers[row], multipliers[row + 1] = both
            if np.isnan(both[1]):
                return False
        for i in range(first, end):
            low, high = body[table.LOWER, i], body[table.UPPER, i]
            y, hold = z[i], 0.0
            for r in range(row, last):
                if body[r, table.KIND] == table.BUDGET:
                    hold = multipliers[r] * body[r, i]
                else:
                    y -= multipliers[r] * body[r, i]
            kinked = hold > 0 and abs(y) <= hold
            if kinked:
                y = 0.0
            elif hold > 0:
                y -= hold if y > 0 else -hold
            if y <= low or low == high:
                places[i] = place.LOW
            elif y >= high:
                places[i] = place.HIGH
            else:
                places[i] = place.ZERO if kinked else place.FREE
    return True


@summing
def _bounds_are_sound(low, high, n):
    """Whether bounds are in order, and numbers that this code may be used on; without a branch."""
    fine = 0.0
    for i in range(n):
        least, most = low[i], high[i]
        down, up = abs(least), abs(most)
        good = (least <= most) & (least < np.inf) & (most > -np.inf)
        good &= ((down < LARGEST) | (down == np.inf)) & ((up < LARGEST) | (up == np.inf))
        good &= ((down == 0) | (down >= SMALLEST)) & ((up == 0) | (up >= SMALLEST))
        fine += 1.0 if good else 0.0
    return fine == n


@summing
def _slopes_are_sound(slopes, budget, n):
    """The same for those of a row."""
    fine = 0.0
    for i in range(n):
        good = (abs(slopes[i]) < LARGEST) & ((not budget) | (slopes[i] >= 0))
        fine += 1.0 if good else 0.0
    return fine == n


@summing
def _surround_zero(low, high, first, end):
    """Whether zero is between the bounds, as it is where there is a budget."""
    fine = 0.0
    for i in range(first, end):
        fine += 1.0 if (low[i] <= 0) & (high[i] >= 0) else 0.0
    return fine == end - first


@kernel
def sound(body, blocks):
    """Whether the numbers of a set are such that this code may be used on them."""
    n, low, high = body.shape[1] - 2, body[table.LOWER], body[table.UPPER]
    if not _bounds_are_sound(low, high, n):
        return False
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        budget = row < last and body[row, table.KIND] == table.BUDGET
        if budget and not _surround_zero(low, high, first, end):
            return False
    for row in range(table.ROWS, len(body)):
        budget = body[row, table.KIND] == table.BUDGET
        if not abs(body[row, table.TOTAL]) < LARGEST or (
            budget and not body[row, table.TOTAL] > SMALLEST
        ):
            return False
        if not _slopes_are_sound(body[row], budget, n):
            return False
    return True
