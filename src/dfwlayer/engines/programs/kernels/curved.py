"""On the boundary of an ℓp ball: projections and Newton's method, in Triton; see `power`.

The twin of `dfwlayer.engines.compiled.kernels.curved`. Vectors are those of v = Wx/t, in which the
ball is Σ |v_i|^p ≤ 1 and P is S = D P D with D = t W⁻¹. The unknown a is v for p > 2 and the slope
s below (``low``); the other one of the two is sign(a)|a|^m.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants
from dfwlayer.engines.programs.kernels.blocks import (
    across,
    again,
    count,
    dot,
    jit,
    number,
    outer_index,
    product,
    sign_of,
    sums,
    yes,
)
from dfwlayer.engines.programs.kernels.faces import invert

__all__ = ["curves", "descend", "inverse_of", "power", "scaled", "size_of", "solve"]

ROUNDS = tl.constexpr(30)  # of spectral steps and one attempt at the solution
BLOCK = tl.constexpr(8)  # most spectral steps in a round, which begin with two
TRIALS = tl.constexpr(40)  # most steps of Newton's methods
HALVINGS = tl.constexpr(8)  # of a step that makes things worse
DOUBLE = tl.constexpr(constants.DOUBLE)
NEAR = tl.constexpr(1e-6)  # the ball's boundary; Newton's method starts from such points
ENDLESS = tl.constexpr(1e300)


@jit
def power(a, m):
    """a^m for a ≥ 0 and m > 0.

    Rounding is that of m log₂ a, so that a number from 0 to 1 is off by less than eps, and a power
    of a small one is less exact than itself.
    """
    return tl.exp2(m * tl.log2(a))


@jit
def size_of(a, p):
    """‖a‖_p for a ≥ 0."""
    largest = tl.max(a)
    total = tl.sum(power(a / tl.where(largest > 0, largest, 1.0), p))
    return tl.where(largest > 0, largest * power(total, 1 / p), 0.0)


@jit
def curves(a, m, low):
    """v, s, the root of dv/da, and ds/da."""
    rate = power(tl.abs(a), m - 1)
    other = a * rate
    rate = m * rate
    one = tl.full(a.shape, 1.0, tl.float64)
    v, s = tl.where(low, other, a), tl.where(low, a, other)
    return v, s, tl.where(low, tl.sqrt(rate), one), tl.where(low, one, rate)


@jit
def scaled(P, scale, x, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """S x."""
    if DENSE:
        return scale * product(P, scale * x, N, C)
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return scale * scale * x


@jit
def inverse_of(P, scale, bend, n, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """−M⁻¹ of M = G P G + diag(b), or 1/M without P, and whether there is one; G is a diagonal."""
    if DENSE:
        row, column = outer_index(N, C)
        M = P.to(tl.float64 if N <= 64 else tl.float32)
        narrow = scale.to(M.dtype)
        M = M * narrow[None, :, None] * across(narrow, N, C)
        M += tl.where(row == column, bend.to(M.dtype)[None, :, None], 0.0)
        whole = tl.sum(tl.sum(tl.where(row == column, M, 0.0), axis=0), axis=1)
        lane = tl.arange(0, N)
        return invert(M, lane < n, lane < 0, whole, n, N, C)
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        M = scale * scale + bend
        lane = tl.arange(0, N)
        return 1 / tl.where(lane < n, M, 1.0), count((M > 0) | (lane >= n)) == N


@jit
def solve(
    P,
    M,
    scale,
    bend,
    z,
    ROUNDS_: tl.constexpr,
    DENSE: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """(G P G + diag(b))⁻¹ z with the inverse of `inverse_of`, refined so many times."""
    if DENSE:
        x = -product(M, z.to(M.dtype), N, C).to(tl.float64)
        for _ in range(ROUNDS_):
            r = z - scale * product(again(P, dot(x, x)), scale * x, N, C) - bend * x
            x -= product(M, r.to(M.dtype), N, C).to(tl.float64)
        return x
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return M * z


@jit
def _ones(target, multiplier, m, low):
    """The a ≥ 0 of v + μ s = b ≥ 0 in each coordinate, from above, where Newton's method stays."""
    some = target > 0
    target = tl.where(some, target, 1.0)
    one = number(1.0, target)
    first, second = tl.where(low, multiplier, one), tl.where(low, one, multiplier)
    # first a + second a^m = b
    a = tl.minimum(target / first, power(target / second, 1 / m))
    going, trial = yes(), 0
    while going:
        rate = power(a, m - 1)
        new = a - (first * a + second * rate * a - target) / (first + second * m * rate)
        falls = (a - new) > a * 1e-9
        a = tl.where(new < a, tl.maximum(new, 0.0), a)
        trial += 1
        going = (count(falls) > 0) & (trial < TRIALS)
    return tl.where(some, a, 0.0)


@jit
def _nearest(b, m, low, p, guess):
    """a and v of the point of the ball next to b, and its multiplier, 0 inside."""
    size = tl.abs(b)
    inside = tl.sum(power(size, p)) <= 1
    at, least, most = guess, guess * 0, guess * 0 + ENDLESS
    one, y = tl.zeros_like(b), tl.zeros_like(b)
    going, trial = inside == 0, 0
    while going:
        one = _ones(size, at, m, low)
        rate = power(one, m - 1)
        other, bend = one * rate, m * rate
        s, y = tl.where(low, one, other), tl.where(low, other, one)
        under = tl.where(low, bend + at, 1 + at * bend)
        pull = s * s * tl.where(low, bend, 1.0) / tl.where(under > 0, under, 1.0)
        total, fall, _ = sums(s * y, pull, one)
        length = power(total, 1 / p)
        met = (tl.abs(length - 1) < NEAR) | ((fall > 0) == 0)
        least, most = tl.where(length > 1, at, least), tl.where(length > 1, most, at)
        # Newton's method on 1/size, which is nearly straight
        new = at + (length - 1) * total / tl.where(fall > 0, fall, 1.0)
        middle = tl.where(most < ENDLESS, 0.5 * (least + most), 2 * at + 1)
        new = tl.where((new > least) & (new < most), new, middle)
        trial += 1
        going = (met == 0) & (trial < TRIALS)
        at = tl.where(going, new, at)
    side = sign_of(b)
    a = tl.where(inside, tl.where(low, side * power(size, p - 1), b), side * one)
    return a, tl.where(inside, b, side * y), tl.where(inside, 0.0, at)


@jit
def _residual(
    P, scale, r, a, m, low, mu, unit, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr
):
    """F = S v + r + μ s, how large it is, and what the ball's equation lacks."""
    v, s, _, _ = curves(a, m, low)
    force = scaled(P, scale, v, DENSE, N, C) + r + mu * s
    lack = dot(s, v) - 1
    return force, tl.max(tl.abs(force)) / unit + tl.abs(lack), lack


@jit
def _newton(
    P, scale, r, a, m, low, p, mu, unit, n, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr
):
    """Newton's method on (a, μ), both as far as it gets, and whether it arrives."""
    force, off, lack = _residual(P, scale, r, a, m, low, mu, unit, DENSE, N, C)
    going, trial = (mu > 0) & (off < ENDLESS), 0
    while going:
        _, s, root, bend = curves(a, m, low)
        M, good = inverse_of(P, scale * root, mu * bend, n, DENSE, N, C)
        # M y + (E s) dμ = −E F and ⟨E s, y⟩ = −lack / p
        side = root * s
        y = solve(P, M, scale * root, mu * bend, -root * force, 1, DENSE, N, C)
        z = solve(P, M, scale * root, mu * bend, side, 1, DENSE, N, C)
        along, beside, _ = sums(side * y, side * z, y)
        step = (along + lack / p) / tl.where(beside > 0, beside, 1.0)
        move = (y - step * z) * root  # dv
        # da = (−F − s dμ − S dv) / μ, where a is s
        bent = -(force + s * step + scaled(P, scale, move, DENSE, N, C)) / mu
        move = tl.where(low, bent, move)
        length, halving = number(1.0, a), 0
        better, looking = good & (good == 0), good & (beside > 0)
        near, far, there, off_there, lack_there = a, mu, force, off, lack
        while looking:
            far, near = mu + length * step, a + length * move
            there, off_there, lack_there = _residual(
                P, scale, r, near, m, low, far, unit, DENSE, N, C
            )
            better = (far > 0) & (off_there < off)
            length = length * 0.5
            halving += 1
            looking = (better == 0) & (halving < HALVINGS)
        a, force = tl.where(better, near, a), tl.where(better, there, force)
        mu, off = tl.where(better, far, mu), tl.where(better, off_there, off)
        lack = tl.where(better, lack_there, lack)
        trial += 1
        going = better & (off >= 0.5 * DOUBLE) & (trial < TRIALS)
    arrived = (mu > 0) & (off < 1e-13 * tl.sqrt(n.to(tl.float64)))
    return a, mu, arrived


@jit
def descend(
    P,
    scale,
    r,
    x,
    m,
    low,
    p,
    bound,
    unit,
    n,
    most,
    wanted,
    DENSE: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """a and μ from a start x, how many steps that took, and whether they were found, if wanted."""
    nothing = number(0.0, r)
    a, x, _ = _nearest(x, m, low, p, nothing)
    image = scaled(P, scale, x, DENSE, N, C)
    alpha, guess, mu = 1 / bound, nothing, nothing
    steps, turn = 0, 0
    found, going = wanted & (wanted == 0), wanted
    while going:
        block = tl.minimum(2 << tl.minimum(turn, 4), BLOCK)
        taken, moving = 0, yes()
        while moving:
            a, v, guess = _nearest(x - alpha * (image + r), m, low, p, guess)
            ahead = scaled(P, scale, v, DENSE, N, C)
            move, change = v - x, ahead - image
            fall, bend, square = sums(-move * (image + r), move * change, move * move)
            good = fall > 0
            length = tl.where(bend > 0, tl.minimum(1.0, fall / bend), 1.0)
            length = tl.where(good, length, 0.0)
            x, image = x + length * move, image + length * change
            new = tl.minimum(tl.maximum(square / bend, 0.01 / bound), 1e6 / bound)
            new = tl.where(good & (bend > 0), new, alpha)
            guess, alpha = guess * (new / alpha), new
            steps += 1
            taken += 1
            moving = good & (taken < block)
        mu = guess / alpha
        a, mu, found = _newton(P, scale, r, a, m, low, p, mu, unit, n, DENSE, N, C)
        turn += 1
        going = (found == 0) & (turn < ROUNDS) & (steps < most)
    return a, mu, steps, found
