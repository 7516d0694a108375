"""The arguments of a solve as the arrays that compiled code reads, and its results as gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.parameters import Value
from dfwlayer.constraints.region import Round
from dfwlayer.engines.compiled.answer import Found, Gradients
from dfwlayer.engines.compiled.form import FlatForm, Form, form_of, tensors_of
from dfwlayer.engines.compiled.kernels import ball, search
from dfwlayer.engines.compiled.kernels.constants import BUDGET, HIGH, LOW, SOLVED
from dfwlayer.engines.compiled.kernels.polytope import KIND, LOWER, ROWS, TOTAL, UPPER
from dfwlayer.engines.compiled.threads import spread
from dfwlayer.methods.base import Settings
from dfwlayer.objectives.base import Objective

__all__ = ["Layout", "Results", "lay_out"]

LARGEST = 300  # coordinates with a matrix; beyond, tensor operations are as fast
ENTRIES = 10**6  # of one matrix of least squares, whose square is formed

Array = np.ndarray[Any, np.dtype[Any]]


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
            of_matrix = _outer(self.matrix, (-0.5 * u, x), (-0.5 * x, u)) if to_matrix else None
            return [of_matrix, _summed(self.vector, -u) if asked[1] else None]
        # of Aᵀ(Ax − b): −(Au) xᵀ − r uᵀ, and Au for b
        left = found.codes[0, :, None] != SOLVED
        with np.errstate(all="ignore"):  # the numbers of what was left may be any
            moved = np.where(left, 0.0, np.matmul(self.A, u[..., None])[..., 0])
            residual = np.matmul(self.A, x[..., None])[..., 0] - self.b
        of_matrix = None
        if to_matrix:
            residual = np.where(left, 0.0, residual)
            of_matrix = _outer(self.matrix, (-moved, x), (-residual, u))
        return [of_matrix, _summed(self.vector, moved) if asked[1] else None]


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


@dataclass(frozen=True)
class Polytopes:
    """Sets of bounds, budgets and equations, see `dfwlayer.engines.compiled.polytope`."""

    form: FlatForm
    bodies: Array  # (·, k, n + 2)
    blocks: Array  # (·, 4)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.form.tensors

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
        for low, high, first, end, _ in self.form.bounds:
            for side, place in ((low, LOW), (high, HIGH)):
                held: Array | None = None
                if next(want):
                    held = np.where(places[:, first:end] == place, rest[:, first:end], 0.0)
                gradients.append(None if held is None else _summed(side, held))
        for j, row in enumerate(self.form.rows, start=ROWS):
            at, own = slice(row.first, row.end), slice(j, j + 1)
            pull: Array | None = None
            if next(want):
                pull = -(found.multipliers[:, own] * u[:, at] + nu[:, own] * found.x[:, at])
                pull = pull * sides[:, at] * _signs(row.slope) if row.kind == BUDGET else pull
            gradients.append(None if pull is None else _summed(row.slope, pull))
            gradients.append(_summed(row.total, nu[:, own]) if next(want) else None)
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
        return tensors_of(self.weight, self.radius)

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
            of_weight = _summed(self.weight, -self.weights * found.x * pull * _signs(self.weight))
        return [of_weight, _summed(self.radius, adjoint.nu) if asked[1] else None]


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

    def search(self, x0: Tensor | None, settings: Settings) -> Found[Results] | None:
        """Solve what can be solved beyond doubt, None if that is nothing."""
        start = self._start(x0)
        if start is None:
            return None
        limits = torch.finfo(self.dtype).eps, settings.tol, settings.max_steps
        found = self.sets.search(self.objective, start, limits, self.batch or 1)
        left = found.codes[0] != SOLVED
        if left.any():
            if left.all():
                return None
            for part in (found.x, found.multipliers, *found.face):
                part[left] = 0
        value, gap = torch.from_numpy(found.values).to(self.dtype).unbind()
        if self.dtype != torch.float64:  # a bound stays one
            gap = torch.nextafter(gap, torch.full_like(gap, torch.inf))
        status, steps = torch.from_numpy(found.codes).unbind()
        mask = status != SOLVED if found.codes[0].any() else None
        x = torch.from_numpy(found.x).to(self.dtype)
        return Found(x, value, gap, steps, status, mask, found)

    def _start(self, x0: Tensor | None) -> Array | None:
        """x0, or zero, in float64; None for one that is not as it should be."""
        n, batch = self.n, self.batch or 1
        if x0 is None:
            return np.zeros((1, n))
        if x0.dim() not in (1, 2) or x0.shape[-1] != n or x0.dtype != self.dtype:
            return None
        if x0.device.type != "cpu":
            return None
        start: Array = x0.detach().to(torch.float64).reshape(-1, n).contiguous().numpy()
        if len(start) not in (1, batch) or (x0.dim() == 2 and self.batch is None):
            return None
        if len(start) == 1 and not np.isfinite(start[0]).all():
            return None
        return start

    def point(self, found: Found[Results]) -> Tensor:
        """x in the dtype."""
        return torch.from_numpy(found.state.x).to(self.dtype)

    def pullback(self, asked: Sequence[bool], found: Found[Results], v: Tensor) -> Gradients:
        """Gradients in `tensors` from one in x (B, n)."""
        results = found.state
        arriving = v.to(torch.float64).contiguous().numpy()
        eps = torch.finfo(self.dtype).eps
        adjoint = self.sets.adjoint(self.objective, results, arriving, eps)
        if self.dtype != torch.float64:
            # beyond the dtype's range there is no gradient to give; the other problems keep theirs
            size = np.abs(adjoint.u).max(-1) * np.maximum(np.abs(results.x).max(-1), 1.0)
            lost = ~(size < torch.finfo(self.dtype).max)
            if lost.any():
                for part in adjoint:
                    if part is not None:
                        part[lost] = 0.0
        of_objective = self.objective.pullback(asked[:2], results, adjoint.u)
        if not any(asked[2:]):
            return of_objective + [None] * len(asked[2:])
        return of_objective + self.sets.pullback(asked[2:], results, adjoint)


def lay_out(objective: Objective, constraint: Constraint) -> Layout | None:
    """The arrays, or None for what has no normal form or is not plain tensors that fit together."""
    form = form_of(objective, constraint, _takes)
    if form is None or form.vector.device.type != "cpu":
        return None
    return Layout(_objective(form), _sets(form), form.n, form.batch, form.dtype)


def _takes(matrix: Tensor | None, n: int) -> bool:
    return matrix is None or (n <= LARGEST and math.prod(matrix.shape[-2:]) <= ENTRIES)


def _objective(form: Form) -> Quadratics:
    """The objectives as arrays."""
    none = np.zeros((1, 0, form.n))
    P, q, A, b = none[:, :, :0], _array(form.vector, 1), none, none[:, :, 0]
    if form.squared:
        assert form.matrix is not None
        A, b = _array(form.matrix, 2), q
        with np.errstate(all="ignore"):  # problems of NaN, and beyond the range, are left to others
            P = np.matmul(np.swapaxes(A, -2, -1), A)
            q = -np.matmul(np.swapaxes(A, -2, -1), b[..., None])[..., 0]
    elif form.matrix is not None:
        P = _array(form.matrix, 2)
    return Quadratics(form.matrix, form.vector, form.squared, P, q, A, b)


def _sets(form: Form) -> Sets:
    """Blocks in normal form as arrays."""
    n, sets = form.n, form.sets
    if isinstance(sets, Round):
        size = np.abs(_array(sets.weight, 1))
        wide = np.ascontiguousarray(np.broadcast_to(size, (len(size), n)))
        return Balls(sets.weight, sets.radius, wide, _array(sets.radius, 1))
    own = [len(part) for part in sets.tensors if part is not None and part.dim() > 1]
    bodies = np.zeros((max(own, default=1), ROWS + len(sets.rows), n + 2))
    for low, high, first, end, _ in sets.bounds:
        bodies[:, LOWER, first:end] = _array(low, 1)
        bodies[:, UPPER, first:end] = _array(high, 1)
    for line, row in enumerate(sets.rows, start=ROWS):
        slope = _array(row.slope, 1)
        bodies[:, line, row.first : row.end] = np.abs(slope) if row.kind == BUDGET else slope
        bodies[:, line, TOTAL] = _array(row.total, 1)[:, 0]
        bodies[:, line, KIND] = row.kind
    blocks = [(first, end, ROWS + i, ROWS + j) for *_, first, end, (i, j) in sets.bounds]
    return Polytopes(sets, bodies, np.array(blocks, np.int64))


def _signs(weight: Value) -> Array:
    """Of weights, of which only the size counts; none of NaN."""
    values = _array(weight, 1)
    return (values > 0) * 1.0 - (values < 0)


def _array(tensor: Value, rank: int) -> Array:
    """In float64, with one dimension more than one problem's."""
    if not isinstance(tensor, Tensor):
        return np.full((1,) * (rank + 1), tensor)
    found: Array = tensor.detach().to(torch.float64).numpy()
    if found.ndim < rank:
        found = found.reshape(1)
    if found.ndim == rank:
        found = found[None]
    return np.ascontiguousarray(found)


def _outer(like: Tensor | None, *pairs: tuple[Array, Array]) -> Tensor:
    """Σ a bᵀ over two pairs and over the problems that share a matrix."""
    assert like is not None
    (a, b), (c, d) = pairs
    if like.dim() == 2 or len(like) == 1:
        total = a.T @ b + c.T @ d
    else:
        total = a[:, :, None] * b[:, None, :]
        total += c[:, :, None] * d[:, None, :]
    return _narrowed(torch.from_numpy(total), like.dtype).reshape(like.shape)


def _summed(like: Value, each: Array) -> Tensor:  # each (B, ·)
    """One gradient for each problem, summed over what shares the tensor."""
    assert isinstance(like, Tensor)
    if like.dim() < 2:
        each = each.sum(0) if len(each) > 1 else each[0]
    gradient = torch.from_numpy(np.ascontiguousarray(each))
    if gradient.shape != like.shape:
        gradient = gradient.sum_to_size(like.shape)
    return _narrowed(gradient, like.dtype)


def _narrowed(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype; a number that it cannot hold is none, as everywhere here."""
    if dtype == gradient.dtype:
        return gradient
    narrow = gradient.to(dtype)
    return torch.where(torch.isfinite(narrow), narrow, 0)
