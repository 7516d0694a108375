"""Tasks inside of torch.func transforms and forward-mode automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dfwlayer.arguments import common_batch
from dfwlayer.constraints.base import Face
from dfwlayer.differentiate.batches import (
    Batched,
    check_no_others,
    equal_depths,
    one_batch,
    ranks_of,
)
from dfwlayer.differentiate.expansion import expand, worth
from dfwlayer.differentiate.transforms import derived
from dfwlayer.engines.base import Arguments, Task, bind, centred
from dfwlayer.engines.careful import in_range
from dfwlayer.methods.base import Problem, Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.tensors import filled, tensors_in
from dfwlayer.solution import Solution

__all__ = ["Call", "Known", "carried", "known_at", "through_transforms", "value_at_zero"]

Run = Callable[[Arguments, Settings], Solution]


def through_transforms(run: Run, arguments: Arguments, settings: Settings) -> Solution:
    """Solve on plain tensors, batched where a vmap asks for it, and attach the derivatives."""
    ranks = ranks_of(*arguments)
    tensors = tensors_in(arguments, sparse=False)
    constants = [t.detach() for t in tensors]
    # no_grad leaves forward mode as it is
    differentiable = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if differentiable:
        objective, constraint, _, _ = filled(arguments, iter(constants))
        check_no_others(objective, constraint, lambda: value_at_zero(objective))
    call = (ranks, run, arguments, settings)
    x, value, gap, num_steps, status = derived(_Found(*call), *equal_depths(constants, ranks))
    if differentiable:
        x, value = _carried(call, equal_depths(tensors, ranks), x.detach(), value.detach())
    return Solution(x, value, gap, num_steps, status)


def carried(
    run: Run, arguments: Arguments, settings: Settings, x: Tensor, value: Tensor | None
) -> tuple[Tensor, Any]:  # None without a value
    """A solution that is known, and f there if given, as functions of the arguments."""
    ranks = ranks_of(*arguments)
    tensors = tensors_in(arguments, sparse=False)
    objective, constraint, _, _ = filled(arguments, (t.detach() for t in tensors))
    check_no_others(objective, constraint, lambda: value_at_zero(objective))
    return _carried((ranks, run, arguments, settings), equal_depths(tensors, ranks), x, value)


def _carried(
    call: tuple[tuple[int, ...] | None, Run, Arguments, Settings],
    own: list[Tensor],
    x: Tensor,
    value: Tensor | None,
) -> tuple[Tensor, Any]:  # None without a value
    # each by itself: where one is asked for the other need not be had
    (moved,) = derived(_Carried(*call), x, *own)
    if value is None:
        return moved, None
    (worth_there,) = derived(_Worth(*call), x, value, *own)
    return moved, worth_there


@dataclass(frozen=True)
class Call(Batched):
    """A solve with other tensors in its arguments."""

    run: Run | None  # how to solve, where that has to be done again
    arguments: Arguments
    settings: Settings

    def laid_out(
        self, inputs: Sequence[Tensor], before: tuple[int, ...] = ()
    ) -> tuple[Sequence[Tensor], tuple[int, ...]]:
        """The inputs with at most one batch dimension, and the sizes of those there were.

        ``before`` are the ranks of inputs that come before the tensors of the arguments.
        """
        if self.ranks is None:
            return inputs, ()
        return one_batch(inputs, (*before, *self.ranks))

    def filled(self, tensors: Iterator[Tensor]) -> tuple[Arguments, Settings]:
        """The arguments with these tensors; step sizes may hold some, too."""
        arguments: Arguments = filled(self.arguments, tensors)
        return arguments, replace(self.settings, step_size=arguments.step_size)

    def solved(self, tensors: Iterator[Tensor]) -> Solution:
        """Solve with these tensors."""
        assert self.run is not None
        return self.run(*self.filled(tensors))


class _Found(Call):
    """The solution and its certificate, without derivatives."""

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors, lead = self.laid_out(inputs)
        sol = self.solved(iter(tensors))
        numbers = (sol.value, sol.gap, sol.num_steps, sol.status)
        if len(lead) < 2:
            return sol.x, *numbers
        return sol.x.reshape(*lead, sol.x.shape[-1]), *(n.reshape(lead) for n in numbers)


class _Carried(Call):
    """(the solution, what it was found from) ↦ the solution, differentiably."""

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        if order == 0:
            return (inputs[0].clone(),)
        (known, *tensors), lead = self.laid_out(inputs, (1,))
        arguments, settings = self.filled(iter(tensors))
        if settings.mode == "implicit":
            task, problem, x, face, place, _ = known_at(arguments._replace(x0=known), settings)
            x = task.without_bad(place(expand(problem, x, face, order)))
        else:
            x = self.solved(iter(tensors)).x
        return (x if len(lead) < 2 else x.reshape(*lead, x.shape[-1]),)


class _Worth(Call):
    """(the solution, f there, what they were found from) ↦ f at the solution, differentiably."""

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        if order == 0:
            return (inputs[1].clone(),)
        (known, _, *tensors), lead = self.laid_out(inputs, (1, 0))
        arguments, settings = self.filled(iter(tensors))
        if settings.mode == "implicit":
            task, problem, x, face, _, _ = known_at(arguments._replace(x0=known), settings)
            value = task.without_lost(worth(problem, x, face, order))
        else:
            value = self.solved(iter(tensors)).value
        return (value if len(lead) < 2 else value.reshape(lead),)


class Known(NamedTuple):
    """A known solution, and the problem that it solves."""

    task: Task
    problem: Problem  # seen from the centre of its set
    x: Tensor  # likewise
    face: Face
    place: Callable[[Tensor], Tensor]  # from there to x
    price: Tensor | None  # () or (B,), what a price there is to be multiplied with, if asked for


def known_at(arguments: Arguments, settings: Settings, priced: bool = False) -> Known:
    """Where the solution x0 is; its set, ``priced``, with parameters of each problem's own."""
    task, price = bind(arguments, settings).checked(), None
    if priced:
        task, price = in_range(task)
    problem, x, place = centred(task.objective, task.constraint, task.point)
    if priced:
        none = torch.zeros(task.lead, dtype=torch.bool, device=x.device)
        own = problem.constraint.replace_rows(none)
        for tensor, _ in own.priced(task.shape).values():
            tensor.requires_grad_()
        problem = problem._replace(constraint=own)
    with torch.no_grad():
        # measured from a centre x would depend on it, but the known solution is a constant
        x = problem.constraint.retract(x.detach())
        _, _, face = problem.face_at(x)
    return Known(task, problem, x, face, place, price)


def value_at_zero(objective: Objective) -> Tensor:
    """f(0), for an objective that is not bound yet."""
    batch = common_batch(objective.batch_sizes)
    objective, n = objective.bind(batch), math.prod(objective.shape)
    size = (n,) if batch is None else (batch, n)
    with torch.enable_grad():
        return objective.value(torch.zeros(size, dtype=objective.dtype, device=objective.device))
