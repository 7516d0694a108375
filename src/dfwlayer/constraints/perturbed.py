"""A smooth stand-in for the vertex of any set: the mean over costs with noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dfwlayer.ops.rows import dot

__all__ = ["mean_vertex"]


def mean_vertex(
    vertex: Callable[[Tensor], Tensor],
    g: Tensor,  # (..., n)
    temperature: float,
    samples: int = 16,
) -> Tensor:
    """An estimate of E vertex(g + τZ), Z Gaussian (Berthet et al., 2020), always the same noise.

    Its derivative in g is an estimate of E (vertex(g + τZ) − vertex(g)) Zᵀ / τ.
    """
    size = max(temperature, torch.finfo(g.dtype).tiny)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((samples, g.shape[-1]), generator=generator, dtype=g.dtype).to(g.device)
    at = g.detach()
    points = torch.stack([vertex(at + size * z) for z in noise])
    mean = points.mean(0)
    if not g.requires_grad:
        return mean
    moves = points.detach() - vertex(at).detach()
    slope: Tensor = _Slope.apply(g, noise, moves, size)  # type: ignore[no-untyped-call]
    return mean + slope


class _Slope(torch.autograd.Function):
    """Zero, whose derivative is the mean of moves · Zᵀ / τ."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, noise: Tensor, moves: Tensor, size: float) -> Tensor:
        ctx.size = size
        ctx.save_for_backward(noise, moves)
        return torch.zeros_like(g)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None, None]:
        noise, moves = ctx.saved_tensors
        share = dot(moves, v) / (ctx.size * len(noise))  # (samples, ...)
        return torch.tensordot(share, noise, ([0], [0])), None, None, None
