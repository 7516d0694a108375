"""½ xᵀPx + qᵀx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dfwlayer.arguments import WIDE, check_tensor, check_tensors, common_batch, flag_nonfinite
from dfwlayer.linalg.sparse import (
    SparseMatrix,
    check_sparse,
    stored_entries,
    tracked_entries,
)
from dfwlayer.objectives.base import Curvature, Dense, Objective
from dfwlayer.objectives.factors import LARGEST_FACTOR, Factor, reduced_sparse
from dfwlayer.objectives.model import LARGEST, Model, SparseModel
from dfwlayer.objectives.products import ProductQuadratic
from dfwlayer.objectives.row_quadratic import RowQuadratic
from dfwlayer.objectives.spectrum import SMALL, dense_spectrum, lanczos_spectrum
from dfwlayer.ops.matrices import cholesky_factor, csr, csr_product, substitute
from dfwlayer.ops.rows import Scalar, all_seen, column, where_rows
from dfwlayer.ops.scale import Scale, scale_of_terms
from dfwlayer.ops.shards import is_distributed, whole

__all__ = ["Quadratic"]

_ROUNDING = 8  # in units of eps · √n · the largest entry
ASYMMETRY = 1e-4  # largest |P − Pᵀ| against |P| that is taken for rounding and averaged away


@dataclass(frozen=True)
class Quadratic(ProductQuadratic):
    """f(x) = ½ xᵀPx + qᵀx with P symmetric positive semi-definite.

    Args:
        P: (n, n) shared by all problems, dense or sparse (COO or CSR), (*batch, n, n) one per
            problem, or None for the identity; the solution is then the projection of −q onto the
            set. One that is too large for a process may be a DTensor with the placement
            ``Shard(0)``: each process has its rows, and their gradient.
        q: (n,) or (*batch, n), or with variables of another shape (*batch, *shape), n their
            entries; see ``shape`` of `dfwlayer.solve`.

    The gradient in P is that of ½ xᵀPx, so it is symmetric and a symmetric P stays symmetric
    under gradient steps. A sparse P gets a sparse one on its own pattern, and stays sparse: only
    products with it are formed, and factors on the free coordinates.

    """

    P: Tensor | None
    q: Tensor

    ranks: ClassVar[Mapping[str, int]] = {"q": 1, "P": 2}
    variables: ClassVar[frozenset[str]] = frozenset({"q"})
    quadratic = True
    recordable = True

    def __post_init__(self) -> None:
        q, P = self.q, self.P
        if type(q) is not Tensor and is_distributed(q):
            q = whole(q)
            object.__setattr__(self, "q", q)
        check_tensor("q", q)
        if P is not None:
            check_tensor("P", P, sparse=True, distributed=True)
        rank = q.dim()
        n = q.size(-1) if rank else 0
        if n == 0:
            raise ValueError(
                f"q: expected shape (n,) or (*batch, n) with n ≥ 1, got {tuple(q.shape)}"
            )
        if P is not None:
            if P.layout != torch.strided:
                check_sparse("P", P)
            square = P.dim() > 1 and P.size(-1) == n and P.size(-2) == n
            if not square and (P.dim() < 2 or not _may_go_with(P, q)):
                raise _mismatch(P, q)
        alike = P is None or (P.dtype == q.dtype and P.device == q.device)
        if not alike or q.dtype not in WIDE:
            given = {"q": q} if P is None else {"q": q, "P": P}
            check_tensors(given, half_allowed=True, sparse=("P",))
        if P is not None and rank == 2 and P.dim() == 3 and P.size(-1) == n:
            common_batch(self.batch_sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.q.shape[-1],)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.q.shape

    @property
    def deep(self) -> bool:
        P, q = self.P, self.q
        return q.dim() > 2 or (P is not None and (P.dim() > 3 or P.size(-1) != q.size(-1)))

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Quadratic:
        """With a P for the entries of the variable, which the constructor could not tell."""
        flat = super().flattened(shape, lead)
        if flat.P is not None and flat.P.shape[-1] != flat.q.shape[-1]:
            raise _mismatch(flat.P, self.q, flat.q.shape[-1])
        return flat

    @property
    def isotropic(self) -> bool:
        return self.P is None

    @cached_property
    def diagonal(self) -> Tensor | None:
        """P's entries (n,) or (B, n) where it is diagonal and positive, None otherwise."""
        if self.P is None:
            return None
        if self._is_sparse:
            own = self._sparse.diagonal
            apart = self._sparse.row_sums == own.abs()
            return own if bool((apart & (own > 0)).all()) else None
        P = self.P.detach()
        # the first row gives nearly every other matrix away; on a GPU looking takes too long
        if not all_seen(P[..., 0, 1:] == 0):
            return None
        entries = P.diagonal(dim1=-2, dim2=-1)
        if bool((entries > 0).all()) and int(torch.count_nonzero(P)) == entries.numel():
            return entries
        return None

    def joined(self) -> Objective:
        """With the rows of a distributed P that are here."""
        if self.P is None or not is_distributed(self.P):
            return self
        return RowQuadratic.of(self.P, self.q)

    def bind(self, batch: int | None) -> Quadratic:
        """P's gradient is made symmetric; a sparse P has each entry once."""
        bound = super().bind(batch)
        if bound.P is not None and bound._is_sparse:
            P = bound.P.coalesce() if bound.P.layout == torch.sparse_coo else bound.P
            return _BoundSparse(P, bound.q)
        if bound.P is None or not bound.P.requires_grad:
            return bound
        return replace(bound, P=symmetric_gradient(bound.P))

    def dense(self) -> Dense | None:
        """P and q, unless P is sparse or in parts."""
        P = self.P
        apart = P is not None and (P.layout != torch.strided or is_distributed(P))
        return None if apart else Dense(P, self.q, squared=False)

    def whole(self) -> Dense | None:
        """P and q, unless P is in parts."""
        apart = self.P is not None and is_distributed(self.P)
        return None if apart else Dense(self.P, self.q, squared=False)

    def suspect(self) -> Tensor:
        """Whether values are not finite, or P v and Pᵀv differ by more than rounding."""
        total = self.q.detach().sum()
        if self.P is None:
            return ~torch.isfinite(total)
        right, skew, rounding = self._symmetry()
        return ~torch.isfinite(total + right.sum()) | (skew > rounding).any()

    def verified(self) -> tuple[Quadratic, Tensor | None]:
        """Finite data and a symmetric P, at the price of two products with P.

        P v against Pᵀv for one fixed v shows any asymmetry above the rounding of the products.
        What is larger than rounding but small is averaged away, what is larger still refused.
        """
        bad = flag_nonfinite("q", self.q, 1)
        if self.P is None:
            return self, bad
        right, skew, rounding = self._symmetry()
        if not bool(torch.isfinite(right.sum())):
            stored = stored_entries(self.P) if self._is_sparse else self.P
            flagged = flag_nonfinite("P", stored, 2)
            if flagged is not None:
                bad = flagged if bad is None else bad | flagged
                skew = torch.where(flagged, 0, skew)
        if not bool((skew > rounding).any()):
            return self, bad
        P, n = self.P.detach(), self.P.shape[-1]
        if bad is not None and P.dim() == 3:
            P = torch.where(bad[:, None, None], 0, P)
        if self._is_sparse:
            P = self._sparse.entries.abs().amax().reshape(1, 1)
        else:  # sums of many entries of one sign round by more than the sums of differences
            skew = ((P - P.mT) @ _probe(n, P.dtype, P.device)).abs().amax(-1)
        entries = torch.linalg.vector_norm(P, torch.inf, dim=(-2, -1))
        rounding = _ROUNDING * torch.finfo(P.dtype).eps * n**0.5 * entries
        if not bool((skew > rounding).any()):
            return self, bad
        if bool((skew > torch.maximum(rounding, ASYMMETRY * entries)).any()):
            worst = (skew / entries.clamp_min(torch.finfo(P.dtype).tiny)).max()
            raise ValueError(
                "P: expected a symmetric matrix, found entries of P − Pᵀ as large as about "
                f"{float(worst):.1e} of P's largest; pass (P + P.mT) / 2"
            )
        if self._is_sparse:
            P = self.P.to_sparse(layout=torch.sparse_coo)
            return replace(self, P=(0.5 * (P + P.t())).coalesce()), bad
        return replace(self, P=0.5 * (self.P + self.P.mT)), bad

    def _symmetry(self) -> tuple[Tensor, Tensor, Tensor]:
        """P v (..., n) for a fixed v, the largest entry of P v − Pᵀv (...), and its rounding."""
        assert self.P is not None
        P, n = self.P.detach(), self.P.shape[-1]
        probe = _probe(n, P.dtype, P.device)
        if self._is_sparse:
            right = csr_product(self._sparse.matrix, probe)
            left = csr_product(self._sparse.transposed, probe)
        else:
            right, left = P @ probe, P.mT @ probe
        skew = (right - left).abs().amax(-1)
        # the largest entry of a positive semi-definite matrix is on its diagonal
        entries = self._own_entries.abs().amax(-1)
        return right, skew, _ROUNDING * torch.finfo(P.dtype).eps * n**0.5 * entries

    def replace_rows(self, bad: Tensor) -> Quadratic:
        """Flagged problems become ½‖x‖²."""
        q = where_rows(~bad, self.q.expand(len(bad), -1), 0)
        P = self.P
        if P is not None and P.dim() == 3:
            eye = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
            P = torch.where(bad[:, None, None], eye, P)
        return Quadratic(P, q)

    def product(self, x: Tensor) -> Tensor:  # (..., n) -> (..., n)
        """P x."""
        if self.P is None:
            return x
        if self._is_sparse:
            return self._sparse.symmetric(self._entries, x)
        if self.P.dim() == 2:
            return torch.mv(self.P, x) if x.dim() == 1 else x @ self.P  # P is symmetric
        return (self.P @ x.unsqueeze(-1)).squeeze(-1)

    def dependence(self, x: Tensor) -> Tensor:
        """q, and P x where P asks for a gradient."""
        if self.P is None or not self.P.requires_grad:
            return self.q.expand_as(x)
        return self.gradient(x)

    def tracked_value(self, x: Tensor) -> None:
        """None: P and q are all."""

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """P v, whatever x."""
        return self.product(v)

    def shifted(self, rho: Scalar) -> tuple[Callable[[Tensor], Tensor], Scalar] | None:
        """Cholesky of P + ρ; for a shared P, each ρ is brought to the next power of four.

        So a few factors serve all problems, and none depends on the ρ of the others.
        """
        P = self.P
        if P is None or self._is_sparse:
            return None
        which: Tensor | None = None
        levels = column(rho, P)
        if levels.dim() == 2 and P.dim() == 2:
            rho = torch.exp2(2 * torch.round(0.5 * levels.log2()))
            levels, which = torch.unique(rho.squeeze(-1), return_inverse=True)
            levels = levels.reshape(-1, 1)
        count = 1 if which is None else len(levels)
        if count * P.numel() * P.element_size() > LARGEST_FACTOR:
            return None
        matrix = P.detach().clone() if which is None else P.detach().repeat(count, 1, 1)
        matrix.diagonal(dim1=-2, dim2=-1).add_(levels)
        factor = cholesky_factor(matrix)
        return None if factor is None else (Factor(factor, which), rho)

    def among(self, index: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Products with the rows and columns of P."""
        if self.P is None or self._is_sparse or self.P.dim() > 2:
            return None
        return partial(torch.mv, self.P.detach()[index.unsqueeze(-1), index])

    def reduced(self, free: Tensor, bend: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """Cholesky of the rows and columns of P that are free."""
        if (entries := self.diagonal) is not None:
            inverse = torch.where(free, 1 / (entries if bend is None else entries + bend), 0)
            return lambda v: inverse * v
        P, n = self.P, free.shape[-1]
        if P is not None and self._is_sparse:
            return reduced_sparse(self._sparse, free, bend)
        if P is None or free.numel() * n * P.element_size() > LARGEST_FACTOR:
            return None
        P = P.detach()
        if free.dim() == 1:
            index = free.nonzero().squeeze(-1)
            matrix = P[index.unsqueeze(-1), index]
            if bend is not None:
                matrix.diagonal().add_(bend[index])
            part = cholesky_factor(matrix)
            if part is None:
                return None

            def solve_one(v: Tensor) -> Tensor:
                found = substitute(part, v[index].unsqueeze(-1)).squeeze(-1)
                return torch.zeros_like(v).index_copy_(0, index, found)

            return solve_one
        mask = free.to(P.dtype)
        matrix = P * mask.unsqueeze(-1) * mask.unsqueeze(-2)
        matrix.diagonal(dim1=-2, dim2=-1).add_(1 - mask if bend is None else 1 - mask + bend * mask)
        factor = cholesky_factor(matrix)
        if factor is None:
            return None

        def solve(v: Tensor) -> Tensor:
            return substitute(factor, (v * mask).unsqueeze(-1)).squeeze(-1)

        return solve

    def model(self, x: Tensor) -> Model | None:
        """f itself, in double precision."""
        if self.P is None or self.P.numel() > LARGEST:
            return None
        P = self.P.detach()
        P = (P.to_dense() if self._is_sparse else P).double()
        q = self.q.detach().double().expand(x.shape).reshape(-1, x.shape[-1])
        return Model(P, q, factored=False)

    def sparse_model(self, x: Tensor) -> SparseModel | None:
        """f itself, where P is sparse."""
        if not self._is_sparse:
            return super().sparse_model(x)
        P, n = self._sparse, x.shape[-1]
        matrix = csr(P.pattern.crow, P.pattern.col, P.entries.double(), (n, n))
        return SparseModel(matrix, self.q.detach().double().reshape(1, n))

    def rescaled(self, unit: Tensor, factor: Tensor) -> Quadratic:
        """P k and q k/u; without a P k is 1."""
        P, q = self.P, self.q * (factor / unit).unsqueeze(-1)
        if P is not None:
            P = P * (factor.reshape(-1)[0] if P.dim() == 2 else factor[:, None, None])
        return replace(self, P=P, q=q)

    def scale(self, x: Tensor, gradient: Tensor) -> Scale:
        """From the diagonal of P, and |q|."""
        diagonal = torch.ones_like(self.q[..., :1]) if self.P is None else self._own_entries
        return scale_of_terms(diagonal, x, self.q.detach().abs())

    def curvature(self) -> Curvature:
        """Eigenvalues for small n, Lanczos and the norms of P beyond."""
        if self.P is None:
            one = torch.ones((), dtype=self.dtype, device=self.device)
            return Curvature(one, one)
        if self.P.shape[-1] <= SMALL:
            return dense_spectrum(self.P.to_dense() if self._is_sparse else self.P)
        batch, n = len(self.P) if self.P.dim() == 3 else 1, self.P.shape[-1]
        low, high = lanczos_spectrum(self.product, self.q.new_empty(batch, n))
        # the largest absolute row sum bounds the spectrum too
        if self._is_sparse:
            largest_row = self._sparse.row_sums.amax()
        else:
            largest_row = torch.linalg.vector_norm(self.P.detach(), 1, dim=-1).amax(-1)
        bound = largest_row * (1 + self.P.shape[-1] * torch.finfo(self.dtype).eps)
        if self.P.dim() == 2:
            low, high = low[0], high[0]
        return Curvature(low, torch.minimum(high, bound))

    @property
    def _is_sparse(self) -> bool:
        return self.P is not None and self.P.layout != torch.strided

    @property
    def _own_entries(self) -> Tensor:  # (n,) or (B, n)
        """The diagonal of P."""
        assert self.P is not None
        if self._is_sparse:
            return self._sparse.diagonal
        return self.P.detach().diagonal(dim1=-2, dim2=-1)

    @property
    def _sparse(self) -> SparseMatrix:
        """A sparse P in a form for products."""
        assert self.P is not None
        return SparseMatrix.of(self.P)

    @property
    def _entries(self) -> Tensor:
        """The stored entries of a sparse P, with their gradient where it is asked for."""
        assert self.P is not None
        tracked = self.P.requires_grad and torch.is_grad_enabled()
        return self._tracked if tracked else self._sparse.entries

    @property
    def _tracked(self) -> Tensor:
        assert self.P is not None
        return tracked_entries(self.P)


class _BoundSparse(Quadratic):
    """For one solve, in which a sparse P does not change."""

    @cached_property
    def _sparse(self) -> SparseMatrix:
        return super()._sparse

    @cached_property
    def _tracked(self) -> Tensor:  # the gradients of all products add up as vectors there
        return super()._tracked


def _mismatch(P: Tensor, q: Tensor, n: int | None = None) -> ValueError:
    """That P does not go with q, for variables of n entries."""
    n = q.shape[-1] if n is None else n
    return ValueError(
        f"P: expected shape ({n}, {n}) or (B, {n}, {n}) to go with q of shape {tuple(q.shape)}, "
        f"got {tuple(P.shape)}"
    )


def _may_go_with(P: Tensor, q: Tensor) -> bool:
    """Whether P has a row for each entry of variables that are several dimensions of q."""
    n, rows = P.shape[-1], P.shape[-2]
    return rows == n and any(q.shape[-k:].numel() == n for k in range(2, q.dim() + 1))


@lru_cache(maxsize=32)
def _probe(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fixed vector with entries in [0.5, 1.5]."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(n, generator=generator) + 0.5).to(device, dtype)


def symmetric_gradient(P: Tensor) -> Tensor:
    """P itself, whose gradient will be brought to its symmetric part."""
    out: Tensor = _SymmetricGradient.apply(P)  # type: ignore[no-untyped-call]
    return out


class _SymmetricGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, P: Tensor) -> Tensor:
        # the same memory and version counter, so that a change of P in place is found, but no
        # view, for which autograd has words of its own
        return P.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        half = 0.5 * grad  # before the sum, which might be too large for the dtype
        return half + half.mT
