"""The engine for everything: tensor operations, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.differentiate.unroll import unroll
from dfwlayer.engines.base import Located, Task, centred
from dfwlayer.engines.careful import out_of_range, takes_care
from dfwlayer.methods.base import Callback, Outcome, Problem, Settings
from dfwlayer.solution import Progress, Status

__all__ = ["locate", "solved"]


def locate(task: Task) -> Located:
    """Look at the values, run the method, find the face."""
    task = task.checked()
    objective, constraint, start = task.objective, task.constraint, task.point
    beyond: Tensor | None = None
    if takes_care(task):
        beyond = out_of_range(objective, constraint, start)
        if bool(beyond.all()):
            problem = Problem(objective, constraint, None)
            return Located(task, problem, _nowhere(start), None, beyond=beyond)
        if bool(beyond.any()):  # harmless problems stand in for those that would overflow
            objective, constraint = objective.replace_rows(beyond), constraint.replace_rows(beyond)
            start = constraint.retract(start)
        else:
            beyond = None
    problem, x, place = centred(objective, constraint, start)
    settings = replace(task.settings, callback=_seen_by_caller(task, place))
    if settings.mode == "unroll":
        return Located(task, problem, unroll(problem, x, settings), None, place)
    outcome, face = solved(problem, x, settings)
    return Located(task, problem, outcome, face, place, beyond)


@torch.no_grad()
def solved(problem: Problem, x: Tensor, settings: Settings) -> tuple[Outcome, Face]:
    """Solve without autograd: the solution, f and ∇f there, and the face it lies on."""
    outcome = settings.method.run(problem, x, settings)
    if (face := outcome.face) is not None:
        value, gradient = problem.objective.value_and_gradient(outcome.x)
    else:
        outcome = outcome._replace(x=problem.constraint.retract(outcome.x))
        value, gradient, face = problem.face_at(outcome.x)
    return outcome._replace(value=value, gradient=gradient), face


def _seen_by_caller(task: Task, place: Callable[[Tensor], Tensor]) -> Callback | None:
    """The callback, for a method that works on vectors seen from a centre."""
    callback = task.settings.callback
    if callback is None or task.in_units:
        return None

    def call(at: Progress) -> bool | None:
        seen = task.solution(Outcome(place(at.x), at.num_steps, at.num_steps, at.value, gap=at.gap))
        return callback(Progress(seen.x, seen.value, seen.gap, seen.num_steps))

    return call


def _nowhere(start: Tensor) -> Outcome:
    """Where a solve is before it begins."""
    zero = torch.zeros_like(start[..., 0])
    none = zero.long()
    return Outcome(start, none, none + Status.MAX_STEPS, value=zero, gap=zero)
