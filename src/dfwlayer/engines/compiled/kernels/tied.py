"""Which rows hold x, and with which forces, where more rows meet there than are independent.

Then there are many sets of multipliers λ with ∇f + Σ λ_j n_j = 0. A row holds x if one of these
sets has a force for it, as those on which an interior-point method ends do. That asks for more than
the rows that an active-set method has left. With N those that have a force already and equations,
any row m_c that x touches besides holds it if and only if x cannot leave it along N and the other
ones that it touches: if the point next to −m_c of the cone {d : N d = 0, ⟨m_j, d⟩ ≤ 0} is zero.
The forces that hold it there say how the row's own force is balanced.

Of all λ with a force for all of these rows, the one of least norm is taken, as far as it leaves
every row at least half of the force that it has in one such set.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import dot, fill, kernel, making
from dfwlayer.engines.compiled.kernels.dual import climb, combined, hold, join, prepared
from dfwlayer.engines.compiled.kernels.judged import DEPENDS, HELD, IDLE, OPEN, share
from dfwlayer.engines.compiled.kernels.rows import row_and_size

__all__ = ["balance"]

NOTHING = np.int64(0)  # a plain 0 is a type of its own, for which all is compiled again
# what a row is here: not touched or known not to hold x, an equation, one that has a force, one
# that may hold x, one that does
ABSENT, EQUATION, STRONG, ASKED, HOLDS = range(5)
STAYS, LEAVES = 1e-9, 1e-6  # how far a way of length one goes if it ends at once, or does not
KEPT = 0.5  # of the forces of one set that all rows have, what the one of least norm has to leave


@kernel
def _touched(rows, width, held, count, firm, state, x, rough, part, sides, forces):
    """What each row is, its side, and its force as a multiple of the unit normal."""
    for c in range(width):
        part[c] = EQUATION if rows.low[c] == rows.high[c] else ABSENT
        sides[c], forces[c] = 1.0, 0.0
        if part[c] == ABSENT and (state[c] == IDLE or state[c] == DEPENDS):
            value, _ = row_and_size(rows, rows.which[c], x)
            part[c] = ASKED
            sides[c] = 1.0 if rows.high[c] - value < value - rows.low[c] else -1.0
    for i in range(count):
        c = held.places[i]
        strong = i < firm or held.forces[i] > rough
        forces[c] = held.sides[i] * held.forces[i] if strong else 0.0
        if i >= firm:
            sides[c], part[c] = held.sides[i], STRONG if strong else ASKED


@making
def _ways_out(columns, width, part, sides, pool, firm, ways):
    """Find which of the rows hold x, and add to ``ways`` what they take; False where in doubt.

    Σ ways_c m_c = 0, and it has the sign of its side for every row that holds x but had no force.
    The first ``firm`` rows of the pool are equations and those that have a force.
    """
    n = len(columns)
    least, most, level = np.zeros(width), np.zeros(width), np.empty(width)
    shut, start, d = np.ones(width, np.int64), np.empty(n), np.empty(n)
    for asked in range(width):
        if part[asked] != ASKED:
            continue
        for c in range(width):
            if part[c] == ASKED or part[c] == HOLDS:
                least[c], most[c] = (-np.inf, 0.0) if sides[c] > 0 else (0.0, np.inf)
                shut[c] = 0
        for i in range(n):
            start[i] = -sides[asked] * columns[i, asked]
        for i in range(firm):
            pool.forces[i] = 0.0
        count = hold(least, most, pool, firm, firm, start, d, shut)
        if dot(d, d, n) > STAYS * STAYS:
            count, taken = climb(
                columns, width, least, most, pool, count, firm, d, level, shut, 1.0, 8 * (n + 1)
            )
            if taken < 0:
                return False
        far = np.sqrt(dot(d, d, n))
        if not (far <= STAYS or far >= LEAVES):
            return False
        if far <= STAYS:
            ways[asked] += sides[asked]
            for i in range(count):
                c = pool.places[i]
                if i < firm or pool.forces[i] > STAYS:
                    ways[c] += pool.sides[i] * pool.forces[i]
                    part[c] = HOLDS if i >= firm else part[c]
            part[asked] = HOLDS
            continue
        part[asked] = ABSENT
        for c in range(width):
            if part[c] == ASKED:
                slope = 0.0
                for i in range(n):
                    slope += columns[i, c] * d[i]
                if sides[c] * slope < -LEAVES:
                    part[c] = ABSENT
        for c in range(width):
            shut[c] = 1
    return True


@kernel
def _length(width, part, sides, forces, ways):
    """How much of ``ways`` leaves every row that has a force half of it."""
    strongest = longest = 0.0
    for c in range(width):
        strongest, longest = max(strongest, abs(forces[c])), max(longest, abs(ways[c]))
    length = KEPT * strongest / longest
    for c in range(width):
        if part[c] == STRONG and sides[c] * ways[c] < 0:
            length = min(length, (1 - KEPT) * forces[c] / -ways[c])
    return length


@kernel
def _least(rows, columns, width, part, forces, pool, state, values):
    """The multipliers (·,) of least norm of rows that hold x, for the same sum; see `share`.

    Bounds come first among those that others depend on, as in the adjoint.
    """
    base, count = len(rows.E) + len(rows.G), NOTHING
    for turn in range(2):
        for c in range(width):
            if (rows.which[c] >= base) == (turn == 0):
                state[c] = OPEN
                if part[c] != ABSENT:
                    state[c] = HELD if join(columns, c, 1.0, pool, count) else DEPENDS
                    count += 1 if state[c] == HELD else 0
    for c in range(width):
        if state[c] == HELD:
            values[rows.which[c]] += forces[c] / rows.lengths[c]
        elif state[c] == DEPENDS and forces[c] != 0:
            combined(columns, c, pool, count)
            for i in range(count):
                to = pool.places[i]
                values[rows.which[to]] += forces[c] * pool.along[i] / rows.lengths[to]
    share(rows, columns, width, pool, count, state, -1.0, values)


@making
def balance(rows, columns, width, held, count, firm, state, x, rough, strict, found):
    """Multipliers (·,) of all rows that hold x, others zero; False if it is not clear which.

    ``held`` and ``state`` are what is known of one set of multipliers: forces above ``rough``,
    other rows that are held without one, unless it is ``strict``, and those that depend on these.
    Both are overwritten.
    """
    part, sides, forces = np.empty(width, np.int64), np.empty(width), np.empty(width)
    ways, values = np.zeros(width), np.zeros(len(found))
    _touched(rows, width, held, count, firm, state, x, rough, part, sides, forces)
    pool, known = prepared(len(x)), NOTHING
    if strict:
        sure = _ways_out(columns, width, part, sides, held, count, ways)
    else:
        for c in range(width):
            if (part[c] == EQUATION or part[c] == STRONG) and join(columns, c, 1.0, pool, known):
                known += 1
        sure = _ways_out(columns, width, part, sides, pool, known, ways)
    if not sure:
        return False
    moved = False
    for c in range(width):
        moved = moved or part[c] == HOLDS
    if moved:
        length = _length(width, part, sides, forces, ways)
        for c in range(width):
            forces[c] += length * ways[c] if part[c] != ABSENT else 0.0
    _least(rows, columns, width, part, forces, pool, state, values)
    fill(0.0, found)
    whole = 1.0
    for c in range(width):
        if part[c] == STRONG or part[c] == HOLDS:
            force, target = sides[c] * forces[c], sides[c] * values[rows.which[c]] * rows.lengths[c]
            if target < KEPT * force:
                whole = min(whole, (1 - KEPT) * force / (force - target))
    for c in range(width):
        if part[c] != ABSENT:
            row = rows.which[c]
            own = forces[c] / rows.lengths[c]
            found[row] = own + whole * (values[row] - own)
    return True
