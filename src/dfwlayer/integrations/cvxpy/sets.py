"""The set of this library for the rows, bounds and balls that are left of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dfwlayer.constraints import (
    Box,
    GroupBall,
    Intersection,
    L1Box,
    LpBall,
    PlaneCut,
    Polyhedron,
    Product,
    SchattenBall,
    Spectraplex,
)
from dfwlayer.constraints.base import Constraint
from dfwlayer.integrations.cvxpy.recognise import NotRecognisedError
from dfwlayer.objectives import Quadratic
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.matrices import lu_inverse

__all__ = ["Form", "Part", "Region", "form_of"]

Values = dict[str, Tensor]
Posed = tuple[Objective, Constraint, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Part:
    """A ball of the problem: ‖w ∘ (y_S − c)‖ ≤ ρ for some coordinates S, or ‖W y + c‖₂ ≤ ρ."""

    name: str
    kind: str
    p: float
    shape: tuple[int, ...]  # of what the norm is of
    places: NDArray[np.int64] | None  # S, row by row; None with a W
    weight: NDArray[np.float64]  # |w|, one for each of them
    centred: bool  # whether there is a c
    scaled: bool  # whether ρ is to be divided by a factor κ
    squared: bool  # whether ρ is the limit of the square
    tall: bool = False  # whether W has no more columns than rows
    axis: int | None = None

    @property
    def count(self) -> int:
        return len(self.weight)

    def radius(self, at: Values) -> Tensor:
        """ρ."""
        rho = at[f"{self.name}.radius"]
        if self.scaled:
            rho = rho / at[f"{self.name}.factor"]
        return rho.sqrt() if self.squared else rho

    def set(self, at: Values, n: int) -> Constraint:
        """Over all n coordinates, or where there are as many as the norm is of, over those."""
        assert self.places is not None
        radius, places = self.radius(at), torch.from_numpy(self.places)
        centre: Any = None
        if self.centred:
            centre = at[f"{self.name}.centre"]
            centre = _spread(centre, places.to(centre.device), n) if n > self.count else centre
        if self.kind == "lp":
            weight = None
            if n > self.count or (self.weight != 1).any():
                full = np.zeros(n)
                full[self.places if n > self.count else slice(None)] = self.weight
                weight = torch.from_numpy(full).to(radius.device)
            return LpBall(self.p, radius, weight, centre=centre)
        radius = radius / float(self.weight[0])
        if self.kind == "trace":
            return Spectraplex(radius)
        if self.kind == "schatten":
            rows, columns = self.shape
            return SchattenBall(self.p, radius, (rows, columns), centre=centre)
        rows, columns = self.shape
        labels = (
            np.arange(rows).repeat(columns) if self.axis == 1 else np.tile(range(columns), rows)
        )
        return GroupBall([int(label) for label in labels], radius, centre=centre)

    def __str__(self) -> str:
        around = " around a centre" if self.centred else ""
        if self.kind == "lp":
            return f"{self.p:g}-norm ball{around}"
        told = {"trace": "spectraplex", "group": "ball of the sum of norms of groups"}
        return told.get(self.kind, f"Schatten {self.p:g}-norm ball") + around


@dataclass(frozen=True)
class Region:
    """What is known of the constraints without their numbers."""

    n: int
    lower: NDArray[np.int64]  # the coordinates with such a bound
    upper: NDArray[np.int64]
    equations: int
    rows: int
    parts: tuple[Part, ...]
    held: bool  # whether multipliers of rows are asked for
    direct: bool  # whether an ℓ1 norm may be a ball only where that is all there is

    @property
    def bounded(self) -> bool:
        return bool(len(self.lower) or len(self.upper))

    def bounds(self, at: Values) -> tuple[Tensor | None, Tensor | None]:
        """l and u, infinite where there are none."""
        found = []
        for name, places, none in (
            ("lower", self.lower, -math.inf),
            ("upper", self.upper, math.inf),
        ):
            value = None
            if len(places):
                value = at[name]
                if len(places) < self.n:
                    value = _spread(value, torch.from_numpy(places).to(value.device), self.n, none)
            found.append(value)
        return found[0], found[1]

    def polyhedron(self, at: Values) -> Polyhedron:
        """All rows and bounds."""
        return Polyhedron(at.get("G"), at.get("h"), at.get("A"), at.get("b"), *self.bounds(at))


@dataclass(frozen=True)
class Form:
    """A set for a region, and how it is made."""

    told: str
    region: Region
    made: Callable[[Values], Constraint]
    turned: Part | None = None  # an ellipsoid that becomes a ball in other coordinates

    def posed(self, objective: Objective, at: Values) -> Posed:
        """Objective and set, and how their solution becomes y."""
        if self.turned is None:
            return objective, self.made(at), lambda y: y
        return _turned(self.turned, objective, at)


def form_of(region: Region) -> Form | None:
    """The set that is best, None where the problem should be written in another way."""
    parts, free = region.parts, not region.equations and not region.rows
    if not parts:
        return _of_rows(region, free)
    lone = parts[0] if len(parts) == 1 else None
    if lone is not None and lone.places is None:
        alone = free and not region.bounded
        if alone and lone.p == 2 and lone.tall:
            return Form("2-norm ball, in coordinates W y", region, region.polyhedron, lone)
    if any(part.places is None for part in parts):
        return None
    if lone is not None and lone.kind == "lp" and lone.p == 1 and not lone.centred:
        found = _of_budget(region, lone)
        if found is not None:
            return found
    if free:
        return _of_blocks(region)
    return None if region.direct else _of_all(region)


def _of_rows(region: Region, free: bool) -> Form:
    if free and not region.held:
        told = "box" if region.bounded else "all points"
        return Form(told, region, lambda at: Box(*region.bounds(at)))
    if region.equations == 1 and not region.rows and region.bounded and not region.held:
        return Form(
            "box cut by a plane",
            region,
            lambda at: PlaneCut(Box(*region.bounds(at)), at["A"][..., 0, :], at["b"][..., 0]),
        )
    told = f"polyhedron ({region.equations} equations, {region.rows} inequalities"
    return Form(told + (", bounds)" if region.bounded else ")"), region, region.polyhedron)


def _of_budget(region: Region, part: Part) -> Form | None:
    """Σ w |y| ≤ t with bounds and at most one equation."""
    if region.rows or region.equations > 1 or not (region.bounded or region.equations):
        return None

    def made(at: Values) -> Constraint:
        ball = part.set(at, region.n)
        assert isinstance(ball, LpBall)
        base: Constraint = ball
        if region.bounded:
            base = L1Box(ball.radius, ball.weight, *region.bounds(at))
        if not region.equations:
            return base
        return PlaneCut(base, at["A"][..., 0, :], at["b"][..., 0])

    told = "1-norm ball" + (" in a box" if region.bounded else "")
    return Form(told + (" cut by a plane" if region.equations else ""), region, made)


def _of_blocks(region: Region) -> Form | None:
    """Each ball on coordinates of its own, which come first, and bounds on the others."""
    places = np.concatenate([part.places for part in region.parts if part.places is not None])
    bounds = np.union1d(region.lower, region.upper)
    if len(np.unique(places)) < len(places) or len(np.intersect1d(places, bounds)):
        return None if region.direct else _of_all(region)
    rest = region.n - len(places)
    if len(region.parts) == 1 and (not rest or (region.parts[0].kind == "lp" and not len(bounds))):
        part = region.parts[0]
        return Form(str(part), region, lambda at: part.set(at, region.n))

    def made(at: Values) -> Constraint:
        sets = [part.set(at, part.count) for part in region.parts]
        sizes: list[int | tuple[int, ...]] = [part.count for part in region.parts]
        if rest:
            lower, upper = (None if end is None else end[..., -rest:] for end in region.bounds(at))
            sets.append(Box(lower, upper))
            sizes.append(rest)
        return Product(sets, sizes)

    told = " × ".join([str(part) for part in region.parts] + (["box"] if rest else []))
    return Form(told, region, made)


def _of_all(region: Region) -> Form:
    """Rows and balls."""
    for part in region.parts:
        if part.kind != "lp" and part.count < region.n:
            raise NotRecognisedError(
                f"constraint with a {part}: expected it to be the only constraint of its variable, "
                "or the only variable of the problem"
            )
    linear = bool(region.equations or region.rows or region.bounded)

    def made(at: Values) -> Constraint:
        sets: list[Constraint] = [region.polyhedron(at)] if linear else []
        return Intersection(*sets, *(part.set(at, region.n) for part in region.parts))

    told = " ∩ ".join((["polyhedron"] if linear else []) + [str(part) for part in region.parts])
    return Form(told, region, made)


def _turned(part: Part, objective: Objective, at: Values) -> Posed:
    """‖W y + c‖ ≤ ρ as a ball ‖u‖ ≤ r with y = R⁻¹(u − Qᵀc).

    W = QR and r² = ρ² − ‖c − QQᵀc‖². If W is square, Q = I and R = W will do.
    """
    W, radius = at[f"{part.name}.W"], part.radius(at)
    n = W.shape[-1]
    square = W.shape[-2] == n
    if square:
        inverse = lu_inverse(W, sound=False)
    else:
        Q, R = torch.linalg.qr(W)
        eye = torch.eye(n, dtype=W.dtype, device=W.device)
        inverse = torch.linalg.solve_triangular(R, eye, upper=True)
    centre = None
    if part.centred:
        c = at[f"{part.name}.c"].unsqueeze(-1)
        inside = c if square else Q.mT @ c
        centre = -(inverse @ inside).squeeze(-1)
        if not square:
            radius = (radius.square() - (c - Q @ inside).squeeze(-1).square().sum(-1)).sqrt()
    assert isinstance(objective, Quadratic)
    P, q = objective.P, objective.q
    if centre is not None:
        q = q + (centre if P is None else (P @ centre.unsqueeze(-1)).squeeze(-1))
    curved = inverse.mT @ (inverse if P is None else P @ inverse)
    slope = (inverse.mT @ q.unsqueeze(-1)).squeeze(-1)

    def back(u: Tensor) -> Tensor:
        y: Tensor = (inverse @ u.unsqueeze(-1)).squeeze(-1)
        return y if centre is None else y + centre

    return Quadratic((curved + curved.mT) / 2, slope), LpBall(2, radius), back


def _spread(values: Tensor, places: Tensor, n: int, rest: float = 0.0) -> Tensor:
    """(..., k) at some of n places: (..., n)."""
    full = values.new_full((*values.shape[:-1], n), rest)
    return full.index_copy(-1, places, values)
