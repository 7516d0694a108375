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
from dfwlayer.constraints.parameters import Parameter, table
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import (
    EPS,
    Array,
    Batch,
    Laid,
    array_of,
    gram,
    outer,
    stretched,
    summed,
    times,
)
from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.results import Renewal, Results, Sets
from dfwlayer.engines.compiled.sets import KEPT, Polytopes, sets_of
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.signature import Signature
from dfwlayer.ops.tensors import PLAIN
from dfwlayer.ops.values import Value

__all__ = ["Layout", "lay_out", "origin"]

LARGEST = 600  # coordinates with a matrix
# Those of one P over a polytope: products take most of the time beyond. In float32, in which tensor
# operations have half the numbers to load, they are as quick already if most coordinates are free.
LARGEST_SINGLE = 1000
ENTRIES = 10**6  # of one matrix of least squares, whose square is formed
MOST = 64  # sets of numbers that are kept
FARTHEST = 256.0  # centres against what is found around them: the rounding of P c is not to count


class Quadratics(NamedTuple):
    """The objectives in float64; what is shared by all has a first dimension of 1."""

    matrix: Tensor | None
    vector: Tensor
    squared: bool  # ½ ‖Ax − b‖² and not ½ xᵀPx + qᵀx
    arrays: tuple[Array, Array, Array, Array]  # P (·, n, n), q (·, n), A (·, m, n), b (·, m)

    @classmethod
    def of(cls, matrix: Tensor | None, vector: Tensor, squared: bool, n: int) -> Quadratics:
        """Those of plain tensors that fit together."""
        P, A, b = _nothing(n)
        q = array_of(vector, 1)
        if squared:
            assert matrix is not None
            A, b = array_of(matrix, 2), q
            with np.errstate(all="ignore"):  # problems of NaN, and beyond the range, are for others
                P = gram(A)
                q = -times(np.swapaxes(A, -2, -1), b)
        elif matrix is not None:
            P = array_of(matrix, 2)
        return cls(matrix, vector, squared, (P, q, A, b))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.matrix, self.vector

    def product(self, x: Array) -> Array:  # (·, n) -> (·, n)
        """P x, by the symmetric part of P."""
        P, _, A, _ = self.arrays
        if self.matrix is None:
            return x
        if self.squared:
            return times(np.swapaxes(A, -2, -1), times(A, x))
        return 0.5 * (times(P, x) + times(np.swapaxes(P, -2, -1), x))

    def seen_from(self, c: Array) -> Quadratics:  # (·, n)
        """y ↦ f(c + y), but for a constant where f is not a square."""
        P, q, A, b = self.arrays
        with np.errstate(all="ignore"):
            if self.squared:
                b = b - times(A, c)
                q = -times(np.swapaxes(A, -2, -1), b)
            else:
                q = q + self.product(c)
        return self._replace(arrays=(P, q, A, b))

    def value(self, x: Array) -> Array:  # (·, n) -> (·,)
        """f."""
        _, q, A, b = self.arrays
        with np.errstate(all="ignore"):
            if self.squared:
                residual = times(A, x) - b
                return np.asarray(0.5 * (residual * residual).sum(-1))
            return np.asarray((x * (0.5 * self.product(x) + q)).sum(-1))

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
            moved = np.where(left, 0.0, times(A, u))
            residual = times(A, x) - b
        if matrix is not None:
            residual = np.where(left, 0.0, residual)
            of_matrix = outer(matrix, -moved, x, -residual, u)
        return [of_matrix, summed(self.vector, moved) if asked[1] else None]

    def slope(self, x: Array) -> Array:  # (B, n) -> (B, n)
        """∇f."""
        _, q, A, b = self.arrays
        with np.errstate(all="ignore"):
            if self.squared:
                return times(np.swapaxes(A, -2, -1), times(A, x) - b)
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
            residual = np.where(w == 0, 0.0, w * (times(A, x) - b))
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
        with np.errstate(all="ignore"):
            # f of x itself: the parts of y and of c may cancel, as where x is 0, to their rounding
            found.values[0] = self.objective.value(c + found.x)
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


class Source(NamedTuple):
    """Where a tensor of the sets comes from."""

    place: int  # among the tensors of a call
    deeper: bool  # it has one more dimension, behind the others

    def found(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Sets.renewal`."""
        tensor = tensors[self.place]
        return tensor.unsqueeze(-1) if self.deeper and tensor.requires_grad else tensor


class Mould(NamedTuple):
    """What the layouts of calls with one signature have in common."""

    n: int
    dtype: torch.dtype
    batch: int | None  # that of the objective alone, where the sets are laid out in each call
    squared: bool  # see `Quadratics`
    places: tuple[int, int]  # of matrix and vector among the tensors of a call, −1 for none
    sets: Sets | None = None  # those of numbers
    renew: Renewal | None = None  # or what makes others of
    sources: tuple[Source, ...] = ()  # these, where
    ranged: tuple[tuple[int, Parameter], ...] = ()  # the values of some are within range

    def filled(self, tensors: Sequence[Tensor], constraint: Constraint) -> Layout | None:
        """The layout of a call, None where values are out of range."""
        first, second = self.places
        vector, matrix = tensors[second], None if first < 0 else tensors[first]
        sets, size, centres = self.sets, self.batch, None
        if self.renew is not None:
            for place, about in self.ranged:
                if not about.covers(tensors[place]):
                    return None
            sets = self.renew([source.found(tensors) for source in self.sources])
        elif sets is None:
            batch = Batch(self.dtype, size=size)
            like = vector.new_empty(self.n) if self.squared else vector
            laid = _laid_sets(constraint, like, self.n, batch)
            if laid is None:
                return None
            (sets, centres), size = laid, batch.size
        given = Quadratics.of(matrix, vector, self.squared, self.n)
        return Layout(given, sets, centres, self.n, size, self.dtype)


def lay_out(
    objective: Objective, constraint: Constraint, signature: Signature | None = None
) -> Layout | None:
    """The arrays, or None for what has no normal form or is not plain tensors that fit together."""
    if signature is not None:
        mould: Mould | None = signature.kept.get("mould")
        layout = None if mould is None else mould.filled(signature.tensors, constraint)
        if layout is not None:
            return layout
    dense = objective.dense()
    if dense is None:
        return None
    matrix, vector, squared = dense
    n, dtype = objective.shape[0], vector.dtype
    if dtype not in EPS:
        return None
    large = matrix is not None and n > LARGEST
    if matrix is not None and math.prod(matrix.shape[-2:]) > ENTRIES:
        return None
    if large and (squared or n > LARGEST_SINGLE):
        return None
    batch = Batch(dtype)
    if not batch.fits(matrix, 2) or not batch.fits(vector, 1):
        return None
    size = batch.size
    laid = _laid_sets(constraint, vector.new_empty(n) if squared else vector, n, batch)
    if laid is None:
        return None
    sets, centres = laid
    if large and (batch.size is not None or not isinstance(sets, Polytopes)):
        return None
    given = Quadratics.of(matrix, vector, squared, n)
    layout = Layout(given, sets, centres, n, batch.size, dtype)
    if signature is not None:
        signature.kept["mould"] = _mould_of(layout, size, constraint, signature)
    return layout


def _mould_of(
    layout: Layout, size: int | None, constraint: Constraint, signature: Signature
) -> Mould | None:
    """That of a layout, whose objective has so many problems, for calls that are like this one."""
    tensors = signature.tensors
    names = {id(tensor): place for place, tensor in enumerate(tensors)}
    matrix, vector, squared, _ = layout.objective
    places = -1 if matrix is None else names.get(id(matrix), -2), names.get(id(vector), -2)
    if -2 in places or len(names) < len(tensors):  # made of others, or one may be in either place
        return None
    mould = Mould(layout.n, layout.dtype, size, squared, places)
    if layout.centres is not None or layout.n > KEPT:
        return mould
    if signature.numbers:
        return mould._replace(sets=layout.sets, batch=layout.batch)
    about = table(type(constraint))
    values = {name: t for name in about if isinstance(t := getattr(constraint, name), Tensor)}
    sources = [_source(part, tensors) for part in layout.sets.tensors if part is not None]
    known = tuple([source for source in sources if source is not None])
    renew = layout.sets.renewal()
    if (
        renew is None
        or len(known) < len(sources)
        or {source.place for source in known} != {names[id(value)] for value in values.values()}
        or type(constraint).is_plain is not Constraint.is_plain  # which may ask for more than this
    ):
        return mould
    ranged = [(names[id(t)], about[name]) for name, t in values.items() if about[name].looks_at(t)]
    return mould._replace(batch=layout.batch, renew=renew, sources=known, ranged=tuple(ranged))


def _source(part: Tensor, tensors: Sequence[Tensor]) -> Source | None:
    """Which of the tensors of a call a part is, None where it was made of them otherwise."""
    for place, given in enumerate(tensors):
        if part is given:
            return Source(place, False)
    known = [place for place, given in enumerate(tensors) if _is_deeper(part, given)]
    return Source(known[0], True) if len(known) == 1 else None


def _is_deeper(part: Tensor, given: Tensor) -> bool:
    """Whether a part is a tensor with one more dimension behind its own, to autograd as well."""
    if part.shape != (*given.shape, 1) or part.stride()[:-1] != given.stride():
        return False
    if part.data_ptr() != given.data_ptr():
        return False
    way = part.grad_fn
    if way is None:
        return not (given.requires_grad and torch.is_grad_enabled())
    if way.name() != "UnsqueezeBackward0":
        return False
    before = way.next_functions[0][0]
    if given.grad_fn is not None:
        return before is given.grad_fn
    return getattr(before, "variable", None) is given


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


@lru_cache(maxsize=64)
def origin(n: int) -> Array:
    """Where all problems start for which nothing is said, (1, n); never written to."""
    return np.zeros((1, n))


@lru_cache(maxsize=64)
def _nothing(n: int) -> tuple[Array, Array, Array]:
    """P, A and b without any entries."""
    return np.empty((1, 0, 0)), np.empty((1, 0, n)), np.empty((1, 0))
