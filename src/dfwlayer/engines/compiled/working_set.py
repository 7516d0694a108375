"""Problems that are too large to be solved whole, laid out by columns; their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import (
    EPS,
    Array,
    Batch,
    Laid,
    array_of,
    outer,
    stretched,
    summed,
)
from dfwlayer.engines.compiled.background import using
from dfwlayer.engines.compiled.columns import Columns, DenseFactor, Hessian, SparseFactor, Squares
from dfwlayer.engines.compiled.kernels import outcome, search, table
from dfwlayer.engines.compiled.pool import Pooled, Search, signs_of
from dfwlayer.engines.compiled.results import NO_FACTORS, NO_ORDERS, Adjoint, Results
from dfwlayer.engines.compiled.sets import Polytopes, sets_of
from dfwlayer.engines.compiled.shared_columns import SharedSquares
from dfwlayer.engines.compiled.threads import spread
from dfwlayer.linalg.sparse import SparseMatrix
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.matrices import csr
from dfwlayer.ops.values import narrowed

__all__ = ["WorkingSets", "lay_out_columns"]

LARGEST = 10**7  # coordinates of all problems together


@dataclass(frozen=True)
class WorkingSets(Laid):
    """A batch of problems that share a matrix."""

    objective: Objective
    matrix: Tensor
    vector: Tensor
    squared: bool  # ½ ‖Ax − b‖² and not ½ xᵀPx + qᵀx
    sets: Polytopes
    n: int
    batch: int | None
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, those of the objective first."""
        return (self.matrix, self.vector, *self.sets.tensors)

    def search(self, start: Array, tol: float, most: int) -> Pooled | None:
        """Solve from a start (·, n), None where that has found nothing."""
        batch = self.batch or 1
        sets = self.sets.bodies, self.sets.plan.blocks
        found = Search(self._columns(batch), *sets, batch, (self.eps, tol, most)).run(start)
        if found is None:
            return None
        # what of the matrix was never looked at; that takes about as long as a gradient
        solved = torch.from_numpy(np.flatnonzero(found.codes[0] == outcome.SOLVED))
        part = self.objective.rows(solved)
        return None if part is None or bool(part.suspect()) else found

    def _columns(self, batch: int) -> Columns:
        vector = array_of(self.vector, 1)
        vector = stretched(vector, batch, vector.shape[-1])
        if not self.squared:
            return Hessian(self.matrix, vector)
        sparse = self.matrix.layout != torch.strided
        factor = SparseFactor(self.matrix) if sparse else DenseFactor(self.matrix)
        if (shards := self.objective.shards) is not None:
            return SharedSquares(factor, vector, shards)
        return Squares(factor, vector)

    def gradients(self, asked: Sequence[bool], found: Pooled, v: Tensor) -> Gradients:
        """As of any layout; processes that share a problem wait for what is not compiled."""
        if self.objective.shards is None:
            return super().gradients(asked, found, v)
        with using("wait"):
            return super().gradients(asked, found, v)

    def pullback(self, asked: Sequence[bool], found: Pooled, v: Array) -> Gradients:
        """Gradients in `tensors` from one in x (B, n)."""
        pool = found.columns.pool
        index, p = pool.index, len(pool)
        inner = np.ascontiguousarray(v[:, index])
        own = Adjoint(np.empty_like(inner), np.empty_like(found.multipliers), np.empty_like(inner))
        given = (
            np.ascontiguousarray(pool.hessian[:p, :p])[None],
            found.bodies,
            self.eps,
            found.codes,
            np.ascontiguousarray(found.face[0][:, index]),
            found.sides,
            found.multipliers,
        )
        last = inner, *own, NO_FACTORS, NO_ORDERS
        spread(lambda a, b: search.adjoint(a, b, *given, *last), len(v), p**3 // 6 + 100 * p)
        u = np.zeros_like(v)
        u[:, index] = own.u
        sides = self._sides(found)
        spots = zip(asked[2:], self.sets.plan.spots, strict=True)
        bounds = any(want and spot.line < table.ROWS for want, spot in spots)
        adjoint = Adjoint(u, own.nu, self._rest(found, own, sides, v) if bounds else u)
        adjoint.drop_lost(found.x, self.dtype)
        gradients = self._of_objective(asked[0], asked[1], found, u)
        if not any(asked[2:]):
            return gradients + [None] * len(asked[2:])
        whole = Results(*found[:4], (found.face[0], sides))
        return gradients + self.sets.pullback(asked[2:], whole, adjoint)

    def _sides(self, found: Pooled) -> Array:  # (B, n)
        """The signs of x in budgets, on the way out where it is held at zero by a bound."""
        sides = signs_of(found.x, found.face[0])
        sides[:, found.columns.pool.index] = found.sides
        return sides

    def _rest(self, found: Pooled, own: Adjoint, sides: Array, v: Array) -> Array:
        """v − P u − Σ ν_j a_j."""
        rest: Array = v - found.columns.product(own.u)
        for line in range(table.ROWS, self.sets.bodies.shape[1]):
            slope = self.sets.bodies[:, line, : self.n]
            budget = self.sets.bodies[0, line, table.KIND] == table.BUDGET
            rest -= own.nu[:, line, None] * slope * (sides if budget else 1.0)
        return rest

    def _of_objective(self, matrix: bool, vector: bool, found: Pooled, u: Array) -> Gradients:
        """Gradients in the matrix and the vector."""
        x, columns = found.x, found.columns
        if not isinstance(columns, Squares):
            of_matrix = outer(self.matrix, -0.5 * u, x, -0.5 * x, u) if matrix else None
            return [of_matrix, summed(self.vector, -u) if vector else None]
        # of Aᵀ(Ax − b): −(Au) xᵀ − r uᵀ, and Au for b
        index = columns.pool.index
        moved = columns.factor.taken(np.ascontiguousarray(u[:, index]), columns.pool)
        of_vector = summed(self.vector, moved) if vector else None
        if not matrix:
            return [None, of_vector]
        residual = columns.residual(np.ascontiguousarray(x[:, index]))
        residual[found.codes[0] != outcome.SOLVED] = 0.0
        if self.matrix.layout == torch.strided:
            return [outer(self.matrix, -moved, x, -residual, u), of_vector]
        return [self._on_pattern((moved, x), (residual, u)), of_vector]

    def _on_pattern(self, *pairs: tuple[Array, Array]) -> Tensor:
        """−Σ a bᵀ where a sparse matrix has entries, over the problems."""
        pattern = SparseMatrix.of(self.matrix).pattern
        begins, rows = (part.numpy() for part in pattern.transposed)
        order = pattern.order.numpy()
        total = np.zeros(len(rows))
        for a, b in pairs:
            for j in np.flatnonzero(b.any(0)):
                at = slice(begins[j], begins[j + 1])
                total[order[at]] -= b[:, j] @ a[:, rows[at]]
        values = narrowed(torch.from_numpy(total), self.dtype)
        A = self.matrix.detach()
        if A.layout == torch.sparse_csr:
            return csr(A.crow_indices(), A.col_indices(), values, (A.shape[0], A.shape[1]))
        return torch.sparse_coo_tensor(
            A.coalesce().indices(), values, A.shape, is_coalesced=True, check_invariants=False
        )


def lay_out_columns(objective: Objective, constraint: Constraint) -> WorkingSets | None:
    """Problems that share a matrix, over sets of bounds, budgets and equations; None for others."""
    given = objective.by_columns()
    matrix = None if given is None else given.matrix
    if given is None or matrix is None or matrix.dim() != 2:
        return None
    _, vector, squared = given
    n, dtype = objective.shape[0], vector.dtype
    batch = Batch(dtype)
    if dtype not in EPS or not batch.plain(matrix):
        return None
    if not batch.fits(vector, 1):
        return None
    like = vector.new_empty(n) if squared else vector.detach()
    form = constraint.normal_form(n) if constraint.is_plain(like) else None
    if form is None:
        return None
    sets = sets_of(form, n, batch)
    if not isinstance(sets, Polytopes) or n * (batch.size or 1) > LARGEST:
        return None
    return WorkingSets(objective, matrix, vector, squared, sets, n, batch.size, dtype)
