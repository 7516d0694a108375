"""Interior-point steps for one sparse quadratic program, compiled.

    min ½ xᵀPx + qᵀx  over  A x = b,  R x + s = r,  s ≥ 0,

R being the m rows of G, then x ≤ u and −x ≤ −l; rows whose r is infinite do not count. Mehrotra's
predictor and corrector, by one factor of

    [P + R₂ᵀW R₂ + ρ   Aᵀ   Gᵀ;   A  −δ  0;   G  0  −W⁻¹ − δ],   W = z/s

for each step, R₂ being the bounds. ρ and δ are proximal terms around the iterate (Schwan, Jiang,
Kuhn and Jones, "PIQP", 2023): they vanish with the step, so nothing has to take them back, rows may
depend on each other, and P may be singular. Where rounding is too much for a factor with terms that
small, the steps are taken over with larger ones, which refinement then does take back. Where the
multipliers of a solution are large, steps from a start of size one get shorter and shorter: these
are taken over from a start that is far out.

Programs without a solution are not told from those on which these steps fail: both are left to
`dfwlayer.linalg.quadratic.homogeneous`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import STAMP, copy, entry, fill, making
from dfwlayer.engines.compiled.kernels.ordering import elimination_order
from dfwlayer.engines.compiled.kernels.settled import settle
from dfwlayer.engines.compiled.kernels.sparse_system import (
    Parts,
    across,
    along,
    back,
    direction,
    factorised,
    largest,
    prepared,
)

__all__ = ["NEAR", "arrived", "room_for", "walk"]

RIDGES = ((1e-11, 1e-9), (1e-8, 1e-8))  # ρ and δ of either walk
NEAR = 1e-4  # of a solution: residuals and gap, relative, with which there is a face
ROUGH = 1e-2  # the same for a start, which need not solve anything
SURE = 1e-8  # residuals and gap, relative, with which the first walk has served
LOST = 30  # steps without progress far from a solution
SHORTENED, CREPT = 8, 0.3  # such steps after which one that is shorter tells that the start was bad
OUT = 100.0, 1000.0  # times the largest entry of x, and multiplier, of a start that is far out
# as in `dfwlayer.linalg.quadratic.homogeneous`
ENOUGH, CLOSE, TOLD, PATIENCE, IDLE, CENTRED = 1e-12, 1e-5, 0.5, 4, 5, 0.3
BOUNDARY = 0.995  # of the way to where a number would be zero
SHORT = 1e-6  # of a step, beyond which several in a row lead nowhere


class Point(NamedTuple):
    """An iterate, or a direction."""

    x: np.ndarray  # (n,)
    nu: np.ndarray  # (k,)
    z: np.ndarray  # (m + 2n,)
    s: np.ndarray  # (m + 2n,)


@making
def room_for(n, k, rows):
    """Memory for an iterate."""
    return Point(np.zeros(n), np.zeros(k), np.zeros(rows), np.zeros(rows))


@making
def _inner(a, b):
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
def _length(at, way, held):
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
def _slacken(at, way, pair, held):
    """s of a direction, for which s∘z changes by ``pair``."""
    for i in range(len(held)):
        way.s[i] = (pair[i] - at.s[i] * way.z[i]) / at.z[i] if held[i] else 0.0


@making
def _look(parts, at, residuals, product, other):
    """What an iterate misses, in the arrays; how far it is off, and Σ s z."""
    x, nu, z, s = at
    dual, beside, rows = residuals
    n, m = len(x), len(parts.G[0]) - 1
    along(parts.P, x, product)
    scale = largest(parts.q, largest(product, 0.0))
    bend, cost = _inner(x, product), _inner(parts.q, x)
    for i in range(n):
        dual[i] = product[i] + parts.q[i]
    fill(0.0, other)
    back(parts.A, nu, other)
    scale = largest(other, scale)
    for i in range(n):
        dual[i] += other[i]
        other[i] = z[m + i] - z[m + n + i]
    back(parts.G, z, other)
    scale = largest(other, scale)
    for i in range(n):
        dual[i] += other[i]
    along(parts.A, x, beside)
    tight = largest(s, largest(parts.limits, largest(parts.b, largest(beside, 0.0))))
    for i in range(len(beside)):
        beside[i] -= parts.b[i]
    across(parts, x, rows)
    total = 0.0
    for i in range(len(rows)):
        if parts.held[i]:
            tight = max(tight, abs(rows[i]))
            rows[i] += s[i] - parts.limits[i]
            total += s[i] * z[i]
        else:
            rows[i] = 0.0
    reach = _inner(parts.b, nu) + _inner(parts.limits, z)
    first, second = 0.5 * bend + cost, -0.5 * bend - reach
    off = abs(first - second) / (1 + min(abs(first), abs(second)))
    off = max(off, largest(dual, 0.0) / (1 + scale))
    off = max(off, max(largest(beside, 0.0), largest(rows, 0.0)) / (1 + tight))
    return (off if off < np.inf else np.inf), total


@making
def _move(at, length, way):
    for i in range(len(at.x)):
        at.x[i] += length * way.x[i]
    for i in range(len(at.nu)):
        at.nu[i] += length * way.nu[i]
    for i in range(len(at.z)):
        at.z[i] += length * way.z[i]
        at.s[i] += length * way.s[i]


@making
def _keep(one, other):
    copy(one.x, other.x)
    copy(one.nu, other.nu)
    copy(one.z, other.z)
    copy(one.s, other.s)


@making
def _started(parts, system, weight, far, at, minus):
    """From one system with s = −z, both moved to where they are positive, or far from zero."""
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
    if far:
        slack = OUT[0] * largest(at.x, 1.0)
        force = OUT[1] * largest(at.z, 1.0)
        for i in range(len(weight)):
            if parts.held[i]:
                at.s[i], at.z[i] = max(at.s[i], slack), max(at.z[i], force)


@making
def _stepped(parts, system, at, weight, total, residuals, cycles, room, way):
    """A direction, by predictor and corrector; a plain one towards the centre after cycles."""
    dual, beside, rows = residuals
    pair, right, minus, short, ahead = room
    held, every = parts.held, len(rows)
    count = 0
    for i in range(every):
        count += 1 if held[i] else 0
        pair[i] = -at.s[i] * at.z[i]
        right[i] = at.s[i] - rows[i] if held[i] else 0.0
    for i in range(len(dual)):
        minus[i] = -dual[i]
    for i in range(len(beside)):
        short[i] = -beside[i]
    if count > 0:
        direction(parts, weight, system, right, minus, short, ahead)
        _slacken(at, ahead, pair, held)
        length, after = _length(at, ahead, held), 0.0
        for i in range(every):
            after += (at.s[i] + length * ahead.s[i]) * (at.z[i] + length * ahead.z[i])
        centre = min(max(after / total, 0.0), 1.0) ** 3
        centre = max(centre, CENTRED) if cycles else centre
        for i in range(every):
            if held[i]:
                pair[i] += centre * total / count
                pair[i] -= 0.0 if cycles else ahead.s[i] * ahead.z[i]
                right[i] = -(1 - centre) * rows[i] - pair[i] / at.z[i]
        for i in range(len(dual)):
            minus[i] = -(1 - centre) * dual[i]
        for i in range(len(beside)):
            short[i] = -(1 - centre) * beside[i]
    direction(parts, weight, system, right, minus, short, way)
    _slacken(at, way, pair, held)
    return _length(at, way, held) * (BOUNDARY if count > 0 else 1.0)


@making
def _walked(parts, system, ridge, proximal, far, most, least, best, holds):
    """Walk, and keep what is nearer to a solution than ``least``.

    How near that is, the steps, and whether they ended as they got shorter and shorter.
    """
    n, k, every = len(parts.q), len(parts.b), len(parts.limits)
    held = parts.held
    at, way, ahead = room_for(n, k, every), room_for(n, k, every), room_for(n, k, every)
    weight, holding = np.zeros(every), np.zeros(every, np.bool_)
    residuals = np.empty(n), np.empty(k), np.empty(every)
    room = np.zeros(every), np.zeros(every), np.empty(n), np.empty(k), ahead
    product, other = np.empty(n), np.empty(n)
    before_z, before_s = np.empty(every), np.empty(every)
    _started(parts, system, weight, far, at, room[2])
    for i in range(every):
        holding[i] = held[i] and at.z[i] > at.s[i]
    fallen, nearest, stuck, idle, slow, taken = np.inf, np.inf, 0, 0, 0, 0
    length, creeps = 1.0, False
    while True:
        off, total = _look(parts, at, residuals, product, other)
        advanced = off < 0.9 * nearest
        stuck = 0 if advanced else stuck + (1 if nearest < CLOSE else 0)
        idle = 0 if advanced else idle + 1
        # slacks of rows that hold x go to zero as μ does, and multipliers of the others
        if taken > 0 and total < TOLD * fallen:
            for i in range(every):
                holding[i] = held[i] and at.s[i] * before_z[i] < at.z[i] * before_s[i]
        copy(at.z, before_z)
        copy(at.s, before_s)
        fallen, nearest = total, min(off, nearest)
        if off < least:
            least = off
            _keep(at, best)
            copy(holding, holds)
        lost = idle >= LOST or slow >= PATIENCE or not off < np.inf
        creeps = not far and idle >= SHORTENED and length < CREPT and nearest > CLOSE
        if nearest <= ENOUGH or stuck >= PATIENCE or lost or creeps or taken >= most:
            break
        for i in range(every):
            weight[i] = at.z[i] / at.s[i] if held[i] else 0.0
        factorised(parts, weight, ridge, proximal, system)
        length = _stepped(parts, system, at, weight, total, residuals, idle >= IDLE, room, way)
        if not length >= 0:
            break
        slow = slow + 1 if length < SHORT else 0
        _move(at, length, way)
        taken += 1
    return least, taken, creeps


@making
def arrived(parts, most, best, holds, corner):
    """Fill ``best`` with where the steps end, ``corner`` with the minimiser on their face.

    Returns the system of that face, the residuals and gap of the best iterate, how many steps
    there were, and whether the minimiser was reached.
    """
    system = prepared(parts, elimination_order(parts.P, parts.A, parts.G))
    least, taken, creeps = _walked(parts, system, RIDGES[0], True, False, most, np.inf, best, holds)
    if least > SURE and taken < most:
        ridge = RIDGES[0] if creeps else RIDGES[1]
        least, more, _ = _walked(
            parts, system, ridge, creeps, creeps, most - taken, least, best, holds
        )
        taken += more
    settled = least < NEAR and settle(parts, system, best, holds, *corner)
    return system, least, taken, settled


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def walk(P, A, G, q, b, limits, held, most, x, nu, z, s, holds, corner):
        """Where the steps end, in the last arrays; how far that is from a solution, and steps.

        See `dfwlayer.linalg.quadratic.homogeneous.Interior` for what these are. ``corner``, x, ν
        and z again, is for the minimiser on the face that they lead to; the last value that is
        returned says whether that was reached.
        """
        _ = stamp
        parts, best = Parts(P, A, G, q, b, limits, held), Point(x, nu, z, s)
        _, least, taken, settled = arrived(parts, most, best, holds, corner)
        return least, taken, settled

    return walk


walk = _on_disk(STAMP)
