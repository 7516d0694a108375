"""Polyhedra in normal form as the arrays that compiled code reads, and the code for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dfwlayer.constraints.region import Linear
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import Array, Batch, array_of, outer, stretched, summed
from dfwlayer.engines.compiled.kernels import linear, outcome
from dfwlayer.engines.compiled.results import Adjoint, Arrays, Limits, Results
from dfwlayer.engines.compiled.threads import spread
from dfwlayer.linalg.quadratic.thin import SHARE
from dfwlayer.ops.matrices import has_scipy
from dfwlayer.ops.values import Value

__all__ = ["Polyhedra", "polyhedra_of"]

LARGEST = 600  # coordinates
ENTRIES = 10**6  # of G and A of one problem
THIN = 12 * 10**6  # multiplications before the first step, beyond which sparse factors are faster


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
        if batch == 1 and self._is_thin(objective[0]):
            found.codes[0] = outcome.UNFIT
            return found
        own = self.E, self.e, self.G, self.h, self.lower, self.upper
        given = *objective, *own, *limits, *found[:4]
        spread(
            lambda first, end: linear.search(first, end, *given),
            batch,
            n**3 // 3 + rows * n * n // 2 + 8 * n * n * rows,
        )
        return found

    def _is_thin(self, P: Array) -> bool:
        """Whether sparse factors are faster: those here take all entries for numbers."""
        n = self.lower.shape[1]
        if n**3 // 3 + self._count * n * n // 2 < THIN or not has_scipy():
            return False
        parts = P, self.E, self.G
        stored = sum(int(np.count_nonzero(part)) for part in parts)
        return stored <= SHARE * sum(part.size for part in parts)

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        u, nu = np.empty_like(v), np.empty_like(found.multipliers)
        own = self.E, self.G, self.lower, self.upper
        given = P, *own, eps, found.codes, found.multipliers, v, u, nu
        batch, n = v.shape
        spread(lambda first, end: linear.adjoint(first, end, *given), batch, n**3)
        return Adjoint(u, nu, None)

    def envelope(self, found: Results, g: Array) -> Adjoint:
        return Adjoint(np.zeros_like(found.x), -found.multipliers, None)

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Of −⟨u, Gᵀλ + Eᵀμ⟩ − Σ ν_j (⟨n_j, x⟩ − c_j), and x_i moves with its bound.

        That is the one that holds it, and the upper one where l = u and neither does.
        """
        form, k = self.form, self.E.shape[1]
        ties = k + self.G.shape[1]
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
