"""A quadratic problem over a weighted ℓp ball, 1 < p < ∞, in one Triton program.

The method is that of `dfwlayer.engines.compiled.kernels.power`, and so are its rules: in v = Wx/t,
with s = sign(v)|v|^(p−1),

    S v + r + μ s = 0,  ⟨s, v⟩ = 1,  μ > 0

on the boundary, by Newton's method in μ and that one of v and s of which the other is smooth.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.programs.kernels import ends
from dfwlayer.engines.programs.kernels.blocks import (
    count,
    dot,
    entries,
    entry,
    matrix_of,
    number,
    product,
    rounded,
    sign_of,
    stored,
    times,
)
from dfwlayer.engines.programs.kernels.curved import (
    curves,
    descend,
    inverse_of,
    power,
    size_of,
    solve,
)

__all__ = ["adjoint", "search"]


def _search(
    P, q, weight, radius,  # as in `ball`
    exponent,  # p, (·)
    start, A, rhs, x_out, values, codes,
    state,  # (B, 2n + 2): x, a, μ
    left,
    p_batch, p_row, p_column, q_batch, q_column, weight_batch, weight_column, radius_batch,
    exponent_batch, start_batch, start_column, a_batch, rhs_batch, n, m, batch, tol, most,
    DENSE: tl.constexpr, EPS: tl.constexpr, MAX: tl.constexpr, LARGEST: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    b, lane, cell = ends.own_lanes(n, N)
    p = tl.load(exponent + b * exponent_batch).to(tl.float64)
    low = p < 2
    rate = tl.where(low, 1 / (p - 1), p - 1)
    blank = tl.zeros((N,), tl.float64)
    linear = entries(q, b, q_batch, q_column, lane, cell, 0.0, state)
    w, t = ends.ball_of(
        weight, radius, b, weight_batch, weight_column, radius_batch, lane, cell, 1.0, x_out
    )
    w = tl.abs(w)
    z, usable = ends.started(start, b, start_batch, start_column, lane, cell, state, N)
    sound = (tl.abs(linear) < LARGEST) & (tl.abs(z) < LARGEST) & (w < LARGEST) & (w > 1 / LARGEST)
    fit = usable & (t > 1 / LARGEST) & (t < LARGEST) & (count(sound == 0) == 0)
    t = tl.where(fit, t, 1.0)
    w = tl.where(sound, w, 1.0)
    scale = tl.where(cell, t / w, 0.0)
    matrix, bound = blank, tl.max(scale * scale)
    if DENSE:
        matrix = matrix_of(P + b * p_batch, p_row, p_column, n, N, C)
        regular, _, _ = ends.sane(matrix, n, EPS, LARGEST, N, C)
        fit = fit & regular
        bound = tl.max(scale * product(tl.abs(matrix), scale, N, C))
    fit = fit & (bound > 1 / LARGEST) & (bound < LARGEST)
    r = scale * linear
    unit = tl.maximum(bound, tl.max(tl.abs(r)))

    # without the ball
    M, regular = inverse_of(matrix, scale, blank, n, DENSE, N, C)
    free = solve(matrix, M, scale, blank, -r, 1 if N <= 64 else 4, DENSE, N, C)
    size = size_of(tl.abs(free), p)
    inside = regular & (size < 1 - ends.CLEAR * ends.NOISE)
    outside = (regular == 0) | ((size > 1 + ends.CLEAR * ends.NOISE) | (size != size))
    code = tl.where(
        fit, tl.where(inside, ends.SOLVED, tl.where(outside, ends.LOST, ends.DOUBTED)), ends.UNFIT
    )
    a, mu, taken, found = descend(
        matrix, scale, r, z * w / t, rate, low, p, bound, unit, n, most, fit & outside, DENSE, N, C
    )
    v, _, _, _ = curves(a, rate, low)
    clear = mu > unit * (ends.CLEAR * ends.NOISE)
    code = tl.where(found & (taken <= most), tl.where(clear, ends.SOLVED, ends.DOUBTED), code)
    v, a, mu = tl.where(found, v, free), tl.where(found, a, blank), tl.where(found, mu, 0.0)
    x, value, gap = blank, number(0.0, blank), number(0.0, blank)
    if code == ends.SOLVED:
        x = v * scale
        size = size_of(w * tl.abs(x), p)
        x = rounded(x * tl.where(found | (size > t), t / size, 1.0), x_out)
        for nudge in range(1, 5):
            size = size_of(w * tl.abs(x), p)
            if size > t:
                x = rounded(x * (t / size * (1 - nudge * EPS)), x_out)
        settled = size_of(w * tl.abs(x), p) <= t
        bent = times(matrix, x, DENSE, N, C)
        value, g = ends.valued(A, rhs, b, a_batch, rhs_batch, x, bent, linear, n, m, N)
        # ⟨g, x⟩ + t ‖W⁻¹g‖ in the dual norm, with the rounding of powers
        dual = t * size_of(tl.where(cell, tl.abs(g) / w, 0.0), p / (p - 1))
        gap = tl.maximum(dot(g, x) + dual, 0.0)
        gap += tl.sum(tl.abs(g * x)) * (2 * ends.DOUBLE) + dual * ends.NOISE
        code = ends.verdict(settled, value, gap, tol, MAX)
    answered = code == ends.SOLVED
    ends.solved_at(x_out, state, b, x, code, n, 2 * n + 2, lane, cell)
    state += b * (2 * n + 2)
    tl.store(state + n + lane, tl.where(answered, a, 0.0), mask=cell)
    tl.store(state + 2 * n, tl.where(answered, mu, 0.0))
    ends.told(values, codes, left, b, batch, value, gap, code, taken + 1, EPS)


def _adjoint(
    P, weight, radius, exponent, codes,
    state,  # (B, 2n + 2)
    v_in,
    u_out,  # (B, n)
    to_matrix, to_vector, to_weight, to_radius,
    p_batch, p_row, p_column, weight_batch, weight_column, radius_batch, exponent_batch,
    v_batch, v_column, n,
    DENSE: tl.constexpr, MAX: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(P + λ∇²h) u + ν∇h = v and ⟨∇h, u⟩ = 0 with h = ‖Wx‖_p, where that holds x."""
    b, lane, cell = ends.own_lanes(n, N)
    v, x, spoil = ends.arriving(v_in, state, b, v_batch, v_column, n, lane, cell)
    state += b * (2 * n + 2)
    a = tl.load(state + n + lane, mask=cell, other=0.0)
    mu = tl.load(state + 2 * n)
    signed, t = ends.ball_of(
        weight, radius, b, weight_batch, weight_column, radius_batch, lane, cell, 1.0, v_in
    )
    w = tl.abs(signed)
    p = tl.load(exponent + b * exponent_batch).to(tl.float64)
    u, nu = tl.zeros((N,), tl.float64), number(0.0, x)
    if ends.arrived(codes, b, v, N):
        matrix = u
        if DENSE:
            matrix = matrix_of(P + b * p_batch, p_row, p_column, n, N, C)
        low = p < 2
        _, s, root, bend = curves(a, tl.where(low, 1 / (p - 1), p - 1), low)
        held = mu > 0
        root, bend = tl.where(held, root, 1.0), tl.where(held, mu * bend, 0.0)
        scale = tl.where(cell, t / w, 0.0)
        M, sound = inverse_of(matrix, scale * root, bend, n, DENSE, N, C)
        u = solve(matrix, M, scale * root, bend, root * scale * v, 1 if N <= 64 else 4, DENSE, N, C)
        if held:
            side = root * s
            own = solve(matrix, M, scale * root, bend, side, 1 if N <= 64 else 4, DENSE, N, C)
            nu = dot(side, u) / dot(side, own)
            u -= nu * own
            nu = nu / t
        u = root * u * scale
        u, nu = ends.within_range(u, nu, x, sound, MAX)
    ends.moved(u_out, to_matrix, to_vector, b, u, x, n, cell, spoil, N)
    if to_weight is not None:
        # of λ∇h, whose norm has no part along u, and of h; λ is μ/t
        size = tl.abs(x)
        force = power(w * size / t, p - 1) * sign_of(signed)
        pull = mu / t * p * sign_of(x) * u + nu * size
        stored(to_weight, b * n + lane, -force * pull, cell, spoil)
    if to_radius is not None:
        stored(to_radius, b, nu, b >= 0, spoil)


search, adjoint = entry(_search), entry(_adjoint)
