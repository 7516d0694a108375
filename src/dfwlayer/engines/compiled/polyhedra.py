"""Polyhedra in normal form as the arrays that compiled code reads, and the code for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dfwlayer.constraints.region import Linear
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import Array, Batch, array_of, stretched
from dfwlayer.engines.compiled.kernels import linear, outcome
from dfwlayer.engines.compiled.kernels.constants import SINGLE
from dfwlayer.engines.compiled.results import Adjoint, Arrays, Limits, Results
from dfwlayer.engines.compiled.thin import SparseProgram, by_rows, pulled
from dfwlayer.engines.compiled.threads import spread
from dfwlayer.linalg.quadratic.thin import FEW, SHARE
from dfwlayer.ops.matrices import has_scipy
from dfwlayer.ops.values import Value

__all__ = ["Polyhedra", "polyhedra_of"]

LARGEST = 600  # coordinates
ENTRIES = 10**6  # of G and A of one problem
ANSWERED = outcome.SOLVED, outcome.SHARED, outcome.TIED
THIN = 10**7  # multiplications before the first step, beyond which sparse factors are faster


@dataclass(frozen=True)
class Polyhedra:
    """{x : l ≤ x ≤ u, G x ≤ h, E x = e}, see `dfwlayer.engines.compiled.kernels.linear`."""

    form: Linear
    E: Array  # (·, k, n)
    e: Array  # (·, k)
    G: Array  # (·, m, n)
    h: Array  # (·, m)
    lower: Array  # (·, n)
    upper: Array  # (·, n)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """G, h, A, b, lower, upper."""
        form = self.form
        parts = form.G, form.h, form.A, form.b, form.lower, form.upper
        return tuple(part if isinstance(part, Tensor) else None for part in parts)

    @property
    def _count(self) -> int:
        """Rows of all kinds."""
        return int(self.E.shape[1] + self.G.shape[1] + self.lower.shape[1])

    def renewal(self) -> None:
        """Their rows take longer than all that is around them."""

    def search(self, objective: Arrays, start: Array, limits: Limits, batch: int) -> Results:
        n, rows = start.shape[1], self._count
        found = Results.blank(batch, n, rows)
        thin = self._thin(objective[0]) if batch == 1 and self._is_large else None
        if thin is not None:
            return self._searched(thin, objective, limits)
        own = self.E, self.e, self.G, self.h, self.lower, self.upper
        given = *objective, *own, *limits, *found[:4]
        spread(
            lambda first, end: linear.search(first, end, *given),
            batch,
            n**3 // 3 + rows * n * n // 2 + 8 * n * n * rows,
        )
        if batch == 1 and found.codes.item(0) not in ANSWERED and has_scipy():
            thin = self._thin(objective[0], few=FEW)
            again = found if thin is None else self._searched(thin, objective, limits)
            return again if again.codes.item(0) in ANSWERED else found
        return found

    def _searched(self, thin: SparseProgram, objective: Arrays, limits: Limits) -> Results:
        """By sparse factors."""
        if limits[0] == SINGLE or objective[2].size:  # rounding x, and residuals, are for others
            found = Results.blank(1, self.lower.shape[1], self._count)
            found.codes[0] = outcome.UNFIT
            return found
        own = objective[1], self.e, self.h, self.lower, self.upper
        return thin.search([part[0] for part in own], limits)

    @property
    def _is_large(self) -> bool:
        """Whether sparse factors are faster, if there are few entries."""
        n = self.lower.shape[1]
        return n**3 // 3 + self._count * n * n // 2 >= THIN and has_scipy()

    def _thin(self, P: Array, few: int = 0) -> SparseProgram | None:
        """The matrices of one problem by rows, where mostly zeros or no more than a few entries.

        The dense factors here take all entries for numbers.
        """
        parts = P, self.E, self.G
        size = sum(part.size for part in parts)
        if not P.size:
            return None
        program = SparseProgram(*(by_rows(part[0]) for part in parts))
        return program if size <= few or program.stored <= SHARE * size else None

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        u, nu = np.empty_like(v), np.empty_like(found.multipliers)
        own = self.E, self.G, self.lower, self.upper
        given = P, *own, eps, found.codes, found.multipliers, v, u, nu
        batch, n = v.shape
        thin = self._thin(P) if batch == 1 and self._is_large else None
        if thin is not None:
            return thin.adjoint(self.lower[0], self.upper[0], found, v)
        spread(lambda first, end: linear.adjoint(first, end, *given), batch, n**3)
        return Adjoint(u, nu, None)

    def envelope(self, found: Results, g: Array) -> Adjoint:
        return Adjoint(np.zeros_like(found.x), -found.multipliers, None)

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """See `pulled`."""
        k = self.E.shape[1]
        return pulled(self.form, (k, k + self.G.shape[1]), asked, found, adjoint)


def polyhedra_of(form: Linear, n: int, batch: Batch) -> Polyhedra | None:
    """The arrays, None where they are not for compiled code."""
    G, A = form.G, form.A
    if n > LARGEST or not batch.fits(G, 2) or not batch.fits(A, 2):
        return None
    if not all(batch.fits(part, 1) for part in (form.h, form.b, form.lower, form.upper)):
        return None
    rows = [0 if part is None else part.shape[-2] for part in (A, G)]
    if sum(rows) * n > ENTRIES:
        return None
    nothing = np.empty((1, 0, n))
    return Polyhedra(
        form,
        nothing if A is None else array_of(A, 2),
        _wide(form.b, rows[0]),
        nothing if G is None else array_of(G, 2),
        _wide(form.h, rows[1]),
        _wide(form.lower, n),
        _wide(form.upper, n),
    )


def _wide(value: Value, count: int) -> Array:
    """An entry for each row."""
    values = array_of(value, 1)
    return stretched(values, len(values), count)
