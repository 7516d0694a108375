"""LDLᵀ of sparse symmetric matrices whose pivots have known signs, compiled.

A matrix K (N, N) is held by its diagonal and by columns of what is above it, `Upper`; rows and
columns are in an order that keeps L sparse already. Row j of L is the solution of a triangular
system with the rows above it (Davis, "Direct methods for sparse linear systems", 2006, chapter 4);
where its entries are follows from the elimination tree, once for all matrices with one pattern.
Columns that follow each other often have their entries in the same rows: where an order fills L in,
most do. Four of those are taken together, so that a row is looked up once for all of them.

Matrices [H Nᵀ; N −D] with H and D positive definite have such a factor in any order (Vanderbei,
"Symmetric quasidefinite matrices", 1995). A pivot that rounding has made too small, or of the wrong
sign, is replaced.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import making

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
    joined: np.ndarray  # (N,), whether a column has a next one with entries in the same rows
    start: np.ndarray  # (N + 1,)
    row: np.ndarray  # (nnz(L),)
    value: np.ndarray  # (nnz(L),)
    inverse: np.ndarray  # (N,), 1/D
    filled: np.ndarray  # (N,), scratch, as what follows
    mark: np.ndarray
    path: np.ndarray
    reached: np.ndarray
    line: np.ndarray


@making
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
    joined = np.zeros(N, np.bool_)
    for j in range(N - 1):
        joined[j] = parent[j] == j + 1 and start[j + 1] == start[j + 2] + 1
    for j in range(N):
        start[j + 1] += start[j]
    size = start[N]
    return Triangle(
        parent,
        joined,
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


# Below, loops are written out where functions would be clearer: one that is called for every column
# counts references to the arrays it is given, which takes longer than what it does.


@making
def _reach(start, row, value, j, parent, mark, path, reached, line):
    """Where row j of L has entries: in ``reached`` from the place on that is returned."""
    mark[j] = j
    top = len(reached)
    for p in range(start[j], start[j + 1]):
        i = row[p]
        line[i] = value[p]
        length = 0
        while mark[i] != j:
            path[length] = i
            length += 1
            mark[i] = j
            i = parent[i]
        while length > 0:
            length -= 1
            top -= 1
            reached[top] = path[length]
    return top


@making
def factorise(upper, diagonal, signs, L):
    """Fill L for the matrix with that diagonal (N,) and pivots of those signs (N,), 1 or −1.

    Returns how many pivots had to be replaced.
    """
    N, replaced = len(diagonal), 0
    above, over, given = upper.start, upper.row, upper.value
    start, row, value, inverse, filled = L.start, L.row, L.value, L.inverse, L.filled
    parent, joined, mark, path, reached = L.parent, L.joined, L.mark, L.path, L.reached
    line = L.line
    for j in range(N):
        mark[j] = -1
        filled[j] = start[j]
    for j in range(N):
        t = _reach(above, over, given, j, parent, mark, path, reached, line)
        pivot = diagonal[j]
        while t < N:
            i = reached[t]
            if (
                t + 3 < N
                and joined[i]
                and joined[i + 1]
                and joined[i + 2]
                and reached[t + 3] == i + 3
            ):
                one, two, three, four = start[i], start[i + 1], start[i + 2], start[i + 3]
                a = line[i]
                b = line[i + 1] - value[one] * a
                c = line[i + 2] - value[one + 1] * a - value[two] * b
                d = line[i + 3] - value[one + 2] * a - value[two + 1] * b - value[three] * c
                one, two, three = one + 3, two + 2, three + 1
                for p in range(filled[i + 3] - four):
                    taken = value[one + p] * a + value[two + p] * b
                    line[row[four + p]] -= taken + value[three + p] * c + value[four + p] * d
                for e in range(4):
                    entry = a if e == 0 else b if e == 1 else c if e == 2 else d
                    share, end = entry * inverse[i + e], filled[i + e]
                    pivot -= share * entry
                    row[end], value[end] = j, share
                    filled[i + e] = end + 1
                    line[i + e] = 0.0
                t += 4
            else:
                entry, end = line[i], filled[i]
                for p in range(start[i], end):
                    line[row[p]] -= value[p] * entry
                share = entry * inverse[i]
                pivot -= share * entry
                row[end], value[end] = j, share
                filled[i] = end + 1
                line[i] = 0.0
                t += 1
        if not pivot * signs[j] > TINY:
            pivot = signs[j] * RAISED
            replaced += 1
        inverse[j] = 1 / pivot
    return replaced


@making
def solve(L, x):
    """K⁻¹ x in the place of x."""
    N = len(x)
    start, row, value, inverse, joined = L.start, L.row, L.value, L.inverse, L.joined
    j = 0
    while j < N:
        if joined[j] and joined[j + 1] and joined[j + 2]:
            one, two, three, four = start[j], start[j + 1], start[j + 2], start[j + 3]
            a = x[j]
            b = x[j + 1] - value[one] * a
            c = x[j + 2] - value[one + 1] * a - value[two] * b
            d = x[j + 3] - value[one + 2] * a - value[two + 1] * b - value[three] * c
            x[j + 1], x[j + 2], x[j + 3] = b, c, d
            one, two, three = one + 3, two + 2, three + 1
            for p in range(start[j + 4] - four):
                taken = value[one + p] * a + value[two + p] * b
                x[row[four + p]] -= taken + value[three + p] * c + value[four + p] * d
            j += 4
        else:
            a = x[j]
            if a != 0:
                for p in range(start[j], start[j + 1]):
                    x[row[p]] -= value[p] * a
            j += 1
    j = N - 1
    while j >= 0:
        if j > 2 and joined[j - 1] and joined[j - 2] and joined[j - 3]:
            one, two, three, four = start[j - 3], start[j - 2], start[j - 1], start[j]
            a, b = x[j - 3] * inverse[j - 3], x[j - 2] * inverse[j - 2]
            c, d = x[j - 1] * inverse[j - 1], x[j] * inverse[j]
            for p in range(start[j + 1] - four):
                v = x[row[four + p]]
                a -= value[one + 3 + p] * v
                b -= value[two + 2 + p] * v
                c -= value[three + 1 + p] * v
                d -= value[four + p] * v
            c -= value[three] * d
            b -= value[two] * c + value[two + 1] * d
            a -= value[one] * b + value[one + 1] * c + value[one + 2] * d
            x[j - 3], x[j - 2], x[j - 1], x[j] = a, b, c, d
            j -= 4
        else:
            a = x[j] * inverse[j]
            for p in range(start[j], start[j + 1]):
                a -= value[p] * x[row[p]]
            x[j] = a
            j -= 1


@making
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
