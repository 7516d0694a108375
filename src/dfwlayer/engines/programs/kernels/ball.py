"""A quadratic problem over a weighted ℓ2 ball, from start to certificate, in one Triton program.

The method is that of `dfwlayer.engines.compiled.kernels.ball`, and so are its rules: the solution
is that without the ball, or x(λ) with (P + λW²) x = −q for the λ > 0 at which ‖Wx‖ = t, which
Newton's method on 1/‖Wx‖ = 1/t finds from below, with one inverse for each λ.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.programs.kernels import ends
from dfwlayer.engines.programs.kernels.blocks import (
    again,
    count,
    dot,
    entries,
    entry,
    jit,
    matrix_of,
    number,
    outer_index,
    product,
    rounded,
    stored,
    times,
    yes,
)
from dfwlayer.engines.programs.kernels.faces import invert

__all__ = ["adjoint", "search"]


MOST = tl.constexpr(60)  # values of λ; about six are needed
NEAR = tl.constexpr(0.99)  # of the radius, where a start is taken to be on the boundary
FAINT = tl.constexpr(1e-10)  # times the curvature of f, a first λ where f alone has flat directions


@jit
def _inverse_of(P, curve, n, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """−(P + D)⁻¹ for a diagonal D, or 1/(1 + D) without P; whether there is one."""
    if DENSE:
        row, column = outer_index(N, C)
        M = P.to(tl.float64 if N <= 64 else tl.float32)
        M += tl.where(row == column, curve.to(M.dtype)[None, :, None], 0.0)
        whole = tl.sum(tl.sum(tl.where(row == column, M, 0.0), axis=0), axis=1)
        lane = tl.arange(0, N)
        return invert(M, lane < n, lane < 0, whole, n, N, C)
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return 1 / (1 + curve), yes()


@jit
def _solve(P, M, curve, z, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """(P + D)⁻¹ z, with the inverse M, refined."""
    if DENSE:
        x = -product(M, z.to(M.dtype), N, C).to(tl.float64)
        for _ in range(1 if N <= 64 else 4):
            r = z - product(again(P, dot(x, x)), x, N, C) - curve * x
            x -= product(M, r.to(M.dtype), N, C).to(tl.float64)
        return x
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return M * z


@jit
def _size(weight, x):
    """‖Wx‖."""
    return tl.sqrt(tl.sum((weight * x) * (weight * x)))


def _search(
    P, q, weight, radius,  # the weight is a number, (n,) or (·, n), the radius (·)
    start, A, rhs, x_out, values, codes,
    state,  # (B, 2n + 2): x, nothing, the multiplier
    left,
    p_batch, p_row, p_column, q_batch, q_column, weight_batch, weight_column, radius_batch,
    start_batch, start_column, a_batch, rhs_batch, n, m, batch, tol, most,
    DENSE: tl.constexpr, EPS: tl.constexpr, MAX: tl.constexpr, LARGEST: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    b, lane, cell = ends.own_lanes(n, N)
    blank = tl.zeros((N,), tl.float64)
    linear = entries(q, b, q_batch, q_column, lane, cell, 0.0, state)
    z, usable = ends.started(start, b, start_batch, start_column, lane, cell, state, N)
    w, t = ends.ball_of(
        weight, radius, b, weight_batch, weight_column, radius_batch, lane, cell, 0.0, x_out
    )
    w = tl.abs(w)
    sound = (tl.abs(linear) < LARGEST) & (tl.abs(z) < LARGEST) & (w < LARGEST)
    sound = sound & ((w > 1 / LARGEST) | (lane >= n))
    fit = usable & (t > 1 / LARGEST) & (t < LARGEST) & (count(sound == 0) == 0)
    limit, matrix, steep = number(1.0, blank), blank, number(1.0, blank)
    if DENSE:
        matrix = matrix_of(P + b * p_batch, p_row, p_column, n, N, C)
        regular, limit, diagonal = ends.sane(matrix, n, EPS, LARGEST, N, C)
        fit = fit & regular
        steep = tl.max(tl.where(cell, diagonal / tl.where(cell, w * w, 1.0), 0.0))

    # the λ for which a start on the boundary would be the solution
    at = number(0.0, blank)
    if start is not None:
        slope = times(matrix, z, DENSE, N, C)
        across_ = tl.sum((w * z) * (w * z))
        at = tl.maximum(-dot(slope + linear, z) / tl.where(across_ > 0, across_, 1.0), 0.0)
        at = tl.where(_size(w, z) > t * NEAR, at, 0.0)
    warm = at > 0
    x, trial = blank, 0
    going = fit
    code = tl.where(fit, ends.LOST, ends.UNFIT)
    while going:
        curve = at * w * w
        M, good = _inverse_of(matrix, curve, n, DENSE, N, C)
        trial += 1
        going = trial < MOST
        new = steep * FAINT  # P alone is singular: begin with a λ that is next to nothing
        if good:
            x = _solve(matrix, M, curve, -linear, DENSE, N, C)
            size = _size(w, x)
            pull = w * w * x
            fall = dot(_solve(matrix, M, curve, pull, DENSE, N, C), pull)
            inside = (at == 0) & (size < t * (1 - ends.CLEAR * ends.NOISE))
            unclear = (at == 0) & (inside == 0) & (size < t * (1 + ends.CLEAR * ends.NOISE))
            passed = (size < t * (1 - ends.CLEAR * ends.DOUBLE)) & (warm == 0) & (at > 0)
            new = at + (size / fall) * size * ((size - t) / t)
            met = tl.abs(size - t) <= t * (4 * ends.DOUBLE)
            met = (met | (tl.abs(new - at) <= at * (2 * ends.DOUBLE))) & (at > 0)
            found = inside | met
            code = tl.where(found, ends.SOLVED, tl.where(unclear, ends.DOUBTED, code))
            back = (new > 0) == 0
            going = going & ((found | unclear | passed | (back & (warm == 0))) == 0)
            warm = warm & (back == 0)  # the start was no good one
            new = tl.where(back, 0.0, new)
            at = tl.where(going, new, at)
        else:
            going = going & (at == 0)
            at = tl.where(going, new, at)
    # a force that is one
    noise = (tl.max(tl.abs(linear)) + limit * tl.max(tl.abs(x))) * ends.NOISE
    force = tl.max(at * w * w * tl.abs(x))
    code = tl.where(
        (code == ends.SOLVED) & (at > 0) & ((force > noise * ends.CLEAR) == 0), ends.DOUBTED, code
    )
    code = tl.where((code == ends.SOLVED) & (trial > most), ends.LOST, code)
    value, gap = number(0.0, blank), number(0.0, blank)
    if code == ends.SOLVED:
        size = _size(w, x)
        shrink = tl.where((at > 0) | (size > t), t / size, 1.0)
        x = rounded(x * shrink, x_out)
        for nudge in range(1, 4):
            size = _size(w, x)
            if size > t:
                x = rounded(x * (t / size * (1 - nudge * EPS)), x_out)
        settled = _size(w, x) <= t
        bent = times(matrix, x, DENSE, N, C)
        value, g = ends.valued(A, rhs, b, a_batch, rhs_batch, x, bent, linear, n, m, N)
        # ⟨g, x⟩ + t ‖W⁻¹g‖
        pull = g / tl.where(cell, w, 1.0)
        gap = tl.maximum(dot(g, x) + t * tl.sqrt(dot(pull, pull)), 0.0)
        gap += tl.sum(tl.abs(g * x)) * (2 * ends.DOUBLE)
        code = ends.verdict(settled, value, gap, tol, MAX)
    ends.solved_at(x_out, state, b, x, code, n, 2 * n + 2, lane, cell)
    tl.store(state + b * (2 * n + 2) + 2 * n, tl.where(code == ends.SOLVED, at, 0.0))
    ends.told(values, codes, left, b, batch, value, gap, code, trial, EPS)


def _adjoint(
    P, weight, radius, codes,
    state,  # (B, 2n + 2)
    v_in,
    u_out,  # (B, n)
    to_matrix, to_vector, to_weight, to_radius,
    p_batch, p_row, p_column, weight_batch, weight_column, radius_batch, v_batch, v_column, n,
    DENSE: tl.constexpr, MAX: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(P + λW²) u + νa = v and ⟨a, u⟩ = 0 with a = W²x/t, where that holds x."""
    b, lane, cell = ends.own_lanes(n, N)
    v, x, spoil = ends.arriving(v_in, state, b, v_batch, v_column, n, lane, cell)
    multiplier = tl.load(state + b * (2 * n + 2) + 2 * n)
    signed, t = ends.ball_of(
        weight, radius, b, weight_batch, weight_column, radius_batch, lane, cell, 0.0, v_in
    )
    w = tl.abs(signed)
    u, nu = tl.zeros((N,), tl.float64), number(0.0, x)
    if ends.arrived(codes, b, v, N):
        matrix = u
        if DENSE:
            matrix = matrix_of(P + b * p_batch, p_row, p_column, n, N, C)
        curve = multiplier * w * w
        M, sound = _inverse_of(matrix, curve, n, DENSE, N, C)
        u = _solve(matrix, M, curve, v, DENSE, N, C)
        if multiplier > 0:
            normal = w * w * x / t
            own = _solve(matrix, M, curve, normal, DENSE, N, C)
            nu = dot(normal, u) / dot(normal, own)
            u -= nu * own
        u, nu = ends.within_range(u, nu, x, sound, MAX)
    ends.moved(u_out, to_matrix, to_vector, b, u, x, n, cell, spoil, N)
    if to_weight is not None:
        # of λW²x, which has no other part along u, and of ‖Wx‖ − t
        pull = 2 * multiplier * u + nu * x / t
        stored(to_weight, b * n + lane, -signed * x * pull, cell, spoil)
    if to_radius is not None:
        stored(to_radius, b, nu, b >= 0, spoil)


search, adjoint = entry(_search), entry(_adjoint)
