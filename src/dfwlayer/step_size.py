"""Step sizes: how far to go along x + γ(s − x).

A rule is a frozen object with one method, ``start``, that returns a fresh `Rule` for one
solve; what must be remembered between steps lives in that. Adding a rule is one class here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dfwlayer.arguments import as_integer, as_lipschitz, as_number
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.rows import all_seen, dot, in_units, or_one

__all__ = ["Backtracking", "ExactStep", "OpenLoop", "Query", "Rule", "ShortStep", "StepSize"]


class Query(NamedTuple):
    """All a rule may look at: the point, its gradient, and the direction asked about."""

    step: int
    x: Tensor  # (B, n)
    value: Tensor  # (B,), f(x)
    gradient: Tensor  # (B, n), ∇f(x)
    direction: Tensor  # (B, n), d; zero along open-ended coordinates
    limit: Tensor | float  # (B,), the largest γ that stays in the set
    open_ended: Tensor | None  # mask of the coordinates that move by −∇f/L instead


class Rule(Protocol):
    """One solve's step size."""

    @property
    def lipschitz(self) -> Tensor:
        """The L that bounds, or is thought to bound, the curvature: () or (B,)."""

    @property
    def bent_down(self) -> Tensor | None:
        """Mask () or (B,) of objectives that finding L showed not to be convex, if it was found."""

    def __call__(self, query: Query) -> Tensor:
        """γ (B,) in [0, limit]."""


class StepSize(Protocol):
    """A step-size rule."""

    def start(self, objective: Objective, x: Tensor) -> Rule:
        """Make ready for one solve that starts at x (B, n)."""


@dataclass(frozen=True)
class ShortStep:
    """γ = clip(⟨g, x − s⟩ / (L ‖x − s‖²), 0, limit), the minimiser of the L-smooth upper bound.

    Args:
        lipschitz: L, a number or (B,); None takes the objective's own bound.

    """

    lipschitz: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.lipschitz is not None:
            object.__setattr__(self, "lipschitz", as_lipschitz(self.lipschitz))

    def start(self, objective: Objective, x: Tensor, resolution: float = 0.0) -> Rule:
        """Find L once; the data may be known to a relative ``resolution`` only."""
        found = _Lazy(objective, x, self.lipschitz, "ShortStep", resolution)
        constant, negative = found()
        return _Stateless(found, lambda query: _short_step(query, constant), negative)


@dataclass(frozen=True)
class ExactStep:
    """γ = clip(⟨g, x − s⟩ / ⟨x − s, ∇²f (x − s)⟩, 0, limit), exact line search for quadratics."""

    def start(self, objective: Objective, x: Tensor) -> Rule:
        """Refuse objectives whose Hessian is not constant."""
        if not objective.quadratic:
            raise ValueError(
                "step_size: ExactStep needs a quadratic objective (Quadratic, LeastSquares), got "
                f"{type(objective).__name__}; use Backtracking()"
            )

        def gamma(query: Query) -> Tensor:
            d, size = in_units(query.direction)
            slope = -dot(query.gradient, d)
            curvature = dot(d, objective.hvp(query.x, d)) * size
            return _ratio(slope, curvature, query.limit)

        return _Stateless(_Lazy(objective, x, None, "ExactStep"), gamma)


@dataclass(frozen=True)
class OpenLoop:
    """γ_k = 2 / (k + offset), k = 0, 1, …, cut at the limit; the classic choices are 2 and 3."""

    offset: float = 2.0

    def __post_init__(self) -> None:
        expected = "a number ≥ 2 so that γ ≤ 1"
        object.__setattr__(self, "offset", as_number("offset", self.offset, expected, least=2))

    def start(self, objective: Objective, x: Tensor) -> Rule:
        """Nothing to find."""

        def gamma(query: Query) -> Tensor:
            full = query.value.new_full(query.value.shape, 2 / (query.step + self.offset))
            return full.minimum(torch.as_tensor(query.limit).to(full))

        return _Stateless(_Lazy(objective, x, None, "OpenLoop"), gamma)


@dataclass(frozen=True)
class Backtracking:
    """Short steps with an estimate M of L that is lowered at each step and raised until

    f(x + γd) ≤ f(x) + γ⟨g, d⟩ + ½ M γ² ‖d‖²,

    so that no L is needed and M follows the local curvature (Pedregosa et al., 2020). Where the
    two sides differ by less than the rounding of f, slopes are compared instead:

    ⟨∇f(x + γd), d⟩ ≤ ⟨g, d⟩ + ½ M γ ‖d‖²,

    from which the first follows if f is convex, and which is exact down to the rounding of ∇f.

    Args:
        shrink: Factor applied to M before each step.
        trials: Most raises within a step; the j-th multiplies M by 2^j.

    """

    shrink: float = 0.9
    trials: int = 7

    def __post_init__(self) -> None:
        shrink = as_number("shrink", self.shrink, "a number in (0, 1]", above=0, most=1)
        object.__setattr__(self, "shrink", shrink)
        object.__setattr__(self, "trials", as_integer("trials", self.trials, 1))

    def start(self, objective: Objective, x: Tensor) -> Rule:
        """First M from the curvature along the gradient, or from the first step where it is 0."""
        return _Backtrack(self, objective, _first_estimate(objective, x))


class _Backtrack:
    """The estimate M of one solve. M is piecewise constant in the data, so it has no gradient."""

    def __init__(self, rule: Backtracking, objective: Objective, estimate: Tensor) -> None:
        self.rule = rule
        self.objective = objective
        self.lipschitz = estimate
        self.bent_down: Tensor | None = None

    def __call__(self, query: Query) -> Tensor:
        with torch.no_grad():
            known = self.lipschitz > 0
            lower = self.lipschitz * self.rule.shrink
            estimate = torch.where(known, lower, _going_all_the_way(query))
            accepted = self._accepts(query, estimate)
            for trial in range(1, self.rule.trials + 1):
                if all_seen(accepted):
                    break
                # raises grow, so a few trials reach any L
                estimate = torch.where(accepted, estimate, estimate * 2**trial)
                accepted = accepted | self._accepts(query, estimate)
            self.lipschitz = estimate
        gamma = _short_step(query, self.lipschitz)
        return torch.where(accepted, gamma, 0)  # what never decreases is below rounding: stay

    def _accepts(self, query: Query, estimate: Tensor) -> Tensor:
        gamma = _short_step(query, estimate)
        d = gamma.unsqueeze(-1) * query.direction
        model = 0.5 * estimate * dot(d, d)
        if query.open_ended is not None:
            down = torch.where(query.open_ended, query.gradient, 0) / estimate.unsqueeze(-1)
            d = d - down
            model = model + 0.5 * estimate * dot(down, down)
        model = dot(query.gradient, d) + model
        change = self.objective.value(query.x + d) - query.value
        terms = query.value.abs() + dot(query.gradient.abs(), query.x.abs())
        close = (change - model).abs() <= 4 * torch.finfo(model.dtype).eps * terms
        accepted = (change <= model) & ~close
        if all_seen(~close):
            return accepted
        slope = dot(self.objective.gradient(query.x + d), d)
        return accepted | (close & (slope <= model))


class _Lazy:
    """L and whether it came with negative curvature, found when first asked for."""

    def __init__(
        self,
        objective: Objective,
        x: Tensor,
        given: float | Tensor | None,
        rule: str,
        resolution: float = 0.0,
    ) -> None:
        self._find = partial(_lipschitz, objective, x, given, rule, resolution)
        self._found: tuple[Tensor, Tensor | None] | None = None

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        if self._found is None:
            self._found = self._find()
        return self._found


class _Stateless:
    """A rule that remembers nothing but L."""

    def __init__(
        self, found: _Lazy, gamma: Callable[[Query], Tensor], bent_down: Tensor | None = None
    ) -> None:
        self._found = found
        self._gamma = gamma
        self.bent_down = bent_down

    @property
    def lipschitz(self) -> Tensor:
        return self._found()[0]

    def __call__(self, query: Query) -> Tensor:
        return self._gamma(query)


def _short_step(query: Query, lipschitz: Tensor) -> Tensor:
    d, size = in_units(query.direction)
    return _ratio(-dot(query.gradient, d), lipschitz * size * dot(d, d), query.limit)


def _ratio(slope: Tensor, curvature: Tensor, limit: Tensor | float) -> Tensor:
    """clip(slope / curvature, 0, limit); no curvature means the whole way, uphill means stay."""
    full = torch.as_tensor(limit, dtype=slope.dtype, device=slope.device).expand_as(slope)
    # dividing only where the quotient is used keeps its derivative within range elsewhere
    within = (slope > 0) & (slope < full.detach() * curvature)
    quotient = torch.where(within, slope, 0) / torch.where(within, curvature, 1)
    return torch.where(within, quotient, torch.where(slope > 0, full, 0))


def _lipschitz(
    objective: Objective, x: Tensor, given: float | Tensor | None, rule: str, resolution: float
) -> tuple[Tensor, Tensor | None]:
    if given is not None:
        constant = torch.as_tensor(given, dtype=x.dtype, device=x.device)
        if constant.numel() != 1 and constant.shape != x.shape[:-1]:
            raise ValueError(
                f"lipschitz: expected a number or one for each of the problems, of which there "
                f"are {math.prod(x.shape[:-1])}, got {tuple(constant.shape)}"
            )
        return constant.reshape(()) if constant.numel() == 1 else constant, None
    curvature = objective.curvature()
    if curvature is None:
        raise ValueError(
            f"step_size: {rule} needs the Lipschitz constant of the gradient, which "
            f"{type(objective).__name__} does not know; pass lipschitz= to it, or use "
            "Backtracking()"
        )
    # a singular P has eigenvalues this far below zero by rounding
    rounding = 16 * x.shape[-1] ** 0.5 * max(resolution, torch.finfo(x.dtype).eps)
    return curvature.high, curvature.low < -rounding * curvature.high.detach()


def _first_estimate(objective: Objective, x: Tensor) -> Tensor:
    """A power of two near the curvature at x along −∇f; zero where there is none."""
    with torch.no_grad():
        d, _ = in_units(objective.gradient(x))
        square = dot(d, d)
        estimate = dot(d, objective.hvp(x, d)) / or_one(square)
        power = torch.exp2(torch.ceil(torch.log2(estimate)))
        return torch.where((estimate > 0) & torch.isfinite(power), power, 0)


def _going_all_the_way(query: Query) -> Tensor:
    """The M with which a short step ends at γ = 1, whatever the units; one where none does."""
    d, size = in_units(query.direction)
    square = size * dot(d, d)
    estimate = -dot(query.gradient, d) / or_one(square)
    return torch.where((estimate > 0) & torch.isfinite(estimate), estimate, 1)
