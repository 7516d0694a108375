"""A point on rows of a polyhedron that are held: to all digits, judged, with its gap, compiled."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import (
    add,
    backward,
    copy,
    dot,
    forward,
    kernel,
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.dual import join, refine
from dfwlayer.engines.compiled.kernels.numbers import (
    CLEAR,
    DOUBLE,
    DOUBTED,
    LOST,
    SINGLE,
    rounded,
)
from dfwlayer.engines.compiled.kernels.rows import add_row, row_and_size

__all__ = ["DEPENDS", "HELD", "OPEN", "gap_of", "judge", "polish", "settle"]

OPEN, HELD, DEPENDS = 0, 1, 2  # what a row is: free to join, held, an equation that others imply
CLOSE = 2.0  # units of rounding of its terms that a row which is held is off by
APART = 1e-6  # what is left of a unit normal beside others that it does not depend on
MOST = 8  # corrections; two or three are needed


@kernel
def polish(P, q, A, rhs, rows, L, held, count, x, z):
    """Newton's steps on the rows that are held, from x, until these are met to rounding.

    Each one solves P d + Σ ν_j n_j = −(∇f + Σ λ_j n_j), ⟨n_j, d⟩ = c_j − ⟨n_j, x⟩ with what is at
    hand of LLᵀ = P, and so takes away what rounding, or an L that is not quite that of P, has left.
    Returns the length of the last one, in the metric of f, what it did to the forces, and by how
    many units of rounding a row is off.
    """
    E, G, which, low, high, lengths = rows
    n, base = len(x), len(E) + len(G)
    moved = shaken = off = np.inf
    for trial in range(MOST):
        off = 0.0
        for i in range(count):
            c = held.places[i]
            bound = high[c] if held.sides[i] > 0 else low[c]
            value, size = row_and_size(rows, which[c], x)
            off = max(off, abs(bound - value) / (DOUBLE * (size + abs(bound)) + 1e-300))
            held.along[i] = held.sides[i] * (bound - value) / lengths[c]
        if trial > 1 and off <= CLOSE:
            break
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
        add(x, 1.0, z, n)
        for i in range(count):
            held.forces[i] += held.along[i]
            shaken = max(shaken, abs(held.along[i]))
            c = held.places[i]
            if which[c] >= base:
                x[which[c] - base] = high[c] if held.sides[i] > 0 else low[c]
    return moved, shaken, off


@kernel
def judge(rows, columns, width, held, count, state, x, blur):
    """Hold the rows as well that are met to rounding; how many are held then, or why it fails.

    That is −LOST if a row is violated, and −DOUBTED if the normals of those that are met depend on
    each other: then there is more than one set of multipliers. ``blur`` is what y may be off by.
    """
    _, _, which, low, high, lengths = rows
    for c in range(width):
        if state[c] == HELD:
            continue
        value, size = row_and_size(rows, which[c], x)
        above, below = high[c] - value, value - low[c]
        slack, bound = (above, high[c]) if above < below else (below, low[c])
        noise = CLEAR * DOUBLE * (size + abs(bound)) + blur * lengths[c]
        if state[c] == DEPENDS:
            if not abs(above) <= noise:
                return -LOST
        elif not slack > noise:
            if slack < -noise:
                return -LOST
            if not join(columns, c, 1.0 if above < below else -1.0, held, count):
                return -DOUBTED
            if held.T[count, count] < APART:
                return -DOUBTED
            count += 1
    return count


@kernel
def settle(rows, width, lower, upper, x, eps):
    """Round x to its dtype, between bounds; False if a row is off by more than that does to it."""
    E, G, which, low, high, _ = rows
    base = len(E) + len(G)
    for i in range(len(x)):
        x[i] = min(max(rounded(x[i], eps), lower[i]), upper[i])
    for c in range(width):
        if which[c] >= base:
            break
        value, size = row_and_size(rows, which[c], x)
        over, under = value - high[c], low[c] - value
        most = (CLOSE if eps == SINGLE else 2 * CLOSE) * eps
        if over > most * (size + abs(high[c])) or under > most * (size + abs(low[c])):
            return False
    return True


@kernel
def gap_of(rows, width, lower, upper, L, multipliers, x, g, z):
    """A bound of f(x) − f* by Lagrangian duality, valid for any multipliers.

    f(x) − f(s) = ⟨∇f, x − s⟩ − ½ (x − s)ᵀP(x − s), and with r = ∇f + Σ λ_j n_j that is at most
    Σ λ_j (c_j − ⟨n_j, x⟩) + ⟨r, x − s⟩ − … for every s in the set. An r_i that points from a bound
    at which x_i is makes nothing of it. All others make no more than ½ rᵀP⁻¹r.
    """
    E, G, which, _, high, _ = rows
    n, base = len(x), len(E) + len(G)
    copy(g, z)
    gap = terms = 0.0
    for c in range(width):
        row = which[c]
        if row >= base:
            break
        force = multipliers[row]
        if force != 0:
            value, size = row_and_size(rows, row, x)
            gap += abs(force * (high[c] - value))
            terms += abs(force) * size
            add_row(rows, row, force, z)
    for i in range(n):
        terms += abs(g[i] * x[i])
        if (z[i] > 0 and x[i] == lower[i]) or (z[i] < 0 and x[i] == upper[i]):
            z[i] = 0.0
    if len(L) > 0:
        forward(L, z, n)
    return gap + dot(z, z, n) + 2 * DOUBLE * terms  # twice the half, for what L is off by
