"""Equations, inequalities and coordinates as rows on the pieces that x is on, compiled.

See `dfwlayer.engines.compiled.kernels.pieces` for the problem, whose letters these are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.constants import LARGEST
from dfwlayer.engines.compiled.kernels.dense import (
    backward,
    copy,
    dot,
    fill,
    forward,
    kernel,
    summing,
)

__all__ = [
    "NOTHING",
    "NOWHERE",
    "Given",
    "Rows",
    "begin",
    "bent_rows",
    "bound",
    "inverse",
    "scale",
    "turned",
]

NOTHING: Any = np.int64(0)  # a plain 0 is a type of its own, for which all is compiled again
NOWHERE: Any = np.int64(-1)


class Given(NamedTuple):
    """One problem."""

    q: np.ndarray  # (n,)
    E: np.ndarray  # (k, n)
    e: np.ndarray  # (k,)
    G: np.ndarray  # (m, n)
    h: np.ndarray  # (m,)
    lower: np.ndarray  # (n,)
    upper: np.ndarray  # (n,)
    places: np.ndarray  # o (n, K)
    costs: np.ndarray  # c (n, K)
    jumps: np.ndarray  # J (r, n, K), of the first r inequalities


class Rows(NamedTuple):
    """Equations, inequalities and coordinates, as rows on the pieces that x is on."""

    passed: np.ndarray  # (n,), the kinks below x_i
    normals: np.ndarray  # L⁻¹n_j as unit vectors (·, n)
    lengths: np.ndarray  # (·,), |L⁻¹n_j|
    least: np.ndarray  # (·,), their sides
    most: np.ndarray
    state: np.ndarray  # (·,), 1 for those that are held
    sides: np.ndarray  # the right-hand sides of inequalities (m,)
    ends: np.ndarray  # the kinks at both ends of a piece (n, 2), −1 where there is none
    bent: np.ndarray  # the inequalities with kinks, first
    prices: np.ndarray  # λ (m,)
    rates: np.ndarray  # how λ changes with the step (m,)


@summing
def inverse(L, normals, first, n):
    """The rows L⁻¹e_i from some place on; an empty L is the identity."""
    for i in range(n):
        row = normals[first + i]
        fill(0.0, row)
        row[i] = 1.0
        if len(L) == 0:
            continue
        row[i] = 1 / L[i, i]
        for j in range(i + 1, n):
            total = 0.0
            for k in range(i, j):
                total += L[j, k] * row[k]
            row[j] = -total / L[j, j]


@kernel
def scale(rows, c):
    """Make a normal a unit vector, whose length is noted; False for one of zeros."""
    row = rows.normals[c]
    size = np.sqrt(dot(row, row, len(row)))
    rows.lengths[c] = size
    if not 0 < size < LARGEST:
        return False
    for i in range(len(row)):
        row[i] /= size
    return True


@kernel
def bound(given, rows, base, i):
    """Note the sides of the piece that x_i is on; False if there is no point between them."""
    t, last, c = rows.passed[i], given.places.shape[1], base + i
    low, high = given.lower[i], given.upper[i]
    rows.ends[i, 0] = rows.ends[i, 1] = NOWHERE
    if t > 0 and given.places[i, t - 1] > low:
        low, rows.ends[i, 0] = given.places[i, t - 1], t - 1
    if t < last and given.places[i, t] < high:
        high, rows.ends[i, 1] = given.places[i, t], t
    rows.least[c], rows.most[c] = low / rows.lengths[c], high / rows.lengths[c]
    return low <= high


@kernel
def bent_rows(given, bent):
    """List the rows with kinks; how many there are, −1 if a cost or a row is not convex."""
    m, n, last = given.jumps.shape
    count = NOTHING
    for i in range(n):
        for j in range(last):
            if not given.costs[i, j] >= 0:
                return NOWHERE
    for r in range(m):
        rises = False
        for i in range(n):
            for j in range(last):
                if not given.jumps[r, i, j] >= 0:
                    return NOWHERE
                rises = rises or given.jumps[r, i, j] > 0
        if rises:
            bent[count] = r
            count += 1
    return count


@kernel
def begin(given, L, rows, y):
    """The minimiser y without rows, on the pieces of that for the mean slopes, and all rows.

    Bounds count for the pieces only. False where the numbers are not for this code.
    """
    n, last = given.costs.shape
    k, m = len(given.E), len(given.G)
    for i in range(n):
        y[i] = -given.q[i]
        for j in range(last):
            y[i] -= 0.5 * given.costs[i, j]
    if len(L) > 0:
        forward(L, y, n)
        backward(L, y, n)
    for i in range(n):
        t, at = 0, min(max(y[i], given.lower[i]), given.upper[i])
        while t < last and given.places[i, t] < at:
            t += 1
        rows.passed[i] = t
        y[i] = -given.q[i]
        for j in range(t):
            y[i] -= given.costs[i, j]
    if len(L) > 0:
        forward(L, y, n)
    for c in range(k + m):
        copy(given.E[c] if c < k else given.G[c - k], rows.normals[c])
    for r in range(m):
        rows.sides[r] = given.h[r]
        for i in range(n if r < len(given.jumps) else 0):
            for j in range(rows.passed[i]):
                if given.jumps[r, i, j] > 0:
                    rows.normals[k + r, i] += given.jumps[r, i, j]
                    rows.sides[r] += given.jumps[r, i, j] * given.places[i, j]
    fit = True
    for c in range(k + m):
        if len(L) > 0:
            forward(L, rows.normals[c], n)
        fit = fit and scale(rows, c)
        rows.state[c] = NOTHING
        side = given.e[c] if c < k else rows.sides[c - k]
        rows.least[c] = side / rows.lengths[c] if c < k else -np.inf
        rows.most[c] = side / rows.lengths[c]
    for i in range(n):
        rows.state[k + m + i] = NOTHING
        fit = fit and bound(given, rows, k + m, i)
    return fit


@kernel
def turned(given, rows, r, k, c, i, t, change):
    """Give a row its slope beyond a kink, in the same units; False if it is zero there."""
    place = k + r
    before, size = rows.lengths[place], rows.lengths[c]
    row, other = rows.normals[place], rows.normals[c]
    for a in range(len(row)):
        row[a] = before * row[a] + change * size * other[a]
    sound = scale(rows, place)
    rows.sides[r] += change * given.places[i, t]
    rows.most[place] = rows.sides[r] / rows.lengths[place]
    return sound
