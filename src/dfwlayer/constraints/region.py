"""Sets with bounds, budgets and equations in one form, for methods that treat them alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dfwlayer.constraints.balls.lp_ball import LpBall
from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.composed.product import Product
from dfwlayer.constraints.polyhedra.birkhoff import Birkhoff
from dfwlayer.constraints.polyhedra.polyhedral_set import PolyhedralSet

__all__ = ["Region", "region_of"]


@dataclass(frozen=True)
class Region:
    """{x : l ≤ x ≤ u, Σ_i W_ji |x_i| ≤ t_j, E x = e} for B problems, in double precision.

    Every coordinate has a positive W_ji for one j at most.
    """

    lower: Tensor  # l (B, n), may be −∞
    upper: Tensor  # u (B, n), may be ∞
    weights: Tensor  # W ≥ 0 (B, k, n)
    radii: Tensor  # t (B, k)
    slopes: Tensor  # E (B, m, n)
    totals: Tensor  # e (B, m)

    def rows(self, index: Tensor) -> Region:
        """The problems at these positions."""
        return replace(self, **{name: part[index] for name, part in vars(self).items()})


def region_of(constraint: Constraint, like: Tensor) -> Region | None:
    """The set for vectors like these (B, n), None where it is not of that form."""
    if isinstance(constraint, LpBall) and constraint.p in (1, math.inf):
        return _ball(constraint, like)
    if isinstance(constraint, PolyhedralSet):
        lower, upper, weight, radius, equations = constraint.facets(like).detach()
        n, rows = like.shape[-1], len(like)

        def wide(part: Tensor, count: int) -> Tensor:
            return part.double().expand(rows, count)

        blank = torch.zeros(rows, 0, n, dtype=torch.double, device=like.device)
        budget = [] if weight is None else [wide(weight, n).unsqueeze(-2)]
        return Region(
            wide(lower, n),
            wide(upper, n),
            torch.cat([blank, *budget], -2),
            blank[..., 0] if radius is None else wide(radius, 1),
            torch.cat([blank, *(wide(a, n).unsqueeze(-2) for a, _ in equations)], -2),
            torch.cat([blank[..., 0], *(wide(b, 1) for _, b in equations)], -1),
        )
    if isinstance(constraint, Birkhoff):
        return _doubly_stochastic(constraint.n, like)
    if isinstance(constraint, Product):
        return _product(constraint, like)
    return None


def _ball(ball: LpBall, like: Tensor) -> Region:
    """‖w ∘ x‖_p ≤ t for p = 1 or ∞; a coordinate of zero weight has no bound."""
    x = like.double()
    weight = torch.ones_like(x) if ball.weight is None else ball.weight.detach().double().abs()
    radius = torch.as_tensor(ball.radius).detach().to(x).reshape(-1, 1).expand(len(x), 1)
    weight = weight.expand_as(x)
    none = torch.full_like(x, torch.inf)
    blank = x.new_zeros(len(x), 0, x.shape[-1])
    if ball.p == 1:
        return Region(-none, none, weight.unsqueeze(-2), radius, blank, blank[..., 0])
    heavy = weight > 0
    reach = torch.where(heavy, radius / torch.where(heavy, weight, 1), torch.inf)
    return Region(-reach, reach, blank, blank[..., 0], blank, blank[..., 0])


def _doubly_stochastic(n: int, like: Tensor) -> Region:
    """X ≥ 0 with the sums of rows and columns 1."""
    x = like.double()
    eye = torch.eye(n).to(x)
    one = torch.ones(1, n).to(x)
    sums = torch.cat((torch.kron(eye, one), torch.kron(one, eye)))
    blank = x.new_zeros(len(x), 0, n * n)
    return Region(
        torch.zeros_like(x),
        torch.full_like(x, torch.inf),
        blank,
        blank[..., 0],
        sums.expand(len(x), -1, -1),
        x.new_ones(len(x), 2 * n),
    )


def _product(product: Product, like: Tensor) -> Region | None:
    """The parts beside each other, each constraint over its own block."""
    counts = [math.prod(s) if isinstance(s, tuple) else s for s in product.sizes]
    ends = list(accumulate(counts))
    parts = []
    for part, end, count in zip(product.sets, ends, counts, strict=True):
        found = region_of(part, like[..., end - count : end])
        if found is None:
            return None
        parts.append((found, (end - count, ends[-1] - end)))

    def padded(block: Tensor, margin: tuple[int, int]) -> Tensor:
        return torch.nn.functional.pad(block, margin)

    return Region(
        torch.cat([r.lower for r, _ in parts], -1),
        torch.cat([r.upper for r, _ in parts], -1),
        torch.cat([padded(r.weights, margin) for r, margin in parts], -2),
        torch.cat([r.radii for r, _ in parts], -1),
        torch.cat([padded(r.slopes, margin) for r, margin in parts], -2),
        torch.cat([r.totals for r, _ in parts], -1),
    )
