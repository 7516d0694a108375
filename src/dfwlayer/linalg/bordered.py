"""Systems with a border: a matrix that can be inverted, and a few equations beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dfwlayer.ops.scale import TINY

__all__ = ["bordered", "combined", "dots"]


def bordered(
    apply: Callable[[Tensor], Tensor],
    inverse: Callable[[Tensor], Tensor],
    border: Tensor,
    corner: Tensor,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Solve K u + Bᵀy = r, B u − C y = v, given K (B, n) -> (B, n) and its inverse.

    B is (B, k, n) and C (B, k, k) positive semi-definite; rows of B may depend on each other.
    Returned is (r, v) ↦ (u, y).
    """
    steep = inverse(border.mT)  # (B, n, k)
    across = border @ steep + corner
    unit = across.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).rsqrt()
    scaled = unit.unsqueeze(-1) * across * unit.unsqueeze(-2)
    sound = torch.isfinite(scaled).all(-1).all(-1)[:, None, None]
    values, vectors = torch.linalg.eigh(torch.where(sound, scaled, 0))
    usable = values > 1e-14
    spread = torch.where(usable, 1 / torch.where(usable, values, 1), 0)

    def solve(r: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        u, y = torch.zeros_like(r), torch.zeros_like(v)
        for _ in range(2):  # the second time for what rounding left
            rest = r - apply(u) - combined(y, border)
            below = v - dots(border, u) + dots(corner, y)
            du = inverse(rest.unsqueeze(-1)).squeeze(-1)
            turned = vectors.mT @ (unit * (dots(border, du) - below)).unsqueeze(-1)
            dy = unit * (vectors @ (spread.unsqueeze(-1) * turned)).squeeze(-1)
            u = u + du - dots(steep, dy)
            y = y + dy
        return u, y

    return solve


def dots(rows: Tensor, v: Tensor) -> Tensor:  # (B, k, n), (B, n) -> (B, k)
    """⟨row, v⟩ for each of the rows."""
    return (rows @ v.unsqueeze(-1)).squeeze(-1)


def combined(c: Tensor, rows: Tensor) -> Tensor:  # (B, k), (B, k, n) -> (B, n)
    """Σ c_j row_j."""
    return (c.unsqueeze(-2) @ rows).squeeze(-2)
