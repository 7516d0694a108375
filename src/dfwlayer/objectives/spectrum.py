"""Bounds on the spectrum of a symmetric operator from products with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dfwlayer.linalg import dot, norm, where_rows
from dfwlayer.objectives.base import Curvature

__all__ = ["dense_spectrum", "lanczos_spectrum"]

SMALL = 64  # up to this size all eigenvalues are computed; beyond it Lanczos is cheaper
STEPS = 24  # Lanczos steps; from about 20 on the bound is within 20% on random spectra


def dense_spectrum(matrix: Tensor) -> Curvature:  # (..., n, n) -> (...), (...)
    """Smallest and largest eigenvalue of small symmetric matrices, rounding included.

    The largest carries the gradient vvᵀ of its eigenvector v.
    """
    eigenvalues, vectors = torch.linalg.eigh(matrix.detach())
    top = vectors[..., :, -1]
    # LAPACK's eigenvalues are off by a modest multiple of eps · ‖P‖₂
    slack = 8 * matrix.shape[-1] ** 0.5 * torch.finfo(matrix.dtype).eps
    reach = eigenvalues.abs().amax(-1)
    high = _with_gradient(reach * (1 + slack), dot(top, (matrix @ top.unsqueeze(-1)).squeeze(-1)))
    return Curvature(eigenvalues[..., 0], high)


def lanczos_spectrum(
    matvec: Callable[[Tensor], Tensor],  # (B, n) -> (B, n)
    template: Tensor,  # (B, n), tells size, dtype and device
) -> Curvature:
    """Spectrum from Lanczos with full reorthogonalisation: low = θ_min, high = θ_max + β.

    The Ritz values θ lie inside the spectrum. After k steps the Lanczos residual has norm β, and
    θ_max + β bounds the whole spectrum from above as soon as the start has a component along the
    top eigenvector (Zhou and Li, 2011), which a random start has with probability one.
    """
    batch, n = template.shape
    generator = torch.Generator().manual_seed(n)
    eps = torch.finfo(template.dtype).eps

    def fresh() -> Tensor:
        start = torch.randn(n, generator=generator, dtype=torch.float64)
        unit: Tensor = (start / start.norm()).to(template)
        return unit.expand(batch, n)

    v = fresh()
    basis: list[Tensor] = []
    diagonal: list[Tensor] = []
    off: list[Tensor] = []
    largest = dropped = torch.zeros_like(template[:, 0])
    with torch.no_grad():
        for _ in range(min(STEPS, n)):
            basis.append(v)
            product = matvec(v)
            diagonal.append(dot(v, product))
            stack = torch.stack(basis, 1)  # (B, k, n)
            product = _orthogonal(stack, product)
            beta = norm(product)
            largest = torch.maximum(largest, diagonal[-1].abs() + beta)
            # a residual of rounding: the Krylov space is exhausted, go on with another start
            usable = beta > 2 * n**0.5 * eps * largest
            other = _orthogonal(stack, fresh())
            v = where_rows(usable, product, other)
            v = v / norm(v).clamp_min(torch.finfo(v.dtype).tiny).unsqueeze(-1)
            dropped = torch.maximum(dropped, torch.where(usable, 0, beta))
            off.append(torch.where(usable, beta, 0))
        k = len(basis)
        tri = torch.diag_embed(torch.stack(diagonal, -1))
        if k > 1:
            side = torch.diag_embed(torch.stack(off[:-1], -1), 1)
            tri = tri + side + side.mT
        theta, small_vectors = torch.linalg.eigh(tri)
        ritz = (torch.stack(basis, -1) @ small_vectors[:, :, -1:]).squeeze(-1)
        reach = theta.abs().amax(-1)
        residual = off[-1] if k < n else torch.zeros_like(off[-1])
        high = (reach + residual + dropped) * (1 + 8 * n**0.5 * eps)
    return Curvature(theta[:, 0], _with_gradient(high, dot(ritz, matvec(ritz))))


def _orthogonal(basis: Tensor, v: Tensor) -> Tensor:  # (B, k, n), (B, n) -> (B, n)
    """v without its part in the basis; twice is enough for orthogonality to rounding."""
    for _ in range(2):
        inner = basis @ v.unsqueeze(-1)
        v = v - (basis.mT @ inner).squeeze(-1)
    return v


def _with_gradient(value: Tensor, quotient: Tensor) -> Tensor:
    """The value, with the gradient of the Rayleigh quotient of the top eigenvector."""
    return value + (quotient - quotient.detach())
