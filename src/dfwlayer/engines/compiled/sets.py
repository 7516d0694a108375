"""Sets in normal form as the arrays that compiled code reads, and the code for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.constraints.region import Block, Flat, Linear, Met, Oval, Round, Spent
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import Array, Batch, array_of, signs, stretched, summed
from dfwlayer.engines.compiled.budgets import budgets_of
from dfwlayer.engines.compiled.kernels import ball, nearest, place, power, search, table
from dfwlayer.engines.compiled.kernels.constants import FLATTEST, STEEPEST
from dfwlayer.engines.compiled.ovals import ovals_of
from dfwlayer.engines.compiled.polyhedra import polyhedra_of
from dfwlayer.engines.compiled.results import (
    NO_FACTORS,
    NO_ORDERS,
    Adjoint,
    Arrays,
    Limits,
    Renewal,
    Results,
    Sets,
)
from dfwlayer.engines.compiled.threads import spread
from dfwlayer.ops.values import Value

__all__ = ["KEPT", "Polytopes", "sets_of"]

KEPT = 4096  # coordinates up to which tables of numbers are kept from call to call
FEW = 100  # coordinates up to which a polyhedron of bounds and an equation is taken by its rows
KEPT_ONCE = 2**20  # coordinates up to which at least the table of the last call is kept


class Spot(NamedTuple):
    """Where a part of a normal form stands in the table of a set, see `kernels.table`."""

    line: int
    kind: float  # of the line, where that is a row
    first: int  # coordinate
    end: int
    total: bool = False  # it is what a row adds up to


class Plan(NamedTuple):
    """What normal forms have in common that differ in the values of their tensors only."""

    spots: tuple[Spot, ...]  # of each part
    table: Array  # (k, n + 2), with zeros where there are tensors
    blocks: Array  # (·, 4)
    budgets: bool  # there are some
    nearest: bool  # a projection onto the set takes one multiplier at most

    def filled(self, given: Sequence[tuple[int, Tensor]], count: int) -> Array:
        """Tables of so many problems, with tensors in these parts."""
        bodies = self.table[None]
        bodies = bodies.copy() if count == 1 else bodies.repeat(count, 0)
        for where, tensor in given:
            line, kind, first, end, total = self.spots[where]
            values = array_of(tensor, 1)
            if total:
                bodies[:, line, table.TOTAL] = values.reshape(-1)
            else:
                bodies[:, line, first:end] = np.abs(values) if kind == table.BUDGET else values
        return bodies


@dataclass(eq=False)  # what is frozen takes longer to make
class Polytopes:
    """Sets of bounds, budgets and equations, see `dfwlayer.engines.compiled.kernels.table`."""

    plan: Plan
    parts: tuple[Value, ...]
    bodies: Array  # (·, k, n + 2)
    moves: bool  # there are tensors among the parts

    @cached_property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple([part if isinstance(part, Tensor) else None for part in self.parts])

    def renewal(self) -> Renewal:
        where = [i for i, part in enumerate(self.parts) if isinstance(part, Tensor)]
        blank: list[Value] = [0.0 if isinstance(part, Tensor) else part for part in self.parts]
        plan, count = self.plan, len(self.bodies)

        def renewed(given: Sequence[Tensor]) -> Polytopes:
            pairs = list(zip(where, given, strict=True))
            parts = blank.copy()
            for i, tensor in pairs:
                parts[i] = tensor
            return Polytopes(plan, tuple(parts), plan.filled(pairs, count), True)

        return renewed

    def search(self, objective: Arrays, start: Array, limits: Limits, batch: int) -> Results:
        n, k = start.shape[1], self.bodies.shape[1]
        P, q, _, _ = objective
        projects = self.projects(P)
        signed = not projects or self.plan.budgets
        places = np.empty((batch, n), np.int8)
        sides = np.empty((batch, n if signed else 0))
        values, codes = np.zeros((2, batch)), np.zeros((2, batch), np.int64)
        x, forces = np.empty((batch, n)), np.zeros((batch, k))
        factors, orders = NO_FACTORS, NO_ORDERS
        if batch == 1 and P.size:
            factors, orders = np.empty(P.shape), np.empty((1, n + k), np.int64)
        found = Results(x, values, codes, forces, (places, sides), factors, orders)
        results = x, values, codes, places, sides, forces
        if projects:
            near = self.bodies, self.plan.blocks, *limits[:2]
            spread(nearest.search, batch, 40 * n, q, *near, *results)
            return found
        given = *objective, self.bodies, self.plan.blocks, start, *limits
        cost = 15 * n * n + n**3 // 3 + 1000 * n
        spread(search.search, batch, cost, *given, *results, factors, orders)
        return found

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        batch, n = v.shape
        projects = self.projects(P)
        rest = np.empty((batch if self.moves else 0, n))  # no number asks for it
        out = Adjoint(np.empty((batch, n)), np.empty(found.multipliers.shape), rest)
        face = found.codes, *found.face, found.multipliers
        if projects:
            spread(nearest.adjoint, batch, 10 * n, self.bodies, *face, v, *out)
            return out
        given = P, self.bodies, eps, *face, v, *out, found.factors, found.orders
        spread(search.adjoint, batch, n**3 // 6 + 100 * n, *given)
        return out

    def envelope(self, found: Results, g: Array) -> Adjoint:
        rest = g.copy()
        for line in range(table.ROWS, self.bodies.shape[1]):
            slope = self.bodies[:, line, : g.shape[1]]
            budget = self.bodies[0, line, table.KIND] == table.BUDGET
            rest += found.multipliers[:, line, None] * slope * (found.face[1] if budget else 1.0)
        return Adjoint(np.zeros_like(g), -found.multipliers, rest)

    def projects(self, P: Array) -> bool:
        """Whether the solution is a projection that takes one multiplier at most."""
        return self.plan.nearest and P.size == 0

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        u, nu, rest = adjoint
        assert rest is not None
        places, sides = found.face
        gradients: Gradients = []
        for part, spot, want in zip(self.parts, self.plan.spots, asked, strict=True):
            line, kind, first, end, total = spot
            at, own = slice(first, end), slice(line, line + 1)
            pull: Array | None = None
            if not want:
                pass
            elif line < table.ROWS:
                held = places[:, at] == (place.LOW if line == table.LOWER else place.HIGH)
                pull = np.where(held, rest[:, at], 0.0)
            elif total:
                pull = nu[:, own]
            else:
                pull = -(found.multipliers[:, own] * u[:, at] + nu[:, own] * found.x[:, at])
                if kind == table.BUDGET:
                    pull = pull * sides[:, at] * signs(part)
            gradients.append(None if pull is None else summed(part, pull))
        return gradients


@dataclass(eq=False)
class Balls:
    """Weighted ℓ2 balls, see `dfwlayer.engines.compiled.kernels.ball`."""

    weight: Value
    radius: Value
    weights: Array  # |w|, (·, n)
    radii: Array  # (·, 1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        parts = self.weight, self.radius
        return tuple([part if isinstance(part, Tensor) else None for part in parts])

    def renewal(self) -> Renewal:
        n, make = self.weights.shape[1], self._kind()
        kept = [None if isinstance(part, Tensor) else part for part in (self.weight, self.radius)]

        def renewed(given: Sequence[Tensor]) -> Balls:
            left = iter(given)
            weight, radius = (next(left) if part is None else part for part in kept)
            return make(weight, radius, _sizes(weight, n), array_of(radius, 1).reshape(-1, 1))

        return renewed

    def _kind(self) -> Callable[[Value, Value, Array, Array], Balls]:
        return Balls

    def search(self, objective: Arrays, start: Array, limits: Limits, batch: int) -> Results:
        n = start.shape[1]
        found = Results.blank(batch, n, 1)
        given = *objective, self.weights, self.radii, start, *limits, *found[:4]
        cost = 2 * n**3 + 500 * n if objective[0].size else 12 * n
        spread(ball.search, batch, cost, *given)
        return found

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        u, nu = np.empty(v.shape), np.empty(found.multipliers.shape)
        given = P, self.weights, self.radii, eps, found.x, found.codes, found.multipliers, v, u, nu
        batch, n = v.shape
        spread(ball.adjoint, batch, n**3 // 3 + 100 * n if P.size else 5 * n, *given)
        return Adjoint(u, nu, None)

    def envelope(self, found: Results, g: Array) -> Adjoint:
        """With λ = −⟨g, x⟩/t, as ⟨∇h, x⟩ = h = t for a norm."""
        along = (g * found.x).sum(-1, keepdims=True) / self._lengths
        return Adjoint(np.zeros_like(g), np.where(found.multipliers > 0, along, 0.0), None)

    @property
    def _lengths(self) -> Array:
        """The radii, 1 where a ball is a point, whose x = 0 has no derivative but in its centre."""
        return np.where(self.radii > 0, self.radii, 1.0)

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Of λW²x, which has no other part along u, and of ‖Wx‖ − t."""
        of_weight: Tensor | None = None
        if asked[0]:
            pull = 2 * found.multipliers * adjoint.u + adjoint.nu * found.x / self._lengths
            of_weight = summed(self.weight, -self.weights * found.x * pull * signs(self.weight))
        return [of_weight, summed(self.radius, adjoint.nu) if asked[1] else None]


@dataclass(eq=False)
class Powers(Balls):
    """Weighted ℓp balls, see `dfwlayer.engines.compiled.kernels.power`."""

    p: float

    def _kind(self) -> Callable[[Value, Value, Array, Array], Balls]:
        p = self.p
        return lambda weight, radius, weights, radii: Powers(weight, radius, weights, radii, p)

    def search(self, objective: Arrays, start: Array, limits: Limits, batch: int) -> Results:
        n = start.shape[1]
        found = Results.blank(batch, n, 1, np.float64)
        given = self.p, *objective, self.weights, self.radii, start, *limits, *found[:4]
        spread(power.search, batch, 8 * n**3 + 20_000 * n, *given, found.face[0])
        return found

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        u, nu = np.empty(v.shape), np.empty(found.multipliers.shape)
        at = found.codes, found.multipliers, *found.face
        given = self.p, P, self.weights, self.radii, eps, *at, v, u, nu
        batch, n = v.shape
        spread(power.adjoint, batch, n**3 // 2 + 200 * n, *given)
        return Adjoint(u, nu, None)

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Of λ∇h, whose norm has no part along u, and of h = ‖Wx‖_p; λ is μ/t."""
        of_weight: Tensor | None = None
        if asked[0]:
            size = np.abs(found.x)
            force = (self.weights * size / self._lengths) ** (self.p - 1)
            pull = found.multipliers / self._lengths * self.p * np.sign(found.x) * adjoint.u
            each = -force * (pull + adjoint.nu * size) * signs(self.weight)
            of_weight = summed(self.weight, each)
        return [of_weight, summed(self.radius, adjoint.nu) if asked[1] else None]


def sets_of(form: Sequence[Block], n: int, batch: Batch) -> Sets | None:
    """Blocks in normal form as arrays, None where they are not for compiled code."""
    if isinstance(form[0], Linear):
        if len(form) > 1:
            return None
        flat = _as_flat(form[0]) if n > FEW else None
        return polyhedra_of(form[0], n, batch) if flat is None else _polytopes([flat], n, batch)
    if isinstance(form[0], Met):
        return ovals_of(form[0], n, batch) if len(form) == 1 else None
    if isinstance(form[0], Spent):
        return budgets_of(form[0], n, batch) if len(form) == 1 else None
    if isinstance(form[0], Oval):
        return None
    if not isinstance(form[0], Flat):
        weight, radius = form[0].weight, form[0].radius
        if len(form) > 1 or not batch.fits(weight, 1) or not batch.fits(radius, 1):
            return None
        parts = weight, radius, _sizes(weight, n), array_of(radius, 1)
        if isinstance(form[0], Round):
            return Balls(*parts)
        p = form[0].p
        return Powers(*parts, p) if FLATTEST <= p <= STEEPEST else None
    return _polytopes(form, n, batch)


def _as_flat(form: Linear) -> Flat | None:
    """Bounds and one equation at most, which a method for faces knows better than one for rows.

    That one goes from row to row, and the bounds that hold a solution may be hundreds.
    """
    if form.G is not None:
        return None
    if form.A is None:
        return Flat(form.n, form.lower, form.upper)
    if form.A.layout != torch.strided or form.A.shape[-2] != 1:
        return None
    return Flat(form.n, form.lower, form.upper, equations=((form.A.squeeze(-2), form.b),))


def _sizes(weight: Value, n: int) -> Array:  # (·, n)
    """|w|; of numbers kept from call to call."""
    if not isinstance(weight, Tensor):
        return (_same if n <= KEPT else _same.__wrapped__)(abs(weight), n)
    size = np.abs(array_of(weight, 1))
    return stretched(size, len(size), n)


@lru_cache(maxsize=64)
def _same(value: float, n: int) -> Array:
    return np.full((1, n), float(value))


def _polytopes(form: Sequence[Block], n: int, batch: Batch) -> Polytopes | None:
    """Bounds, budgets and equations as arrays."""
    parts: list[Value] = []
    structure: list[Any] = []
    tensors: list[tuple[int, Tensor]] = []
    for block in form:
        if not isinstance(block, Flat):
            return None
        values: list[Value] = [block.lower, block.upper]
        if block.weight is not None:
            values += (block.weight, block.radius)
        for equation in block.equations:
            values += equation
        numbers: list[Any] = [block.n, block.weight is not None]
        for part in values:
            if isinstance(part, Tensor):
                if not batch.fits(part, 1):
                    return None
                tensors.append((len(parts), part))
                numbers.append(None)
            else:
                numbers.append(part)
            parts.append(part)
        structure.append(tuple(numbers))
    plan_of = _plan if n <= KEPT else (_last_plan if n <= KEPT_ONCE else _plan.__wrapped__)
    plan = plan_of(n, *structure)
    if plan is None:
        return None
    count = max([tensor.shape[0] for _, tensor in tensors if tensor.dim() > 1], default=1)
    bodies = plan.filled(tensors, count) if tensors else plan.table[None]
    return Polytopes(plan, tuple(parts), bodies, bool(tensors))


@lru_cache(maxsize=64)
def _plan(n: int, *blocks: tuple[Any, ...]) -> Plan | None:
    """For blocks of so many coordinates, with a budget or not, and their values, if numbers."""
    spots: list[Spot] = []
    numbers: list[float | None] = []
    bounds: list[tuple[int, int, int, int]] = []
    first, line = 0, table.ROWS
    for count, budget, *values in blocks:
        end, row = first + count, line
        spots += [Spot(table.LOWER, -1.0, first, end), Spot(table.UPPER, -1.0, first, end)]
        for part in range(2, len(values), 2):
            kind = table.BUDGET if budget and part == 2 else table.EQUATION
            spots += [Spot(line, kind, first, end), Spot(line, kind, first, end, True)]
            line += 1
        if line - row > 2:
            return None
        numbers += values
        bounds.append((first, end, row, line))
        first = end
    if first != n:
        return None
    lines = np.zeros((line, n + 2))
    for value, (row, kind, start, end, total) in zip(numbers, spots, strict=True):
        if row >= table.ROWS:
            lines[row, table.KIND] = kind
        if value is None:
            continue
        if total:
            lines[row, table.TOTAL] = value
        else:
            lines[row, start:end] = abs(value) if kind == table.BUDGET else value
    budgets = any(spot.kind == table.BUDGET for spot in spots)
    nearest_one = len(bounds) == 1 and line <= table.ROWS + 1
    return Plan(tuple(spots), lines, np.array(bounds, np.int64), budgets, nearest_one)


_last_plan = lru_cache(maxsize=1)(_plan.__wrapped__)
