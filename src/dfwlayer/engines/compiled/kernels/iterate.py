"""Iterates of interior-point steps for one sparse program, compiled.

    min ½ xᵀPx + qᵀx  over  A x = b,  R x + s = r,  s ≥ 0,

R being the m rows of G, then x ≤ u and −x ≤ −l; rows whose r is infinite do not count. What is said
of x, ν, z and s is said of them divided by τ, which is one but in `embedding`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import copy, fill, making
from dfwlayer.engines.compiled.kernels.sparse_system import (
    across,
    along,
    back,
    direction,
    factorised,
    largest,
)

__all__ = ["IDLE", "NEAREST", "STUCK", "Point", "inner", "length_of", "look", "move", "note"]
__all__ += ["room_for", "slacken", "start", "trail_of"]

ROUGH = 1e-2  # ρ and δ of the system of a start, which need not solve anything
NEAREST, FALLEN, STUCK, IDLE = range(4)  # off by the least, Σ s z, steps without progress
# as in `dfwlayer.linalg.quadratic.homogeneous`
CLOSE, TOLD = 1e-5, 0.5


class Point(NamedTuple):
    """An iterate, or a direction."""

    x: np.ndarray  # (n,)
    nu: np.ndarray  # (k,)
    z: np.ndarray  # (m + 2n,)
    s: np.ndarray  # (m + 2n,)


class Trail(NamedTuple):
    """What is remembered of the iterates before."""

    holding: np.ndarray  # (m + 2n,), rows that seem to hold x
    z: np.ndarray  # (m + 2n,), of the last one
    s: np.ndarray  # (m + 2n,)
    numbers: np.ndarray  # (4,), by the names above


@making
def room_for(n, k, rows):
    """Memory for an iterate."""
    return Point(np.zeros(n), np.zeros(k), np.zeros(rows), np.zeros(rows))


@making
def inner(a, b):
    """Σ a_i b_i."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@making
def _positive(part, held):
    least = np.inf
    for i in range(len(part)):
        if held[i] and part[i] < least:
            least = part[i]
    shift = 1 - min(least, 0.0) if least < 1e-2 else 0.0
    for i in range(len(part)):
        part[i] = part[i] + shift if held[i] else 0.0


@making
def length_of(at, way, held):
    """How far a direction goes before a number is negative, 1 at most."""
    most = 1.0
    for i in range(len(held)):
        if held[i]:
            if at.s[i] < -most * way.s[i]:
                most = -at.s[i] / way.s[i]
            if at.z[i] < -most * way.z[i]:
                most = -at.z[i] / way.z[i]
    return most


@making
def slacken(at, way, pair, held):
    """s of a direction, for which s∘z changes by ``pair``."""
    for i in range(len(held)):
        way.s[i] = (pair[i] - at.s[i] * way.z[i]) / at.z[i] if held[i] else 0.0


@making
def look(parts, at, tau, residuals, product, other):
    """What an iterate misses, in the arrays; how far it is off, Σ s z, and the gap times τ.

    ``product`` is for P x, ``other`` is scratch.
    """
    x, nu, z, s = at
    dual, beside, rows = residuals
    n, m = len(x), len(parts.G[0]) - 1
    along(parts.P, x, product)
    scale = largest(product, 0.0)
    bend, cost = inner(x, product) / tau, inner(parts.q, x)
    for i in range(n):
        dual[i] = product[i] + parts.q[i] * tau
    fill(0.0, other)
    back(parts.A, nu, other)
    scale = largest(other, scale)
    for i in range(n):
        dual[i] += other[i]
        other[i] = z[m + i] - z[m + n + i]
    back(parts.G, z, other)
    scale = largest(parts.q, largest(other, scale) / tau)
    for i in range(n):
        dual[i] += other[i]
    along(parts.A, x, beside)
    tight = largest(s, largest(beside, 0.0))
    for i in range(len(beside)):
        beside[i] -= parts.b[i] * tau
    across(parts, x, rows)
    total = 0.0
    for i in range(len(rows)):
        if parts.held[i]:
            tight = max(tight, abs(rows[i]))
            rows[i] += s[i] - parts.limits[i] * tau
            total += s[i] * z[i]
        else:
            rows[i] = 0.0
    tight = largest(parts.limits, largest(parts.b, tight / tau))
    reach = inner(parts.b, nu) + inner(parts.limits, z)
    first, second = (0.5 * bend + cost) / tau, (-0.5 * bend - reach) / tau
    off = abs(first - second) / (1 + min(abs(first), abs(second)))
    off = max(off, largest(dual, 0.0) / tau / (1 + scale))
    off = max(off, max(largest(beside, 0.0), largest(rows, 0.0)) / tau / (1 + tight))
    return (off if off < np.inf else np.inf), total, cost + reach + bend


@making
def move(at, length, way):
    """Go a part of the way."""
    for i in range(len(at.x)):
        at.x[i] += length * way.x[i]
    for i in range(len(at.nu)):
        at.nu[i] += length * way.nu[i]
    for i in range(len(at.z)):
        at.z[i] += length * way.z[i]
        at.s[i] += length * way.s[i]


@making
def trail_of(at, held):
    """Before the first step."""
    holding = np.zeros(len(held), np.bool_)
    for i in range(len(held)):
        holding[i] = held[i] and at.z[i] > at.s[i]
    numbers = np.zeros(4)
    numbers[NEAREST] = np.inf
    return Trail(holding, at.z.copy(), at.s.copy(), numbers)


@making
def note(parts, trail, at, tau, off, total, least, best, holds):
    """Keep an iterate in ``best`` if it is off by less than ``least``; what is the least then."""
    holding, before_z, before_s, numbers = trail
    advanced = off < 0.9 * numbers[NEAREST]
    numbers[STUCK] = 0 if advanced else numbers[STUCK] + (numbers[NEAREST] < CLOSE)
    numbers[IDLE] = 0 if advanced else numbers[IDLE] + 1
    # slacks of rows that hold x go to zero as μ does, and multipliers of the others
    if total < TOLD * numbers[FALLEN]:
        for i in range(len(holding)):
            holding[i] = parts.held[i] and at.s[i] * before_z[i] < at.z[i] * before_s[i]
    copy(at.z, before_z)
    copy(at.s, before_s)
    numbers[FALLEN], numbers[NEAREST] = total, min(off, numbers[NEAREST])
    if not off < least:
        return least
    for one, other in ((at.x, best.x), (at.nu, best.nu), (at.z, best.z), (at.s, best.s)):
        for i in range(len(one)):
            other[i] = one[i] / tau
    copy(holding, holds)
    return off


@making
def start(parts, system, weight, at, minus):
    """From one system with s = −z, both moved to where they are positive."""
    for i in range(len(weight)):
        weight[i] = 1.0 if parts.held[i] else 0.0
    factorised(parts, weight, (ROUGH, ROUGH), True, system)
    for i in range(len(minus)):
        minus[i] = -parts.q[i]
    direction(parts, weight, system, parts.limits, minus, parts.b, at)
    for i in range(len(weight)):
        at.s[i] = -at.z[i]
    _positive(at.s, parts.held)
    _positive(at.z, parts.held)
