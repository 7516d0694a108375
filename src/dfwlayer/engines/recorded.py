"""The whole forward pass as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dfwlayer.certificate import certify
from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.differentiate.implicit import locate
from dfwlayer.engines.careful import out_of_range
from dfwlayer.engines.graphs import may_record, rebuilt, replay, static_of, tensors_of
from dfwlayer.methods.base import Method, Outcome, Problem, Settings
from dfwlayer.objectives.base import Objective, objective_records
from dfwlayer.solution import Status

__all__ = ["Recorded", "solve_recorded"]

LEAST_STEPS = 200  # a recording takes its steps without looking at ``max_steps``


@dataclass(frozen=True)
class Recorded:
    """A solution that a recording is computing or has computed."""

    problem: Problem
    outcome: Outcome
    face: Face
    flags: Tensor | None = None  # whether values are suspect, and whether more steps are needed
    resume: Callable[[], Recorded] | None = None

    def checked(self) -> Recorded | None:
        """Wait for the GPU: this solution, a better one, or None if the values are suspect."""
        if self.flags is None or self.resume is None:
            return self
        suspect, unfinished = self.flags.tolist()
        if suspect:
            return None
        return self.resume() if unfinished else self


def solve_recorded(
    method: Method,
    objective: Objective,
    constraint: Constraint,
    x0: Tensor | None,  # (..., n)
    lead: tuple[int, ...],
    settings: Settings,
    verify: bool,
    attempts: int = 3,
) -> Recorded | None:
    """Check, solve, find the face and certify in one graph.

    None where there is no recording yet and where there cannot be one; the call then goes its
    usual way. Otherwise the host has not waited for the GPU when this returns.
    """
    able = getattr(method, "recordable", False)
    if not (able and objective_records(objective) and constraint.recordable):
        return None
    if settings.max_steps < LEAST_STEPS:
        return None
    given = (*tensors_of(objective), *tensors_of(constraint))
    tensors = given if x0 is None else (*given, x0)
    if not may_record(tensors):
        return None
    n = objective.shape[0]

    def calculate(copies: Sequence[Tensor]) -> tuple[Tensor, ...]:
        own_objective, rest = rebuilt(objective, copies)
        bare, rest = rebuilt(constraint, rest)
        suspect = bare.suspect()
        if verify:
            suspect = suspect | own_objective.suspect()
        own_constraint = bare.assume_bounded()
        blank = copies[0].new_zeros((*lead, n))
        start = own_constraint.start(blank)
        if x0 is not None:
            start = own_constraint.retract(rest[0].expand(*lead, n))
            suspect = suspect | ~torch.isfinite(start.sum())
        suspect = suspect | out_of_range(own_objective, own_constraint, start).any()
        problem = Problem(own_objective, own_constraint, None)
        outcome, face = locate(method, problem, start, settings)
        unfinished = (outcome.status == Status.MAX_STEPS) & (outcome.num_steps < settings.max_steps)
        x, value, gradient = outcome.x, outcome.value, outcome.gradient
        assert value is not None and gradient is not None  # noqa: PT018
        gap, status = certify(problem, x, value, gradient, outcome.status, settings.tol)
        flags = torch.stack((suspect, unfinished.any()))
        return flags, x, value, gap, outcome.num_steps, status, *face.parts()

    parts = (*static_of(method), *static_of(objective), *static_of(constraint))
    name = (
        "solve",
        *parts,
        lead,
        settings.tol,
        settings.max_steps,
        verify,
        x0 is None,
        settings.warm,
    )
    with torch.no_grad():
        found = replay(name, calculate, tensors)
        if found is None:
            return None
    flags, x, value, gap, steps, status, *rest = found
    bounded = constraint.assume_bounded()
    problem = Problem(objective, bounded, None)
    outcome = Outcome(x, steps, status, value, gap=gap, refinable=True)

    def resume() -> Recorded:
        return _continued(method, problem, x, steps, settings, attempts)

    return Recorded(problem, outcome, bounded.face_of(x, rest), flags, resume)


@torch.no_grad()
def _continued(
    method: Method, problem: Problem, x: Tensor, steps: Tensor, settings: Settings, attempts: int
) -> Recorded:
    """Go on from x, a few more times with a recording, then without."""
    more = replace(settings, warm=False)  # a polish from x has just been tried
    found: Recorded | None = None
    if attempts > 0:
        objective, constraint, lead = problem.objective, problem.constraint, tuple(x.shape[:-1])
        found = solve_recorded(method, objective, constraint, x, lead, more, False, attempts - 1)
        found = None if found is None else found.checked()
    if found is None:
        outcome, face = locate(method, problem, x, more)
        found = Recorded(problem, outcome, face)
    outcome = found.outcome._replace(num_steps=found.outcome.num_steps + steps)
    return Recorded(found.problem, outcome, found.face)
