"""Factors of sparse matrices, where SciPy is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer.linalg.sparse import SparseMatrix

__all__ = [
    "as_csr",
    "exact_factor",
    "factor",
    "module",
    "no_entries",
    "positive_factor",
]

PIVOT = 1e-3  # of the largest entry of a column, what a diagonal entry has to be


def module() -> Any:
    """SciPy's sparse matrices."""
    return import_module("scipy.sparse")


def as_csr(matrix: Tensor) -> Any:  # (m, n), dense, COO or CSR
    """SciPy's form of a matrix, in double precision."""
    if matrix.layout == torch.strided:
        return _entries_of(matrix.detach().double().numpy())
    found = SparseMatrix.of(matrix)
    parts = (found.entries.double(), found.pattern.col, found.pattern.crow)
    # a copy: the numbers here may be those of the tensor
    return module().csr_matrix(tuple(part.numpy() for part in parts), matrix.shape, copy=True)


def _entries_of(matrix: Any) -> Any:  # (m, n)
    """By rows what is not zero; NumPy finds that among flags ten times as fast as among numbers."""
    some = matrix != 0
    flat = np.flatnonzero(some)
    begins = np.zeros(len(matrix) + 1, dtype=np.int32)
    np.cumsum(np.count_nonzero(some, axis=1), out=begins[1:])
    col = (flat % max(matrix.shape[1], 1)).astype(np.int32)
    return module().csr_matrix((matrix.ravel()[flat], col, begins), matrix.shape)


def no_entries(n: int) -> Any:
    """(n, n) of zeros."""
    return module().csr_matrix((n, n))


def factor(matrix: Any, pivot: float = 0.0) -> Any:
    """That of a symmetric matrix, with pivots on the diagonal where they are large enough.

    Where one is zero, of a matrix with a little more on the diagonal.
    """
    size, shift = abs(matrix).max(), 0.0
    while True:
        try:
            return exact_factor(matrix, pivot)
        except RuntimeError:
            pivot, shift = PIVOT, max(1e-12, 100 * shift)
            if not np.isfinite(size) or shift > 1:
                raise
            sign = np.where(matrix.diagonal() < 0, -1.0, 1.0)
            matrix = matrix + module().diags(shift * size * sign).tocsc()


def exact_factor(matrix: Any, pivot: float = 0.0) -> Any:
    """The same, which raises a RuntimeError where a pivot is zero."""
    return import_module("scipy.sparse.linalg").splu(
        matrix,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=pivot,
        options={"SymmetricMode": True, "Equil": False},
    )


def positive_factor(matrix: Any) -> Any:
    """That of a matrix that is positive definite, None if it is not."""
    try:
        found = exact_factor(matrix.tocsc())
    except RuntimeError:  # a pivot is zero
        return None
    plain = np.array_equal(found.perm_r, found.perm_c)
    return found if plain and bool((found.U.diagonal() > 0).all()) else None
