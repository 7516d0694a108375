"""Small problems that are on a GPU and that the CPU solves sooner: taken there, and back.

A GPU needs about as long for an operation on ten numbers as for one on a hundred thousand, and a
solve by tensor operations is hundreds of them. So what no program takes and what is small is copied
to the CPU, solved there by the engines of that device, and copied back; autograd differentiates the
copies, so that gradients, and gradients of these, take the same way. Which problems that are is a
matter of sizes, see `takes`.

What is wrong with the arguments is said by the engines of their own device: where one here raises,
they are asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dfwlayer.engines.base import Arguments, Task
from dfwlayer.engines.compiled.background import mode
from dfwlayer.engines.graph import records
from dfwlayer.methods.base import Outcome, Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.portable import portable
from dfwlayer.ops.tensors import filled, tensors_in
from dfwlayer.solution import Solution

__all__ = ["answered", "is_small", "outcome_of", "takes"]

AWAY = ("cuda",)  # kinds of devices from which problems are taken
HOME = torch.device("cpu")
# numbers of all tensors of a call, and of its solution, up to which problems are taken: where the
# GPU would go through hundreds of single operations, and where it has them as one recording
MOST, MOST_RECORDED = 2**19, 2**16

_Node = TypeVar("_Node")


def answered(
    run: Callable[[Arguments, Settings], Solution],
    arguments: Arguments,
    settings: Settings,
) -> Solution | None:
    """The solution, found on the CPU, on the device of the arguments; None if it is for others."""
    device = arguments.objective.device
    try:
        there = moved(arguments, HOME)
        found = run(there, replace(settings, step_size=there.step_size))
    except (ValueError, RuntimeError):
        return None
    if torch.is_grad_enabled() and found.x.requires_grad:
        given = [t for t in tensors_in(arguments) if not t.is_inference()]
        x, value = _Returned.apply(device, found.x, found.value, *given)  # type: ignore[no-untyped-call]
    else:
        x, value = found.x.to(device), found.value.to(device)
    rest = (part.to(device) for part in (found.gap, found.num_steps, found.status))
    return Solution(x, value, *rest)


class _Returned(torch.autograd.Function):
    """x and f on the device of the tensors they were found from, which may not change until then.

    Copies of them give the right gradient whatever becomes of them. But that it is one of numbers
    that are gone is an error everywhere else, and so it is here.
    """

    @staticmethod
    def forward(
        ctx: Any, device: torch.device, x: Tensor, value: Tensor, *given: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        ctx.home = x.device
        return x.to(device, copy=True), value.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, w: Tensor | None) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors  # raises for those that were changed in place
        back = (None if each is None else each.to(ctx.home) for each in (v, w))
        return None, *back, *[None] * len(given)


def outcome_of(
    run: Callable[[Task], Outcome], run_home: Callable[[Task], Outcome], task: Task
) -> Outcome:
    """The same for a task, which goes its usual way where it is not small."""
    if not takes(task.objective, task.constraint, task.start, task.settings):
        return run(task)
    device = task.objective.device
    try:
        found = run_home(moved(task, HOME))
    except (ValueError, RuntimeError):
        return run(task)
    x, steps, status, value, gap = found.x, found.num_steps, found.status, found.value, found.gap
    assert value is not None and gap is not None  # noqa: PT018
    x, steps, status, value, gap = (part.to(device) for part in (x, steps, status, value, gap))
    return Outcome(x, steps, status, value, gap=gap)


def takes(objective: Objective, constraint: Any, start: Tensor | None, settings: Settings) -> bool:
    """Whether problems are on a GPU, small, and can be moved.

    Nothing of them, nor of the method, may be bound to the device: a function of the user's that
    holds a tensor is; see `dfwlayer.ops.portable`. A callback and a rule for steps see tensors.
    """
    device = objective.device
    if device.type not in AWAY or mode() == "off" or objective.shards is not None:
        return False
    if settings.mode != "implicit" or settings.callback is not None:
        return False
    if settings.step_size is not None or torch.is_autocast_enabled(HOME.type):
        return False
    given = (objective, constraint, start)
    tensors = tensors_in(given)
    recorded = records(objective, constraint, settings)
    if not is_small(objective, constraint, tensors, recorded):
        return False
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.device != device for t in tensors):
        return False
    if torch.empty(0).device.type != HOME.type:  # where tensors are made, by whatever means
        return False
    return portable((objective, constraint, settings.method))


def is_small(objective: Objective, constraint: Any, tensors: list[Tensor], recorded: bool) -> bool:
    """Whether the numbers in the tensors of a call and in x (B, n) are few.

    With a P of each problem's own they are about B n². ``recorded`` is for what the GPU does at
    once, by a recording.
    """
    most = MOST_RECORDED if recorded else MOST
    count = sum(t.numel() for t in tensors)
    if count > most:
        return False
    try:
        sizes = objective.batch_sizes | constraint.batch_sizes(objective.shape)
    except ValueError:  # others have the words for it
        return False
    return count + max(sizes.values(), default=1) * math.prod(objective.shape) <= most


def moved(node: _Node, device: torch.device) -> _Node:
    """A copy with its tensors there, differentiably; the same tensor stays the same."""
    copies: dict[int, Tensor] = {}
    for t in tensors_in(node):
        if id(t) not in copies:
            copies[id(t)] = t.to(device, copy=True)
    found: _Node = filled(node, (copies[id(t)] for t in tensors_in(node)))
    return found
