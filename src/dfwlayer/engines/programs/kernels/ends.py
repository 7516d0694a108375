"""The two ends of every Triton program: what is read and checked, and what is written."""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants, outcome
from dfwlayer.engines.programs.kernels.blocks import (
    across,
    count,
    entries,
    jit,
    outer_index,
    row_sizes,
    stored,
    symmetry_of,
)

__all__ = [
    "DOUBTED",
    "LOST",
    "SOLVED",
    "UNFIT",
    "arrived",
    "moved",
    "sane",
    "started",
    "told",
    "verdict",
]

# what became of a problem
SOLVED, UNFIT = tl.constexpr(outcome.SOLVED), tl.constexpr(outcome.UNFIT)
LOST, DOUBTED = tl.constexpr(outcome.LOST), tl.constexpr(outcome.DOUBTED)
UNSETTLED, UNPROVEN = tl.constexpr(outcome.UNSETTLED), tl.constexpr(outcome.UNPROVEN)
SKEW = tl.constexpr(constants.SKEW)


@jit
def started(start, b, batch, column, lane, cell, like, N: tl.constexpr):
    """A start, zero where it is not finite, and whether it may be used.

    It is the last solution of a problem that was bad then; one start for all has to be a point.
    """
    z = entries(start, b, batch, column, lane, cell, 0.0, like)
    finite = count((z - z) == 0) == N
    return tl.where(finite, z, 0.0), finite | (batch != 0)


@jit
def sane(P, n, EPS: tl.constexpr, LARGEST: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """Whether P is symmetric, of numbers within range; the largest Σ_j |P_ij|, and the diagonal."""
    skew, diagonal = symmetry_of(P, N, C)
    sizes = row_sizes(P)
    limit = tl.max(sizes)
    rounding = tl.sqrt(n.to(tl.float64)) * tl.max(tl.abs(diagonal)) * (SKEW * EPS)
    fit = (skew <= rounding) & (count(sizes < LARGEST) == N) & (limit > 1 / LARGEST)
    return fit, limit, diagonal


@jit
def verdict(settled, value, gap, tol, MAX: tl.constexpr):
    """What became of a problem at whose solution f and the gap are these."""
    proven = (gap <= tol * tl.maximum(tl.abs(value), 1e-300)) & (tl.abs(value) < MAX)
    return tl.where(settled, tl.where(proven, SOLVED, UNPROVEN), UNSETTLED)


@jit
def told(values, codes, left, b, batch, value, gap, code, steps, EPS: tl.constexpr):
    """Write what became of a problem, its value, gap and steps."""
    if code != SOLVED:
        tl.atomic_add(left, 1)
    tl.store(codes + b, code)
    tl.store(codes + batch + b, steps)
    tl.store(values + b, value)
    # a bound stays one
    tl.store(values + batch + b, gap * (1 + EPS) + 1e-45)


@jit
def arrived(codes, b, v, N: tl.constexpr):
    """Whether there are a solution and a gradient in it that is finite."""
    return (tl.load(codes + b) == SOLVED) & (count((v - v) == 0) == N)


@jit
def moved(u_out, to_matrix, to_vector, b, u, x, n, cell, spoil, N: tl.constexpr, C: tl.constexpr):
    """Write u, and the gradients −(uxᵀ + xuᵀ)/2 in P and −u in q that follow, where asked for."""
    at = b * n + tl.arange(0, N)
    if u_out is not None:
        stored(u_out, at, u, cell, spoil)
    if to_vector is not None:
        stored(to_vector, at, -u, cell, spoil)
    if to_matrix is not None:
        row, column = outer_index(N, C)
        outer = u[None, :, None] * across(x, N, C) + x[None, :, None] * across(u, N, C)
        own = (row < n) & (column < n)
        stored(to_matrix, b * n * n + row * n + column, -0.5 * outer, own, spoil)
