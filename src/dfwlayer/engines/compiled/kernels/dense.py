"""Vectors and triangular factors of one small problem, compiled.

Everything here works in place on arrays that the caller owns, in float64. Sums may be taken in any
order, so that they run in vector registers; nothing else is assumed about the numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import numba
import numpy as np

from dfwlayer.engines.compiled.kernels.constants import SINGULAR

__all__ = [
    "STAMP",
    "absolute",
    "add",
    "add_rows",
    "backward",
    "copy",
    "dot",
    "entry",
    "factor",
    "fill",
    "forward",
    "join",
    "kernel",
    "leave",
    "making",
    "part_times",
    "product",
    "solve_with",
    "summing",
    "times",
    "value_and_gradient",
]

# Parts of what is called from Python, which need no way in of their own.
_inner: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# Numba counts who holds an array whenever a line of one is taken or handed on, by instructions that
# other cores wait for; that was two thirds of the time of a problem with ten coordinates. A kernel
# works in memory that is held by its caller and counts nothing, so it may not make arrays, and an
# array that it returns is not for a function that counts.
_uncounted: dict[str, Any] = {**_inner, "_nrt": False}
kernel = numba.njit(nogil=True, error_model="numpy", **_uncounted)
summing = numba.njit(
    nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, **_uncounted
)
# makes arrays, and so counts, also where a kernel calls it
_counted: dict[str, Any] = {**_inner, "_nrt": True}
making = numba.njit(nogil=True, error_model="numpy", **_counted)


def entry(function: Any) -> Any:
    """What is called from Python, kept on disk if there is a place that can be written to."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither beside the package nor in a home directory
        return numba.njit(nogil=True, error_model="numpy")(function)


# Numba looks at the file of a function to see whether what it kept on disk is outdated, not at the
# files of the functions that it calls; but it does look at the values that a function refers to.
STAMP = crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


@summing
def dot(a, b, n):
    """Σ a_i b_i over the first n entries."""
    total = 0.0
    for i in range(n):
        total += a[i] * b[i]
    return total


@summing
def absolute(a, n):
    """Σ |a_i| over the first n entries."""
    total = 0.0
    for i in range(n):
        total += abs(a[i])
    return total


@kernel
def copy(x, out):
    """out = x; assigning slices would take seconds to compile."""
    for i in range(len(out)):
        out[i] = x[i]


@kernel
def fill(value, out):
    """out = value."""
    for i in range(len(out)):
        out[i] = value


@summing
def add(y, c, x, n):
    """y += c x."""
    for i in range(n):
        y[i] += c * x[i]


@summing
def part_times(P, x, out, rows, n):
    """P x by the first rows and n columns of P, four rows at a time."""
    i = 0
    while i + 4 <= rows:
        a = b = c = d = 0.0
        for j in range(n):
            v = x[j]
            a += P[i, j] * v
            b += P[i + 1, j] * v
            c += P[i + 2, j] * v
            d += P[i + 3, j] * v
        out[i], out[i + 1], out[i + 2], out[i + 3] = a, b, c, d
        i += 4
    while i < rows:
        a = 0.0
        for j in range(n):
            a += P[i, j] * x[j]
        out[i] = a
        i += 1


@kernel
def times(P, x, out):
    """The first entries of P x, as many as there is room for."""
    part_times(P, x, out, len(out), len(x))


@summing
def add_rows(y, c, rows, count, n):
    """y += Σ_i c_i rows_i over the first so many rows and n columns, four rows at a time.

    Factors of sparse matrices have many zeros, which are passed over.
    """
    i = 0
    while i + 4 <= count:
        s, t, u, v = c[i], c[i + 1], c[i + 2], c[i + 3]
        if s != 0 or t != 0 or u != 0 or v != 0:
            for j in range(n):
                upper = s * rows[i, j] + t * rows[i + 1, j]
                y[j] += upper + u * rows[i + 2, j] + v * rows[i + 3, j]
        i += 4
    while i < count:
        add(y, c[i], rows[i], n)
        i += 1


@kernel
def product(P, x, out):
    """P x, where an empty P is the identity."""
    if len(P) > 0:
        times(P, x, out)
    else:
        copy(x, out)


@kernel
def value_and_gradient(P, q, A, b, x, g):
    """f(x), and ∇f(x) in g: of ½ ‖Ax − b‖² where there are rows of A, otherwise ½ xᵀPx + qᵀx."""
    n, total = len(x), 0.0
    if len(b) > 0:
        fill(0.0, g)
        for j in range(len(b)):
            r = dot(A[j], x, n) - b[j]
            total += 0.5 * r * r
            add(g, r, A[j], n)
        return total
    product(P, x, g)
    for i in range(n):
        total += x[i] * (0.5 * g[i] + q[i])
        g[i] += q[i]
    return total


@summing
def _take_products(L, i, j, begin, end):
    """Take Σ_k L_ik L_jk over some columns k from the 4 × 4 entries at (i, j), j ≤ i.

    Sixteen sums at once: a number is used four times when it is loaded. What is above the diagonal
    stays as it is.
    """
    a = b = c = d = 0.0
    e = f = g = h = 0.0
    p = q = r = s = 0.0
    w = x = y = z = 0.0
    for k in range(begin, end):
        one, two, three, four = L[j, k], L[j + 1, k], L[j + 2, k], L[j + 3, k]
        u = L[i, k]
        a, b, c, d = a + u * one, b + u * two, c + u * three, d + u * four
        u = L[i + 1, k]
        e, f, g, h = e + u * one, f + u * two, g + u * three, h + u * four
        u = L[i + 2, k]
        p, q, r, s = p + u * one, q + u * two, r + u * three, s + u * four
        u = L[i + 3, k]
        w, x, y, z = w + u * one, x + u * two, y + u * three, z + u * four
    L[i, j] -= a
    L[i + 1, j] -= e
    L[i + 1, j + 1] -= f
    L[i + 2, j] -= p
    L[i + 2, j + 1] -= q
    L[i + 2, j + 2] -= r
    L[i + 3, j] -= w
    L[i + 3, j + 1] -= x
    L[i + 3, j + 2] -= y
    L[i + 3, j + 3] -= z
    if i > j:
        L[i, j + 1] -= b
        L[i, j + 2] -= c
        L[i, j + 3] -= d
        L[i + 1, j + 2] -= g
        L[i + 1, j + 3] -= h
        L[i + 2, j + 3] -= s


@kernel
def _solve_rows(L, i, j):
    """The 4 × 4 entries at (i, j) times the inverse of the transposed triangle at (j, j)."""
    for row in range(i, i + 4):
        a = L[row, j] / L[j, j]
        b = (L[row, j + 1] - a * L[j + 1, j]) / L[j + 1, j + 1]
        c = (L[row, j + 2] - a * L[j + 2, j] - b * L[j + 2, j + 1]) / L[j + 2, j + 2]
        d = L[row, j + 3] - a * L[j + 3, j] - b * L[j + 3, j + 1] - c * L[j + 3, j + 2]
        L[row, j], L[row, j + 1], L[row, j + 2] = a, b, c
        L[row, j + 3] = d / L[j + 3, j + 3]


@summing
def _finish_row(L, i, begin, whole):
    """Columns of row i of a factor from some on, and its pivot; False if that is singular.

    Products with the columns before have been taken. ``whole`` is the entry of the matrix.
    """
    pivot = L[i, i]
    for j in range(begin, i):
        a = L[i, j]
        for k in range(begin, j):
            a -= L[i, k] * L[j, k]
        a /= L[j, j]
        L[i, j] = a
        pivot -= a * a
    if not pivot > SINGULAR * np.finfo(np.float64).eps * whole:
        return False
    L[i, i] = np.sqrt(pivot)
    return True


@kernel
def factor(L, n):
    """The Cholesky factor of the lower triangle of L, in its place; False if it is singular.

    Four rows at a time. Zeros at the beginning of all four stay zeros, and are passed over.
    """
    i = 0
    while i < n:
        end = min(i + 4, n)
        begin = i
        for row in range(i, end):
            first = 0
            while first < begin and L[row, first] == 0:
                first += 1
            begin = first
        begin -= begin % 4
        one = L[i, i]
        two, three, four = L[min(i + 1, n - 1), min(i + 1, n - 1)], 0.0, 0.0
        if i + 4 <= n:
            three, four = L[i + 2, i + 2], L[i + 3, i + 3]
            for j in range(begin, i, 4):
                _take_products(L, i, j, begin, j)
                _solve_rows(L, i, j)
            _take_products(L, i, i, begin, i)
            begin = i
        elif i + 3 <= n:
            three = L[i + 2, i + 2]
        for row in range(i, end):
            whole = one if row == i else two if row == i + 1 else three if row == i + 2 else four
            if not _finish_row(L, row, begin, whole):
                return False
        i = end
    return True


@summing
def forward(L, b, n):
    """L⁻¹ b, in the place of b."""
    for i in range(n):
        total = b[i]
        for j in range(i):
            total -= L[i, j] * b[j]
        b[i] = total / L[i, i]


@summing
def backward(L, b, n):
    """L⁻ᵀ b, in the place of b."""
    for i in range(n - 1, -1, -1):
        b[i] /= L[i, i]
        v = b[i]
        for j in range(i):
            b[j] -= v * L[i, j]


@kernel
def solve_with(L, b, n):
    """(L Lᵀ)⁻¹ b, in the place of b."""
    forward(L, b, n)
    backward(L, b, n)


@kernel
def join(P, i, free, index, L):
    """Add a coordinate to the factor as its last; False if its column depends on the others."""
    row = L[free]
    for a in range(free):
        row[a] = P[i, index[a]]
    forward(L, row, free)
    pivot = P[i, i] - dot(row, row, free)
    if not pivot > SINGULAR * np.finfo(np.float64).eps * P[i, i]:
        return False
    row[free] = np.sqrt(pivot)
    index[free] = i
    return True


@kernel
def leave(L, free, index, at, cos, sin):
    """Take the coordinate in that place out of the factor."""
    for i in range(at, free - 1):
        index[i] = index[i + 1]
        new, old = L[i], L[i + 1]
        for c in range(at):
            new[c] = old[c]
        carried = old[at]
        for c in range(at, i):
            b = old[c + 1]
            new[c] = cos[c] * carried + sin[c] * b
            carried = cos[c] * b - sin[c] * carried
        length = np.sqrt(carried * carried + old[i + 1] * old[i + 1])
        cos[i], sin[i] = carried / length, old[i + 1] / length
        new[i] = length
