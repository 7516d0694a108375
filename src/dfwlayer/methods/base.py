"""What every method shares: its settings, the loop, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.rows import dot, interval, norm, seen, where_rows
from dfwlayer.solution import Progress, Status
from dfwlayer.step_size import Backtracking, Query, Rule, ShortStep, StepSize
from dfwlayer.temperature import Temperature

__all__ = [
    "Ability",
    "Callback",
    "Method",
    "Outcome",
    "Problem",
    "Settings",
    "State",
    "iterate",
    "move",
    "priced",
    "start_rule",
]


Callback = Callable[[Progress], bool | None]


class Problem(NamedTuple):
    """A batch of problems, checked and bound to vectors (B, n), or a single one and (n,)."""

    objective: Objective
    constraint: Constraint
    unbounded: Tensor | None  # mask of the coordinates without a bound on a side or on both

    def open_ended(self, gradient: Tensor) -> Tensor | None:
        """Mask of those that have none on the side of −∇f."""
        return None if self.unbounded is None else self.constraint.open_ended(gradient)

    def rows(self, index: Tensor) -> Problem | None:
        """The problems at these positions, None where objective or set cannot be taken apart."""
        constraint = self.constraint.rows(index)
        objective = self.objective.rows(index)
        if constraint is None or objective is None:
            return None
        unbounded = self.unbounded
        if unbounded is not None and unbounded.dim() == 2 and len(unbounded) > 1:
            unbounded = unbounded[index]
        return Problem(objective, constraint, unbounded)

    def face_at(self, x: Tensor) -> tuple[Tensor, Tensor, Face]:
        """f and ∇f at a solution x, and the face it lies on."""
        value, gradient = self.objective.value_and_gradient(x)
        scale = self.objective.scale(x, gradient)
        return value, gradient, self.constraint.face(x, gradient, scale)


class Ability(Flag):
    """What some methods can do beside; one without a word of it has none."""

    NONE = 0
    COMPILED = auto()  # only its solution counts, so compiled code may find it in its place
    RECORDED = auto()  # its first rounds may be recorded in a CUDA graph
    ANY_UNITS = auto()  # it does the same in any units of f and x, so `solve` may choose them
    STARTS_ANYWHERE = auto()  # it needs no point of the set to start from
    PROVES_EMPTY = auto()  # it may find that the set has no point


@dataclass(frozen=True)
class Settings:
    """How to solve and how long; the settings of `dfwlayer.solve` after they were checked."""

    method: Method
    mode: str  # of differentiation, "implicit" or "unroll"
    tol: float
    max_steps: int
    step_size: StepSize | None
    temperature: Temperature
    verify: bool = True
    warm: bool = False  # a start was given
    # rounding of the data, relative, where they come from a dtype that is less precise than the
    # one they are in; curvature below that says nothing of convexity
    resolution: float = 0.0
    spent: Tensor | None = None  # (...), steps that each problem has taken before, None for none
    callback: Callback | None = None

    @cached_property
    def compiles(self) -> bool:
        """Whether only the solution counts, and not the steps to it, so that others may find it."""
        exact = self.mode == "implicit" and self.can(Ability.COMPILED)
        plain = self.step_size is None and self.callback is None and self.spent is None
        return exact and plain and self.max_steps > 0

    def can(self, ability: Ability) -> bool:
        """Whether the method has that ability."""
        return ability in getattr(self.method, "abilities", Ability.NONE)

    def stopped(
        self, problem: Problem, x: Tensor, value: Tensor, gradient: Tensor, num_steps: Tensor
    ) -> bool:
        """Tell the callback where the solve is; whether it wants an end."""
        if self.callback is None:
            return False
        with torch.no_grad():
            constraint, gradient = priced(problem, x, gradient)
            gap = gap_of(constraint, x, gradient)
        return bool(self.callback(Progress(x, value.detach(), gap, num_steps)))

    def heat(self, step: int, dtype: torch.dtype) -> float:
        """τ of the step, as far as the dtype can hold it."""
        return min(self.temperature(step), torch.finfo(dtype).max)


class Outcome(NamedTuple):
    """Where a method ended, and what is known of f there."""

    x: Tensor  # (..., n)
    num_steps: Tensor  # (...)
    status: Tensor  # (...)
    value: Tensor | None = None  # (...)
    gradient: Tensor | None = None  # (..., n)
    gap: Tensor | None = None  # (...), the certificate; the status then agrees with it
    face: Face | None = None  # that x lies on; x is then feasible to rounding
    refinable: bool = False  # the same method could do better with more digits on the way


class Method(Protocol):
    """A way to solve. What one can do beside it may say in ``abilities``, see `Ability`."""

    @property
    def modes(self) -> tuple[str, ...]:
        """The ways it can be differentiated, the one meant by "auto" first."""

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """Solve from the feasible start x (..., n)."""


class State(NamedTuple):
    """What the loop carries from step to step, all per problem."""

    x: Tensor  # (..., n)
    value: Tensor  # (...)
    gradient: Tensor  # (..., n)
    active: Tensor  # (...), still going
    num_steps: Tensor  # (...)
    status: Tensor  # (...), what it will be if the loop ends here
    bent_down: Tensor  # (...), negative curvature was met


def iterate(
    problem: Problem, rule: Rule, x: Tensor, settings: Settings, step: Callable[[int, State], State]
) -> Outcome:
    """Run ``step`` until no problem is active, ``max_steps`` is reached or the callback says so.

    The loop knows no method. Asking whether any problem is active makes a GPU wait, so there it
    is done every few steps only; a step leaves problems alone that are not active.
    """
    value, gradient = problem.objective.value_and_gradient(x)
    rows = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    bent_down = rows > 0 if rule.bent_down is None else rule.bent_down.expand_as(rows)
    state = State(x, value, gradient, rows == 0, rows, rows + Status.MAX_STEPS, bent_down)
    every = interval(x, 10)
    stop = settings.stopped(problem, state.x, state.value, state.gradient, state.num_steps)
    for k in range(settings.max_steps):
        if stop or (k % every == 0 and not bool(state.active.any())):
            break
        before, state = state.num_steps, step(k, state)
        if settings.callback is not None and bool((state.num_steps > before).any()):
            stop = settings.stopped(problem, state.x, state.value, state.gradient, state.num_steps)
    if stop:
        ended = torch.where(state.active, int(Status.STOPPED), state.status)
        state = state._replace(status=ended)
    bent_down = confirmed(problem, state.x, state.bent_down, settings.resolution)
    status = torch.where(bent_down, int(Status.NOT_CONVEX), state.status)
    return Outcome(state.x, state.num_steps, status)


def confirmed(problem: Problem, x: Tensor, bent_down: Tensor, resolution: float) -> Tensor:
    """Which of the problems that seem to bend down (...) do, beyond rounding of their data.

    Where ∇²f is one small matrix for all x a factorisation tells, and what was met on the way were
    differences, or products with the curvature of a face, that had lost their digits.
    """
    if not problem.objective.quadratic or not seen(bent_down):
        return bent_down
    model = problem.objective.model(x)
    if model is None or model.factored:
        return bent_down & (model is None)  # a square does not bend down
    rounding = 8 * max(resolution, torch.finfo(x.dtype).eps) * x.shape[-1] ** 0.5
    found = model.symmetric().bends_down(rounding)
    return bent_down & found.expand(bent_down.numel()).reshape(bent_down.shape)


def start_rule(problem: Problem, x: Tensor, settings: Settings) -> Rule:
    """The rule asked for; by default the short step, or backtracking where L is not known."""
    objective = problem.objective
    if settings.step_size is not None:
        return settings.step_size.start(objective, x)
    if objective.quadratic or objective.curvature() is not None:
        return ShortStep().start(objective, x, settings.resolution)
    return Backtracking().start(objective, x)


def move(
    problem: Problem, rule: Rule, state: State, query: Query, x: Tensor, resolution: float = 0.0
) -> State:
    """Accept x (the constrained part of the next point) for the problems that are active.

    ``resolution`` is the rounding of the data, where they are less precise than their dtype.

    Open-ended coordinates take a gradient step of length 1/L: the L-smooth upper bound is
    separable, so both moves at once lower it by the sum of what each would.
    """
    if query.open_ended is not None:
        constant = rule.lipschitz.unsqueeze(-1)
        length = torch.where(constant > 0, 1 / torch.where(constant > 0, constant, 1), 0)
        x = torch.where(query.open_ended, state.x - length * query.gradient, x)
    # a step out of the dtype's range is not taken
    x = where_rows(state.active & torch.isfinite(x.detach().sum(-1)), x, state.x)
    value, gradient = problem.objective.value_and_gradient(x)
    return State(
        x,
        value,
        gradient,
        state.active,
        state.num_steps + state.active,
        state.status,
        state.bent_down | bends_down(problem, rule, state, x, gradient, resolution),
    )


def bends_down(
    problem: Problem, rule: Rule, state: State, x: Tensor, gradient: Tensor, resolution: float
) -> Tensor:
    """Whether the gradient grew against the step: ⟨∇f(y) − ∇f(x), y − x⟩ < 0 beyond rounding.

    The terms of ∇f(x) are of size L‖x‖ also where ∇f(x) is small, as far as L has been found. What
    another function makes of the rounding of x is seen from what it makes of a change that small.
    """
    with torch.no_grad():
        d, change = x - state.x, gradient - state.gradient
        size = (d.abs() * (gradient.abs() + state.gradient.abs())).sum(-1)
        if rule.bent_down is not None:
            size = size + rule.lipschitz * norm(d) * (norm(x) + norm(state.x))
        eps = max(resolution, torch.finfo(x.dtype).eps)
        rounding = 64 * eps * x.shape[-1] ** 0.5 * size
        downward: Tensor = state.active & (dot(d, change) < -rounding)
        if rule.bent_down is None and seen(downward):
            signs = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device).sign()
            shaken = problem.objective.gradient(x + 8 * eps * signs * x.abs()) - gradient
            rounding = rounding + 8 * x.shape[-1] ** 0.5 * norm(d) * norm(shaken)
            downward = downward & (dot(d, change) < -rounding)
        return downward


def priced(problem: Problem, x: Tensor, gradient: Tensor) -> tuple[Constraint, Tensor]:
    """A set and a gradient for which ⟨g, s⟩ has a minimum along all but open-ended coordinates.

    Those of the problem, or of its Lagrangian over a larger set.
    """
    relaxed = None
    if problem.unbounded is not None:
        relaxed = problem.constraint.relaxation(x, gradient)
    if relaxed is None:
        return problem.constraint, gradient
    for j, a in enumerate(relaxed.normals):
        gradient = gradient + relaxed.multiplier[..., j : j + 1] * a
    return relaxed.constraint, gradient


def gap_of(constraint: Constraint, x: Tensor, gradient: Tensor) -> Tensor:
    """⟨g, x − vertex⟩ over the coordinates that are not open-ended (...)."""
    endless = constraint.open_ended(gradient)
    bounded = x if endless is None else torch.where(endless, 0, x)
    return (dot(gradient, bounded) - constraint.lowest(gradient)).clamp_min(0)
