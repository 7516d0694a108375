"""The adjoint on rows along which f is flat: there the solution is a set, and stays, compiled.

With orthonormal rows Q of the normals that are held and Π = 1 − QᵀQ, the derivative of least norm
is u = (ΠPΠ)⁺ v. A Cholesky factor with pivots, ΠPΠ = CCᵀ with as many columns as ΠPΠ has rank,
gives (CCᵀ)⁺ = C (CᵀC)⁻² Cᵀ.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import dense

__all__ = ["stay"]

FLAT = 1e-10  # of the largest curvature along the rows: less counts as none
CORRECTIONS = 3  # each with what the one before has left


@dense.kernel
def _beside(held, count, x):
    """Π x, in the place of x."""
    part = held.steps
    dense.times(held.Q, x, part[:count])
    for i in range(count):
        part[i] = -part[i]
    dense.add_rows(x, part, held.Q, count, len(x))


@dense.kernel
def _narrowed(H, C):
    """Rows C_k with H = Σ C_kᵀC_k; how many. H, which is symmetric, is overwritten."""
    n, first = len(H), 0.0
    for rank in range(n):
        pivot = 0
        for i in range(n):
            pivot = i if H[i, i] > H[pivot, pivot] else pivot
        most = H[pivot, pivot]
        first = max(first, most)
        if not most > FLAT * first:
            return rank
        root = np.sqrt(most)
        for i in range(n):
            C[rank, i] = H[pivot, i] / root
        for i in range(n):
            dense.add(H[i], -C[rank, i], C[rank], n)
    return n


@dense.making
def stay(P, held, count, v, u, z):
    """u and, in ``along``, what the rows that are held carry; z (n,) is scratch."""
    n = len(v)
    H, C, gram = np.empty((n, n)), np.empty((n, n)), np.empty((n, n))
    for turn in range(2):
        for i in range(n):
            if turn == 0:
                dense.copy(P[i], C[i])
            else:
                for j in range(n):
                    H[i, j] = C[j, i]
        for i in range(n):
            _beside(held, count, C[i] if turn == 0 else H[i])
    rank = _narrowed(H, C)
    for i in range(rank):
        for j in range(i + 1):
            gram[i, j] = dense.dot(C[i], C[j], n)
    dense.fill(0.0, u)
    if rank > 0 and dense.factor(gram, rank):
        part = np.empty(rank)
        for _ in range(CORRECTIONS):
            dense.product(P, u, z)
            for i in range(n):
                z[i] = v[i] - z[i]
            _beside(held, count, z)
            dense.times(C, z, part)
            for _ in range(2):
                dense.forward(gram, part, rank)
                dense.backward(gram, part, rank)
            dense.add_rows(u, part, C, rank, n)
            _beside(held, count, u)
    dense.product(P, u, z)
    for i in range(n):
        z[i] = v[i] - z[i]
    dense.times(held.Q, z, held.along[:count])
    dense.backward(held.T, held.along, count)
