"""Sparse matrices by rows, and products with them on each kind of device."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["csr", "csr_product"]


def csr(crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """The CSR tensor with these parts, which are not checked."""
    with warnings.catch_warnings():
        # torch calls its CSR tensors a beta, which the caller may not even be using
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        return torch.sparse_csr_tensor(crow, col, values, shape, check_invariants=False)


def csr_product(matrix: Tensor, x: Tensor) -> Tensor:  # (m, n) CSR, (..., n) -> (..., m)
    """A x for every row of x."""
    if x.is_cuda:
        return matrix @ x if x.dim() == 1 else (matrix @ x.mT).mT
    if x.dim() == 1:
        if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            return matrix @ x
        # otherwise torch has no product with a vector, but one with a matrix
        return (matrix @ x.unsqueeze(-1)).squeeze(-1)
    # MKL rounds in another way where the number of columns is a multiple of four; with one column
    # more a problem's numbers do not depend on how many others there are
    count = len(x)
    columns = torch.nn.functional.pad(x, (0, 0, 0, 1)).mT if count % 4 == 0 else x.mT
    return (matrix @ columns).mT[:count]
