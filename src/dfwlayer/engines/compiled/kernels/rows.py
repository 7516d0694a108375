"""The rows of {x : l ≤ x ≤ u, G x ≤ h, E x = e} as unit normals in the metric of f, compiled.

With P = LLᵀ and y = Lᵀx the problem is that of the point nearest to −L⁻¹q: a row n_j of the set
is ⟨m_j, y⟩ with m_j = L⁻¹n_j/|L⁻¹n_j|. Slacks and multipliers of these are in the same units,
that of y, whatever the units of a row were, and the curvature of f towards each of them is 1.

A row is known by a number: the k equations come first, the m inequalities then, and then a unit
normal for each coordinate with a bound. Those that can matter have a column each in the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dfwlayer.engines.compiled.kernels.constants import LARGEST, SMALLEST
from dfwlayer.engines.compiled.kernels.dense import add, add_rows, fill, kernel, summing

__all__ = [
    "Rows",
    "add_row",
    "largest",
    "largest_of",
    "levels",
    "listed",
    "reduced",
    "row_and_size",
]


class Rows(NamedTuple):
    """The rows of one problem, and those of them that are listed."""

    E: np.ndarray  # (k, n)
    G: np.ndarray  # (m, n)
    which: np.ndarray  # (·,), the number of each that is listed
    low: np.ndarray  # (·,), its sides
    high: np.ndarray
    lengths: np.ndarray  # (·,), |L⁻¹n_j|


@summing
def _dot_and_size(a, b, n):
    """Σ a_i b_i and Σ |a_i b_i|."""
    total = size = 0.0
    for i in range(n):
        term = a[i] * b[i]
        total += term
        size += abs(term)
    return total, size


@kernel
def row_and_size(rows, row, x):
    """⟨n_j, x⟩ and the sizes of its terms."""
    k, m, n = len(rows.E), len(rows.G), len(x)
    if row < k:
        return _dot_and_size(rows.E[row], x, n)
    if row < k + m:
        return _dot_and_size(rows.G[row - k], x, n)
    return x[row - k - m], abs(x[row - k - m])


@kernel
def add_row(rows, row, c, out):
    """out += c n_j."""
    k, m = len(rows.E), len(rows.G)
    if row < k:
        add(out, c, rows.E[row], len(out))
    elif row < k + m:
        add(out, c, rows.G[row - k], len(out))
    else:
        out[row - k - m] += c


@kernel
def largest_of(rows, row, n):
    """The largest entry of a row."""
    k, m = len(rows.E), len(rows.G)
    if row < k:
        return largest(rows.E[row], n)
    return largest(rows.G[row - k], n) if row < k + m else 1.0


@summing
def largest(row, n):
    """The largest entry, which is NaN if one of them is."""
    most = total = 0.0
    for i in range(n):
        a = abs(row[i])
        most = a if a > most else most
        total += a
    return most if total < np.inf else total


@kernel
def listed(rows, e, h, lower, upper):
    """List the rows that can matter, with their sides low ≤ ⟨n_j, x⟩ ≤ high.

    Returns how many there are that are no bounds and how many in all, −1 for both if the numbers
    are not for this code or there is no point between them, and by how much rows of zeros are
    missed whatever x is, which may be what rounding made of their sides.
    """
    E, G, which, low, high, _ = rows
    k, m, n = len(E), len(G), len(lower)
    count, missed = 0, 0.0
    for row in range(k + m):
        equation = row < k
        size = largest_of(rows, row, n)
        side = e[row] if equation else h[row - k]
        if not size < LARGEST or not (abs(side) < LARGEST or (side == np.inf and not equation)):
            return -1, -1, 0.0
        if size == 0:
            missed = max(missed, abs(side) if equation else -side)
            continue
        if size < SMALLEST:
            return -1, -1, 0.0
        if side < np.inf:
            which[count], high[count] = row, side
            low[count] = side if equation else -np.inf
            count += 1
    base = count
    for i in range(n):
        if not (lower[i] <= upper[i] and lower[i] < LARGEST and upper[i] > -LARGEST):
            return -1, -1, 0.0
        if lower[i] > -np.inf or upper[i] < np.inf:
            if (-np.inf < lower[i] <= -LARGEST) or (LARGEST <= upper[i] < np.inf):
                return -1, -1, 0.0
            which[count], low[count], high[count] = k + m + i, lower[i], upper[i]
            count += 1
    return base, count, missed


@summing
def reduced(L, rows, base, count, columns):
    """The columns m_j (n, ·) of the rows that are listed, and their lengths, 1 for rows of zeros.

    The unit normals are in the order of their coordinates, so that L⁻¹ of them begins with zeros.
    An empty L is the identity.
    """
    E, G, which, _, _, lengths = rows
    k, m, n = len(E), len(G), len(columns)
    fill(0.0, lengths)
    reach = base
    for i in range(n):
        row = columns[i]
        for c in range(base):
            j = which[c]
            row[c] = E[j, i] if j < k else G[j - k, i]
        for c in range(base, count):
            row[c] = 0.0
        if reach < count and which[reach] == k + m + i:
            row[reach] = 1.0
            reach += 1
        if len(L) > 0:
            own = L[i]
            inverse = 1 / own[i]
            for j in range(i):
                own[j] = -own[j]
            add_rows(row, own, columns, i, reach)
            for j in range(i):
                own[j] = -own[j]
            for c in range(reach):
                row[c] *= inverse
        for c in range(reach):
            lengths[c] += row[c] * row[c]
    for c in range(count):
        lengths[c] = np.sqrt(lengths[c]) if lengths[c] > 0 else 1.0
    for i in range(n):
        row = columns[i]
        for c in range(count):
            row[c] /= lengths[c]


@kernel
def levels(columns, y, count, out):
    """⟨m_j, y⟩ of the rows that are listed."""
    for c in range(count):
        out[c] = 0.0
    add_rows(out, y, columns, len(y), count)
