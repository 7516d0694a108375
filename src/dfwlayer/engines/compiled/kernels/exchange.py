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
from dfwlayer.engines.compiled.kernels.active import (
    BARRED,
    COS,
    GRADIENT,
    NEW,
    REDUCED,
    SIN,
    WAS,
    WRONG,
    minimise,
    prices,
    room,
    rows_that_hold,
    side_of,
    until_met,
)
from dfwlayer.engines.compiled.kernels.certificate import settle
from dfwlayer.engines.compiled.kernels.constants import DOUBLE
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    copy,
    dot,
    entry,
    fill,
    join,
    kernel,
    leave,
    times,
)
from dfwlayer.engines.compiled.kernels.descent import CLEARLY, judge
from dfwlayer.engines.compiled.kernels.numbers import own

__all__ = ["SETTLED", "SOLVES", "STEPS", "WHAT", "exchange"]

FIRST, SHARE = 8, 4  # coordinates freed at once: this many, and one for so many that are free
NEARLY = 0.3  # of what the best one promises, down to which others are freed with it
PATIENCE = 20  # solves for each coordinate, and for as many more

WHAT, STEPS, SOLVES, SETTLED = 0, 1, 2, 3  # lines of the codes


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
    rows_that_hold(body, x, holds)
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
            or not minimise(
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
            low, high = room(body, holds, sides, i)
            if new[a] < low or new[a] > high:
                nearest = low if new[a] < low else high
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
        best = prices(P, q, body, x, places, sides, multipliers, bound, work)
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
