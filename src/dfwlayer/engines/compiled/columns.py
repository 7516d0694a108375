"""Objectives of which a few columns count: those columns, their products, and the whole gradient.

½‖Ax − b‖² or ½xᵀPx + qᵀx, with one A or P for B problems. The coordinates of a *pool* move; what
the others contribute, which are held where they are, is summed up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.kernels import outside
from dfwlayer.engines.compiled.threads import spread
from dfwlayer.linalg.sparse import SparseMatrix
from dfwlayer.ops.kept import Kept
from dfwlayer.ops.matrices import csr, csr_product

__all__ = ["Columns", "DenseFactor", "Hessian", "Pool", "SparseFactor", "Squares", "weighed"]

FIRST = (
    128  # coordinates that there is memory for in the beginning, and half as many more each time
)
AT_ONCE = 50_000  # entries in single precision that are converted at once

_lengths: Kept[Array] = Kept()  # which tell rounding and a good choice, nothing else


class Pool:
    """Coordinates, and the Hessian on them."""

    def __init__(self) -> None:
        self.index: Array = np.zeros(0, np.int64)  # (p,)
        self.memory = torch.zeros(FIRST, FIRST, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def hessian(self) -> Array:  # (c, c)
        """Its first p rows and columns."""
        found: Array = self.memory.numpy()
        return found

    def add(self, new: Array) -> int:
        """Room for new coordinates; how many there were."""
        before = len(self.index)
        self.index = np.concatenate((self.index, new))
        self.memory = _with_room(self.memory, len(self), len(self))
        return before

    def put(self, products: Tensor) -> None:  # (k, p)
        """The rows of the last coordinates, which are its last columns, too."""
        after = len(self)
        before = after - len(products)
        self.memory[before:after, :after] = products
        self.memory[:before, before:after] = products[:, :before].t()


def _with_room(old: Tensor, *least: int) -> Tensor:
    """Memory of at least that shape, with what is in the old one."""
    shape = [h if h >= n else n + n // 4 for h, n in zip(old.shape, least, strict=True)]
    if shape == list(old.shape):
        return old
    new = old.new_zeros(shape)
    new[tuple(slice(size) for size in old.shape)] = old
    return new


class Columns(Protocol):
    """The objectives of B problems."""

    pool: Pool
    own: Array  # (B, n) or (1, 0), terms of the gradient that no column is a factor of

    @property
    def entries(self) -> int:
        """What a product has to read."""

    @property
    def wide(self) -> bool:
        """Whether the Hessian is singular, as there are fewer rows than columns."""

    @property
    def lengths(self) -> Array:  # (n,)
        """Square roots of the diagonal of the Hessian."""

    def hold(self, x: Array) -> None:  # (B, n)
        """Begin with an empty pool and all coordinates held at x."""

    def extend(self, new: Array, x: Array) -> None:  # (k,), (B, k)
        """Add coordinates to the pool, that were held at x."""

    def linear(self) -> Array:  # (B, p)
        """The gradient on the pool where all of its coordinates are zero."""

    def look(self, x: Array, rows: Array) -> tuple[Array, Array]:  # (b, p), (b,) -> (b,), (b, n)
        """f and its gradient, for some of the problems."""

    def sizes(self, index: Array, x: Array) -> Array:  # (k,), (B, k) -> (B,)
        """Of the terms that the gradient is a sum of, for a column of length one.

        x is zero but for some coordinates.
        """

    def product(self, u: Array) -> Array:  # (B, p) -> (B, n)
        """The Hessian times a vector that is zero outside of the pool."""


class Factor(Protocol):
    """A (m, n), by columns."""

    @property
    def entries(self) -> int:
        """How many are stored."""

    @property
    def lengths(self) -> Array:  # (n,)
        """Of the columns."""

    def combine(self, index: Array, x: Array) -> Array:  # (p,), (B, p) -> (B, m)
        """Σ x_j A_j over some columns."""

    def take(self, pool: Pool, before: int) -> None:
        """Find the products of the new columns of a pool with each other and with the others."""

    def taken(self, x: Array, pool: Pool) -> Array:  # (B, p) -> (B, m)
        """Σ x_j A_j over the pool."""

    def dots(self, r: Array, pool: Pool) -> Array:  # (B, m) -> (B, p)
        """⟨A_j, r⟩ over the pool."""

    def adjoint(self, r: Array) -> Array:  # (B, m) -> (B, n)
        """Aᵀr."""


class DenseFactor:
    """A dense A; in single precision it is converted part by part, as often as it is read."""

    def __init__(self, A: Tensor) -> None:
        self.given, self.A = A, A.detach()
        self.columns = torch.zeros(FIRST, len(A), dtype=torch.float64)  # of the pool

    @property
    def entries(self) -> int:
        return self.A.numel()

    @property
    def lengths(self) -> Array:
        def find() -> Array:
            found: Array = torch.linalg.vector_norm(self.A, dim=0, dtype=torch.float64).numpy()
            return found

        return _lengths.of(self.given, find)

    def _columns(self, index: Array) -> Tensor:  # (k,) -> (k, m)
        return self.A.index_select(1, torch.from_numpy(index)).t().double()

    def combine(self, index: Array, x: Array) -> Array:
        if len(index) < self.A.shape[1] // 4:
            return _product(x, self._columns(index))
        whole = np.zeros((len(x), self.A.shape[1]))
        whole[:, index] = x
        parts = [_product(whole, part.double().t()) for part in self._parts()]
        return np.concatenate(parts, -1)

    def _parts(self) -> Sequence[Tensor]:
        whole = self.A.dtype == torch.float64
        return (self.A,) if whole else torch.split(self.A, max(1, AT_ONCE // self.A.shape[1]))

    def take(self, pool: Pool, before: int) -> None:
        self.columns = _with_room(self.columns, len(pool), len(self.A))
        new = self.columns[before : len(pool)]
        new.copy_(self._columns(pool.index[before:]))
        pool.put(new @ self.columns[: len(pool)].t())

    def taken(self, x: Array, pool: Pool) -> Array:
        return _product(x, self.columns[: len(pool)])

    def dots(self, r: Array, pool: Pool) -> Array:
        return _product(r, self.columns[: len(pool)].t())

    def adjoint(self, r: Array) -> Array:
        return _product(r, self.A) if self.A.dtype == torch.float64 else _sum_of_rows(r, self.A)


def _product(x: Array, matrix: Tensor) -> Array:  # (B, k), (k, n) -> (B, n)
    found: Array = (torch.from_numpy(x) @ matrix).numpy()
    return found


def _sum_of_rows(x: Array, matrix: Tensor, index: Array | None = None) -> Array:
    """Σ x_i M_i over some rows of a matrix, in double precision without a copy of them."""
    index = np.arange(len(matrix)) if index is None else index
    out = np.zeros((len(x), matrix.shape[1]))
    given = matrix.numpy(), index, np.ascontiguousarray(x), out
    spread(
        lambda first, end: outside.sum_rows(first, end, *given),
        out.shape[1],
        2 * len(index) * len(x),
    )
    return out


class SparseFactor:
    """A sparse A, whose entries are sorted by columns."""

    def __init__(self, A: Tensor) -> None:
        self.matrix, self.m = SparseMatrix.of(A), len(A)
        self.arrays = tuple(part.numpy() for part in self.matrix.columns)

    @property
    def entries(self) -> int:
        return len(self.matrix.entries)

    @property
    def lengths(self) -> Array:
        found: Array = self.matrix.lengths.numpy()
        return found

    def combine(self, index: Array, x: Array) -> Array:
        out = np.zeros((len(x), self.m))
        outside.combine(*self.arrays, index, np.ascontiguousarray(x), out)
        return out

    def take(self, pool: Pool, before: int) -> None:
        outside.correlate(*self.arrays, pool.index, before, np.zeros(self.m), pool.hessian)

    def taken(self, x: Array, pool: Pool) -> Array:
        return self.combine(pool.index, x)

    def dots(self, r: Array, pool: Pool) -> Array:
        out = np.empty((len(r), len(pool)))
        given = *self.arrays, pool.index, r, out
        run = outside.dots
        spread(lambda first, end: run(first, end, *given), len(pool), len(r) * self._effort)
        return out

    @property
    def _effort(self) -> int:
        """Operations for a column, about."""
        return 4 * (1 + self.entries // self.matrix.pattern.shape[1])

    def adjoint(self, r: Array) -> Array:
        if len(r) == 1:
            out = np.empty((1, self.matrix.pattern.shape[1]))
            given, run = (*self.arrays, r[0], out[0]), outside.adjoint
            spread(lambda first, end: run(first, end, *given), out.shape[1], self._effort)
            return out
        transposed = csr(*self.matrix.columns, self.matrix.pattern.shape[::-1])
        found: Array = csr_product(transposed, torch.from_numpy(r)).contiguous().numpy()
        return found


def weighed(x: Array, weight: Array) -> Array:  # (B, n), (n,) -> (B,)
    """Σ w_i |x_i|."""
    found: Array = np.einsum("bi,i->b", np.abs(x), weight)
    return found


class Squares:
    """½‖Ax − b‖² with r = s + Σ x_j A_j over the pool."""

    own = np.zeros((1, 0))

    def __init__(self, factor: Factor, b: Array) -> None:
        self.pool, self.factor, self.b = Pool(), factor, b  # b (B, m)
        self.held = -b  # s

    @property
    def entries(self) -> int:
        return self.factor.entries

    @property
    def wide(self) -> bool:
        return int(self.b.shape[1]) < len(self.lengths)

    @property
    def lengths(self) -> Array:
        return self.factor.lengths

    def hold(self, x: Array) -> None:
        at = np.flatnonzero(x.any(0))
        self.pool, self.held = Pool(), -self.b
        if len(at):
            self.held = self.factor.combine(at, x[:, at]) - self.b

    def extend(self, new: Array, x: Array) -> None:
        self.factor.take(self.pool, self.pool.add(new))
        if x.any():
            self.held = self.held - self.factor.combine(new, x)

    def linear(self) -> Array:
        return self.factor.dots(self.held, self.pool)

    def residual(self, x: Array) -> Array:  # (B, p) -> (B, m)
        """Ax − b."""
        found: Array = self.held + self.factor.taken(x, self.pool)
        return found

    def look(self, x: Array, rows: Array) -> tuple[Array, Array]:
        r = self.held[rows] + self.factor.taken(x, self.pool)
        return 0.5 * np.einsum("bi,bi->b", r, r), self.factor.adjoint(r)

    def sizes(self, index: Array, x: Array) -> Array:
        total: Array = np.linalg.norm(self.b, axis=-1) + weighed(x, self.lengths[index])
        return total

    def product(self, u: Array) -> Array:
        return self.factor.adjoint(self.factor.taken(u, self.pool))


class Hessian:
    """½xᵀPx + qᵀx with a dense P (n, n)."""

    def __init__(self, P: Tensor, q: Array) -> None:
        self.P, self.own, self.wide = P.detach(), q, False  # q (B, n)
        self.hold(np.zeros_like(q))

    @property
    def entries(self) -> int:
        return self.P.numel()

    @cached_property
    def lengths(self) -> Array:
        found: Array = self.P.diagonal().double().clamp_min(0).sqrt().numpy()
        return found

    def hold(self, x: Array) -> None:
        self.pool, self.held, self.others = Pool(), self.own, x.copy()
        at = np.flatnonzero(x.any(0))
        if len(at):
            self.held = self.own + _sum_of_rows(x[:, at], self.P, at)

    def extend(self, new: Array, x: Array) -> None:
        self.pool.add(new)
        rows, columns = torch.from_numpy(new), torch.from_numpy(self.pool.index)
        self.pool.put(self.P[rows[:, None], columns].double())
        self.others[:, new] = 0
        if x.any():
            self.held = self.held - _sum_of_rows(x, self.P, new)

    def linear(self) -> Array:
        return np.ascontiguousarray(self.held[:, self.pool.index])

    def look(self, x: Array, rows: Array) -> tuple[Array, Array]:
        g = self.held[rows] + self.product(x)
        both = g + self.own[rows]
        inner = np.einsum("bi,bi->b", x, both[:, self.pool.index])
        return 0.5 * (inner + np.einsum("bi,bi->b", self.others[rows], both)), g

    def sizes(self, index: Array, x: Array) -> Array:
        return weighed(x, self.lengths[index])

    def product(self, u: Array) -> Array:
        at = np.flatnonzero(u.any(0))
        return _sum_of_rows(u[:, at], self.P, self.pool.index[at])
