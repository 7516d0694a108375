"""What compiled code takes of a solve: a quadratic function and a set in normal form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.region import Block, Flat, Linear, Power, Round
from dfwlayer.engines.compiled.arrays import Batch
from dfwlayer.engines.compiled.kernels.constants import FLATTEST, STEEPEST
from dfwlayer.engines.compiled.kernels.table import BUDGET, EQUATION
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.values import Value

__all__ = ["Bounds", "FlatForm", "Form", "Row", "form_of", "tensors_of"]


class Row(NamedTuple):
    """A budget or an equation."""

    kind: float
    slope: Value
    total: Value
    first: int  # coordinate
    end: int


class Bounds(NamedTuple):
    """l and u of a block of coordinates, and which of the rows tie these together."""

    lower: Value
    upper: Value
    first: int
    end: int
    rows: tuple[int, int]  # the first one, and the end


class FlatForm(NamedTuple):
    """Bounds, budgets and equations, block by block."""

    bounds: tuple[Bounds, ...]
    rows: tuple[Row, ...]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, None for numbers."""
        sides = (side for block in self.bounds for side in (block.lower, block.upper))
        ties = (part for row in self.rows for part in (row.slope, row.total))
        return tensors_of(*sides, *ties)


@dataclass(frozen=True)
class Form:
    """A batch of problems, in the tensors and numbers that were given."""

    matrix: Tensor | None
    vector: Tensor
    squared: bool  # ½ ‖Ax − b‖² and not ½ xᵀPx + qᵀx
    sets: FlatForm | Linear | Power | Round
    n: int
    batch: int | None
    dtype: torch.dtype


def form_of(
    objective: Objective, constraint: Constraint, takes: Callable[[Tensor | None, int], bool]
) -> Form | None:
    """The form, or None for what has none or is not plain tensors that fit together.

    ``takes`` tells whether a matrix with so many columns, or so many coordinates without one, are
    of a size that somebody wants.
    """
    dense = objective.dense()
    if dense is None or dense.vector.dtype not in (torch.float64, torch.float32):
        return None
    matrix, vector, squared = dense
    n = objective.shape[0]
    if not takes(matrix, n):
        return None
    batch = Batch(vector.dtype, vector.device)
    if not batch.fits(matrix, 2) or not batch.fits(vector, 1):
        return None
    like = vector.new_empty(n) if squared else vector.detach()
    blocks = constraint.normal_form(n) if constraint.is_plain(like) else None
    sets = None if blocks is None else _sets(blocks, n, batch)
    if sets is None:
        return None
    return Form(matrix, vector, squared, sets, n, batch.size, vector.dtype)


def _sets(form: Sequence[Block], n: int, batch: Batch) -> FlatForm | Linear | Power | Round | None:
    """Blocks in normal form, if their tensors fit."""
    if isinstance(form[0], Round | Power):
        fit = len(form) == 1 and all(batch.fits(part, 1) for part in form[0][1:])
        if isinstance(form[0], Power):
            fit = fit and FLATTEST <= form[0].p <= STEEPEST
        return form[0] if fit else None
    if isinstance(form[0], Linear):
        only = form[0]
        fit = batch.fits(only.G, 2) and batch.fits(only.A, 2)
        fit = fit and all(batch.fits(v, 1) for v in (only.h, only.b, only.lower, only.upper))
        return only if fit else None
    bounds: list[Bounds] = []
    rows: list[Row] = []
    first = 0
    for block in form:
        if not isinstance(block, Flat):
            return None
        end, tied = first + block.n, len(rows)
        if block.weight is not None:
            rows.append(Row(BUDGET, block.weight, block.radius, first, end))
        rows += [Row(EQUATION, a, b, first, end) for a, b in block.equations]
        if len(rows) - tied > 2:
            return None
        bounds.append(Bounds(block.lower, block.upper, first, end, (tied, len(rows))))
        first = end
    parts = [side for block in bounds for side in block[:2]]
    parts += [part for row in rows for part in (row.slope, row.total)]
    if first != n or not all(batch.fits(part, 1) for part in parts):
        return None
    return FlatForm(tuple(bounds), tuple(rows))


def tensors_of(*values: Value) -> tuple[Tensor | None, ...]:
    """Those that are tensors, None for the others."""
    return tuple(v if isinstance(v, Tensor) else None for v in values)
