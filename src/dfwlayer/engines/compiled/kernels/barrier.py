"""Interior-point steps for one sparse quadratic program, compiled.

    min ½ xᵀPx + qᵀx  over  A x = b,  R x + s = r,  s ≥ 0,

R being the m rows of G, then x ≤ u and −x ≤ −l; rows whose r is infinite do not count. Mehrotra's
predictor and corrector, by one factor of

    [P + R₂ᵀW R₂ + ρ   Aᵀ   Gᵀ;   A  −δ  0;   G  0  −W⁻¹ − δ],   W = z/s

for each step, R₂ being the bounds. ρ and δ are proximal terms around the iterate (Schwan, Jiang,
Kuhn and Jones, "PIQP", 2023): they vanish with the step, so nothing has to take them back, rows may
depend on each other, and P may be singular.

Programs without a solution are not told from those on which these steps fail: both are left to
`dfwlayer.linalg.quadratic.homogeneous`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import STAMP, copy, entry, fill, kernel
from dfwlayer.engines.compiled.kernels.triangle import (
    Upper,
    factorise,
    planned,
    solve,
    times,
)

__all__ = ["walk"]

NEAR = 1e-9  # ρ and δ
ROUGH = 1e-2  # the same for a start, which need not solve anything
CLOSED = 1e-20  # weight of a row that does not count
REFINED = 1e-13  # of a right-hand side, what rounding may leave of it
REFINEMENTS = 3
# as in `dfwlayer.linalg.quadratic.homogeneous`
ENOUGH, CLOSE, TOLD, PATIENCE, IDLE, CENTRED = 1e-12, 1e-5, 0.5, 4, 5, 0.3
BOUNDARY = 0.995  # of the way to where a number would be zero
SHORT = 1e-6  # of a step, beyond which several in a row lead nowhere


class Parts(NamedTuple):
    """A program: matrices by rows (start, place, value), vectors, and which rows count."""

    P: tuple  # (n, n)
    A: tuple  # (k, n)
    G: tuple  # (m, n)
    q: np.ndarray  # (n,)
    b: np.ndarray  # (k,)
    limits: np.ndarray  # r (m + 2n,), zero where it is infinite
    held: np.ndarray  # (m + 2n,), whether it is finite


class Point(NamedTuple):
    """An iterate, or a direction."""

    x: np.ndarray  # (n,)
    nu: np.ndarray  # (k,)
    z: np.ndarray  # (m + 2n,)
    s: np.ndarray  # (m + 2n,)


@kernel
def _point(n, k, rows):
    return Point(np.zeros(n), np.zeros(k), np.zeros(rows), np.zeros(rows))


@kernel
def _along(matrix, x, out):
    """M x."""
    start, place, value = matrix
    for i in range(len(start) - 1):
        total = 0.0
        for p in range(start[i], start[i + 1]):
            total += value[p] * x[place[p]]
        out[i] = total


@kernel
def _back(matrix, y, out):
    """out += Mᵀy."""
    start, place, value = matrix
    for i in range(len(start) - 1):
        c = y[i]
        if c != 0:
            for p in range(start[i], start[i + 1]):
                out[place[p]] += value[p] * c


@kernel
def _across(parts, x, out):
    """R x."""
    n, m = len(x), len(parts.G[0]) - 1
    _along(parts.G, x, out)
    for i in range(n):
        out[m + i], out[m + n + i] = x[i], -x[i]


@kernel
def _largest(v, size):
    for i in range(len(v)):
        a = abs(v[i])
        size = a if a > size else size
    return size


@kernel
def _inner(a, b):
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@kernel
def _bordered(parts, order):
    """[P Aᵀ Gᵀ; A 0 0; G 0 0] in an order: above its diagonal, the diagonal, where columns go."""
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    N = n + k + m
    at = np.empty(N, np.int64)
    for i in range(N):
        at[order[i]] = i
    diagonal, start = np.zeros(N), np.zeros(N + 2, np.int64)
    for turn in range(2):
        if turn == 1:
            for j in range(N):
                start[j + 2] += start[j + 1]
            row, number = np.empty(start[N + 1], np.int64), np.empty(start[N + 1])
        for part in range(3):
            matrix = parts.P if part == 0 else (parts.A if part == 1 else parts.G)
            first = 0 if part == 0 else (n if part == 1 else n + k)
            begin, place, value = matrix
            for i in range(len(begin) - 1):
                for p in range(begin[i], begin[i + 1]):
                    j = place[p]
                    if part == 0 and j <= i:
                        if j == i and turn == 0:
                            diagonal[at[i]] += value[p]
                        continue
                    a, c = at[first + i], at[j]
                    high, low = (a, c) if a > c else (c, a)
                    if turn == 0:
                        start[high + 2] += 1
                    else:
                        e = start[high + 1]
                        row[e], number[e] = low, value[p]
                        start[high + 1] = e + 1
    return Upper(start[: N + 1].copy(), row, number), diagonal, at


@kernel
def _by(upper, diagonal, L, right, found, rest, more):
    """K⁻¹ right, with what rounding has left of it solved for again."""
    copy(right, found)
    solve(L, found)
    size, before = _largest(right, 0.0), np.inf
    for _ in range(REFINEMENTS):
        times(upper, diagonal, found, rest)
        for i in range(len(rest)):
            rest[i] = right[i] - rest[i]
        left = _largest(rest, 0.0)
        if not left > REFINED * size or not left < 0.5 * before:
            break
        before = left
        copy(rest, more)
        solve(L, more)
        for i in range(len(found)):
            found[i] += more[i]


@kernel
def _direction(parts, at, weight, system, rows, dual, beside, way):
    """x, ν and z of a direction for right-hand sides (n,), (k,) and (m + 2n,)."""
    upper, diagonal, L, place, right, found, rest, more = system
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    for i in range(n):
        above, below = m + i, m + n + i
        right[place[i]] = dual[i] + weight[above] * rows[above] - weight[below] * rows[below]
    for i in range(k):
        right[place[n + i]] = beside[i]
    for i in range(m):
        right[place[n + k + i]] = rows[i] if parts.held[i] else 0.0
    _by(upper, diagonal, L, right, found, rest, more)
    for i in range(n):
        d = found[place[i]]
        way.x[i] = d
        way.z[m + i] = weight[m + i] * (d - rows[m + i])
        way.z[m + n + i] = weight[m + n + i] * (-d - rows[m + n + i])
    for i in range(k):
        way.nu[i] = found[place[n + i]]
    for i in range(m):
        way.z[i] = found[place[n + k + i]] if parts.held[i] else 0.0


@kernel
def _weigh(parts, weight, ridge, bare, place, diagonal):
    """The diagonal of K for weights z/s."""
    n, k, m = len(parts.q), len(parts.b), len(parts.G[0]) - 1
    for i in range(n):
        j = place[i]
        diagonal[j] = bare[j] + weight[m + i] + weight[m + n + i] + ridge
    for i in range(k):
        diagonal[place[n + i]] = -ridge
    for i in range(m):
        diagonal[place[n + k + i]] = -1 / max(weight[i], CLOSED) - ridge


@kernel
def _positive(part, held):
    least = np.inf
    for i in range(len(part)):
        if held[i] and part[i] < least:
            least = part[i]
    shift = 1 - min(least, 0.0) if least < 1e-2 else 0.0
    for i in range(len(part)):
        part[i] = part[i] + shift if held[i] else 0.0


@kernel
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


@kernel
def _slacken(at, way, pair, held):
    """s of a direction, for which s∘z changes by ``pair``."""
    for i in range(len(held)):
        way.s[i] = (pair[i] - at.s[i] * way.z[i]) / at.z[i] if held[i] else 0.0


@kernel
def _look(parts, at, dual, beside, rows, product, other):
    """What an iterate misses, in the arrays; how far it is off, and Σ s z."""
    x, nu, z, s = at
    n, m = len(x), len(parts.G[0]) - 1
    _along(parts.P, x, product)
    scale = _largest(parts.q, _largest(product, 0.0))
    bend, cost = _inner(x, product), _inner(parts.q, x)
    for i in range(n):
        dual[i] = product[i] + parts.q[i]
    fill(0.0, other)
    _back(parts.A, nu, other)
    scale = _largest(other, scale)
    for i in range(n):
        dual[i] += other[i]
        other[i] = z[m + i] - z[m + n + i]
    _back(parts.G, z, other)
    scale = _largest(other, scale)
    for i in range(n):
        dual[i] += other[i]
    _along(parts.A, x, beside)
    tight = _largest(s, _largest(parts.limits, _largest(parts.b, _largest(beside, 0.0))))
    for i in range(len(beside)):
        beside[i] -= parts.b[i]
    _across(parts, x, rows)
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
    off = max(off, _largest(dual, 0.0) / (1 + scale))
    off = max(off, max(_largest(beside, 0.0), _largest(rows, 0.0)) / (1 + tight))
    return (off if off < np.inf else np.inf), total


@kernel
def _keep(one, other):
    copy(one.x, other.x)
    copy(one.nu, other.nu)
    copy(one.z, other.z)
    copy(one.s, other.s)


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def walk(P, A, G, q, b, limits, held, order, most, x, nu, z, s, holds):
        """Where the steps end, in the last arrays; how far that is from a solution, and steps.

        See `dfwlayer.linalg.quadratic.homogeneous.Interior` for what these are.
        """
        _ = stamp
        parts = Parts(P, A, G, q, b, limits, held)
        n, k, m, every = len(q), len(b), len(G[0]) - 1, len(limits)
        N = n + k + m
        upper, bare, place = _bordered(parts, order)
        signs, diagonal = np.empty(N), np.empty(N)
        for i in range(N):
            signs[place[i]] = 1.0 if i < n else -1.0
        L = planned(upper, N)
        room = np.empty(N), np.empty(N), np.empty(N), np.empty(N)
        system = upper, diagonal, L, place, room[0], room[1], room[2], room[3]
        best, at = Point(x, nu, z, s), _point(n, k, every)
        way, ahead = _point(n, k, every), _point(n, k, every)
        weight, pair, right = np.zeros(every), np.zeros(every), np.zeros(every)
        dual, beside, rows = np.empty(n), np.empty(k), np.empty(every)
        product, other = np.empty(n), np.empty(n)
        minus, short = np.empty(n), np.empty(k)
        holding = np.zeros(every, np.bool_)
        before_z, before_s = np.empty(every), np.empty(every)
        count = 0
        for i in range(every):
            count += 1 if held[i] else 0
            weight[i] = 1.0 if held[i] else 0.0
        # from one system with s = −z, both moved to where they are positive
        _weigh(parts, weight, ROUGH, bare, place, diagonal)
        factorise(upper, diagonal, signs, L)
        for i in range(n):
            minus[i] = -q[i]
        _direction(parts, at, weight, system, limits, minus, b, at)
        for i in range(every):
            at.s[i] = -at.z[i]
        _positive(at.s, held)
        _positive(at.z, held)
        fallen, least, stuck, idle, taken, slow = 1.0, np.inf, 0, 0, 0, 0
        for i in range(every):
            holding[i] = held[i] and at.z[i] > at.s[i]
        copy(at.z, before_z)
        copy(at.s, before_s)
        while True:
            off, total = _look(parts, at, dual, beside, rows, product, other)
            mu = total / max(count, 1)
            stuck = 0 if off < 0.9 * least else stuck + (1 if least < CLOSE else 0)
            idle = 0 if off < 0.9 * least else idle + 1
            if mu < TOLD * fallen:
                for i in range(every):
                    holding[i] = held[i] and at.s[i] * before_z[i] < at.z[i] * before_s[i]
            copy(at.z, before_z)
            copy(at.s, before_s)
            fallen = mu
            if off < least:
                least = off
                _keep(at, best)
                for i in range(every):
                    holds[i] = holding[i]
            if least <= ENOUGH or stuck >= PATIENCE or slow >= PATIENCE or taken >= most:
                break
            for i in range(every):
                weight[i] = at.z[i] / at.s[i] if held[i] else 0.0
                pair[i] = -at.s[i] * at.z[i]
                right[i] = at.s[i] - rows[i] if held[i] else 0.0
            _weigh(parts, weight, NEAR, bare, place, diagonal)
            factorise(upper, diagonal, signs, L)
            for i in range(n):
                minus[i] = -dual[i]
            for i in range(k):
                short[i] = -beside[i]
            if count > 0:
                _direction(parts, at, weight, system, right, minus, short, ahead)
                _slacken(at, ahead, pair, held)
                length = _length(at, ahead, held)
                after = 0.0
                for i in range(every):
                    after += (at.s[i] + length * ahead.s[i]) * (at.z[i] + length * ahead.z[i])
                centre = min(max(after / total, 0.0), 1.0) ** 3
                cycles = idle >= IDLE
                centre = max(centre, CENTRED) if cycles else centre
                for i in range(every):
                    if held[i]:
                        pair[i] += centre * mu
                        pair[i] -= 0.0 if cycles else ahead.s[i] * ahead.z[i]
                        right[i] = -rows[i] - pair[i] / at.z[i]
            _direction(parts, at, weight, system, right, minus, short, way)
            _slacken(at, way, pair, held)
            length = _length(at, way, held)
            length = BOUNDARY * length if length < 1 / BOUNDARY and count > 0 else length
            if not length >= 0:
                break
            slow = slow + 1 if length < SHORT else 0
            for i in range(n):
                at.x[i] += length * way.x[i]
            for i in range(k):
                at.nu[i] += length * way.nu[i]
            for i in range(every):
                at.z[i] += length * way.z[i]
                at.s[i] += length * way.s[i]
            taken += 1
        return least, taken

    return walk


walk = _on_disk(STAMP)
