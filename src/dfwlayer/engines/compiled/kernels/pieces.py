"""Which pieces of kinked costs and rows hold the solution of a quadratic problem, compiled.

The problem is to minimise ½ xᵀPx + qᵀx + Σ_ik c_ik (x_i − o_ik)₊ over l ≤ x ≤ u, E x = e and
G x + Σ_ik J_·ik (x_i − o_ik)₊ ≤ h, with c, J ≥ 0 and o_i1 ≤ o_i2 ≤ …. A coordinate that stays at a
kink is held there by a force between 0 and c_ik + ⟨λ, J_·ik⟩, where λ are the prices of the rows.

That is one more event in the dual active-set method of `dual`: a force that has grown to its limit
lets x_i pass. Cost and rows then have another slope in x_i, which takes the place of the force, so
that the point stays where it is and f goes on rising. The pieces are what is returned, with the
prices: on them the problem is one over rows and bounds, which others solve to all digits.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, LARGEST, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    add,
    backward,
    copy,
    dot,
    entry,
    factor,
    fill,
    forward,
    kernel,
    product,
    times,
)
from dfwlayer.engines.compiled.kernels.dual import (
    DEPENDENT,
    append,
    beside,
    drop,
    go_on,
    heading,
    prepared,
)
from dfwlayer.engines.compiled.kernels.numbers import own
from dfwlayer.engines.compiled.kernels.on_pieces import (
    NOTHING,
    NOWHERE,
    Given,
    Rows,
    begin,
    bent_rows,
    bound,
    inverse,
    scale,
    turned,
)

__all__ = ["judge", "search"]

# what ends a step: the row on its way is met, a force is gone, or one has grown to its limit, of a
# coordinate that is held or of the one on its way
MET, GONE, GROWN, PASSED = 0, 1, 2, 3


@kernel
def _take(rows, c, side, held):
    for i in range(len(held.normal)):
        held.normal[i] = side * rows.normals[c, i]


@kernel
def _join(rows, c, held, count, force):
    """Hold a row that is met; False if it depends on those that are held."""
    if count == len(held.normal):
        return False
    _take(rows, c, 1.0, held)
    square = beside(held, count)
    if not square > DEPENDENT * DEPENDENT:
        return False
    append(held, count, square, c, 1.0, force)
    rows.state[c] = 1
    return True


@kernel
def _equations(rows, k, held, y):
    """Hold the equations, and move y onto them; False if they depend on each other."""
    for c in range(k):
        if not _join(rows, c, held, c + NOTHING, 0.0):
            return False
        held.forces[c] = rows.most[c]
    forward(held.T, held.forces, k)
    times(held.Q, y, held.steps[:k])
    for c in range(k):
        held.forces[c] = held.steps[c] - held.forces[c]
        add(y, -held.forces[c], held.Q[c], len(y))
    backward(held.T, held.forces, k)
    return True


@kernel
def _worst(rows, level, noise):
    """The row that is violated by most, −1 if none is, its side, and by how much."""
    worst, place, side = 0.0, NOWHERE, 1.0
    for c in range(len(level)):
        over, under = level[c] - rows.most[c], rows.least[c] - level[c]
        excess = over if over > under else under
        if excess > worst and rows.state[c] == 0:
            limit = rows.most[c] if over > under else rows.least[c]
            if excess > noise + ROUNDING * DOUBLE * abs(limit):
                worst, place, side = excess, c + NOTHING, 1.0 if over > under else -1.0
    return place, side, worst


@kernel
def _place_of(held, count, c):
    for i in range(count):
        if held.places[i] == c:
            return i + NOTHING
    return NOWHERE


@kernel
def _price(rows, bends, k, held, count, way, new, force):
    """λ of the rows with kinks, and how it changes with the step."""
    for j in range(bends):
        r = rows.bent[j]
        rows.prices[r] = rows.rates[r] = 0.0
        size, at = rows.lengths[k + r], _place_of(held, count, k + r)
        if at >= 0:
            rows.prices[r], rows.rates[r] = held.forces[at] / size, -way[at] / size
        elif new == k + r:
            rows.prices[r], rows.rates[r] = force / size, 1 / size


@kernel
def _until_limit(given, rows, bends, base, c, side, force, speed):
    """How far a force may go until it has grown to the limit of its kink; infinite without one."""
    t = rows.ends[c - base, 1 if side > 0 else 0] if c >= base else NOWHERE
    if t < 0:
        return np.inf
    limit, rate = given.costs[c - base, t], 0.0
    for j in range(bends):
        r = rows.bent[j]
        jump = given.jumps[r, c - base, t]
        limit += rows.prices[r] * jump
        rate += rows.rates[r] * jump
    nearing = speed - rows.lengths[c] * rate
    if not nearing > ROUNDING * DOUBLE:
        return np.inf
    return max(rows.lengths[c] * limit - force, 0.0) / nearing


@kernel
def _step(given, rows, bends, k, base, held, count, way, new, side, force, whole):
    """How far the force on its way grows, what ends that, and in which place."""
    step, event, at = whole, MET, NOWHERE
    for i in range(k, count):
        if way[i] > ROUNDING * DOUBLE and held.forces[i] < step * way[i]:
            step, event, at = max(held.forces[i], 0.0) / way[i], GONE, i + NOTHING
        part = _until_limit(
            given, rows, bends, base, held.places[i], held.sides[i], held.forces[i], -way[i]
        )
        if part < step:
            step, event, at = part, GROWN, i + NOTHING
    part = _until_limit(given, rows, bends, base, new, side, force, 1.0)
    if part < step:
        step, event, at = part, PASSED, NOWHERE
    return step, event, at


@kernel
def _rise(prices, jumps, i, k):
    """Σ_r λ_r J_rik."""
    total = 0.0
    for r in range(len(jumps)):
        total += prices[r] * jumps[r, i, k]
    return total


@kernel
def _climb(given, rows, bends, held, count, y, level, most):
    """Let rows join until none is violated; how many are held, the steps, and what became of it."""
    n, k, base = len(y), len(given.E), len(given.E) + len(given.G)
    taken = NOTHING
    while taken < most:
        times(rows.normals, y, level)
        size = np.sqrt(dot(y, y, n))
        new, side, excess = _worst(rows, level, ROUNDING * DOUBLE * size)
        if new < 0:
            return count, taken, outcome.SOLVED if size < LARGEST else outcome.UNFIT
        _take(rows, new, side, held)
        force = 0.0
        while new >= 0:
            if taken == most:
                return count, taken, outcome.LOST
            taken += 1
            square, way = heading(held, count), held.steps
            _price(rows, bends, k, held, count, way, new, force)
            whole = excess / square if square > 0 else np.inf
            step, event, at = _step(
                given, rows, bends, k, base, held, count, way, new, side, force, whole
            )
            if step == np.inf:
                return count, taken, outcome.LOST
            go_on(held, count, step, square, y)
            force += step
            excess -= step * square
            if event == MET:
                append(held, count, square, new, side, force)
                rows.state[new] = 1
                count += 1
                break
            if event == GONE:
                drop(held, count, at, rows.state)
                count -= 1
                continue
            # a kink is passed
            c, up, beyond = new, side > 0, excess * rows.lengths[new]
            if event == GROWN:
                c, up, beyond = held.places[at], held.sides[at] > 0, 0.0
                drop(held, count, at, rows.state)
                count -= 1
            i = c - base
            t = rows.ends[i, 1 if up else 0]
            rows.passed[i] += 1 if up else -1
            bound(given, rows, base, i)
            after = new if event == GROWN else NOWHERE
            for j in range(bends):
                r = rows.bent[j]
                change = given.jumps[r, i, t] if up else -given.jumps[r, i, t]
                if change == 0:
                    continue
                place, before = k + r, rows.lengths[k + r]
                at = _place_of(held, count, place)
                price = 0.0 if at < 0 else held.forces[at] / before
                if not turned(given, rows, r, k, c, i, t, change):
                    return count, taken, outcome.LOST
                if place == new:
                    force *= rows.lengths[place] / before
                    excess *= before / rows.lengths[place]
                if at < 0:
                    continue
                drop(held, count, at, rows.state)
                count -= 1
                if event == GROWN:  # x_i is at the kink, so the row is met as before
                    if not _join(rows, place, held, count, price * rows.lengths[place]):
                        return count, taken, outcome.LOST
                    count += 1
                elif after >= 0:
                    return count, taken, outcome.LOST
                else:  # x_i is beyond the kink, so the row is violated, and on its way now
                    after, side = place, 1.0
                    force = price * rows.lengths[place]
                    excess = abs(change) * beyond / rows.lengths[place]
            new = after
            if new >= 0:
                _take(rows, new, side, held)
    return count, taken, outcome.LOST


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first, end, P, q, E, e, G, h, lowers, uppers, places, costs, jumps, most,
        pieces, prices, codes,
    ):  # fmt: skip
        """Find the pieces (B, n) of problems first … end − 1, and the prices (B, k + m) of rows.

        Places and costs are (·, n, K) and jumps (·, r, n, K), of the first r inequalities, in the
        order of their places, which are infinite where there is no kink. A piece is told by the
        number of kinks below it.
        """
        _ = stamp
        n, k, m = pieces.shape[1], E.shape[1], G.shape[1]
        width = k + m + n
        dense = P.shape[1] > 0
        L = np.empty((n, n)) if dense else np.empty((0, 0))
        held, y, level = prepared(n), np.empty(n), np.empty(width)
        normals, lengths, least, highest = (
            np.empty((width, n)), np.empty(width), np.empty(width), np.empty(width),
        )  # fmt: skip
        state, ends, bent = (
            np.empty(width, np.int64),
            np.empty((n, 2), np.int64),
            np.empty(m, np.int64),
        )
        sides, worth, rates = np.empty(m), np.empty(m), np.empty(m)
        sound = False
        for b in range(first, end):
            codes[0, b], codes[1, b] = outcome.UNFIT, 0
            given = Given(
                q[own(b, q)], E[own(b, E)], e[own(b, e)], G[own(b, G)], h[own(b, h)],
                lowers[own(b, lowers)], uppers[own(b, uppers)],
                places[own(b, places)], costs[own(b, costs)], jumps[own(b, jumps)],
            )  # fmt: skip
            rows = Rows(
                pieces[b], normals, lengths, least, highest, state, sides, ends, bent, worth, rates
            )
            if b == first or len(P) > 1:
                sound = True
                if dense:
                    for i in range(n):
                        copy(P[own(b, P), i], L[i])
                    sound = factor(L, n)
                if sound:
                    inverse(L, normals, k + m, n)
                    for c in range(k + m, width):
                        sound = sound and scale(rows, c)
            bends = bent_rows(given, bent) if sound else NOWHERE
            if bends < 0 or not begin(given, L, rows, y) or not _equations(rows, k, held, y):
                continue
            count, taken, code = _climb(given, rows, bends, held, k + NOTHING, y, level, most)
            codes[0, b], codes[1, b] = code, taken
            fill(0.0, prices[b])
            for i in range(count):
                c = held.places[i]
                if c < k + m:
                    prices[b, c] = held.forces[i] / lengths[c]

    @entry
    def judge(
        first, end, P, q, E, G, lowers, uppers, places, costs, jumps, pieces, prices, x,
        within, wrong,
    ):  # fmt: skip
        """Whether a force that holds x (B, n) at a kink is more than the slopes jump by: ``wrong``.

        By how much it may be is told in units of the largest slope.
        """
        _ = stamp
        n, k, last = x.shape[1], E.shape[1], places.shape[2]
        g = np.empty(n)
        for b in range(first, end):
            place, cost, jump = places[own(b, places)], costs[own(b, costs)], jumps[own(b, jumps)]
            low, high = lowers[own(b, lowers)], uppers[own(b, uppers)]
            product(P[own(b, P)], x[b], g)
            add(g, 1.0, q[own(b, q)], n)
            for r in range(k):
                add(g, prices[b, r], E[own(b, E), r], n)
            for r in range(G.shape[1]):
                add(g, prices[b, k + r], G[own(b, G), r], n)
            most = 0.0
            for i in range(n):
                for j in range(pieces[b, i]):
                    g[i] += cost[i, j] + _rise(prices[b, k:], jump, i, j)
                most = max(most, abs(g[i]))
            wrong[b] = not most < LARGEST
            for i in range(n):
                t = pieces[b, i]
                if t > 0 and low[i] < place[i, t - 1] >= x[b, i]:
                    limit = cost[i, t - 1] + _rise(prices[b, k:], jump, i, t - 1)
                    wrong[b] = wrong[b] or not g[i] <= limit + within * most
                if t < last and high[i] > place[i, t] <= x[b, i]:
                    limit = cost[i, t] + _rise(prices[b, k:], jump, i, t)
                    wrong[b] = wrong[b] or not -g[i] <= limit + within * most

    return search, judge


search, judge = _on_disk(STAMP)
