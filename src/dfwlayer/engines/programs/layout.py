"""The arguments of a solve as Triton programs read them, and what they write as gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.region import Round
from dfwlayer.engines.compiled.answer import Found, Gradients
from dfwlayer.engines.compiled.form import FlatForm, Form, form_of
from dfwlayer.engines.compiled.kernels.constants import BUDGET, SOLVED
from dfwlayer.engines.programs.kernels import projection, search
from dfwlayer.engines.programs.launch import Strided, launch, options_of, strided
from dfwlayer.methods.base import Settings
from dfwlayer.objectives.base import Objective

__all__ = ["Layout", "lay_out"]

ENTRIES = 10**5  # of one matrix of least squares, whose square is formed


class Results(NamedTuple):
    """What the programs have written of a batch."""

    x: Tensor  # (B, n)
    values: Tensor  # (2, B): f and the gap
    codes: Tensor  # (2, B): what became of a problem, and steps
    places: Tensor  # (B, n)
    multipliers: Tensor  # (B, 2)


class Quadratics(NamedTuple):
    """The objectives; what is shared by all has a first stride of 0."""

    P: Strided | None
    q: Strided
    A: Strided | None  # with P = AᵀA and q = −Aᵀb
    b: Strided | None


@dataclass(frozen=True)
class Layout:
    """A batch of problems over flat sets."""

    form: Form
    sets: FlatForm
    objective: Quadratics
    options: dict[str, int]

    @property
    def batch(self) -> int | None:
        return self.form.batch

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.form.matrix, self.form.vector, *self.sets.tensors

    def search(self, x0: Tensor | None, settings: Settings) -> Found[Results] | None:
        form, like = self.form, self.form.vector
        n, batch = form.n, form.batch or 1
        start = None
        if x0 is not None:
            if (
                x0.dim() not in (1, 2)
                or x0.shape[-1] != n
                or (x0.dtype, x0.device) != (like.dtype, like.device)
                or (x0.dim() == 2 and (form.batch is None or len(x0) not in (1, batch)))
            ):
                return None
            start = strided(x0, 1, like)
        x = like.new_empty((batch, n))
        found = Results(
            torch.empty_like(x),
            like.new_empty((2, batch)),
            like.new_empty((2, batch), dtype=torch.int64),
            like.new_empty((batch, n), dtype=torch.int8),
            like.new_empty((batch, 2), dtype=torch.float64),
        )
        P, q, A, b = self.objective
        lower, upper, slope, total, normal, level = self._parts()
        m = 0 if A is None else A.tensor.shape[-2]
        inputs = (P, q, lower, upper, slope, total, normal, level, start, A, b)
        strides = (
            *_strides(P, 3),
            *q.strides,
            *lower.strides,
            *upper.strides,
            *_strides(slope, 2),
            *_strides(total, 1),
            *_strides(normal, 2),
            *_strides(level, 1),
            *_strides(start, 2),
            *_strides(A, 1),
            *_strides(b, 1),
        )
        outputs = (x, *found)
        limits = n, m, batch, _below(settings.tol), settings.max_steps
        given = (*map(_tensor, inputs), *outputs, *strides, *limits)
        launch(search.search, batch, like, given, **self._constants(), **self.options)
        value, gap = found.values.unbind()
        status, steps = found.codes.unbind()
        left = status != SOLVED if bool(status.any()) else None
        if left is not None and bool(left.all()):
            return None
        return Found(x, value, gap, steps, status, left, found)

    def point(self, found: Found[Results]) -> Tensor:
        """As the programs have written it a second time."""
        return found.state.x

    def pullback(self, asked: Sequence[bool], found: Found[Results], v: Tensor) -> Gradients:
        form, results = self.form, found.state
        batch, n = results.x.shape
        outer = asked[0] and form.matrix is not None
        shared = outer and (form.squared or not _is_own(form.matrix, 2, batch))
        u = results.x.new_empty((batch, n), dtype=torch.float64) if shared or form.squared else None
        wide = [2, 1, *[1, 1], *[1, 0] * len(self.sets.rows)]
        targets: list[Tensor | None] = []
        for tensor, wanted, rank in zip(self.tensors, asked, wide, strict=True):
            if not wanted or tensor is None:
                targets.append(None)
                continue
            own = tensor.shape == (batch, *[n] * rank, *[1] * (rank == 0))
            dtype = form.dtype if own else torch.float64
            targets.append(results.x.new_empty((batch, *[n] * rank), dtype=dtype))
        if shared:
            targets[0] = None
        if form.squared:
            targets[0] = targets[1] = None
        P = self.objective.P
        _, _, slope, _, normal, _ = self._parts()
        given = (
            *map(_tensor, (P, slope, normal)),
            results.x,
            results.codes,
            results.places,
            results.multipliers,
            v,
            u,
            *targets,
            *[None] * (8 - len(targets)),
            *_strides(P, 3),
            *_strides(slope, 2),
            *_strides(normal, 2),
            *v.stride(),
            n,
        )
        launch(search.adjoint, batch, v, given, **self._constants(), **self.options)
        gradients = [
            None if target is None or tensor is None else _summed(tensor, target)
            for tensor, target in zip(self.tensors, targets, strict=True)
        ]
        if u is not None:
            gradients[:2] = _of_objective(form, asked, results, u)
        return gradients

    def _parts(self) -> tuple[Any, ...]:
        """Bounds, and the rows, None for those there are not."""
        like = self.form.vector
        (bounds,), rows = self.sets
        ties: list[Strided | None] = []
        for row in rows:
            ties += [strided(row.slope, 1, like), _number(strided(row.total, 1, like))]
        ties += [None] * (4 - len(ties))
        return strided(bounds.lower, 1, like), strided(bounds.upper, 1, like), *ties

    def _constants(self) -> dict[str, Any]:
        info = torch.finfo(self.form.dtype)
        kind = projection.NOTHING.value
        if self.sets.rows:
            budget = self.sets.rows[0].kind == BUDGET
            kind = projection.BUDGET.value if budget else projection.EQUATION.value
        return {
            "KIND": kind,
            "CUT": len(self.sets.rows) > 1,
            "DENSE": self.objective.P is not None,
            "EPS": info.eps,
            "MAX": info.max / 4,
        }


def lay_out(objective: Objective, constraint: Constraint) -> Layout | None:
    """The tensors, or None for what has no normal form or does not fit."""
    form = form_of(objective, constraint, _takes)
    if form is None:
        return None
    sets = form.sets
    if isinstance(sets, Round) or len(sets.bounds) > 1:
        return None
    options = options_of(form.n, form.matrix is not None)
    assert options is not None
    return Layout(form, sets, _objective(form), options)


def _takes(matrix: Tensor | None, n: int) -> bool:
    small = matrix is None or math.prod(matrix.shape[-2:]) <= ENTRIES
    return small and options_of(n, matrix is not None) is not None


def _objective(form: Form) -> Quadratics:
    like = form.vector
    if not form.squared:
        P = None if form.matrix is None else strided(form.matrix, 2, like)
        return Quadratics(P, strided(like, 1, like), None, None)
    assert form.matrix is not None
    A, b = form.matrix.detach().contiguous(), form.vector.detach().contiguous()
    wide = A.double()
    P, q = wide.mT @ wide, -(wide.mT @ b.double().unsqueeze(-1)).squeeze(-1)
    return Quadratics(
        strided(P, 2, like), strided(q, 1, like), strided(A, 2, like), strided(b, 1, like)
    )


def _tensor(part: Strided | None) -> Tensor | None:
    return None if part is None else part.tensor


def _strides(part: Strided | None, count: int) -> tuple[int, ...]:
    return (0,) * count if part is None else part.strides[:count]


def _number(part: Strided) -> Strided:
    """Of a total, of which there is one for each problem."""
    return Strided(part.tensor, part.strides[:1])


def _is_own(tensor: Tensor | None, rank: int, batch: int) -> bool:
    """Whether every problem has a part of a tensor for itself."""
    return tensor is not None and tensor.dim() > rank and len(tensor) == batch


def _below(tol: float) -> float:
    """In float32, in which numbers are handed to a program, but not above it."""
    near = np.float32(tol)
    return float(near if near <= tol else np.nextafter(near, np.float32(0)))


def _summed(like: Tensor, each: Tensor) -> Tensor:  # (B, ·)
    """One gradient for each problem, summed over what shares the tensor."""
    if each.dtype == like.dtype and each.numel() == like.numel():
        return each.view(like.shape)
    if like.dim() < each.dim():
        each = each.sum(0)
    elif like.dim() > each.dim():
        each = each.unsqueeze(-1)
    return _narrowed(each.sum_to_size(like.shape), like.dtype)


def _narrowed(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype; a number that it cannot hold is none, as everywhere here."""
    if dtype == gradient.dtype:
        return gradient
    narrow = gradient.to(dtype)
    return torch.where(torch.isfinite(narrow), narrow, 0)


def _of_objective(
    form: Form, asked: Sequence[bool], results: Results, u: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients in a matrix that is shared, or in those of least squares."""
    matrix, vector = form.matrix, form.vector
    assert matrix is not None
    x = results.x.double()
    if not form.squared:
        total = -0.5 * (u.mT @ x)
        of_vector = _summed(vector, -u) if asked[1] else None
        return _narrowed((total + total.mT).reshape(matrix.shape), form.dtype), of_vector
    # of Aᵀ(Ax − b): −(Au) xᵀ − r uᵀ, and Au for b; the numbers of what was left may be any
    A, left = matrix.detach().double(), (results.codes[0] != SOLVED).unsqueeze(-1)
    moved = torch.where(left, 0, (A @ u.unsqueeze(-1)).squeeze(-1))
    of_matrix = None
    if asked[0]:
        residual = (A @ x.unsqueeze(-1)).squeeze(-1) - vector.detach().double()
        residual = torch.where(left, 0, residual)
        if _is_own(matrix, 2, len(u)):
            of_matrix = -(moved.unsqueeze(-1) * x.unsqueeze(-2))
            of_matrix -= residual.unsqueeze(-1) * u.unsqueeze(-2)
        else:
            of_matrix = -(moved.mT @ x + residual.mT @ u)
        of_matrix = _narrowed(of_matrix.reshape(matrix.shape), form.dtype)
    return of_matrix, _summed(vector, moved) if asked[1] else None
