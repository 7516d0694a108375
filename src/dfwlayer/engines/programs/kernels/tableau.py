"""The optimality conditions of a quadratic problem over rows and bounds, as one symmetric tableau.

With the rows N of a set {x : l ≤ x ≤ u, N x ≤ c or = c} the conditions are linear in z = (x, λ),

    K z = (P  Nᵀ) (x) = (−q)
          (N  0 ) (λ)   ( c)

for the coordinates that are free and the rows that are held. Lanes are coordinates first, then
equations, then inequalities. Pivots keep −K_SS⁻¹ for these S, and beside it what a step of any
other lane does to all of them (see `pivoted` in `blocks`): a row is held by a pivot, and so is a
coordinate let go. Bounds take no rows.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.programs.kernels.blocks import (
    across,
    column_of,
    count,
    dot,
    has,
    jit,
    outer_index,
    pivoted,
    product,
    sums,
    words,
)
from dfwlayer.engines.programs.kernels.faces import invert

__all__ = [
    "DEPENDENT",
    "inverted",
    "largest_of",
    "lengths_of",
    "own_rows",
    "products",
    "shared",
    "stiffened",
    "system_of",
    "tie",
]

# what is left of the square of a row beside others that it depends on, against the whole of it
DEPENDENT = tl.constexpr(1e-11)


@jit
def own_rows(lane, n, k, g):
    """Which lanes are coordinates or rows, which of them rows, and which of these equations."""
    cell = lane < n + k + g
    row = (lane >= n) & cell
    return cell, row, row & (lane < n + k)


@jit
def _entries(
    P, p_row, p_column, E, e_row, e_column, G, g_row, g_column, n, k, g, row, column,
    DENSE: tl.constexpr,
):  # fmt: skip
    """K in these places, with zeros in lanes that are none."""
    both = (row < n) & (column < n)
    if DENSE:
        K = tl.load(P + row * p_row + column * p_column, mask=both, other=0.0).to(tl.float64)
    else:
        K = tl.where(both & (row == column), 1.0, 0.0).to(tl.float64)
    lane, at = tl.maximum(row, column) - n, tl.minimum(row, column)
    crossing = (lane >= 0) & (at < n)
    if E is not None:
        own = crossing & (lane < k)
        K += tl.load(E + lane * e_row + at * e_column, mask=own, other=0.0).to(tl.float64)
    if G is not None:
        own, lane = crossing & (lane >= k) & (lane < k + g), lane - k
        K += tl.load(G + lane * g_row + at * g_column, mask=own, other=0.0).to(tl.float64)
    return K


@jit
def system_of(
    P, p_row, p_column, E, e_row, e_column, G, g_row, g_column, n, k, g,
    DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """K as it is in memory."""
    row, column = outer_index(N, C)
    return _entries(
        P, p_row, p_column, E, e_row, e_column, G, g_row, g_column, n, k, g, row, column, DENSE
    )


@jit
def products(
    P, p_row, p_column, E, e_row, e_column, G, g_row, g_column, n, k, g, scratch, x, force,
    DENSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """K (x, 0), K (0, λ) and |K| |(x, 0)|, some columns at a time.

    The registers are needed for the tableau, so K is read from memory again. What it is to be
    multiplied with is read likewise, from ``scratch``, where there is room for n + k + g numbers.
    """
    A: tl.constexpr = 4  # threads for a row, each with S columns at a time
    S: tl.constexpr = 8
    lane = tl.arange(0, N)
    row = tl.arange(0, N)[None, :, None]
    tl.debug_barrier()
    tl.store(scratch + lane, tl.where(lane < n, x, force), mask=lane < n + k + g)
    tl.debug_barrier()
    lead = tl.zeros((A, N), tl.float64)
    pull, bulk = lead, lead
    for first in range(0, n + k + g, A * S):
        column = first + tl.arange(0, A)[:, None, None] * S + tl.arange(0, S)[None, None, :]
        z = tl.load(scratch + column, mask=column < n + k + g, other=0.0)
        K = _entries(
            P, p_row, p_column, E, e_row, e_column, G, g_row, g_column, n, k, g, row, column, DENSE
        )
        lead += tl.sum(tl.where(column < n, K * z, 0.0), axis=2)
        pull += tl.sum(tl.where(column < n, 0.0, K * z), axis=2)
        bulk += tl.sum(tl.where(column < n, tl.abs(K * z), 0.0), axis=2)
    return tl.sum(lead, axis=0), tl.sum(pull, axis=0), tl.sum(bulk, axis=0)


@jit
def largest_of(K):
    """The largest entry of each row."""
    return tl.max(tl.max(tl.abs(K), axis=2), axis=0)


@jit
def _diagonal(M, N: tl.constexpr, C: tl.constexpr):
    row, column = outer_index(N, C)
    return tl.sum(tl.sum(tl.where(row == column, M, 0.0), axis=2), axis=0)


@jit
def stiffened(M, E, e_row, e_column, stiff, shift, n, k, N: tl.constexpr, C: tl.constexpr):
    """K with P + D + σ Σ n_jn_jᵀ/|n_j|² over k equations, for a diagonal D."""
    lane = tl.arange(0, N)
    row, column = outer_index(N, C)
    M += tl.where(row == column, shift[None, :, None], 0.0)
    if E is not None:
        for j in range(k):
            normal = tl.load(E + j * e_row + lane * e_column, mask=lane < n, other=0.0)
            normal = normal.to(tl.float64)
            square = dot(normal, normal)
            part = normal * (stiff / tl.where(square > 0, square, 1.0))
            M = tl.fma(part[None, :, None], across(normal, N, C), M)
    return M


@jit
def inverted(K, free, n, N: tl.constexpr, C: tl.constexpr):
    """Pivot on the free coordinates, and whether P bends up on them."""
    return invert(K, free, free & (free == 0), _diagonal(K, N, C), n, N, C)


@jit
def lengths_of(M, N: tl.constexpr, C: tl.constexpr):
    """|L⁻¹n_j| of rows and coordinates once all coordinates are inverted, 1 for rows of zeros."""
    square = -_diagonal(M, N, C)
    return tl.sqrt(tl.where(square > 0, square, 1.0))


@jit
def tie(M, wanted, lengths, swept, end, N: tl.constexpr, C: tl.constexpr):
    """Let coordinates go that are wanted no longer, then hold rows, but for what others imply.

    Returns the tableau, which lanes are inverted, and the rows that depend on others.
    """
    lane = tl.arange(0, N)
    depends = lane < 0
    early, late, _, _ = words(wanted, depends, N)
    for i in range(end):
        if has(early, late, i):
            own = column_of(M, i, N, C)
            pivot, length, inside = sums(
                tl.where(lane == i, own, 0.0),
                tl.where(lane == i, lengths, 0.0),
                tl.where((lane == i) & swept, 1.0, 0.0).to(tl.float64),
            )
            if -pivot > length * length * DEPENDENT:
                M = pivoted(M, own, i, pivot, tl.where(inside > 0, -1.0, 1.0), N, C)
                swept = swept ^ (lane == i)
            else:
                depends = depends | (lane == i)
    return M, swept, depends


@jit
def shared(M, values, weight, ties, depends, N: tl.constexpr, C: tl.constexpr):
    """Among rows that depend on others, what these carry: the values of least norm.

    The values of the rows that are held become those with the same Σ v_j n_j for which the sum of
    (w_j v_j)² is least. With B the columns of the dependent rows in terms of those that are held,
    the part ρ = y/w of the former minimises |w(v − B ρ)|² + |y|², by conjugate gradients.
    """
    some = count(depends)
    if some > 0:
        here = tl.where(ties, weight, 0.0)
        unit = tl.where(depends, 1 / tl.where(weight > 0, weight, 1.0), 0.0)
        rest = tl.where(depends, unit * product(M, here * here * values, N, C), 0.0)
        y, way, size = tl.zeros_like(values), rest, dot(rest, rest)
        enough = size * 1e-30
        left = 2 * some + 2
        while (left > 0) & (size > enough):
            along = tl.where(ties, product(M, unit * way, N, C), 0.0)
            bend = way + tl.where(depends, unit * product(M, here * here * along, N, C), 0.0)
            step = size / dot(way, bend)
            y += step * way
            rest -= step * bend
            new = dot(rest, rest)
            way = rest + (new / size) * way
            size = new
            left -= 1
        part = unit * y
        values -= tl.where(ties, product(M, part, N, C), 0.0)
        values = tl.where(depends, part, values)
    return values
