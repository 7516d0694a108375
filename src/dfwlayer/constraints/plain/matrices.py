"""Sets of matrices by their singular values or eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.constraints.parameters import Value
from dfwlayer.constraints.plain.base import Plain, shrunk, wide_column
from dfwlayer.constraints.plain.thresholds import above_zero
from dfwlayer.ops.rows import or_one, scaled_norm

__all__ = ["PlainSpectraplex", "PlainSpectrum"]


@dataclass(frozen=True)
class PlainSpectrum(Plain):
    """{X : ‖σ(X)‖_p ≤ t} over matrices of this shape, row after row."""

    ball: Plain  # of the singular values
    p: float
    radius: Value
    shape: tuple[int, int]

    @property
    def exact(self) -> bool:
        """Where the ball of the singular values is."""
        return self.ball.exact

    @property
    def short(self) -> bool:
        """Where that is."""
        return self.ball.short

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """U diag(s) Vᵀ with s the projection of the singular values."""
        left, values, right = torch.linalg.svd(
            z.reshape(*z.shape[:-1], *self.shape), full_matrices=False
        )
        moved = self.ball.nearest(values, steps)
        x = ((left * moved.unsqueeze(-2)) @ right).flatten(-2)
        return torch.where((moved == values).all(-1, keepdim=True), z, x)

    def inside(self, x: Tensor) -> Tensor:
        """Scaled back."""
        values = torch.linalg.svdvals(x.double().reshape(*x.shape[:-1], *self.shape))
        size = scaled_norm(values, self.p).unsqueeze(-1)
        units = 2.0 * min(self.shape)  # an entry's rounding is in all singular values
        return shrunk(x, size, wide_column(self.radius, x), units)


@dataclass(frozen=True)
class PlainSpectraplex(Plain):
    """{X = Xᵀ ⪰ 0 : tr X = t} over square matrices, row after row."""

    trace: Value

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """V diag(s) Vᵀ with s the projection of the eigenvalues onto the simplex."""
        n = round(z.shape[-1] ** 0.5)
        square = z.reshape(*z.shape[:-1], n, n)
        values, vectors = torch.linalg.eigh(0.5 * (square + square.mT))
        t = wide_column(self.trace, z)
        moved = above_zero(values, None, t)
        moved = moved * (t / or_one(moved.sum(-1, keepdim=True)))
        x: Tensor = (vectors * moved.unsqueeze(-2)) @ vectors.mT
        return x.flatten(-2)

    def inside(self, x: Tensor) -> Tensor:
        """x, symmetric; eigenvalues and trace are right to rounding."""
        n = round(x.shape[-1] ** 0.5)
        square = x.reshape(*x.shape[:-1], n, n)
        half = torch.tril(square)
        return (half + torch.tril(square, -1).mT).flatten(-2)
