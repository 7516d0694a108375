"""The problems of the suite: minimise ½‖Ax − b‖² over ‖x‖₁ ≤ t."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dfwlayer
from dfwlayer.ops.matrices import csr
from dfwlayer_bench.systems.base import load

__all__ = ["PROBLEMS", "Lasso", "Penalised", "make", "penalised"]

Array = np.ndarray[Any, np.dtype[np.float64]]
RADII = 20  # of a path
REFERENCE = 1e-12  # tolerance of the solution that tells λ


@dataclass(frozen=True)
class Lasso:
    """One A and b, and one radius or several."""

    A: Tensor  # (m, n), dense or CSR
    b: Tensor  # (m,)
    radius: Tensor  # () or (k,)

    @cached_property
    def columns(self) -> Any:
        """A as rivals like it best: by columns, dense in Fortran's order or sparse."""
        if self.A.layout == torch.strided:
            return np.asfortranarray(self.A.numpy())
        parts = self.A.values(), self.A.col_indices(), self.A.crow_indices()
        values, col, crow = (part.numpy() for part in parts)
        shape = tuple(self.A.shape)
        # the solvers in C and Numba take indices of 32 bits
        given = values, col.astype(np.int32), crow.astype(np.int32)
        return load("scipy.sparse").csr_matrix(given, shape=shape).tocsc()


@dataclass(frozen=True)
class Penalised:
    """½‖Ax − b‖² + λ‖x‖₁ with the λ that have the same solutions as the radii."""

    problem: Lasso
    penalties: Array  # (k,)

    def gap(self, x: Tensor) -> float:  # (k, n)
        """The largest duality gap, relative to the objective."""
        A, b = self.problem.columns, self.problem.b.numpy()
        gaps = []
        for own, penalty in zip(x.reshape(-1, A.shape[1]).numpy(), self.penalties, strict=True):
            r = b - A @ own
            dual = r * min(1.0, penalty / np.abs(A.T @ r).max())
            primal = 0.5 * r @ r + penalty * np.abs(own).sum()
            gaps.append((primal - 0.5 * (b @ b - (b - dual) @ (b - dual))) / primal)
        return float(max(gaps))


def penalised(problem: Lasso) -> Penalised:
    """λ = ‖Aᵀ(Ax − b)‖_∞ at the solutions."""
    objective = dfwlayer.LeastSquares(problem.A, problem.b)
    x = dfwlayer.solve(objective, dfwlayer.LpBall(1, problem.radius), tol=REFERENCE).x
    largest = objective.gradient(x).abs().amax(-1)
    return Penalised(problem, np.atleast_1d(largest.numpy()))


def _target(A: Any, used: int, noise: float, random: np.random.Generator) -> tuple[Array, float]:
    """A combination of some columns, with noise of that size; the sum of its |weights|."""
    m, n = A.shape
    chosen = random.choice(n, used, replace=False)
    weights = random.standard_normal(used)
    clean = A[:, chosen] @ weights
    noisy = random.standard_normal(m) * noise * np.linalg.norm(clean) / m**0.5
    return clean + noisy, float(np.abs(weights).sum())


def _radius(total: float, share: float, path: bool) -> Tensor:
    top = share * total
    found = np.linspace(top / RADII, top, RADII) if path else np.array(top)
    return torch.from_numpy(found)


def _correlated(
    random: np.random.Generator, m: int = 500, n: int = 2000, path: bool = False
) -> Lasso:
    """Columns that resemble their neighbours, each 0.95 times the last one plus what is new."""
    A = random.standard_normal((m, n))
    for j in range(1, n):
        A[:, j] = 0.95 * A[:, j - 1] + (1 - 0.95**2) ** 0.5 * A[:, j]
    b, total = _target(A, n // 20, 0.1, random)
    return Lasso(torch.from_numpy(A), torch.from_numpy(b), _radius(total, 0.74, path))


def _gaussian(random: np.random.Generator, m: int = 1000, n: int = 10_000) -> Lasso:
    """Independent entries."""
    A = random.standard_normal((m, n)) / m**0.5
    b, total = _target(A, n // 100, 0.1, random)
    return Lasso(torch.from_numpy(A), torch.from_numpy(b), _radius(total, 0.85, False))


def _sparse(
    random: np.random.Generator,
    m: int = 20_000,
    n: int = 50_000,
    entries: int = 20,  # a column
    path: bool = False,
) -> Lasso:
    """The same number of entries in every column, at any rows."""
    count = entries * n
    row, col = random.integers(0, m, count), np.repeat(np.arange(n), entries)
    given = random.standard_normal(count), (row, col)
    A = load("scipy.sparse").coo_matrix(given, shape=(m, n)).tocsr()
    b, total = _target(A.tocsc(), 100, 0.1, random)
    parts = A.indptr, A.indices, A.data
    crow, index, values = (torch.from_numpy(part) for part in parts)
    tensor = csr(crow.long(), index.long(), values, (m, n))
    return Lasso(tensor, torch.from_numpy(b), _radius(total, 0.6, path))


def _islp(random: np.random.Generator, name: str, share: float) -> Lasso:
    """Gene expressions, centred and of length one; the target is a combination of 30 genes."""
    if name == "NCI60":
        A = np.load(_file("NCI60data.npy")).astype(np.float64)
    else:
        A = np.genfromtxt(_file("Khan_xtrain.csv"), delimiter=",", skip_header=1)
    A = A - A.mean(0)
    A = np.ascontiguousarray(A / np.linalg.norm(A, axis=0))
    b, total = _target(A, 30, 0.1, random)
    return Lasso(torch.from_numpy(A), torch.from_numpy(b), _radius(total, share, False))


def _sklearn(_: np.random.Generator, name: str, degree: int, share: float) -> Lasso:
    """A set of scikit-learn with its own target, and all products of so many columns.

    The radius is a share of the norm of a least squares fit of a tenth as many columns as there
    are rows, those that correlate most with the target.
    """
    data, columns = load("sklearn.datasets"), load("sklearn.preprocessing").PolynomialFeatures
    A, b = getattr(data, f"load_{name}")(return_X_y=True)
    A = columns(degree, include_bias=False).fit_transform((A - A.mean(0)) / A.std(0))
    A = A - A.mean(0)
    A = A[:, np.linalg.norm(A, axis=0) > 1e-9]
    A = np.ascontiguousarray(A / np.linalg.norm(A, axis=0))
    b = (b - b.mean()).astype(np.float64)
    chosen = np.argsort(-np.abs(A.T @ b))[: len(b) // 10]
    total = float(np.abs(np.linalg.lstsq(A[:, chosen], b, rcond=1e-3)[0]).sum())
    return Lasso(torch.from_numpy(A), torch.from_numpy(b), _radius(total, share, False))


def _file(name: str) -> Path:
    return Path(str(importlib.metadata.distribution("ISLP").locate_file(f"ISLP/data/{name}")))


PROBLEMS: dict[str, Callable[[np.random.Generator], Lasso]] = {
    "correlated": _correlated,
    "gaussian": _gaussian,
    "nci60": partial(_islp, name="NCI60", share=0.3),
    "khan": partial(_islp, name="Khan", share=0.4),
    "diabetes": partial(_sklearn, name="diabetes", degree=3, share=0.3),
    "wine": partial(_sklearn, name="wine", degree=3, share=0.3),
    "sparse": _sparse,
    "huge": partial(_sparse, m=100_000, n=1_000_000, entries=10),
    "correlated-path": partial(_correlated, path=True),
    "sparse-path": partial(_sparse, path=True),
    "tiny": partial(_correlated, m=60, n=400),
    "tiny-sparse-path": partial(_sparse, m=200, n=600, entries=8, path=True),
}
QUICK = ("tiny", "tiny-sparse-path")


def make(name: str, seed: int) -> Lasso:
    """The problem of that name; ImportError where its data are not installed."""
    return PROBLEMS[name](np.random.default_rng(seed))
