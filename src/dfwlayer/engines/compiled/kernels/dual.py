"""The point of a polyhedron next to another one, by a dual active-set method, compiled.

Goldfarb and Idnani's method (1983): y is always the point next to y₀ on the rows that are held,
with forces μ ≥ 0, y = y₀ − Σ μ_j m_j. The row that is violated by most joins them; on the way there
those whose force would be negative leave. Every step takes y farther away from y₀, so it ends.

The normals that are held are kept as M = TQ with a lower triangle T and orthonormal rows Q: a row
joins by Gram and Schmidt's process, done twice, and leaves by rotations (Daniel, Gragg, Kaufman and
Stewart, 1976). What rounding does to y is therefore not a matter of how nearly they depend on each
other; those that do depend on the others cannot join.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import (
    add,
    add_rows,
    backward,
    copy,
    dot,
    forward,
    kernel,
    leave,
    making,
    times,
)
from dfwlayer.engines.compiled.kernels.rows import levels

__all__ = [
    "DEPENDENT",
    "Held",
    "append",
    "beside",
    "climb",
    "combined",
    "drop",
    "go_on",
    "heading",
    "hold",
    "join",
    "prepared",
    "refine",
]

NOWHERE: Any = np.int64(-1)  # a plain −1 is a type of its own, for which all is compiled again
DEPENDENT = 1e-10  # what is left of a unit normal beside those of others, if it depends on them


class Held(NamedTuple):
    """The rows that are held, in n places, and memory."""

    T: np.ndarray  # (n, n)
    Q: np.ndarray  # (n, n)
    places: np.ndarray  # (n,), their columns
    sides: np.ndarray  # (n,), 1 for an upper side or an equation, −1 for a lower one
    forces: np.ndarray  # μ (n,)
    along: np.ndarray  # (n,), and what follows is scratch
    steps: np.ndarray
    normal: np.ndarray
    rest: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


@making
def prepared(n):
    """Memory."""
    a, b = np.empty((n, n)), np.empty((n, n))
    c, d, e, f, g = np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    return Held(a, b, np.empty(n, np.int64), c, d, e, f, g, np.empty(n), np.empty(n), np.empty(n))


@kernel
def _negated(x, count):
    for i in range(count):
        x[i] = -x[i]


@kernel
def beside(held, count):
    """What is left of ``normal`` beside the rows that are held: in ``rest``, and its square.

    The coefficients in Q are in ``along``.
    """
    n = len(held.normal)
    copy(held.normal, held.rest)
    along, more = held.along, held.steps
    square = 1.0
    for trial in range(2):
        part = along if trial == 0 else more
        times(held.Q, held.rest, part[:count])
        _negated(part, count)
        add_rows(held.rest, part, held.Q, count, n)
        _negated(part, count)
        if trial == 1:
            add(along, 1.0, more, count)
        square = dot(held.rest, held.rest, n)
        if square > 0.5:
            break
    return square


@kernel
def heading(held, count):
    """How the forces fall for each unit by which that of ``normal`` grows: in ``steps``.

    Returns the square of what is left of it beside the rows that are held, zero if it depends on
    them: y then stays where it is.
    """
    n, square = len(held.normal), 0.0
    if count < n:
        square = beside(held, count)
    else:
        times(held.Q, held.normal, held.along)
    for i in range(count):
        held.steps[i] = held.along[i]
    backward(held.T, held.steps, count)
    return square if square > DEPENDENT * DEPENDENT else 0.0


@kernel
def go_on(held, count, step, square, y):
    """Let the force of ``normal`` grow by a step, which moves y; ``square`` as `heading` has it."""
    for i in range(count):
        held.forces[i] -= step * held.steps[i]
    if square > 0:
        add(y, -step, held.rest, len(y))


@kernel
def append(held, count, square, place, side, force):
    """Hold one more row, whose parts are in ``along`` and ``rest``."""
    n = len(held.normal)
    length = np.sqrt(square)
    for i in range(count):
        held.T[count, i] = held.along[i]
    held.T[count, count] = length
    for i in range(n):
        held.Q[count, i] = held.rest[i] / length
    held.places[count], held.sides[count], held.forces[count] = place, side, force


@kernel
def _take_normal(columns, place, side, held):
    for i in range(len(held.normal)):
        held.normal[i] = side * columns[i, place]


@kernel
def join(columns, place, side, held, count):
    """Hold a row whatever it takes; False if it depends on those that are held."""
    if count == len(held.normal):
        return False
    _take_normal(columns, place, side, held)
    square = beside(held, count)
    if not square > DEPENDENT * DEPENDENT:
        return False
    append(held, count, square, place, side, 0.0)
    return True


@kernel
def combined(columns, place, held, count):
    """The combination of the rows that are held which is that of a column: in ``along``."""
    _take_normal(columns, place, 1.0, held)
    times(held.Q, held.normal, held.along[:count])
    backward(held.T, held.along, count)


@kernel
def drop(held, count, at, state):
    """Hold the row in that place no longer."""
    n = len(held.normal)
    state[held.places[at]] = 0
    for i in range(at, count - 1):
        held.sides[i], held.forces[i] = held.sides[i + 1], held.forces[i + 1]
    leave(held.T, count, held.places, at, held.cos, held.sin)
    for i in range(at, count - 1):
        c, s, a, b = held.cos[i], held.sin[i], held.Q[i], held.Q[i + 1]
        for j in range(n):
            first, second = a[j], b[j]
            a[j] = c * first + s * second
            b[j] = c * second - s * first


@kernel
def refine(held, count, y, short):
    """y − Σ μ_j m_j with ⟨m_j, ·⟩ = c_j for the rows that are held, in the place of y.

    c is in ``short``, where μ takes its place.
    """
    weights = held.steps
    forward(held.T, short, count)
    times(held.Q, y, weights[:count])
    for i in range(count):
        short[i] = weights[i] - short[i]
        weights[i] = -short[i]
    add_rows(y, weights, held.Q, count, len(y))
    backward(held.T, short, count)


@kernel
def hold(least, most, held, count, firm, start, y, state):
    """The point y next to y₀ on the rows that are held, less those whose force would be negative.

    The first ``firm`` rows are equations, which stay. Returns how many are held.
    """
    while True:
        for i in range(count):
            c = held.places[i]
            held.along[i] = most[c] if held.sides[i] > 0 else -least[c]
        copy(start, y)
        refine(held, count, y, held.along)
        whole, at = 1.0, NOWHERE
        for i in range(firm, count):
            if held.along[i] < 0:
                part = held.forces[i] / (held.forces[i] - held.along[i])
                if part < whole or at < 0:
                    whole, at = part, i
        for i in range(count):
            held.forces[i] += whole * (held.along[i] - held.forces[i])
        if at < 0:
            for i in range(count):
                held.forces[i] = held.along[i]
            return count
        drop(held, count, at, state)
        count -= 1


@kernel
def _most_violated(least, most, level, width, state, noise):
    """The column that is violated by most, −1 if none is, its side, and by how much."""
    worst, place, side = 0.0, NOWHERE, 1.0
    for c in range(width):
        over, under = level[c] - most[c], least[c] - level[c]
        excess = over if over > under else under
        if excess > worst and state[c] == 0:
            bound = most[c] if over > under else least[c]
            if excess > noise + ROUNDING * DOUBLE * abs(bound):
                worst, place, side = excess, c, 1.0 if over > under else -1.0
    return place, side, worst


@kernel
def climb(columns, width, least, most, held, count, firm, y, level, state, size, limit):
    """Let rows join until none is violated by more than rounding.

    y is the point next to y₀ on the rows that are held, ``state`` is 1 for their columns and for
    others that are not to be looked at. Rounding is that of y, and of what has the length ``size``
    where y may vanish beside what it is the sum of. Returns how many are held and how many steps it
    took, which is negative for why there was no end: no point, or too many steps.
    """
    n = len(y)
    taken = 0
    while taken < limit:
        levels(columns, y, width, level)
        noise = ROUNDING * DOUBLE * (np.sqrt(dot(y, y, n)) + size)
        place, side, excess = _most_violated(least, most, level, width, state, noise)
        if place < 0:
            return count, taken
        _take_normal(columns, place, side, held)
        force = 0.0
        while taken < limit:
            taken += 1
            square, way = heading(held, count), held.steps
            part, at = np.inf, NOWHERE
            for i in range(firm, count):
                if way[i] > ROUNDING * DOUBLE and held.forces[i] < part * way[i]:
                    part, at = held.forces[i] / way[i], i
            whole = excess / square if square > 0 else np.inf
            step = min(part, whole)
            if step == np.inf:
                return count, -outcome.LOST
            step = max(step, 0.0)
            go_on(held, count, step, square, y)
            force += step
            excess -= step * square
            if whole <= part:
                append(held, count, square, place, side, force)
                state[place] = 1
                count += 1
                break
            drop(held, count, at, state)
            count -= 1
    return count, -outcome.LOST
