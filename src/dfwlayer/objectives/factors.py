"""Factors of Hessians, or of their part on the free coordinates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dfwlayer.linalg import sparse_factor
from dfwlayer.linalg.sparse import SparseMatrix
from dfwlayer.ops.matrices import by_scipy, cholesky_factor, substitute

__all__ = ["LARGEST_FACTOR", "Factor", "on_faces", "reduced_sparse"]

_Inverse = Callable[[Tensor], Tensor]

# bytes of a factor, up to which P is factorised where products with it converge too slowly; that
# is n = 16384 in float32, where it takes as long as some thousand products
LARGEST_FACTOR = 2**30


@dataclass(frozen=True)
class Factor:
    """v ↦ (L Lᵀ)⁻¹ v of a triangular L, (n, n) or (B, n, n)."""

    lower: Tensor
    which: Tensor | None = None  # (B,), which of a few factors is a problem's

    def __call__(self, v: Tensor) -> Tensor:
        if self.which is not None:
            out = torch.empty_like(v)
            for number, factor in enumerate(self.lower):
                index = (self.which == number).nonzero().squeeze(-1)
                if len(index):
                    out[index] = substitute(factor, v[index].mT).mT
            return out
        if self.lower.dim() == 3 or v.dim() == 1:
            return substitute(self.lower, v.unsqueeze(-1)).squeeze(-1)
        return substitute(self.lower, v.mT).mT

    def rows(self, index: Tensor) -> Factor:
        """The same for the problems at these positions."""
        if self.which is not None:
            return Factor(self.lower, self.which[index])
        return Factor(self.lower[index]) if self.lower.dim() == 3 else self


def reduced_sparse(
    P: SparseMatrix,
    free: Tensor,  # (..., n)
    bend: Tensor | None,  # (..., n)
) -> _Inverse | None:
    """v ↦ (P + diag(bend))⁻¹ v on the free coordinates, 0 on the others, for a sparse P.

    By sparse factors where SciPy is, otherwise by dense ones of faces that are small; None where
    that is too large, or the matrix not definite.
    """
    thin = by_scipy(free)
    if not thin and 8 * int(free.sum(-1).square().sum()) > LARGEST_FACTOR:
        return None

    def inverse(_: Tensor, index: Tensor, own: Tensor | None) -> _Inverse | None:
        own = None if own is None else own.double()
        found = _sparse_inverse(P, index, own) if thin else _dense_inverse(P, index, own)
        return None if found is None else lambda v: found(v.double()).to(v.dtype)

    return on_faces(free, bend, inverse)


def on_faces(
    free: Tensor,  # (..., n)
    bend: Tensor | None,  # (..., n)
    inverse: Callable[[Tensor, Tensor, Tensor | None], _Inverse | None],
) -> _Inverse | None:
    """v ↦ 0 beside the free coordinates, and on them what ``inverse`` makes of v, row by row.

    ``inverse`` is asked for each problem once, with its mask (n,), the positions of its k free
    coordinates and its bend there, (k,). None where it answers None for one of them.
    """
    n = free.shape[-1]
    masks = free.reshape(-1, n)
    bends = None if bend is None else bend.expand_as(free).reshape(-1, n)
    parts: list[tuple[Tensor, _Inverse]] = []
    for row, mask in enumerate(masks):
        index = mask.nonzero().squeeze(-1)
        found = inverse(mask, index, None if bends is None else bends[row, index])
        if found is None:
            return None
        parts.append((index, found))

    def solve(v: Tensor) -> Tensor:
        out = torch.zeros_like(v).reshape(-1, n)
        for each, given, (index, own) in zip(out, v.reshape(-1, n), parts, strict=True):
            if len(index):
                each[index] = own(given[index])
        return out.reshape(v.shape)

    return solve


def _dense_inverse(
    P: SparseMatrix, index: Tensor, bend: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    matrix = P.block(index).double()
    if bend is not None:
        matrix.diagonal().add_(bend)
    factor = cholesky_factor(matrix)
    if factor is None:
        return None
    return lambda v: substitute(factor, v.unsqueeze(-1)).squeeze(-1)


def _sparse_inverse(
    P: SparseMatrix, index: Tensor, bend: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    at = index.numpy()
    matrix: Any = sparse_factor.as_csr(P.matrix)[at][:, at]
    if bend is not None:
        matrix = matrix + sparse_factor.module().diags(bend.numpy())
    found: Any = sparse_factor.positive_factor(matrix) if len(at) else matrix
    return None if found is None else lambda v: torch.from_numpy(found.solve(v.numpy()))
