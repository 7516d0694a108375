"""A quadratic function over a set in normal form, one coordinate of the face after the other.

An active-set method. On a face, a Cholesky factor of the matrix on the free coordinates gives the
minimiser. A coordinate that meets a bound or the kink of a budget on the way to it is held there,
and leaves the factor by plane rotations; a budget that is met holds from then on. At the minimiser
the coordinates whose multipliers are wrong by most are freed and join the factor. It takes more
steps than `search`, but each costs no more than the square of how many coordinates are free, a
start next to the solution needs few of them, and ill conditioning does not count.

P need not be definite. Where the column of a coordinate depends on those of others that are free,
there is a way along which f does not bend. A small pivot is then assumed, so that the minimiser is
far out along that way, on the side where f falls, and the first wall on it ends the dependence:
whatever meets it leaves the factor. In the end the factor is made anew, of P alone.
"""

from __future__ import annotations

import math

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.active import (
    BARRED,
    COS,
    GRADIENT,
    NEW,
    PULL,
    SIN,
    WAS,
    WRONG,
    minimise,
    prices,
    pull,
    room,
    rows_that_hold,
    side_of,
    until_met,
)
from dfwlayer.engines.compiled.kernels.dense import add, factor, fill, join, kernel, leave

__all__ = ["FLAT", "walk"]

FLAT = -2  # for how many are free: f is flat along the face that was found

FIRST, SHARE = 8, 4  # coordinates freed at once: this many, and one for so many that are free
NEARLY = 0.3  # of what the best one promises, down to which others are freed with it
PATIENCE = 20  # solves for each coordinate, and for as many more
# The square of a pivot where there is none, against the diagonal: above what rounding leaves of
# zero in a product with an ill-conditioned factor, or its errors would grow from row to row, and so
# small that steps along such a way reach any wall
LEAST = 2.0**-33


@kernel
def _joined(P, i, bound, free, index, L, assumed):
    """Add a coordinate to the factor as its last; False if its pivot had to be assumed.

    Where others were ``assumed`` before, rounding may look like one.
    """
    found = join(P, i, free, index, L)
    least = LEAST * (P[i, i] if P[i, i] > 0 else bound)
    if found and not (assumed and L[free, free] * L[free, free] < least):
        return True
    L[free, free] = math.sqrt(least)
    index[free] = i
    return False


@kernel
def _anew(P, free, index, L):
    """The factor on free coordinates in their order; False if it is singular."""
    for a in range(free):
        for b in range(a + 1):
            L[a, b] = P[index[a], index[b]]
    return factor(L, free)


@kernel
def _is_alone(body, holds, i, free, index):
    """Whether a row holds that no other free coordinate moves, so that x_i has one value."""
    for row in range(table.ROWS, len(body)):
        alone = holds[row] and body[row, i] != 0
        for a in range(free):
            if not alone:
                break
            alone = index[a] == i or body[row, index[a]] == 0
        if alone:
            return True
    return False


@kernel
def walk(
    P, q, body, bound, most, effort,
    x, places, sides, multipliers, holds, kept, index, L, schur, work, ties,
):  # fmt: skip
    """From a feasible start to the minimiser; how many are free, steps, solves, multiplications.

    The first of the results is negative if there is none: the steps or the ``effort``, of
    multiplications, did not suffice, or f is `FLAT`. A step is a round of multipliers.

    L has the factor of the first ``kept`` of the coordinates in ``index``, all that are free or 0.
    """
    p, k, limit = len(x), len(body), min(len(index), len(x))
    new, was, cos, sin = work[NEW], work[WAS], work[COS], work[SIN]
    fill(0.0, was)
    rows_that_hold(body, x, holds)
    pull(P, q, x, places, work)
    free, fresh, steps, solves, spent = kept, 0, 0, 0, 0.0
    assumed = False  # there are pivots in L that P has not
    for i in range(p if kept == 0 else 0):
        if places[i] == place.FREE:
            if free == limit:
                return -1, steps, solves, spent
            index[free] = i
            free += 1
    if kept == 0:
        spent += free**3 / 6
        if spent > effort:
            return -1, steps, solves, spent
        if not _anew(P, free, index, L):
            assumed = True
            for a in range(free):
                _joined(P, index[a], bound, a, index, L, assumed)
    while True:
        solves += 1
        spent += (1.0 + len(body) - table.ROWS) * free * free + p
        if (
            steps == most
            or spent > effort
            or solves > PATIENCE * (p + PATIENCE)
            or not minimise(
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
            low, high = room(body, holds, sides, i)
            if new[a] < low or new[a] > high:
                nearest = low if new[a] < low else high
                if _is_alone(body, holds, i, free, index):  # beyond the wall by rounding only
                    new[a] = nearest
                    continue
                way = new[a] - x[i]
                reach = max((nearest - x[i]) / way, 0.0) if way != 0 else 0.0
                if reach < alpha:
                    alpha, at, wall = reach, a, nearest
        for row in range(table.ROWS, k):
            if not holds[row]:
                reach = until_met(body, row, x, new, free, index, alpha)
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
        spent += p * p + p * free
        pull(P, q, x, places, work)  # without the rounding of what came and went
        best = prices(P, q, body, x, places, sides, multipliers, bound, free, index, work)
        if best == 0:
            if not assumed:
                return free, steps, solves, spent
            spent += free**3 / 6
            if not _anew(P, free, index, L):
                return FLAT, steps, solves, spent
            assumed = False
            continue
        wrong, g = work[WRONG], work[GRADIENT]
        while fresh < FIRST + free // SHARE:
            chosen, largest = -1, NEARLY * best
            for i in range(p):
                if wrong[i] > largest:
                    chosen, largest = i, wrong[i]
            if chosen < 0:
                break
            wrong[chosen] = 0.0
            if free == limit:
                return -1, steps, solves, spent
            spent += 0.5 * free * free + p
            bends = _joined(P, chosen, bound, free, index, L, assumed)
            if not bends and fresh > 0:  # beside those that were freed f may not fall that way
                continue
            add(work[PULL], -x[chosen], P[chosen], p)
            was[chosen] = places[chosen]
            if places[chosen] == place.ZERO:
                sides[chosen] = -1.0 if g[chosen] > 0 else 1.0
            places[chosen] = place.FREE
            free += 1
            fresh += 1
            if not bends:  # a long way, which others should not have to go
                assumed = True
                break
