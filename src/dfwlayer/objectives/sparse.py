"""Products with a sparse matrix and its transpose, differentiable on its pattern."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dfwlayer.ops.matrices import csr, csr_product

__all__ = ["SparseMatrix", "stored_entries"]


def stored_entries(A: Tensor) -> Tensor:
    """The numbers a sparse tensor holds, without gradient."""
    A = A.detach()
    return A._values() if A.layout == torch.sparse_coo else A.values()


@dataclass(frozen=True)
class SparseMatrix:
    """A sparse matrix by rows, and its transpose by rows once that is asked for.

    A product of torch's with the transpose of a sparse tensor sorts its entries every time, which
    takes far longer than the product. Here they are sorted once. Indices have 32 bits where that
    is enough: a product is as fast as the memory it reads.

    The gradient in the entries is found entry by entry; torch's own, of a product between a
    sparse matrix and a vector, is a dense matrix.
    """

    crow: Tensor  # (m + 1,), where each row begins
    col: Tensor  # (nnz,)
    entries: Tensor  # (nnz,), without gradient
    shape: tuple[int, int]

    @staticmethod
    def of(A: Tensor) -> SparseMatrix:  # (m, n), CSR or COO
        """The matrix in a sparse tensor."""
        A = A.detach() if A.layout == torch.sparse_csr else A.detach().coalesce()
        m, n = A.shape
        index = _index_type(m, n, A._nnz())
        if A.layout == torch.sparse_csr:
            return SparseMatrix(
                A.crow_indices().to(index), A.col_indices().to(index), A.values(), (m, n)
            )
        row, col = A.indices()
        return SparseMatrix(_begins(row, m).to(index), col.to(index), A.values(), (m, n))

    def product(self, entries: Tensor, x: Tensor) -> Tensor:  # (nnz,), (..., n) -> (..., m)
        """A x, with a gradient in the entries and in x; their numbers are those of the matrix."""
        out: Tensor = _Product.apply(entries, x, self, False)  # type: ignore[no-untyped-call]
        return out

    def adjoint(self, entries: Tensor, r: Tensor) -> Tensor:  # (nnz,), (..., m) -> (..., n)
        """Aᵀ r, likewise."""
        out: Tensor = _Product.apply(entries, r, self, True)  # type: ignore[no-untyped-call]
        return out

    @cached_property
    def row(self) -> Tensor:  # (nnz,)
        """The row of each entry."""
        count = self.crow.diff()
        each = torch.arange(self.shape[0], dtype=self.crow.dtype, device=self.crow.device)
        return each.repeat_interleave(count)

    @cached_property
    def matrix(self) -> Tensor:  # (m, n)
        """As a CSR tensor."""
        return csr(self.crow, self.col, self.entries, self.shape)

    @cached_property
    def transposed(self) -> Tensor:  # (n, m)
        """The transpose as a CSR tensor."""
        m, n = self.shape
        col, order = self.col.sort(stable=True)
        row = self.row.index_select(0, order)
        begins = _begins(col, n).to(self.crow.dtype)
        return csr(begins, row, self.entries.index_select(0, order), (n, m))


class _Product(torch.autograd.Function):
    """A x or Aᵀ x; linear in x and in the entries, so that its derivatives are like it."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, x: Tensor, of: SparseMatrix, transpose: bool) -> Tensor:
        ctx.of, ctx.transpose = of, transpose
        ctx.save_for_backward(entries, x)
        return csr_product(of.transposed if transpose else of.matrix, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        entries, x = ctx.saved_tensors
        of: SparseMatrix = ctx.of
        in_entries = in_x = None
        if ctx.needs_input_grad[0]:
            left, right = (x, grad) if ctx.transpose else (grad, x)
            in_entries = left.index_select(-1, of.row) * right.index_select(-1, of.col)
            in_entries = in_entries.sum_to_size(len(of.col))
        if ctx.needs_input_grad[1]:
            in_x = of.product(entries, grad) if ctx.transpose else of.adjoint(entries, grad)
        return in_entries, in_x, None, None


def _begins(ordered: Tensor, count: int) -> Tensor:  # (nnz,) -> (count + 1,)
    """Where each of 0, 1, ... count − 1 begins among ordered indices, and the end."""
    each = torch.arange(count + 1, dtype=ordered.dtype, device=ordered.device)
    return torch.searchsorted(ordered.contiguous(), each)


def _index_type(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) < torch.iinfo(torch.int32).max else torch.int64
