"""Whole problems inside of one compiled call: what of a solve it takes, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer.differentiate.implicit import attach
from dfwlayer.differentiate.transforms import in_transform
from dfwlayer.engines.base import Arguments, Attempt, bind, centred
from dfwlayer.engines.compiled.kernels.numbers import SOLVED
from dfwlayer.engines.compiled.layout import Layout, Results, lay_out
from dfwlayer.engines.compiled.pool import Pooled
from dfwlayer.engines.compiled.working_set import WorkingSets, lay_out_columns
from dfwlayer.methods.base import Settings
from dfwlayer.ops.tensors import tensors_in
from dfwlayer.solution import Solution

__all__ = ["attempt"]


def attempt(arguments: Arguments, settings: Settings) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing."""
    given = arguments.objective, arguments.constraint
    layout = lay_out(*given) or lay_out_columns(*given)
    if layout is None:
        return None
    found = _found(layout, arguments.x0, settings)
    if found is None:
        return None
    lead = () if layout.batch is None else (layout.batch,)
    x = torch.from_numpy(found.x).to(layout.dtype).reshape(*lead, layout.n)
    if torch.is_grad_enabled():
        own, others = layout.tensors, tensors_in(arguments.constraint)
        if any(t is not None and t.requires_grad for t in own):
            x = _Solution.apply(x, layout, found, arguments, settings, *own, *others)  # type: ignore[no-untyped-call]
    value, gap = torch.from_numpy(found.values).to(layout.dtype).unbind()
    if layout.dtype != torch.float64:  # a bound stays one
        gap = torch.nextafter(gap, torch.full_like(gap, torch.inf))
    status, steps = torch.from_numpy(found.codes).unbind()
    left = status != SOLVED if found.codes[0].any() else None
    if not lead:
        value, gap, steps, status = value[0], gap[0], steps[0], status[0]
    return Attempt(Solution(x, value, gap, steps, status), left)


def _found(
    layout: Layout | WorkingSets, x0: Tensor | None, settings: Settings
) -> Results | Pooled | None:
    batch, n = layout.batch or 1, layout.n
    start = np.zeros((1, n))
    if x0 is not None:
        if (
            x0.dim() not in (1, 2)
            or x0.shape[-1] != n
            or x0.dtype != layout.dtype
            or x0.device.type != "cpu"
        ):
            return None
        start = x0.detach().to(torch.float64).reshape(-1, n).contiguous().numpy()
        if len(start) not in (1, batch) or (x0.dim() == 2 and layout.batch is None):
            return None
        if not np.isfinite(start[0]).all() and len(start) == 1:
            return None
    limits = torch.finfo(layout.dtype).eps, settings.tol, settings.max_steps
    found = layout.search(start, limits)
    if found is None:
        return None
    left = found.codes[0] != SOLVED
    if left.any():
        if left.all():
            return None
        for part in (found.x, found.multipliers, *found.face):
            part[left] = 0
    return found


class _Solution(torch.autograd.Function):
    """x, with the gradient of the exact solution."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layout: Layout | WorkingSets,
        found: Results,
        arguments: Arguments,
        settings: Settings,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.layout, ctx.found, ctx.arguments, ctx.settings = layout, found, arguments, settings
        ctx.save_for_backward(*tensors)
        return x

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        layout: Layout | WorkingSets = ctx.layout
        # lets torch raise if one of them was changed in place since the solve
        saved = ctx.saved_tensors
        asked: tuple[bool, ...] = ctx.needs_input_grad[5:]
        own = len(layout.tensors)
        if torch.is_grad_enabled() or in_transform(v):
            x = torch.from_numpy(ctx.found.x).to(layout.dtype).reshape(v.shape)
            gradients = _differentiably(x, ctx.arguments, ctx.settings, saved, asked, own, v)
        else:
            arriving = v.to(torch.float64).reshape(-1, layout.n).contiguous().numpy()
            gradients = layout.pullback(asked[:own], ctx.found, arriving)
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
) -> list[Tensor | None]:
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
    out: list[Tensor | None] = [None] * len(tensors)
    for i, gradient in zip(wanted, gradients, strict=True):
        out[i] = gradient
    return out
