"""Bounds on the spectrum of a symmetric operator from products with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dfwlayer.objectives.base import Curvature
from dfwlayer.ops.rows import dot, norm, where_rows

__all__ = ["dense_spectrum", "lanczos_spectrum", "with_gradient"]

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
    high = with_gradient(reach * (1 + slack), dot(top, (matrix @ top.unsqueeze(-1)).squeeze(-1)))
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
    return Curvature(theta[:, 0], with_gradient(high, dot(ritz, matvec(ritz))))


def _orthogonal(basis: Tensor, v: Tensor) -> Tensor:  # (B, k, n), (B, n) -> (B, n)
    """v without its part in the basis; twice is enough for orthogonality to rounding."""
    for _ in range(2):
        inner = basis @ v.unsqueeze(-1)
        v = v - (basis.mT @ inner).squeeze(-1)
    return v


def with_gradient(value: Tensor, quotient: Tensor) -> Tensor:
    """The value, with the gradient of the Rayleigh quotient of the top eigenvector.

    The eigenvector is a constant in the quotient. That leaves the first derivative as it is, but
    not the second one, which is refused.
    """
    if not quotient.requires_grad:
        return value
    out: Tensor = _FirstDerivative.apply(value, quotient)  # type: ignore[no-untyped-call]
    return out


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, quotient: Tensor) -> Tensor:
        ctx.save_for_backward(quotient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        # linear in grad, which forward mode differentiates; only the way to the matrix is closed
        return None, grad + _NoDerivative.apply(*ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _NoDerivative(torch.autograd.Function):
    """A zero that stands for what depends on the matrix in a way that is not known."""

    @staticmethod
    def forward(ctx: FunctionCtx, quotient: Tensor) -> Tensor:
        return torch.zeros_like(quotient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "the second derivative in P or A of a solve whose steps are unrolled is not known, as "
            "the short step's L, their largest eigenvalue, has a first derivative only: use "
            "differentiate='implicit', a step_size without L such as ExactStep(), or give L as a "
            "number, step_size=ShortStep(lipschitz=...)"
        )
