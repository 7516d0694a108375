"""Quadratic programs from the files of collections: Maros-Meszaros (.mat) and MPC (.npz)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dfwlayer_bench.systems.base import load

__all__ = ["Collected", "files_in", "read", "size_of"]

NONE = 9e19  # a bound of this size or beyond is none; files write 1e20, or little less for a range
SUFFIXES = (".mat", ".npz")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Collected:
    """min ½ xᵀPx + qᵀx over {x : G x ≤ h, A x = b, l ≤ x ≤ u}, dense and in double precision."""

    name: str
    P: Array  # (n, n)
    q: Array  # (n,)
    G: Array  # (m, n)
    h: Array  # (m,)
    A: Array  # (k, n)
    b: Array  # (k,)
    lower: Array  # (n,), −∞ where there is none
    upper: Array  # (n,)

    def value(self, x: Array) -> float:
        """½ xᵀPx + qᵀx."""
        return float(x @ (0.5 * (self.P @ x) + self.q))

    def residual(self, x: Array) -> float:
        """The largest amount by which a row or a bound is missed."""
        parts = (self.G @ x - self.h, abs(self.A @ x - self.b), self.lower - x, x - self.upper)
        return max(0.0, *(float(part.max()) for part in parts if part.size))

    def tensors(self) -> dict[str, Tensor]:
        """The parts by name; those without rows are left out."""
        names = ["P", "q", "lower", "upper"]
        names += [name for left in ("Gh", "Ab") for name in left if len(getattr(self, left[0]))]
        return {name: torch.from_numpy(getattr(self, name)) for name in names}


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a folder that can be read, by the name of the problem."""
    found = (path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES)
    return {path.stem: path for path in found}


def size_of(path: Path) -> int:
    """The number of variables, without reading more than that needs."""
    if path.suffix == ".mat":
        for name, shape, _ in load("scipy.io").whosmat(path):
            if name == "q":
                return int(max(shape))
        raise ValueError(f"{path.name}: there is no q in it")
    with np.load(path) as held:
        return len(held["q"])


def read(path: Path) -> Collected:
    """A problem in either format."""
    return _from_mat(path) if path.suffix == ".mat" else _from_npz(path)


def _from_mat(path: Path) -> Collected:
    """P, q, and l ≤ A x ≤ u, whose last n rows are those of the bounds."""
    held = load("scipy.io").loadmat(path)
    P, rows = _dense(held["P"]), _dense(held["A"])
    q, low, high = (np.asarray(held[name], dtype=np.float64).ravel() for name in "qlu")
    n = len(q)
    low, high = _opened(low, high)
    bounds = np.full(n, -np.inf), np.full(n, np.inf)
    if len(rows) >= n and np.array_equal(rows[-n:], np.eye(n)):
        bounds = low[-n:], high[-n:]
        rows, low, high = rows[:-n], low[:-n], high[:-n]
    equal = low == high
    above, below = ~equal & np.isfinite(high), ~equal & np.isfinite(low)
    return Collected(
        path.stem,
        P,
        q,
        np.concatenate((rows[above], -rows[below])),
        np.concatenate((high[above], -low[below])),
        rows[equal],
        high[equal],
        *bounds,
    )


def _from_npz(path: Path) -> Collected:
    """P, q, G, h, A, b, lb and ub by name; those that are None, or missing, are not there."""
    parts: dict[str, Array] = {}
    with np.load(path) as held:  # objects such as None would have to be unpickled: they are left
        for name in held.files:
            with suppress(ValueError):
                parts[name] = _dense(held[name])
    P, q = parts["P"], parts["q"].ravel()
    n = len(q)
    none = np.zeros((0, n))
    G, h = parts.get("G", none), parts.get("h", none[:, 0]).ravel()
    lower, upper = parts.get("lb", np.full(n, -np.inf)), parts.get("ub", np.full(n, np.inf))
    counts = h < NONE
    return Collected(
        path.stem,
        P,
        q,
        G[counts],
        h[counts],
        parts.get("A", none),
        parts.get("b", none[:, 0]).ravel(),
        *_opened(lower.ravel(), upper.ravel()),
    )


def _opened(low: Array, high: Array) -> tuple[Array, Array]:
    """Bounds with infinity for those that are none."""
    return np.where(low <= -NONE, -np.inf, low), np.where(high >= NONE, np.inf, high)


def _dense(matrix: Any) -> Array:
    """An array of numbers from one, or from a sparse matrix."""
    found = matrix.toarray() if hasattr(matrix, "toarray") else matrix
    return np.ascontiguousarray(found, dtype=np.float64)
