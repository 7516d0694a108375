"""A set with bounds, budgets and equations in one form, for methods that treat such sets alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dfwlayer.ops.values import Value, equal

__all__ = [
    "Block",
    "Flat",
    "Linear",
    "Met",
    "Oval",
    "Power",
    "Region",
    "Round",
    "Spent",
    "as_oval",
    "form_around",
]


class Flat(NamedTuple):
    """{x : l ≤ x ≤ u, Σ |w_i x_i| ≤ t, ⟨a, x⟩ = b, …} for n coordinates, as it was given.

    Entries are a number, (n,) or (B, n); totals a number, (1,) or (B, 1).
    """

    n: int
    lower: Value  # l, may be −∞
    upper: Value  # u, may be ∞
    weight: Value | None = None  # w, None without that constraint
    radius: Value = 0.0  # t
    equations: tuple[tuple[Value, Value], ...] = ()  # a and b


class Round(NamedTuple):
    """{x : ‖w ∘ x‖₂ ≤ t} for n coordinates, likewise."""

    n: int
    weight: Value  # w
    radius: Value  # t


class Power(NamedTuple):
    """{x : ‖w ∘ x‖_p ≤ t} for n coordinates and any 1 < p < ∞, likewise."""

    n: int
    p: float
    weight: Value  # w
    radius: Value  # t


class Linear(NamedTuple):
    """{x : l ≤ x ≤ u, G x ≤ h, A x = b} for n coordinates, as it was given."""

    n: int
    lower: Value  # l, a number, (n,) or (B, n), may be −∞
    upper: Value  # u, likewise, may be ∞
    G: Tensor | None  # (m, n) or (B, m, n)
    h: Value  # a number, (m,) or (B, m), may be ∞
    A: Tensor | None  # (k, n) or (B, k, n)
    b: Value  # a number, (k,) or (B, k)


class Oval(NamedTuple):
    """{x : ‖W (x − c)‖₂ ≤ t} for n coordinates, as it was given."""

    n: int
    weight: Value  # W, (m, n) or (B, m, n), or its diagonal, a number, (n,) or (B, n)
    centre: Value  # c, a number, (n,) or (B, n)
    radius: Value  # t, a number, (1,) or (B, 1)
    full: bool = False  # W is more than a diagonal


class Met(NamedTuple):
    """The points of rows and bounds that are in some ellipsoids, for n coordinates."""

    n: int
    linear: Linear
    ovals: tuple[Oval, ...]


class Spent(NamedTuple):
    """The points of rows and bounds with Σ |w_i (x_i − c_i)| ≤ t, for n coordinates."""

    n: int
    linear: Linear
    weight: Value  # w, a number, (n,) or (B, n)
    centre: Value  # c, likewise
    radius: Value  # t, a number, (1,) or (B, 1)


Block = Flat | Round | Power | Linear | Oval | Met | Spent


def as_oval(block: Block) -> Oval | None:
    """An ellipsoid, or a ball as one."""
    if isinstance(block, Round):
        return Oval(block.n, block.weight, 0.0, block.radius)
    return block if isinstance(block, Oval) else None


def form_around(form: Sequence[Block] | None, centre: Value) -> Sequence[Block] | None:
    """The normal form of a ball, or an ellipsoid, with a centre; None for other sets."""
    if form is None or len(form) > 1:
        return None
    block = form[0]
    if isinstance(block, Flat):
        endless = equal(block.lower, -math.inf) and equal(block.upper, math.inf)
        if block.equations or block.weight is None or not endless:
            return None
        everywhere = Linear(block.n, -math.inf, math.inf, None, 0.0, None, 0.0)
        return (Spent(block.n, everywhere, block.weight, centre, block.radius),)
    oval = as_oval(block)
    if oval is None or not equal(oval.centre, 0):
        return None
    return (oval._replace(centre=centre),)


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

    @classmethod
    def of(
        cls,
        like: Tensor,  # (B, n)
        lower: Tensor | float,
        upper: Tensor | float,
        budgets: Sequence[tuple[Tensor, Tensor]] = (),  # w, (n,) or (B, n), and t, (1,) or (B, 1)
        equations: Sequence[tuple[Tensor, Tensor]] = (),  # a and b, likewise
    ) -> Region:
        """From its parts, which are shared by all problems or not."""
        x = like.detach().double()

        def wide(part: Tensor | float, count: int) -> Tensor:
            return torch.as_tensor(part, device=x.device).detach().double().expand(len(x), count)

        def stacked(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            normals = [wide(row, x.shape[-1]).unsqueeze(-2) for row, _ in parts]
            blank = x.new_zeros(len(x), 0, x.shape[-1])
            numbers = [wide(number, 1) for _, number in parts]
            return torch.cat([blank, *normals], -2), torch.cat([blank[..., 0], *numbers], -1)

        bounds = wide(lower, x.shape[-1]), wide(upper, x.shape[-1])
        return cls(*bounds, *stacked(budgets), *stacked(equations))

    def rows(self, index: Tensor) -> Region:
        """The problems at these positions."""
        return replace(self, **{name: part[index] for name, part in vars(self).items()})

    def directions(self) -> Region:
        """The directions of size one at most that never leave it, from any point.

        Those of a coordinate are bounded where it is, or has a weight in a budget.
        """
        spent = (self.weights > 0).any(-2)
        lower = torch.where(torch.isinf(self.lower) & ~spent, -1.0, 0.0)
        upper = torch.where(torch.isinf(self.upper) & ~spent, 1.0, 0.0)
        none = self.weights[:, :0], self.radii[:, :0]
        return Region(lower, upper, *none, self.slopes, torch.zeros_like(self.totals))

    @staticmethod
    def product(regions: Sequence[Region]) -> Region:
        """The regions beside each other, each constraint over its own block."""
        counts = [region.lower.shape[-1] for region in regions]
        margins = [(sum(counts[:i]), sum(counts[i + 1 :])) for i in range(len(counts))]
        both = list(zip(regions, margins, strict=True))
        return Region(
            torch.cat([region.lower for region in regions], -1),
            torch.cat([region.upper for region in regions], -1),
            torch.cat([pad(region.weights, margin) for region, margin in both], -2),
            torch.cat([region.radii for region in regions], -1),
            torch.cat([pad(region.slopes, margin) for region, margin in both], -2),
            torch.cat([region.totals for region in regions], -1),
        )
