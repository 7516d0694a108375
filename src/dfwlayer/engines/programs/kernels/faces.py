"""The minimiser of a quadratic function on a face, and whether it is the solution, in one program.

See `dfwlayer.engines.compiled.kernels.faces` and `search`, whose rules these are.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants
from dfwlayer.engines.programs.kernels.blocks import (
    again,
    count,
    dot,
    flip,
    has,
    jit,
    largest,
    number,
    product,
    sums,
    times,
    words,
    yes,
)
from dfwlayer.engines.programs.kernels.projection import (
    BUDGET,
    EQUATION,
    FREE,
    HIGH,
    LOW,
    NOTHING,
    ZERO,
    slope_of,
)

__all__ = ["CLEARLY", "DOUBTFUL", "WRONG", "inverse", "invert", "judge", "minimise", "tie", "tied"]

WRONG, DOUBTFUL, CLEARLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_SINGULAR = tl.constexpr(constants.SINGULAR * constants.DOUBLE)
_SINGULAR_SINGLE = tl.constexpr(constants.SINGULAR * constants.SINGLE)
_NOISE = tl.constexpr(constants.ROUNDING * constants.DOUBLE)
_CLEAR = tl.constexpr(constants.CLEAR)


@jit
def invert(M, free, inverted, diagonal, n, N: tl.constexpr, C: tl.constexpr):
    """Pivot until the free coordinates are those that are inverted; whether that could be done."""
    changed, changed_late, wanted, wanted_late = words(free != inverted, free, N)
    sound = yes()
    diagonal = diagonal.to(M.dtype)
    singular = number(_SINGULAR if M.dtype == tl.float64 else _SINGULAR_SINGLE, M)
    for k in range(n):
        if sound & has(changed, changed_late, k):
            comes = has(wanted, wanted_late, k)
            sign = tl.where(comes, 1.0, -1.0).to(M.dtype)
            M, pivot, whole = flip(M, diagonal, k, sign, N, C)
            sound = tl.where(comes, pivot > whole * singular, pivot < 0)
    return M, sound


@jit
def inverse(M, z, free, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """P_FF⁻¹ z_F, zero elsewhere."""
    z = tl.where(free, z, 0.0)
    if DENSE:
        return tl.where(free, -product(M, z.to(M.dtype), N, C).to(tl.float64), 0.0)
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return z


@jit
def tie(
    M,
    free,
    a,
    c,
    x,
    first,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
    DENSE: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """The normals of the rows that hold on a face, P⁻¹ of each, their Schur complement (three
    numbers), and whether that can be inverted. The signs of a budget are those of x.
    """
    zero = tl.zeros_like(x)
    normal, other = zero, zero
    if KIND != NOTHING:
        normal = tl.where(free, slope_of(a, x, KIND), 0.0)
        if KIND == BUDGET:
            normal = tl.where(first > 0, normal, 0.0)
    if CUT:
        other = tl.where(free, c, 0.0)
    moved = inverse(M, normal, free, DENSE, N, C) if KIND != NOTHING else zero
    second = inverse(M, other, free, DENSE, N, C) if CUT else zero
    one, sound = number(1.0, x), yes()
    both, two = number(0.0, x), number(1.0, x)
    held = 0
    if KIND != NOTHING:
        one, held = dot(normal, moved), 1
        if KIND == BUDGET:
            one, held = tl.where(first > 0, one, 1.0), tl.where(first > 0, 1, 0)
        sound = one > 0
    if CUT:
        both, two = dot(normal, second), dot(other, second)
        sound = sound & (two > 0) & (one * two - both * both > one * two * _SINGULAR)
        held += 1
    sound = sound & (held <= count(free))
    return normal, other, moved, second, one, both, two, sound


@jit
def tied(
    z,
    short,
    lack,
    normal,
    other,
    moved,
    second,
    one,
    both,
    two,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
):
    """From P⁻¹z to the u and ν of P u + Σ ν_j a_j = z with ⟨a_j, u⟩ = c_j."""
    u, nu, mu = z, number(0.0, z), number(0.0, z)
    if CUT:
        nu, rest, _ = sums(normal * z, other * z, tl.zeros_like(z))
        nu, rest = nu - short, rest - lack
        whole = one * two - both * both
        nu, mu = (two * nu - both * rest) / whole, (one * rest - both * nu) / whole
        u = z - nu * moved - mu * second
    elif KIND != NOTHING:
        nu = (dot(normal, z) - short) / one
        u = z - nu * moved
    return u, nu, mu


@jit
def minimise(
    M,
    P,
    q,
    free,
    places,
    a,
    target,
    c,
    goal,
    low,
    high,
    sides,
    first,
    PASSES: tl.constexpr,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
    DENSE: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """The minimiser x of f on a face, P x, the multipliers of the rows, and whether there is one.

    Where coordinates are held is told by the places, whether a budget holds by its multiplier, and
    the signs in it by ``sides``.
    """
    normal, other, moved, second, one, both, two, sound = tie(
        M, free, a, c, sides, first, KIND, CUT, DENSE, N, C
    )
    slopes = slope_of(a, sides, KIND)
    holds = (first > 0) if KIND == BUDGET else yes()
    x = tl.where(places == LOW, low, tl.where(places == HIGH, high, 0.0))
    found, cut = number(0.0, x), number(0.0, x)
    px = times(P, x, DENSE, N, C)
    left = PASSES
    while left > 0:  # after the first one for the rounding of the last
        z = inverse(M, -(px + q + found * normal + cut * other), free, DENSE, N, C)
        short, lack = number(0.0, x), number(0.0, x)
        if CUT:
            short, lack, _ = sums(slopes * x, c * x, tl.zeros_like(x))
            short, lack = target - short, goal - lack
        elif KIND != NOTHING:
            short = target - dot(slopes, x)
        if KIND == BUDGET:
            short = tl.where(holds, short, 0.0)
        u, nu, mu = tied(z, short, lack, normal, other, moved, second, one, both, two, KIND, CUT)
        x += u
        found += nu
        cut += mu
        px = times(again(P, found), x, DENSE, N, C)
        left -= 1
        if PASSES > 2:
            moves, size, _ = largest(tl.abs(u), tl.abs(x), tl.zeros_like(x))
            left = tl.where(moves > size * 1e-14, left, 0)
    return x, px, tl.where(holds, found, 0.0), cut, sound


@jit
def judge(
    q,
    a,
    target,
    c,
    low,
    high,
    places,
    first,
    second,
    x,
    px,
    sides,
    limit,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
):
    """Whether the minimiser on a face solves the problem, and whether it is one."""
    infinite = float("inf")
    steep_one, steep_two = tl.zeros_like(x), tl.zeros_like(x)
    r, hold = px + q, tl.zeros_like(x)
    if CUT:
        steep_two = tl.abs(c)
        r += second * c
    if KIND != NOTHING:
        steep_one = tl.abs(a)
    if KIND == EQUATION:
        r += first * a
    if KIND == BUDGET:
        hold = first * a
    widest, steep, other = largest(tl.abs(x), steep_one, steep_two)
    noise = tl.max(tl.abs(q)) + limit * widest + tl.abs(first) * steep + tl.abs(second) * other
    noise *= _NOISE
    wrong, doubtful = 0, 0
    if KIND == BUDGET:
        total, kinks, _ = sums(
            a * tl.abs(x),
            tl.where((places == ZERO) & (a > 0), 1.0, 0.0).to(tl.float64),
            tl.zeros_like(x),
        )
        holds = first != 0  # it holds; its force has to be one
        clear = tl.where(holds, noise * _CLEAR, total * _NOISE * _CLEAR)
        ahead = tl.where(holds, first * steep, target - total)
        wrong = tl.where((ahead < -clear) | ((first == 0) & (kinks > 0)), 1, 0)
        doubtful = tl.where(ahead < clear, 1, 0)
    size = tl.maximum(widest, tl.where(tl.abs(low) < infinite, tl.abs(low), 0.0))
    size = tl.maximum(size, tl.where(tl.abs(high) < infinite, tl.abs(high), 0.0))
    room = tl.minimum(x - low, high - x)
    room = tl.where(hold > 0, tl.minimum(room, sides * x), room)
    push = r + hold * sides
    force = tl.where(places == LOW, push, -push)
    force = tl.where(places == ZERO, hold - tl.abs(r), force)
    ahead = tl.where(places == FREE, room, force)
    clear = tl.where(places == FREE, size * _NOISE * _CLEAR, noise * _CLEAR)
    moves = low != high
    off = moves & (places == FREE) & ((tl.abs(push) <= noise * _CLEAR) == 0)
    # three counts in one
    mistaken, unclear = moves & (ahead < -clear), moves & ((ahead >= clear) == 0)
    many = mistaken.to(tl.int64) + (unclear.to(tl.int64) << 20) + (off.to(tl.int64) << 40)
    many = tl.sum(many)
    wrong += many & 0xFFFFF
    doubtful += (many >> 20) & 0xFFFFF
    still = (many >> 40) == 0
    verdict = tl.where(wrong > 0, WRONG, tl.where(doubtful > 0, DOUBTFUL, CLEARLY))
    return verdict, still
