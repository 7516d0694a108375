"""On the boundary of an ℓp ball: projections and Newton's method, compiled; see `power`."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import (
    add,
    copy,
    dot,
    factor,
    fill,
    kernel,
    product,
    solve_with,
)

__all__ = [
    "BEND",
    "LINES",
    "ROOT",
    "SLOPE",
    "A",
    "D",
    "F",
    "R",
    "V",
    "X",
    "Y",
    "Z",
    "curves",
    "descend",
    "factorised",
    "inside",
    "inverse",
]

ROUNDS = 30  # of spectral steps and one attempt at the solution
BLOCK = 8  # most spectral steps in a round, which begin with two
TRIALS = 40  # most steps of Newton's methods
HALVINGS = 8  # of a step that makes things worse

# lines of the memory for one problem
A, V, SLOPE, ROOT, BEND, F, Y, Z, X, SX, R, D, KEPT, LINES = range(14)


@kernel
def _other(a, m):
    """sign(a)|a|^m and its derivative m |a|^(m−1)."""
    power = abs(a) ** (m - 1)
    return a * power, m * power


@kernel
def _one(target, multiplier, m, low):
    """The a ≥ 0 of one coordinate: v + μ s = b ≥ 0, from above, where Newton's method stays."""
    if target == 0:
        return 0.0
    first, second = (multiplier, 1.0) if low else (1.0, multiplier)  # first a + second a^m = b
    a = target / first if first > 0 else np.inf
    if second > 0:
        a = min(a, (target / second) ** (1 / m))
    for _ in range(TRIALS):
        power = a ** (m - 1)
        new = a - (first * a + second * power * a - target) / (first + second * m * power)
        if not new < a:
            break
        a = max(new, 0.0)
    return a


@kernel
def _nearest(b, m, low, p, guess, a, v):
    """a and v of the point of the ball next to b, and its multiplier, 0 inside."""
    n, total = len(b), 0.0
    for i in range(n):
        total += abs(b[i]) ** p
    if total <= 1:
        for i in range(n):
            v[i] = b[i]
            a[i] = np.sign(b[i]) * abs(b[i]) ** (p - 1) if low else b[i]
        return 0.0
    at, least, most = guess, 0.0, np.inf
    for _ in range(TRIALS):
        total = fall = 0.0
        for i in range(n):
            one = _one(abs(b[i]), at, m, low)
            two, bend = _other(one, m)
            s, y = (one, two) if low else (two, one)
            total += s * y
            fall += s * s * bend / (bend + at) if low else s * s / (1 + at * bend)
            side = 1.0 if b[i] >= 0 else -1.0
            a[i], v[i] = side * one, side * y
        size = total ** (1 / p)
        if abs(size - 1) < 1e-10 or not fall > 0:
            break
        if size > 1:
            least = at
        else:
            most = at
        # Newton's method on 1/size, which is nearly straight
        new = at + (size - 1) * total / fall
        if not least < new < most:
            new = 0.5 * (least + most) if most < np.inf else 2 * at + 1
        at = new
    return at


@kernel
def curves(work, m, low):
    """v, s, the root of dv/da, and ds/da, for the a of the first line."""
    a, v, s, root, bend = work[A], work[V], work[SLOPE], work[ROOT], work[BEND]
    for i in range(len(a)):
        other, rate = _other(a[i], m)
        v[i], s[i] = (other, a[i]) if low else (a[i], other)
        root[i], bend[i] = (np.sqrt(rate), 1.0) if low else (1.0, rate)


@kernel
def factorised(S, d, root, bend, multiplier, L, diagonal):
    """The factor of M = E S E + μ ds/da with E = √(dv/da); of its diagonal if S has no matrix."""
    n = len(root)
    if len(S) == 0:
        fine = True
        for i in range(n):
            diagonal[i] = root[i] * d[i] * root[i] + multiplier * bend[i]
            fine = fine and diagonal[i] > 0
        return fine
    for i in range(n):
        for j in range(i + 1):
            L[i, j] = root[i] * S[i, j] * root[j]
        L[i, i] += multiplier * bend[i]
    return factor(L, n)


@kernel
def inverse(S, L, diagonal, z):
    """M⁻¹ z, in the place of z."""
    n = len(z)
    if len(S) > 0:
        solve_with(L, z, n)
    else:
        for i in range(n):
            z[i] /= diagonal[i]


@kernel
def _times(S, d, x, out):
    """S x."""
    if len(S) > 0:
        product(S, x, out)
    else:
        for i in range(len(x)):
            out[i] = d[i] * x[i]


@kernel
def _residual(S, work, m, low, multiplier, scale):
    """F = S v + r + μ s, how large it is, and what the ball's equation lacks."""
    curves(work, m, low)
    force, r, s = work[F], work[R], work[SLOPE]
    _times(S, work[D], work[V], force)
    off = 0.0
    for i in range(len(r)):
        force[i] += r[i] + multiplier * s[i]
        off = max(off, abs(force[i]))
    lack = dot(s, work[V], len(r)) - 1
    return off / scale + abs(lack), lack


@kernel
def _newton(S, work, m, low, p, multiplier, scale, L):
    """Newton's method on (a, μ) from what is in the memory: μ, or −1 where it does not arrive."""
    n = work.shape[1]
    a, s, root, y, z = work[A], work[SLOPE], work[ROOT], work[Y], work[Z]
    off, lack = _residual(S, work, m, low, multiplier, scale)
    for _ in range(TRIALS):
        if not multiplier > 0 or not off < np.inf:
            return -1.0
        if not factorised(S, work[D], root, work[BEND], multiplier, L, work[X]):
            return -1.0
        # M y + (E s) dμ = −E F and ⟨E s, y⟩ = −lack / p
        for i in range(n):
            y[i], z[i] = -root[i] * work[F, i], root[i] * s[i]
        inverse(S, L, work[X], y)
        inverse(S, L, work[X], z)
        along = across = 0.0
        for i in range(n):
            along += root[i] * s[i] * y[i]
            across += root[i] * s[i] * z[i]
        step = (along + lack / p) / across
        add(y, -step, z, n)
        for i in range(n):
            y[i] *= root[i]  # dv
        if low:  # da = (−F − s dμ − S dv) / μ
            _times(S, work[D], y, z)
            for i in range(n):
                y[i] = -(work[F, i] + s[i] * step + z[i]) / multiplier
        copy(a, work[KEPT])
        length, before, old = 1.0, off, multiplier
        for _ in range(HALVINGS):
            multiplier = old + length * step
            for i in range(n):
                a[i] = work[KEPT, i] + length * y[i]
            if multiplier > 0:
                off, lack = _residual(S, work, m, low, multiplier, scale)
                if off < before:
                    break
            length *= 0.5
        if not (multiplier > 0 and off < before):
            # no step makes it smaller: that is rounding, or a failure
            copy(work[KEPT], a)
            off, lack = _residual(S, work, m, low, old, scale)
            return old if off < 1e-13 * np.sqrt(n) else -1.0
        if off < 0.5 * DOUBLE:
            break
    return multiplier if off < 1e-13 * np.sqrt(n) else -1.0


@kernel
def inside(S, work, p, L):
    """v without the ball: 1 if it is in there, 0 if not, −1 if that is a matter of rounding."""
    v, z, n = work[V], work[Z], work.shape[1]
    fill(1.0, work[ROOT])
    if not factorised(S, work[D], work[ROOT], work[BEND], 0.0, L, work[X]):
        return 0
    for i in range(n):
        v[i] = -work[R, i]
    inverse(S, L, work[X], v)
    _times(S, work[D], v, z)  # and once more, for the rounding of the first
    for i in range(n):
        z[i] = -(z[i] + work[R, i])
    inverse(S, L, work[X], z)
    add(v, 1.0, z, n)
    total = 0.0
    for i in range(n):
        total += abs(v[i]) ** p
    slack = 1 - total ** (1 / p)
    clear = CLEAR * ROUNDING * DOUBLE
    return 1 if slack > clear else (0 if slack < -clear else -1)


@kernel
def descend(S, work, m, low, p, bound, scale, most, L):
    """μ and how many steps it took, negative for why it was not found; the start is in line X."""
    n = work.shape[1]
    x, sx, a, v = work[X], work[SX], work[A], work[V]
    guess = _nearest(x, m, low, p, 0.0, a, v)
    copy(v, x)
    _times(S, work[D], x, sx)
    alpha, steps = 1.0 / bound, 0
    guess = 0.0
    for turn in range(ROUNDS):
        for _ in range(min(2 << turn, BLOCK)):
            for i in range(n):
                work[Z, i] = x[i] - alpha * (sx[i] + work[R, i])
            guess = _nearest(work[Z], m, low, p, guess, a, v)
            _times(S, work[D], v, work[F])
            steps += 1
            fall = bend = square = 0.0
            for i in range(n):
                d = v[i] - x[i]
                fall -= d * (sx[i] + work[R, i])
                bend += d * (work[F, i] - sx[i])
                square += d * d
            if not fall > 0:
                break
            length = min(1.0, fall / bend) if bend > 0 else 1.0
            for i in range(n):
                x[i] += length * (v[i] - x[i])
                sx[i] += length * (work[F, i] - sx[i])
            multiplier = guess / alpha
            if bend > 0:
                new = min(max(square / bend, 0.01 / bound), 1e6 / bound)
                guess *= new / alpha
                alpha = new
        if guess > 0:
            copy(x, work[SX])  # Newton's method uses the line of x
            multiplier = _newton(S, work, m, low, p, guess / alpha, scale, L)
            if multiplier > 0:
                return multiplier, steps
            copy(work[SX], x)
            _times(S, work[D], x, sx)
        if steps >= most:
            break
    return 0.0, -outcome.LOST
