"""Units in which the numbers of one sparse program are of size one, compiled.

They are those of `dfwlayer.linalg.quadratic.units`: x = d ∘ x̂, rows of G and A are multiplied by g
and a, and f is divided by its cost. All are powers of two, so that no digit is lost.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import fill, making

__all__ = ["cost_of", "equilibrated", "sized"]

# as in `dfwlayer.linalg.quadratic.units`
FAR, STEADY, PASSES = 1e10, 1.05, 12


@making
def _extent(matrix, left, right, rows, columns):
    """The largest |l_i m_ij r_j| of every row, and of columns where that is more than is known."""
    start, place, value = matrix
    most = 0.0
    for i in range(len(rows)):
        largest = 0.0
        for p in range(start[i], start[i + 1]):
            j = place[p]
            size = abs(left[i] * value[p] * right[j])
            largest = size if size > largest else largest
            columns[j] = size if size > columns[j] else columns[j]
        rows[i] = largest
        most = max(most, largest)
    return most


@making
def _shrunk(unit, sizes, root):
    """Divide units by what makes the sizes one, or by their roots; the least and largest of it."""
    least, most = 1.0, 1.0
    for i in range(len(unit)):
        size = sizes[i] if sizes[i] > 0 else 1.0
        size = np.sqrt(size) if root else size
        unit[i] /= size
        least, most = min(least, size), max(most, size)
    return least, most


@making
def _power(number):
    """The power of two next to a positive number."""
    return 2.0 ** min(max(np.rint(np.log2(number)), -900.0), 900.0)


@making
def equilibrated(P, A, G, d, a, g):
    """Fill units in which the largest entries of rows and columns are near one (Ruiz, 2001)."""
    n, k, m = len(d), len(a), len(g)
    columns, bend, beside, rows = np.zeros(n), np.empty(n), np.empty(k), np.empty(m)
    fill(1.0, d)
    fill(1.0, a)
    fill(1.0, g)
    # one unit for all of x first, as coordinates that P does not bend are measured by rows alone
    most = _extent(P, d, d, bend, columns)
    fill(1 / np.sqrt(most) if most > 0 else 1.0, d)
    _extent(A, a, d, beside, columns)
    _extent(G, g, d, rows, columns)
    _shrunk(a, beside, False)
    _shrunk(g, rows, False)
    for _ in range(PASSES):
        fill(0.0, columns)
        _extent(P, d, d, bend, columns)
        _extent(A, a, d, beside, columns)
        _extent(G, g, d, rows, columns)
        least, most = _shrunk(d, columns, True)
        for unit, sizes in ((a, beside), (g, rows)):
            low, high = _shrunk(unit, sizes, True)
            least, most = min(least, low), max(most, high)
        if least >= 1 / STEADY and most <= STEADY:
            break


@making
def _told(limits, units, inverse, sign, sizes, count, apart):
    """Append the sizes of limits that say how large x is, and the largest that excludes zero.

    That is a limit of the sign that is given, of any sign if that is 0.
    """
    for i in range(len(limits)):
        value = limits[i] / units[i] if inverse else limits[i] * units[i]
        size = abs(value)
        if 0 < size < np.inf:
            sizes[count] = size
            count += 1
            if sign == 0 or value * sign > 0:
                apart = max(apart, size)
    return count, apart


@making
def _size(P, q, b, h, lower, upper, d, a, g):
    """How large x is in these units, as far as f and the limits tell."""
    n = len(d)
    sizes, rows, columns = np.empty(2 * n + len(b) + len(h)), np.empty(n), np.zeros(n)
    count, apart = _told(h, g, False, -1, sizes, 0, 0.0)
    count, apart = _told(b, a, False, 0, sizes, count, apart)
    count, apart = _told(lower, d, True, 1, sizes, count, apart)
    count, apart = _told(upper, d, True, -1, sizes, count, apart)
    bend, slope = _extent(P, d, d, rows, columns), 0.0
    for i in range(n):
        slope = max(slope, abs(q[i]) * d[i])
    low, high = np.inf, 0.0
    for i in range(count):
        low, high = min(low, sizes[i]), max(high, sizes[i])
    if bend > 0:
        size = max(slope / bend, apart) if count == 0 else min(max(slope / bend, apart), high)
        if size > 0:
            return size
    size = 1.0
    if count > 0:
        size = min(max(size, low), high)
        sizes[:count].sort()
        middle = sizes[(count - 1) // 2]
        size = middle if middle > size * FAR else size
    return size


@making
def sized(P, q, b, h, lower, upper, d, a, g):
    """Make x of size one as well, and powers of two of all units."""
    size = _power(_size(P, q, b, h, lower, upper, d, a, g))
    for i in range(len(d)):
        d[i] = _power(d[i] * size)
    for i in range(len(a)):
        a[i] = _power(a[i] / size)
    for i in range(len(g)):
        g[i] = _power(g[i] / size)


@making
def cost_of(P, q, d):
    """The unit of f in which its slopes and curvatures are of size one."""
    n = len(d)
    rows, columns = np.empty(n), np.zeros(n)
    _extent(P, d, d, rows, columns)
    total = slope = 0.0
    for i in range(n):
        total += columns[i]
        slope = max(slope, abs(q[i]) * d[i])
    cost = max(total / n, slope)
    return _power(cost) if cost > 0 else 1.0
