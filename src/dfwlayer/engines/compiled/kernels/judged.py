"""A point on rows of a polyhedron that are held: to all digits, judged, with its gap, compiled."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import CLEAR, CLOSE, DOUBLE, SINGLE
from dfwlayer.engines.compiled.kernels.dense import (
    absolute,
    backward,
    copy,
    dot,
    factor,
    forward,
    kernel,
    making,
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.dual import combined, join, refine
from dfwlayer.engines.compiled.kernels.numbers import rounded
from dfwlayer.engines.compiled.kernels.rows import add_row, largest, largest_of, row_and_size

__all__ = [
    "DEPENDS",
    "FLAT",
    "HELD",
    "IDLE",
    "OPEN",
    "counted",
    "gap_of",
    "implied",
    "judge",
    "polish",
    "settle",
    "share",
    "steepness",
]

# what a row is: free to join, held, implied by others, or met where others that are met imply it
OPEN, HELD, DEPENDS, IDLE = range(4)
FLAT = 256.0  # units of rounding of a slope along which f does not bend
SAME = 1e-8  # what a combination of unit normals may be off by from being one of them
APART = 1e-6  # what is left of a unit normal beside others that it does not depend on
MOST = 8  # corrections; two or three are needed


@kernel
def polish(P, q, A, rhs, rows, L, held, count, x, z):
    """Newton's steps on the rows that are held, from x, until these are met to rounding.

    Each one solves P d + Σ ν_j n_j = −(∇f + Σ λ_j n_j), ⟨n_j, d⟩ = c_j − ⟨n_j, x⟩ with what is at
    hand of LLᵀ = P, and so takes away what rounding, or an L that is not quite that of P, has left.
    Returns the length of the last one, in the metric of f, and what it did to the forces.
    """
    E, G, which, low, high, lengths = rows
    n, base = len(x), len(E) + len(G)
    moved = shaken = before = np.inf
    for trial in range(MOST):
        off = 0.0
        for i in range(count):
            c = held.places[i]
            bound = high[c] if held.sides[i] > 0 else low[c]
            value, size = row_and_size(rows, which[c], x)
            off = max(off, abs(bound - value) / (DOUBLE * (size + abs(bound)) + 1e-300))
            held.along[i] = held.sides[i] * (bound - value) / lengths[c]
        if trial > 1 and off <= CLOSE and not shaken < 1e-3 * before:
            break
        before = shaken
        value_and_gradient(P, q, A, rhs, x, z)
        for i in range(count):
            c = held.places[i]
            add_row(rows, which[c], held.sides[i] * held.forces[i] / lengths[c], z)
        for i in range(n):
            z[i] = -z[i]
        if len(L) > 0:
            forward(L, z, n)
        refine(held, count, z, held.along)
        moved, shaken = np.sqrt(dot(z, z, n)), 0.0
        if len(L) > 0:
            backward(L, z, n)
        for i in range(n):
            x[i] += z[i]
            if abs(x[i]) <= 2 * DOUBLE * abs(z[i]):  # all of it was rounding, and so is the rest
                x[i] = 0.0
        for i in range(count):
            held.forces[i] += held.along[i]
            shaken = max(shaken, abs(held.along[i]))
            c = held.places[i]
            if which[c] >= base:
                x[which[c] - base] = high[c] if held.sides[i] > 0 else low[c]
    return moved, shaken


@kernel
def judge(rows, columns, width, held, count, state, x, blur):
    """Hold the rows as well that are met to rounding; how many are held then, or why it fails.

    That is −LOST if a row is violated. Those whose normals depend on others that are met are IDLE:
    then there is more than one set of multipliers, unless nothing holds x. Only rows of G that are
    the same are told from that, and what holds one of them is shared. ``blur`` is what y may be off
    by.
    """
    E, G, which, low, high, lengths = rows
    first, end = len(E), len(E) + len(G)
    for c in range(width):
        if state[c] == HELD:
            continue
        value, size = row_and_size(rows, which[c], x)
        above, below = high[c] - value, value - low[c]
        slack, bound = (above, high[c]) if above < below else (below, low[c])
        noise = CLEAR * DOUBLE * (size + abs(bound)) + blur * lengths[c]
        if state[c] == DEPENDS:
            if not abs(above) <= noise:
                return -outcome.LOST
        elif not slack > noise:
            if slack < -noise:
                return -outcome.LOST
            if join(columns, c, 1.0 if above < below else -1.0, held, count):
                if held.T[count, count] < APART:
                    state[c] = IDLE
                else:
                    count += 1
                continue
            combined(columns, c, held, count)
            state[c] = DEPENDS
            for i in range(count):
                part = held.along[i]
                twin = abs(part - 1) <= SAME and first <= which[held.places[i]] < end
                if abs(part) > SAME and not (twin and first <= which[c] < end):
                    state[c] = IDLE
    return count


@kernel
def implied(rows, columns, width, held, count, firm, state, x, rough):
    """Whether rows that are met without a force may leave x no way but along them.

    Their normals then add up to a sum of those that have a force, and x moves as if they were
    equations, which forces do not tell. There is none such sum where every further row that is met
    is a sum of the rows without a force that are held, with no part of it negative.
    """
    for c in range(width):
        if state[c] != IDLE:
            continue
        value, _ = row_and_size(rows, rows.which[c], x)
        side = 1.0 if rows.high[c] - value < value - rows.low[c] else -1.0
        combined(columns, c, held, count)
        for i in range(firm, count):
            if not held.forces[i] > rough and side * held.along[i] < -SAME:
                return True
    return False


@kernel
def counted(state, width, what):
    """How many rows are that."""
    count = 0
    for c in range(width):
        count += 1 if state[c] == what else 0
    return count


@making
def share(rows, columns, width, held, count, state, rough, values):
    """Among rows that depend on others, what these carry: the values of least norm.

    The values (·,) of the rows that are held become those with the same Σ v_j n_j for which the
    sum of (|n_j| v_j)² is least, |n_j| the largest entry, but for bounds. What rounding makes of
    nothing, no more than ``rough`` of a unit normal that is no equation, is nothing.
    """
    n, base, which, lengths = len(held.normal), len(rows.E) + len(rows.G), rows.which, rows.lengths
    every = counted(state, width, DEPENDS)
    if every == 0:
        return
    parts, index = np.zeros((every, count)), np.empty(every, np.int64)
    gram, right, weights = np.empty((every, every)), np.empty(every), np.zeros(count)
    for i in range(count):
        row = which[held.places[i]]
        if row < base:
            weights[i] = largest_of(rows, row, n) ** 2
    every = 0
    for c in range(width):
        if state[c] == DEPENDS:
            combined(columns, c, held, count)
            for i in range(count):
                unit = lengths[c] / lengths[held.places[i]]
                parts[every, i] = held.along[i] * held.sides[i] * unit
            index[every] = which[c]
            every += 1
    for a in range(every):
        right[a] = 0.0
        for i in range(count):
            right[a] += weights[i] * parts[a, i] * values[which[held.places[i]]]
        for b in range(a + 1):
            gram[a, b] = largest_of(rows, index[a], n) ** 2 if a == b else 0.0
            for i in range(count):
                gram[a, b] += weights[i] * parts[a, i] * parts[b, i]
    if not factor(gram, every):
        return
    forward(gram, right, every)
    backward(gram, right, every)
    for a in range(every):
        values[index[a]] = right[a]
        for i in range(count):
            values[which[held.places[i]]] -= right[a] * parts[a, i]
    for c in range(width):
        if rows.low[c] != rows.high[c] and abs(values[which[c]]) * lengths[c] <= rough:
            values[which[c]] = 0.0


@kernel
def settle(rows, width, state, lower, upper, x, eps):
    """Round x to its dtype, between bounds; False if a row is off by more than that does to it.

    Bounds that are met but are not held, as others imply them, are met exactly.

    All entries of x have the rounding of the largest one, also where the terms of a row vanish. One
    that is smaller than that by far, and no bound, is what corrections have left of zero.
    """
    E, G, which, low, high, _ = rows
    base = len(E) + len(G)
    least = (CLEAR * DOUBLE) ** 2 * largest(x, len(x))
    for i in range(len(x)):
        if abs(x[i]) <= least and x[i] != lower[i] and x[i] != upper[i]:
            x[i] = 0.0
        x[i] = min(max(rounded(x[i], eps), lower[i]), upper[i])
    for c in range(width):
        if which[c] >= base and state[c] == IDLE:
            i = which[c] - base
            x[i] = lower[i] if x[i] - lower[i] < upper[i] - x[i] else upper[i]
    farthest = largest(x, len(x))
    for c in range(width):
        if which[c] >= base:
            break
        value, size = row_and_size(rows, which[c], x)
        size = max(size, farthest * largest_of(rows, which[c], len(x)))
        over, under = value - high[c], low[c] - value
        most = (CLOSE if eps == SINGLE else 2 * CLOSE) * eps
        if over > most * (size + abs(high[c])) or under > most * (size + abs(low[c])):
            return False
    return True


@kernel
def steepness(P, q, size):
    """The largest sum of the terms of an entry of ∇f, for x with entries of that size."""
    steep = 0.0
    for i in range(len(q)):
        bend = 1.0 if len(P) == 0 else absolute(P[i], len(q))
        steep = max(steep, size * bend + abs(q[i]))
    return steep


@kernel
def gap_of(rows, width, lower, upper, L, bends, multipliers, x, g, steep, z):
    """A bound of f(x) − f* by Lagrangian duality, valid for any multipliers.

    f(x) − f(s) = ⟨∇f, x − s⟩ − ½ (x − s)ᵀP(x − s), and with r = ∇f + Σ λ_j n_j that is at most
    Σ λ_j (c_j − ⟨n_j, x⟩) + ⟨r, x − s⟩ − … for every s in the set. An r_i that points from a bound
    at which x_i is makes nothing of it. All others make no more than ½ rᵀP⁻¹r. Where P is singular
    they make what there is to the bound; without a bound they have to be zero to rounding, that of
    the terms of ∇f (``steep``, see `steepness`) or of a force, and count for points as large as x.
    """
    E, G, which, _, high, _ = rows
    n, base = len(x), len(E) + len(G)
    copy(g, z)
    gap = terms = 0.0
    heaviest, farthest = steep, largest(x, n)
    for c in range(width):
        row = which[c]
        if row >= base:
            break
        force = multipliers[row]
        if force != 0:
            value, size = row_and_size(rows, row, x)
            gap += abs(force * (high[c] - value))
            terms += abs(force) * size
            heaviest = max(heaviest, abs(force) * largest_of(rows, row, n))
            add_row(rows, row, force, z)
    for i in range(n):
        terms += abs(g[i] * x[i])
        if (z[i] > 0 and x[i] == lower[i]) or (z[i] < 0 and x[i] == upper[i]):
            z[i] = 0.0
    if not bends:
        for i in range(n):
            way = x[i] - (lower[i] if z[i] > 0 else upper[i])
            if abs(way) < np.inf:
                gap += z[i] * way
            elif abs(z[i]) > FLAT * DOUBLE * heaviest:
                return np.inf
            else:
                gap += abs(z[i]) * farthest
            z[i] = 0.0
    if len(L) > 0:
        forward(L, z, n)
    return gap + dot(z, z, n) + 2 * DOUBLE * terms  # twice the half, for what L is off by
