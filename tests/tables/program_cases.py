"""Sparse quadratic programs."""

import numpy as np
import torch

__all__ = ["drawn"]


def drawn(n, k, m, seed, rank=None):
    """A program with few entries that are not zero and a point within its rows."""
    random = np.random.default_rng(seed)

    def sparse(rows):
        matrix = np.zeros((rows, n))
        for row in matrix:
            row[random.choice(n, 4, replace=False)] = random.standard_normal(4)
        return matrix

    half = sparse(n if rank is None else rank)
    A, G, x = sparse(k), sparse(m), random.uniform(0.1, 0.9, n)
    parts = half.T @ half, random.standard_normal(n), G, G @ x + random.uniform(0, 1, m), A, A @ x
    P, q, G, h, A, b = (torch.from_numpy(part) for part in parts)
    return {"P": P, "q": q, "G": G, "h": h, "A": A, "b": b, "lower": 0.0 * q, "upper": 0 * q + 1}
