"""The gradient of a solution over a polyhedron, in one Triton program."""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.programs.kernels import ends, tableau
from dfwlayer.engines.programs.kernels.blocks import (
    across,
    count,
    entries,
    entry,
    largest,
    outer_index,
    product,
    stored,
    symmetry_of,
)

__all__ = ["adjoint"]


def _adjoint(
    P, E, G, lower, upper, codes,
    state,  # (B, 2n + k + g + 1)
    v_in,
    u_out,  # (B, n + k + g)
    to_matrix, to_vector,
    to_rows, to_sides,  # (B, g, n) and (B, g), of G and h
    to_equations, to_totals,  # (B, k, n) and (B, k), of E and e
    to_lower, to_upper,
    p_batch, p_row, p_column, E_batch, E_row, E_column, G_batch, G_row, G_column,
    lower_batch, lower_column, upper_batch, upper_column, v_batch, v_column, n, k, g,
    DENSE: tl.constexpr, MAX: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """P u + Σ ν_j n_j = v and ⟨n_j, u⟩ = 0 for what holds x, and the gradients that follow.

    They are those of −⟨u, Σ λ_j n_j⟩ − Σ ν_j (⟨n_j, x⟩ − c_j), and x_i moves with its bound.
    """
    infinite = float("inf")
    ties = k + g
    b, lane, coordinate = ends.own_lanes(n, N)
    cell, row, equation = tableau.own_rows(lane, n, k, g)
    state += b * (2 * n + ties + 1)
    v = entries(v_in, b, v_batch, v_column, lane, coordinate, 0.0, state)
    z = tl.load(state + lane, mask=cell, other=0.0)
    bound = tl.load(state + n + ties + lane, mask=coordinate, other=0.0)
    stiff = tl.load(state + 2 * n + ties).to(tl.int32) != 0
    low = entries(lower, b, lower_batch, lower_column, lane, coordinate, -infinite, v_in)
    high = entries(upper, b, upper_batch, upper_column, lane, coordinate, infinite, v_in)
    fixed = coordinate & (low == high)
    free = coordinate & (bound == 0) & (fixed == 0)
    wanted = equation | (row & (z != 0))
    good = ends.arrived(codes, b, v, N)
    blank = tl.zeros((N,), tl.float64)
    w, rest = blank, blank
    scratch = u_out + b * (n + ties)
    if DENSE:
        P += b * p_batch
    if E is not None:
        E += b * E_batch
    if G is not None:
        G += b * G_batch
    if good:
        M = tableau.system_of(
            P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g, DENSE, N, C
        )
        _skew, diagonal = symmetry_of(M, N, C)
        weight = tableau.largest_of(M)
        shift = tl.where(stiff, tl.where(fixed, tl.max(diagonal), 0.0), 0.0)
        some = tl.where(stiff, k, 0)
        M = tableau.stiffened(M, E, E_row, E_column, tl.max(diagonal), shift, n, some, N, C)
        M, good = tableau.inverted(M, free, n, N, C)
        M, swept, depends = tableau.tie(
            M, wanted, tableau.lengths_of(M, N, C), free, n + ties, N, C
        )
        rest = v
        for _turn in range(3):  # after the first one for the rounding of the last
            w -= tl.where(swept, product(M, tl.where(swept, rest, 0.0), N, C), 0.0)
            lead, pull, _bulk = tableau.products(
                P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g,
                scratch, w, w, DENSE, N,
            )  # fmt: skip
            rest = v - lead - pull
        if count(depends) > 0:
            w = tableau.shared(M, w, weight, row & swept, depends, N, C)
            lead, pull, _bulk = tableau.products(
                P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g,
                scratch, w, w, DENSE, N,
            )  # fmt: skip
            rest = v - lead - pull
        # beyond the dtype's range there is no gradient to give; the other problems keep theirs
        size, reach, _ = largest(tl.abs(w), tl.abs(z), blank)
        good = good & (size * tl.maximum(reach, 1.0) < MAX)
        w = tl.where(good, w, 0.0)
        rest = tl.where(good, tl.where(coordinate & (free == 0), rest, 0.0), 0.0)
    tl.debug_barrier()
    spoil = tl.sum(v - v)
    tl.store(scratch + lane, w + spoil, mask=cell)
    if to_vector is not None:
        stored(to_vector, b * n + lane, -w, coordinate, spoil)
    if to_sides is not None:
        stored(to_sides, b * g + lane - n - k, w, row & (equation == 0), spoil)
    if to_totals is not None:
        stored(to_totals, b * k + lane - n, w, equation, spoil)
    if to_lower is not None:
        stored(to_lower, b * n + lane, tl.where(bound < 0, rest, 0.0), coordinate, spoil)
    if to_upper is not None:
        stored(to_upper, b * n + lane, tl.where(bound < 0, 0.0, rest), coordinate, spoil)
    if (to_matrix is not None) | (to_rows is not None) | (to_equations is not None):
        i, j = outer_index(N, C)
        outer = w[None, :, None] * across(z, N, C) + z[None, :, None] * across(w, N, C)
        if to_matrix is not None:
            stored(to_matrix, b * n * n + i * n + j, -0.5 * outer, (i < n) & (j < n), spoil)
        if to_rows is not None:
            mine = (i >= n + k) & (i < n + ties) & (j < n)
            stored(to_rows, (b * g + i - n - k) * n + j, -outer, mine, spoil)
        if to_equations is not None:
            mine = (i >= n) & (i < n + k) & (j < n)
            stored(to_equations, (b * k + i - n) * n + j, -outer, mine, spoil)


adjoint = entry(_adjoint)
