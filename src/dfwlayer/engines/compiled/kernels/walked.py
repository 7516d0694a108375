"""A walk to the solution of one problem: from where, with which matrix, and what came of it."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.active import REDUCED, TIES, side_of
from dfwlayer.engines.compiled.kernels.dense import add, copy, fill, kernel, making, product
from dfwlayer.engines.compiled.kernels.faces import (
    PX,
    PY,
    SHARES,
    SIDES,
    X,
    blur,
    minimise,
    share_of,
)
from dfwlayer.engines.compiled.kernels.verdict import SINGULAR, WRONG, judge
from dfwlayer.engines.compiled.kernels.walk import FLAT, walk

__all__ = ["has_vertex", "vertex", "walked"]


@kernel
def has_vertex(body, blocks):
    """Whether `vertex` knows one: for sets with no equation beside another row in its block."""
    found = True
    for block in range(len(blocks)):
        row, last = blocks[block, 2], blocks[block, 3]
        found = found and (last - row < 2 or body[last - 1, table.KIND] == table.BUDGET)
    return found


@kernel
def _meet(P, q, body, row, first, end, x, places):
    """From bounds to where an equation holds, by the coordinates along which f costs least.

    The last one to move is free; if none has to, one that could.
    """
    rest = body[row, table.TOTAL]
    for i in range(first, end):
        rest -= body[row, i] * x[i]
    for _ in range(first, end):
        chosen, least, step = -1, np.inf, 0.0
        for i in range(first, end):
            a = body[row, i]
            if a == 0:
                continue
            wall = body[table.UPPER if (a > 0) == (rest >= 0) else table.LOWER, i]
            if wall == x[i]:
                continue
            way = rest / a if abs(rest / a) <= abs(wall - x[i]) else wall - x[i]
            cost = (q[i] if wall > x[i] else -q[i]) + 0.5 * P[i, i] * abs(way)
            if cost < least * abs(a):
                chosen, least, step = i, cost / abs(a), way
        if chosen < 0:
            return
        a, before = body[row, chosen], x[chosen]
        x[chosen] += step
        if step == rest / a:
            places[chosen] = place.FREE
            return
        places[chosen] = place.HIGH if step > 0 else place.LOW
        x[chosen] = body[table.UPPER if step > 0 else table.LOWER, chosen]
        rest -= a * (x[chosen] - before)


@kernel
def vertex(P, q, body, blocks, x, places):
    """A point of the set that bounds and kinks hold, on the side where f falls from zero.

    Of an equation one coordinate is free, the others are next to zero as far as it lets them. What
    has neither is free.
    """
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        budget = row < last and body[row, table.KIND] == table.BUDGET
        equation = row < last and not budget
        for i in range(first, end):
            low, high = body[table.LOWER, i], body[table.UPPER, i]
            down = abs(low) <= abs(high) if equation else q[i] >= 0 or high == np.inf
            if budget and body[row, i] > 0:
                x[i] = 0.0
                places[i] = place.LOW if low == 0 else (place.HIGH if high == 0 else place.ZERO)
            elif low > -np.inf and down:
                x[i], places[i] = low, place.LOW
            elif high < np.inf:
                x[i], places[i] = high, place.HIGH
            else:
                x[i], places[i] = 0.0, place.FREE
        if equation:
            _meet(P, q, body, row, first, end, x, places)


@making
def _with_squares(P, q, body, bound, shares):
    """P, q and the bound of f + Σ ½σ(⟨a, x⟩ − t)² over the equations, the same as f on the set."""
    n = len(q)
    more, slope = np.empty((n, n)), np.empty(n)
    copy(q, slope)
    for i in range(n):
        copy(P[i], more[i])
    for row in range(table.ROWS, len(body)):
        shares[row] = share_of(P, body, row)
        if shares[row] == 0:
            continue
        a, steepest, length = body[row], 0.0, 0.0
        for i in range(n):
            steepest, length = max(steepest, abs(a[i])), length + abs(a[i])
            add(more[i], shares[row] * a[i], a, n)
        add(slope, -shares[row] * a[table.TOTAL], a, n)
        bound += shares[row] * steepest * length
    return more, slope, bound


@making
def walked(
    P, q, body, eps, bound, most, left, places, multipliers, best, work, ties, index, L, schur,
    singular,
):  # fmt: skip
    """From x on a face to the solution, coordinate by coordinate.

    Returns a verdict, the steps, and what they took. Where P is known to be ``singular`` on a face,
    or turns out to be on the one that is found, equations help: f may bend where they hold.
    """
    n, k = len(q), len(body)
    fill(0.0, ties[SHARES])
    same = _with_squares(P, q, body, bound, ties[SHARES]) if singular else (P, q, bound)
    x, sides = work[X], work[SIDES]
    for i in range(n):
        if places[i] == place.LOW or places[i] == place.HIGH:
            sides[i] = side_of(x[i], places[i])
        else:
            sides[i] = 1.0 if x[i] > 0 else (-1.0 if x[i] < 0 else 0.0)
    memory = np.empty((REDUCED + k, n)), np.empty((TIES, k))
    holds = np.zeros(k, np.bool_)
    face = x, places, sides, multipliers, holds
    given = same[0], same[1], body, same[2], most, left
    free, steps, _, spent = walk(*given, *face, 0, index, L, schur, *memory)
    if free == FLAT and not singular:
        same = _with_squares(P, q, body, bound, ties[SHARES])
        given = same[0], same[1], body, same[2], most - steps, left - spent
        free, more, _, taken = walk(*given, *face, 0, index, L, schur, *memory)
        steps, spent = steps + more, spent + taken
    verdict = WRONG
    index[-1] = 0  # L is a factor
    if free >= 0:
        end = P, q, body, eps, places, multipliers, best, work, ties, index, L, schur
        if not minimise(*end, True):
            verdict = SINGULAR
        else:
            off = blur(index, eps)
            verdict = judge(q, body, places, multipliers, best, work[PY], bound, sides, off)
    elif free == FLAT:
        verdict = SINGULAR
    if verdict == WRONG:  # others go on from here
        product(P, x, work[PX])
    return verdict, steps, spent
