"""What an active-set method asks of a face: its minimiser, how far to go there, what to free."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import (
    add,
    add_some,
    backward,
    copy,
    dot,
    factor,
    forward,
    kernel,
)
from dfwlayer.engines.compiled.kernels.faces import forces, slope

__all__ = [
    "BARRED",
    "COS",
    "GRADIENT",
    "NEW",
    "PULL",
    "REDUCED",
    "SIN",
    "TIES",
    "WAS",
    "WRONG",
    "minimise",
    "prices",
    "pull",
    "room",
    "rows_that_hold",
    "side_of",
    "until_met",
]

CROSSINGS = 60  # trials for the point where a budget is met; a few are needed

# Lines of memory for p coordinates: the gradient, how wrong a multiplier is, the minimiser in the
# order of the factor, rotations, where coordinates were before they were freed (−1: not to be
# freed), the gradient without what free coordinates add to it, and from then on normals, reduced by
# the factor.
GRADIENT, WRONG, NEW, COS, SIN, WAS, PULL, REDUCED = 0, 1, 2, 3, 4, 5, 6, 7
BARRED = -1.0
ROW, FOUND, TIES = 0, 1, 2  # lines of memory for the rows: which one, and its multiplier


@kernel
def pull(P, q, x, places, work):
    """The gradient without what free coordinates add to it, in line PULL."""
    p, without = len(x), work[PULL]
    for i in range(p):
        without[i] = q[i]
    for i in range(p):
        if x[i] != 0 and places[i] != place.FREE:
            add(without, x[i], P[i], p)


@kernel
def minimise(body, x, places, sides, holds, free, index, L, work, ties, schur, multipliers):
    """The minimiser on the face in line NEW and the multipliers; False where that is singular.

    What pulls at the free coordinates is in line PULL.
    """
    p, held, new = len(x), 0, work[NEW]
    for a in range(free):
        new[a] = -work[PULL, index[a]]
    forward(L, new, free)
    for row in range(table.ROWS, len(body)):
        multipliers[row] = 0.0
        if not holds[row]:
            continue
        reduced, total = work[REDUCED + held], body[row, table.TOTAL]
        for a in range(free):
            reduced[a] = slope(body, row, index[a], sides)
        forward(L, reduced, free)
        for i in range(p):
            if x[i] != 0 and places[i] != place.FREE:
                total -= body[row, i] * (
                    abs(x[i]) if body[row, table.KIND] == table.BUDGET else x[i]
                )
        ties[ROW, held] = row
        ties[FOUND, held] = dot(reduced, new, free) - total
        for j in range(held + 1):
            schur[held, j] = dot(reduced, work[REDUCED + j], free)
        held += 1
    if held > free or not factor(schur, held):
        return False
    forward(schur, ties[FOUND], held)
    backward(schur, ties[FOUND], held)
    for j in range(held):
        add(new, -ties[FOUND, j], work[REDUCED + j], free)
        multipliers[int(ties[ROW, j])] = ties[FOUND, j]
    backward(L, new, free)
    return True


@kernel
def side_of(wall, where):
    """The sign that |x| has in a budget for a coordinate that moves away from a bound."""
    if wall == 0:
        return 1.0 if where == place.LOW else -1.0
    return 1.0 if wall > 0 else -1.0


@kernel
def room(body, holds, sides, i):
    """Between what a free coordinate may move: its bounds, and zero where a budget has a kink."""
    low, high = body[table.LOWER, i], body[table.UPPER, i]
    for row in range(table.ROWS, len(body)):
        if holds[row] and body[row, table.KIND] == table.BUDGET and body[row, i] > 0:
            if sides[i] > 0:
                low = max(low, 0.0)
            else:
                high = min(high, 0.0)
    return low, high


@kernel
def until_met(body, row, x, new, free, index, furthest):
    """How far to go until a budget is met, ``furthest`` if it is not."""
    alpha = furthest
    outside = 0.0
    for i in range(len(x)):
        outside += body[row, i] * abs(x[i])
    for a in range(free):
        outside -= body[row, index[a]] * abs(x[index[a]])
    for _ in range(CROSSINGS):
        total, rate = outside - body[row, table.TOTAL], 0.0
        for a in range(free):
            i = index[a]
            d = new[a] - x[i]
            v = x[i] + alpha * d
            total += body[row, i] * abs(v)
            rate += body[row, i] * (d if v > 0 else -d)
        if total <= 4 * DOUBLE * body[row, table.TOTAL] or rate <= 0:
            break
        alpha = max(alpha - total / rate, 0.0)  # the sum is convex: never too far back
    return alpha


@kernel
def prices(P, q, body, x, places, sides, multipliers, bound, free, index, work):
    """How wrong the multipliers of held coordinates are, by what freeing one promises.

    Returns the largest; what is no more than rounding is none. `pull` has been called for x.
    """
    p, k = len(x), len(body)
    g, wrong = work[GRADIENT], work[WRONG]
    copy(work[PULL], g)
    add_some(g, x, P, index, free)
    noise = widest = best = 0.0
    for i in range(p):
        noise, widest = max(noise, abs(q[i])), max(widest, abs(x[i]))
    noise += bound * widest
    for row in range(table.ROWS, k):
        for i in range(p):
            noise = max(noise, abs(multipliers[row] * body[row, i]))
    noise *= ROUNDING * DOUBLE
    for i in range(p):
        wrong[i] = 0.0
        if (
            places[i] == place.FREE
            or work[WAS, i] == BARRED
            or body[table.LOWER, i] == body[table.UPPER, i]
        ):
            continue
        r, hold = forces(body, multipliers, i, g[i])
        g[i] = r
        if places[i] == place.ZERO:
            over = abs(r) - hold
        else:
            r += hold * sides[i]
            over = -r if places[i] == place.LOW else r
        if over > noise:
            wrong[i] = over / np.sqrt(max(P[i, i], 1e-300))
            best = max(best, wrong[i])
    return best


@kernel
def rows_that_hold(body, x, holds):
    """Equations, and the budgets that x spends."""
    for row in range(table.ROWS, len(body)):
        total = body[row, table.TOTAL]
        if body[row, table.KIND] == table.BUDGET:
            for i in range(len(x)):
                total -= body[row, i] * abs(x[i])
        holds[row] = (
            body[row, table.KIND] == table.EQUATION
            or total <= ROUNDING * DOUBLE * body[row, table.TOTAL]
        )
