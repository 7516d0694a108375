"""One sparse quadratic program over {x : l ≤ x ≤ u, G x ≤ h, A x = b}, whole, compiled.

Units, the steps of `barrier`, the face that they lead to, whether it is that of the solution, and
the gap. Matrices are given by rows (start, place, value). What is not beyond doubt is left to
tensor operations: programs without a solution, faces that have to be corrected, x = 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.barrier import NEAR, arrived
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, LARGEST, SKEW
from dfwlayer.engines.compiled.kernels.dense import STAMP, entry, fill, making
from dfwlayer.engines.compiled.kernels.iterate import room_for
from dfwlayer.engines.compiled.kernels.numbers import proven
from dfwlayer.engines.compiled.kernels.ordering import elimination_order
from dfwlayer.engines.compiled.kernels.proof import gap_of, judged, missed, regular
from dfwlayer.engines.compiled.kernels.settled import RIDGES, faced, reprice, settle
from dfwlayer.engines.compiled.kernels.sparse_system import (
    Parts,
    along,
    back,
    largest,
    prepared,
    refined,
)
from dfwlayer.engines.compiled.kernels.triangle import factorise, times
from dfwlayer.engines.compiled.kernels.units import cost_of, equilibrated, sized

__all__ = ["adjoint", "by_rows", "search"]

NOTHING: Any = np.int64(0)  # a plain 0 is a type of its own, for which all is compiled again
FEASIBLE = 1e-11  # what a row may be missed by, relative to its terms
BENT = 8.0  # units of rounding, times √n, of the largest entry of P that it may bend down
PIVOT = 1e-10  # what a pivot of zero becomes in the units in which P is factorised
CORRECTIONS = 3  # each with what the one before has left


@making
def _is_finite(values, most):
    """Whether no entry is as large as that, or no number."""
    sound = True
    for i in range(len(values)):
        sound = sound and abs(values[i]) < most
    return sound


@making
def _is_sound(P, A, G, q, b, h, lower, upper):
    """Whether all of it are numbers of a size that products of them can have, and l ≤ u.

    Sides of rows, and bounds, may also be infinite where that means that there is none.
    """
    sound = _is_finite(P[2], LARGEST) and _is_finite(A[2], LARGEST) and _is_finite(G[2], LARGEST)
    sound = sound and _is_finite(q, LARGEST) and _is_finite(b, LARGEST)
    for i in range(len(q)):
        sound = sound and lower[i] <= upper[i] and lower[i] < LARGEST and upper[i] > -LARGEST
        sound = sound and not -np.inf < lower[i] <= -LARGEST and not LARGEST <= upper[i] < np.inf
    for i in range(len(h)):
        sound = sound and (abs(h[i]) < LARGEST or h[i] == np.inf)
    return sound


@making
def _is_symmetric(P):
    """Whether P is its own transpose, entry by entry, but for the rounding of an entry."""
    start, place, value = P
    n = len(start) - 1
    at = start[:n].copy()  # where the next entry of each row should stand
    for i in range(n):
        for p in range(start[i], start[i + 1]):
            j = place[p]
            other = at[j]
            if other >= start[j + 1] or place[other] != i:
                return False
            if not abs(value[other] - value[p]) <= SKEW * DOUBLE * abs(value[p]):
                return False
            at[j] += 1
    return True


@making
def _bends_down(P):
    """Whether P has an eigenvalue below zero by more than rounding."""
    start, place, value = P
    n, most = len(start) - 1, largest(P[2], 0.0)
    if most == 0:
        return False
    shift = BENT * DOUBLE * np.sqrt(n) * most
    heavy = True  # every diagonal entry is as large as the others of its row together
    for i in range(n):
        own = shift
        for p in range(start[i], start[i + 1]):
            own += value[p] if place[p] == i else -abs(value[p])
        heavy = heavy and own >= 0
    if heavy:
        return False
    unit = PIVOT / shift
    scaled = start, place, value * unit
    none = np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0)
    nothing, rows = np.zeros(n), np.zeros(2 * n)
    parts = Parts(scaled, none, none, nothing, nothing[:0], rows, np.zeros(2 * n, np.bool_))
    system = prepared(parts, elimination_order(scaled, none, none))
    for j in range(n):
        system.diagonal[j] = system.bare[j] + PIVOT
    return factorise(system.upper, system.diagonal, system.signs, system.L) > 0


@making
def _without(matrix, fixed, rows_too):
    """The same places, with zeros in the columns of fixed coordinates, or in their rows too."""
    start, place, value = matrix
    kept = value.copy()
    for i in range(len(start) - 1):
        for p in range(start[i], start[i + 1]):
            if fixed[place[p]] or (rows_too and fixed[i]):
                kept[p] = 0.0
    return start, place, kept


@making
def _scaled(matrix, left, right):
    """Multiply the entries with units of rows and columns, in place."""
    start, place, value = matrix
    for i in range(len(start) - 1):
        for p in range(start[i], start[i + 1]):
            value[p] *= left[i] * right[place[p]]


@making
def _freed(matrix, limits, none):
    """Have rows of zeros hold nothing; whether they are met is seen when x is known."""
    start, _, value = matrix
    for i in range(len(start) - 1):
        some = False
        for p in range(start[i], start[i + 1]):
            some = some or value[p] != 0
        if not some:
            limits[i] = none


@making
def _released(P, A, G, q, lower, upper, fixed):
    """The program without the coordinates that have one value, and these, zero for the others.

    They stay as columns of zeros that no bound ends. What they do to b, h and q is not yet in it.
    """
    n = len(q)
    own_q, low, high, at = q.copy(), lower.copy(), upper.copy(), np.zeros(n)
    P, A, G = _without(P, fixed, True), _without(A, fixed, False), _without(G, fixed, False)
    for i in range(n):
        if fixed[i]:
            at[i], low[i], high[i], own_q[i] = upper[i], -np.inf, np.inf, 0.0
    return P, A, G, own_q, low, high, at


@making
def _limits(h, lower, upper):
    """r and which of it counts, see `barrier`."""
    m, n = len(h), len(lower)
    limits, held = np.empty(m + 2 * n), np.empty(m + 2 * n, np.bool_)
    for i in range(m + 2 * n):
        value = h[i] if i < m else (upper[i - m] if i < m + n else -lower[i - m - n])
        held[i] = value < np.inf
        limits[i] = value if held[i] else 0.0
    return limits, held


@making
def _cornered(parts, system, best, holds, corner):
    """The minimiser on a face, in the last arrays, and what `judged` says of it."""
    there, nu, z = corner
    farthest = largest(best.x, 0.0)
    for ridge in RIDGES:
        settled = settle(parts, system, best, holds, ridge, there, nu, z)
        beside = True
        for i in range(len(there)):
            beside = beside and abs(there[i] - best.x[i]) <= farthest + 1
        if not beside:
            continue
        verdict = judged(parts, there, nu, z, holds) if settled else 0
        if verdict == 0 and reprice(parts, system, best, holds, there, nu, z):
            verdict = judged(parts, there, nu, z, holds)
        if verdict > 0:
            return verdict
    return 0


@making
def _solve(P, A, G, q, b, h, lower, upper, tol, most, x, multipliers):
    """x and its multipliers; f, the gap, what became of it, and steps."""
    n, k, m = len(q), len(b), len(h)
    lost = np.nan, np.inf
    if not _is_sound(P, A, G, q, b, h, lower, upper) or not _is_symmetric(P) or _bends_down(P):
        return lost, outcome.UNFIT, NOTHING
    fixed = np.empty(n, np.bool_)
    for i in range(n):
        fixed[i] = lower[i] == upper[i]
    own_P, own_A, own_G, own_q, low, high, at = _released(P, A, G, q, lower, upper, fixed)
    own_b, own_h, d, a, g = b.copy(), h.copy(), np.empty(n), np.empty(k), np.empty(m)
    beside, rows, bend = np.empty(k), np.empty(m), np.empty(n)
    along(P, at, bend)
    along(A, at, beside)
    along(G, at, rows)
    for i in range(n):
        own_q[i] += 0.0 if fixed[i] else bend[i]
    for i in range(k):
        own_b[i] -= beside[i]
    for i in range(m):
        own_h[i] -= rows[i]
    _freed(own_G, own_h, np.inf)
    _freed(own_A, own_b, 0.0)
    equilibrated(own_P, own_A, own_G, d, a, g)
    sized(own_P, own_q, own_b, own_h, low, high, d, a, g)
    cost = cost_of(own_P, own_q, d)
    _scaled(own_P, d / cost, d)
    _scaled(own_A, a, d)
    _scaled(own_G, g, d)
    limits, held = _limits(own_h * g, low / d, high / d)
    parts = Parts(own_P, own_A, own_G, own_q * d / cost, own_b * a, limits, held)
    best, holds = room_for(n, k, m + 2 * n), np.zeros(m + 2 * n, np.bool_)
    corner = np.empty(n), np.empty(k), np.empty(m + 2 * n)
    system, off, taken = arrived(parts, most, best, holds)
    verdict = _cornered(parts, system, best, holds, corner) if off < NEAR else 0
    if verdict == 0:
        return lost, outcome.LOST, taken
    there, nu, z = corner
    for i in range(n):
        x[i] = upper[i] if fixed[i] else min(max(there[i] * d[i], lower[i]), upper[i])
    force, price = multipliers[k : k + m], multipliers[:k]
    for i in range(k):
        price[i] = nu[i] * cost * a[i]
    for i in range(m):
        force[i] = max(z[i], 0.0) * cost * g[i]
    if not missed(A, G, b, h, x) <= FEASIBLE:
        return lost, outcome.UNSETTLED, taken
    value, gap, rounding = gap_of(P, A, G, q, b, h, lower, upper, x, price, force)
    if not proven(value, gap, tol, DOUBLE) and not gap <= rounding:
        return lost, outcome.UNPROVEN, taken
    along(P, x, bend)
    for i in range(n):
        bend[i] += q[i]
    back(A, price, bend)
    back(G, force, bend)
    for i in range(n):
        above, below = max(z[m + i], 0.0), max(z[m + n + i], 0.0)
        multipliers[k + m + i] = -bend[i] if fixed[i] else (above - below) * cost / d[i]
    sure = verdict == 2 and regular(parts, system, holds, fixed)
    return (value, gap), outcome.SOLVED if sure else outcome.SHARED, taken


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def by_rows(matrix):
        """Where the rows of a dense matrix begin, the columns of what is not zero, and that."""
        _ = stamp
        m, n = matrix.shape
        start, room = np.zeros(m + 1, np.int64), 4 * (m + n) + 64
        place, value = np.empty(room, np.int64), np.empty(room)
        count = 0
        for i in range(m):
            if count + n > room:
                room = 2 * room + n
                more, longer = np.empty(room, np.int64), np.empty(room)
                for p in range(count):
                    more[p], longer[p] = place[p], value[p]
                place, value = more, longer
            row = matrix[i]
            for j in range(n):
                if row[j] != 0:
                    place[count], value[count] = j, row[j]
                    count += 1
            start[i + 1] = count
        return start, place[:count].copy(), value[:count].copy()

    @entry
    def search(P, A, G, q, b, h, lower, upper, tol, most, x, values, codes, multipliers):
        """Solve one program; see `kernels` for the last arrays."""
        _ = stamp
        (value, gap), code, taken = _solve(
            P, A, G, q, b, h, lower, upper, tol, most, x[0], multipliers[0]
        )
        if code != outcome.SOLVED and code != outcome.SHARED:
            fill(0.0, multipliers[0])
        else:
            values[0, 0], values[1, 0] = value, gap
        codes[0, 0], codes[1, 0] = code, taken

    @entry
    def adjoint(P, A, G, lower, upper, codes, multipliers, v, u, nu):
        """P u + Σ ν_j n_j = v and ⟨n_j, u⟩ = 0 for the rows that hold x."""
        _ = stamp
        n, k, m = len(P[0]) - 1, len(A[0]) - 1, len(G[0]) - 1
        fill(0.0, u[0])
        fill(0.0, nu[0])
        if codes[0, 0] != outcome.SOLVED or not _is_finite(v[0], np.inf):
            return
        P, A, G = (P[0], P[1], P[2].copy()), (A[0], A[1], A[2].copy()), (G[0], G[1], G[2].copy())
        d, a, g = np.empty(n), np.empty(k), np.empty(m)
        equilibrated(P, A, G, d, a, g)
        _scaled(P, d, d)
        _scaled(A, a, d)
        _scaled(G, g, d)
        holds, none = np.zeros(m + 2 * n, np.bool_), np.zeros(m + 2 * n)
        for i in range(m):
            holds[i] = multipliers[0, k + i] != 0
        for i in range(n):
            holds[m + i] = multipliers[0, k + m + i] != 0 or lower[i] == upper[i]
        parts = Parts(P, A, G, np.zeros(n), np.zeros(k), none, holds)
        system = prepared(parts, elimination_order(P, A, G))
        faced(parts, system, holds, RIDGES[0])
        place, wanted, found = system.place, np.zeros(n + k + m), np.zeros(n + k + m)
        moves, rest = np.zeros(n + k + m, np.bool_), np.empty(n + k + m)
        for i in range(n + k + m):
            moves[place[i]] = not holds[m + i] if i < n else (i < n + k or holds[i - n - k])
            wanted[place[i]] = v[0, i] * d[i] if i < n and not holds[m + i] else 0.0
        for _ in range(CORRECTIONS):
            times(system.upper, system.diagonal, found, rest)
            for j in range(len(rest)):
                rest[j] = wanted[j] - rest[j] if moves[j] else 0.0
            refined(system, rest)
            for j in range(len(rest)):
                found[j] += system.found[j] if moves[j] else 0.0
        slope, way, prices, forces = np.empty(n), np.empty(n), np.empty(k), np.empty(m)
        for i in range(n):
            way[i] = 0.0 if holds[m + i] else found[place[i]]
        for i in range(k):
            prices[i] = found[place[n + i]]
        for i in range(m):
            forces[i] = found[place[n + k + i]] if holds[i] else 0.0
        along(P, way, slope)
        back(A, prices, slope)
        back(G, forces, slope)
        for i in range(n):
            u[0, i] = way[i] * d[i]
            if holds[m + i]:
                nu[0, k + m + i] = v[0, i] - slope[i] / d[i]
        for i in range(k):
            nu[0, i] = prices[i] * a[i]
        for i in range(m):
            nu[0, k + i] = forces[i] * g[i]

    return by_rows, search, adjoint


by_rows, search, adjoint = _on_disk(STAMP)
