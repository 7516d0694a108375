"""Singular values and vectors of matrices, and functions of them that can be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dfwlayer.ops.matrices import lu_solved

__all__ = [
    "Factors",
    "completed",
    "divided_differences",
    "factors",
    "spectral_function",
    "split",
]


class Factors(NamedTuple):
    """x = Σ σ_i u_i v_iᵀ, with σ descending."""

    left: Tensor  # (..., r, k)
    values: Tensor  # (..., k)
    right: Tensor  # (..., c, k)

    def product(self, values: Tensor) -> Tensor:  # (..., k) -> (..., r, c)
        """The matrix with other singular values."""
        return (self.left * values.unsqueeze(-2)) @ self.right.mT


def factors(x: Tensor) -> Factors:  # (..., r, c)
    """All of them, of the constant x; zero for matrices that are not finite."""
    x = x.detach()
    finite = torch.isfinite(x).all(-1).all(-1)[..., None, None]
    left, values, right = torch.linalg.svd(torch.where(finite, x, 0), full_matrices=False)
    return Factors(left, values, right.mT)


def spectral_function(g: Tensor, profile: Callable[[Tensor], Tensor]) -> Tensor:
    """U diag(φ(σ)) Vᵀ for g = U diag(σ) Vᵀ (..., r, c), with the derivative in g.

    φ, the profile, maps (..., k) to (..., k) such that equal singular values get equal ones.
    """
    at = factors(g)
    if not g.requires_grad:
        return at.product(profile(at.values))
    values = (at.left * (g @ at.right)).sum(-2)  # dσ_i = ⟨u_i v_iᵀ, dg⟩
    out: Tensor = _Rotated.apply(g, profile(values), *at)  # type: ignore[no-untyped-call]
    return out


class _Rotated(torch.autograd.Function):
    """U diag(φ) Vᵀ, differentiated in φ and, through the rotation of U and V alone, in g.

    With M = Uᵀ dg V, the symmetric part of M changes the result by (φ_i − φ_j)/(σ_i − σ_j) M_ij,
    the antisymmetric one by (φ_i + φ_j)/(σ_i + σ_j) M_ij, and what is beside U or V by φ_i/σ_i.
    Where a denominator vanishes there is no derivative, and none is given.
    """

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, profile: Tensor, left: Tensor, values: Tensor, right: Tensor
    ) -> Tensor:
        ctx.save_for_backward(profile, left, values, right)
        return Factors(left, values, right).product(profile)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        profile, left, values, right = ctx.saved_tensors
        along, across, down = split(grad, left, right)
        eps = torch.finfo(values.dtype).eps
        least = 8 * eps * values.amax(-1, keepdim=True)
        even, odd = divided_differences(profile, values, least)
        sym, anti = 0.5 * (along + along.mT), 0.5 * (along - along.mT)
        core = even * sym + odd * anti
        core = core - torch.diag_embed(torch.diagonal(core, dim1=-2, dim2=-1))
        some = values > least
        rate = torch.where(some, profile / torch.where(some, values, 1), 0)
        beside = left @ (core @ right.mT + rate.unsqueeze(-1) * across)
        in_g = beside + (down * rate.unsqueeze(-2)) @ right.mT
        return in_g, torch.diagonal(along, dim1=-2, dim2=-1), None, None, None


def split(v: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """UᵀvV (k, k), Uᵀv beside V (k, c), and vV beside U (r, k).

    Columns of U and V are orthonormal, or zero.
    """
    across, down = left.mT @ v, v @ right
    along = across @ right
    return along, across - along @ right.mT, down - left @ along


def completed(values: Tensor, along: Tensor, across: Tensor) -> Tensor:
    """(diag(σ) + A)⁻¹ B, with which E makes [[diag(σ) + A, B], [E, ·]] a matrix of rank k.

    It is zero where A (..., k, k) is so large that the matrix is not near one of that rank.
    """
    near = torch.linalg.matrix_norm(along) < 0.5 * values.amin(-1)
    moved = torch.where(near[..., None, None], along, 0) + torch.diag_embed(values)
    return torch.where(near[..., None, None], lu_solved(moved, across, sound=False), 0)


def divided_differences(
    profile: Tensor,  # (..., k), φ
    values: Tensor,  # (..., k), σ
    least: Tensor,  # (..., 1), differences and sums up to this are zero
    slope: Tensor | None = None,  # (..., k, k), φ' where σ_i and σ_j are the same, None for 0
) -> tuple[Tensor, Tensor]:
    """(φ_i − φ_j)/(σ_i − σ_j) and (φ_i + φ_j)/(σ_i + σ_j), each (..., k, k)."""
    least = least.unsqueeze(-1)
    gap = values.unsqueeze(-1) - values.unsqueeze(-2)
    rise = profile.unsqueeze(-1) - profile.unsqueeze(-2)
    apart = gap.abs() > least
    even = torch.where(apart, rise / torch.where(apart, gap, 1), 0 if slope is None else slope)
    total = values.unsqueeze(-1) + values.unsqueeze(-2)
    both = profile.unsqueeze(-1) + profile.unsqueeze(-2)
    some = total > least
    return even, torch.where(some, both / torch.where(some, total, 1), 0)
