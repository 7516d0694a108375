"""The linear system of an interior-point step for one sparse program, compiled.

K = [P + R₂ᵀW R₂ + ρ  Aᵀ  Gᵀ;  A  −δ  0;  G  0  −W⁻¹ − δ], see `barrier`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import copy, making
from dfwlayer.engines.compiled.kernels.ordering import entries
from dfwlayer.engines.compiled.kernels.triangle import (
    Triangle,
    Upper,
    factorise,
    planned,
    solve,
    times,
)

__all__ = ["Parts", "across", "along", "back", "direction", "factorised", "largest", "prepared"]
__all__ += ["refined"]

CLOSED = 1e-20  # weight of a row that does not count
REFINED = 1e-10  # of a right-hand side, what rounding may leave of it, in units
REFINEMENTS = 8


class Parts(NamedTuple):
    """A program: matrices by rows (start, place, value), vectors, and which rows count."""

    P: tuple[np.ndarray, ...]  # (n, n)
    A: tuple[np.ndarray, ...]  # (k, n)
    G: tuple[np.ndarray, ...]  # (m, n)
    q: np.ndarray  # (n,)
    b: np.ndarray  # (k,)
    limits: np.ndarray  # r (m + 2n,), zero where it is infinite
    held: np.ndarray  # (m + 2n,), whether it is finite


class System(NamedTuple):
    """K, its factor, and memory."""

    upper: Upper
    bare: np.ndarray  # (N,), the diagonal of P
    diagonal: np.ndarray  # (N,)
    unit: np.ndarray  # (N,), of what is left of right-hand sides
    signs: np.ndarray  # (N,)
    L: Triangle
    place: np.ndarray  # (N,), where x, ν and z of G are in its order
    right: np.ndarray  # (N,), and what follows is scratch
    found: np.ndarray
    rest: np.ndarray
    more: np.ndarray


@making
def along(matrix, x, out):
    """M x."""
    start, place, value = matrix
    for i in range(len(start) - 1):
        total = 0.0
        for p in range(start[i], start[i + 1]):
            total += value[p] * x[place[p]]
        out[i] = total


@making
def back(matrix, y, out):
    """out += Mᵀy."""
    start, place, value = matrix
    for i in range(len(start) - 1):
        c = y[i]
        if c != 0:
            for p in range(start[i], start[i + 1]):
                out[place[p]] += value[p] * c


@making
def across(parts, x, out):
    """R x."""
    n, m = len(x), len(parts.G[0]) - 1
    along(parts.G, x, out)
    for i in range(n):
        out[m + i], out[m + n + i] = x[i], -x[i]


@making
def largest(v, size):
    """The largest entry, or a size that is larger."""
    for i in range(len(v)):
        a = abs(v[i])
        size = a if a > size else size
    return size


@making
def _bordered(parts, order):
    """[P Aᵀ Gᵀ; A 0 0; G 0 0] in an order: above its diagonal, the diagonal, where columns go."""
    row, col, value, own = entries(parts.P, parts.A, parts.G)
    N = len(own)
    at, diagonal = np.empty(N, np.int64), np.empty(N)
    for i in range(N):
        at[order[i]], diagonal[i] = i, own[order[i]]
    high, start = np.empty(len(row), np.int64), np.zeros(N + 2, np.int64)
    for e in range(len(row)):
        high[e] = max(at[row[e]], at[col[e]])
        start[high[e] + 2] += 1
    for j in range(N):
        start[j + 2] += start[j + 1]
    place, number = np.empty(len(row), np.int64), np.empty(len(row))
    for e in range(len(row)):
        to = start[high[e] + 1]
        place[to], number[to] = min(at[row[e]], at[col[e]]), value[e]
        start[high[e] + 1] = to + 1
    return Upper(start[: N + 1].copy(), place, number), diagonal, at


@making
def _measured(v, unit):
    """The largest entry in units."""
    size = 0.0
    for i in range(len(v)):
        a = abs(v[i]) * unit[i]
        size = a if a > size else size
    return size


@making
def refined(system, right):
    """K⁻¹ right in ``found``, with what rounding, or a ridge, has left of it solved for again.

    The weights make some entries of a right-hand side larger than others by many orders of
    magnitude; beside these all that rounding leaves of the others would look small. In units of
    the square root of K's diagonal they are of one size, √μ.
    """
    found, rest, more = system.found, system.rest, system.more
    copy(right, found)
    solve(system.L, found)
    size, before = _measured(right, system.unit), np.inf
    for turn in range(REFINEMENTS + 1):
        times(system.upper, system.diagonal, found, rest)
        for i in range(len(rest)):
            rest[i] = right[i] - rest[i]
        left = _measured(rest, system.unit)
        if turn > 0 and not left < before:
            for i in range(len(found)):
                found[i] -= more[i]
            break
        if not left > REFINED * size or not left < 0.5 * before:
            break
        before = left
        copy(rest, more)
        solve(system.L, more)
        for i in range(len(found)):
            found[i] += more[i]


@making
def direction(parts, weight, system, rows, dual, beside, way):
    """x, ν and z of a direction for right-hand sides (n,), (k,) and (m + 2n,)."""
    place, right, found = system.place, system.right, system.found
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    for i in range(n):
        above, below = m + i, m + n + i
        right[place[i]] = dual[i] + weight[above] * rows[above] - weight[below] * rows[below]
    for i in range(k):
        right[place[n + i]] = beside[i]
    for i in range(m):
        right[place[n + k + i]] = rows[i] if parts.held[i] else 0.0
    refined(system, right)
    for i in range(n):
        d = found[place[i]]
        way.x[i] = d
        way.z[m + i] = weight[m + i] * (d - rows[m + i])
        way.z[m + n + i] = weight[m + n + i] * (-d - rows[m + n + i])
    for i in range(k):
        way.nu[i] = found[place[n + i]]
    for i in range(m):
        way.z[i] = found[place[n + k + i]] if parts.held[i] else 0.0


@making
def _weigh(parts, weight, upper, lower, system):
    """The diagonal of K for weights z/s, with ρ and δ, and units of its rows."""
    place, bare, diagonal, unit = system.place, system.bare, system.diagonal, system.unit
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    for i in range(n):
        j = place[i]
        diagonal[j] = bare[j] + weight[m + i] + weight[m + n + i] + upper
        unit[j] = 1 / np.sqrt(max(diagonal[j], 1.0))
    for i in range(k):
        j = place[n + i]
        diagonal[j], unit[j] = -lower, 1.0
    for i in range(m):
        j = place[n + k + i]
        diagonal[j] = -1 / max(weight[i], CLOSED) - lower
        unit[j] = 1 / np.sqrt(max(-diagonal[j], 1.0))


@making
def factorised(parts, weight, ridge, proximal, system):
    """Factorise K; refinement is for the matrix with a ridge, or if that is no term without it."""
    upper, lower = ridge
    _weigh(parts, weight, upper, lower, system)
    factorise(system.upper, system.diagonal, system.signs, system.L)
    if not proximal:
        _weigh(parts, weight, 0.0, 0.0, system)


@making
def prepared(parts, order):
    """K without its diagonal, and memory."""
    n, N = len(parts.q), len(order)
    upper, bare, place = _bordered(parts, order)
    signs = np.empty(N)
    for i in range(N):
        signs[place[i]] = 1.0 if i < n else -1.0
    room = np.empty((6, N))
    a, b, c, d, e, f = room[0], room[1], room[2], room[3], room[4], room[5]
    return System(upper, bare, a, b, signs, planned(upper, N), place, c, d, e, f)
