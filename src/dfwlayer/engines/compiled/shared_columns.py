"""Least squares of which each process has some rows of A and b, by columns."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.columns import Factor, Squares, weighed
from dfwlayer.ops.shards import Shards

__all__ = ["SharedSquares"]


class _Sizes(NamedTuple):
    """What is known of the rows of all processes."""

    lengths: Array  # (n,), of the columns of A
    targets: Array  # (B,), of b
    entries: int
    rows: int


class SharedSquares(Squares):
    """½‖Ax − b‖² over the rows of all processes; residuals stay where the rows are.

    The pool's new rows of AᵀA are summed over the processes when it grows, in one message with
    ⟨A_j, s⟩ on the pool, and the gradient with f when the others are looked at.
    """

    def __init__(self, factor: Factor, b: Array, shards: Shards) -> None:
        super().__init__(factor, b)
        self.shards, self.slopes = shards, np.zeros((len(b), 0))

    def _total(self, own: Array, what: str, at: Array | None = None) -> Array:
        point = None if at is None else torch.from_numpy(at)
        found: Array = self.shards.summed(torch.from_numpy(own), what, point).numpy()
        return found

    @cached_property
    def _sizes(self) -> _Sizes:
        own, n = self.factor.lengths, len(self.factor.lengths)
        counts = [float(self.factor.entries), float(self.b.shape[1])]
        squares = np.concatenate((own**2, np.einsum("bi,bi->b", self.b, self.b), counts))
        found = self._total(squares, "lengths")
        roots = np.sqrt(found[:-2])
        return _Sizes(roots[:n], roots[n:], int(found[-2]), int(found[-1]))

    @property
    def entries(self) -> int:
        return self._sizes.entries

    @property
    def wide(self) -> bool:
        return self._sizes.rows < len(self.lengths)

    @property
    def lengths(self) -> Array:
        return self._sizes.lengths

    def extend(self, new: Array, x: Array) -> None:
        before = len(self.pool)
        super().extend(new, x)
        products = self.pool.memory[before : len(self.pool), : len(self.pool)]
        if products.numel():
            parts = products, torch.from_numpy(super().linear())
            at = torch.from_numpy(self.pool.index).double()
            products, slopes = self.shards.together(parts, "columns of the pool", at)
            self.pool.put(products)
            self.slopes = slopes.numpy()

    def linear(self) -> Array:
        return self.slopes

    def look(self, x: Array, rows: Array) -> tuple[Array, Array]:
        own = [torch.from_numpy(part) for part in super().look(x, rows)]
        value, g = self.shards.together(own, "gradient", torch.from_numpy(x))
        return value.numpy(), g.numpy()

    def sizes(self, index: Array, x: Array) -> Array:
        total: Array = self._sizes.targets + weighed(x, self.lengths[index])
        return total

    def product(self, u: Array) -> Array:
        return self._total(super().product(u), "product", u)
