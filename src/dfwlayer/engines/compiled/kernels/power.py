"""A quadratic problem over a weighted ℓp ball, 1 < p < ∞, from start to certificate, compiled.

In v = Wx/t the ball is Σ |v_i|^p ≤ 1, and f is ½ vᵀSv + rᵀv. On its boundary, with
s = sign(v)|v|^(p−1),

    S v + r + μ s = 0,  ⟨s, v⟩ = 1,  μ > 0.

Of v and s, one is a smooth function of the other: s of v for p ≥ 2, v of s below. So the unknown a
is v there and s here, the other one is sign(a)|a|^m with m = p − 1 or 1/(p − 1), at least 1, and
Newton's method works on (a, μ). A few spectral projected gradient steps bring it near.
"""

from __future__ import annotations

import numpy as np

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
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.numbers import (
    CLEAR,
    DOUBLE,
    DOUBTED,
    LARGEST,
    LOST,
    ROUNDING,
    SMALLEST,
    SOLVED,
    UNFIT,
    UNPROVEN,
    UNSETTLED,
    holds,
    own,
    rounded,
    symmetric,
)

__all__ = ["adjoint", "search"]

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
def _curves(work, m, low):
    """v, s, the root of dv/da, and ds/da, for the a of the first line."""
    a, v, s, root, bend = work[A], work[V], work[SLOPE], work[ROOT], work[BEND]
    for i in range(len(a)):
        other, rate = _other(a[i], m)
        v[i], s[i] = (other, a[i]) if low else (a[i], other)
        root[i], bend[i] = (np.sqrt(rate), 1.0) if low else (1.0, rate)


@kernel
def _factorised(S, d, root, bend, multiplier, L, diagonal):
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
def _inverse(S, L, diagonal, z):
    """M⁻¹ z, in the place of z."""
    n = len(z)
    if len(S) > 0:
        forward(L, z, n)
        backward(L, z, n)
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
    _curves(work, m, low)
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
        if not _factorised(S, work[D], root, work[BEND], multiplier, L, work[X]):
            return -1.0
        # M y + (E s) dμ = −E F and ⟨E s, y⟩ = −lack / p
        for i in range(n):
            y[i], z[i] = -root[i] * work[F, i], root[i] * s[i]
        _inverse(S, L, work[X], y)
        _inverse(S, L, work[X], z)
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
def _inside(S, work, p, L):
    """v without the ball: 1 if it is in there, 0 if not, −1 if that is a matter of rounding."""
    v, z, n = work[V], work[Z], work.shape[1]
    fill(1.0, work[ROOT])
    if not _factorised(S, work[D], work[ROOT], work[BEND], 0.0, L, work[X]):
        return 0
    for i in range(n):
        v[i] = -work[R, i]
    _inverse(S, L, work[X], v)
    _times(S, work[D], v, z)  # and once more, for the rounding of the first
    for i in range(n):
        z[i] = -(z[i] + work[R, i])
    _inverse(S, L, work[X], z)
    add(v, 1.0, z, n)
    total = 0.0
    for i in range(n):
        total += abs(v[i]) ** p
    slack = 1 - total ** (1 / p)
    clear = CLEAR * ROUNDING * DOUBLE
    return 1 if slack > clear else (0 if slack < -clear else -1)


@kernel
def _descend(S, work, m, low, p, bound, scale, most, L):
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
    return 0.0, -LOST


@kernel
def _size(weight, x, p):
    """‖Wx‖_p."""
    largest = total = 0.0
    for i in range(len(x)):
        largest = max(largest, weight[i] * abs(x[i]))
    if largest == 0:
        return 0.0
    for i in range(len(x)):
        total += (weight[i] * abs(x[i]) / largest) ** p
    return largest * total ** (1 / p)


@kernel
def _settle(weight, radius, p, x, eps, held):
    """Round x to its dtype, inside; False where that takes more than a nudge."""
    for trial in range(5):
        size = _size(weight, x, p)
        if trial > 0 and size <= radius:
            return True
        shrink = 1.0
        if held or size > radius:
            shrink = radius / size * (1 - trial * eps)
        for i in range(len(x)):
            x[i] = rounded(x[i] * shrink, eps)
    return _size(weight, x, p) <= radius


@kernel
def _prepare(P, q, weight, radius, S, work):
    """S and r, and a bound of ‖S‖ if all numbers are for this code, otherwise 0."""
    n = len(q)
    bound = 0.0
    if not SMALLEST < radius < LARGEST:
        return 0.0
    for i in range(n):
        if not abs(q[i]) < LARGEST or not SMALLEST < weight[i] < LARGEST:
            return 0.0
        work[R, i] = q[i] * radius / weight[i]
        work[D, i] = (radius / weight[i]) ** 2
    for i in range(n):
        total = 0.0 if len(P) > 0 else work[D, i]
        for j in range(len(P)):
            S[i, j] = P[i, j] * (radius / weight[i]) * (radius / weight[j])
            total += abs(S[i, j])
        bound = total if not total <= bound else bound  # keeps a NaN
    return bound if SMALLEST < bound < LARGEST else 0.0


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first,
        end,
        p,
        P,  # (·, n, n), or empty for the identity
        q,  # (·, n)
        A_,  # (·, m, n), with P = AᵀA and q = −Aᵀb, or empty
        rhs,  # b (·, m)
        weights,  # (·, n), positive
        radii,  # (·, 1)
        start,  # (·, n)
        eps,  # of the dtype that x is rounded to
        tol,
        most,  # steps
        x,  # (B, n), and what follows is where the results go
        values,  # (2, B): f and the gap
        codes,  # (2, B): what became of it, and steps
        multipliers,  # (B, 1), μ
        unknowns,  # (B, n), a
    ):
        """Solve problems first … end − 1."""
        _ = stamp
        n = x.shape[1]
        dense, low = P.shape[1] > 0, p < 2
        m = 1 / (p - 1) if low else p - 1
        S, L = np.empty((n, n)) if dense else np.empty((0, 0)), np.empty((0, 0))
        if dense:
            L = np.empty((n, n))
        work = np.empty((LINES, n))
        for b in range(first, end):
            codes[0, b] = UNFIT
            own_P = symmetric(P[own(b, P)], eps)
            if dense and len(own_P) == 0:
                continue
            own_q, weight = q[own(b, q)], weights[own(b, weights)]
            radius, point = radii[own(b, radii), 0], x[b]
            bound = _prepare(own_P, own_q, weight, radius, S, work)
            if bound == 0:
                continue
            scale = bound
            for i in range(n):
                scale = max(scale, abs(work[R, i]))
            multiplier, taken = 0.0, 1
            there = _inside(S, work, p, L)
            if there < 0:
                codes[0, b] = DOUBTED
                continue
            if there == 0:
                for i in range(n):
                    begin = start[own(b, start), i] * weight[i] / radius
                    work[X, i] = begin if abs(begin) < LARGEST else 0.0
                multiplier, taken = _descend(S, work, m, low, p, bound, scale, most, L)
                if taken < 0 or taken > most:
                    codes[0, b] = LOST
                    continue
                _curves(work, m, low)
                if not multiplier > CLEAR * ROUNDING * DOUBLE * scale:
                    codes[0, b] = DOUBTED
                    continue
            for i in range(n):
                point[i] = work[V, i] * radius / weight[i]
                unknowns[b, i] = work[A, i] if multiplier > 0 else 0.0
            if not _settle(weight, radius, p, point, eps, multiplier > 0):
                codes[0, b] = UNSETTLED
                continue
            g = work[F]
            own_A, own_b = A_[own(b, A_)], rhs[own(b, rhs)]
            total = value_and_gradient(own_P, own_q, own_A, own_b, point, g)
            along = terms = 0.0
            for i in range(n):
                along += g[i] * point[i]
                terms += abs(g[i] * point[i])
                work[Z, i], work[Y, i] = g[i], 1 / weight[i]
            # ⟨g, x⟩ + t ‖W⁻¹g‖ in the dual norm, with the rounding of powers
            dual = radius * _size(work[Y], work[Z], p / (p - 1))
            gap = max(along + dual, 0.0) + 2 * DOUBLE * terms + ROUNDING * DOUBLE * dual
            if not (gap <= tol * max(abs(total), 1e-300) and holds(total, eps)):
                codes[0, b] = UNPROVEN
                continue
            multipliers[b, 0] = multiplier
            values[0, b], values[1, b] = total, gap
            codes[0, b], codes[1, b] = SOLVED, taken

    @entry
    def adjoint(
        first,
        end,
        p,
        P,
        weights,
        radii,
        eps,
        codes,
        multipliers,
        unknowns,
        v,  # (B, n), the gradient that arrives
        u,  # (B, n), and what follows is where the results go
        nu,  # (B, 1)
    ):
        """(P + λ∇²h) u + ν∇h = v and ⟨∇h, u⟩ = 0 with h = ‖Wx‖_p, where that holds x."""
        _ = stamp
        n = v.shape[1]
        dense, low = P.shape[1] > 0, p < 2
        m = 1 / (p - 1) if low else p - 1
        S, L = np.empty((n, n)) if dense else np.empty((0, 0)), np.empty((0, 0))
        if dense:
            L = np.empty((n, n))
        work = np.empty((LINES, n))
        for b in range(first, end):
            out, total = u[b], 0.0
            for i in range(n):
                total += v[b, i]
            fill(0.0, out)
            nu[b, 0] = 0.0
            if codes[0, b] != SOLVED or not np.isfinite(total):
                continue
            weight, multiplier = weights[own(b, weights)], multipliers[b, 0]
            radius = radii[own(b, radii), 0]
            own_P = symmetric(P[own(b, P)], eps)
            _prepare(own_P, v[b], weight, radius, S, work)
            copy(unknowns[b], work[A])
            _curves(work, m, low)
            if multiplier == 0:
                fill(1.0, work[ROOT])
            root, s, y, z = work[ROOT], work[SLOPE], work[Y], work[Z]
            if not _factorised(S, work[D], root, work[BEND], multiplier, L, work[X]):
                continue
            for i in range(n):
                y[i], z[i] = root[i] * work[R, i], root[i] * s[i]
            _inverse(S, L, work[X], y)
            if multiplier > 0:
                _inverse(S, L, work[X], z)
                along = across = 0.0
                for i in range(n):
                    along += root[i] * s[i] * y[i]
                    across += root[i] * s[i] * z[i]
                nu[b, 0] = along / across / radius
                add(y, -along / across, z, n)
            for i in range(n):
                out[i] = root[i] * y[i] * radius / weight[i]

    return search, adjoint


search, adjoint = _on_disk(STAMP)
