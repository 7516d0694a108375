"""The minimiser of a sparse program on the face that interior-point steps lead to, compiled.

With the rows that hold x as equations, the conditions of optimality are linear. Their matrix is
that of a step, [P Aᵀ Gᵀ; A 0 0; G 0 0], with coordinates that a bound holds, and rows of G that
hold nothing, kept still by what is on their diagonal; so that no order or memory is needed anew.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE
from dfwlayer.engines.compiled.kernels.dense import fill, making
from dfwlayer.engines.compiled.kernels.proof import absolute
from dfwlayer.engines.compiled.kernels.sparse_system import along, back, largest, refined
from dfwlayer.engines.compiled.kernels.triangle import factorise

__all__ = ["RIDGES", "faced", "reprice", "settle"]

# One that makes the factor exist, which refinement takes away again; where pivots are lost to
# rounding, one that is larger; where rows all but depend on each other, one that is smaller.
RIDGES = 1e-9, 1e-7, 1e-12
STILL = 1e30  # on the diagonal, of what must not move
CORRECTIONS = 12  # each with what the one before has left; where f bends, two are enough
# Of x: a correction that is smaller was the last. Where f bends by less than the ridge it moves x
# by a small part of what is missing only; tried on linear programs with a curvature of 1e-11 and on
# Maros-Meszaros.
STILL_THERE = 1e-11
FEWER = 0.9  # of what is left of ∇f, and
HALF = 0.5  # of what is missing of any condition: the next one has to leave less of either
AGAIN = 2  # the same of multipliers alone


@making
def _single(z, holds, n, m):
    """Of two bounds of a coordinate that both hold it, only the one with the larger multiplier."""
    for i in range(n):
        above, below = m + i, m + n + i
        if holds[above] and holds[below]:
            upper = z[above] > z[below]
            holds[above], holds[below] = upper, not upper


@making
def faced(parts, system, holds, ridge):
    """Factorise the matrix of the face with a ridge; refinement is for the one without."""
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    place, diagonal, unit = system.place, system.diagonal, system.unit
    fill(1.0, unit)
    for i in range(n):
        j = place[i]
        free = not (holds[m + i] or holds[m + n + i])
        diagonal[j] = system.bare[j] + (ridge if free else STILL)
        unit[j] = 1.0 if free else 0.0
    for i in range(k):
        diagonal[place[n + i]] = -ridge
    for i in range(m):
        j = place[n + k + i]
        diagonal[j], unit[j] = (-ridge, 1.0) if holds[i] else (-STILL, 0.0)
    factorise(system.upper, diagonal, system.signs, system.L)
    for i in range(len(diagonal)):
        if unit[i] > 0:
            diagonal[i] -= ridge * system.signs[i]


@making
def _slope(parts, x, nu, z, product, out):
    """P x + q + Aᵀν + Gᵀz."""
    along(parts.P, x, product)
    for i in range(len(x)):
        out[i] = product[i] + parts.q[i]
    back(parts.A, nu, out)
    back(parts.G, z, out)


@making
def _left(wide, q, x, nu, z, holds, slope, terms):
    """What is left of ∇f along free coordinates, in units of rounding of its largest terms.

    Where f hardly bends, less than the ridge, a correction takes back little of what is missing,
    and x may be far from where it belongs though the slope that is left is all but zero. ``wide``
    are |P|, |A| and |G|.
    """
    wide_P, wide_A, wide_G = wide
    m, n, most, steep = len(wide_G[0]) - 1, len(x), 0.0, 0.0
    along(wide_P, np.abs(x), terms)
    for i in range(n):
        terms[i] += abs(q[i])
    back(wide_A, np.abs(nu), terms)
    back(wide_G, np.abs(z[:m]), terms)
    for i in range(n):
        steep = max(steep, terms[i])
        if not (holds[m + i] or holds[m + n + i]):
            most = max(most, abs(slope[i]))
    return most / (DOUBLE * steep) if steep > 0 else most


@making
def _missing(parts, system, holds, at, slope, beside, rows):
    """What a point misses of the conditions on its face, as a right-hand side, and its size."""
    x, nu, z = at
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    place, right = system.place, system.right
    _slope(parts, x, nu, z, rows, slope)
    along(parts.A, x, beside)
    along(parts.G, x, rows)
    size = 0.0
    for i in range(n):
        free = not (holds[m + i] or holds[m + n + i])
        right[place[i]] = -slope[i] if free else 0.0
        size = max(size, abs(right[place[i]]))
    for i in range(k):
        right[place[n + i]] = parts.b[i] - beside[i]
        size = max(size, abs(right[place[n + i]]))
    for i in range(m):
        right[place[n + k + i]] = parts.limits[i] - rows[i] if holds[i] else 0.0
        size = max(size, abs(right[place[n + k + i]]))
    return size


@making
def _of_bounds(parts, holds, slope, z):
    """The multipliers of bounds that hold x, which take what is left of a slope."""
    n, m = len(parts.q), len(parts.G[0]) - 1
    for i in range(n):
        z[m + i] = -slope[i] if holds[m + i] else 0.0
        z[m + n + i] = slope[i] if holds[m + n + i] else 0.0


@making
def _multipliers_of(at, holds, m, nu, z):
    """Start from the multipliers of a point, of the rows of G that hold it."""
    for i in range(len(nu)):
        nu[i] = at.nu[i]
    for i in range(len(z)):
        z[i] = at.z[i] if i < m and holds[i] else 0.0


@making
def _priced(system, holds, n, k, m, nu, z):
    """Add what was found to multipliers."""
    place, found = system.place, system.found
    for i in range(k):
        nu[i] += found[place[n + i]]
    for i in range(m):
        if holds[i]:
            z[i] += found[place[n + k + i]]


@making
def settle(parts, system, at, holds, ridge, x, nu, z):
    """From a point, and which rows hold it, to the minimiser on that face, in the last arrays.

    Where rows depend on each other, or f is flat along the face, this is one of many, next to the
    point and its multipliers. Returns whether corrections have left nothing but rounding of ∇f,
    or move x no more.
    """
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    _single(at.z, holds, n, m)
    faced(parts, system, holds, ridge)
    place, found = system.place, system.found
    slope, beside, rows = np.empty(n), np.empty(k), np.empty(max(m, n))
    wide, terms = absolute(parts.P, parts.A, parts.G), np.empty(n)
    for i in range(n):
        x[i] = at.x[i]
        if holds[m + i]:
            x[i] = parts.limits[m + i]
        elif holds[m + n + i]:
            x[i] = -parts.limits[m + n + i]
    _multipliers_of(at, holds, m, nu, z)
    left = before = missing = moved = np.inf
    for turn in range(CORRECTIONS):
        size = _missing(parts, system, holds, (x, nu, z), slope, beside, rows)
        if turn > 0:
            left = _left(wide, parts.q, x, nu, z, holds, slope, terms)
            if not (left < FEWER * before or size < HALF * missing):
                break
            before, missing = left, size
        refined(system, system.right)
        moved = 0.0
        for i in range(n):
            if not (holds[m + i] or holds[m + n + i]):
                x[i] += found[place[i]]
                moved = max(moved, abs(found[place[i]]))
        _priced(system, holds, n, k, m, nu, z)
    _slope(parts, x, nu, z, rows, slope)
    _of_bounds(parts, holds, slope, z)
    return left <= CLEAR or moved <= STILL_THERE * largest(x, 0.0)


@making
def reprice(parts, system, at, holds, x, nu, z):
    """The multipliers next to those of a point, for an x that the face has given already.

    Where rows depend on each other, what rounding leaves of them cannot be met by any x: the ridge
    makes large multipliers of it, which do nothing but change those of bounds. Returns whether
    what is left of ∇f is rounding.
    """
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    slope, beside, rows = np.empty(n), np.empty(k), np.empty(max(m, n))
    _multipliers_of(at, holds, m, nu, z)
    for _ in range(AGAIN):
        _missing(parts, system, holds, (x, nu, z), slope, beside, rows)
        for i in range(k + m):
            system.right[system.place[n + i]] = 0.0
        refined(system, system.right)
        _priced(system, holds, n, k, m, nu, z)
    _slope(parts, x, nu, z, rows, slope)
    wide, terms = absolute(parts.P, parts.A, parts.G), np.empty(n)
    left = _left(wide, parts.q, x, nu, z, holds, slope, terms)
    _of_bounds(parts, holds, slope, z)
    return left <= CLEAR
