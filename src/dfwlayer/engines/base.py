"""What an engine is given and what it returns: a task, and where its solutions were located."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dfwlayer.arguments import common_batch
from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.constraints.parameters import merged
from dfwlayer.methods.base import Ability, Outcome, Problem, Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.objectives.translated import Translated
from dfwlayer.ops.rows import where_rows
from dfwlayer.solution import Solution, Status
from dfwlayer.step_size import StepSize

__all__ = [
    "Arguments",
    "Attempt",
    "Engine",
    "Located",
    "Task",
    "bind",
    "centred",
    "lead_of_start",
    "merged_outcome",
    "part_of",
    "spread_out",
]


class Arguments(NamedTuple):
    """The arguments of `dfwlayer.solve` that may hold tensors."""

    objective: Objective
    constraint: Constraint
    x0: Tensor | None
    step_size: StepSize | None

    def float32(self) -> Arguments:
        """Half-precision data in float32."""
        x0 = None
        if self.x0 is not None:
            x0 = self.x0.to(torch.promote_types(self.x0.dtype, torch.float32))
        return Arguments(self.objective.float32(), self.constraint.float32(), x0, self.step_size)


@dataclass(frozen=True)
class Task:
    """A batch of problems with fitting shapes, bound to vectors (B, n), or one and (n,)."""

    objective: Objective
    constraint: Constraint
    start: Tensor | None  # (n,) or (B, n), None to start where the set says
    shape: tuple[int, ...]  # of one problem's variable
    lead: tuple[int, ...]  # (B,), or () without a batch
    settings: Settings
    bad: Tensor | None = None  # (B,), statuses of problems that cannot be solved, 0 for the others
    looked_at: bool = False  # the values were checked, and the start is a point of the set
    in_units: bool = False  # numbers have the size they should have, or cannot be given another

    @property
    def point(self) -> Tensor:
        """The start of a task that was looked at."""
        assert self.start is not None
        return self.start

    def checked(self) -> Task:
        """Look at the values: raise for those no problem can have, replace bad problems."""
        if self.looked_at:
            return self
        objective, constraint, bad = self.objective, self.constraint, None
        if self.settings.verify:
            if bool(objective.suspect()):
                objective, bad = objective.verified()
            constraint, flagged = constraint.verified()
            bad = merged(bad, flagged)
        if bad is not None:
            bad = bad.expand(self.lead)
            lost = bad != 0
            objective, constraint = objective.replace_rows(lost), constraint.replace_rows(lost)
        sound = replace(self, objective=objective, constraint=constraint, bad=bad, looked_at=True)
        return replace(sound, start=sound._point_of_the_set())

    def _point_of_the_set(self) -> Tensor:
        size = (*self.lead, math.prod(self.shape))
        blank = torch.zeros(size, dtype=self.objective.dtype, device=self.objective.device)
        if self.settings.can(Ability.STARTS_ANYWHERE):
            start = blank if self.start is None else self.start.expand(size)
            return torch.where(torch.isfinite(start).all(-1, keepdim=True), start, blank)
        if self.start is None:
            return self.constraint.start(blank)
        # a last solution may hold the NaN rows of problems that were bad; those start afresh
        usable = torch.isfinite(self.start).all(-1)
        shared = self.start.numel() == size[-1]
        if self.settings.verify and shared and not bool(usable.all()):
            raise ValueError("x0: expected finite numbers, found NaN or infinity")
        start = where_rows(usable, self.start, self.constraint.start(blank))
        return self.constraint.retract(start.expand(size))

    def without_bad(self, x: Tensor, found: Tensor | None = None) -> Tensor:
        """x (..., n) in the variable's shape, NaN for the problems that cannot be solved.

        Those that are known to be so (B,) and those that were found to be.
        """
        bad = merged(self.bad, found)
        if bad is not None:
            x = where_rows(bad == 0, x, torch.nan)
        return x.reshape(*self.lead, *self.shape)

    def without_lost(self, value: Tensor, found: Tensor | None = None) -> Tensor:  # (...)
        """A number of each problem, NaN for those that cannot be solved, as in `without_bad`."""
        bad = merged(self.bad, found)
        return value if bad is None else torch.where(bad != 0, torch.nan, value)

    def solution(self, outcome: Outcome) -> Solution:
        """The outcome as the caller gets it."""
        value, gap, status = outcome.value, outcome.gap, outcome.status
        assert value is not None and gap is not None  # noqa: PT018
        found: Tensor | None = None
        if self.settings.can(Ability.PROVES_EMPTY):
            found = torch.where(status == Status.INFEASIBLE, status, 0)
        value, gap = self.without_lost(value, found), self.without_lost(gap, found)
        if (bad := merged(self.bad, found)) is not None:
            status = torch.where(bad != 0, bad, status)
        x = self.without_bad(outcome.x, found)
        return Solution(x, value, gap, outcome.num_steps, status)


@dataclass(frozen=True)
class Located:
    """Solutions without their gradients, and what it takes to attach these and to certify."""

    task: Task  # as it was looked at
    problem: Problem  # seen from the centre of its set
    outcome: Outcome
    face: Face | None  # None where x carries its gradient already, or there is none to attach
    place: Callable[[Tensor], Tensor] = lambda y: y  # from the problem's variable to the task's
    beyond: Tensor | None = None  # (...), problems whose numbers leave the dtype too little room

    def settled(self) -> Located | None:
        """Once the engine is done: this, or better ones, or None if another engine should try."""
        return self


class Attempt(NamedTuple):
    """What became of a batch whose problems were solved or left to others one by one."""

    solution: Solution
    left: Tensor | None  # (B,) mask of the problems that were left, None if none was


class Engine(Protocol):
    """A way to run a task."""

    def locate(self, task: Task) -> Located | None:
        """The solutions, or None where this engine does not take such a task."""


def bind(arguments: Arguments, settings: Settings) -> Task:
    """Check shapes, dtypes and devices, and lay the arguments out as vectors."""
    objective, constraint, x0, _ = arguments
    shape = objective.shape
    sizes = objective.batch_sizes | constraint.batch_sizes(shape)
    if x0 is not None:
        own = lead_of_start(x0, objective, shape)
        sizes |= {"x0": own[0]} if own else {}
    batch = common_batch(sizes)
    lead = () if batch is None else (batch,)
    objective = objective.bind(batch)
    constraint = constraint.bind(shape, objective.dtype, objective.device)
    start = None
    if x0 is not None:
        n = math.prod(shape)
        start = x0.detach().reshape(-1, n) if lead else x0.detach().reshape(n)
    return Task(objective, constraint, start, shape, lead, replace(settings, warm=x0 is not None))


def part_of(task: Task, again: Tensor) -> Task | None:
    """The problems of a mask, None where a batch cannot be taken apart."""
    if again.dim() == 0:
        return None
    index = again.nonzero().squeeze(-1)
    objective, sets = task.objective.rows(index), task.constraint.rows(index)
    if objective is None or sets is None:
        return None
    spent = task.settings.spent
    return replace(
        task,
        objective=objective,
        constraint=sets,
        start=task.point[index],
        lead=(len(index),),
        settings=replace(task.settings, spent=None if spent is None else spent[index]),
    )


def spread_out(found: Outcome, index: Tensor, count: int) -> Outcome:
    """The outcome of some problems at their positions in a batch, zero elsewhere."""

    def spread(rows: Tensor) -> Tensor:
        return rows.new_zeros((count, *rows.shape[1:])).index_copy(0, index, rows)

    x, steps, status, value, gap = found.x, found.num_steps, found.status, found.value, found.gap
    assert value is not None and gap is not None  # noqa: PT018
    return Outcome(spread(x), spread(steps), spread(status), spread(value), gap=spread(gap))


def merged_outcome(old: Outcome, new: Outcome, again: Tensor) -> Outcome:
    """The new outcome where the mask holds, the old one elsewhere."""
    assert old.value is not None and new.value is not None  # noqa: PT018
    assert old.gap is not None and new.gap is not None  # noqa: PT018
    return Outcome(
        torch.where(again.unsqueeze(-1), new.x, old.x),
        torch.where(again, new.num_steps, old.num_steps),
        torch.where(again, new.status, old.status),
        torch.where(again, new.value, old.value),
        gap=torch.where(again, new.gap, old.gap),
    )


def lead_of_start(x0: Tensor, objective: Objective, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The batch dimensions of x0; raise unless it is a variable of that shape."""
    if tuple(x0.shape[-len(shape) :]) != shape:
        raise ValueError(f"x0: expected shape {shape} or (*batch, *{shape}), got {tuple(x0.shape)}")
    if x0.dtype != objective.dtype or x0.device != objective.device:
        raise ValueError(
            f"x0: expected {objective.dtype} on {objective.device} like the objective, got "
            f"{x0.dtype} on {x0.device}"
        )
    return tuple(x0.shape[: x0.dim() - len(shape)])


def centred(
    objective: Objective, constraint: Constraint, x: Tensor
) -> tuple[Problem, Tensor, Callable[[Tensor], Tensor]]:
    """The problem in y = x − c, where a set keeps the precision of its own size; y; and y ↦ x."""
    if (found := constraint.centred()) is None:
        return Problem(objective, constraint, constraint.unbounded()), x, lambda y: y
    inner, centre = found
    problem, y, place = centred(Translated(objective, centre), inner, x - centre)
    return problem, y, lambda y: constraint.placed(place(y))
