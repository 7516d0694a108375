"""Vectors, matrices and inverses of one problem, in the registers of one Triton program.

A matrix with N rows is a block (N / C, N, C): row i and column j = C a + c are at (a, i, c). Triton
spreads the last dimension over neighbouring threads, then rows over the rest of them, and leaves
the first dimension to a thread of its own. So a sum over columns is one in registers but for log₂ C
shuffles, which a block (N, N) would need five of for every row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants

__all__ = [
    "RUNTIME",
    "across",
    "count",
    "dot",
    "entries",
    "exact_sum",
    "flip",
    "jit",
    "loaded",
    "number",
    "outer_index",
    "product",
    "rounded",
    "stored",
    "stored_product",
    "sums",
    "symmetric_matrix",
    "symmetry_of",
    "yes",
]

# other values of these shall not compile a kernel anew
RUNTIME = ["n", "m", "batch", "most", "tol", "p_row"]
RUNTIME += [f"{name}_batch" for name in ("p", "q", "v", "a", "rhs", "start", "total", "level")]
RUNTIME += [f"{name}_batch" for name in ("lower", "upper", "slope", "normal")]
RUNTIME += [f"{name}_column" for name in ("p", "q", "v", "start")]
RUNTIME += [f"{name}_column" for name in ("lower", "upper", "slope", "normal")]

_SKEW = tl.constexpr(constants.SKEW)


def jit(function: Any) -> Any:
    """A part of a kernel."""
    return triton.jit(function)


@jit
def number(value):
    """A constant in float64."""
    return tl.full((), value, tl.float64)


@jit
def yes():
    """True, where it may become False."""
    return tl.full((), 1, tl.int1)


@jit
def loaded(pointer, at, cell, other):
    """Entries in float64."""
    return tl.load(pointer + at, mask=cell, other=other).to(tl.float64)


@jit
def entries(pointer, b, row, column, lane, cell, other):
    """What problem b has of a vector, shared or its own, or of one number for all coordinates."""
    return loaded(pointer, b * row + lane * column, cell, other)


@jit
def stored(pointer, at, value, cell):
    """Write numbers in the dtype they are kept in; one that it cannot hold is none."""
    narrow = value.to(pointer.dtype.element_ty)
    finite = (narrow - narrow) == 0
    tl.store(pointer + at, tl.where(finite, narrow, 0.0), mask=cell)


@jit
def rounded(x, pointer):
    """In the dtype of what a pointer points to."""
    return x.to(pointer.dtype.element_ty).to(tl.float64)


@jit
def count(mask):
    """How many lanes there are of a mask."""
    return tl.sum(mask.to(tl.int32))


@jit
def dot(a, b):
    """Σ a_i b_i."""
    return tl.sum(a * b)


@jit
def _add(a, b, c, d, e, f):
    return a + d, b + e, c + f


@jit
def sums(a, b, c):
    """Three sums at the price of one, where warps have to wait for each other."""
    return tl.reduce((a, b, c), 0, _add)


@jit
def _add_exactly(a, low, b, other):
    total = a + b
    part = total - a
    return total, (low + other) + ((a - (total - part)) + (b - part))


@jit
def exact_sum(a):
    """Σ a_i with the rounding of the sum carried along."""
    total, low = tl.reduce((a, tl.zeros_like(a)), 0, _add_exactly)
    return total + low


@jit
def outer_index(N: tl.constexpr, C: tl.constexpr):
    """Row and column of the entries of a matrix."""
    row = tl.arange(0, N)[None, :, None]
    column = tl.arange(0, N // C)[:, None, None] * C + tl.arange(0, C)[None, None, :]
    return row, column


@jit
def across(x, N: tl.constexpr, C: tl.constexpr):
    """A vector with one entry for each column."""
    return tl.reshape(x, (N // C, C))[:, None, :]


@jit
def product(M, x, N: tl.constexpr, C: tl.constexpr):
    """M x."""
    return tl.sum(tl.sum(M * across(x, N, C), axis=0), axis=1)


@jit
def matrix_of(P, row_stride, column_stride, n, N: tl.constexpr, C: tl.constexpr):
    """A matrix in memory."""
    row, column = outer_index(N, C)
    return loaded(P, row * row_stride + column * column_stride, (row < n) & (column < n), 0.0)


@jit
def _columns(P, row_stride, column_stride, n, first, N: tl.constexpr, C: tl.constexpr):
    """C columns of a matrix in memory, (N, C)."""
    row, column = tl.arange(0, N)[:, None], first + tl.arange(0, C)[None, :]
    return loaded(P, row * row_stride + column * column_stride, (row < n) & (column < n), 0.0)


@jit
def symmetry_of(P, row_stride, column_stride, n, eps, N: tl.constexpr, C: tl.constexpr):
    """Whether P is symmetric, whether it is so but for rounding, its diagonal, and Σ_j |P_ij|."""
    skew, diagonal = tl.zeros((N, C), tl.float64), tl.zeros((N, C), tl.float64)
    size = tl.zeros((N, C), tl.float64)
    row, column = tl.arange(0, N)[:, None], tl.arange(0, C)[None, :]
    for part in range(0, N // C):
        M = _columns(P, row_stride, column_stride, n, part * C, N, C)
        T = _columns(P, column_stride, row_stride, n, part * C, N, C)
        skew = tl.maximum(skew, tl.abs(M - T))
        size += tl.abs(M)
        diagonal += tl.where(row == column + part * C, M, 0.0)
    diagonal = tl.sum(diagonal, axis=1)
    skewed = tl.max(tl.max(skew, axis=1), axis=0)
    rounding = eps * tl.sqrt(n.to(tl.float64)) * tl.max(tl.abs(diagonal)) * _SKEW
    return skewed == 0, skewed <= rounding, diagonal, tl.sum(size, axis=1)


@jit
def symmetric_matrix(P, row_stride, column_stride, n, symmetric, N: tl.constexpr, C: tl.constexpr):
    """The symmetric part of P."""
    M = matrix_of(P, row_stride, column_stride, n, N, C)
    if symmetric == 0:
        M = 0.5 * (M + matrix_of(P, column_stride, row_stride, n, N, C))
    return M


@jit
def stored_product(P, row_stride, column_stride, n, symmetric, x, N: tl.constexpr, C: tl.constexpr):
    """The symmetric part of P times x, with P from memory."""
    y = product(matrix_of(P, row_stride, column_stride, n, N, C), x, N, C)
    if symmetric == 0:
        y = 0.5 * (y + product(matrix_of(P, column_stride, row_stride, n, N, C), x, N, C))
    return y


@jit
def flip(M, diagonal, k, sign, N: tl.constexpr, C: tl.constexpr):
    """Pivot on entry k: +1 adds it to the coordinates F that are inverted, −1 takes it out.

    With the others N, the matrix stands for

        (−P_FF⁻¹      P_FF⁻¹ P_FN              )
        (P_NF P_FF⁻¹  P_NN − P_NF P_FF⁻¹ P_FN  ),

    which Gauss and Jordan's sweeps keep symmetric. Returns the pivot, and P_kk, as well.
    """
    lane = tl.arange(0, N)
    row, column = outer_index(N, C)
    own = product(M, (lane == k).to(tl.float64), N, C)
    pivot, whole, _ = sums(
        tl.where(lane == k, own, 0.0), tl.where(lane == k, diagonal, 0.0), tl.zeros_like(own)
    )
    own = tl.where(lane == k, -sign, own)
    rest = tl.where((row == k) | (column == k), 0.0, M)
    return rest - (own / pivot)[None, :, None] * across(own, N, C), pivot, whole
