"""A quadratic function over a set in normal form, one coordinate of the face after the other.

An active-set method. On a face, a Cholesky factor of the matrix on the free coordinates gives the
minimiser. A coordinate that meets a bound or the kink of a budget on the way to it is held there,
and leaves the factor by plane rotations; a budget that is met holds from then on. At the minimiser
the coordinates whose multipliers are wrong by most are freed and join the factor. It takes more
steps than `search`, but each costs no more than the square of how many coordinates are free, a
start next to the solution needs few of them, and ill conditioning does not count.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import (
    add,
    backward,
    dot,
    factor,
    fill,
    forward,
    join,
    kernel,
    leave,
    times,
)
from dfwlayer.engines.compiled.kernels.faces import slope

__all__ = ["GRADIENT", "NEW", "REDUCED", "side_of", "walk"]

FIRST, SHARE = 8, 4  # coordinates freed at once: this many, and one for so many that are free
NEARLY = 0.3  # of what the best one promises, down to which others are freed with it
PATIENCE = 20  # solves for each coordinate, and for as many more
CROSSINGS = 60  # trials for the point where a budget is met; a few are needed

# Lines of memory for p coordinates: the gradient, how wrong a multiplier is, the minimiser in the
# order of the factor, rotations, where coordinates were before they were freed (−1: not to be
# freed), the gradient without what free coordinates add to it, and from then on normals, reduced by
# the factor.
GRADIENT, WRONG, NEW, COS, SIN, WAS, PULL, REDUCED = 0, 1, 2, 3, 4, 5, 6, 7
BARRED = -1.0
ROW, FOUND = 0, 1  # lines of memory for the rows: which one, and its multiplier


@kernel
def _minimise(body, x, places, sides, holds, free, index, L, work, ties, schur, multipliers):
    """The minimiser on the face in line NEW and the multipliers; False where that is singular."""
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
def _room(body, holds, sides, i):
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
def _until_met(body, row, x, new, free, index, furthest):
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
def _prices(P, q, body, x, places, sides, multipliers, bound, work):
    """How wrong the multipliers of held coordinates are, by what freeing one promises.

    Returns the largest; what is no more than rounding is none.
    """
    p, k = len(x), len(body)
    g, wrong = work[GRADIENT], work[WRONG]
    times(P, x, g)
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
        r, hold = g[i] + q[i], 0.0
        for row in range(table.ROWS, k):
            if body[row, table.KIND] == table.BUDGET:
                hold += multipliers[row] * body[row, i]
            else:
                r += multipliers[row] * body[row, i]
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
def _pull(P, q, x, places, work):
    """The gradient without what free coordinates add to it, in line PULL."""
    p, pull = len(x), work[PULL]
    for i in range(p):
        pull[i] = q[i]
    for i in range(p):
        if x[i] != 0 and places[i] != place.FREE:
            add(pull, x[i], P[i], p)


@kernel
def _rows_that_hold(body, x, holds):
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


@kernel
def walk(
    P, q, body, bound, most, effort,
    x, places, sides, multipliers, holds, kept, index, L, schur, work, ties,
):  # fmt: skip
    """From a feasible start to the minimiser; how many are free, steps, solves, multiplications.

    The first of the results is negative if there is none: the steps or the ``effort``, of
    multiplications, did not suffice, or f is flat. A step is a round of multipliers.

    L has the factor of the first ``kept`` of the coordinates in ``index``, all that are free or 0.
    """
    p, k, limit = len(x), len(body), min(len(index), len(x))
    new, was, cos, sin = work[NEW], work[WAS], work[COS], work[SIN]
    fill(0.0, was)
    _rows_that_hold(body, x, holds)
    _pull(P, q, x, places, work)
    free, fresh, steps, solves, spent = kept, 0, 0, 0, 0.0
    for i in range(p if kept == 0 else 0):
        if places[i] == place.FREE:
            if free == limit:
                return -1, steps, solves, spent
            index[free] = i
            for a in range(free + 1):
                L[free, a] = P[i, index[a]]
            free += 1
    if kept == 0:
        spent += free**3 / 6
        if spent > effort or not factor(L, free):
            return -1, steps, solves, spent
    while True:
        solves += 1
        spent += (1.0 + len(body) - table.ROWS) * free * free + p
        if (
            steps == most
            or spent > effort
            or solves > PATIENCE * (p + PATIENCE)
            or not _minimise(
                body, x, places, sides, holds, free, index, L, work, ties, schur, multipliers
            )
        ):
            return -1, steps, solves, spent
        # of several that were freed at once some may not want to go where they should
        before = free
        for a in range(before - 1, before - 1 - fresh, -1):
            i = index[a]
            d, where = new[a] - x[i], int(was[i])
            if (
                d * sides[i] <= 0
                if where == place.ZERO
                else (d <= 0 if where == place.LOW else d >= 0)
            ):
                places[i] = where
                was[i] = BARRED if fresh == 1 else 0.0
                add(work[PULL], x[i], P[i], p)
                spent += 1.5 * (free - a) ** 2 + p
                leave(L, free, index, a, cos, sin)
                free -= 1
        fresh -= before - free
        if free < before:
            continue
        fresh = 0
        alpha, at, wall, met = 1.0, -1, 0.0, -1
        for a in range(free):
            i = index[a]
            low, high = _room(body, holds, sides, i)
            if new[a] < low or new[a] > high:
                nearest = low if new[a] < low else high
                way = new[a] - x[i]
                reach = max((nearest - x[i]) / way, 0.0) if way != 0 else 0.0
                if reach < alpha:
                    alpha, at, wall = reach, a, nearest
        for row in range(table.ROWS, k):
            if not holds[row]:
                reach = _until_met(body, row, x, new, free, index, alpha)
                if reach < alpha:
                    alpha, met = reach, row
        for a in range(free):
            i = index[a]
            x[i] = new[a] if alpha == 1 else x[i] + alpha * (new[a] - x[i])
        if met >= 0:
            holds[met] = True
            for a in range(free - 1, -1, -1):
                i = index[a]
                if body[met, i] > 0:
                    sides[i] = 1.0 if x[i] > 0 else -1.0
                    if x[i] == 0:
                        places[i] = place.ZERO
                        spent += 1.5 * (free - a) ** 2
                        leave(L, free, index, a, cos, sin)
                        free -= 1
            continue
        if at >= 0:
            i = index[at]
            x[i] = wall
            places[i] = (
                place.LOW
                if wall == body[table.LOWER, i]
                else (place.HIGH if wall == body[table.UPPER, i] else place.ZERO)
            )
            if places[i] != place.ZERO:
                sides[i] = side_of(wall, places[i])
                add(work[PULL], wall, P[i], p)
            spent += 1.5 * (free - at) ** 2 + p
            leave(L, free, index, at, cos, sin)
            free -= 1
            fill(0.0, was)
            continue
        released = False
        for row in range(table.ROWS, k):
            if body[row, table.KIND] == table.BUDGET and holds[row] and multipliers[row] < 0:
                holds[row], released = False, True
        if released:
            continue
        steps += 1
        spent += 2.0 * p * p
        _pull(P, q, x, places, work)  # without the rounding of what came and went
        best = _prices(P, q, body, x, places, sides, multipliers, bound, work)
        if best == 0:
            return free, steps, solves, spent
        wrong, g = work[WRONG], work[GRADIENT]
        while fresh < FIRST + free // SHARE:
            chosen, largest = -1, NEARLY * best
            for i in range(p):
                if wrong[i] > largest:
                    chosen, largest = i, wrong[i]
            if chosen < 0:
                break
            wrong[chosen], was[chosen] = 0.0, BARRED
            if free == limit:
                return -1, steps, solves, spent
            spent += 0.5 * free * free + p
            if join(P, chosen, free, index, L):
                add(work[PULL], -x[chosen], P[chosen], p)
                was[chosen] = places[chosen]
                if places[chosen] == place.ZERO:
                    sides[chosen] = -1.0 if g[chosen] > 0 else 1.0
                places[chosen] = place.FREE
                free += 1
                fresh += 1
