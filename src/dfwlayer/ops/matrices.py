"""Products with matrices, dense and sparse, and their factors, on each kind of device."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from dfwlayer.ops.rows import common_shape

__all__ = [
    "begins",
    "by_scipy",
    "cholesky_factor",
    "csr",
    "csr_product",
    "has_scipy",
    "lu_factor",
    "lu_inverse",
    "lu_solved",
    "raised_cholesky",
    "substitute",
    "times",
]

# Rows of matrices up to which a batch goes to LAPACK in one call on the CPU. PyTorch hands the
# matrices of a batch to its threads, and from these MKL's LU factorisation of one with about 150
# rows or more returns wrong pivots, or never (pytorch/pytorch#142815 and #141358).
TOGETHER = 64


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


def lu_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:  # (B, n, n) -> (B, n, n), (B, n)
    """LU factors and pivots, right on the CPU whatever the number of threads, see `TOGETHER`."""
    if not _apart(matrix):
        factor, pivots, _ = torch.linalg.lu_factor_ex(matrix)
        return factor, pivots
    parts = [torch.linalg.lu_factor_ex(one) for one in matrix]
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])


def lu_solved(matrix: Tensor, right: Tensor, *, sound: bool = True) -> Tensor:
    """M⁻¹ V for matrices (..., n, n) and (..., n, m), likewise; differentiable.

    Raises where an M is singular, unless it need not be ``sound``.
    """
    n, lead = matrix.shape[-1], common_shape(matrix.shape[:-2], right.shape[:-2])
    right = right.expand(*lead, *right.shape[-2:])
    if matrix.numel() == n * n and right.dim() > 2:  # one, which would be factorised each time
        columns = right.movedim(-2, 0)
        flat = columns.flatten(1)
        found = _solved(matrix.reshape(n, n), flat, sound)
        return found.reshape(columns.shape).movedim(0, -2)
    if not _apart(matrix):
        return _solved(matrix, right, sound)
    matrix = matrix.expand(*lead, n, n)
    pairs = zip(matrix.flatten(0, -3), right.flatten(0, -3), strict=True)
    each = [_solved(*pair, sound) for pair in pairs]
    return torch.stack(each).reshape(right.shape)


def lu_inverse(matrix: Tensor, *, sound: bool = True) -> Tensor:  # (..., n, n)
    """M⁻¹, likewise."""
    if not _apart(matrix):
        found: Tensor = torch.linalg.inv_ex(matrix, check_errors=sound).inverse
        return found
    each = [lu_inverse(one, sound=sound) for one in matrix.flatten(0, -3)]
    return torch.stack(each).reshape(matrix.shape)


def _solved(matrix: Tensor, right: Tensor, sound: bool) -> Tensor:
    found: Tensor = torch.linalg.solve_ex(matrix, right, check_errors=sound).result
    return found


def _apart(matrix: Tensor) -> bool:
    """Whether several matrices have to be factorised one by one."""
    several = matrix.numel() > matrix.shape[-1] ** 2
    return several and matrix.shape[-1] > TOGETHER and matrix.device.type == "cpu"


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
