"""A quadratic problem over {x : l ≤ x ≤ u, G x ≤ h, E x = e}, from start to certificate, compiled.

A dual active-set method finds the rows that hold the solution, Newton's steps on them give it to
all digits, and it is answered only if that is beyond doubt: every multiplier and every slack is
clear of rounding, and the gap is below the tolerance. Everything else, a set without a point as
well, is left to the tensor operations.

What is done where P is singular is said in `dfwlayer.engines.compiled.kernels.metric`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    add,
    backward,
    copy,
    dot,
    entry,
    fill,
    forward,
    kernel,
    making,
    product,
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.dual import climb, hold, join, prepared, refine
from dfwlayer.engines.compiled.kernels.flat import stay
from dfwlayer.engines.compiled.kernels.judged import (
    DEPENDS,
    FLAT,
    HELD,
    IDLE,
    OPEN,
    counted,
    gap_of,
    implied,
    judge,
    polish,
    settle,
    share,
    steepness,
)
from dfwlayer.engines.compiled.kernels.metric import (
    FAINT,
    PLAIN,
    RIDGE,
    SMALL,
    bends_down,
    fit,
    free_minimiser,
    metric,
    ridged,
    stiffened,
)
from dfwlayer.engines.compiled.kernels.numbers import asked, own, proven, symmetric
from dfwlayer.engines.compiled.kernels.rows import Rows, add_row, largest, listed, reduced
from dfwlayer.engines.compiled.kernels.tied import balance

__all__ = ["adjoint", "search"]

NOTHING: Any = np.int64(0)  # a plain 0 is a type of its own, for which all is compiled again
EFFORT = 1e9  # multiplications for one problem, beyond which tensor operations are not slower
ROUNDS = 12  # of f with ½ρ ‖x − x_k‖²; some five are needed
STILL = 2  # rounds that change nothing, after which the rows are taken for those of the solution
DOUBTFUL = 1e-6  # a correction of y that is larger, against y, shows that L is not right


@kernel
def _equations(columns, low, high, base, width, held, state):
    """Hold the coordinates with l = u, and the equations but for those that others imply."""
    count = NOTHING
    for turn in range(2):
        first, end = (base, width) if turn == 0 else (0, base)
        for c in range(first, end):
            state[c] = OPEN
            if low[c] == high[c]:
                state[c] = HELD if join(columns, c, 1.0, held, count) else DEPENDS
                count += 1 if state[c] == HELD else 0
    return count


@kernel
def _keep(held, count, state, width, to, to_state):
    """Copy the rows that are held, without their forces, and what all rows are."""
    for i in range(count):
        copy(held.T[i], to.T[i])
        copy(held.Q[i], to.Q[i])
        to.places[i], to.sides[i], to.forces[i] = held.places[i], held.sides[i], 0.0
    for c in range(width):
        to_state[c] = state[c]


@kernel
def _approach(
    P, q, rows, columns, width, sides, kind, L, held, firm, start, y, level, state, x, limit,
):  # fmt: skip
    """Find the rows that hold the solution x; how many, and steps, negative for why there are none.

    With a ridge, x is the solution for the last x_k.
    """
    least, most = sides
    count, taken, still = firm, NOTHING, 0
    for turn in range(ROUNDS if kind == RIDGE else 1):
        free_minimiser(P, q, rows, width, kind, L, x, start)
        before = count
        count = hold(least, most, held, count, firm, start, y, state)
        count, more = climb(
            columns, width, least, most, held, count, firm, y, level, state, 0.0, limit - taken
        )
        if more < 0:
            return count, more
        taken += more
        copy(y, x)
        if len(L) > 0:
            backward(L, x, len(x))
        still = still + 1 if turn > 0 and more == 0 and count == before else 0
        if still == STILL:
            break
    return count, taken


@kernel
def _change_metric(P, q, rows, base, width, columns, L, held, count, state, kept, x, start, y):
    """Hold the same rows in the metric of P + σNᵀN; 0 if they depend on each other there.

    Where f is flat along them, a faint ridge stays, and 2 is returned instead of 1.
    """
    bent = stiffened(P, rows, width, state, 0.0, L)
    if not bent and not stiffened(P, rows, width, state, FAINT, L):
        return 0
    for i in range(count):
        c = held.places[i]
        kept[c] = held.forces[i] / rows.lengths[c]
    reduced(L, rows, base, width, columns)
    for i in range(count):
        c = held.places[i]
        if not join(columns, c, held.sides[i], held, i + NOTHING):
            return 0
        held.forces[i] = kept[c] * rows.lengths[c]
    free_minimiser(P, q, rows, width, PLAIN, L, x, start)
    fill(0.0, y)
    for i in range(len(x)):
        add(y, x[i], L[i], i + 1)
    return 1 if bent else 2


@making
def _memory(n, rows, dense):
    """For one problem: matrices, rows that are held, vectors, numbers and marks of all rows."""
    size = n if dense else 0
    matrices = np.empty((size, size)), np.empty((size, size)), np.empty((n, rows))
    vectors = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    limits = np.empty(rows), np.empty(rows), np.empty(rows)
    others = np.empty(rows), np.empty(rows), np.empty(rows)
    marks = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64)
    # the equations, for the next problem if it has the same ones
    kept = prepared(n), np.empty(rows, np.int64)
    return matrices, prepared(n), vectors, limits, others, marks, kept


@kernel
def _search(
    first, end, P, q, A, rhs, E, e, G, h, lowers, uppers, eps, tol, most,
    x, values, codes, multipliers, memory,
):  # fmt: skip
    """See `search` below."""
    (L, S, columns), held, (start, y, z, g), limits, others, marks, kept_rows = memory
    (low, high, lengths), (least, most_of, level), (which, before, state) = limits, others, marks
    first_held, first_state = kept_rows
    n, dense = x.shape[1], P.shape[1] > 0
    kind, known, firm = 0, -1, NOTHING
    limit = NOTHING + int(min(most, EFFORT / (n * len(low) + 4 * n * n))) + 1
    for b in range(first, end):
        codes[0, b] = outcome.UNFIT
        fill(0.0, multipliers[b])
        own_E, own_e, own_G = E[own(b, E)], e[own(b, e)], G[own(b, G)]
        lower, upper = lowers[own(b, lowers)], uppers[own(b, uppers)]
        own_q, own_P = q[own(b, q)], P[own(b, P)]
        rows = Rows(own_E, own_G, which, low, high, lengths)
        base, width, missed = listed(rows, own_e, h[own(b, h)], lower, upper)
        if base < 0:
            continue
        if dense:
            own_P, alike = symmetric(own_P, eps, S)
            if not alike:
                continue
        if not fit(own_P, own_q):
            continue
        # the factor and the rows of the last problem, if they are those of this one
        same = kind == PLAIN and len(P) == 1
        if not same:
            for c in range(width):
                state[c] = HELD if low[c] == high[c] else OPEN
            kind = metric(own_P, rows, width, state, L) if dense else PLAIN
            if kind != PLAIN and A.shape[1] == 0 and bends_down(own_P, eps, held.T):
                kind = 0
                continue
            if kind == 0:
                if not ridged(own_P, SMALL, L):
                    continue
                kind = RIDGE
        same = same and len(E) == 1 and len(G) == 1 and width == known
        for c in range(width):
            kept = which[c] if low[c] == high[c] else -1 - which[c]  # equations are told apart
            same = same and kept == before[c]
            before[c] = kept
        if not same:
            reduced(L, rows, base, width, columns)
        known = width
        for c in range(width):
            least[c], most_of[c] = low[c] / lengths[c], high[c] / lengths[c]
        if not same:
            firm = _equations(columns, low, high, base, width, held, state)
            if len(E) == 1:
                _keep(held, firm, state, width, first_held, first_state)
        else:
            _keep(first_held, firm, first_state, width, held, state)
        point = x[b]
        fill(0.0, point)
        sides = least, most_of
        count, taken = _approach(
            own_P, own_q, rows, columns, width, sides, kind, L, held, firm,
            start, y, level, state, point, limit,
        )  # fmt: skip
        if taken < 0:
            codes[0, b] = -taken
            continue
        bent = 1
        if kind == RIDGE:
            bent = _change_metric(
                own_P, own_q, rows, base, width, columns, L, held, count,
                state, level, point, start, y,
            )  # fmt: skip
        if bent == 0:
            codes[0, b] = outcome.LOST
            continue
        own_A, own_b = A[own(b, A)], rhs[own(b, rhs)]
        size, met = np.sqrt(dot(y, y, n)) + np.sqrt(dot(start, start, n)), NOTHING
        moved = shaken = 0.0
        for turn in range(2):
            moved, shaken = polish(own_P, own_q, own_A, own_b, rows, L, held, count, point, z)
            if turn == 0:
                blur = 4 * (moved + DOUBLE * size)
                met = judge(rows, columns, width, held, count, state, point, blur)
                if met <= count:
                    break
                count = met
        if met < 0 or not moved <= DOUBTFUL * size:
            codes[0, b] = -met if met < 0 else outcome.LOST
            continue
        if missed > 0 and not missed <= CLEAR * DOUBLE * largest(point, n):
            codes[0, b] = outcome.UNFIT
            continue
        if not settle(rows, width, state, lower, upper, point, eps):
            codes[0, b] = outcome.UNSETTLED
            continue
        found, code = multipliers[b], outcome.SOLVED
        strongest = 0.0
        for i in range(count):
            strongest = max(strongest, abs(held.forces[i]))
        rough = CLEAR * (shaken + DOUBLE * (size + strongest))
        shared = strongest > rough and counted(state, width, IDLE) > 0
        # neither x nor its multipliers are unique
        if bent == 2 and (shared or counted(state, width, DEPENDS) > 0):
            codes[0, b] = outcome.DOUBTED
            continue
        strict = True
        for i in range(count):
            force, c = held.forces[i], held.places[i]
            if i >= firm and not force > rough:  # met, but x is not held by it
                code = outcome.LOST if force < -rough else code
                strict = False
                continue
            found[which[c]] = held.sides[i] * force / lengths[c]
        if code != outcome.SOLVED:
            codes[0, b] = code
            continue
        if not strict and implied(rows, columns, width, held, count, firm, state, point, rough):
            code = outcome.SHARED
        elif shared:
            sure = balance(
                rows, columns, width, held, count, firm, state, point, rough, strict, found
            )
            # otherwise normals of further rows are sums of those that hold x, whose directions
            # are known if all of them have a force
            code = code if sure else (outcome.TIED if strict else outcome.SHARED)
        else:
            share(rows, columns, width, held, count, state, rough, found)
        total = value_and_gradient(own_P, own_q, own_A, own_b, point, g)
        farthest = largest(point, n)
        steep, bends = steepness(own_P, own_q, farthest), kind != RIDGE
        gap = gap_of(rows, width, lower, upper, L, bends, found, point, g, steep, z)
        # f* may be zero: then what rounding makes of f at points of this size
        rounding = FLAT * DOUBLE * farthest * steep
        if not proven(total, gap, tol, eps) and not gap <= rounding:
            codes[0, b] = outcome.UNPROVEN
            continue
        values[0, b], values[1, b] = total, gap
        codes[0, b], codes[1, b] = code, taken


@kernel
def _adjoint(
    first, end, P, E, G, lowers, uppers, eps, codes, multipliers, v, u, nu, memory,
):  # fmt: skip
    """See `adjoint` below."""
    (L, S, columns), held, (z, _, _, _), (lengths, _, _), _, (which, state, _), _ = memory
    n, total_rows = v.shape[1], multipliers.shape[1]
    k, ties = E.shape[1], E.shape[1] + G.shape[1]
    dense, kind = P.shape[1] > 0, 0
    for b in range(first, end):
        if not asked(b, codes, v, u, nu):
            continue
        out = u[b]
        own_P, own_E, own_G = P[own(b, P)], E[own(b, E)], G[own(b, G)]
        lower, upper = lowers[own(b, lowers)], uppers[own(b, uppers)]
        if dense:
            own_P, _ = symmetric(own_P, eps, S)
        width = base = NOTHING
        for row in range(total_rows):
            fixed = row >= ties and lower[row - ties] == upper[row - ties]
            tied = row < k and largest(own_E[row], n) > 0  # rows of zeros carry nothing
            if tied or fixed or multipliers[b, row] != 0:
                which[width], state[width] = row, HELD
                width += 1
                base += 1 if row < ties else 0
        rows = Rows(own_E, own_G, which, lengths, lengths, lengths)
        if not (kind == PLAIN and len(P) == 1):
            kind = metric(own_P, rows, width, state, L) if dense else PLAIN
        reduced(L if kind > 0 else L[:0], rows, base, width, columns)
        count = NOTHING
        for turn in range(2):  # as in the search, so that the same equations depend on others
            for c in range(base if turn == 0 else 0, width if turn == 0 else base):
                state[c] = HELD if join(columns, c, 1.0, held, count) else DEPENDS
                count += 1 if state[c] == HELD else 0
        if kind == 0:
            stay(own_P, held, count, v[b], out, z)
            for i in range(count):
                c = held.places[i]
                nu[b, which[c]] = held.along[i] / lengths[c]
            share(rows, columns, width, held, count, state, -1.0, nu[b])
            continue
        for _ in range(2):  # the second time for the rounding of the first
            product(own_P, out, z)
            for i in range(n):
                z[i] = v[b, i] - z[i]
            for i in range(count):
                row = which[held.places[i]]
                add_row(rows, row, -nu[b, row], z)
            fill(0.0, held.along)
            if dense:
                forward(L, z, n)
            refine(held, count, z, held.along)
            if dense:
                backward(L, z, n)
            add(out, 1.0, z, n)
            for i in range(count):
                c = held.places[i]
                nu[b, which[c]] += held.along[i] / lengths[c]
                if which[c] >= ties:
                    out[which[c] - ties] = 0.0
        share(rows, columns, width, held, count, state, -1.0, nu[b])


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first, end, P, q, A, rhs, E, e, G, h, lowers, uppers, eps, tol, most,
        x, values, codes, multipliers,
    ):  # fmt: skip
        """Solve problems first … end − 1; see `kernels` for the arguments."""
        _ = stamp
        memory = _memory(x.shape[1], multipliers.shape[1], P.shape[1] > 0)
        _search(
            first, end, P, q, A, rhs, E, e, G, h, lowers, uppers, eps, tol, most, x, values,
            codes, multipliers, memory,
        )  # fmt: skip

    @entry
    def adjoint(
        first, end, P, E, G, lowers, uppers, eps, codes, multipliers, v, u, nu,
    ):  # fmt: skip
        """P u + Σ ν_j n_j = v and ⟨n_j, u⟩ = 0 for the rows that hold x.

        Where f is flat along them, u is that of least norm of those that are off by least.
        """
        _ = stamp
        memory = _memory(v.shape[1], multipliers.shape[1], P.shape[1] > 0)
        _adjoint(first, end, P, E, G, lowers, uppers, eps, codes, multipliers, v, u, nu, memory)

    return search, adjoint


search, adjoint = _on_disk(STAMP)
