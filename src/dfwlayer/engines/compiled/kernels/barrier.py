"""Interior-point steps for one sparse quadratic program, compiled.

    min ½ xᵀPx + qᵀx  over  A x = b,  R x + s = r,  s ≥ 0,

R being the m rows of G, then x ≤ u and −x ≤ −l; rows whose r is infinite do not count. Mehrotra's
predictor and corrector, by one factor of

    [P + R₂ᵀW R₂ + ρ   Aᵀ   Gᵀ;   A  −δ  0;   G  0  −W⁻¹ − δ],   W = z/s

for each step, R₂ being the bounds. ρ and δ are proximal terms around the iterate (Schwan, Jiang,
Kuhn and Jones, "PIQP", 2023): they vanish with the step, so nothing has to take them back, rows may
depend on each other, and P may be singular. Where these steps do not serve, as rounding is too much
for terms that small, or as multipliers are large and steps get shorter and shorter, those of
`embedding` do.

Programs without a solution are not told from those on which these steps fail: both are left to
`dfwlayer.linalg.quadratic.homogeneous`.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import iterate
from dfwlayer.engines.compiled.kernels.dense import STAMP, entry, making
from dfwlayer.engines.compiled.kernels.embedding import embedded
from dfwlayer.engines.compiled.kernels.ordering import elimination_order
from dfwlayer.engines.compiled.kernels.settled import RIDGES, settle
from dfwlayer.engines.compiled.kernels.sparse_system import Parts, direction, factorised, prepared

__all__ = ["NEAR", "arrived", "walk"]

RIDGE = 1e-11, 1e-9  # ρ and δ
NEAR = 1e-4  # of a solution: residuals and gap, relative, with which there is a face
SURE = 1e-8  # residuals and gap, relative, with which these steps have served
LOST = 30  # steps without progress
# as in `dfwlayer.linalg.quadratic.homogeneous`
ENOUGH, PATIENCE, PLAIN, CENTRED = 1e-12, 4, 5, 0.3
BOUNDARY = 0.995  # of the way to where a number would be zero
SHORT = 1e-6  # of a step, beyond which several in a row lead nowhere


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
        iterate.slacken(at, ahead, pair, held)
        length, after = iterate.length_of(at, ahead, held), 0.0
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
    iterate.slacken(at, way, pair, held)
    return iterate.length_of(at, way, held) * (BOUNDARY if count > 0 else 1.0)


@making
def _walked(parts, system, most, best, holds):
    """Walk, and keep what is nearest to a solution; how near that is, and steps."""
    n, k, every = len(parts.q), len(parts.b), len(parts.limits)
    held = parts.held
    at, way, ahead = (
        iterate.room_for(n, k, every),
        iterate.room_for(n, k, every),
        iterate.room_for(n, k, every),
    )
    weight = np.zeros(every)
    residuals = np.empty(n), np.empty(k), np.empty(every)
    room = np.zeros(every), np.zeros(every), np.empty(n), np.empty(k), ahead
    product, other = np.empty(n), np.empty(n)
    iterate.start(parts, system, weight, at, room[2])
    trail, least, slow, taken = iterate.trail_of(at, held), np.inf, 0, 0
    while True:
        off, total, _ = iterate.look(parts, at, 1.0, residuals, product, other)
        least = iterate.note(parts, trail, at, 1.0, off, total, least, best, holds)
        lost = trail.numbers[iterate.IDLE] >= LOST or slow >= PATIENCE or not off < np.inf
        if least <= ENOUGH or trail.numbers[iterate.STUCK] >= PATIENCE or lost or taken >= most:
            break
        for i in range(every):
            weight[i] = at.z[i] / at.s[i] if held[i] else 0.0
        factorised(parts, weight, RIDGE, True, system)
        cycles = trail.numbers[iterate.IDLE] >= PLAIN
        length = _stepped(parts, system, at, weight, total, residuals, cycles, room, way)
        if not length >= 0:
            break
        slow = slow + 1 if length < SHORT else 0
        iterate.move(at, length, way)
        taken += 1
    return least, taken


@making
def arrived(parts, most, best, holds):
    """Where the steps end, in the arrays; their system, how far it is off, and how many."""
    system = prepared(parts, elimination_order(parts.P, parts.A, parts.G))
    least, taken = _walked(parts, system, most, best, holds)
    if least > SURE and taken < most:
        least, more = embedded(parts, system, most - taken, least, best, holds)
        taken += more
    return system, least, taken


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
        parts, best = Parts(P, A, G, q, b, limits, held), iterate.Point(x, nu, z, s)
        system, least, taken = arrived(parts, most, best, holds)
        settled = least < NEAR and settle(parts, system, best, holds, RIDGES[0], *corner)
        return least, taken, settled

    return walk


walk = _on_disk(STAMP)
