"""The arguments of a solve as the arrays that compiled code reads, and its results as gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, from_numpy

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
from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.results import Results, Sets
from dfwlayer.engines.compiled.sets import KEPT, sets_of
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.signature import Signature
from dfwlayer.ops.tensors import PLAIN
from dfwlayer.ops.values import Value

__all__ = ["Layout", "lay_out", "origin"]

LARGEST = 600  # coordinates with a matrix; beyond, products with it take most of the time
ENTRIES = 10**6  # of one matrix of least squares, whose square is formed
MOST = 64  # sets of numbers that are kept
FARTHEST = 256.0  # centres against what is found around them: the rounding of P c is not to count


class Quadratics(NamedTuple):
    """The objectives in float64; what is shared by all has a first dimension of 1."""

    matrix: Tensor | None
    vector: Tensor
    squared: bool  # ½ ‖Ax − b‖² and not ½ xᵀPx + qᵀx
    arrays: tuple[Array, Array, Array, Array]  # P (·, n, n), q (·, n), A (·, m, n), b (·, m)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.matrix, self.vector

    def product(self, x: Array) -> Array:  # (·, n) -> (·, n)
        """P x, by the symmetric part of P."""
        P, _, A, _ = self.arrays
        if self.matrix is None:
            return x
        if self.squared:
            return _times(np.swapaxes(A, -2, -1), _times(A, x))
        return 0.5 * (_times(P, x) + _times(np.swapaxes(P, -2, -1), x))

    def seen_from(self, c: Array) -> Quadratics:  # (·, n)
        """y ↦ f(c + y), but for f(c) where f is not a square."""
        P, q, A, b = self.arrays
        with np.errstate(all="ignore"):
            if self.squared:
                b = b - _times(A, c)
                q = -_times(np.swapaxes(A, -2, -1), b)
            else:
                q = q + self.product(c)
        return self._replace(arrays=(P, q, A, b))

    def value(self, x: Array) -> Array:  # (·, n) -> (·,)
        """½ xᵀPx + qᵀx."""
        with np.errstate(all="ignore"):
            found: Array = (x * (0.5 * self.product(x) + self.arrays[1])).sum(-1)
        return found

    def pullback(self, asked: Sequence[bool], codes: Array, x: Array, u: Array) -> Gradients:
        """Gradients in `tensors` at solutions x."""
        matrix = self.matrix if asked[0] else None
        of_matrix: Tensor | None = None
        if not self.squared:
            if matrix is not None:
                of_matrix = outer(matrix, -0.5 * u, x, -0.5 * x, u)
            return [of_matrix, summed(self.vector, -u) if asked[1] else None]
        # of Aᵀ(Ax − b): −(Au) xᵀ − r uᵀ, and Au for b
        _, _, A, b = self.arrays
        left = codes[0, :, None] != outcome.SOLVED
        with np.errstate(all="ignore"):  # the numbers of what was left may be any
            moved = np.where(left, 0.0, _times(A, u))
            residual = _times(A, x) - b
        if matrix is not None:
            residual = np.where(left, 0.0, residual)
            of_matrix = outer(matrix, -moved, x, -residual, u)
        return [of_matrix, summed(self.vector, moved) if asked[1] else None]

    def slope(self, x: Array) -> Array:  # (B, n) -> (B, n)
        """∇f."""
        _, q, A, b = self.arrays
        with np.errstate(all="ignore"):
            if self.squared:
                return _times(np.swapaxes(A, -2, -1), _times(A, x) - b)
            return self.product(x) + q

    def explicit(self, asked: Sequence[bool], x: Array, w: Array) -> Gradients:  # (B, n), (B, 1)
        """Gradients of f in `tensors` at points x, which do not move, from one in each value."""
        _, _, A, b = self.arrays
        of_matrix: Tensor | None = None
        if not self.squared:
            if asked[0] and self.matrix is not None:
                of_matrix = outer(self.matrix, 0.25 * w * x, x, 0.25 * x, w * x)
            return [of_matrix, summed(self.vector, w * x) if asked[1] else None]
        with np.errstate(all="ignore"):
            residual = np.where(w == 0, 0.0, w * (_times(A, x) - b))
        if asked[0] and self.matrix is not None:
            of_matrix = outer(self.matrix, 0.5 * residual, x, 0.5 * residual, x)
        return [of_matrix, summed(self.vector, -residual) if asked[1] else None]


class Centres(NamedTuple):
    """Sets around centres c, which are seen from there: y = x − c."""

    value: Value
    array: Array  # (·, n)
    placed: Callable[[Tensor], Tensor]  # y ↦ x


@dataclass(eq=False)  # what is frozen takes longer to make
class Layout(Laid):
    """A batch of problems."""

    objective: Quadratics  # as it was given
    sets: Sets
    centres: Centres | None
    n: int
    batch: int | None
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, those of the objective first, then the centre."""
        own, objective = None, self.objective
        if self.centres is not None and isinstance(self.centres.value, Tensor):
            own = self.centres.value
        return (objective.matrix, objective.vector, own, *self.sets.tensors)

    def point(self, y: Array) -> Tensor:
        """The same as it is returned."""
        found = from_numpy(y[0] if self.batch is None else y)
        if self.dtype is not torch.float64:
            found = found.to(self.dtype)
        return found if self.centres is None else self.centres.placed(found)

    def search(self, start: Array, tol: float, most: int) -> Results:
        """Solve what can be solved."""
        limits, batch = (EPS[self.dtype], tol, most), self.batch or 1
        if self.centres is None:
            return self.sets.search(self.objective.arrays, start, limits, batch)
        c = self.centres.array
        found = self.sets.search(self.objective.seen_from(c).arrays, start - c, limits, batch)
        if not self.objective.squared:
            found.values[0] += self.objective.value(c)
        with np.errstate(all="ignore"):
            # what P c is off by is no more than what is allowed for, and the gap small for f(x)
            near = np.abs(c).max(-1) <= FARTHEST * np.abs(found.x).max(-1)
            proven = found.values[1] <= tol * np.maximum(np.abs(found.values[0]), 1e-300)
        found.codes[0, (found.codes[0] == outcome.SOLVED) & ~(near & proven)] = outcome.DOUBTED
        return found

    def pullback(self, asked: Sequence[bool], found: Results, v: Array) -> Gradients:
        """Gradients in `tensors` from one in x (B, n)."""
        dtype = self.dtype
        adjoint = self.sets.adjoint(self.objective.arrays[0], found, v, EPS[dtype])
        if dtype is not torch.float64:
            adjoint.drop_lost(found.x, dtype)
        x, of_centre = found.x, None
        if self.centres is not None:
            x = x + np.where(found.codes[0, :, None] == outcome.SOLVED, self.centres.array, 0.0)
            if asked[2]:  # v − P u: x moves along with c, and away by what P c does to q
                along = v - self.objective.product(adjoint.u)
                along = np.where(found.codes[0, :, None] == outcome.SOLVED, along, 0.0)
                of_centre = summed(self.centres.value, along)
        of_objective = self.objective.pullback(asked[:2], found.codes, x, adjoint.u)
        gradients = [*of_objective, of_centre]
        if not any(asked[3:]):
            return gradients + [None] * len(asked[3:])
        return gradients + self.sets.pullback(asked[3:], found, adjoint)

    def envelope(self, asked: Sequence[bool], found: Results, w: Array) -> Gradients | None:
        """Gradients in `tensors` from one in each value (B, 1)."""
        solved = found.codes[0, :, None] == outcome.SOLVED
        x = found.x
        if self.centres is not None:
            x = x + np.where(solved, self.centres.array, 0.0)
        g = np.where(solved, self.objective.slope(x), 0.0)
        known = self.sets.envelope(found, g)
        if known is None:
            return None
        of_centre: Tensor | None = None
        if self.centres is not None and asked[2]:
            of_centre = summed(self.centres.value, w * g)
        gradients = [*self.objective.explicit(asked[:2], x, w), of_centre]
        if not any(asked[3:]):
            return gradients + [None] * len(asked[3:])
        return gradients + self.sets.pullback(asked[3:], found, known.times(w))


class _Mould(NamedTuple):
    """What the layouts of calls with one signature have in common."""

    n: int
    dtype: torch.dtype
    batch: int | None  # that of the objective
    sets: Sets | None  # those of numbers; others are laid out in each call, as they have tensors
    places: tuple[int, int] = (-1, -1)  # of matrix and vector among the tensors, −1 for none
    squared: bool = False  # see `Quadratics`


def lay_out(
    objective: Objective, constraint: Constraint, signature: Signature | None = None
) -> Layout | None:
    """The arrays, or None for what has no normal form or is not plain tensors that fit together."""
    mould: _Mould | None = None if signature is None else signature.kept.get("mould")
    if signature is not None and mould is not None and mould.places[1] >= 0:
        first, second = mould.places
        vector, squared = signature.tensors[second], mould.squared
        matrix = signature.tensors[first] if first >= 0 else None
    else:
        dense = objective.dense()
        if dense is None:
            return None
        matrix, vector, squared = dense
    if mould is None or vector.is_neg() or (matrix is not None and matrix.is_neg()):
        mould = _mould_of(objective, matrix, vector)
        if mould is None:
            return None
    n, dtype, size, sets, _, _ = mould
    centres: Centres | None = None
    if sets is None:
        batch = Batch(dtype, size=size)
        laid = _laid_sets(constraint, vector.new_empty(n) if squared else vector, n, batch)
        if laid is None:
            return None
        sets, centres = laid
        if signature is not None:
            kept = sets if signature.numbers and n <= KEPT and centres is None else None
            places = _places(signature.tensors, matrix, vector)
            signature.kept["mould"] = mould._replace(sets=kept, places=places, squared=squared)
        size = batch.size
    P, A, b = _nothing(n)
    q = array_of(vector, 1)
    if squared:
        assert matrix is not None
        A, b = array_of(matrix, 2), q
        with np.errstate(all="ignore"):  # problems of NaN, and beyond the range, are left to others
            P = np.matmul(np.swapaxes(A, -2, -1), A)
            q = -_times(np.swapaxes(A, -2, -1), b)
    elif matrix is not None:
        P = array_of(matrix, 2)
    given = Quadratics(matrix, vector, squared, (P, q, A, b))
    return Layout(given, sets, centres, n, size, dtype)


def _mould_of(objective: Objective, matrix: Tensor | None, vector: Tensor) -> _Mould | None:
    """For plain tensors that fit together and are of a size that is taken."""
    n, dtype = objective.shape[0], vector.dtype
    batch = Batch(dtype)
    if dtype not in EPS:
        return None
    if matrix is not None and (n > LARGEST or math.prod(matrix.shape[-2:]) > ENTRIES):
        return None
    if not batch.fits(matrix, 2) or not batch.fits(vector, 1):
        return None
    return _Mould(n, dtype, batch.size, None)


def _places(given: Sequence[Tensor], matrix: Tensor | None, vector: Tensor) -> tuple[int, int]:
    """Where they stand among the tensors of a call, (−1, −1) if one was made of others."""
    # the first of each, as those of the objective are, of which a set may have one as well
    names = {id(given[place]): place for place in reversed(range(len(given)))}
    places = -1 if matrix is None else names.get(id(matrix), -2), names.get(id(vector), -2)
    return (-1, -1) if -2 in places else places


def _laid_sets(
    constraint: Constraint, like: Tensor, n: int, batch: Batch
) -> tuple[Sets, Centres | None] | None:
    """The sets for vectors like these (..., n).

    Those that consist of numbers are kept from call to call, by these numbers.
    """
    key = None
    if n <= KEPT and PLAIN.issuperset(map(type, vars(constraint).values())):
        key = type(constraint), n, *vars(constraint).items()
        known = _of_numbers.get(key)
        if known is not None:
            return known, None
    if not constraint.is_plain(like):
        return None
    centres: Centres | None = None
    around = constraint.around(like)
    if around is not None:
        constraint, centre, placed = around
        if not batch.fits(centre, 1):
            return None
        values = array_of(centre, 1)
        centres = Centres(centre, stretched(values, len(values), n), placed)
    form = constraint.normal_form(n)
    sets = None if form is None else sets_of(form, n, batch)
    if sets is None:
        return None
    if key is not None and centres is None:
        if len(_of_numbers) >= MOST:
            _of_numbers.clear()
        _of_numbers[key] = sets
    return sets, centres


_of_numbers: dict[Any, Sets] = {}


def _times(A: Array, x: Array) -> Array:
    """A x for each problem, either of them shared or not."""
    found: Array = np.matmul(A, x[..., None])[..., 0]
    return found


@lru_cache(maxsize=64)
def origin(n: int) -> Array:
    """Where all problems start for which nothing is said, (1, n); never written to."""
    return np.zeros((1, n))


@lru_cache(maxsize=64)
def _nothing(n: int) -> tuple[Array, Array, Array]:
    """P, A and b without any entries."""
    return np.empty((1, 0, 0)), np.empty((1, 0, n)), np.empty((1, 0))
