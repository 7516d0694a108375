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

from dfwlayer.engines.compiled.kernels import outcome, place, table
from dfwlayer.engines.compiled.kernels.certificate import settle
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    add,
    backward,
    copy,
    dot,
    entry,
    factor,
    fill,
    forward,
    join,
    kernel,
    leave,
    times,
)
from dfwlayer.engines.compiled.kernels.descent import CLEARLY, judge
from dfwlayer.engines.compiled.kernels.faces import slope
from dfwlayer.engines.compiled.kernels.numbers import own

__all__ = ["SETTLED", "SOLVES", "STEPS", "WHAT", "exchange", "side_of"]

FIRST, SHARE = 8, 4  # coordinates freed at once: this many, and one for so many that are free
NEARLY = 0.3  # of what the best one promises, down to which others are freed with it
PATIENCE = 20  # solves for each coordinate, and for as many more
CROSSINGS = 60  # trials for the point where a budget is met; a few are needed

# Lines of memory for p coordinates: the gradient, how wrong a multiplier is, the minimiser in the
# order of the factor, rotations, where coordinates were before they were freed (−1: not to be
# freed), and from then on normals, reduced by the factor.
GRADIENT, WRONG, NEW, COS, SIN, WAS, REDUCED = 0, 1, 2, 3, 4, 5, 6
BARRED = -1.0
WHAT, STEPS, SOLVES, SETTLED = 0, 1, 2, 3  # lines of the codes
ROW, FOUND = 0, 1  # lines of memory for the rows: which one, and its multiplier


@kernel
def _minimise(P, q, body, x, places, sides, holds, free, index, L, work, ties, schur, multipliers):
    """The minimiser on the face in line NEW and the multipliers; False where that is singular."""
    p, held, new = len(x), 0, work[NEW]
    for a in range(free):
        new[a] = -q[index[a]]
    for i in range(p):  # what is held elsewhere than at zero
        if x[i] != 0 and places[i] != place.FREE:
            for a in range(free):
                new[a] -= P[i, index[a]] * x[i]
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
def _exchange(
    P, q, body, bound, most, x, places, sides, multipliers, holds, kept, index, L, schur, work, ties
):
    """From a feasible start to the minimiser; how many are free, and how many solves that took.

    The first of the results is negative if there is none. A step is a round of multipliers.

    L has the factor of the first ``kept`` of the coordinates in ``index``, all that are free or 0.
    """
    p, k, limit = len(x), len(body), min(len(index), len(x))
    new, was, cos, sin = work[NEW], work[WAS], work[COS], work[SIN]
    fill(0.0, was)
    _rows_that_hold(body, x, holds)
    free, fresh, steps, solves = kept, 0, 0, 0
    for i in range(p if kept == 0 else 0):
        if places[i] == place.FREE:
            if free == limit or not join(P, i, free, index, L):
                return -1, steps, solves
            free += 1
    while True:
        solves += 1
        if (
            steps == most
            or solves > PATIENCE * (p + PATIENCE)
            or not _minimise(
                P, q, body, x, places, sides, holds, free, index, L, work, ties, schur, multipliers
            )
        ):
            return -1, steps, solves
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
        best = _prices(P, q, body, x, places, sides, multipliers, bound, work)
        if best == 0:
            return free, steps, solves
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
                return -1, steps, solves
            if join(P, chosen, free, index, L):
                was[chosen] = places[chosen]
                if places[chosen] == place.ZERO:
                    sides[chosen] = -1.0 if g[chosen] > 0 else 1.0
                places[chosen] = place.FREE
                free += 1
                fresh += 1


@kernel
def _value(P, q, x, work):
    times(P, x, work[GRADIENT])
    return 0.5 * dot(work[GRADIENT], x, len(x)) + dot(q, x, len(x))


@kernel
def _borrow(P, q, body, x, places, sides, others, their_places, their_sides, work):
    """Start from the solution of another problem, made to fit, where that is better; whether so."""
    p, new = len(x), work[NEW]
    shrink = 1.0
    for row in range(table.ROWS, len(body)):
        if body[row, table.KIND] == table.EQUATION:
            return False
        total = 0.0
        for i in range(p):
            total += body[row, i] * abs(others[i])
        if total > body[row, table.TOTAL]:
            shrink = min(shrink, body[row, table.TOTAL] / total * (1 - DOUBLE))
    for i in range(p):
        new[i] = shrink * others[i]
        at_bound = their_places[i] == place.LOW or their_places[i] == place.HIGH
        if not body[table.LOWER, i] <= new[i] <= body[table.UPPER, i]:
            return False
        if at_bound and new[i] != (
            body[table.LOWER, i] if their_places[i] == place.LOW else body[table.UPPER, i]
        ):
            return False
    if not _value(P, q, new, work) < _value(P, q, x, work):
        return False
    for i in range(p):
        x[i], places[i], sides[i] = new[i], their_places[i], their_sides[i]
    return True


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def exchange(
        first,
        end,
        P,  # (c, c) of which the first p rows and columns count, shared by all problems
        q,  # (B, p)
        bodies,  # (·, k, p + 2)
        blocks,  # (·, 4)
        eps,  # of the dtype that x is rounded to
        most,  # steps
        group,  # problems within which each may start from the solution of the one before it
        todo,  # (B,), which problems to solve
        x,  # (B, p), feasible starts, and the solutions
        rounded,  # (B, p), and what follows is where the results go: x in its dtype, feasible
        codes,  # (4, B): what became of it, steps and solves, which are added up, if it is rounded
        places,  # (B, p), of the starts, and of the solutions
        sides,  # (B, p), likewise
        multipliers,  # (B, k)
        factors,  # (B, l, l) to be kept for the next time, or (0, l, l)
        orders,  # (B, l), their coordinates, of which l may be free
        counts,  # (B,), how many there are
    ):
        """Solve those of the problems first … end − 1 that are to be solved."""
        _ = stamp
        p, k = x.shape[1], bodies.shape[1]
        size = orders.shape[1]
        keeps = len(factors) > 0
        work, ties, schur = np.empty((REDUCED + k, p)), np.empty((2, k)), np.empty((k, k))
        blank = np.empty((0, 0)) if keeps else np.empty((size, size))
        holds = np.zeros(k, np.bool_)
        bound = 0.0
        for i in range(p):
            total = 0.0
            for j in range(p):
                total += abs(P[i, j])
            bound = max(bound, total)
        for b in range(first, end):
            if not todo[b]:
                continue
            body, own_q, L, index = bodies[own(b, bodies)], q[b], blank, orders[b]
            if keeps:
                L = factors[b]
            if b % group > 0 and codes[WHAT, b - 1] == outcome.SOLVED:
                before = x[b - 1], places[b - 1], sides[b - 1]
                if _borrow(P, own_q, body, x[b], places[b], sides[b], *before, work):
                    counts[b] = 0
            free, steps, solves = _exchange(
                P,
                own_q,
                body,
                bound,
                most - codes[STEPS, b],
                x[b],
                places[b],
                sides[b],
                multipliers[b],
                holds,
                counts[b] if keeps else 0,
                index,
                L,
                schur,
                work,
                ties,
            )
            counts[b] = max(free, 0)
            codes[STEPS, b] += steps
            codes[SOLVES, b] += solves
            codes[WHAT, b], codes[SETTLED, b] = outcome.LOST, 0
            if free < 0:
                continue
            px = work[GRADIENT]
            times(P, x[b], px)
            verdict = judge(own_q, body, places[b], multipliers[b], x[b], px, bound, sides[b])
            codes[WHAT, b] = outcome.SOLVED if verdict == CLEARLY else outcome.DOUBTED
            copy(x[b], rounded[b])
            codes[SETTLED, b] = settle(body, blocks, places[b], rounded[b], eps, sides[b])

    return exchange


exchange = _on_disk(STAMP)
