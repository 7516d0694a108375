"""The small problems: min ½xᵀPx + qᵀx over six kinds of sets, one of them or many at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import dfwlayer
from dfwlayer import Quadratic, solve
from dfwlayer.engines import compiled
from dfwlayer_bench.problems.functional import Functional
from dfwlayer_bench.problems.reference import project_l1
from dfwlayer_bench.systems.base import load
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = [
    "SETS",
    "Ball",
    "Bounds",
    "Problem",
    "Reference",
    "Turnover",
    "bounds_of",
    "largest_error",
    "make",
    "reference_of",
    "rows_of",
]

WINDOW, YEAR, AVERSION = 252, 252, 5.0  # days, days, weight of the variance against the return
HALVINGS = 200  # of an interval of doubles: more than their digits and exponents ask for
NESTED = (
    70  # of one inside of another, whose ends are no larger than the numbers that are asked for
)
TRADED = 0.8  # of the money: what is sold and what is bought together


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


@dataclass(frozen=True)
class Turnover:
    """Bounds and a total, and of what is held no more than ``limit`` changes hands."""

    bounds: Bounds
    total: float
    held: Tensor  # (n,)
    limit: float

    def constraint(self, library: Any = dfwlayer) -> Any:
        """The set as the library has it, or as one with the same names."""
        traded = library.LpBall(1, radius=self.limit, centre=self.held)
        return library.Intersection(self.bounds.constraint(library), traded)

    def project(self, y: Tensor) -> Tensor:
        """The nearest point, without the library's code; y is (..., n).

        Where the limit binds, what changes hands has a price, and falls as that rises.
        """
        free = self.bounds.project(y)
        low = torch.zeros_like(y[..., :1])
        high = 2 * ((y - self.held).abs().amax(-1, keepdim=True) + self.total)
        for _ in range(NESTED):
            middle = (low + high) / 2
            above = self._traded(self._priced(y, middle)) > self.limit
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return torch.where(self._traded(free) <= self.limit, free, self._priced(y, high))

    def _traded(self, x: Tensor) -> Tensor:  # (..., n) -> (..., 1)
        return (x - self.held).abs().sum(-1, keepdim=True)

    def _priced(self, y: Tensor, price: Tensor) -> Tensor:
        """The nearest point with the right sum if what changes hands has a price (..., 1)."""
        way = y - self.held
        size = way.abs().amax(-1, keepdim=True) + price + self.total

        def moved(shift: Tensor) -> Tensor:
            left = way - shift
            there: Tensor = self.held + left.sign() * (left.abs() - price).clamp_min(0)
            return there.clamp(self.bounds.lower, self.bounds.upper)

        low, high = -size, size
        for _ in range(NESTED):
            middle = (low + high) / 2
            above = moved(middle).sum(-1, keepdim=True) > self.total
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return moved(high)

    def violation(self, x: Tensor) -> float:
        """By how much of the total or of the limit x leaves the set, at most."""
        excess = float(self._traded(x).max()) / self.limit - 1
        return max(self.bounds.violation(x), excess)


# the set from the unconstrained solutions (..., n): a ball of half their norm is active for all
SETS: dict[str, Callable[[Tensor], Ball | Bounds | Turnover]] = {
    "l1": lambda free: Ball(1, 0.5 * free.abs().sum(-1)),
    "l2": lambda free: Ball(2, 0.5 * free.norm(dim=-1)),
    "box": lambda _: Bounds(-0.3, 0.3),
    "simplex": lambda _: Bounds(0.0, math.inf, 1.0),
    "capped-simplex": lambda free: Bounds(0.0, 3 / free.shape[-1], 1.0),
    "portfolio": lambda free: Bounds(0.0, 3 / free.shape[-1], 1.0),
    "turnover": lambda free: Turnover(
        Bounds(0.0, 3 / free.shape[-1], 1.0),
        1.0,
        torch.full(free.shape[-1:], 1 / free.shape[-1], dtype=torch.float64),
        TRADED,
    ),
}
PRICED = ("portfolio", "turnover")  # those of which the numbers come from prices of stocks


@dataclass(frozen=True)
class Problem(Functional):
    """One problem, (...) being (), or a batch of B, (...) being (B,); in float64.

    The functional is v·x with random v, since the sum of x is constant on a simplex.
    """

    P: Tensor  # (..., n, n)
    q: Tensor  # (..., n)
    v: Tensor  # (..., n)
    set: Ball | Bounds | Turnover


@dataclass(frozen=True)
class Reference:
    """The answer to measure against, and how well it satisfies the optimality conditions."""

    x: Tensor  # (..., n)
    gradient: Tensor  # (..., n), d(v·x)/dq
    residual: float


def make(name: str, count: int, n: int, seed: int) -> Problem:
    """P = RᵀR/n + 0.1 I, and q, v and R of normal numbers, the same for every set but portfolios.

    Those have the covariances and means of daily returns, see `_portfolio`.

    Raises:
        ModuleNotFoundError: If the package with the returns is not installed.
        ValueError: If there are not so many assets or dates.

    """
    random = np.random.RandomState(seed)
    shape = (n,) if count == 1 else (count, n)
    if name in PRICED:
        P, q = (part.reshape(*shape[:-1], *part.shape[1:]) for part in _portfolio(count, n))
        v = torch.from_numpy(random.standard_normal(shape))
        return Problem(P, q, v, SETS[name](q))
    R, q, v = (
        torch.from_numpy(random.standard_normal(size)) for size in ((*shape, n), shape, shape)
    )
    P = R.mT @ R / n
    P = 0.5 * (P + P.mT) + 0.1 * torch.eye(n, dtype=torch.float64)
    free = torch.linalg.solve(P, -q)
    return Problem(P, q, v, SETS[name](free))


def _portfolio(count: int, n: int) -> tuple[Tensor, Tensor]:
    """Risk and return of the first n stocks of the S&P 500 that skfolio has, at so many dates.

    P is the covariance of the ``WINDOW`` days before a date, times ``AVERSION``, and q minus
    their mean, both a year. The dates are spread evenly over the last years.
    """
    prices = load("skfolio.datasets").load_sp500_dataset().to_numpy()  # (days, assets)
    returns = torch.from_numpy(np.diff(prices, axis=0) / prices[:-1])
    if n > returns.shape[1] or count > len(returns) - WINDOW:
        most = f"{len(returns) - WINDOW} dates and {returns.shape[1]} assets"
        raise ValueError(f"there are {most}, not {count} and {n}")
    ends = torch.linspace(len(returns), WINDOW + 1, count).long()
    windows = torch.stack([returns[end - WINDOW : end, :n] for end in ends])  # (count, WINDOW, n)
    centred = windows - windows.mean(1, keepdim=True)
    P = AVERSION * YEAR * centred.mT @ centred / (WINDOW - 1)
    return 0.5 * (P + P.mT), -YEAR * windows.mean(1)


def bounds_of(problem: Problem) -> Bounds:
    """The set of a problem that has bounds and perhaps a total."""
    if not isinstance(problem.set, Bounds):
        raise TypeError("only for sets of bounds and a total")
    return problem.set


def rows_of(problem: Problem) -> Rows:
    """The same problem with rows, for sets of bounds, perhaps with a total.

    Where there is a limit on what changes hands it has 2n variables, x and z ≥ |x − held|.
    """
    given, n = problem.set, problem.n
    bounds = given.bounds if isinstance(given, Turnover) else bounds_of(problem)
    ones = torch.ones(n, dtype=torch.float64)
    equations = 0 if bounds.total is None else 1
    rows = Rows(
        P=problem.P,
        q=problem.q,
        G=torch.eye(n, dtype=torch.float64),
        low=bounds.lower * ones,
        high=torch.full_like(ones, bounds.upper),
        A=ones.expand(equations, n).contiguous(),
        b=torch.full((equations,), bounds.total or 0.0, dtype=torch.float64),
        v=problem.v,
    )
    if not isinstance(given, Turnover):
        return rows
    one, none = rows.G, torch.zeros_like(rows.G)
    blocks = [(one, none), (one, -one), (one, one), (none[:1], ones[None])]
    endless = torch.full_like(ones, math.inf)
    limit = ones.new_tensor([given.limit])
    return Rows(
        P=pad(rows.P, (0, n, 0, n)),
        q=pad(rows.q, (0, n)),
        G=torch.cat([torch.cat(pair, 1) for pair in blocks]),
        low=torch.cat([rows.low, -endless, given.held, -endless[:1]]),
        high=torch.cat([rows.high, given.held, endless, limit]),
        A=pad(rows.A, (0, n)),
        b=rows.b,
        v=pad(rows.v, (0, n)),
    )


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
