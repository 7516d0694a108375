"""The quadratic model of f at a point, in double precision, with a Hessian to factorise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer.linalg import sparse_factor
from dfwlayer.ops.matrices import csr, csr_product, raised_cholesky, times
from dfwlayer.ops.scale import TINY

__all__ = ["FEW", "LARGEST", "Model", "SparseModel", "model_by_columns"]

LARGEST = 2**25  # entries of a Hessian, 256 MiB in double precision, that are still written down
FEW = 512  # coordinates up to which a Hessian is found by products with every unit vector
RIDGE = 1e-14  # relative to the diagonal of H


@dataclass(frozen=True)
class Model:
    """½⟨x, Hx⟩ + ⟨q, x⟩ with H = P, or ½‖Ax − b‖² with H = AᵀA, for B problems, in double.

    A is kept where it has far fewer rows than columns; H is then never formed.
    """

    matrix: Tensor  # P (n, n) or (B, n, n), or A (m, n) or (B, m, n)
    linear: Tensor  # q (B, n), or b (B, m)
    factored: bool  # whether the matrix is A
    design: Tensor | None = None  # A where P = AᵀA, for gradients that do not see the square
    target: Tensor | None = None  # b (B, m) with it

    @classmethod
    def at(cls, x: Tensor, gradient: Tensor, hessian: Tensor) -> Model:
        """From gradient (..., n) and Hessian (..., n, n) at x (..., n)."""
        n = x.shape[-1]
        hessian, x = hessian.double(), x.double().reshape(-1, n)
        hessian = 0.5 * (hessian + hessian.mT)
        return cls(hessian, gradient.double().reshape(-1, n) - times(hessian, x), factored=False)

    def rows(self, index: Tensor) -> Model:
        """The problems at these positions."""
        shared = self.matrix.dim() == 2
        return replace(
            self,
            matrix=self.matrix if shared else self.matrix[index],
            linear=self.linear[index],
            design=self.design if shared or self.design is None else self.design[index],
            target=None if self.target is None else self.target[index],
        )

    def dense(self) -> Model:
        """The model with its Hessian written down."""
        if not self.factored:
            return self
        A, b = self.matrix, self.linear
        return Model(A.mT @ A, times(A.mT, -b), factored=False, design=A, target=b)

    def translated(self, origin: Tensor) -> Model:  # (B, n)
        """The model as a function of y, x = c + y."""
        c = origin.double().reshape(-1, origin.shape[-1])
        if self.factored:
            return replace(self, linear=self.linear - times(self.matrix, c))
        target = self.target
        if self.design is not None and target is not None:
            target = target - times(self.design, c)
        return replace(self, linear=self.linear + times(self.matrix, c), target=target)

    def gradient(self, x: Tensor) -> Tensor:  # (B, n) -> (B, n)
        """Hx + q, or Aᵀ(Ax − b)."""
        if self.factored:
            return times(self.matrix.mT, times(self.matrix, x) - self.linear)
        if self.design is not None and self.target is not None:
            return times(self.design.mT, times(self.design, x) - self.target)
        return times(self.matrix, x) + self.linear

    def terms(self, x: Tensor) -> Tensor:  # (B, n) -> (B, n)
        """|H| |x|, what H x is the sum of, for a Hessian that is written down."""
        return times(self.matrix.abs(), x.abs())

    def symmetric(self) -> Model:
        """With the symmetric part of H."""
        return replace(self, matrix=0.5 * (self.matrix + self.matrix.mT))

    def bends_down(self, rounding: float) -> Tensor:  # (B,) or ()
        """Whether H has a negative eigenvalue beyond rounding, relative to its largest entry."""
        H = self.matrix
        shift = rounding * H.abs().amax((-2, -1)).clamp_min(1e-300)
        shifted = H + torch.diag_embed(shift.unsqueeze(-1).expand(H.shape[:-1]))
        bent: Tensor = torch.linalg.cholesky_ex(shifted)[1] > 0
        return bent

    def straightened(self, bent: Tensor) -> Model:  # (B,)
        """With the identity for H of the problems flagged."""
        eye = torch.eye(self.linear.shape[-1], dtype=self.linear.dtype, device=bent.device)
        matrix = torch.where(bent[:, None, None], eye, self.matrix)
        return Model(matrix, self.linear, factored=False)

    @cached_property
    def slope(self) -> Tensor:  # (B, n)
        """The gradient at 0."""
        return times(self.matrix.mT, -self.linear) if self.factored else self.linear

    def product(self, v: Tensor) -> Tensor:  # (B, n, k) -> (B, n, k)
        """H v."""
        A = self.matrix if self.factored else self.design
        if A is not None:
            return A.mT @ (A @ v)
        return self.matrix @ v

    def diagonal(self) -> Tensor:  # (n,) or (B, n)
        """The diagonal of H."""
        if self.factored:
            return self.matrix.square().sum(-2)
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def inverse(self, diagonal: Tensor) -> Callable[[Tensor], Tensor]:
        """V ↦ (H + diag(D))⁻¹ V, (B, n, k) -> (B, n, k), for D ≥ 0 (B, n).

        By Cholesky, or by (D + AᵀA)⁻¹ = D⁻¹ − D⁻¹Aᵀ(1 + AD⁻¹Aᵀ)⁻¹AD⁻¹; what rounding leaves is
        solved for once more.
        """
        if self.factored:
            first = self._woodbury(diagonal)
        else:
            n = diagonal.shape[-1]
            matrix = self.matrix.expand(len(diagonal), n, n).clone()
            matrix.diagonal(dim1=-2, dim2=-1).add_(diagonal)
            scale = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).rsqrt().unsqueeze(-1)
            factor = _cholesky(matrix.mul_(scale).mul_(scale.mT))

            def first(v: Tensor) -> Tensor:
                return scale * torch.cholesky_solve(scale * v, factor)

        def solve(v: Tensor) -> Tensor:
            u = first(v)
            return u + first(v - self.product(u) - diagonal.unsqueeze(-1) * u)

        return solve

    def inverse_on(self, free: Tensor) -> Callable[[Tensor], Tensor]:
        """V ↦ (H + δ)⁻¹ V on the free coordinates (B, n), 0 on the others, with a tiny diagonal δ.

        With δ a singular H gives the solution of least norm, once or twice corrected.
        """
        own = self.diagonal()
        largest = own.amax(-1, keepdim=True).clamp_min(TINY)
        ridge = RIDGE * torch.where(own > 0, own, largest)
        A = self.matrix if self.factored else self.design
        if A is None:
            mask = free.to(self.matrix.dtype)
            matrix = self.matrix * mask.unsqueeze(-1) * mask.unsqueeze(-2)
            inner = torch.where(free, ridge, 1)
            matrix.diagonal(dim1=-2, dim2=-1).add_(inner)
            scale = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).rsqrt().unsqueeze(-1)
            factor = _cholesky(matrix.mul_(scale).mul_(scale.mT))
            return lambda v: scale * torch.cholesky_solve(scale * v, factor) * mask.unsqueeze(-1)
        shared = A.dim() == 2
        parts: list[tuple[Tensor, Tensor | None]] = []
        for row in range(len(free)):
            index = free[row].nonzero().squeeze(-1)
            design = (A if shared else A[row])[:, index]
            if len(index) > 2 * len(design):  # there is a whole space of solutions
                parts.append((index, None))
                continue
            added = torch.diag((ridge if shared else ridge[row])[index].sqrt())
            parts.append((index, torch.linalg.qr(torch.cat((design, added)), mode="r").R))

        def solve(v: Tensor) -> Tensor:
            out = torch.zeros_like(v)
            for row, (index, upper) in enumerate(parts):
                if upper is None:
                    out[row] = torch.nan
                elif len(index):
                    half = torch.linalg.solve_triangular(upper.mT, v[row, index], upper=False)
                    out[row, index] = torch.linalg.solve_triangular(upper, half, upper=True)
            return out

        return solve

    def _woodbury(self, diagonal: Tensor) -> Callable[[Tensor], Tensor]:
        A = self.matrix
        least = 1e-14 * self.diagonal().amax(-1, keepdim=True).clamp_min(TINY)
        small = (1 / torch.maximum(diagonal, least)).unsqueeze(-1)
        inner = A @ (small * A.mT)
        inner.diagonal(dim1=-2, dim2=-1).add_(1)
        factor = _cholesky(inner)

        def solve(v: Tensor) -> Tensor:
            u = small * v
            return u - small * (A.mT @ torch.cholesky_solve(A @ u, factor))

        return solve


@dataclass(frozen=True)
class SparseModel:
    """½⟨x, Hx⟩ + ⟨q, x⟩ of one problem with a sparse H, in double precision, where SciPy is."""

    matrix: Tensor  # H (n, n), CSR
    linear: Tensor  # q (1, n)
    slope_at: Callable[[Tensor], Tensor] | None = None  # the gradient, by a way with more digits

    @classmethod
    def identity(cls, linear: Tensor) -> SparseModel:  # (1, n)
        """H = 1."""
        n = linear.shape[-1]
        each = torch.arange(n + 1)
        return cls(csr(each, each[:-1], torch.ones(n, dtype=torch.float64), (n, n)), linear)

    def gradient(self, x: Tensor) -> Tensor:  # (1, n) -> (1, n)
        """Hx + q."""
        if self.slope_at is not None:
            return self.slope_at(x)
        return csr_product(self.matrix, x[0]).unsqueeze(0) + self.linear

    def terms(self, x: Tensor) -> Tensor:  # (1, n) -> (1, n)
        """As of `Model`, and so on."""
        H = self.matrix
        flat = csr(H.crow_indices(), H.col_indices(), H.values().abs(), (len(H), len(H)))
        return csr_product(flat, x[0].abs()).unsqueeze(0)

    def bends_down(self, rounding: float) -> Tensor:
        size = float(self.matrix.values().abs().max()) if self.matrix._nnz() else 0.0
        shift = rounding * max(size, 1e-300) * sparse_factor.module().eye(len(self.matrix))
        return torch.tensor(
            [sparse_factor.positive_factor(sparse_factor.as_csr(self.matrix) + shift) is None]
        )

    def straightened(self, bent: Tensor) -> SparseModel:
        return SparseModel.identity(self.linear)


def model_by_columns(
    hvp: Callable[[Tensor, Tensor], Tensor], gradient: Callable[[Tensor], Tensor], x: Tensor
) -> Model | None:
    """The model at x (..., n) from products with the Hessian, None where that is too large."""
    n = x.shape[-1]
    if n > FEW or x.numel() * n > LARGEST:
        return None
    columns = [hvp(x, unit.expand_as(x)) for unit in torch.eye(n).to(x)]
    return Model.at(x, gradient(x), torch.stack(columns, -1))


def _cholesky(matrix: Tensor) -> Tensor:
    """The factor of a positive definite matrix; where rounding made it indefinite, of a larger one.

    What is added to the diagonal is relative to its largest entry.
    """
    size = matrix.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    factor, failed = raised_cholesky(matrix, size, 1e-13)
    return torch.where(failed[..., None, None], torch.eye(matrix.shape[-1]).to(matrix), factor)
