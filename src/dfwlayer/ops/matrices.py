"""Products with matrices, dense and sparse, and Cholesky factors, on each kind of device."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = [
    "begins",
    "by_scipy",
    "cholesky_factor",
    "csr",
    "csr_product",
    "has_scipy",
    "raised_cholesky",
    "substitute",
    "times",
]


def times(matrix: Tensor, x: Tensor) -> Tensor:  # (..., m, n), (..., n) -> (..., m)
    """A x of each row x, the A shared or one per problem."""
    return x @ matrix.mT if matrix.dim() == 2 else (matrix @ x.unsqueeze(-1)).squeeze(-1)


def cholesky_factor(matrix: Tensor) -> Tensor | None:  # (..., n, n)
    """The Cholesky factor, on the CPU in the memory of the matrix; None where there is none."""
    if matrix.device.type == "cpu":
        info = torch.empty(0, dtype=torch.int32)
        factor, info = torch.linalg.cholesky_ex(matrix, out=(matrix, info))
    else:
        factor, info = torch.linalg.cholesky_ex(matrix)
    return None if bool(info.any()) else factor


def raised_cholesky(
    matrix: Tensor,  # (..., n, n)
    size: Tensor | float,  # (..., 1)
    first: float,
) -> tuple[Tensor, Tensor]:
    """Cholesky factors, and a mask (...) of the matrices that have none.

    Where rounding made a matrix indefinite, it is the factor of one with more on its diagonal:
    ``first`` times its size, and 100 times more until there is a factor. Each matrix gets what it
    needs itself, whatever others of the batch need.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    failed, shift = info > 0, first
    while bool(failed.any()) and shift < 100:
        more = (failed.unsqueeze(-1) * shift * size).expand(matrix.shape[:-1])
        again, info = torch.linalg.cholesky_ex(matrix + torch.diag_embed(more))
        factor = torch.where(failed[..., None, None], again, factor)
        failed = failed & (info > 0)
        shift *= 100
    return factor, failed


def substitute(factor: Tensor, v: Tensor) -> Tensor:  # (..., n, n), (..., n, m) -> (..., n, m)
    """(L Lᵀ)⁻¹ v, which for one column is much faster than cholesky_solve."""
    half = torch.linalg.solve_triangular(factor, v, upper=False)
    out: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return out


def csr(crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """The CSR tensor with these parts, which are not checked."""
    with warnings.catch_warnings():
        # torch calls its CSR tensors a beta, which the caller may not even be using
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        return torch.sparse_csr_tensor(crow, col, values, shape, check_invariants=False)


def has_scipy() -> bool:
    """Whether SciPy is installed, which nothing here depends on."""
    return find_spec("scipy") is not None


def by_scipy(like: Tensor) -> bool:
    """Whether SciPy can take tensors of that device."""
    return like.device.type == "cpu" and has_scipy()


def begins(ordered: Tensor, count: int) -> Tensor:  # (nnz,) -> (count + 1,)
    """Where each of 0, 1, ... count − 1 begins among ordered indices, and the end."""
    if ordered.device.type == "cpu":
        found = torch.zeros(count + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(ordered, minlength=count), 0, out=found[1:])
        return found
    # counting would make the host wait
    each = torch.arange(count + 1, dtype=ordered.dtype, device=ordered.device)
    return torch.searchsorted(ordered.contiguous(), each)


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
