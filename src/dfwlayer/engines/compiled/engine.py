"""Whole problems inside of one compiled call: what of a solve it takes, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer.differentiate.implicit import attach
from dfwlayer.differentiate.transforms import in_transform
from dfwlayer.engines.base import Arguments, Attempt, bind, centred
from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.kernels.numbers import SOLVED
from dfwlayer.engines.compiled.layout import Layout, lay_out
from dfwlayer.engines.compiled.sets import Gradients, Results
from dfwlayer.methods.base import Settings
from dfwlayer.ops.tensors import tensors_in
from dfwlayer.solution import Solution

__all__ = ["attempt"]


def attempt(arguments: Arguments, settings: Settings) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing."""
    layout = lay_out(arguments.objective, arguments.constraint)
    if layout is None:
        return None
    start = _start(layout, arguments.x0)
    if start is None:
        return None
    found = layout.search(start, settings.tol, settings.max_steps)
    x, values, codes = found.x, found.values, found.codes
    left: Tensor | None = None
    if layout.batch is None:
        if codes[0, 0] != SOLVED:
            return None
        x, values, codes = x[0], values[:, 0], codes[:, 0]
    elif (lost := codes[0] != SOLVED).any():
        if lost.all():
            return None
        for part in (x, found.multipliers, *found.face):
            part[lost] = 0
        left = torch.from_numpy(lost)
    point, numbers = torch.from_numpy(x), torch.from_numpy(values)
    if layout.dtype != torch.float64:
        point, numbers = point.to(layout.dtype), numbers.to(layout.dtype)
        # a bound stays one
        torch.nextafter(numbers[1], numbers.new_full((), torch.inf), out=numbers[1])
    if torch.is_grad_enabled():
        own = layout.tensors
        if any(t is not None and t.requires_grad for t in own):
            others = tensors_in(arguments.constraint)
            solved = _Solved(layout, found, arguments, settings)
            point = _Solution.apply(point, solved, *own, *others)  # type: ignore[no-untyped-call]
    status, steps = torch.from_numpy(codes).unbind()
    value, gap = numbers.unbind()
    return Attempt(Solution(point, value, gap, steps, status), left)


def _start(layout: Layout, x0: Tensor | None) -> Array | None:
    """Where to start (1, n) or (B, n), None if the question is for others."""
    n = layout.n
    if x0 is None:
        return np.zeros((1, n))
    if (
        x0.dim() not in (1, 2)
        or x0.shape[-1] != n
        or x0.dtype != layout.dtype
        or x0.device.type != "cpu"
    ):
        return None
    start: Array = x0.detach().to(torch.float64).reshape(-1, n).contiguous().numpy()
    if len(start) not in (1, layout.batch or 1) or (x0.dim() == 2 and layout.batch is None):
        return None
    if len(start) == 1 and not np.isfinite(start[0]).all():
        return None
    return start


@dataclass(frozen=True)
class _Solved:
    """What a gradient needs of a solve."""

    layout: Layout
    found: Results
    arguments: Arguments
    settings: Settings


class _Solution(torch.autograd.Function):
    """x, with the gradient of the exact solution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, solved: _Solved, *tensors: Tensor | None) -> Tensor:
        ctx.solved = solved
        ctx.save_for_backward(*tensors)
        return x

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        # lets torch raise if one of them was changed in place since the solve
        saved = ctx.saved_tensors
        asked: tuple[bool, ...] = ctx.needs_input_grad[2:]
        solved: _Solved = ctx.solved
        if torch.is_grad_enabled() or in_transform(v):
            return None, None, *_differentiably(solved, saved, asked, v)
        layout = solved.layout
        own = len(layout.tensors)
        arriving = np.ascontiguousarray(v.numpy(), np.float64).reshape(-1, layout.n)
        gradients = layout.pullback(asked[:own], solved.found, arriving)
        return None, None, *gradients, *[None] * (len(saved) - own)


def _differentiably(
    solved: _Solved, tensors: Sequence[Tensor | None], asked: Sequence[bool], v: Tensor
) -> Gradients:
    """The same gradients with derivatives of their own, past what was derived from the tensors.

    Of the tensors, the first two are those of the objective, and after those of the layout come
    the set's.
    """
    layout = solved.layout
    x = torch.from_numpy(solved.found.x).to(layout.dtype).reshape(v.shape)
    with torch.enable_grad():
        task = bind(solved.arguments, solved.settings).checked()
        problem, at, place = centred(task.objective, task.constraint, x)
        with torch.no_grad():
            _, _, face = problem.face_at(at)
        moved = place(attach(problem, at, face))
    given = [*range(2), *range(len(layout.tensors), len(tensors))]
    wanted = [i for i in given if asked[i]]
    gradients = torch.autograd.grad(
        moved, [tensors[i] for i in wanted], v, create_graph=True, allow_unused=True
    )
    out: Gradients = [None] * len(tensors)
    for i, gradient in zip(wanted, gradients, strict=True):
        out[i] = gradient
    return out
