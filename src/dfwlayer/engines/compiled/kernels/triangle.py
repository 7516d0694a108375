"""LDLᵀ of sparse symmetric matrices whose pivots have known signs, compiled.

A matrix K (N, N) is held by its diagonal and by columns of what is above it, `Upper`; rows and
columns are in an order that keeps L sparse already. Row j of L is the solution of a triangular
system with the rows above it (Davis, "Direct methods for sparse linear systems", 2006, chapter 4);
where its entries are follows from the elimination tree, once for all matrices with one pattern.

Matrices [H Nᵀ; N −D] with H and D positive definite have such a factor in any order (Vanderbei,
"Symmetric quasidefinite matrices", 1995). A pivot that rounding has made too small, or of the wrong
sign, is replaced.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import kernel

__all__ = ["Triangle", "Upper", "factorise", "planned", "solve", "times"]

TINY = 1e-13  # a pivot that is smaller is what rounding has left
RAISED = 1e-7  # what takes its place


class Upper(NamedTuple):
    """The entries above the diagonal, by columns."""

    start: np.ndarray  # (N + 1,)
    row: np.ndarray  # (nnz,)
    value: np.ndarray  # (nnz,)


class Triangle(NamedTuple):
    """L by columns, without its diagonal of ones, and memory."""

    parent: np.ndarray  # (N,), the elimination tree; −1 for a root
    start: np.ndarray  # (N + 1,)
    row: np.ndarray  # (nnz(L),)
    value: np.ndarray  # (nnz(L),)
    inverse: np.ndarray  # (N,), 1/D
    filled: np.ndarray  # (N,), scratch, as what follows
    mark: np.ndarray
    path: np.ndarray
    reached: np.ndarray
    line: np.ndarray


@kernel
def planned(upper, N):
    """Memory for the factors of all matrices with one pattern."""
    parent, mark = np.empty(N, np.int64), np.empty(N, np.int64)
    start = np.zeros(N + 1, np.int64)
    for j in range(N):
        parent[j], mark[j] = -1, j
        for p in range(upper.start[j], upper.start[j + 1]):
            i = upper.row[p]
            while mark[i] != j:
                if parent[i] < 0:
                    parent[i] = j
                start[i + 1] += 1
                mark[i] = j
                i = parent[i]
    for j in range(N):
        start[j + 1] += start[j]
    size = start[N]
    return Triangle(
        parent,
        start,
        np.empty(size, np.int64),
        np.empty(size),
        np.empty(N),
        np.empty(N, np.int64),
        mark,
        np.empty(N, np.int64),
        np.empty(N, np.int64),
        np.zeros(N),
    )


@kernel
def _subtract(line, row, value, first, end, c):
    for p in range(first, end):
        line[row[p]] -= value[p] * c


@kernel
def factorise(upper, diagonal, signs, L):
    """Fill L for the matrix with that diagonal (N,) and pivots of those signs (N,), 1 or −1."""
    N = len(diagonal)
    for j in range(N):
        L.mark[j] = -1
        L.filled[j] = L.start[j]
    for j in range(N):
        L.mark[j] = j
        top = N
        for p in range(upper.start[j], upper.start[j + 1]):
            i = upper.row[p]
            L.line[i] = upper.value[p]
            length = 0
            while L.mark[i] != j:
                L.path[length] = i
                length += 1
                L.mark[i] = j
                i = L.parent[i]
            while length > 0:
                length -= 1
                top -= 1
                L.reached[top] = L.path[length]
        pivot = diagonal[j]
        for t in range(top, N):
            i = L.reached[t]
            entry = L.line[i]
            L.line[i] = 0.0
            end = L.filled[i]
            _subtract(L.line, L.row, L.value, L.start[i], end, entry)
            share = entry * L.inverse[i]
            pivot -= share * entry
            L.row[end], L.value[end] = j, share
            L.filled[i] = end + 1
        if not pivot * signs[j] > TINY:
            pivot = signs[j] * RAISED
        L.inverse[j] = 1 / pivot


@kernel
def solve(L, x):
    """K⁻¹ x in the place of x."""
    N = len(x)
    for j in range(N):
        c = x[j]
        if c != 0:
            _subtract(x, L.row, L.value, L.start[j], L.start[j + 1], c)
    for j in range(N - 1, -1, -1):
        total = x[j] * L.inverse[j]
        for p in range(L.start[j], L.start[j + 1]):
            total -= L.value[p] * x[L.row[p]]
        x[j] = total


@kernel
def times(upper, diagonal, x, out):
    """K x."""
    for j in range(len(x)):
        out[j] = diagonal[j] * x[j]
    for j in range(len(x)):
        c, total = x[j], 0.0
        for p in range(upper.start[j], upper.start[j + 1]):
            i, entry = upper.row[p], upper.value[p]
            out[i] += entry * c
            total += entry * x[i]
        out[j] += total
