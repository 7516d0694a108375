"""Interior-point steps in a homogeneous embedding for one sparse program, compiled.

The steps of `dfwlayer.linalg.quadratic.homogeneous`, by the system of `barrier`: with a further
unknown τ ≥ 0 no point has to be near a feasible one, so that numbers of very different sizes, and
multipliers that are large, do not make steps short. Each takes one more solution of the system.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import iterate
from dfwlayer.engines.compiled.kernels.dense import making
from dfwlayer.engines.compiled.kernels.sparse_system import along, direction, factorised

__all__ = ["embedded"]

RIDGE = 1e-8, 1e-7  # ρ and δ, which vanish with the step as those of `barrier` do
LOST = 30  # steps without progress
# as in `dfwlayer.linalg.quadratic.homogeneous`
STEPS, ENOUGH, BOUNDARY, LEAST, PATIENCE, PLAIN, CENTRED = 100, 1e-12, 0.99, 1e-13, 4, 5, 0.3


@making
def _row(parts, slope, way):
    """What the last row of the embedding makes of a direction."""
    return (
        iterate.inner(slope, way.x)
        + iterate.inner(parts.b, way.nu)
        + iterate.inner(parts.limits, way.z)
    )


@making
def _along_tau(parts, at, tau, steady, product, way, slope):
    """What the last row makes of τ, but for −κ/τ, and the slope of f that is part of it.

    By the equations that ``steady`` solves, but for a ridge, it is a sum of terms that are all
    negative.
    """
    for i in range(len(way)):
        way[i] = steady.x[i] - at.x[i] / tau
    along(parts.P, way, slope)
    terms = iterate.inner(way, slope)
    for i in range(len(at.s)):
        if parts.held[i]:
            terms += at.s[i] / at.z[i] * steady.z[i] ** 2
    for i in range(len(way)):
        slope[i] = parts.q[i] + 2 * product[i] / tau
    return min(-terms, _row(parts, slope, steady) - iterate.inner(at.x, product) / tau**2)


@making
def _combined(one, share, two, way):
    """The direction one + share · two, but for its s."""
    for i in range(len(way.x)):
        way.x[i] = one.x[i] + share * two.x[i]
    for i in range(len(way.nu)):
        way.nu[i] = one.nu[i] + share * two.nu[i]
    for i in range(len(way.z)):
        way.z[i] = one.z[i] + share * two.z[i]


@making
def _towards(parts, weight, system, at, ends, state, rest, residuals, pair, corner, room, way):
    """A direction that leaves the share 1 − rest of what is missed; its τ and κ."""
    tau, kappa = ends
    missing, below, slope = state
    dual, beside, rows = residuals
    one, two, right, minus, short = room
    for i in range(len(rows)):
        right[i] = -rest * rows[i] - pair[i] / at.z[i] if parts.held[i] else 0.0
    for i in range(len(dual)):
        minus[i] = -rest * dual[i]
    for i in range(len(beside)):
        short[i] = -rest * beside[i]
    direction(parts, weight, system, right, minus, short, one)
    above = -rest * missing - corner / tau - _row(parts, slope, one)
    share = above / below
    _combined(one, share, two, way)
    iterate.slacken(at, way, pair, parts.held)
    return share, (corner - kappa * share) / tau


@making
def _reach(at, way, held, ends, moves):
    """How far a direction goes before a number is negative, 1 at most."""
    most = iterate.length_of(at, way, held)
    for e in range(2):
        if ends[e] < -most * moves[e]:
            most = -ends[e] / moves[e]
    return most


@making
def embedded(parts, system, most, least, best, holds):
    """Walk, and keep what is nearer to a solution than ``least``; how near that is, and steps."""
    n, k, every = len(parts.q), len(parts.b), len(parts.limits)
    held = parts.held
    at, way = iterate.room_for(n, k, every), iterate.room_for(n, k, every)
    one, two = iterate.room_for(n, k, every), iterate.room_for(n, k, every)
    weight, pair = np.zeros(every), np.zeros(every)
    residuals = np.empty(n), np.empty(k), np.empty(every)
    room = one, two, np.zeros(every), np.empty(n), np.empty(k)
    product, other, slope = np.empty(n), np.empty(n), np.empty(n)
    minus = room[3]
    iterate.start(parts, system, weight, at, minus)
    count = 1.0
    for i in range(every):
        count += 1.0 if held[i] else 0.0
    tau = kappa = 1.0
    trail, taken = iterate.trail_of(at, held), 0
    numbers = trail.numbers
    while True:
        off, total, missing = iterate.look(parts, at, tau, residuals, product, other)
        total, missing = total + tau * kappa, missing + kappa
        least = iterate.note(parts, trail, at, tau, off, total, least, best, holds)
        lost = (
            numbers[iterate.STUCK] >= PATIENCE or numbers[iterate.IDLE] >= LOST or not off < np.inf
        )
        if numbers[iterate.NEAREST] <= ENOUGH or lost or taken >= min(most, STEPS):
            break
        for i in range(every):
            weight[i] = at.z[i] / at.s[i] if held[i] else 0.0
            pair[i] = -at.s[i] * at.z[i]
        factorised(parts, weight, RIDGE, True, system)
        for i in range(n):
            minus[i] = -parts.q[i]
        direction(parts, weight, system, parts.limits, minus, parts.b, two)
        below = _along_tau(parts, at, tau, two, product, other, slope) - kappa / tau
        state, ends = (missing, below, slope), (tau, kappa)
        moves = _towards(
            parts, weight, system, at, ends, state, 1.0, residuals, pair, -tau * kappa, room, way
        )
        length = _reach(at, way, held, ends, moves)
        after = (tau + length * moves[0]) * (kappa + length * moves[1])
        for i in range(every):
            after += (at.s[i] + length * way.s[i]) * (at.z[i] + length * way.z[i])
        # corrections may lead back and forth between two points
        cycles = numbers[iterate.IDLE] >= PLAIN and tau > kappa
        centre = min(max(after / total, 0.0), 1.0) ** 3
        centre = max(centre, CENTRED) if cycles else centre
        for i in range(every):
            if held[i]:
                pair[i] += centre * total / count - (0.0 if cycles else way.s[i] * way.z[i])
        corner = centre * total / count - tau * kappa - (0.0 if cycles else moves[0] * moves[1])
        rest = 1.0 - centre
        moves = _towards(
            parts, weight, system, at, ends, state, rest, residuals, pair, corner, room, way
        )
        length = BOUNDARY * _reach(at, way, held, ends, moves)
        if not length >= 0:
            break
        numbers[iterate.STUCK] += 1 if length < LEAST else 0
        iterate.move(at, length, way)
        tau, kappa = tau + length * moves[0], kappa + length * moves[1]
        taken += 1
    return least, taken
