"""The small problems: min ½xᵀPx + qᵀx over five kinds of sets, one of them or many at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dfwlayer
from dfwlayer import Quadratic, solve
from dfwlayer.engines import compiled
from dfwlayer_bench.problems.reference import project_l1

__all__ = [
    "SETS",
    "Ball",
    "Bounds",
    "Problem",
    "Reference",
    "largest_error",
    "make",
    "reference_of",
]

HALVINGS = 200  # of an interval of doubles: more than their digits and exponents ask for


@dataclass(frozen=True)
class Ball:
    """‖x‖_p ≤ radius, p 1 or 2."""

    p: int
    radius: Tensor  # (...)

    def constraint(self, library: Any = dfwlayer) -> Any:
        """The set as the library has it, or as one with the same names."""
        return library.LpBall(self.p, self.radius)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point, without the library's code; y is (..., n)."""
        if self.p == 2:
            shrink: Tensor = (self.radius / y.norm(dim=-1)).clamp_max(1)
            return y * shrink.unsqueeze(-1)
        rows, radii = y.reshape(-1, y.shape[-1]), self.radius.reshape(-1).tolist()
        pairs = zip(rows, radii, strict=True)
        nearest = [project_l1(row, torch.ones_like(row), radius) for row, radius in pairs]
        return torch.stack(nearest).reshape(y.shape)

    def violation(self, x: Tensor) -> float:
        """By how much of its radius x leaves the ball, at most."""
        excess = x.norm(p=self.p, dim=-1) / self.radius - 1
        return max(0.0, float(excess.max()))


@dataclass(frozen=True)
class Bounds:
    """lower ≤ x ≤ upper, and Σ x = total where there is a total."""

    lower: float
    upper: float
    total: float | None = None

    def constraint(self, library: Any = dfwlayer) -> Any:
        """The set as the library has it, or as one with the same names."""
        if self.total is None:
            return library.Box(self.lower, self.upper)
        if math.isinf(self.upper):
            return library.Simplex(self.total)
        return library.CappedSimplex(self.total, self.upper)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point, without the library's code; y is (..., n)."""
        if self.total is None:
            return y.clamp(self.lower, self.upper)
        # clip(y − shift) with the shift that makes the sum right, which falls as the shift grows
        low = y.amin(-1, keepdim=True) - self.total
        high = y.amax(-1, keepdim=True)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            above = (y - middle).clamp(self.lower, self.upper).sum(-1, keepdim=True) > self.total
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return (y - high).clamp(self.lower, self.upper)

    def violation(self, x: Tensor) -> float:
        """By how much of the total, or else of the upper bound, x leaves the set, at most."""
        size = self.upper if self.total is None else self.total
        excess = torch.maximum(self.lower - x, x - self.upper).amax(-1)
        if self.total is not None:
            excess = torch.maximum(excess, (x.sum(-1) - self.total).abs())
        return max(0.0, float(excess.max())) / size


# the set from the unconstrained solutions (..., n): a ball of half their norm is active for all
SETS: dict[str, Callable[[Tensor], Ball | Bounds]] = {
    "l1": lambda free: Ball(1, 0.5 * free.abs().sum(-1)),
    "l2": lambda free: Ball(2, 0.5 * free.norm(dim=-1)),
    "box": lambda _: Bounds(-0.3, 0.3),
    "simplex": lambda _: Bounds(0.0, math.inf, 1.0),
    "capped-simplex": lambda free: Bounds(0.0, 3 / free.shape[-1], 1.0),
}


@dataclass(frozen=True)
class Problem:
    """One problem, (...) being (), or a batch of B, (...) being (B,); in float64.

    The functional is v·x with random v, since the sum of x is constant on a simplex.
    """

    P: Tensor  # (..., n, n)
    q: Tensor  # (..., n)
    v: Tensor  # (..., n)
    set: Ball | Bounds

    @property
    def n(self) -> int:
        return self.q.shape[-1]

    @property
    def batched(self) -> bool:
        return self.q.dim() == 2

    def value(self, x: Tensor) -> Tensor:
        """The functional, of all problems together."""
        return (self.v * x).sum()


@dataclass(frozen=True)
class Reference:
    """The answer to measure against, and how well it satisfies the optimality conditions."""

    x: Tensor  # (..., n)
    gradient: Tensor  # (..., n), d(v·x)/dq
    residual: float


def make(name: str, count: int, n: int, seed: int) -> Problem:
    """P = RᵀR/n + 0.1 I, and q, v and R of normal numbers, the same for every set."""
    random = np.random.RandomState(seed)
    shape = (n,) if count == 1 else (count, n)
    R, q, v = (
        torch.from_numpy(random.standard_normal(size)) for size in ((*shape, n), shape, shape)
    )
    P = R.mT @ R / n
    P = 0.5 * (P + P.mT) + 0.1 * torch.eye(n, dtype=torch.float64)
    free = torch.linalg.solve(P, -q)
    return Problem(P, q, v, SETS[name](free))


def reference_of(problem: Problem, *, tol: float = 1e-10) -> Reference:
    """The library's answer by tensor operations, accepted only if the optimality conditions hold.

    x is the solution where a gradient step leads back to it: x = Π(x − (Px + q)), with a projection
    that the library does not share. The residual is the largest entry of the difference, against
    the largest entry of x.

    Raises:
        RuntimeError: If the residual is above ``tol``.

    """
    q = problem.q.clone().requires_grad_()
    with compiled.using(False):
        x = solve(Quadratic(problem.P, q), problem.set.constraint(), tol=1e-12).x
        (gradient,) = torch.autograd.grad((problem.v * x).sum(), q)
    x = x.detach()
    force = (problem.P @ x.unsqueeze(-1)).squeeze(-1) + problem.q
    residual = largest_error(problem.set.project(x - force), x)
    if not residual <= tol:
        raise RuntimeError(
            f"the reference leaves a residual of {residual:.1e}, above {tol:.1e}; try another seed"
        )
    return Reference(x, gradient, residual)


def largest_error(found: Tensor, exact: Tensor) -> float:
    """The largest entry of the difference, against the largest of the exact answer if not zero."""
    size = float(exact.abs().max())
    return float((found - exact).abs().max()) / (size if size > 0 else 1.0)
