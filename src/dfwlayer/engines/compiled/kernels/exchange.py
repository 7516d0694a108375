"""Problems that share the matrix of a pool, each by a `walk` from its own or another's start."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome, place, table
from dfwlayer.engines.compiled.kernels.active import GRADIENT, NEW, REDUCED, TIES
from dfwlayer.engines.compiled.kernels.certificate import settle
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import STAMP, copy, dot, entry, kernel, times
from dfwlayer.engines.compiled.kernels.numbers import own
from dfwlayer.engines.compiled.kernels.verdict import CLEARLY, judge
from dfwlayer.engines.compiled.kernels.walk import walk

__all__ = ["SETTLED", "SOLVES", "STEPS", "WHAT", "exchange"]

WHAT, STEPS, SOLVES, SETTLED = 0, 1, 2, 3  # lines of the codes


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
        work, ties, schur = np.empty((REDUCED + k, p)), np.empty((TIES, k)), np.empty((k, k))
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
            free, steps, solves, _ = walk(
                P,
                own_q,
                body,
                bound,
                most - codes[STEPS, b],
                np.inf,
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
            verdict = judge(
                own_q,
                body,
                places[b],
                multipliers[b],
                x[b],
                px,
                bound,
                sides[b],
                ROUNDING * DOUBLE,
            )
            codes[WHAT, b] = outcome.SOLVED if verdict == CLEARLY else outcome.DOUBTED
            copy(x[b], rounded[b])
            codes[SETTLED, b] = settle(body, blocks, places[b], rounded[b], eps, sides[b])

    return exchange


exchange = _on_disk(STAMP)
