"""A primal-dual interior point method for sets with bounds, budgets and equations.

It does not need many steps on problems that are badly conditioned or degenerate: some twenty
factorisations find the face of the solution. A few solves on that face make it exact, see
`dfwlayer.methods.region_face`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.region import Region
from dfwlayer.linalg.bordered import bordered, combined, dots
from dfwlayer.objectives.model import Model
from dfwlayer.ops.scale import TINY

__all__ = ["ITERATIONS", "Pair", "Shape", "interior_point"]

ITERATIONS = 80  # most of them
PATIENCE = 15  # iterations without progress
ENOUGH = 1e-13  # Σ slack · multiplier relative to the terms of f
PINNED = 1e20  # on the diagonal of H, times its largest entry, for what must not move
CHUNK = 2**24  # entries of the matrices of all problems that are treated at once

# The constraints on a coordinate are x − l ≥ 0, u − x ≥ 0, s − x ≥ 0 and s + x ≥ 0, where s ≥ |x|
# stands for |x| in a budget Σ w s ≤ t; these are the factors of x and of s.
OF_X = (1.0, -1.0, -1.0, 1.0)
OF_S = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Pair:
    """Where the method is: x, what is left of every constraint, and its multiplier."""

    x: Tensor  # (B, n)
    size: Tensor  # s (B, n), zero where there is no budget
    slack: Tensor  # (B, 4, n), 1 where there is no such constraint
    force: Tensor  # (B, 4, n), multipliers of those, 0 where there is none
    room: Tensor  # t − Σ w s (B, k), 1 where that is no constraint
    price: Tensor  # (B, k), multipliers of the budgets
    tension: Tensor  # (B, m), multipliers of the equations

    def moved(self, step: Pair, length: Tensor) -> Pair:  # (B,)
        """So far along a step."""
        parts = {}
        for field in fields(self):
            at, change = getattr(self, field.name), getattr(step, field.name)
            parts[field.name] = at + length.reshape(-1, *[1] * (at.dim() - 1)) * change
        return Pair(**parts)

    def where(self, rows: Tensor, other: Pair) -> Pair:
        """Its own values in these rows (B,), another's elsewhere."""
        parts = {}
        for field in fields(self):
            own, others = getattr(self, field.name), getattr(other, field.name)
            parts[field.name] = torch.where(rows.reshape(-1, *[1] * (own.dim() - 1)), own, others)
        return Pair(**parts)

    def complementarity(self) -> Tensor:  # (B,)
        """Σ slack · multiplier."""
        return (self.slack * self.force).sum((-2, -1)) + (self.room * self.price).sum(-1)

    def rows(self, index: Tensor) -> Pair:
        """The problems at these positions."""
        return Pair(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def put(self, index: Tensor, part: Pair) -> Pair:
        """With these problems replaced."""
        return Pair(
            **{
                f.name: getattr(self, f.name).index_copy(0, index, getattr(part, f.name))
                for f in fields(self)
            }
        )


class Shape(NamedTuple):
    """Which constraints a region has."""

    region: Region
    held: Tensor  # (B, 4, n), those on coordinates
    spent: Tensor  # (B, k), budgets
    still: Tensor  # (B, n), coordinates with a single possible value
    of_x: Tensor  # (4, 1)
    of_s: Tensor  # (4, 1)
    constant: Tensor  # (B, 4, n)
    weights: Tensor  # (B, k, n), W where a budget counts, else 0

    @classmethod
    def of(cls, region: Region) -> Shape:
        """Those of a region."""
        lower, upper = region.lower, region.upper
        spent = region.radii > 0
        charged = (region.weights > 0) & spent.unsqueeze(-1)
        empty = ((region.weights > 0) & ~spent.unsqueeze(-1)).any(-2)
        still = (upper - lower <= 0) | empty
        loose = ~still
        budget = charged.any(-2) & loose
        held = torch.stack(
            (torch.isfinite(lower) & loose, torch.isfinite(upper) & loose, budget, budget), -2
        )
        zero = torch.zeros_like(lower)
        constant = torch.stack(
            (torch.where(held[:, 0], -lower, 0), torch.where(held[:, 1], upper, 0), zero, zero), -2
        )
        of_x, of_s = (lower.new_tensor(v).unsqueeze(-1) for v in (OF_X, OF_S))
        # what cannot move would take its share of the budget; in the sets there are it is zero
        weights = region.weights * (spent.unsqueeze(-1) & budget.unsqueeze(-2))
        return cls(region, held, spent, still, of_x, of_s, constant, weights)

    def slack(self, x: Tensor, size: Tensor) -> Tensor:
        """What x and s leave of the constraints on coordinates (B, 4, n)."""
        slack = self.of_x * x.unsqueeze(-2) + self.of_s * size.unsqueeze(-2) + self.constant
        return torch.where(self.held, slack, 1)

    def room(self, size: Tensor) -> Tensor:
        """What s leaves of the budgets (B, k)."""
        used = dots(self.weights, size)
        return torch.where(self.spent, self.region.radii - used, 1)

    @property
    def single(self) -> Tensor:
        """The value of coordinates that have one only: their bound, or 0 without a budget."""
        region = self.region
        return torch.where(region.upper - region.lower <= 0, region.lower, 0)

    def rows(self, index: Tensor) -> Shape:
        """The problems at these positions."""
        return Shape.of(self.region.rows(index))


def interior_point(
    model: Model, region: Region, near: Tensor, limit: Tensor
) -> tuple[Pair, Tensor]:
    """Minimise the model over the region, in at most ``limit`` (B,) iterations.

    ``near`` (B, n) tells sizes where nothing else does.

    The predictor-corrector method of Mehrotra with equal steps for primal and dual variables.
    Problems are independent of each other.

    Returns:
        Where it ended, and the iterations each problem took (B,).

    """
    count = len(near)
    each = max(1, CHUNK // max(1, model.matrix.shape[-2] * model.matrix.shape[-1]))
    if count > each:
        parts = [
            interior_point(model.rows(i), region.rows(i), near[i], limit[i])
            for i in torch.split(torch.arange(count, device=near.device), each)
        ]
        pairs = [pair for pair, _ in parts]
        joined = {f.name: torch.cat([getattr(p, f.name) for p in pairs]) for f in fields(Pair)}
        return Pair(**joined), torch.cat([steps for _, steps in parts])
    shape = Shape.of(region)
    at = best = _start(model, shape, near)
    steps = torch.zeros(count, dtype=torch.long, device=near.device)
    where = torch.arange(count, device=near.device)
    merit = torch.full_like(near[:, 0], torch.inf)
    stuck = torch.zeros_like(steps)
    for _ in range(ITERATIONS):
        residuals = _Residuals.of(model, shape, at)
        now = residuals.merit
        lower = now < merit
        stuck = torch.where(now < 0.9 * merit, 0, stuck + 1)
        merit = torch.minimum(now, merit)
        going = (now > 1) & (stuck < PATIENCE) & torch.isfinite(now)
        going = going & (steps[where] < limit[where])
        best = best.put(where[lower], at.rows(lower.nonzero().squeeze(-1)))
        if not bool(going.any()):
            break
        if int(going.sum()) <= len(going) // 2:
            index = going.nonzero().squeeze(-1)
            model, shape, at = model.rows(index), shape.rows(index), at.rows(index)
            where, merit, stuck = where[index], merit[index], stuck[index]
            residuals = _Residuals.of(model, shape, at)
            going = going[index]
        steps[where] += going
        at = _step(model, shape, at, residuals).where(going, at)
    return best, steps


def _start(model: Model, shape: Shape, near: Tensor) -> Pair:
    """A point in the middle of the constraints, with products slack · multiplier of f's size."""
    region, held = shape.region, shape.held
    near = near.double()
    extent = 0.5 * (region.upper - region.lower)
    weights = shape.weights
    taking = (weights > 0).sum(-1, keepdim=True).clamp_min(1)
    share = torch.where(
        weights > 0, region.radii.unsqueeze(-1) / (2 * taking * weights.clamp_min(TINY)), torch.inf
    )
    if share.shape[-2]:
        extent = torch.minimum(extent, share.amin(-2))
    # where only equations bound a coordinate, they and the iterate tell the size
    typical = near.abs().amax(-1, keepdim=True)
    if region.totals.shape[-1]:
        even = region.totals.abs() / region.slopes.abs().sum(-1).clamp_min(TINY)
        typical = torch.maximum(typical, even.amax(-1, keepdim=True))
    typical = torch.where(typical > 0, typical, 1)
    extent = torch.where(torch.isfinite(extent), extent, typical)
    middle = torch.where(held[:, 0] & held[:, 1], 0.5 * (region.lower + region.upper), 0)
    middle = torch.where(held[:, 0] & ~held[:, 1], region.lower + extent, middle)
    middle = torch.where(held[:, 1] & ~held[:, 0], region.upper - extent, middle)
    middle = torch.where(held[:, 2], middle.clamp(-extent, extent) / 2, middle)
    x = torch.where(shape.still, shape.single, middle)
    size = torch.where(held[:, 2], extent, 0)
    slack = shape.slack(x, size)
    slack = torch.where(held, torch.maximum(slack, 0.25 * extent.unsqueeze(-2)), 1)
    room = shape.room(size)
    room = torch.where(shape.spent, torch.maximum(room, 0.25 * region.radii), 1)
    gradient = torch.where(shape.still, 0, model.gradient(x))
    # the way to where the equations hold may be all that tells the size of ∇f at the solution
    missed = region.totals - dots(region.slopes, x)
    square = region.slopes.square().sum(-1).clamp_min(TINY)
    way = torch.where(shape.still, 0, combined(missed / square, region.slopes))
    change = torch.where(shape.still, 0, model.product(way.unsqueeze(-1)).squeeze(-1))
    mean = ((gradient.abs() + change.abs()) * extent).mean(-1).clamp_min(TINY)
    price = torch.where(shape.spent, mean[:, None] / room, 0)
    if shape.spent.shape[-1]:
        # at this price the budget could carry the whole gradient
        charged = weights > 0
        steepest = (gradient.abs().unsqueeze(-2) / torch.where(charged, weights, 1)) * charged
        price = torch.where(shape.spent, 1.5 * steepest.amax(-1) + price, 0)
    charge = combined(price, weights)
    alone = torch.where(held[:, 2], 0, gradient)
    carried = torch.where(held[:, 2], gradient, 0) / 2
    force = torch.stack(
        (
            alone.clamp_min(0) + mean[:, None] / slack[:, 0],
            (-alone).clamp_min(0) + mean[:, None] / slack[:, 1],
            charge / 2 - carried,
            charge / 2 + carried,
        ),
        -2,
    )
    force = torch.where(held, torch.maximum(force, 1e-3 * mean[:, None, None] / slack), 0)
    return Pair(x, size, slack, force, room, price, torch.zeros_like(region.totals))


class _Residuals(NamedTuple):
    """By how much the conditions of optimality are missed."""

    along_x: Tensor  # (B, n)
    along_s: Tensor  # (B, n)
    slack: Tensor  # (B, 4, n)
    room: Tensor  # (B, k)
    equations: Tensor  # (B, m)
    merit: Tensor  # (B,), largest of them in units of what is enough

    @classmethod
    def of(cls, model: Model, shape: Shape, at: Pair) -> _Residuals:
        region = shape.region
        gradient = model.gradient(at.x)
        held = (shape.of_x * at.force).sum(-2)
        tied = combined(at.tension, region.slopes)
        weights = shape.weights
        along_x = torch.where(shape.still, 0, gradient - held + tied)
        charge = combined(at.price, weights)
        along_s = torch.where(shape.held[:, 2], charge - (shape.of_s * at.force).sum(-2), 0)
        slack = torch.where(shape.held, shape.slack(at.x, at.size) - at.slack, 0)
        room = torch.where(shape.spent, shape.room(at.size) - at.room, 0)
        equations = dots(region.slopes, at.x) - region.totals
        # in units of f: what a residual could change it by
        nearest = torch.where(shape.held, at.slack, torch.inf).amin(-2)
        reach = at.x.abs() + at.size + torch.where(torch.isfinite(nearest), nearest, 0)
        pull = gradient.abs() + at.force.sum(-2) + tied.abs()
        terms = (reach * pull).sum(-1) + (reach * model.slope.abs()).sum(-1)
        terms = terms.clamp_min(TINY)
        missed = (along_x.abs() * reach).sum(-1) + (along_s.abs() * reach).sum(-1)
        missed = missed + (slack.abs() * at.force).sum((-2, -1)) + (room.abs() * at.price).sum(-1)
        missed = missed + (equations.abs() * at.tension.abs()).sum(-1)
        merit = torch.maximum(at.complementarity(), 1e-2 * missed) / (ENOUGH * terms)
        if region.totals.shape[-1]:
            # at first their multipliers do not tell what missing them could change
            furthest = torch.where(shape.held, at.slack, 0).amax(-2)
            size = dots(region.slopes.abs(), at.x.abs() + furthest) + region.totals.abs()
            away = (equations.abs() / size.clamp_min(TINY)).amax(-1)
            merit = torch.maximum(merit, 1e-2 / ENOUGH * away)
        return cls(along_x, along_s, slack, room, equations, merit)


def _step(model: Model, shape: Shape, at: Pair, residuals: _Residuals) -> Pair:
    """One step: a predictor towards no complementarity, then one that aims for the centre."""
    newton = _Newton.of(model, shape, at, residuals)
    count = (shape.held.sum((-2, -1)) + shape.spent.sum(-1)).clamp_min(1)
    total = at.complementarity()
    product, spare = -at.slack * at.force, -at.room * at.price
    ahead = newton.solve(product, spare)
    affine = at.moved(ahead, _longest(at, ahead, 1.0)).complementarity()
    centring = (affine / total.clamp_min(TINY)).clamp(0, 1) ** 3
    aim = centring * total / count
    product = product + torch.where(shape.held, aim[:, None, None] - ahead.slack * ahead.force, 0)
    spare = spare + torch.where(shape.spent, aim[:, None] - ahead.room * ahead.price, 0)
    step = newton.solve(product, spare)
    return at.moved(step, _longest(at, step, 0.995))


def _longest(at: Pair, step: Pair, share: float) -> Tensor:  # (B,)
    """The longest step that keeps slacks and multipliers positive, times a share of it."""

    def shrink(value: Tensor, change: Tensor) -> Tensor:
        return (-change / value.clamp_min(TINY)).flatten(1)

    rates = [shrink(at.slack, step.slack), shrink(at.room, step.room)]
    rates += [
        torch.where(v.flatten(1) > 0, shrink(v, c), 0)
        for v, c in ((at.force, step.force), (at.price, step.price))
    ]
    steepest = torch.cat(rates, -1).amax(-1)
    return (share / steepest.clamp_min(share)).nan_to_num(0.0)


class _Newton(NamedTuple):
    """The linear system of one iteration, reduced to x and the budgets and equations."""

    shape: Shape
    at: Pair
    residuals: _Residuals
    stiff: Tensor  # (B, 4, n), multiplier / slack
    of_size: Tensor  # (B, n), what s feels of itself
    mixed: Tensor  # (B, n), and of x
    weights: Tensor  # (B, k, n)
    solve_bordered: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, model: Model, shape: Shape, at: Pair, residuals: _Residuals) -> _Newton:
        stiff = at.force / at.slack.clamp_min(TINY)
        below, above, plus, minus = stiff.unbind(-2)
        charged = shape.held[:, 2]
        of_size = torch.where(charged, plus + minus, 1).clamp_min(TINY)
        mixed = torch.where(charged, minus - plus, 0)
        diagonal = below + above + torch.where(charged, 4 * plus * (minus / of_size), 0)
        weights = shape.weights
        border = torch.cat((-weights * (mixed / of_size).unsqueeze(-2), shape.region.slopes), -2)
        k, m = weights.shape[-2], shape.region.slopes.shape[-2]
        corner = border.new_zeros(len(border), k + m, k + m)
        if k:
            spread = (weights / of_size.unsqueeze(-2)) @ weights.mT
            loose = torch.where(shape.spent, at.room / at.price.clamp_min(TINY), 1)
            corner[:, :k, :k] = spread + torch.diag_embed(loose)
        own = model.diagonal().amax(-1, keepdim=True)
        largest = torch.maximum(own, diagonal.amax(-1, keepdim=True)).clamp_min(TINY)
        stiffness = torch.where(shape.still, PINNED * largest, diagonal)

        def apply(u: Tensor) -> Tensor:
            return model.product(u.unsqueeze(-1)).squeeze(-1) + stiffness * u

        border = torch.where(shape.still.unsqueeze(-2), 0, border)
        solve = bordered(apply, model.inverse(stiffness), border, corner)
        return cls(shape, at, residuals, stiff, of_size, mixed, weights, solve)

    def solve(self, product: Tensor, spare: Tensor) -> Pair:
        """The step after which slack · multiplier changes by ``product``, and room · price too."""
        shape, at, off = self.shape, self.at, self.residuals
        k = self.weights.shape[-2]
        held = torch.where(shape.held, (product - at.force * off.slack) / at.slack, 0)
        along_x = -off.along_x + (shape.of_x * held).sum(-2)
        along_s = torch.where(shape.held[:, 2], -off.along_s + (shape.of_s * held).sum(-2), 0)
        price = at.price.clamp_min(TINY)
        budget = torch.where(shape.spent, -(spare - at.price * off.room) / price, 0)
        carried = along_s / self.of_size
        budget = budget - dots(self.weights, carried)
        below = torch.cat((budget, -off.equations), -1)
        right = torch.where(shape.still, 0, along_x - self.mixed * carried)
        dx, y = self.solve_bordered(right, below)
        dx = torch.where(shape.still, 0, dx)
        dprice, dtension = y[:, :k], y[:, k:]
        charge = combined(dprice, self.weights)
        ds = torch.where(shape.held[:, 2], (along_s - self.mixed * dx - charge) / self.of_size, 0)
        dslack = off.slack + shape.of_x * dx.unsqueeze(-2) + shape.of_s * ds.unsqueeze(-2)
        dslack = torch.where(shape.held, dslack, 0)
        dforce = torch.where(shape.held, (product - at.force * dslack) / at.slack, 0)
        droom = off.room - dots(self.weights, ds)
        droom = torch.where(shape.spent, droom, 0)
        dprice = torch.where(shape.spent, dprice, 0)
        return Pair(dx, ds, dslack, dforce, droom, dprice, dtension)
