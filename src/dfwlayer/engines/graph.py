"""The engine for large problems on a GPU: the whole forward pass as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dfwlayer.certificate import certify
from dfwlayer.constraints.base import Constraint
from dfwlayer.engines import eager
from dfwlayer.engines.base import Located, Task
from dfwlayer.engines.careful import out_of_range
from dfwlayer.methods.base import Ability, Outcome, Problem, Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.graphs import may_record, replay
from dfwlayer.ops.tensors import filled, static_of, tensors_in
from dfwlayer.solution import Status

__all__ = ["Recorded", "locate", "records"]

LEAST_STEPS = 200  # a recording takes its steps without looking at ``max_steps``
ATTEMPTS = 3  # recordings that go on where the last one ended


@dataclass(frozen=True)
class Recorded(Located):
    """Solutions that a recording is computing or has computed."""

    flags: Tensor | None = None  # whether values are suspect, and whether more steps are needed
    resume: Callable[[], Located] | None = None

    def settled(self) -> Located | None:
        """Wait for the GPU: these solutions, better ones, or None if the values are suspect."""
        if self.flags is None or self.resume is None:
            return self
        suspect, unfinished = self.flags.tolist()
        if suspect:
            return None
        return self.resume() if unfinished else self


def locate(task: Task) -> Located | None:
    """Check, solve, find the face and certify in one graph.

    None where there is no recording yet and where there cannot be one; the task then goes its
    usual way. Otherwise the host has not waited for the GPU when this returns.
    """
    return _recorded(task, ATTEMPTS)


def records(objective: Objective, constraint: Constraint, settings: Settings) -> bool:
    """Whether such a solve may be recorded, once its tensors are on a GPU."""
    if settings.mode != "implicit" or settings.callback is not None:
        return False
    if settings.max_steps < LEAST_STEPS or not objective.recordable:
        return False
    return settings.can(Ability.RECORDED) and constraint.as_recordable() is not None


def _recorded(task: Task, attempts: int) -> Recorded | None:
    objective, constraint, settings = task.objective, task.constraint, task.settings
    if objective.device.type != "cuda" or not records(objective, constraint, settings):
        return None
    recordable = constraint.as_recordable()
    assert recordable is not None
    given = (objective, constraint, task.start)
    tensors = tensors_in(given)
    if not may_record(tensors):
        return None
    size = (*task.lead, objective.shape[0])

    def calculate(copies: Sequence[Tensor]) -> tuple[Tensor, ...]:
        own_objective, bare, own_start = filled(given, iter(copies))
        suspect = bare.suspect()
        if settings.verify:
            suspect = suspect | own_objective.suspect()
        own_constraint = bare.assume_bounded()
        start = own_constraint.start(copies[0].new_zeros(size))
        if own_start is not None:
            start = own_constraint.retract(own_start.expand(size))
            suspect = suspect | ~torch.isfinite(start.sum())
        suspect = suspect | out_of_range(own_objective, own_constraint, start).any()
        problem = Problem(own_objective, own_constraint, None)
        outcome, face = eager.solved(problem, start, settings)
        unfinished = (outcome.status == Status.MAX_STEPS) & (outcome.num_steps < settings.max_steps)
        x, value, gradient = outcome.x, outcome.value, outcome.gradient
        assert value is not None and gradient is not None  # noqa: PT018
        gap, status = certify(problem, x, value, gradient, outcome.status, settings.tol)
        flags = torch.stack((suspect, unfinished.any()))
        return flags, x, value, gap, outcome.num_steps, status, *own_constraint.face_parts(face)

    how = (settings.tol, settings.max_steps, settings.verify, settings.warm)
    name = ("solve", static_of(settings.method), static_of(given), task.lead, how)
    with torch.no_grad():
        found = replay(name, calculate, tensors)
    if found is None:
        return None
    flags, x, value, gap, steps, status, *rest = found
    problem = Problem(objective, recordable.assume_bounded(), None)
    outcome = Outcome(x, steps, status, value, gap=gap, refinable=True)
    face = recordable.face_of(x, rest)
    resume = lambda: _continued(task, problem, outcome, attempts)  # noqa: E731
    return Recorded(task, problem, outcome, face, flags=flags, resume=resume)


@torch.no_grad()
def _continued(task: Task, problem: Problem, last: Outcome, attempts: int) -> Located:
    """Go on from x, a few more times with a recording, then without."""
    # a polish from x has just been tried, and the values are known to be sound
    settings = replace(task.settings, warm=False, verify=False)
    more = replace(task, constraint=problem.constraint, start=last.x, settings=settings)
    found = _recorded(more, attempts - 1) if attempts > 0 else None
    settled = None if found is None else found.settled()
    if settled is None:
        settled = Located(task, problem, *eager.solved(problem, last.x, settings))
    steps = settled.outcome.num_steps + last.num_steps
    return replace(settled, task=task, outcome=settled.outcome._replace(num_steps=steps))
