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
from dfwlayer.engines.compiled.kernels.sparse_system import along, back, refined
from dfwlayer.engines.compiled.kernels.triangle import factorise

__all__ = ["faced", "settle"]

RIDGE = 1e-9  # that makes the factor exist; refinement takes it away again
STILL = 1e30  # on the diagonal, of what must not move
CORRECTIONS = 12  # each with what the one before has left; where f bends, two are enough
FEWER = 0.9  # of what is left, of which the next one has to leave less


@making
def _single(z, holds, n, m):
    """Of two bounds of a coordinate that both hold it, only the one with the larger multiplier."""
    for i in range(n):
        above, below = m + i, m + n + i
        if holds[above] and holds[below]:
            upper = z[above] > z[below]
            holds[above], holds[below] = upper, not upper


@making
def faced(parts, system, holds):
    """Factorise the matrix of the face with a ridge; refinement is for the one without."""
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    place, diagonal, unit = system.place, system.diagonal, system.unit
    fill(1.0, unit)
    for i in range(n):
        j = place[i]
        free = not (holds[m + i] or holds[m + n + i])
        diagonal[j] = system.bare[j] + (RIDGE if free else STILL)
        unit[j] = 1.0 if free else 0.0
    for i in range(k):
        diagonal[place[n + i]] = -RIDGE
    for i in range(m):
        j = place[n + k + i]
        diagonal[j], unit[j] = (-RIDGE, 1.0) if holds[i] else (-STILL, 0.0)
    factorise(system.upper, diagonal, system.signs, system.L)
    for i in range(len(diagonal)):
        if unit[i] > 0:
            diagonal[i] -= RIDGE * system.signs[i]


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
    back(wide_G, np.abs(z), terms)
    for i in range(n):
        steep = max(steep, terms[i])
        if not (holds[m + i] or holds[m + n + i]):
            most = max(most, abs(slope[i]))
    return most / (DOUBLE * steep) if steep > 0 else most


@making
def settle(parts, system, at, holds, x, nu, z):
    """From a point, and which rows hold it, to the minimiser on that face, in the last arrays.

    Where rows depend on each other, or f is flat along the face, this is one of many, next to the
    point and its multipliers. Returns whether corrections have left nothing but rounding.
    """
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    _single(at.z, holds, n, m)
    faced(parts, system, holds)
    place, right, found = system.place, system.right, system.found
    product, slope, terms = np.empty(n), np.empty(n), np.empty(n)
    beside, rows = np.empty(k), np.empty(m)
    for i in range(n):
        x[i] = at.x[i]
        if holds[m + i]:
            x[i] = parts.limits[m + i]
        elif holds[m + n + i]:
            x[i] = -parts.limits[m + n + i]
    for i in range(k):
        nu[i] = at.nu[i]
    for i in range(len(z)):
        z[i] = at.z[i] if i < m and holds[i] else 0.0
    wide = absolute(parts.P, parts.A, parts.G)
    left = before = np.inf
    for turn in range(CORRECTIONS):
        _slope(parts, x, nu, z, product, slope)
        along(parts.A, x, beside)
        along(parts.G, x, rows)
        for i in range(n):
            free = not (holds[m + i] or holds[m + n + i])
            right[place[i]] = -slope[i] if free else 0.0
        for i in range(k):
            right[place[n + i]] = parts.b[i] - beside[i]
        for i in range(m):
            right[place[n + k + i]] = parts.limits[i] - rows[i] if holds[i] else 0.0
        if turn > 0:
            left = _left(wide, parts.q, x, nu, z[:m], holds, slope, terms)
            if not left < FEWER * before:
                break
            before = left
        refined(system, right)
        for i in range(n):
            if not (holds[m + i] or holds[m + n + i]):
                x[i] += found[place[i]]
        for i in range(k):
            nu[i] += found[place[n + i]]
        for i in range(m):
            if holds[i]:
                z[i] += found[place[n + k + i]]
    _slope(parts, x, nu, z, product, slope)
    for i in range(n):
        if holds[m + i]:
            z[m + i] = -slope[i]
        if holds[m + n + i]:
            z[m + n + i] = slope[i]
    return left <= CLEAR
