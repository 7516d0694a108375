"""Vectors, matrices and inverses of one problem, in the registers of one Triton program.

A matrix with N rows is a block (N / C, N, C): row i and column j = C a + c are at (a, i, c). What
is read from memory with strides that are not known when it is compiled is spread by Triton 3.6 over
neighbouring threads by the first dimension, then by rows, and the last dimension is left to a
thread of its own. So a sum over columns is one in registers but for log₂ N/C shuffles, which a
block (N, N) would need five of for every row.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "across",
    "again",
    "column_of",
    "count",
    "dot",
    "entries",
    "entry",
    "exact_sum",
    "flip",
    "has",
    "jit",
    "kept",
    "largest",
    "matrix_of",
    "number",
    "outer_index",
    "pivoted",
    "product",
    "recalled",
    "rounded",
    "row_sizes",
    "sign_of",
    "squares",
    "stored",
    "sums",
    "symmetry_of",
    "times",
    "words",
    "yes",
]


def jit(function: Any) -> Any:
    """A part of a kernel."""
    return triton.jit(function)


def entry(function: Any) -> Any:
    """A kernel, in which nothing of the arguments but their types is compiled."""
    about = signature(function).parameters.values()
    return triton.jit(
        function, do_not_specialize=[a.name for a in about if a.annotation is a.empty]
    )


@jit
def number(value, like):
    """A constant in the dtype of a block."""
    return tl.full((), value, like.dtype)


@jit
def yes():
    """True, where it may become False."""
    return tl.full((), 1, tl.int1)


@jit
def entries(pointer, b, row, column, lane, cell, other, like):
    """What problem b has of a vector, shared or its own, or of one number for all coordinates."""
    found = tl.load(pointer + b * row + lane * column, mask=cell, other=other)
    return found.to(like.dtype.element_ty)


@jit
def stored(pointer, at, value, cell, spoil=0.0):
    """Write numbers in the dtype they are kept in; one that it cannot hold is none.

    ``spoil`` is added, 0 or the NaN of a gradient that arrives, which goes on.
    """
    narrow = value.to(pointer.dtype.element_ty)
    finite = (narrow - narrow) == 0
    narrow = tl.where(finite, narrow, 0.0) + spoil
    tl.store(pointer + at, narrow.to(pointer.dtype.element_ty), mask=cell)


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
def _add_words(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@jit
def _four_sums(a, b, c, d):
    """Four of them."""
    return tl.reduce((a, b, c, d), 0, _add_words)


@jit
def words(one, two, N: tl.constexpr):
    """Two masks as bits, each of the first 64 lanes and of the others."""
    lane = tl.arange(0, N).to(tl.int64)
    bit = tl.full((N,), 1, tl.int64) << (lane & 63)
    one, two = tl.where(one, bit, 0), tl.where(two, bit, 0)
    early = lane < 64
    return _four_sums(
        tl.where(early, one, 0),
        tl.where(early, 0, one),
        tl.where(early, two, 0),
        tl.where(early, 0, two),
    )


@jit
def has(early, late, k):
    """Bit k of the two words."""
    return ((tl.where(k < 64, early, late) >> (k & 63)) & 1) != 0


@jit
def _most(a, b, c, d, e, f):
    return tl.maximum(a, d), tl.maximum(b, e), tl.maximum(c, f)


@jit
def largest(a, b, c):
    """Three maxima at the price of one."""
    return tl.reduce((a, b, c), 0, _most)


@jit
def _add_exactly(a, low, size, b, other, more):
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    return total, (low + other) + rest, tl.maximum(size, more)


@jit
def exact_sum(a):
    """Σ a_i with the rounding of the sum carried along, and the largest |a_i|."""
    total, low, size = tl.reduce((a, tl.zeros_like(a), tl.abs(a)), 0, _add_exactly)
    return total + low, size


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
    """M x, in the dtype of x."""
    return tl.sum(tl.sum(M.to(x.dtype) * across(x, N, C), axis=2), axis=0)


@jit
def matrix_of(P, row_stride, column_stride, n, N: tl.constexpr, C: tl.constexpr):
    """A matrix in memory, in its dtype."""
    row, column = outer_index(N, C)
    at = row * row_stride + column * column_stride
    return tl.load(P + at, mask=(row < n) & (column < n), other=0.0)


@jit
def _kept_at(N: tl.constexpr, C: tl.constexpr):
    """Where entries (a, i, c) of a matrix are kept: neighbouring threads write side by side."""
    row = tl.arange(0, N)[None, :, None]
    return tl.arange(0, N // C)[:, None, None] + (N // C) * (
        row + N * tl.arange(0, C)[None, None, :]
    )


@jit
def kept(pointer, M, b, N: tl.constexpr, C: tl.constexpr):
    """Write all lanes (N, N) of a matrix of problem b, for `recalled`."""
    tl.store(pointer + b * N * N + _kept_at(N, C), M)


@jit
def recalled(pointer, b, N: tl.constexpr, C: tl.constexpr):
    """Read what was kept."""
    return tl.load(pointer + b * N * N + _kept_at(N, C))


@jit
def symmetry_of(M, N: tl.constexpr, C: tl.constexpr):
    """The largest entry of M v − Mᵀv for a fixed v, and the diagonal."""
    lane = tl.arange(0, N)
    probe = ((lane * 40503) % 1024).to(tl.float64) / 512 - 1
    row, column = outer_index(N, C)
    turned = tl.reshape(tl.sum(M.to(tl.float64) * probe[None, :, None], axis=1), (N,))
    skew = tl.max(tl.abs(product(M, probe, N, C) - turned))
    diagonal = tl.sum(tl.sum(tl.where(row == column, M, 0.0), axis=2), axis=0)
    return skew, diagonal.to(tl.float64)


@jit
def row_sizes(M):
    """Σ_j |M_ij|."""
    return tl.sum(tl.sum(tl.abs(M), axis=2), axis=0).to(tl.float64)


@jit
def column_of(M, k, N: tl.constexpr, C: tl.constexpr):
    """Column k."""
    return product(M, (tl.arange(0, N) == k).to(M.dtype), N, C)


@jit
def pivoted(M, own, k, pivot, sign, N: tl.constexpr, C: tl.constexpr):
    """Pivot on entry k, with column and pivot at hand: +1 inverts it as well, −1 no longer.

    With the entries F that are inverted and the others N, the matrix stands for

        (−P_FF⁻¹      P_FF⁻¹ P_FN              )
        (P_NF P_FF⁻¹  P_NN − P_NF P_FF⁻¹ P_FN  ),

    which Gauss and Jordan's sweeps keep symmetric.
    """
    row, column = outer_index(N, C)
    own = tl.where(tl.arange(0, N) == k, -sign, own)
    rest = tl.where((row == k) | (column == k), 0.0, M)
    return tl.fma((-own / pivot)[None, :, None], across(own, N, C), rest)


@jit
def flip(M, diagonal, k, sign, N: tl.constexpr, C: tl.constexpr):
    """Pivot on entry k. Returns the pivot, and P_kk, as well."""
    lane = tl.arange(0, N)
    own = column_of(M, k, N, C)
    pivot, whole, _ = sums(
        tl.where(lane == k, own, 0.0), tl.where(lane == k, diagonal, 0.0), tl.zeros_like(own)
    )
    return pivoted(M, own, k, pivot, sign, N, C), pivot, whole


@jit
def again(M, fresh):
    """M, which the compiler shall not keep in float64: a finite number times zero is added."""
    return M + (fresh * 0).to(M.dtype)


@jit
def squares(A, rhs, x, n, m, N: tl.constexpr):
    """½ ‖Ax − b‖² and its gradient, a few rows at a time."""
    ROWS: tl.constexpr = 8
    lane = tl.arange(0, N)[None, :]
    total, g = number(0.0, x), tl.zeros_like(x)
    for j in range(0, m, ROWS):
        row = j + tl.arange(0, ROWS)[:, None]
        block = tl.load(A + row * n + lane, mask=(row < m) & (lane < n), other=0.0).to(x.dtype)
        here = tl.arange(0, ROWS) + j
        r = tl.sum(block * x[None, :], axis=1)
        r -= tl.load(rhs + here, mask=here < m, other=0.0).to(x.dtype)
        total += 0.5 * tl.sum(r * r)
        g += tl.sum(block * r[:, None], axis=0)
    return total, g


@jit
def times(M, x, DENSE: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """P x."""
    if DENSE:
        return product(M, x, N, C)
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return x


@jit
def sign_of(x):
    """−1, 0 or 1."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
