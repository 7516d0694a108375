"""Whether a point and its multipliers are the solution of one sparse program, compiled."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE
from dfwlayer.engines.compiled.kernels.dense import making
from dfwlayer.engines.compiled.kernels.judged import FLAT
from dfwlayer.engines.compiled.kernels.sparse_system import along, back, largest, refined
from dfwlayer.engines.compiled.kernels.triangle import times

__all__ = ["absolute", "gap_of", "judged", "missed", "regular"]

# as in `dfwlayer.linalg.quadratic.faces`
DOUBT, STEEP = 1e-8, 16.0
UNIQUE = 1e-6  # of a vector: what a system may make of it that has one solution


@making
def absolute(P, A, G):
    """|P|, |A| and |G|, by which the sizes of terms are found."""
    return (
        (P[0], P[1], np.abs(P[2])),
        (A[0], A[1], np.abs(A[2])),
        (G[0], G[1], np.abs(G[2])),
    )


@making
def _steepest(P, q, size):
    """The largest sum of the terms of an entry of ∇f, for x with entries of that size, from |P|."""
    steep = 0.0
    start, _, value = P
    for i in range(len(q)):
        total = abs(q[i])
        for p in range(start[i], start[i + 1]):
            total += value[p] * size
        steep = max(steep, total)
    return steep


@making
def judged(parts, x, nu, z, holds):
    """Whether all conditions of optimality hold to rounding: 0 no, 1 yes, 2 clear of rounding.

    That is what `dfwlayer.linalg.quadratic.faces` asks for; and 2 if in addition every row either
    holds x with a force, or has slack.
    """
    n, k, m = len(x), len(nu), len(parts.G[0]) - 1
    product, slope, terms = np.empty(n), np.empty(n), np.empty(n)
    wide_P, wide_A, wide_G = absolute(parts.P, parts.A, parts.G)
    at = np.abs(x)
    farthest = largest(x, 0.0)
    if not CLEAR * DOUBLE < farthest < np.inf:  # zero may be meant
        return 0
    along(parts.P, x, product)
    along(wide_P, at, terms)
    value = 0.0
    for i in range(n):
        value += x[i] * (0.5 * product[i] + parts.q[i])
        slope[i] = product[i] + parts.q[i] + z[m + i] - z[m + n + i]
        terms[i] += abs(parts.q[i]) + abs(z[m + i]) + abs(z[m + n + i])
    back(parts.A, nu, slope)
    back(parts.G, z, slope)
    back(wide_A, np.abs(nu), terms)
    back(wide_G, np.abs(z), terms)
    steep = largest(terms, 0.0) + _steepest(wide_P, parts.q, farthest)
    if not steep > 0 or not largest(slope, 0.0) <= STEEP * CLEAR * DOUBLE * steep:
        return 0
    beside, about = np.empty(k), np.empty(k)
    along(parts.A, x, beside)
    along(wide_A, at, about)
    for i in range(k):
        off = abs(beside[i] - parts.b[i])
        if not off <= CLEAR * DOUBLE * (about[i] + abs(parts.b[i]) + farthest):
            return 0
    rows, reach = np.empty(m), np.empty(m)
    along(parts.G, x, rows)
    along(wide_G, at, reach)
    clear, idle = True, 0.0
    for i in range(m + 2 * n):
        if not parts.held[i]:
            continue
        level = rows[i] if i < m else (x[i - m] if i < m + n else -x[i - m - n])
        size = reach[i] if i < m else abs(level)
        over = level - parts.limits[i]
        noise = CLEAR * DOUBLE * (size + abs(parts.limits[i]) + farthest)
        if over > noise or z[i] < -STEEP * CLEAR * DOUBLE * steep:
            return 0
        idle += abs(z[i] * over)
        forced = z[i] > STEEP * CLEAR * DOUBLE * steep
        clear = clear and (forced if holds[i] else over < -noise)
    if not idle <= DOUBT * (1 + abs(value)):
        return 0
    return 2 if clear else 1


@making
def regular(parts, system, holds, fixed):
    """Whether x and multipliers of a face, whose factor the system has, are the only ones.

    A system that has one solution gives back any vector from what its matrix makes of it.
    Coordinates that are fixed have no part in it.
    """
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    N, place = n + k + m, system.place
    given, right, moves = np.zeros(N), np.empty(N), np.zeros(N, np.bool_)
    for i in range(N):
        if i < n:
            moves[place[i]] = not (fixed[i] or holds[m + i] or holds[m + n + i])
        else:
            moves[place[i]] = i < n + k or holds[i - n - k]
    part = 0.5
    for j in range(N):
        part = (part + 0.6180339887498949) % 1.0  # evenly spread, and the same in every run
        given[j] = part - 0.5 if moves[j] else 0.0
    times(system.upper, system.diagonal, given, right)
    for j in range(N):
        right[j] = right[j] if moves[j] else 0.0
    refined(system, right)
    same = True
    for j in range(N):
        same = same and (not moves[j] or abs(system.found[j] - given[j]) <= UNIQUE)
    return same


@making
def gap_of(P, A, G, q, b, h, lower, upper, x, nu, z):
    """f(x), a bound of f(x) − f* by Lagrangian duality, and what rounding may make of f.

    As `dfwlayer.engines.compiled.kernels.judged.gap_of` where P is singular: what forces leave of
    ∇f counts to the bound that ends it, and without one for points as large as x if it is rounding.
    """
    n, k, m = len(q), len(b), len(h)
    slope, beside, rows = np.empty(n), np.empty(k), np.empty(m)
    wide_P, wide_A, wide_G = absolute(P, A, G)
    at = np.abs(x)
    terms, about, reach = np.zeros(n), np.empty(k), np.empty(m)
    along(P, x, slope)
    value = gap = total = 0.0
    for i in range(n):
        value += x[i] * (0.5 * slope[i] + q[i])
        slope[i] += q[i]
        terms[i] = abs(slope[i])
        total += terms[i] * abs(x[i])
    back(A, nu, slope)
    back(G, z, slope)
    back(wide_A, np.abs(nu), terms)
    back(wide_G, np.abs(z), terms)
    along(A, x, beside)
    along(G, x, rows)
    along(wide_A, at, about)
    along(wide_G, at, reach)
    for i in range(k):
        gap += abs(nu[i] * (b[i] - beside[i]))
        total += abs(nu[i]) * (about[i] + abs(b[i]))
    for i in range(m):
        if z[i] != 0:
            gap += abs(z[i] * (h[i] - rows[i]))
            total += abs(z[i]) * (reach[i] + abs(h[i]))
    farthest = largest(x, 0.0)
    steep = _steepest(wide_P, q, farthest)
    heaviest = largest(terms, steep)
    for i in range(n):
        way = x[i] - (lower[i] if slope[i] > 0 else upper[i])
        if abs(way) < np.inf:
            gap += slope[i] * way
        elif abs(slope[i]) > FLAT * DOUBLE * heaviest:
            gap = np.inf
        else:
            gap += abs(slope[i]) * farthest
    return value, gap + 2 * DOUBLE * total, FLAT * DOUBLE * farthest * steep


@making
def missed(A, G, b, h, x):
    """The largest amount by which x misses a row, relative to its terms."""
    k, m = len(b), len(h)
    beside, about = np.empty(k), np.empty(k)
    rows, reach = np.empty(m), np.empty(m)
    at = np.abs(x)
    along(A, x, beside)
    along(G, x, rows)
    along((A[0], A[1], np.abs(A[2])), at, about)
    along((G[0], G[1], np.abs(G[2])), at, reach)
    farthest, worst = largest(x, 0.0), 0.0
    for i in range(k):
        off = abs(beside[i] - b[i])
        worst = max(worst, off / (about[i] + abs(b[i]) + farthest) if off > 0 else 0.0)
    for i in range(m):
        off = rows[i] - h[i]
        worst = max(worst, off / (reach[i] + abs(h[i]) + farthest) if off > 0 else 0.0)
    return worst
