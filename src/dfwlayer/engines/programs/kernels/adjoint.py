"""The gradient of a solution on a face of a set in normal form, in one Triton program."""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.programs.kernels import ends
from dfwlayer.engines.programs.kernels.blocks import (
    again,
    entries,
    entry,
    largest,
    matrix_of,
    number,
    outer_index,
    product,
    recalled,
    stored,
    sums,
    times,
    yes,
)
from dfwlayer.engines.programs.kernels.faces import inverse, invert, tie, tied
from dfwlayer.engines.programs.kernels.projection import (
    BUDGET,
    FREE,
    HIGH,
    LOW,
    NOTHING,
    slope_of,
)

__all__ = ["adjoint"]


def _adjoint(
    P, slope, normal, codes,
    state,  # (B, 2n + 2)
    factor,  # (B, N, N), what the search has kept of the inverse, or none
    v_in,
    u_out,  # (B, n)
    to_matrix, to_vector, to_lower, to_upper, to_slope, to_total, to_normal, to_level,
    p_batch, p_row, p_column, slope_batch, slope_column, normal_batch, normal_column,
    v_batch, v_column, n,
    KIND: tl.constexpr, CUT: tl.constexpr,
    DENSE: tl.constexpr, MAX: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """P u + Σ ν_j a_j = v and ⟨a_j, u⟩ = 0 on the face, and the gradients that follow."""
    b, lane, cell = ends.own_lanes(n, N)
    at = b * n + lane
    v, x, spoil = ends.arriving(v_in, state, b, v_batch, v_column, n, lane, cell)
    state += b * (2 * n + 2)
    places = tl.load(state + n + lane, mask=cell, other=LOW).to(tl.int32)
    first, second = tl.load(state + 2 * n), tl.load(state + 2 * n + 1)
    answered = ends.arrived(codes, b, v, N)
    zero = number(0.0, x)
    blank = tl.zeros((N,), tl.float64)
    u, rest, signed, c, nu, mu = blank, blank, blank, blank, zero, zero
    if KIND != NOTHING:
        signed = entries(slope, b, slope_batch, slope_column, lane, cell, 0.0, state)
        # as the search has read it
        signed = signed.to(v_in.dtype.element_ty).to(tl.float64)
    if CUT:
        c = entries(normal, b, normal_batch, normal_column, lane, cell, 0.0, state)
    if answered:
        a = tl.abs(signed) if KIND == BUDGET else signed
        free = (places == FREE) & cell
        M, matrix, sound = blank, blank, yes()
        if DENSE:
            if factor is not None:
                M = recalled(factor, b, N, C)
            else:
                matrix = matrix_of(P + b * p_batch, p_row, p_column, n, N, C)
                M = matrix.to(tl.float64 if N <= 64 else tl.float32)
                row, column = outer_index(N, C)
                diagonal = tl.sum(tl.sum(tl.where(row == column, matrix, 0.0), axis=0), axis=1)
                M, sound = invert(M, free, lane < 0, diagonal, n, N, C)
        own, other, tied_to, also, one, both, two, tight = tie(
            M, free, a, c, x, first, KIND, CUT, DENSE, N, C
        )
        rest = v
        left = 8 if DENSE and N > 64 else 1
        while left > 0:  # after the first one for the rounding of the last
            z = inverse(M, rest, free, DENSE, N, C)
            short, lack = zero, zero
            if N > 64 and KIND != NOTHING:
                short, lack, _ = sums(own * u, other * u, blank)
            more, by, along = tied(
                z, -short, -lack, own, other, tied_to, also, one, both, two, KIND, CUT
            )
            u += more
            nu += by
            mu += along
            if DENSE and factor is not None:  # there is no room for both of them in registers
                bent = product(matrix_of(P + b * p_batch, p_row, p_column, n, N, C), u, N, C)
            else:
                bent = times(again(matrix, nu), u, DENSE, N, C)
            rest = v - bent - nu * own - mu * other
            left -= 1
            if DENSE and N > 64:
                moves, size, _ = largest(tl.abs(more), tl.abs(u), blank)
                left = tl.where(moves > size * 1e-12, left, 0)
        # beyond the dtype's range there is no gradient to give; the other problems keep theirs
        size, reach, _ = largest(tl.abs(u), tl.abs(x), blank)
        size *= tl.maximum(reach, 1.0)
        good = sound & tight & (size < MAX)
        u = tl.where(good, u, 0.0)
        nu, mu = tl.where(good, nu, 0.0), tl.where(good, mu, 0.0)
        if KIND == BUDGET:
            nu = tl.where(first > 0, nu, 0.0)
        # what is left is told by the bounds, whose normals the rows meet as well
        if KIND != NOTHING:
            rest -= nu * (slope_of(a, x, KIND) - own)
        if CUT:
            rest -= mu * (c - other)
        rest = tl.where(good, rest, 0.0)
    ends.moved(u_out, to_matrix, to_vector, b, u, x, n, cell, spoil, N)
    if to_lower is not None:
        stored(to_lower, at, tl.where(places == LOW, rest, 0.0), cell, spoil)
    if to_upper is not None:
        stored(to_upper, at, tl.where(places == HIGH, rest, 0.0), cell, spoil)
    if to_slope is not None:
        pull = -(first * u + nu * x)
        if KIND == BUDGET:
            pull = pull * slope_of(
                tl.where(signed > 0, 1.0, tl.where(signed < 0, -1.0, 0.0)), x, KIND
            )
        stored(to_slope, at, pull, cell, spoil)
    if to_normal is not None:
        stored(to_normal, at, -(second * u + mu * x), cell, spoil)
    if to_total is not None:
        stored(to_total, b, nu, b >= 0, spoil)
    if to_level is not None:
        stored(to_level, b, mu, b >= 0, spoil)


adjoint = entry(_adjoint)
