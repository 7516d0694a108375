"""A sparse lasso that any number of processes can make the rows of, each its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dfwlayer.ops.matrices import csr

__all__ = ["Shape", "own_rows", "radius_of"]

PIECES = 64  # parts that are made one by one, and belong to one process each
USED = 200  # columns that b is a combination of, at most one for every hundred rows


@dataclass(frozen=True)
class Shape:
    """½ ‖Ax − b‖² over ‖x‖₁ ≤ t, with entries of A at any places."""

    rows: int = 200_000
    columns: int = 1_000_000
    entries: int = 10_000_000
    seed: int = 0


def _weights(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng((shape.seed, PIECES))
    used = max(1, min(USED, shape.rows // 100, shape.columns))
    return random.choice(shape.columns, used, replace=False), random.standard_normal(used)


def radius_of(shape: Shape) -> float:
    """A radius at which some of the columns that b is made of do not count."""
    return float(0.8 * np.abs(_weights(shape)[1]).sum())


def own_rows(shape: Shape, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The rows of one of the processes, as CSR, and their b."""
    at, weights = _weights(shape)
    x = np.zeros(shape.columns)
    x[at] = weights
    cuts = np.linspace(0, shape.rows, PIECES + 1).astype(int)
    shares = np.linspace(0, shape.entries, PIECES + 1).astype(int)
    first, end = PIECES * rank // size, PIECES * (rank + 1) // size
    begins, columns, values, targets = [np.zeros(1, np.int64)], [], [], []
    for piece in range(first, end):
        random = np.random.default_rng((shape.seed, piece))
        height, count = cuts[piece + 1] - cuts[piece], shares[piece + 1] - shares[piece]
        place = np.unique(random.integers(0, height * shape.columns, count))
        row, col = np.divmod(place, shape.columns)
        entries = random.standard_normal(len(place))
        clean = np.bincount(row, entries * x[col], minlength=height)
        targets.append(clean + 0.1 * random.standard_normal(height))
        begins.append(begins[-1][-1] + np.cumsum(np.bincount(row, minlength=height)))
        columns.append(col.astype(np.int32))
        values.append(entries)
    crow = torch.from_numpy(np.concatenate(begins).astype(np.int32))
    size_here = (int(cuts[end] - cuts[first]), shape.columns)
    places = torch.from_numpy(np.concatenate(columns))
    A = csr(crow, places, torch.from_numpy(np.concatenate(values)), size_here)
    return A, torch.from_numpy(np.concatenate(targets))
