"""A quadratic problem over a set in normal form, from start to certificate, compiled.

The method is that of `dfwlayer.methods.projected_newton` in small: a few spectral projected
gradient steps show which coordinates are held, a Cholesky factor of what is free gives the
minimiser on that face exactly, and the multipliers there say whether it is the solution. Answers
are given only where that is beyond doubt: every multiplier and every slack is clear of rounding,
the point is feasible as it is rounded, and the gap is below the tolerance. Everything else is left
to the tensor operations, which have the patience and the rules for it.

How the set of a problem is laid out is said in `dfwlayer.engines.compiled.kernels.polytope`.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.certificate import gap_of, settle
from dfwlayer.engines.compiled.kernels.constants import (
    BUDGET,
    CLEAR,
    DOUBLE,
    DOUBTED,
    FREE,
    LARGEST,
    LOST,
    LOW,
    ROUNDING,
    SMALLEST,
    SOLVED,
    UNFIT,
    UNPROVEN,
    UNSETTLED,
    ZERO,
)
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    copy,
    entry,
    fill,
    kernel,
    product,
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.faces import (
    FOUND,
    GUESS,
    LINES,
    NORMALS,
    PX,
    PY,
    SHORT,
    SIDES,
    WAY,
    X,
    Y,
    Z,
    minimise,
    prepare,
    slope,
    solve,
)
from dfwlayer.engines.compiled.kernels.numbers import holds, own, symmetric
from dfwlayer.engines.compiled.kernels.polytope import KIND, LOWER, ROWS, TOTAL, UPPER, project

__all__ = ["adjoint", "search"]

ROUNDS = 40  # of spectral steps and one solve on the face
BLOCK = 12  # most spectral steps in a round
SETTLED = 2  # steps without a change of the face, after which it is tried
FAILURES = 3  # faces on which f was flat, after which others should look

WRONG, DOUBTFUL, CLEARLY = 0, 1, 2


@kernel
def _judge(q, body, places, multipliers, x, px, bound, sides):
    """Whether the minimiser on a face solves the problem."""
    n, k = len(x), len(body)
    widest = noise = 0.0
    for i in range(n):
        widest = max(widest, abs(x[i]))
        noise = max(noise, abs(q[i]))
    noise += bound * widest
    for row in range(ROWS, k):
        steep = 0.0
        for i in range(n):
            steep = max(steep, abs(body[row, i]))
        noise += abs(multipliers[row]) * steep
    noise *= ROUNDING * DOUBLE
    verdict = CLEARLY
    for row in range(ROWS, k):
        if body[row, KIND] != BUDGET:
            continue
        total = steep = 0.0
        kinked = False
        for i in range(n):
            total += body[row, i] * abs(x[i])
            steep = max(steep, body[row, i])
            kinked = kinked or (places[i] == ZERO and body[row, i] > 0)
        if multipliers[row] != 0:  # it holds; its force has to be one
            clear, ahead = CLEAR * noise, multipliers[row] * steep
        elif kinked:
            return WRONG
        else:
            clear, ahead = CLEAR * ROUNDING * DOUBLE * total, body[row, TOTAL] - total
        if ahead < -clear:
            return WRONG
        if ahead < clear:
            verdict = DOUBTFUL
    for i in range(n):
        low, high = body[LOWER, i], body[UPPER, i]
        place = places[i]
        if low == high:
            continue
        r, hold = px[i] + q[i], 0.0
        for row in range(ROWS, k):
            if body[row, KIND] == BUDGET:
                hold += multipliers[row] * body[row, i]
            else:
                r += multipliers[row] * body[row, i]
        if place == FREE:
            ahead = min(x[i] - low, high - x[i])
            size = widest
            if np.isfinite(low):
                size = max(size, abs(low))
            if np.isfinite(high):
                size = max(size, abs(high))
            if hold > 0:
                ahead = min(ahead, sides[i] * x[i])
            clear = CLEAR * ROUNDING * DOUBLE * size
        else:
            clear = CLEAR * noise
            if place == ZERO:
                ahead = hold - abs(r)
            else:
                r += hold * sides[i]
                ahead = r if place == LOW else -r
        if ahead < -clear:
            return WRONG
        if ahead < clear:
            verdict = DOUBTFUL
    return verdict


@kernel
def _descend(
    P, q, body, blocks, bound, most, places, multipliers, best, work, ties, index, L, schur
):
    """Find the face of the solution and x on it; the steps this took, or minus why it did not.

    The start is in line X.
    """
    n = len(q)
    dense = len(P) > 0
    x, px, y, py, z, way = work[X], work[PX], work[Y], work[PY], work[Z], work[WAY]
    sides, guess = work[SIDES], ties[GUESS]
    fill(0.0, guess)
    alpha = 1.0 / bound
    steps = failed = tried = same = 0
    first, to_best = True, False
    copy(x, z)
    if not dense:  # one gradient step is all it takes, from anywhere
        fill(0.0, x)
        fill(0.0, px)
        first = False
    while True:
        # a trial: the start, a gradient step, or the minimiser on the last face, projected
        if not first:
            for i in range(n):
                z[i] = best[i] if to_best else x[i] - alpha * (px[i] + q[i])
                sides[i] = places[i]  # as it was; signs take this place below
        if first or to_best:
            fill(0.0, guess)
        if not project(body, blocks, z, y, guess, places, way):
            return -LOST
        product(P, y, py)
        if first:
            copy(y, x)
            copy(py, px)
            fill(0.0, guess)
            first = False
            continue
        steps += 1
        fall = bend = square = 0.0
        changed = to_best
        for i in range(n):
            d = y[i] - x[i]
            fall -= d * (px[i] + q[i])
            bend += d * (py[i] - px[i])
            square += d * d
            changed = changed or places[i] != sides[i]
        same = 0 if changed else same + 1
        step = alpha
        if fall > 0:
            length = 1.0
            if bend > 0:
                length = min(1.0, fall / bend)
                if not to_best:
                    alpha = min(max(square / bend, 0.01 / bound), 1e8 / bound)
            for i in range(n):
                x[i] += length * (y[i] - x[i])
                px[i] += length * (py[i] - px[i])
        if to_best:
            to_best = False
            tried = same = 0
            fill(0.0, guess)
            continue
        tried += 1
        if dense and fall > 0 and same < SETTLED and tried < BLOCK and steps < most:
            continue
        # the face of the last gradient step, whose multipliers are those of f times its length
        for row in range(ROWS, len(body)):
            multipliers[row] = guess[row] / step
        for i in range(n):
            sides[i] = 1.0 if y[i] > 0 else (-1.0 if y[i] < 0 else 0.0)
        steps += 1 if dense else 0
        if steps > most or steps > ROUNDS * BLOCK:
            return -LOST
        tried = same = 0
        if not minimise(P, q, body, places, multipliers, best, work, ties, index, L, schur):
            failed += 1
            if failed > FAILURES:
                return -LOST
            continue
        verdict = _judge(q, body, places, multipliers, best, py, bound, sides)
        if verdict == CLEARLY:
            return steps
        if verdict == DOUBTFUL:
            return -DOUBTED
        to_best = True


@kernel
def _fit(body, blocks, P, q, start):
    """A bound of ‖P‖ if all numbers are such that this code may be used on them, otherwise 0."""
    n = len(q)
    bound = largest = 0.0
    for i in range(len(P)):
        total = 0.0
        for j in range(n):
            total += abs(P[i, j])
        largest = max(largest, P[i, i])
        bound = total if not total <= bound else bound  # keeps a NaN
    if len(P) == 0:
        bound = largest = 1.0
    if not (SMALLEST < bound < LARGEST and largest > 0):
        return 0.0
    for i in range(n):
        if not (abs(q[i]) < LARGEST and abs(start[i]) < LARGEST):
            return 0.0
        if not body[LOWER, i] <= body[UPPER, i]:
            return 0.0
        low, high = abs(body[LOWER, i]), abs(body[UPPER, i])
        if not (low < LARGEST or low == np.inf) or not (high < LARGEST or high == np.inf):
            return 0.0
        if 0 < low < SMALLEST or 0 < high < SMALLEST:
            return 0.0
    for block in range(len(blocks)):
        first, end, row, last = blocks[block]
        for i in range(first, end):
            low, high = body[LOWER, i], body[UPPER, i]
            budget = row < last and body[row, KIND] == BUDGET
            if budget and (low > 0 or high < 0):
                return 0.0
            open_ended = low == -np.inf or high == np.inf
            if open_ended and (row == last or (budget and body[row, i] == 0)):
                return 0.0  # nothing else bounds it
            if low == -np.inf and high == np.inf and not budget:
                return 0.0
    for row in range(ROWS, len(body)):
        budget = body[row, KIND] == BUDGET
        if not abs(body[row, TOTAL]) < LARGEST or (budget and not body[row, TOTAL] > SMALLEST):
            return 0.0
        for i in range(n):
            if not abs(body[row, i]) < LARGEST or (budget and body[row, i] < 0):
                return 0.0
    return bound


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first,
        end,
        P,  # (·, n, n), or empty for the identity
        q,  # (·, n)
        A,  # (·, m, n), with P = AᵀA and q = −Aᵀb, or empty
        rhs,  # b (·, m)
        bodies,  # (·, k, n + 2)
        blocks,  # (·, 4)
        start,  # (·, n)
        eps,  # of the dtype that x is rounded to
        tol,
        most,  # steps
        x,  # (B, n), and what follows is where the results go
        values,  # (2, B): f and the gap
        codes,  # (2, B): what became of it, and steps
        places,  # (B, n)
        sides,  # (B, n)
        multipliers,  # (B, k)
    ):
        """Solve problems first … end − 1."""
        _ = stamp
        n, k = x.shape[1], bodies.shape[1]
        dense = P.shape[1] > 0
        work, ties = np.empty((NORMALS + 2 * k, n)), np.empty((LINES, k))
        schur = np.empty((k, k))
        index = np.empty(n + k, np.int64)
        L = np.empty((n, n)) if dense else np.empty((0, 0))
        g, guess = work[Z], ties[GUESS]
        for b in range(first, end):
            codes[0, b] = UNFIT
            own_P, own_q, body = P[own(b, P)], q[own(b, q)], bodies[own(b, bodies)]
            if dense:
                own_P = symmetric(own_P, eps)
                if len(own_P) == 0:
                    continue
            copy(start[own(b, start)], work[X])
            for i in range(n):  # the last solution of a problem that was bad then
                if not np.isfinite(work[X, i]):
                    fill(0.0, work[X])
            bound = _fit(body, blocks, own_P, own_q, work[X])
            if bound == 0:
                continue
            place, point, found = places[b], x[b], multipliers[b]
            taken = _descend(
                own_P,
                own_q,
                body,
                blocks,
                bound,
                most,
                place,
                found,
                point,
                work,
                ties,
                index,
                L,
                schur,
            )
            if taken < 0:
                codes[0, b] = -taken
                continue
            if not settle(body, blocks, place, point, eps, work[SIDES]):
                codes[0, b] = UNSETTLED
                continue
            own_A, own_b = A[own(b, A)], rhs[own(b, rhs)]
            total = value_and_gradient(own_P, own_q, own_A, own_b, point, g)
            copy(found, guess)
            gap = gap_of(body, blocks, point, g, guess)
            if not (gap <= tol * max(abs(total), 1e-300) and holds(total, eps)):
                codes[0, b] = UNPROVEN
                continue
            copy(work[SIDES], sides[b])
            values[0, b], values[1, b] = total, gap
            codes[0, b], codes[1, b] = SOLVED, taken

    @entry
    def adjoint(
        first,
        end,
        P,
        bodies,
        eps,
        codes,
        places,
        sides,
        multipliers,
        v,  # (B, n), the gradient that arrives
        u,  # (B, n), and what follows is where the results go
        nu,  # (B, k)
        rest,  # (B, n), v − P u − Σ ν_j a_j
    ):
        """P u + Σ ν_j a_j = v and ⟨a_j, u⟩ = 0 on the faces of problems first … end − 1."""
        _ = stamp
        n, k = v.shape[1], bodies.shape[1]
        dense = P.shape[1] > 0
        work, ties = np.empty((NORMALS + 2 * k, n)), np.empty((LINES, k))
        schur = np.empty((k, k))
        index = np.empty(n + k, np.int64)
        L = np.empty((n, n)) if dense else np.empty((0, 0))
        fill(0.0, ties[SHORT])
        for b in range(first, end):
            fill(0.0, u[b])
            fill(0.0, nu[b])
            fill(0.0, rest[b])
            total = 0.0
            for i in range(n):
                total += v[b, i]
            if codes[0, b] != SOLVED or not np.isfinite(total):
                continue
            own_P, body = P[own(b, P)], bodies[own(b, bodies)]
            if dense:
                own_P = symmetric(own_P, eps)
            copy(sides[b], work[SIDES])
            free, held = prepare(own_P, body, places[b], multipliers[b], work, index, L, schur)
            if free < 0:
                continue
            for a in range(free):
                work[Z, a] = v[b, index[a]]
            solve(k, free, held, dense, work, ties, L, schur)
            for a in range(free):
                u[b, index[a]] = work[Z, a]
            for j in range(held):
                nu[b, index[n + j]] = ties[FOUND, j]
            product(own_P, u[b], work[PY])
            for i in range(n):
                r = v[b, i] - work[PY, i]
                for j in range(held):
                    r -= ties[FOUND, j] * slope(body, index[n + j], i, work[SIDES])
                rest[b, i] = r

    return search, adjoint


search, adjoint = _on_disk(STAMP)
