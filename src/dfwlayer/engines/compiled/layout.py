"""The arguments of a solve as the arrays that compiled code reads, and its results as gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.engines.compiled.arrays import Array, Batch, array_of, outer, summed
from dfwlayer.engines.compiled.kernels.numbers import SOLVED
from dfwlayer.engines.compiled.sets import Gradients, Results, Sets, sets_of
from dfwlayer.objectives.base import Objective

__all__ = ["Layout", "lay_out"]

LARGEST = 300  # coordinates with a matrix; beyond, tensor operations are as fast
ENTRIES = 10**6  # of one matrix of least squares, whose square is formed
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True)
class Quadratics:
    """The objectives in float64; what is shared by all has a first dimension of 1."""

    matrix: Tensor | None
    vector: Tensor
    squared: bool  # ½ ‖Ax − b‖² and not ½ xᵀPx + qᵀx
    arrays: tuple[Array, Array, Array, Array]  # P (·, n, n), q (·, n), A (·, m, n), b (·, m)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.matrix, self.vector

    def pullback(self, asked: Sequence[bool], found: Results, u: Array) -> Gradients:
        """Gradients in `tensors`."""
        x, matrix = found.x, self.matrix if asked[0] else None
        of_matrix: Tensor | None = None
        if not self.squared:
            if matrix is not None:
                of_matrix = outer(matrix, -0.5 * u, x, -0.5 * x, u)
            return [of_matrix, summed(self.vector, -u) if asked[1] else None]
        # of Aᵀ(Ax − b): −(Au) xᵀ − r uᵀ, and Au for b
        _, _, A, b = self.arrays
        left = found.codes[0, :, None] != SOLVED
        with np.errstate(all="ignore"):  # the numbers of what was left may be any
            moved = np.where(left, 0.0, np.matmul(A, u[..., None])[..., 0])
            residual = np.matmul(A, x[..., None])[..., 0] - b
        if matrix is not None:
            residual = np.where(left, 0.0, residual)
            of_matrix = outer(matrix, -moved, x, -residual, u)
        return [of_matrix, summed(self.vector, moved) if asked[1] else None]


@dataclass(frozen=True)
class Layout:
    """A batch of problems."""

    objective: Quadratics
    sets: Sets
    n: int
    batch: int | None
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, those of the objective first."""
        return (*self.objective.tensors, *self.sets.tensors)

    @property
    def eps(self) -> float:
        """Of the dtype."""
        return EPS[self.dtype]

    def point(self, x: Array) -> Tensor:
        """x (B, n) as it is returned."""
        found = torch.from_numpy(x[0] if self.batch is None else x)
        return found if self.dtype == torch.float64 else found.to(self.dtype)

    def search(self, start: Array, tol: float, most: int) -> Results:
        """Solve what can be solved."""
        arrays, limits = self.objective.arrays, (self.eps, tol, most)
        return self.sets.search(arrays, start, limits, self.batch or 1)

    def pullback(self, asked: Sequence[bool], found: Results, v: Array) -> Gradients:
        """Gradients in `tensors` from one in x (B, n)."""
        adjoint = self.sets.adjoint(self.objective.arrays[0], found, v, self.eps)
        if self.dtype != torch.float64:
            # beyond the dtype's range there is no gradient to give; the other problems keep theirs
            size = np.abs(adjoint.u).max(-1) * np.maximum(np.abs(found.x).max(-1), 1.0)
            lost = ~(size < torch.finfo(self.dtype).max)
            if lost.any():
                for part in adjoint:
                    if part is not None:
                        part[lost] = 0.0
        of_objective = self.objective.pullback(asked[:2], found, adjoint.u)
        if not any(asked[2:]):
            return of_objective + [None] * len(asked[2:])
        return of_objective + self.sets.pullback(asked[2:], found, adjoint)


def lay_out(objective: Objective, constraint: Constraint) -> Layout | None:
    """The arrays, or None for what has no normal form or is not plain tensors that fit together."""
    dense = objective.dense()
    if dense is None:
        return None
    matrix, vector, squared = dense
    n, dtype = objective.shape[0], vector.dtype
    batch = Batch(dtype)
    if dtype not in EPS:
        return None
    if matrix is not None and (n > LARGEST or math.prod(matrix.shape[-2:]) > ENTRIES):
        return None
    if not batch.fits(matrix, 2) or not batch.fits(vector, 1):
        return None
    like = vector.new_empty(n) if squared else vector
    form = constraint.normal_form(n) if constraint.is_plain(like) else None
    sets = None if form is None else sets_of(form, n, batch)
    if sets is None:
        return None
    P, A, b = _nothing(n)
    q = array_of(vector, 1)
    if squared:
        assert matrix is not None
        A, b = array_of(matrix, 2), q
        with np.errstate(all="ignore"):  # problems of NaN, and beyond the range, are left to others
            P = np.matmul(np.swapaxes(A, -2, -1), A)
            q = -np.matmul(np.swapaxes(A, -2, -1), b[..., None])[..., 0]
    elif matrix is not None:
        P = array_of(matrix, 2)
    given = Quadratics(matrix, vector, squared, (P, q, A, b))
    return Layout(given, sets, n, batch.size, dtype)


@lru_cache(maxsize=64)
def _nothing(n: int) -> tuple[Array, Array, Array]:
    """P, A and b without any entries."""
    return np.empty((1, 0, 0)), np.empty((1, 0, n)), np.empty((1, 0))
