"""Single sparse programs, whole in one compiled call; their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.region import Linear
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import Array, Batch, Laid, array_of, outer, stretched, summed
from dfwlayer.engines.compiled.kernels import outcome, thin
from dfwlayer.engines.compiled.results import Adjoint, Limits, Results
from dfwlayer.linalg.quadratic.thin import DENSE, SHARE, SMALLEST
from dfwlayer.linalg.sparse import SparseMatrix
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.matrices import has_scipy

__all__ = ["SparseProgram", "ThinPrograms", "by_rows", "lay_out_thin", "pulled"]

FARTHEST = 1e12  # x against the sides of rows and bounds; others tell whether there is a solution

ByRows = tuple[Array, Array, Array]  # where rows begin, the columns of entries, and these


class SparseProgram(NamedTuple):
    """The matrices of min ½ xᵀPx + qᵀx over {x : l ≤ x ≤ u, G x ≤ h, A x = b}, by rows."""

    P: ByRows
    A: ByRows
    G: ByRows

    @property
    def stored(self) -> int:
        """Entries that are not zero."""
        return sum(len(part[2]) for part in self)

    def search(self, vectors: Sequence[Array], limits: Limits) -> Results:
        """Solve it, for q, b, h, l and u (n,)."""
        _, tol, most = limits
        n, rows = len(vectors[0]), sum(len(part[0]) - 1 for part in self)
        found = Results.blank(1, n, rows)
        thin.search(*self, *vectors, tol, most, *found[:4])
        if found.codes.item(0) == outcome.UNFIT:  # there is no x
            return found
        sides = np.concatenate(vectors[1:])
        largest = np.abs(sides[np.isfinite(sides)]).max(initial=1.0)
        if not np.abs(found.x).max(initial=0.0) <= FARTHEST * largest:
            found.codes[0] = outcome.LOST  # beside such an x no row is missed by more than rounding
        return found

    def adjoint(self, lower: Array, upper: Array, found: Results, v: Array) -> Adjoint:
        """The adjoint system at what was found."""
        u, nu = np.empty_like(v), np.empty_like(found.multipliers)
        thin.adjoint(*self, lower, upper, found.codes, found.multipliers, v, u, nu)
        return Adjoint(u, nu, None)


def by_rows(matrix: Tensor | Array | None) -> ByRows:
    """One matrix (m, n), dense, COO or CSR; None has no rows."""
    if matrix is None:
        return np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0)
    if isinstance(matrix, Tensor):
        if matrix.layout != torch.strided:
            held = SparseMatrix.of(matrix)
            start, place = (
                p.numpy().astype(np.int64) for p in (held.pattern.crow, held.pattern.col)
            )
            return start, place, held.entries.double().numpy()
        matrix = array_of(matrix, 2)[0]
    found: ByRows = thin.by_rows(matrix)
    return found


def pulled(
    form: Linear, counts: tuple[int, int], asked: Sequence[bool], found: Results, adjoint: Adjoint
) -> Gradients:
    """Of −⟨u, Gᵀλ + Eᵀμ⟩ − Σ ν_j (⟨n_j, x⟩ − c_j), and x_i moves with its bound.

    That is the one that holds it, and the upper one where l = u and neither does. ``counts`` is how
    many equations there are, and how many rows of both kinds.
    """
    k, ties = counts
    gradients: Gradients = []
    for matrix, side, own, first in (
        (form.G, form.h, asked[:2], slice(k, ties)),
        (form.A, form.b, asked[2:4], slice(k)),
    ):
        force, nu = found.multipliers[:, first], adjoint.nu[:, first]
        of_matrix: Tensor | None = None
        if own[0]:
            assert matrix is not None
            of_matrix = outer(matrix, -force, adjoint.u, -nu, found.x)
        gradients += [of_matrix, summed(side, nu) if own[1] else None]
    force, nu = found.multipliers[:, ties:], adjoint.nu[:, ties:]
    for value, at, want in (
        (form.lower, force < 0, asked[4]),
        (form.upper, force >= 0, asked[5]),
    ):
        gradients.append(summed(value, np.where(at, nu, 0.0)) if want else None)
    return gradients


@dataclass(eq=False)
class ThinPrograms(Laid):
    """One program whose matrices were given as sparse tensors, or are too large to be filled in."""

    program: SparseProgram
    matrix: Tensor | None
    vector: Tensor
    form: Linear
    sides: tuple[Array, ...]  # b, h, l and u
    n: int
    batch: int | None
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """P, q, G, h, A, b, lower, upper."""
        form = self.form
        parts = form.G, form.h, form.A, form.b, form.lower, form.upper
        own = (part if isinstance(part, Tensor) else None for part in parts)
        return (self.matrix, self.vector, *own)

    def search(self, start: Array, tol: float, most: int) -> Results:
        """Solve it; there is nothing to be had from a start."""
        return self.program.search(
            (array_of(self.vector, 1)[0], *self.sides), (self.eps, tol, most)
        )

    def pullback(self, asked: Sequence[bool], found: Results, v: Array) -> Gradients:
        """Gradients in `tensors` from one in x (1, n)."""
        _, _, lower, upper = self.sides
        adjoint = self.program.adjoint(lower, upper, found, v)
        x, u = found.x, adjoint.u
        of_matrix = None
        if asked[0] and self.matrix is not None:
            of_matrix = outer(self.matrix, -0.5 * u, x, -0.5 * x, u)
        of_vector = summed(self.vector, -u) if asked[1] else None
        return [of_matrix, of_vector, *self._of_rows(asked[2:], found, adjoint)]

    def envelope(self, asked: Sequence[bool], found: Results, w: Array) -> Gradients:
        """Gradients in `tensors` from one in the value (1, 1)."""
        x = found.x
        of_matrix = None
        if asked[0] and self.matrix is not None:
            of_matrix = outer(self.matrix, 0.25 * w * x, x, 0.25 * x, w * x)
        of_vector = summed(self.vector, w * x) if asked[1] else None
        adjoint = Adjoint(np.zeros_like(x), -w * found.multipliers, None)
        return [of_matrix, of_vector, *self._of_rows(asked[2:], found, adjoint)]

    def _of_rows(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        counts = len(self.sides[0]), len(self.sides[0]) + len(self.sides[1])
        return pulled(self.form, counts, asked, found, adjoint)


def lay_out_thin(objective: Objective, constraint: Constraint) -> ThinPrograms | None:
    """One program over rows and bounds most of whose entries are zero; None for others."""
    given = objective.whole() if objective.shards is None else None
    if given is None or given.squared or given.vector.dtype != torch.float64 or not has_scipy():
        return None
    matrix, vector, _ = given
    n, batch = objective.shape[0], Batch(vector.dtype)
    if not batch.fits(vector, 1) or batch.size not in (None, 1):
        return None
    form = constraint.normal_form(n) if constraint.is_plain(vector.detach()) else None
    if form is None or len(form) != 1 or not isinstance(form[0], Linear):
        return None
    linear = form[0]
    values = linear.b, linear.h, linear.lower, linear.upper
    matrices = matrix, linear.A, linear.G
    if not all(batch.fits(value, 1) for value in values) or batch.size not in (None, 1):
        return None
    if not all(part is None or _is_one(part, batch) for part in matrices):
        return None
    sparse = any(part is not None and part.layout != torch.strided for part in matrices)
    counts = [0 if part is None else part.shape[-2] for part in matrices[1:]]
    if not sparse and n <= DENSE and n + sum(counts) < SMALLEST:
        return None
    P, A, G = (by_rows(part) for part in matrices)
    if matrix is None:
        each = np.arange(n + 1)
        P = each, each[:-1], np.ones(n)
    program = SparseProgram(P, A, G)
    most = SHARE * sum(part.numel() for part in matrices if part is not None)
    if not sparse and n <= DENSE and program.stored > most:
        return None
    widths = (*counts, n, n)
    sides = tuple(
        stretched(array_of(value, 1), 1, width)[0]
        for value, width in zip(values, widths, strict=True)
    )
    return ThinPrograms(program, matrix, vector, linear, sides, n, batch.size, vector.dtype)


def _is_one(matrix: Tensor, batch: Batch) -> bool:
    """Whether it is a plain matrix of one problem; gradients of sparse ones are for others."""
    dense = matrix.layout == torch.strided
    return matrix.dim() == 2 and batch.plain(matrix) and (dense or not matrix.requires_grad)
