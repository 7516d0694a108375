"""Frank-Wolfe with hard vertices; pairwise steps where the set has few of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dfwlayer.arguments import as_flag
from dfwlayer.constraints.base import Atoms
from dfwlayer.methods.base import (
    Ability,
    Outcome,
    Problem,
    Settings,
    State,
    iterate,
    move,
    start_rule,
)
from dfwlayer.ops.rows import dot, norm, or_one
from dfwlayer.solution import Status
from dfwlayer.step_size import Query, Rule

__all__ = ["FrankWolfe"]


@dataclass(frozen=True)
class FrankWolfe:
    """Frank-Wolfe with the hard vertex, stopped by the gap ≤ tol · |f(x)|.

    Args:
        pairwise: Where the set is a polytope with few vertices (p = 1), keep x as a convex
            combination of them and, whenever it promises the larger decrease, move weight from
            the worst vertex in use to the best one. That converges linearly, and because a step
            never promises less than the plain one, f(x_k) − f* ≤ 2LM²/(k + 3) holds too.

    """

    pairwise: bool = True

    abilities: ClassVar[Ability] = Ability.ANY_UNITS

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairwise", as_flag("pairwise", self.pairwise))

    @property
    def modes(self) -> tuple[str, ...]:
        return ("implicit", "unroll")

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """See the class."""
        rule = start_rule(problem, x, settings)
        atoms = problem.constraint.atoms() if self.pairwise else None
        combination = None if atoms is None else _Combination(atoms, problem, x)

        before: Tensor | None = None  # f of the last step

        def step(k: int, state: State) -> State:
            nonlocal before
            vertex = problem.constraint.vertex(state.gradient)
            endless = problem.open_ended(state.gradient.detach())
            direction = _bounded(endless, vertex - state.x)
            with torch.no_grad():
                converged, floored = _ended(problem, rule, state, direction, endless, settings.tol)
                # noise may be far above what it is in truth: while f falls, there is more to gain
                floored = floored & _level(before, state.value)
                if bool(floored.any()):
                    floored = floored & _blurred(problem, state, direction)
                before = state.value.detach()
                # the certificate of the final point tells convergence from rounding
                ended = state.active & (converged | floored)
            status = torch.where(ended, int(Status.ROUNDING_FLOOR), state.status)
            state = state._replace(status=status, active=state.active & ~ended)
            query = Query(k, state.x, state.value, state.gradient, direction, 1.0, endless)
            if combination is not None:
                x = combination.step(rule, query, state)
            else:
                gamma = rule(query).unsqueeze(-1)
                x = (1 - gamma) * state.x + gamma * vertex
            return move(problem, rule, state, query, x, settings.resolution)

        return iterate(problem, rule, x, settings, step)


class _Combination:
    """x as convex weights over the vertices of a polytope."""

    def __init__(self, atoms: Atoms, problem: Problem, x: Tensor) -> None:
        self.atoms = atoms
        with torch.no_grad():
            gradient = problem.objective.gradient(x)
        self.weights = atoms.weights(x, gradient)

    def step(self, rule: Rule, query: Query, state: State) -> Tensor:
        """The better of the plain and the pairwise step, and x after it."""
        scores = self.atoms.scores(state.gradient.detach())
        best = scores.argmin(-1, keepdim=True)
        used = torch.where(self.weights > 0, scores, -torch.inf)
        worst = used.argmax(-1, keepdim=True)
        toward = torch.zeros_like(self.weights).scatter(-1, best, 1.0)
        shift = toward.scatter_add(-1, worst, torch.full_like(best, -1, dtype=toward.dtype))
        limit = self.weights.gather(-1, worst).squeeze(-1)
        pair = query._replace(
            direction=_bounded(query.open_ended, self.atoms.combine(shift)), limit=limit
        )
        plain_gamma, pair_gamma = rule(query), rule(pair)
        with torch.no_grad():
            better = _promise(rule, pair, pair_gamma) > _promise(rule, query, plain_gamma)
        gamma = torch.where(better, pair_gamma, plain_gamma).unsqueeze(-1)
        direction = torch.where(better.unsqueeze(-1), shift, toward - self.weights)
        weights = (self.weights + gamma * direction).clamp_min(0)
        weights = weights / weights.sum(-1, keepdim=True)
        self.weights = torch.where(state.active.unsqueeze(-1), weights, self.weights)
        return self.atoms.combine(self.weights)


def _promise(rule: Rule, query: Query, gamma: Tensor) -> Tensor:
    """Decrease of the L-smooth upper bound, γ⟨g, −d⟩ − ½Lγ²‖d‖²."""
    d = query.direction
    return gamma * (-dot(query.gradient, d) - 0.5 * rule.lipschitz * gamma * dot(d, d))


def _level(before: Tensor | None, value: Tensor) -> Tensor:
    """Whether f fell by no more than its rounding in the last step."""
    if before is None:
        return torch.zeros_like(value, dtype=torch.bool)
    return before - value <= 4 * torch.finfo(value.dtype).eps * value.abs()


def _blurred(problem: Problem, state: State, direction: Tensor) -> Tensor:
    """Whether the gap is lost in the rounding of ∇f, measured by the curvature of f.

    A search for L that f's own rounding misleads ends with one that is far too large.
    """
    blur = problem.objective.scale(state.x, state.gradient).blur(direction).squeeze(-1)
    return -dot(state.gradient, direction) <= blur


def _bounded(endless: Tensor | None, direction: Tensor) -> Tensor:
    return direction if endless is None else torch.where(endless, 0, direction)


def _ended(
    problem: Problem,
    rule: Rule,
    state: State,
    direction: Tensor,
    endless: Tensor | None,
    tol: float,
) -> tuple[Tensor, Tensor]:
    """Whether the gap is below tol · |f|, and whether it is lost in rounding.

    Along open-ended coordinates, where the gap has no meaning, ⟨|g|, |x|⟩ + ‖g‖²/c stands in for
    it, with c the curvature of f along g.
    """
    finfo = torch.finfo(direction.dtype)
    gap = -dot(state.gradient, direction)
    if endless is not None:
        g = torch.where(endless, state.gradient, 0)
        size = or_one(g.abs().amax(-1, keepdim=True))
        unit = g / size
        bend = dot(unit, problem.objective.hvp(state.x, unit)).clamp_min(finfo.tiny)
        square = (dot(unit, unit) * size.squeeze(-1)) ** 2 / bend
        gap = gap + dot(g.abs(), state.x.abs()) + square
    # with a margin for the rounding of the final certificate
    converged = gap <= 0.9 * tol * state.value.abs().clamp_min(finfo.tiny)
    # ∇f(x) is off by about eps · (L‖x‖ + ‖g‖), and the gap by that times the way to the vertex
    noise = finfo.eps * (rule.lipschitz * norm(state.x) + norm(state.gradient)) * norm(direction)
    return converged, (gap <= noise) & ~converged
