"""Matrices with given sums of rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.constraints.plain.base import Plain, wide
from dfwlayer.constraints.plain.thresholds import level
from dfwlayer.constraints.polyhedra.birkhoff_projection import filled_up
from dfwlayer.ops.values import Value

__all__ = ["PlainSums"]


@dataclass(frozen=True)
class PlainSums(Plain):
    """{X ≥ 0 : X 1 = r, Xᵀ1 = c} over matrices (m, k), row after row.

    The projection is (Z − u_i − v_j)₊, and u and v are found in turns, each by thresholds that make
    the sums of all rows, or of all columns, right. What is missing to both is then filled up.
    """

    rows: Value  # r, a number or (..., m)
    columns: Value  # c, a number or (..., k)
    size: tuple[int, int]

    @property
    def exact(self) -> bool:
        """No."""
        return False

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """By turns of thresholds."""
        square = z.reshape(*z.shape[:-1], *self.size)
        r, c = (wide(total, z) for total in (self.rows, self.columns))
        if r.dim() and c.dim():  # of the same total, to the last digits
            c = c * (r.sum(-1, keepdim=True) / c.sum(-1, keepdim=True))
        r, c = (total.unsqueeze(-1) if total.dim() else total for total in (r, c))
        left = square
        v = torch.zeros_like(square[..., :1, :])
        for _ in range(steps):
            left = square - level(square - v, r)
            v = level(left.transpose(-2, -1), c).transpose(-2, -1)
        x = (left - v).clamp_min(0.0)
        return filled_up(x, r, c.transpose(-2, -1) if c.dim() else c).flatten(-2)

    def inside(self, x: Tensor) -> Tensor:
        """x, whose sums are right to rounding."""
        return x.clamp_min(0.0)
