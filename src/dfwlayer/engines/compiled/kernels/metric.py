"""The metric in which a quadratic problem is that of a nearest point: LLᵀ = P or next to it.

f has to bend up. Where P alone does not, P + σNᵀN may for rows N whose sum is known: the equations
and the coordinates with l = u. That is the same f on the set but for a constant. Where that does
not, either, P + ρ1 does, which is f with ½ρ ‖x − x_k‖² added to it, for one x_k after the other.
"""

from __future__ import annotations

from dfwlayer.engines.compiled.kernels.constants import (
    BENT,
    DOUBLE,
    LARGEST,
    SINGULAR,
)
from dfwlayer.engines.compiled.kernels.dense import add, dot, factor, forward, kernel
from dfwlayer.engines.compiled.kernels.judged import HELD
from dfwlayer.engines.compiled.kernels.numbers import bound_of
from dfwlayer.engines.compiled.kernels.rows import add_row

__all__ = [
    "FAINT",
    "PLAIN",
    "RIDGE",
    "SMALL",
    "STIFF",
    "bends_down",
    "fit",
    "free_minimiser",
    "metric",
    "ridged",
    "stiffened",
]

PLAIN, STIFF, RIDGE = 1, 2, 3  # L is the factor of P, of P + σNᵀN, of P + ρ1
SMALL = 1e-6  # ρ against the largest entry of P
FAINT = 1e-11  # the same where f is flat along the rows that hold a solution


@kernel
def fit(P, q):
    """Whether the numbers of f are such that this code may be used on them."""
    sound = bound_of(P) > 0
    for i in range(len(q)):
        sound = sound and abs(q[i]) < LARGEST
    return sound


@kernel
def _steepest(P):
    """σ for rows of length 1."""
    largest = 0.0
    for i in range(len(P)):
        largest = max(largest, P[i, i])
    return largest


@kernel
def _square(rows, row, n):
    """|n_j|²."""
    k, m = len(rows.E), len(rows.G)
    if row < k:
        return dot(rows.E[row], rows.E[row], n)
    return dot(rows.G[row - k], rows.G[row - k], n) if row < k + m else 1.0


@kernel
def _lower_part(P, L):
    for i in range(len(P)):
        for j in range(i + 1):
            L[i, j] = P[i, j]


@kernel
def stiffened(P, rows, width, state, ridge, L):
    """L of P + σNᵀN + ρ1 with the rows that are held; False if that is singular."""
    n, k, m = len(P), len(rows.E), len(rows.G)
    stiff = _steepest(P)
    _lower_part(P, L)
    for i in range(n):
        L[i, i] += ridge * stiff
    for c in range(width):
        row = rows.which[c]
        if state[c] != HELD:
            continue
        if row >= k + m:
            L[row - k - m, row - k - m] += stiff
            continue
        normal = rows.E[row] if row < k else rows.G[row - k]
        square = dot(normal, normal, n)
        for i in range(n):
            if normal[i] != 0:
                add(L[i], stiff * normal[i] / square, normal, i + 1)
    return factor(L, n)


@kernel
def metric(P, rows, width, state, L):
    """L of P or, if that is singular, of P + σNᵀN with the rows that are held; 0 for neither."""
    _lower_part(P, L)
    if factor(L, len(P)):
        return PLAIN
    return STIFF if stiffened(P, rows, width, state, 0.0, L) else 0


@kernel
def ridged(P, ridge, L):
    """L of P + ρ1 for ρ against the largest entry of P; False if that is singular."""
    _lower_part(P, L)
    for i in range(len(P)):
        L[i, i] += ridge * _steepest(P)
    return factor(L, len(P))


@kernel
def bends_down(P, eps, L):
    """Whether P has an eigenvalue below zero by more than rounding in its dtype; L is scratch."""
    return not ridged(P, max(BENT * len(P) * eps, 2 * SINGULAR * DOUBLE), L)


@kernel
def free_minimiser(P, q, rows, width, kind, L, x, y):
    """y₀ = −L⁻¹q, with what σNᵀN or ½ρ ‖· − x‖² add to q."""
    n = len(q)
    ridge = SMALL * _steepest(P) if kind == RIDGE else 0.0
    for i in range(n):
        y[i] = (ridge * x[i] if kind == RIDGE else 0.0) - q[i]
    if kind == STIFF:
        stiff = _steepest(P)
        for c in range(width):
            if rows.low[c] == rows.high[c]:
                row = rows.which[c]
                add_row(rows, row, stiff * rows.low[c] / _square(rows, row, n), y)
    if len(L) > 0:
        forward(L, y, n)
