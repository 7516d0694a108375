"""Solves of this library with NumPy arrays, and with sparse matrices of SciPy.

    import dfwlayer.integrations.numpy as dfw

    sol = dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, radius=2.0))
    sol.x, sol.gap, sol.multipliers["radius"]

Every objective and set of the library is here by its own name, and takes arrays where the library
takes tensors; `described` does the same for a set of your own. Arrays are not copied unless they
have to be: if they are of another precision than the rest, or may not be written to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dfwlayer.integrations.descriptions import NAMES, Described, described, mirrored, problem_of
from dfwlayer.ops.matrices import csr
from dfwlayer.solution import Status

__all__ = ["Solution", "Status", "described", "solve", "tensor_of"]


class Solution(NamedTuple):
    """The outcome of `solve`, (*batch, ...) as in `dfwlayer.Solution`."""

    x: NDArray[Any]
    value: NDArray[Any]  # f(x)
    gap: NDArray[Any]  # f(x) − f* ≤ gap
    num_steps: NDArray[Any]
    status: NDArray[Any]  # codes of `dfwlayer.Status`
    violation: NDArray[Any]  # how far x is outside; 0 inside
    multipliers: dict[str, NDArray[Any]]  # what the limits of the set cost, by name


def __getattr__(name: str) -> Callable[..., Described]:
    """The objectives and sets of the library, taking arrays."""
    return mirrored(name)


def __dir__() -> list[str]:
    return sorted((*__all__, *NAMES))


def solve(
    objective: Described, constraint: Described, *, x0: Any = None, **options: Any
) -> Solution:
    """Minimise f(x) over a convex set; see `dfwlayer.solve`.

    Args:
        objective: ``Quadratic``, ``LeastSquares`` or ``Smooth`` of this module; the function of
            ``Smooth`` is written in torch.
        constraint: A set of this module.
        x0: Start.
        options: ``method``, ``tol``, ``max_steps``, ``shape`` and the others of
            `dfwlayer.solve`.

    Returns:
        The `Solution`. Where all arrays are float32 it is, too, and float64 otherwise.

    Raises:
        ValueError: Naming the argument, what was found and what is expected.

    """
    problem = problem_of(objective, constraint, x0 is not None, options, __name__)
    given = [*objective.arrays, *constraint.arrays] + [x0] * problem.start
    dtype = precision(given)
    with torch.no_grad():
        sol = problem.solved([tensor_of(array, dtype) for array in given])
        prices = {name: price.numpy() for name, price in sol.multipliers.items()}
        return Solution(
            sol.x.numpy(),
            sol.value.numpy(),
            sol.gap.numpy(),
            sol.num_steps.numpy(),
            sol.status.numpy(),
            sol.violation.numpy(),
            prices,
        )


def precision(arrays: Iterable[Any]) -> type[np.floating[Any]]:
    """What they are solved in: float32 where all are, float64 otherwise.

    Integers may be labels, which stay what they are.
    """
    dtypes = {np.dtype(a.dtype) for a in arrays if np.issubdtype(a.dtype, np.floating)}
    return np.float32 if dtypes == {np.dtype(np.float32)} else np.float64


def tensor_of(array: Any, dtype: Any = None) -> Tensor:
    """An array, or a sparse matrix of SciPy, as a tensor over the same memory where that can be.

    Args:
        array: The array; a sparse one becomes a tensor of layout CSR.
        dtype: Of floating-point entries, None to leave them as they are.

    """
    scipy_sparse = sys.modules.get("scipy.sparse")  # whoever has such a matrix has imported it
    if scipy_sparse is not None and scipy_sparse.issparse(array):
        rows = array.tocsr()
        if not rows.has_canonical_format:
            rows = rows.copy()
            rows.sum_duplicates()
        crow, col = tensor_of(rows.indptr), tensor_of(rows.indices)
        return csr(crow, col, tensor_of(rows.data, dtype), rows.shape)
    plain = np.asarray(array)
    wide = dtype if np.issubdtype(plain.dtype, np.floating) else None
    native = plain.dtype.newbyteorder("=") if wide is None else wide
    plain = np.ascontiguousarray(plain, native).reshape(plain.shape)
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())
