"""Sets of matrices by their singular values or eigenvalues."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from dfwlayer.constraints.plain.base import Plain, shrunk, wide_column
from dfwlayer.constraints.plain.thresholds import above_zero
from dfwlayer.ops.rows import or_one, scaled_norm
from dfwlayer.ops.values import Value

__all__ = ["PlainSpectraplex", "PlainSpectrum"]


def refuse_onnx() -> str:
    """Raise where a file for ONNX is made, as torch would name an operator only; "" otherwise."""
    if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
        raise ValueError(
            "format: ONNX has no operator for singular values or eigenvalues, which the projection "
            "onto a set of matrices needs; 'aoti' and 'export' of dfwlayer.deploy.export have"
        )
    return ""


# torch.compile is to call it, and not to look into it
refuse_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PlainSpectrum(Plain):
    """{X : ‖σ(X)‖_p ≤ t} over matrices of this shape, row after row."""

    ball: Plain  # of the singular values
    p: float
    radius: Value
    shape: tuple[int, int]

    exact = property(attrgetter("ball.exact"))
    short = property(attrgetter("ball.short"))

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """U diag(s) Vᵀ with s the projection of the singular values."""
        refuse_onnx()
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
        refuse_onnx()
        n = math.isqrt(int(z.shape[-1]))
        square = z.reshape(*z.shape[:-1], n, n)
        values, vectors = torch.linalg.eigh(0.5 * (square + square.transpose(-2, -1)))
        t = wide_column(self.trace, z)
        moved = above_zero(values, None, t)
        moved = moved * (t / or_one(moved.sum(-1, keepdim=True)))
        x: Tensor = (vectors * moved.unsqueeze(-2)) @ vectors.transpose(-2, -1)
        return x.flatten(-2)

    def inside(self, x: Tensor) -> Tensor:
        """x, symmetric; eigenvalues and trace are right to rounding."""
        n = math.isqrt(int(x.shape[-1]))
        square = x.reshape(*x.shape[:-1], n, n)
        half = torch.tril(square)
        return (half + torch.tril(square, -1).transpose(-2, -1)).flatten(-2)
