"""Random problems and their exact solutions, in numpy and without the library.

This is the demo's yardstick: one that measured the library with itself would show nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Array",
    "Exact",
    "Problems",
    "exact_solution",
    "kkt_residual",
    "project",
    "random_problems",
    "relative_violation",
]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problems:
    """B problems min ½ xᵀPx + qᵀx subject to ‖w ∘ x‖₁ ≤ t, in float64."""

    P: Array  # (B, n, n)
    q: Array  # (B, n)
    weight: Array  # (B, n)
    radius: Array  # (B,)

    def value(self, x: Array) -> Array:
        """f(x): (B, n) -> (B,)."""
        curved = 0.5 * np.einsum("bi,bij,bj->b", x, self.P, x)
        return np.asarray(curved + (self.q * x).sum(-1))

    def gradient(self, x: Array) -> Array:
        """P x + q: (B, n) -> (B, n)."""
        return np.asarray(np.einsum("bij,bj->bi", self.P, x) + self.q)

    def lipschitz(self) -> Array:
        """L, the largest eigenvalue of each P."""
        return np.asarray(np.linalg.eigvalsh(self.P)[:, -1])

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """P, q, weight and radius as new tensors."""
        parts = (self.P, self.q, self.weight, self.radius)
        p, q, weight, radius = (torch.tensor(part, dtype=dtype) for part in parts)
        return p, q, weight, radius

    def moved(self, name: str, by: Array) -> Problems:
        """The problems with one of their parameters changed."""
        return replace(self, **{name: getattr(self, name) + by})

    def first(self) -> Problems:
        """The first problem alone."""
        return Problems(self.P[:1], self.q[:1], self.weight[:1], self.radius[:1])


def random_problems(rng: np.random.Generator, count: int, n: int) -> Problems:
    """Problems whose constraint binds: t is 0.3 times what the unconstrained minimum would need."""
    factor = rng.standard_normal((count, n, n))
    P = factor.transpose(0, 2, 1) @ factor + n * np.eye(n)
    q = rng.standard_normal((count, n))
    weight = rng.uniform(0.5, 1.5, (count, n))
    unconstrained = np.linalg.solve(P, -q[..., None])[..., 0]
    return Problems(P, q, weight, 0.3 * np.abs(weight * unconstrained).sum(-1))


@dataclass(frozen=True)
class Exact:
    """Solutions that owe nothing to the library."""

    x: Array  # (B, n)
    value: Array  # (B,)
    kkt: Array  # (B,), see `kkt_residual`


def exact_solution(problems: Problems, max_steps: int = 100_000) -> Exact:
    """Projected gradient steps in float64 until they stand still, then the KKT conditions.

    Raises:
        RuntimeError: If the KKT conditions do not hold to 1e-9: what follows would be worthless.

    """
    x = np.zeros_like(problems.q)
    step = 1 / problems.lipschitz()[:, None]
    for _ in range(max_steps):
        moved = project(x - step * problems.gradient(x), problems.weight, problems.radius)
        change = np.abs(moved - x).max()
        x = moved
        if change <= 1e-15 * np.abs(x).max():
            break
    residual = kkt_residual(problems, x)
    if not residual.max() <= 1e-9:
        raise RuntimeError(f"the reference solution has a KKT residual of {residual.max():.1e}")
    return Exact(x, problems.value(x), residual)


def project(v: Array, weight: Array, radius: Array) -> Array:
    """The nearest points to v (B, n) with Σ w|x| ≤ t, by sorting.

    x = sign(v) max(|v| − λw, 0), where λ solves Σ w max(|v| − λw, 0) = t; as a function of λ the
    sum is piecewise linear and breaks at |v|/w.
    """
    size = np.abs(v)
    order = np.argsort(-size / weight, axis=-1)
    w = np.take_along_axis(weight, order, -1)
    a = np.take_along_axis(size, order, -1)
    candidates = (np.cumsum(w * a, -1) - radius[:, None]) / np.cumsum(w * w, -1)
    count = (a > candidates * w).sum(-1, keepdims=True).clip(min=1)
    multiplier = np.take_along_axis(candidates, count - 1, -1).clip(min=0)
    return np.sign(v) * np.maximum(size - multiplier * weight, 0)


def kkt_residual(problems: Problems, x: Array) -> Array:
    """How far x (B, n) is from the KKT conditions, relative to the data.

    With a multiplier λ ≥ 0: ∇f_i = −λ w_i sign(x_i) where x_i ≠ 0 and |∇f_i| ≤ λ w_i elsewhere,
    ‖w ∘ x‖₁ ≤ t, and equality if λ > 0. Forces are measured against the largest |q_i| / w_i.
    """
    scale = np.abs(problems.q / problems.weight).max(-1)
    pull = problems.gradient(x) / problems.weight / scale[:, None]
    multiplier = np.abs(pull).max(-1, keepdims=True)
    stationary = np.where(x != 0, np.abs(pull + multiplier * np.sign(x)), 0).max(-1)
    spent = np.abs(problems.weight * x).sum(-1) / problems.radius
    slack = multiplier[:, 0] * np.maximum(1 - spent, 0)
    return np.asarray(np.max([stationary, slack, spent - 1, np.zeros_like(spent)], axis=0))


def relative_violation(x: Array, weight: Array, radius: Array) -> float:
    """The worst (‖w ∘ x‖₁ − t) / t of rows (B, n), at least 0."""
    return float((np.abs(weight * x).sum(-1) / radius - 1).max().clip(min=0))
