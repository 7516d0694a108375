"""The point of a set next to another one, with its certificate and gradient, compiled.

Without a P the solution is the projection of z = −q. For one block of coordinates with one row, or
none, everything follows from that row's multiplier (see `polytope`): the places of the coordinates,
whether one of them is a matter of rounding, and the gradient. With a the slopes of the row,

    u + νa = v on the free coordinates,  ⟨a, u⟩ = 0,  so that  ν = ⟨a, v⟩ / ⟨a, a⟩  there.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome, place, table
from dfwlayer.engines.compiled.kernels.certificate import gap_of, settle, total_of
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, LARGEST, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import STAMP, entry, fill, kernel, summing
from dfwlayer.engines.compiled.kernels.numbers import number_of, ordered, own, proven, rounded
from dfwlayer.engines.compiled.kernels.polytope import meet, sound

__all__ = ["adjoint", "search"]


@kernel
def _negated(q, z):
    """z = −q; the largest entry, NaN if one is not for this code."""
    key = ordered(0.0)
    for i in range(len(z)):
        z[i] = -q[i]
        key = max(key, ordered(abs(q[i])))
    largest = number_of(key)
    return largest if largest < LARGEST else np.nan


@summing
def _bounded(low, high, q, eps, x, places):
    """The point next to −q between bounds, in its dtype, its places, f and the gap, in one pass.

    Every coordinate is on its own here, and so is what rounding may have made of its place. Returns
    a code beside f and the gap. For the latter see `certificate.gap_of`.
    """
    fine = doubts = total = gap = terms = 0.0
    for i in range(len(x)):
        z, least, most = -q[i], low[i], high[i]
        fine += 1.0 if abs(z) < LARGEST else 0.0
        below, above = z <= least, z >= most
        y = rounded(z, eps)
        y = most if y > most else y
        y = least if y < least else y
        x[i] = y
        places[i] = place.LOW if below else (place.HIGH if above else place.FREE)
        wide = abs(least) if abs(least) < LARGEST else 0.0
        wide = abs(most) if (wide < abs(most)) & (abs(most) < LARGEST) else wide
        clear = CLEAR * ROUNDING * DOUBLE * (2 * abs(z) + wide)
        close = (abs(z - least) <= clear) | (abs(z - most) <= clear)
        doubts += 1.0 if close & (least != most) else 0.0
        slope = y - z
        total += y * (0.5 * y - z)
        s = least if slope > 0 else (most if slope < 0 else y)
        missing = abs(s) == np.inf
        term = 0.5 * slope * slope if missing else slope * (y - s)
        gap += term if term > 0 else 0.0
        terms += abs(slope * y)
    code = outcome.SOLVED if doubts == 0 else outcome.DOUBTED
    return (code if fine == len(x) else outcome.UNFIT), total, gap + DOUBLE * terms


@summing
def _between(low, high, slopes, multiplier, z, x, places, noise):
    """x for bounds and an equation, and its places; how many of these are a matter of rounding."""
    doubts = 0.0
    for i in range(len(z)):
        y, least, most = z[i] - multiplier * slopes[i], low[i], high[i]
        x[i] = least if y < least else (most if y > most else y)
        places[i] = place.LOW if y <= least else (place.HIGH if y >= most else place.FREE)
        wide = abs(least) if abs(least) < LARGEST else 0.0
        wide = abs(most) if (wide < abs(most)) & (abs(most) < LARGEST) else wide
        clear = noise + CLEAR * ROUNDING * DOUBLE * wide
        close = (abs(y - least) <= clear) | (abs(y - most) <= clear)
        doubts += 1.0 if close & (least != most) else 0.0
    return doubts


@summing
def _within(low, high, slopes, multiplier, z, x, places, sides, noise):
    """The same for bounds around zero and a budget; and the signs of x."""
    doubts = 0.0
    for i in range(len(z)):
        hold, least, most = multiplier * slopes[i], low[i], high[i]
        y = abs(z[i]) - hold
        kinked = (y <= 0) & (hold > 0)
        y = y if y > 0 else 0.0
        y = y if z[i] >= 0 else -y
        c = least if y < least else (most if y > most else y)
        x[i] = c
        sides[i] = 1.0 if c > 0 else (-1.0 if c < 0 else 0.0)
        inside = place.ZERO if kinked else place.FREE
        places[i] = place.LOW if y <= least else (place.HIGH if y >= most else inside)
        wide = abs(least) if abs(least) < LARGEST else 0.0
        wide = abs(most) if (wide < abs(most)) & (abs(most) < LARGEST) else wide
        clear = noise + CLEAR * ROUNDING * DOUBLE * wide
        # x bends where z meets a bound, or zero, beyond the hold of the budget; on the side of a
        # bound that is zero these are one
        up = (abs(z[i] - hold - most) <= clear) | ((hold > 0) & (abs(z[i] - hold) <= clear))
        down = (abs(z[i] + hold - least) <= clear) | ((hold > 0) & (abs(z[i] + hold) <= clear))
        up &= (most > 0) | (hold == 0)
        down &= (least < 0) | (hold == 0)
        doubts += 1.0 if (up | down) & (least != most) else 0.0
    return doubts


@summing
def _moves(slopes, places):
    """Σ a² over the free coordinates."""
    total = 0.0
    for i in range(len(places)):
        total += slopes[i] * slopes[i] if places[i] == place.FREE else 0.0
    return total


@summing
def _shift(slopes, budget, step, places, sides, x):
    """x + step · a on the free coordinates."""
    for i in range(len(x)):
        a = slopes[i] * sides[i] if budget else slopes[i]
        x[i] += step * a if places[i] == place.FREE else 0.0


@kernel
def _steepest(slopes, n):
    """The largest |a|."""
    key = ordered(0.0)
    for i in range(n):
        key = max(key, ordered(abs(slopes[i])))
    return number_of(key)


@summing
def _value(x, z, g):
    """f(x) = ½ ‖x‖² − ⟨z, x⟩, and its gradient."""
    total = 0.0
    for i in range(len(x)):
        g[i] = x[i] - z[i]
        total += x[i] * (0.5 * x[i] - z[i])
    return total


@kernel
def _middle(body, z, at, noise):
    """The middle of the multipliers that keep all coordinates at the bounds they are next to.

    That is where bounds alone fulfil an equation, like caps that add up to the total: a coordinate
    stays at its lower bound l for m a ≥ z − l, and at its upper one u for m a ≤ z − u. NaN where
    one is between its bounds, or the multipliers have no end on one side.
    """
    low, high, slopes = body[table.LOWER], body[table.UPPER], body[table.ROWS]
    least, most = -np.inf, np.inf
    for i in range(len(z)):
        if low[i] == high[i]:
            continue
        y = z[i] - at * slopes[i]
        below = y <= low[i] + noise
        if not (below or y >= high[i] - noise):
            return np.nan
        a, end = slopes[i], z[i] - (low[i] if below else high[i])
        if a != 0 and below == (a > 0):
            least = max(least, end / a)
        elif a != 0:
            most = min(most, end / a)
    return 0.5 * (least + most) if -np.inf < least < most < np.inf else np.nan


@kernel
def _row(body):
    """Whether there is a row, and whether it is a budget."""
    tied = len(body) > table.ROWS
    return tied, tied and body[table.ROWS, table.KIND] == table.BUDGET


@kernel
def _locate(body, z, largest, x, places, sides):
    """x and its places; the multiplier of the row, and what became of it."""
    n, slopes = len(z), body[table.ROWS]
    budget = body[table.ROWS, table.KIND] == table.BUDGET
    at = meet(body, table.ROWS, 0.0, z, 0, n)
    if np.isnan(at):
        return at, outcome.LOST
    steep = abs(at) * _steepest(slopes, n)
    noise = CLEAR * ROUNDING * DOUBLE * (2 * largest + 2 * steep)
    low, high = body[table.LOWER], body[table.UPPER]
    corner = False
    if budget:
        doubts = _within(low, high, slopes, at, z, x, places, sides, noise)
        if at > 0 and steep <= noise:
            return at, outcome.DOUBTED
    else:
        doubts = _between(low, high, slopes, at, z, x, places, noise)
        if doubts > 0 or not _moves(slopes, places) > 0:
            # the multiplier that was found may be the end of many
            middle = _middle(body, z, at, noise)
            if np.isnan(middle):
                return at, outcome.DOUBTED
            at, corner = middle, True
            noise = CLEAR * ROUNDING * DOUBLE * 2 * (largest + abs(at) * _steepest(slopes, n))
            doubts = _between(low, high, slopes, at, z, x, places, noise)
    if doubts > 0:
        return at, outcome.DOUBTED
    if budget and at == 0:
        total = 0.0
        for i in range(n):
            total += slopes[i] * abs(x[i])
        if total > (1 - CLEAR * ROUNDING * DOUBLE) * body[table.ROWS, table.TOTAL]:
            return at, outcome.DOUBTED
    elif corner:
        total, size = total_of(body, table.ROWS, x)
        target = body[table.ROWS, table.TOTAL]
        if not abs(total - target) <= ROUNDING * DOUBLE * (size + abs(target)):
            return at, outcome.LOST
        return at, outcome.TIED
    else:
        moves = _moves(slopes, places)
        if not moves > 0:
            return at, outcome.LOST
        # what the rounding of the multiplier, which may be far larger than x, has left of the row
        total, _ = total_of(body, table.ROWS, x)
        _shift(slopes, budget, (body[table.ROWS, table.TOTAL] - total) / moves, places, sides, x)
    return at, outcome.SOLVED


@kernel
def _search(
    first, end, q, bodies, blocks, eps, tol,
    x, values, codes, places, sides, multipliers, memory,
):  # fmt: skip
    """See `search` below."""
    z, g, guess = memory
    apart, fine = bodies.shape[1] == table.ROWS, False
    for b in range(first, end):
        codes[0, b] = outcome.UNFIT
        body, point = bodies[own(b, bodies)], x[b]
        if b == first or len(bodies) > 1:
            fine = sound(body, blocks)
        if apart:
            given, low, high = q[own(b, q)], body[table.LOWER], body[table.UPPER]
            code, total, gap = _bounded(low, high, given, eps, point, places[b])
            if fine and code == outcome.SOLVED and not proven(total, gap, tol, eps):
                code = outcome.UNPROVEN
            if fine:
                codes[0, b], codes[1, b] = code, 1
                values[0, b], values[1, b] = total, gap
            continue
        largest = _negated(q[own(b, q)], z)
        if not fine or np.isnan(largest):
            continue
        at, code = _locate(body, z, largest, point, places[b], sides[b])
        codes[0, b] = code
        if code != outcome.SOLVED and code != outcome.TIED:
            continue
        if not settle(body, blocks, places[b], point, eps, sides[b]):
            codes[0, b] = outcome.UNSETTLED
            continue
        total = _value(point, z, g)
        guess[table.ROWS] = at
        gap = gap_of(body, blocks, point, g, guess, z, True)
        if not proven(total, gap, tol, eps):
            codes[0, b] = outcome.UNPROVEN
            continue
        multipliers[b, table.ROWS] = at
        values[0, b], values[1, b] = total, gap
        codes[1, b] = 1


@summing
def _pull(slopes, budget, sides, places, v):
    """ν = ⟨a, v⟩ / ⟨a, a⟩ over the free coordinates."""
    along = across = 0.0
    for i in range(len(v)):
        a = slopes[i] if places[i] == place.FREE else 0.0
        side = sides[i] if budget else 1.0
        along += a * side * v[i]
        across += a * a
    return along / across if across > 0 else 0.0


@summing
def _pushed(slopes, budget, pull, sides, places, v, u):
    """u = v − νa on the free coordinates; False if that is no number."""
    total = 0.0
    for i in range(len(v)):
        a = slopes[i] * sides[i] if budget else slopes[i]
        moved = v[i] - pull * a if pull != 0 else v[i]
        u[i] = moved if places[i] == place.FREE else 0.0
        total += v[i]
    return np.isfinite(total)


@kernel
def _adjoint(first, end, bodies, codes, places, sides, multipliers, v, u, nu, rest):
    """See `adjoint` below."""
    n = v.shape[1]
    for b in range(first, end):
        out, given = u[b], v[b]
        fill(0.0, nu[b])
        fill(0.0, out)
        if len(rest) > 0:
            fill(0.0, rest[b])
        body = bodies[own(b, bodies)]
        tied, budget = _row(body)
        if codes[0, b] != outcome.SOLVED:
            continue
        slopes, pull = body[table.LOWER], 0.0
        if tied and (not budget or multipliers[b, table.ROWS] > 0):
            slopes = body[table.ROWS]
            pull = _pull(slopes, budget, sides[b], places[b], given)
            nu[b, table.ROWS] = pull
        if not _pushed(slopes, budget, pull, sides[b], places[b], given, out):
            fill(0.0, out)
            fill(0.0, nu[b])
            continue
        for i in range(n if len(rest) > 0 else 0):
            a = slopes[i] * sides[b, i] if budget else slopes[i]
            rest[b, i] = given[i] - out[i] - (pull * a if pull != 0 else 0.0)


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first, end, q, bodies, blocks, eps, tol,
        x, values, codes, places, sides, multipliers,
    ):  # fmt: skip
        """Solve problems first … end − 1; see `kernels`. Tables have a row at most."""
        _ = stamp
        size = 0 if bodies.shape[1] == table.ROWS else x.shape[1]
        memory = np.empty(size), np.empty(size), np.empty(bodies.shape[1])
        _search(
            first, end, q, bodies, blocks, eps, tol, x, values, codes, places, sides, multipliers,
            memory,
        )  # fmt: skip

    @entry
    def adjoint(first, end, bodies, codes, places, sides, multipliers, v, u, nu, rest):
        """ν and u on the faces of problems first … end − 1, and v − u − νa if anybody asks."""
        _ = stamp
        _adjoint(first, end, bodies, codes, places, sides, multipliers, v, u, nu, rest)

    return search, adjoint


search, adjoint = _on_disk(STAMP)
