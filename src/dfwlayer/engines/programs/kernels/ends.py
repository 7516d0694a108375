"""The two ends of every Triton program: what is read and checked, and what is written.

A search begins with ``P`` (·, n, n), ``q`` (·, n) and what describes the set, each with a stride
for problems (0 for what is shared) and one for each of its dimensions; then come

    start                 (·, n) or none
    A, rhs                (·, m, n) and (·, m), with P = AᵀA and q = −Aᵀb, or none
    x_out                 (B, n), and what follows is where results go, too
    values                (2, B): f and the gap
    codes                 (2, B): what became of a problem, and steps
    state                 (B, ·): x, and what the adjoint needs beside it
    left                  (1,), to which one is added for each problem that is left to others

An adjoint reads ``codes``, ``state`` and the gradient ``v_in`` (B, n) that arrives, and writes u
and what follows from it, none for what nobody asks for.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants, outcome
from dfwlayer.engines.programs.kernels.blocks import (
    count,
    dot,
    entries,
    jit,
    row_sizes,
    squares,
    stored,
    symmetry_of,
    yes,
)

__all__ = [
    "CLEAR",
    "DOUBLE",
    "DOUBTED",
    "LOST",
    "NOISE",
    "SOLVED",
    "UNFIT",
    "UNPROVEN",
    "arrived",
    "arriving",
    "ball_of",
    "moved",
    "own_lanes",
    "sane",
    "solved_at",
    "started",
    "told",
    "valued",
    "verdict",
    "within_range",
]

# what became of a problem
SOLVED, UNFIT = tl.constexpr(outcome.SOLVED), tl.constexpr(outcome.UNFIT)
LOST, DOUBTED = tl.constexpr(outcome.LOST), tl.constexpr(outcome.DOUBTED)
UNSETTLED, UNPROVEN = tl.constexpr(outcome.UNSETTLED), tl.constexpr(outcome.UNPROVEN)
SKEW = tl.constexpr(constants.SKEW)
# rounding in float64, how many times it a number has to be to count as more, and that of sums
DOUBLE, CLEAR = tl.constexpr(constants.DOUBLE), tl.constexpr(constants.CLEAR)
NOISE = tl.constexpr(constants.ROUNDING * constants.DOUBLE)


@jit
def own_lanes(n, N: tl.constexpr):
    """The number of this program's problem, its lanes, and which of them are coordinates."""
    lane = tl.arange(0, N)
    return tl.program_id(0).to(tl.int64), lane, lane < n


@jit
def started(start, b, batch, column, lane, cell, like, N: tl.constexpr):
    """A start, zero where it is none or not finite, and whether it may be used.

    It is the last solution of a problem that was bad then; one start for all has to be a point.
    """
    if start is None:
        return tl.zeros((N,), like.dtype.element_ty), yes()
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        z = entries(start, b, batch, column, lane, cell, 0.0, like)
        finite = count((z - z) == 0) == N
        return tl.where(finite, z, 0.0), finite | (batch != 0)


@jit
def ball_of(weight, radius, b, batch, column, radius_batch, lane, cell, other, like):
    """The weights and the radius of a ball, of either sign, as numbers of a dtype in float64."""
    w = entries(weight, b, batch, column, lane, cell, other, like).to(tl.float64)
    t = tl.load(radius + b * radius_batch).to(like.dtype.element_ty)
    return w, t.to(tl.float64)


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
def valued(A, rhs, b, a_batch, rhs_batch, x, bent, linear, n, m, N: tl.constexpr):
    """f and ∇f, from Ax − b where there is an A, otherwise from ``bent`` = Px."""
    if A is not None:
        return squares(A + b * a_batch, rhs + b * rhs_batch, x, n, m, N)
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return dot(x, 0.5 * bent + linear), bent + linear


@jit
def verdict(settled, value, gap, tol, MAX: tl.constexpr):
    """What became of a problem at whose solution f and the gap are these."""
    proven = (gap <= tol * tl.maximum(tl.abs(value), 1e-300)) & (tl.abs(value) < MAX)
    return tl.where(settled, tl.where(proven, SOLVED, UNPROVEN), UNSETTLED)


@jit
def solved_at(x_out, state, b, x, code, n, width, lane, cell):
    """Write a solution, or zeros for none, and once more first among its ``width`` numbers.

    Those are kept, as the other one may be changed.
    """
    x = tl.where(code == SOLVED, x, 0.0)
    stored(x_out, b * n + lane, x, cell)
    tl.store(state + b * width + lane, x, mask=cell)


@jit
def told(values, codes, left, b, batch, value, gap, code, steps, EPS: tl.constexpr):
    """Write what became of a problem, its value, gap and steps."""
    if code != SOLVED:
        tl.atomic_add(left, 1)
    tl.store(codes + b, code)
    tl.store(codes + batch + b, steps)
    tl.store(values + b, value)
    # rounded up, so that it still bounds f(x) − f* in the dtype of the result
    tl.store(values + batch + b, gap * (1 + EPS) + 1e-45)


@jit
def arrived(codes, b, v, N: tl.constexpr):
    """Whether there are a solution and a gradient in it that is finite."""
    return (tl.load(codes + b) == SOLVED) & (count((v - v) == 0) == N)


@jit
def arriving(v_in, state, b, batch, column, n, lane, cell):
    """The gradient that arrives, the solution, and NaN or 0 to be added to what goes on."""
    v = entries(v_in, b, batch, column, lane, cell, 0.0, state)
    x = tl.load(state + b * (2 * n + 2) + lane, mask=cell, other=0.0)
    return v, x, tl.sum(v - v)


@jit
def within_range(u, nu, x, sound, MAX: tl.constexpr):
    """u and ν, or zeros: beyond the dtype's range there is no gradient to give.

    The other problems keep theirs.
    """
    size = tl.max(tl.abs(u)) * tl.maximum(tl.max(tl.abs(x)), 1.0)
    sound = sound & (size < MAX)
    return tl.where(sound, u, 0.0), tl.where(sound, nu, 0.0)


@jit
def moved(u_out, to_matrix, to_vector, b, u, x, n, cell, spoil, N: tl.constexpr):
    """Write u, and the gradients −(uxᵀ + xuᵀ)/2 in P and −u in q that follow, where asked for."""
    at = b * n + tl.arange(0, N)
    if u_out is not None:
        stored(u_out, at, u, cell, spoil)
    if to_vector is not None:
        stored(to_vector, at, -u, cell, spoil)
    if to_matrix is not None:
        # in the dtype of the gradient; a block that is written row by row, by neighbouring threads
        kind = to_matrix.dtype.element_ty
        u, x = u.to(kind), x.to(kind)
        row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        outer = u[:, None] * x[None, :] + x[:, None] * u[None, :]
        own = (row < n) & (column < n)
        stored(to_matrix, b * n * n + row * n + column, -0.5 * outer, own, spoil.to(kind))
