"""½ ‖Ax − b‖²."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensor, check_tensors, common_lead, flag_nonfinite
from dfwlayer.linalg.sparse import SparseMatrix, check_sparse, stored_entries, tracked_entries
from dfwlayer.linalg.sparse_factor import as_csr
from dfwlayer.objectives.base import Curvature, Dense, Objective
from dfwlayer.objectives.model import LARGEST, Model, SparseModel
from dfwlayer.objectives.row_sharded import condensed, join
from dfwlayer.objectives.spectrum import SMALL, lanczos_spectrum, with_gradient
from dfwlayer.ops.matrices import csr
from dfwlayer.ops.rows import dot, norm
from dfwlayer.ops.scale import Scale, scale_of_terms
from dfwlayer.ops.shards import ALONE, Member, Shards, is_distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LeastSquares"]


@dataclass(frozen=True)
class LeastSquares(Objective):
    """f(x) = ½ ‖Ax − b‖²; only products with A and Aᵀ are formed, never AᵀA.

    Args:
        A: (m, n) shared, dense or sparse (COO or CSR), or (*batch, m, n) dense, one per problem; n
            are the entries of a variable, whatever its shape (``shape`` of `dfwlayer.solve`).
        b: (m,) or (*batch, m).
        group: Processes of `torch.distributed` that hold the rows of one A and b between them, for
            an A that is too large for one: A and b are then the rows of this process, as many as it
            likes, or none, and f is the sum of ½ ‖Ax − b‖² over all of them. A and b may also be
            DTensors with the placement ``Shard(0)``, which know their group.

    A sparse A gets a sparse gradient on its own pattern. In a group each process gets the gradient
    of its own rows, and the same x, certificate and gradients of the set's parameters; all have
    to make the same calls.

    """

    A: Tensor
    b: Tensor
    group: ProcessGroup | Shards | None = None

    ranks: ClassVar[Mapping[str, int]] = {"b": 1, "A": 2}
    quadratic = True
    least = 0.0

    def __post_init__(self) -> None:
        given = self.group is not None or is_distributed(self.A) or is_distributed(self.b)
        if isinstance(self.group, Shards) or not given:
            self._check()
        else:
            joined = join(self.A, self.b, self.group, lambda A, b: LeastSquares(A, b))
            for name, value in zip(("A", "b", "group"), joined, strict=True):
                object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Raise unless A and b go together."""
        A, b = self.A, self.b
        check_tensor("A", A, sparse=True)
        check_tensor("b", b)
        if A.layout != torch.strided:
            check_sparse("A", A)
        if A.dim() < 2 or A.shape[-1] == 0:
            allowed = "(m, n) or (*batch, m, n)"
            raise ValueError(f"A: expected shape {allowed} with n ≥ 1, got {tuple(A.shape)}")
        if b.dim() == 0 or b.shape[-1] != A.shape[-2]:
            m = A.shape[-2]
            raise ValueError(
                f"b: expected shape ({m},) or (*batch, {m}) to go with A of shape "
                f"{tuple(A.shape)}, got {tuple(b.shape)}"
            )
        check_tensors({"b": b, "A": A}, half_allowed=True, sparse=("A",))
        common_lead(self.leads(self.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.A.shape[-1],)

    @property
    def recordable(self) -> bool:
        return self.group is None

    @property
    def shards(self) -> Shards | None:
        return self.group if isinstance(self.group, Shards) else None

    @property
    def _all(self) -> Member:
        """The processes that have the rows."""
        return self.shards or ALONE

    def bind(self, batch: int | None) -> LeastSquares:
        """An A with a batch of one is one A for all; a sparse one has each entry once."""
        A = super().bind(batch).A
        if A.layout == torch.sparse_coo:
            A = A.coalesce()
        return _BoundLeastSquares(A, self.b, self.group)

    def dense(self) -> Dense | None:
        """A and b, unless A is sparse or in parts."""
        whole = self.A.layout == torch.strided and self.shards is None
        return Dense(self.A, self.b, squared=True) if whole else None

    def by_columns(self) -> Dense:
        """A and b."""
        return Dense(self.A, self.b, squared=True)

    def suspect(self) -> Tensor:
        """Whether values are not finite."""
        return self._all.any(~torch.isfinite(self.b.detach().sum() + self._stored().sum()))

    def verified(self) -> tuple[LeastSquares, Tensor | None]:
        """Finite data."""
        if self.shards is None:
            return self, self._flagged()
        bad, fault = None, None
        try:
            bad = self._flagged()
        except ValueError as error:
            fault = error
        self.shards.agree(fault)
        lead = tuple(self.batch_sizes.values())
        if not lead:
            return self, None
        none = torch.zeros(max(lead), dtype=torch.bool, device=self.device)
        bad = self.shards.any(none if bad is None else bad.expand(max(lead)))
        return self, bad if bool(bad.any()) else None

    def _flagged(self) -> Tensor | None:
        """Mask (B,) of the problems that are not finite here."""
        bad = flag_nonfinite("b", self.b, 1)
        stored = self._stored()
        flagged = flag_nonfinite("A", stored, 2 if self.A.layout == torch.strided else stored.dim())
        if flagged is not None:
            bad = flagged if bad is None else bad | flagged
        return bad

    def _stored(self) -> Tensor:
        """The entries of A that are stored."""
        return self.A.detach() if self.A.layout == torch.strided else stored_entries(self.A)

    def product(self, x: Tensor) -> Tensor:  # (..., n) -> (..., m)
        """A x."""
        x = self._all.spread(x)
        if self.A.layout != torch.strided:
            return self._sparse.product(self._entries, x)
        if x.dim() == 1:
            return self.A @ x
        if self.A.dim() == 3:
            return (self.A @ x.unsqueeze(-1)).squeeze(-1)
        return x @ self.A.mT

    def adjoint(self, r: Tensor) -> Tensor:  # (..., m) -> (..., n)
        """Aᵀ r of the rows that are here."""
        if self.A.layout != torch.strided:
            return self._sparse.adjoint(self._entries, r)
        if r.dim() == 1:
            return self.A.t() @ r
        if self.A.dim() == 3:
            return (self.A.mT @ r.unsqueeze(-1)).squeeze(-1)
        return r @ self.A

    @property
    def _sparse(self) -> SparseMatrix:
        """A in a form for products."""
        return SparseMatrix.of(self.A)

    @property
    def _entries(self) -> Tensor:
        """The stored entries of a sparse A, with their gradient where it is asked for."""
        if not (self.A.requires_grad and torch.is_grad_enabled()):
            return self._sparse.entries
        return self._tracked

    @property
    def _tracked(self) -> Tensor:
        return tracked_entries(self.A)

    def value(self, x: Tensor) -> Tensor:
        """f(x)."""
        residual = self.product(x) - self.b
        return self._all.total(0.5 * dot(residual, residual), "value", x)

    def gradient(self, x: Tensor) -> Tensor:
        """Aᵀ(Ax − b)."""
        return self._all.total(self.adjoint(self.product(x) - self.b), "gradient", x)

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one residual, and one sum over the processes."""
        residual = self.product(x) - self.b
        value, gradient = 0.5 * dot(residual, residual), self.adjoint(residual)
        if self.shards is None:
            return value, gradient
        both = torch.cat((gradient, value.unsqueeze(-1)), -1)
        both = self.shards.total(both, "gradient", x)
        return both[..., -1], both[..., :-1]

    def tracked_value(self, x: Tensor) -> None:
        """None: A and b are all."""

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """Aᵀ(A v), whatever x."""
        return self._all.total(self.adjoint(self.product(v)), "product", v)

    def among(self, index: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Products with the columns of A, and with their transpose."""
        if self.shards is not None or self.A.layout != torch.strided or self.A.dim() > 2:
            return None
        part = self.A.detach().index_select(1, index)
        return lambda v: torch.mv(part.t(), torch.mv(part, v))

    def reduced(self, free: Tensor, bend: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """By a QR factorisation of the free columns of A, over those of √bend.

        Where they are more than its rows, it is the pseudo-inverse.
        """
        if self.shards is not None:
            whole = self._condensed
            return None if whole is None else whole.reduced(free, bend)
        m, A = self.A.shape[-2], self.A.detach()
        if A.layout != torch.strided or free.numel() * (m + free.shape[-1]) > LARGEST:
            return None
        factors = []
        for row, mask in enumerate(free.reshape(-1, free.shape[-1])):
            index = mask.nonzero().squeeze(-1)
            columns = (A if A.dim() == 2 else A[row])[:, index].double()
            if bend is not None:
                own = bend.reshape(-1, bend.shape[-1])[row, index].double()
                columns = torch.cat((columns, torch.diag(own.clamp_min(0).sqrt())))
            factor = _Triangle.of(columns)
            if factor is None:
                return None
            factors.append((index, factor))

        def solve(v: Tensor) -> Tensor:
            out = torch.zeros_like(v).reshape(-1, v.shape[-1])
            for each, given, (index, factor) in zip(
                out, v.reshape(out.shape), factors, strict=True
            ):
                each[index] = factor(given[index].double()).to(v.dtype)
            return out.reshape(v.shape)

        return solve

    def model(self, x: Tensor) -> Model | None:
        """f itself, in double precision; AᵀA is formed where it is not much larger than A."""
        if self.shards is not None:
            whole = self._condensed
            return None if whole is None else whole.model(x)
        m, n = self.A.shape[-2:]
        count = self.A.shape[0] if self.A.dim() == 3 else 1
        if count * m * n > LARGEST:
            return None
        A = self.A.detach()
        A = (A if A.layout == torch.strided else A.to_dense()).double()
        b = self.b.detach().double().expand(*x.shape[:-1], m).reshape(-1, m)
        if 2 * m <= n:
            return Model(A, b, factored=True)
        if count * n * n > LARGEST:
            return None
        square = A.mT @ A
        linear = -(A.mT @ b.unsqueeze(-1)).squeeze(-1)
        return Model(square, linear, factored=False, design=A, target=b)

    def sparse_model(self, x: Tensor) -> SparseModel | None:
        """f itself, where A is sparse; AᵀA is formed for factors only."""
        if self.A.layout == torch.strided or self.shards is not None:
            return super().sparse_model(x)
        A, b = as_csr(self.A), self.b.detach().double().reshape(-1).numpy()
        H = (A.T @ A).tocsr()
        begins, columns, entries = map(torch.from_numpy, (H.indptr, H.indices, H.data))
        matrix = csr(begins, columns, entries, H.shape)

        def slope_at(x: Tensor) -> Tensor:
            return torch.from_numpy(A.T @ (A @ x[0].numpy() - b)).unsqueeze(0)

        return SparseModel(matrix, torch.from_numpy(-(A.T @ b)).unsqueeze(0), slope_at)

    def rescaled(self, unit: Tensor, factor: Tensor) -> LeastSquares:
        """A √k and b √k/u."""
        root = factor.sqrt()
        A = self.A * (root[:, None, None] if self.A.dim() == 3 else root.reshape(-1)[0])
        return replace(self, A=A, b=self.b * (root / unit).unsqueeze(-1))

    def scale(self, x: Tensor, gradient: Tensor) -> Scale:
        """From the lengths of A's columns, and that of b."""
        length, target = self._lengths
        return scale_of_terms(length**2, x, length * target.unsqueeze(-1))

    @property
    def _lengths(self) -> tuple[Tensor, Tensor]:
        """‖A_i‖ of the columns of A, (n,) or (B, n), and ‖b‖."""
        b = self.b.detach()
        target = norm(b) if b.shape[-1] else b.sum(-1)
        if self.A.layout == torch.strided:
            lengths: Tensor = torch.linalg.vector_norm(self.A.detach(), dim=-2)
        else:
            lengths = self._sparse.lengths.to(self.A.dtype)
        if self.shards is None:
            return lengths, target
        squares = torch.cat((lengths.reshape(-1), target.reshape(-1))).double() ** 2
        squares = self.shards.total(squares, "lengths").sqrt().to(self.A.dtype)
        own = lengths.numel()
        return squares[:own].reshape(lengths.shape), squares[own:].reshape(target.shape)

    @property
    def _condensed(self) -> LeastSquares | None:
        """The same f of few rows, which every process has; None where that is too large."""
        assert self.shards is not None
        found = condensed(self.A, self.b, self.shards, LARGEST)
        return None if found is None else LeastSquares(*found)

    def curvature(self) -> Curvature:
        """Singular values for small dense A, Lanczos on v ↦ Aᵀ(A v) beyond."""
        m, n = self.A.shape[-2:]
        if self.A.layout == torch.strided and min(m, n) <= SMALL and self.shards is None:
            return self._dense_curvature()
        batch = self.A.shape[0] if self.A.dim() == 3 else 1
        template = self.b.new_empty(batch, n)
        low, high = lanczos_spectrum(lambda v: self.hvp(v, v), template)
        return (
            Curvature(low.clamp_min(0), high)
            if self.A.dim() == 3
            else Curvature(low[0].clamp_min(0), high[0])
        )

    def _dense_curvature(self) -> Curvature:
        """L = σ_max(A)² with the gradient of σ_max's singular vectors."""
        A = self.A
        left, sigma, right = torch.linalg.svd(A.detach(), full_matrices=False)
        top = (A @ right[..., 0, :].unsqueeze(-1)).squeeze(-1)
        quotient = dot(left[..., :, 0], top) ** 2
        slack = 16 * max(A.shape[-2:]) ** 0.5 * torch.finfo(A.dtype).eps
        high = sigma[..., 0] ** 2 * (1 + slack)
        low = sigma[..., -1] ** 2 if A.shape[-2] >= A.shape[-1] else torch.zeros_like(high)
        return Curvature(low, with_gradient(high, quotient))


class _BoundLeastSquares(LeastSquares):
    """For one solve, in which A does not change."""

    @cached_property
    def _sparse(self) -> SparseMatrix:
        return SparseMatrix.of(self.A)

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor]:
        return super()._lengths

    @cached_property
    def _condensed(self) -> LeastSquares | None:
        return super()._condensed

    @cached_property
    def _tracked(self) -> Tensor:  # the gradients of all products add up as vectors there
        return super()._tracked


class _Triangle(NamedTuple):
    """v ↦ (AᵀA)⁻¹v from A = QR, or the pseudo-inverse from Aᵀ = QR where A is wide."""

    upper: Tensor  # R
    basis: Tensor | None  # Q of a wide A

    @classmethod
    def of(cls, A: Tensor) -> _Triangle | None:
        """None where A does not have full rank, to rounding."""
        wide = A.shape[-2] < A.shape[-1]
        if wide:
            basis, upper = torch.linalg.qr(A.mT)
        else:
            basis, upper = None, torch.linalg.qr(A, mode="r").R
        size = upper.diagonal().abs()
        if size.numel() and bool(size.amin() <= 1e-14 * size.amax()):
            return None
        return cls(upper, basis)

    def __call__(self, v: Tensor) -> Tensor:
        R, Q = self.upper, self.basis
        v = v.unsqueeze(-1)
        if Q is not None:
            v = Q.mT @ v
            half = torch.linalg.solve_triangular(R, v, upper=True)
            out: Tensor = Q @ torch.linalg.solve_triangular(R.mT, half, upper=False)
        else:
            half = torch.linalg.solve_triangular(R.mT, v, upper=False)
            out = torch.linalg.solve_triangular(R, half, upper=True)
        return out.squeeze(-1)
