"""Subspaces that a face leaves to a solution, and the projections onto them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.rows import axpy, inner, or_one

__all__ = ["Normals", "Orthogonal", "Tangent"]


class Tangent(NamedTuple):
    """The subspace {v : v = 0 off the free set, ⟨unit, v⟩ = 0}; called, the projection onto it."""

    free: Tensor  # (..., n), 1 or 0
    unit: Tensor  # (..., n), of length one on the free set, or zero

    def __call__(self, v: Tensor) -> Tensor:
        v = v * self.free
        return axpy(v, -inner(self.unit, v), self.unit)


class Normals(NamedTuple):
    """Several vectors a_1 … a_m per problem, not necessarily independent, and their span."""

    vectors: Tensor  # (..., m, n)
    inverse: Tensor  # (..., m, m), pseudo-inverse of the inner products ⟨a_i, a_j⟩

    @classmethod
    def of(cls, normals: Sequence[Tensor]) -> Normals:
        """In double precision, for what is dependent should be seen to be."""
        vectors = torch.stack(tuple(normals), -2)
        size = vectors.abs().amax(-1, keepdim=True).double()
        scale = torch.where(size > 0, 1 / or_one(size), 1)
        scaled = vectors.double() * scale
        inverse = torch.linalg.pinv(scaled @ scaled.mT, rtol=1e-12, hermitian=True)
        return cls(vectors, (scale * inverse * scale.mT).to(vectors.dtype))

    def coefficients(self, v: Tensor) -> Tensor:  # (..., n) -> (..., m)
        """c with the least ‖v − Σ c_j a_j‖, and among those of the least norm."""
        along = self.vectors @ v.unsqueeze(-1)
        return (self.inverse @ along).squeeze(-1)

    def combine(self, c: Tensor) -> Tensor:  # (..., m) -> (..., n)
        """Σ c_j a_j."""
        return (c.unsqueeze(-2) @ self.vectors).squeeze(-2)


@dataclass(frozen=True)
class Orthogonal:
    """The subspace {v : v = restrict(v), ⟨a_j, v⟩ = 0}; called, the projection onto it."""

    restrict: Callable[[Tensor], Tensor]
    normals: Normals | None

    def __call__(self, v: Tensor) -> Tensor:
        v = self.restrict(v)
        if self.normals is None:
            return v
        for _ in range(2):  # once more for what rounding left
            v = v - self.normals.combine(self.normals.coefficients(v))
        return v
