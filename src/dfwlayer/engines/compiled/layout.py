"""The arguments of a solve as the arrays that compiled code reads, and its results as gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.parameters import Value
from dfwlayer.constraints.region import Flat, Round
from dfwlayer.engines.compiled.arrays import (
    Array,
    Batch,
    Gradients,
    array_of,
    outer,
    signs,
    summed,
)
from dfwlayer.engines.compiled.kernels import ball, search
from dfwlayer.engines.compiled.kernels.numbers import SOLVED
from dfwlayer.engines.compiled.kernels.polytope import (
    BUDGET,
    EQUATION,
    HIGH,
    KIND,
    LOW,
    LOWER,
    ROWS,
    TOTAL,
    UPPER,
)
from dfwlayer.engines.compiled.threads import spread
from dfwlayer.objectives.base import Objective

__all__ = ["Adjoint", "Layout", "Polytopes", "Results", "drop_lost", "lay_out", "sets_of"]

LARGEST = 300  # coordinates with a matrix; beyond, tensor operations are as fast
ENTRIES = 10**6  # of one matrix of least squares, whose square is formed


class Results(NamedTuple):
    """What was found of a batch."""

    x: Array  # (B, n)
    values: Array  # (2, B): f and the gap
    codes: Array  # (2, B): what became of a problem, and steps
    multipliers: Array  # (B, k)
    face: tuple[Array, ...]  # what else a set keeps, (B, n) each

    @classmethod
    def blank(cls, batch: int, n: int, k: int, *face: type) -> Results:
        """Memory for them."""
        return cls(
            np.empty((batch, n)),
            np.zeros((2, batch)),
            np.zeros((2, batch), np.int64),
            np.zeros((batch, k)),
            tuple(np.empty((batch, n), kind) for kind in face),
        )


class Adjoint(NamedTuple):
    """The solution of the adjoint system: P u + Σ ν_j a_j = v on the face."""

    u: Array  # (B, n)
    nu: Array  # (B, k)
    rest: Array | None  # (B, n), v − P u − Σ ν_j a_j, where a set asks for it


@dataclass(frozen=True)
class Quadratics:
    """The objectives in float64; what is shared by all has a first dimension of 1."""

    matrix: Tensor | None
    vector: Tensor
    squared: bool  # ½ ‖Ax − b‖² and not ½ xᵀPx + qᵀx
    P: Array  # (·, n, n) or empty
    q: Array  # (·, n)
    A: Array  # (·, m, n) or empty
    b: Array  # (·, m)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.P, self.q, self.A, self.b

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.matrix, self.vector

    def pullback(self, asked: Sequence[bool], found: Results, u: Array) -> Gradients:
        """Gradients in `tensors`."""
        x = found.x
        to_matrix = asked[0] and self.matrix is not None
        if not self.squared:
            of_matrix = outer(self.matrix, (-0.5 * u, x), (-0.5 * x, u)) if to_matrix else None
            return [of_matrix, summed(self.vector, -u) if asked[1] else None]
        # of Aᵀ(Ax − b): −(Au) xᵀ − r uᵀ, and Au for b
        left = found.codes[0, :, None] != SOLVED
        with np.errstate(all="ignore"):  # the numbers of what was left may be any
            moved = np.where(left, 0.0, np.matmul(self.A, u[..., None])[..., 0])
            residual = np.matmul(self.A, x[..., None])[..., 0] - self.b
        of_matrix = None
        if to_matrix:
            residual = np.where(left, 0.0, residual)
            of_matrix = outer(self.matrix, (-moved, x), (-residual, u))
        return [of_matrix, summed(self.vector, moved) if asked[1] else None]


class Sets(Protocol):
    """The sets of a batch, and the compiled code for them."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, None for numbers."""

    def search(
        self, objective: Quadratics, start: Array, limits: tuple[float, float, int], batch: int
    ) -> Results:
        """Solve, with eps of the dtype, the tolerance and the most steps."""

    def adjoint(self, objective: Quadratics, found: Results, v: Array, eps: float) -> Adjoint:
        """Solve the adjoint system."""

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Gradients in `tensors`."""


class Row(NamedTuple):
    """A budget or an equation."""

    kind: float
    slope: Value
    total: Value
    first: int  # coordinate
    end: int


class Bounds(NamedTuple):
    """l and u of a block of coordinates."""

    lower: Value
    upper: Value
    first: int
    end: int


@dataclass(frozen=True)
class Polytopes:
    """Sets of bounds, budgets and equations, see `dfwlayer.engines.compiled.polytope`."""

    bounds: tuple[Bounds, ...]
    rows: tuple[Row, ...]
    bodies: Array  # (·, k, n + 2)
    blocks: Array  # (·, 4)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        sides = (side for low, high, *_ in self.bounds for side in (low, high))
        ties = (part for row in self.rows for part in (row.slope, row.total))
        return _tensors(*sides, *ties)

    def search(
        self, objective: Quadratics, start: Array, limits: tuple[float, float, int], batch: int
    ) -> Results:
        n, k = start.shape[1], self.bodies.shape[1]
        found = Results.blank(batch, n, k, np.int8, np.float64)
        x, values, codes, multipliers, (places, sides) = found
        given = *objective.arrays, self.bodies, self.blocks, start, *limits
        results = x, values, codes, places, sides, multipliers
        spread(
            lambda first, end: search.search(first, end, *given, *results),
            batch,
            15 * n * n + n**3 // 3 + 1000 * n,
        )
        return found

    def adjoint(self, objective: Quadratics, found: Results, v: Array, eps: float) -> Adjoint:
        out = Adjoint(np.empty_like(v), np.empty_like(found.multipliers), np.empty_like(v))
        face = found.codes, *found.face, found.multipliers
        given = objective.P, self.bodies, eps, *face, v, *out
        batch, n = v.shape
        spread(lambda first, end: search.adjoint(first, end, *given), batch, n**3 // 6 + 100 * n)
        return out

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        want = iter(asked)
        places, sides = found.face
        u, nu, rest = adjoint
        assert rest is not None
        gradients: Gradients = []
        for low, high, first, end in self.bounds:
            for side, place in ((low, LOW), (high, HIGH)):
                held: Array | None = None
                if next(want):
                    held = np.where(places[:, first:end] == place, rest[:, first:end], 0.0)
                gradients.append(None if held is None else summed(side, held))
        for j, row in enumerate(self.rows, start=ROWS):
            at, own = slice(row.first, row.end), slice(j, j + 1)
            pull: Array | None = None
            if next(want):
                pull = -(found.multipliers[:, own] * u[:, at] + nu[:, own] * found.x[:, at])
                pull = pull * sides[:, at] * signs(row.slope) if row.kind == BUDGET else pull
            gradients.append(None if pull is None else summed(row.slope, pull))
            gradients.append(summed(row.total, nu[:, own]) if next(want) else None)
        return gradients


@dataclass(frozen=True)
class Balls:
    """Weighted ℓ2 balls, see `dfwlayer.engines.compiled.ball`."""

    weight: Value
    radius: Value
    weights: Array  # |w|, (·, n)
    radii: Array  # (·, 1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return _tensors(self.weight, self.radius)

    def search(
        self, objective: Quadratics, start: Array, limits: tuple[float, float, int], batch: int
    ) -> Results:
        n = start.shape[1]
        found = Results.blank(batch, n, 1)
        given = *objective.arrays, self.weights, self.radii, start, *limits, *found[:4]
        spread(lambda first, end: ball.search(first, end, *given), batch, 2 * n**3 + 500 * n)
        return found

    def adjoint(self, objective: Quadratics, found: Results, v: Array, eps: float) -> Adjoint:
        u, nu = np.empty_like(v), np.empty_like(found.multipliers)
        given = objective.P, self.weights, self.radii, eps, found.x, found.codes, found.multipliers
        batch, n = v.shape
        spread(
            lambda first, end: ball.adjoint(first, end, *given, v, u, nu),
            batch,
            n**3 // 3 + 100 * n,
        )
        return Adjoint(u, nu, None)

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Of λW²x, which has no other part along u, and of ‖Wx‖ − t."""
        of_weight: Tensor | None = None
        if asked[0]:
            pull = 2 * found.multipliers * adjoint.u + adjoint.nu * found.x / self.radii
            of_weight = summed(self.weight, -self.weights * found.x * pull * signs(self.weight))
        return [of_weight, summed(self.radius, adjoint.nu) if asked[1] else None]


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

    def search(self, start: Array, limits: tuple[float, float, int]) -> Results:
        """Solve from a start (·, n), with eps of the dtype, the tolerance and the most steps."""
        return self.sets.search(self.objective, start, limits, self.batch or 1)

    def pullback(self, asked: Sequence[bool], found: Results, v: Array) -> Gradients:
        """Gradients in `tensors` from one in x (B, n)."""
        adjoint = self.sets.adjoint(self.objective, found, v, torch.finfo(self.dtype).eps)
        drop_lost(adjoint, found.x, self.dtype)
        of_objective = self.objective.pullback(asked[:2], found, adjoint.u)
        if not any(asked[2:]):
            return of_objective + [None] * len(asked[2:])
        return of_objective + self.sets.pullback(asked[2:], found, adjoint)


def drop_lost(adjoint: Adjoint, x: Array, dtype: torch.dtype) -> None:
    """Beyond the dtype's range there is no gradient to give; the other problems keep theirs."""
    if dtype == torch.float64:
        return
    size = np.abs(adjoint.u).max(-1) * np.maximum(np.abs(x).max(-1), 1.0)
    lost = ~(size < torch.finfo(dtype).max)
    for part in adjoint:
        if part is not None and lost.any():
            part[lost] = 0.0


def lay_out(objective: Objective, constraint: Constraint) -> Layout | None:
    """The arrays, or None for what has no normal form or is not plain tensors that fit together."""
    dense = objective.dense()
    if dense is None:
        return None
    matrix, vector, squared = dense
    n, dtype = objective.shape[0], vector.dtype
    batch = Batch(dtype)
    if dtype not in (torch.float64, torch.float32):
        return None
    if matrix is not None and (n > LARGEST or math.prod(matrix.shape[-2:]) > ENTRIES):
        return None
    if not batch.fits(matrix, 2) or not batch.fits(vector, 1):
        return None
    like = vector.new_empty(n) if squared else vector.detach()
    form = constraint.normal_form(n) if constraint.is_plain(like) else None
    sets = None if form is None else sets_of(form, n, batch)
    if sets is None:
        return None
    none = np.zeros((1, 0, n))
    P, q, A, b = none[:, :, :0], array_of(vector, 1), none, none[:, :, 0]
    if squared:
        assert matrix is not None
        A, b = array_of(matrix, 2), q
        with np.errstate(all="ignore"):  # problems of NaN, and beyond the range, are left to others
            P = np.matmul(np.swapaxes(A, -2, -1), A)
            q = -np.matmul(np.swapaxes(A, -2, -1), b[..., None])[..., 0]
    elif matrix is not None:
        P = array_of(matrix, 2)
    return Layout(Quadratics(matrix, vector, squared, P, q, A, b), sets, n, batch.size, dtype)


def sets_of(form: Sequence[Flat | Round], n: int, batch: Batch) -> Sets | None:
    """Blocks in normal form as arrays."""
    if isinstance(form[0], Round):
        _, weight, radius = form[0]
        if len(form) > 1 or not batch.fits(weight, 1) or not batch.fits(radius, 1):
            return None
        size = np.abs(array_of(weight, 1))
        wide = np.ascontiguousarray(np.broadcast_to(size, (len(size), n)))
        return Balls(weight, radius, wide, array_of(radius, 1))
    bounds: list[Bounds] = []
    rows: list[Row] = []
    blocks, first = [], 0
    for block in form:
        if isinstance(block, Round):
            return None
        end, tied = first + block.n, len(rows)
        bounds.append(Bounds(block.lower, block.upper, first, end))
        if block.weight is not None:
            rows.append(Row(BUDGET, block.weight, block.radius, first, end))
        rows += [Row(EQUATION, a, b, first, end) for a, b in block.equations]
        if len(rows) - tied > 2:
            return None
        blocks.append((first, end, ROWS + tied, ROWS + len(rows)))
        first = end
    parts = [side for low, high, *_ in bounds for side in (low, high)]
    parts += [part for row in rows for part in (row.slope, row.total)]
    if first != n or not all(batch.fits(part, 1) for part in parts):
        return None
    own = [len(part) for part in parts if isinstance(part, Tensor) and part.dim() > 1]
    bodies = np.zeros((max(own, default=1), ROWS + len(rows), n + 2))
    for low, high, first, end in bounds:
        bodies[:, LOWER, first:end] = array_of(low, 1)
        bodies[:, UPPER, first:end] = array_of(high, 1)
    for line, row in enumerate(rows, start=ROWS):
        slope = array_of(row.slope, 1)
        bodies[:, line, row.first : row.end] = np.abs(slope) if row.kind == BUDGET else slope
        bodies[:, line, TOTAL] = array_of(row.total, 1)[:, 0]
        bodies[:, line, KIND] = row.kind
    return Polytopes(tuple(bounds), tuple(rows), bodies, np.array(blocks, np.int64))


def _tensors(*values: Value) -> tuple[Tensor | None, ...]:
    """Those that are tensors, None for the others."""
    return tuple(v if isinstance(v, Tensor) else None for v in values)
