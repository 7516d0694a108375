"""Rounding: how much of it there is, dtypes, matrices that are symmetric but for it."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import (
    BENT,
    DOUBLE,
    LARGEST,
    SINGLE,
    SKEW,
    SMALLEST,
)
from dfwlayer.engines.compiled.kernels.dense import factor, fill, kernel, summing

__all__ = [
    "CONVEX",
    "DEFINITE",
    "NEITHER",
    "asked",
    "bound_of",
    "finite",
    "number_of",
    "ordered",
    "own",
    "proven",
    "rounded",
    "sane",
    "symmetric",
]

# |P − Pᵀ| against the largest entry of P, over n, that is averaged away in any dtype, as an
# objective adds up n of them to tell
ASYMMETRY = 5e-5
NEITHER, CONVEX, DEFINITE = 0, 1, 2  # what P is
FACTORED = 64  # coordinates up to which P is factorised to tell whether it bends down
GOLDEN = 0.6180339887498949  # multiples of it, less whole numbers, are spread evenly
BELOW_SIGN = np.int64(0x7FFFFFFFFFFFFFFF)  # all bits of a number but its sign


@kernel
def ordered(value):
    """An integer that is larger for a larger number, and largest for NaN without a sign.

    The largest of many integers is found in vector registers, that of numbers only where it is
    known that none of them is NaN.
    """
    bits = np.float64(value).view(np.int64)
    return bits ^ ((bits >> 63) & BELOW_SIGN)


@kernel
def number_of(key):
    """The number with this `ordered`."""
    return np.int64(key ^ ((key >> 63) & BELOW_SIGN)).view(np.float64)


@kernel
def holds(value, eps):
    """Whether the dtype that has this eps can hold a number."""
    return abs(value) < (3e38 if eps == SINGLE else 1e300)


@kernel
def rounded(value, eps):
    """In the dtype that has this eps."""
    return float(np.float32(value)) if eps == SINGLE else value


@summing
def _mirrors(P, along, across):
    """Whether P r and Pᵀr are the same to rounding, for an r that no structure of P is made for.

    One pass over the rows, while to compare each entry with its mirror image reads columns, and
    takes four times as long. ``along`` and ``across`` (n,) are scratch.
    """
    n, largest = len(P), 0.0
    for i in range(n):
        share = (i * GOLDEN) % 1.0
        along[i], across[i] = 1.0 + share, 0.0
        largest = max(largest, abs(P[i, i]))
    worst = 0.0
    for i in range(n):
        row, c, total = P[i], along[i], 0.0
        for j in range(n):
            total += row[j] * along[j]
            across[j] += c * row[j]
        across[i] -= total
    for i in range(n):
        off = abs(across[i])
        worst = off if not off <= worst else worst  # keeps a NaN
    return worst <= 8 * n * DOUBLE * largest


@kernel
def symmetric(P, eps, out):
    """P, or its symmetric part in ``out`` if it is so to rounding only; whether it is at all."""
    n = len(P)
    if n > FACTORED and _mirrors(P, out[0], out[1]):
        return P, True
    largest = skew = 0.0
    for i in range(n):
        largest = max(largest, abs(P[i, i]))
        for j in range(i):
            skew = max(skew, abs(P[i, j] - P[j, i]))
    if skew == 0:
        return P, True
    for i in range(n):
        for j in range(i + 1):
            out[i, j] = out[j, i] = 0.5 * (P[i, j] + P[j, i])
    return out, skew <= max(SKEW * eps * np.sqrt(n), ASYMMETRY / n) * largest


@summing
def _exceeding(row, roots, rounding, i):
    """How many P_ij with j < i have P_ij² > P_ii P_jj, of whose right-hand sides these are roots.

    Without a branch, so that several are done at once.
    """
    root, count = roots[i], 0
    for j in range(i):
        count += 1 if abs(row[j]) > root * roots[j] + rounding else 0
    return count


@kernel
def convex(P, eps, L):
    """Whether P has no eigenvalue below zero, to rounding; of a large one, none of two coordinates.

    A solution on a face shows the curvature along it, and a certificate takes the rest for granted.
    L (n, n) is memory: `NEITHER`, `CONVEX`, or `DEFINITE` if it has the factor of P then.
    """
    n = len(P)
    if n <= FACTORED:  # most are definite, and this is the quickest way to tell
        for i in range(n):
            for j in range(i + 1):
                L[i, j] = P[i, j]
        if factor(L, n):
            return DEFINITE
    largest = 0.0
    for i in range(n):
        largest = max(largest, abs(P[i, i]))
    rounding, roots = BENT * n * eps * largest, L[0]
    for i in range(n):
        if P[i, i] < -rounding:
            return NEITHER
        roots[i] = np.sqrt(max(P[i, i], 0.0))
        if _exceeding(P[i], roots, rounding, i) > 0:
            return NEITHER
    if n > FACTORED:
        return CONVEX
    for i in range(n):
        for j in range(n):
            L[i, j] = P[i, j]
    for k in range(n):
        pivot, row = L[k, k], L[k]
        if pivot < -rounding:
            return NEITHER
        if pivot <= rounding:  # flat: of a convex function its slope does not change either
            for i in range(k + 1, n):
                if abs(row[i]) > np.sqrt(max(L[i, i], 0.0) * rounding) + rounding:
                    return NEITHER
            continue
        for i in range(k + 1, n):
            share, below = row[i] / pivot, L[i]
            for j in range(i, n):
                below[j] -= share * row[j]
    return CONVEX


@kernel
def own(b, shared):
    """The place of problem b in an array that may be shared by all."""
    return b if len(shared) > 1 else 0


@kernel
def sane(P, A, eps, L):
    """See `convex`, of what `symmetric` has made of P; with an A it is."""
    return CONVEX if A.shape[1] > 0 else convex(P, eps, L)


@kernel
def bound_of(P):
    """A bound of ‖P‖, nothing standing for 1, or 0 where it is too small or too large."""
    bound = 1.0 if len(P) == 0 else 0.0
    for i in range(len(P)):
        total = 0.0
        for j in range(len(P)):
            total += abs(P[i, j])
        bound = total if not total <= bound else bound  # keeps a NaN
    return bound if SMALLEST < bound < LARGEST else 0.0


@kernel
def asked(b, codes, v, u, nu):
    """Whether an adjoint of problem b, which is solved, is asked for; until found it is zero."""
    fill(0.0, u[b])
    fill(0.0, nu[b])
    return codes[0, b] == outcome.SOLVED and finite(v[b])


@kernel
def proven(value, gap, tol, eps):
    """Whether the gap is below the tolerance, relative to f, and the dtype can hold f."""
    return gap <= tol * max(abs(value), 1e-300) and holds(value, eps)


@kernel
def finite(v):
    """Whether a sum of the entries is a number."""
    total = 0.0
    for i in range(len(v)):
        total += v[i]
    return np.isfinite(total)
