"""Whether the minimiser on a face of a set in normal form solves the problem, compiled."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.constants import CLEAR
from dfwlayer.engines.compiled.kernels.dense import kernel
from dfwlayer.engines.compiled.kernels.faces import forces

__all__ = ["CLEARLY", "DOUBTFUL", "SINGULAR", "WRONG", "judge", "pushed"]

WRONG, DOUBTFUL, CLEARLY, SINGULAR = 0, 1, 2, 3


@kernel
def pushed(r, hold, wall, side):
    """At which bound a coordinate that has one value is held: at the lower one without a force."""
    if wall != 0:
        r += hold * side
    elif abs(r) <= hold:
        return place.LOW
    return place.HIGH if r < 0 else place.LOW


@kernel
def judge(q, body, places, multipliers, x, px, bound, sides, blur):
    """Whether the minimiser on a face, off by so many units, solves the problem.

    Of two bounds that are one the coordinate is placed at the one that its force pushes against.
    """
    n, k = len(x), len(body)
    widest = noise = 0.0
    for i in range(n):
        widest = max(widest, abs(x[i]))
        noise = max(noise, abs(q[i]))
    noise += bound * widest
    for row in range(table.ROWS, k):
        steep = 0.0
        for i in range(n):
            steep = max(steep, abs(body[row, i]))
        noise += abs(multipliers[row]) * steep
    noise *= blur
    verdict = CLEARLY
    for row in range(table.ROWS, k):
        if body[row, table.KIND] != table.BUDGET:
            continue
        total = steep = 0.0
        kinked = False
        for i in range(n):
            total += body[row, i] * abs(x[i])
            steep = max(steep, body[row, i])
            kinked = kinked or (places[i] == place.ZERO and body[row, i] > 0)
        if multipliers[row] != 0:  # it holds; its force has to be one
            clear, ahead = CLEAR * noise, multipliers[row] * steep
        elif kinked:
            return WRONG
        else:
            clear, ahead = CLEAR * blur * total, body[row, table.TOTAL] - total
        if ahead < -clear:
            return WRONG
        if ahead < clear:
            verdict = DOUBTFUL
    for i in range(n):
        low, high = body[table.LOWER, i], body[table.UPPER, i]
        where = places[i]
        r, hold = forces(body, multipliers, i, px[i] + q[i])
        if low == high:
            places[i] = pushed(r, hold, low, sides[i])
            continue
        tied = False
        if where == place.FREE:
            ahead = min(x[i] - low, high - x[i])
            size = widest
            if np.isfinite(low):
                size = max(size, abs(low))
            if np.isfinite(high):
                size = max(size, abs(high))
            if hold > 0:
                ahead = min(ahead, sides[i] * x[i])
            clear = CLEAR * blur * size
        else:
            clear = CLEAR * noise
            if where == place.ZERO:
                ahead = hold - abs(r)
                # what is tied there stays, with a derivative of 0, as of two columns that are one
                tied = abs(ahead) <= blur * (abs(px[i]) + abs(q[i]) + hold)
            else:
                r += hold * sides[i]
                ahead = r if where == place.LOW else -r
        if ahead < -clear:
            return WRONG
        if ahead < clear and not tied:
            verdict = DOUBTFUL
    return verdict
