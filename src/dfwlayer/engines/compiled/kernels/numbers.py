"""Rounding: how much of it there is, dtypes, matrices that are symmetric but for it."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.constants import (
    CLEAR,
    DOUBLE,
    DOUBTED,
    LARGEST,
    LOST,
    ROUNDING,
    SINGLE,
    SKEW,
    SMALLEST,
    SOLVED,
    UNFIT,
    UNPROVEN,
    UNSETTLED,
)
from dfwlayer.engines.compiled.kernels.dense import kernel

__all__ = [
    "CLEAR",
    "DOUBLE",
    "DOUBTED",
    "LARGEST",
    "LOST",
    "ROUNDING",
    "SINGLE",
    "SMALLEST",
    "SOLVED",
    "UNFIT",
    "UNPROVEN",
    "UNSETTLED",
    "holds",
    "own",
    "rounded",
    "symmetric",
]

# |P − Pᵀ| against the largest entry of P, over n, that is averaged away in any dtype, as an
# objective adds up n of them to tell
ASYMMETRY = 5e-5


@kernel
def holds(value, eps):
    """Whether the dtype that has this eps can hold a number."""
    return abs(value) < (3e38 if eps == SINGLE else 1e300)


@kernel
def rounded(value, eps):
    """In the dtype that has this eps."""
    return float(np.float32(value)) if eps == SINGLE else value


@kernel
def symmetric(P, eps):
    """P, its symmetric part if it is symmetric to rounding only, or nothing if it is not."""
    n = len(P)
    largest = skew = 0.0
    for i in range(n):
        largest = max(largest, abs(P[i, i]))
        for j in range(i):
            skew = max(skew, abs(P[i, j] - P[j, i]))
    if skew == 0:
        return P
    if not skew <= max(SKEW * eps * np.sqrt(n), ASYMMETRY / n) * largest:
        return np.empty((0, 0))
    out = np.empty((n, n))
    for i in range(n):
        for j in range(i + 1):
            out[i, j] = out[j, i] = 0.5 * (P[i, j] + P[j, i])
    return out


@kernel
def own(b, shared):
    """The place of problem b in an array that may be shared by all."""
    return b if len(shared) > 1 else 0
