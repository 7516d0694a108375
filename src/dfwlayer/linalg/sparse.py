"""Products with a sparse matrix and its transpose, differentiable on its pattern."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dfwlayer.ops.kept import Kept
from dfwlayer.ops.matrices import begins, csr, csr_product

__all__ = ["Pattern", "SparseMatrix", "check_sparse", "stored_entries", "tracked_entries"]

LAYOUTS = (torch.sparse_coo, torch.sparse_csr)


def check_sparse(name: str, A: Tensor) -> None:
    """Raise unless a tensor that is not dense is one matrix in COO or CSR form."""
    if A.layout not in LAYOUTS:
        raise ValueError(f"{name}: expected a dense, COO or CSR tensor, got layout {A.layout}")
    if A.layout == torch.sparse_coo and A.dense_dim():
        raise ValueError(
            f"{name}: expected a sparse tensor of numbers, found one whose stored entries are "
            f"vectors ({A.dense_dim()} dense dimension); call .to_dense().to_sparse() first"
        )
    if A.dim() != 2:
        raise ValueError(
            f"{name}: expected shape (m, n) for a sparse tensor, which all problems share, got "
            f"{tuple(A.shape)}; use .to_dense() for one matrix per problem"
        )


def stored_entries(A: Tensor) -> Tensor:
    """The numbers a sparse tensor holds, without gradient."""
    A = A.detach()
    return A._values() if A.layout == torch.sparse_coo else A.values()


def tracked_entries(A: Tensor) -> Tensor:
    """The same with their gradient, each place once."""
    return A.values() if A.layout == torch.sparse_csr else A.coalesce().values()


@dataclass(frozen=True)
class Pattern:
    """Where the entries of a sparse matrix are, by rows.

    Indices have 32 bits where that is enough: a product is as fast as the memory it reads.
    """

    crow: Tensor  # (m + 1,), where each row begins
    col: Tensor  # (nnz,)
    shape: tuple[int, int]

    @staticmethod
    def of(A: Tensor) -> Pattern:  # (m, n), CSR, or COO with every entry once
        """That of a sparse tensor."""
        m, n = A.shape
        index = _index_type(m, n, A._nnz())
        if A.layout == torch.sparse_csr:
            return Pattern(A.crow_indices().to(index), A.col_indices().to(index), (m, n))
        row, col = A.indices()
        return Pattern(begins(row, m).to(index), col.to(index), (m, n))

    @cached_property
    def row(self) -> Tensor:  # (nnz,)
        """The row of each entry."""
        count = self.crow.diff()
        each = torch.arange(self.shape[0], dtype=self.crow.dtype, device=self.crow.device)
        return each.repeat_interleave(count)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:  # (..., m), (..., n) -> (..., nnz)
        """left_i · right_j for each entry (i, j)."""
        return left.index_select(-1, self.row) * right.index_select(-1, self.col)

    @cached_property
    def order(self) -> Tensor:  # (nnz,)
        """The entries in the order of the columns."""
        return self._by_column[0]

    @cached_property
    def transposed(self) -> tuple[Tensor, Tensor]:  # (n + 1,), (nnz,)
        """Where each row of the transpose begins, and the columns of its entries."""
        _, col = self._by_column
        crow = begins(col, self.shape[1]).to(self.crow.dtype)
        return crow, self.row.index_select(0, self.order)

    @cached_property
    def _by_column(self) -> tuple[Tensor, Tensor]:
        col, order = self.col.sort(stable=True)
        return order.to(self.crow.dtype), col


@dataclass(frozen=True)
class SparseMatrix:
    """A sparse matrix by rows, and its transpose by rows once that is asked for.

    A product of torch's with the transpose of a sparse tensor sorts its entries every time, which
    takes far longer than the product. Here they are sorted once, and kept for as long as the tensor
    lives and does not change.

    The gradient in the entries is found entry by entry; torch's own, of a product between a
    sparse matrix and a vector, is a dense matrix.
    """

    pattern: Pattern
    entries: Tensor  # (nnz,), without gradient

    @staticmethod
    def of(A: Tensor) -> SparseMatrix:  # (m, n), CSR or COO
        """The matrix in a sparse tensor."""

        def make() -> SparseMatrix:
            plain = A.detach() if A.layout == torch.sparse_csr else A.detach().coalesce()
            return SparseMatrix(Pattern.of(plain), plain.values())

        return _kept.of(A, make)

    def product(self, entries: Tensor, x: Tensor) -> Tensor:  # (nnz,), (..., n) -> (..., m)
        """A x, with a gradient in the entries and in x; their numbers are those of the matrix."""
        return self.times(entries, x, _Form.PLAIN)

    def adjoint(self, entries: Tensor, r: Tensor) -> Tensor:  # (nnz,), (..., m) -> (..., n)
        """Aᵀ r, likewise."""
        return self.times(entries, r, _Form.TRANSPOSED)

    def symmetric(self, entries: Tensor, x: Tensor) -> Tensor:  # (nnz,), (..., n) -> (..., n)
        """P x of a symmetric P, whose gradient in the entries is symmetric as well."""
        return self.times(entries, x, _Form.SYMMETRIC)

    def times(self, entries: Tensor, x: Tensor, form: _Form) -> Tensor:
        """The product of a form."""
        out: Tensor = _Product.apply(entries, x, self, form)  # type: ignore[no-untyped-call]
        return out

    @cached_property
    def matrix(self) -> Tensor:  # (m, n)
        """As a CSR tensor."""
        return csr(self.pattern.crow, self.pattern.col, self.entries, self.pattern.shape)

    @cached_property
    def transposed(self) -> Tensor:  # (n, m)
        """The transpose as a CSR tensor."""
        m, n = self.pattern.shape
        begins, row = self.pattern.transposed
        return csr(begins, row, self.entries.index_select(0, self.pattern.order), (n, m))

    @cached_property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:  # (n + 1,), (nnz,), (nnz,)
        """Where each column begins, the rows of its entries, and these in double precision."""
        return (*self.pattern.transposed, self.transposed.values().double())

    @cached_property
    def diagonal(self) -> Tensor:  # (n,)
        """The entries P_ii of a square matrix."""
        row, col = self.pattern.row, self.pattern.col
        own = torch.where(row == col, self.entries, 0)
        return self.entries.new_zeros(self.pattern.shape[0]).index_add_(0, row, own)

    @cached_property
    def row_sums(self) -> Tensor:  # (m,)
        """Σ_j |A_ij|."""
        blank = self.entries.new_zeros(self.pattern.shape[0])
        return blank.index_add_(0, self.pattern.row, self.entries.abs())

    def block(self, index: Tensor) -> Tensor:  # (k,) -> (k, k)
        """The rows and columns at ordered positions, as a dense matrix."""
        place = torch.full((self.pattern.shape[1],), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        row, col = place[self.pattern.row.long()], place[self.pattern.col.long()]
        inside = (row >= 0) & (col >= 0)
        out = self.entries.new_zeros(len(index), len(index))
        out[row[inside], col[inside]] = self.entries[inside]
        return out

    @cached_property
    def lengths(self) -> Tensor:  # (n,)
        """‖A_i‖ of the columns, in double precision."""
        begins, _, values = self.columns
        found: Tensor = torch.segment_reduce(values * values, "sum", offsets=begins.long())
        return found.sqrt()


_kept: Kept[SparseMatrix] = Kept()


class _Form(Enum):
    """Which product with a matrix is meant."""

    PLAIN = auto()  # A x
    TRANSPOSED = auto()  # Aᵀ x
    SYMMETRIC = auto()  # A x for A = Aᵀ, so that the derivative in A is symmetric too

    @property
    def adjoint(self) -> _Form:
        """The product that takes a derivative in the result to one in x."""
        return {_Form.PLAIN: _Form.TRANSPOSED, _Form.TRANSPOSED: _Form.PLAIN}.get(self, self)


class _Product(torch.autograd.Function):
    """Linear in x and in the entries, so that its derivatives are like it."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, x: Tensor, of: SparseMatrix, form: _Form) -> Tensor:
        ctx.of, ctx.form = of, form
        ctx.save_for_backward(entries, x)
        return csr_product(of.transposed if form is _Form.TRANSPOSED else of.matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        entries, x = ctx.saved_tensors
        of: SparseMatrix = ctx.of
        form: _Form = ctx.form
        in_entries = in_x = None
        if ctx.needs_input_grad[0]:
            if form is _Form.SYMMETRIC:
                # the mean of the derivatives in A_ij and A_ji, halved before the sum, which might
                # be too large for the dtype
                half = 0.5 * grad
                each = of.pattern.outer(half, x) + of.pattern.outer(x, half)
            elif form is _Form.TRANSPOSED:
                each = of.pattern.outer(x, grad)
            else:
                each = of.pattern.outer(grad, x)
            in_entries = each.sum_to_size(len(of.entries))
        if ctx.needs_input_grad[1]:
            in_x = of.times(entries, grad, form.adjoint)
        return in_entries, in_x, None, None


def _index_type(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) < torch.iinfo(torch.int32).max else torch.int64
