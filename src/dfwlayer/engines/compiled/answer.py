"""What compiled code has found as the answer to a solve, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dfwlayer.differentiate.implicit import attach
from dfwlayer.differentiate.transforms import in_transform
from dfwlayer.engines.base import Arguments, Attempt, bind, centred
from dfwlayer.methods.base import Settings
from dfwlayer.ops.tensors import tensors_in
from dfwlayer.solution import Solution

__all__ = ["Found", "Gradients", "Layout", "answer"]

Gradients = list[Tensor | None]
State = TypeVar("State")


@dataclass(frozen=True)
class Found(Generic[State]):
    """Solutions of a batch (B, ·); what was left to others is zero."""

    x: Tensor
    value: Tensor
    gap: Tensor
    steps: Tensor
    status: Tensor
    left: Tensor | None  # mask of the problems that were left, None if none was
    state: State  # what else the gradient needs


class Layout(Protocol[State]):
    """A batch of problems as compiled code reads it."""

    @property
    def batch(self) -> int | None:
        """How many, None for one that is no batch."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, the two of the objective first; None for numbers."""

    def search(self, x0: Tensor | None, settings: Settings) -> Found[State] | None:
        """Solve what can be solved beyond doubt, None if that is nothing."""

    def point(self, found: Found[State]) -> Tensor:
        """x once more: the other one may be changed in place."""

    def pullback(self, asked: Sequence[bool], found: Found[State], v: Tensor) -> Gradients:
        """Gradients in `tensors` from one in x (B, n)."""


def answer(layout: Layout[Any], arguments: Arguments, settings: Settings) -> Attempt | None:
    """Solve, and make x carry its gradient; None if nothing was solved."""
    found = layout.search(arguments.x0, settings)
    if found is None:
        return None
    x, value, gap, steps, status = found.x, found.value, found.gap, found.steps, found.status
    if layout.batch is None:
        x, value, gap, steps, status = x[0], value[0], gap[0], steps[0], status[0]
    if torch.is_grad_enabled():
        own, others = layout.tensors, tensors_in(arguments.constraint)
        if any(t is not None and t.requires_grad for t in own):
            x = _Solution.apply(x, layout, found, arguments, settings, *own, *others)  # type: ignore[no-untyped-call]
    return Attempt(Solution(x, value, gap, steps, status), found.left)


class _Solution(torch.autograd.Function):
    """x, with the gradient of the exact solution."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: Layout[Any],
        found: Found[Any],
        arguments: Arguments,
        settings: Settings,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.layout, ctx.found, ctx.arguments, ctx.settings = layout, found, arguments, settings
        ctx.save_for_backward(*tensors)
        return x

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        # lets torch raise if one of them was changed in place since the solve
        saved = ctx.saved_tensors
        asked: tuple[bool, ...] = ctx.needs_input_grad[5:]
        own = len(ctx.layout.tensors)
        if torch.is_grad_enabled() or in_transform(v):
            x = ctx.layout.point(ctx.found).reshape(v.shape)
            gradients = _differentiably(x, ctx.arguments, ctx.settings, saved, asked, own, v)
        else:
            gradients = ctx.layout.pullback(asked[:own], ctx.found, v.reshape(ctx.found.x.shape))
            gradients = gradients + [None] * (len(saved) - own)
        return None, None, None, None, None, *gradients


def _differentiably(
    x: Tensor,
    arguments: Arguments,
    settings: Settings,
    tensors: Sequence[Tensor | None],
    asked: Sequence[bool],
    own: int,
    v: Tensor,
) -> Gradients:
    """The same gradients with derivatives of their own, past what was derived from the tensors.

    Of the tensors, the first two are those of the objective and those from ``own`` on the set's.
    """
    with torch.enable_grad():
        task = bind(arguments, settings).checked()
        problem, at, place = centred(task.objective, task.constraint, x)
        with torch.no_grad():
            _, _, face = problem.face_at(at)
        moved = place(attach(problem, at, face))
    given = [*range(2), *range(own, len(tensors))]
    wanted = [i for i in given if asked[i]]
    gradients = torch.autograd.grad(
        moved, [tensors[i] for i in wanted], v, create_graph=True, allow_unused=True
    )
    out: Gradients = [None] * len(tensors)
    for i, gradient in zip(wanted, gradients, strict=True):
        out[i] = gradient
    return out
