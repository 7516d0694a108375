"""Problems as they are written in cvxpy, and what they should be recognised as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

N, M = 4, 6
SHAPES = {"A": (M, N), "b": (M,), "c": (N,), "t": (), "G": (3, N), "h": (3,), "W": (N, N)}


class Symbols:
    """x, and parameters by their names."""

    def __init__(self) -> None:
        self.x = cp.Variable(N)
        for name, shape in SHAPES.items():
            setattr(self, name, cp.Parameter(shape, name=name, nonneg=name in "th"))

    @property
    def squares(self) -> Any:
        return cp.sum_squares(self.A @ self.x - self.b)


@dataclass(frozen=True)
class Case:
    """A problem, how it should be solved, and which parameters have to be small and positive."""

    make: Callable[[Symbols], cp.Problem]
    told: str
    small: str = ""


def constrained(limits: Callable[[Symbols], Any]) -> Callable[[Symbols], cp.Problem]:
    def make(s: Symbols) -> cp.Problem:
        found = limits(s)
        rows = found if isinstance(found, list) else [found]
        return cp.Problem(cp.Minimize(s.squares), rows)

    return make


def with_cost(cost: Callable[[Symbols], Any]) -> Callable[[Symbols], cp.Problem]:
    return lambda s: cp.Problem(cp.Minimize(s.squares + cost(s)))


ROOT = np.random.default_rng(0).standard_normal((N, N))


CASES = {
    "least squares": Case(with_cost(lambda s: 0.1 * cp.sum_squares(s.x)), "all points"),
    "non-negative": Case(constrained(lambda s: s.x >= 0), "box"),
    "simplex": Case(constrained(lambda s: [s.x >= 0, cp.sum(s.x) == 1]), "box cut by a plane"),
    "level": Case(
        constrained(lambda s: [s.x >= 0, s.x <= 0.6, cp.sum(s.x) == s.t]),
        "box cut by a plane",
        "t",
    ),
    "rows": Case(
        constrained(lambda s: [s.G @ s.x <= s.h, cp.sum(s.x) == 0.1]),
        "polyhedron (1 equations, 3 inequalities)",
        "h",
    ),
    "l1": Case(
        constrained(lambda s: cp.norm1(s.x - s.c) <= s.t),
        "1-norm ball around a centre",
        "t",
    ),
    "l1 box": Case(
        constrained(lambda s: [cp.norm1(s.x) <= s.t, s.x <= 0.1]),
        "1-norm ball in a box",
        "t",
    ),
    "l1 plane": Case(
        constrained(lambda s: [cp.norm1(s.x) <= 1.5, cp.sum(s.x) == 1]),
        "1-norm ball cut by a plane",
    ),
    "l1 rows": Case(
        constrained(lambda s: [cp.norm1(s.x) <= 0.4, s.G @ s.x <= s.h]),
        "polyhedron (0 equations, 4 inequalities)",
        "h",
    ),
    "l2": Case(
        constrained(lambda s: cp.norm(s.x - s.c) <= s.t),
        "2-norm ball around a centre",
        "t",
    ),
    "l3": Case(constrained(lambda s: 2 * cp.pnorm(s.x, 3) <= 0.8), "3-norm ball"),
    "squares": Case(
        constrained(lambda s: cp.sum_squares(s.x) / 2 <= s.t), "2-norm ball", "t"
    ),
    "sum of squares": Case(constrained(lambda s: cp.sum(cp.square(s.x)) <= 0.1), "2-norm ball"),
    "square of a norm": Case(constrained(lambda s: cp.norm(s.x) ** 2 <= 0.1), "2-norm ball"),
    "factor": Case(
        constrained(lambda s: s.t * cp.norm(s.x) <= 0.2), "2-norm ball", "t"
    ),
    "cone": Case(
        constrained(lambda s: cp.SOC(s.t, s.x)), "2-norm ball", "t"
    ),
    "ellipsoid": Case(
        constrained(lambda s: cp.norm(s.W @ s.x - s.c) <= 1 + s.t),
        "2-norm ball, in coordinates W y",
        "ct",
    ),
    "tall ellipsoid": Case(
        constrained(lambda s: cp.norm(s.A @ s.x) <= 1), "2-norm ball, in coordinates W y"
    ),
    "quad_form": Case(
        constrained(lambda s: cp.quad_form(s.x, ROOT.T @ ROOT) <= 0.3),
        "2-norm ball, in coordinates W y",
    ),
    "l∞": Case(
        constrained(lambda s: cp.norm(s.x - s.c, "inf") <= s.t), "box", "t"
    ),
    "absolute": Case(constrained(lambda s: [cp.abs(s.x) <= 0.2, cp.max(s.x) <= 0.1]), "box"),
    "l2 and rows": Case(
        constrained(lambda s: [cp.norm(s.x) <= 0.4, cp.sum(s.x) <= 0.1]),
        "polyhedron ∩ 2-norm ball",
    ),
    "lasso": Case(with_cost(lambda s: s.t * cp.norm1(s.x)), "all points", "t"),
    "costs": Case(
        with_cost(lambda s: s.t * cp.sum(cp.neg(s.x)) + cp.sum(cp.pos(s.x)) + 0.1 * cp.norm1(s.x)),
        "all points",
        "t",
    ),
    "total variation": Case(
        with_cost(lambda s: s.t * cp.norm1(cp.diff(s.x))),
        "polyhedron (0 equations, 3 inequalities, bounds)",
        "t",
    ),
    "maximum": Case(
        with_cost(lambda s: s.t * cp.max(s.x)), "polyhedron (0 equations, 4 inequalities)",
        "t",
    ),
    "huber": Case(
        with_cost(lambda s: cp.sum(cp.huber(s.x, 0.1))),
        "polyhedron (0 equations, 8 inequalities)",
    ),
}  # fmt: skip


def parts(case: Case) -> tuple[cp.Problem, list[cp.Parameter], cp.Variable]:
    symbols = Symbols()
    problem = case.make(symbols)
    return problem, sorted(problem.parameters(), key=lambda p: p.name()), symbols.x


def values(parameters: list[cp.Parameter], case: Case, *lead: int, seed: int = 0) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    drawn = []
    for p in parameters:
        value = torch.randn((*lead, *p.shape), generator=gen, dtype=torch.float64)
        if p.name() in case.small:
            value = 0.2 + 0.1 * value.tanh()
        drawn.append(value + 2 * torch.eye(N) if p.name() == "W" else value)
    return drawn


def drawn(seed: int) -> tuple[cp.Problem, list[cp.Parameter], cp.Variable, Any]:
    """A random problem with some kinks, and what draws the values of its parameters."""
    rng, gen = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    n = int(rng.integers(2, 7))
    x, u = cp.Variable(n), cp.Variable(n)
    S, q, c = cp.Parameter((n, n)), cp.Parameter(n), cp.Parameter(n)
    cost, costs = cp.Parameter(nonneg=True), cp.Parameter(n, nonneg=True)
    limit = cp.Parameter(nonneg=True)
    one, two, three, budget, total, upper, sloped, lower = rng.integers(0, 2, 8)
    f, rows = cp.sum_squares(S @ x) + q @ x + 0.01 * cp.norm1(x), []
    used = {S: lambda B: torch.eye(n) + 0.4 * torch.randn(*B, n, n, generator=gen)}
    used[q] = lambda B: 2 * torch.randn(*B, n, generator=gen)
    if one:
        f += cost * cp.norm1(x)
    if two:
        f += cost * cp.sum(cp.pos(u))
    if three:
        f += costs @ cp.abs(u)
        used[costs] = lambda _: torch.rand(n, generator=gen)
    if two or three:
        rows.append(u == x - c)
    if one or two:
        used[cost] = lambda _: torch.tensor(rng.choice([0.01, 0.05, 0.5, 2.0]))
    if budget:
        rows.append(cp.norm1(x) + 0.3 * cp.sum(cp.neg(x)) <= limit)
        used[limit] = lambda _: torch.tensor(rng.choice([0.5, 1.0, 3.0]))
    if total:
        rows.append(cp.sum(x) == 0.1)
    if upper:
        rows.append(x <= 0.6)
    if sloped:
        rows.append(0.5 * cp.sum(x) + cp.sum(cp.neg(2 * x - c)) <= 2.5)
    if lower:
        rows.append(x >= -0.8)
    if two or three or sloped:
        used[c] = lambda _: 0.2 * torch.randn(n, generator=gen)
    parameters, draws = list(used), list(used.values())
    problem = cp.Problem(cp.Minimize(f), rows)
    return problem, parameters, x, lambda B: [draw(B).double().requires_grad_() for draw in draws]
