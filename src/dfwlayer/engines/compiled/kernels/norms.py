"""Weighted norms, problems over their balls, and points on the boundary as they are returned."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.constants import LARGEST, SMALLEST
from dfwlayer.engines.compiled.kernels.dense import kernel, summing
from dfwlayer.engines.compiled.kernels.numbers import CONVEX, NEITHER, own, rounded, sane, symmetric

__all__ = ["length_of", "over_ball", "settle", "size_of"]


@kernel
def over_ball(b, P, q, A, weights, radii, eps, L, S):
    """P, q, w and t of problem b; first, if all numbers are such that they may be used, see `sane`.

    L and S (n, n) are memory, and S may hold P.
    """
    own_P, alike = symmetric(P[own(b, P)], eps, S)
    own_q, weight, radius = q[own(b, q)], weights[own(b, weights)], radii[own(b, radii), 0]
    fit = NEITHER
    if SMALLEST < radius < LARGEST and alike and _unfit(own_q, weight) == 0:
        fit = CONVEX if P.shape[1] == 0 else sane(own_P, A, eps, L)
    return fit, own_P, own_q, weight, radius


@summing
def _unfit(q, weight):
    """How many entries are out of range; without a branch, so that several are done at once."""
    count = 0.0
    for i in range(len(q)):
        fit = (abs(q[i]) < LARGEST) & (weight[i] > SMALLEST) & (weight[i] < LARGEST)
        count += 0.0 if fit else 1.0
    return count


@summing
def length_of(weight, x):
    """‖Wx‖, as exact as a sum in float64 is."""
    total = 0.0
    for i in range(len(x)):
        total += (weight[i] * x[i]) ** 2
    return np.sqrt(total)


@kernel
def size_of(weight, x, p):
    """‖Wx‖_p."""
    if p == 2:
        return length_of(weight, x)
    largest = total = 0.0
    for i in range(len(x)):
        largest = max(largest, weight[i] * abs(x[i]))
    if largest == 0:
        return 0.0
    for i in range(len(x)):
        total += (weight[i] * abs(x[i]) / largest) ** p
    return largest * total ** (1 / p)


@kernel
def settle(weight, radius, p, x, eps, held):
    """Round x to its dtype, inside; False where that takes more than a nudge."""
    for trial in range(5):
        size = size_of(weight, x, p)
        if trial > 0 and size <= radius:
            return True
        shrink = 1.0
        if held or size > radius:
            shrink = radius / size * (1 - trial * eps)
        for i in range(len(x)):
            x[i] = rounded(x[i] * shrink, eps)
    return size_of(weight, x, p) <= radius
