"""Whole problems inside of one compiled call: what of a solve it takes, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.differentiate.implicit import attach
from dfwlayer.differentiate.transforms import in_transform
from dfwlayer.engines.base import Arguments, Attempt, bind, centred
from dfwlayer.engines.compiled.arrays import Array, Gradients
from dfwlayer.engines.compiled.kernels.numbers import SOLVED
from dfwlayer.engines.compiled.layout import Layout, lay_out
from dfwlayer.engines.compiled.working_set import WorkingSets, lay_out_columns
from dfwlayer.methods.base import Settings
from dfwlayer.ops.tensors import tensors_in
from dfwlayer.solution import Solution

__all__ = ["attempt"]

SMALLEST = 7.01e-46  # no less than half of the smallest float32


def attempt(arguments: Arguments, settings: Settings) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing."""
    problem = arguments.objective, arguments.constraint
    layout = lay_out(*problem) or lay_out_columns(*problem)
    if layout is None:
        return None
    start = _start(layout, arguments.x0)
    found = None if start is None else layout.search(start, settings.tol, settings.max_steps)
    if found is None:
        return None
    codes, left = found.codes, None
    if layout.batch is None:
        if codes[0, 0] != SOLVED:
            return None
    elif (lost := codes[0] != SOLVED).any():
        if lost.all():
            return None
        for part in (found.x, found.multipliers, *found.face):
            part[lost] = 0
        left = torch.from_numpy(lost)
    x: Tensor | None = None
    if torch.is_grad_enabled():
        own = [t for t in layout.tensors if t is not None and t.requires_grad]
        if own:
            given = tensors_in((arguments.objective, arguments.constraint))
            solved = _Solved(layout, found, arguments, settings, len(own), _versions(given))
            # the set's may be others, from which the layout's were derived
            others = (t for t in given if t.requires_grad)
            x = _Solution.apply(solved, *own, *others)  # type: ignore[no-untyped-call]
    if x is None:
        x = layout.point(found.x)
    values = found.values
    if layout.dtype != torch.float64:  # a bound stays one
        values[1] = values[1] * (1 + layout.eps) + SMALLEST
        values = values.astype(np.float32)
    at = (0, ...) if layout.batch is None else ()
    value, gap, status, steps = (
        torch.from_numpy(row[at]) for row in (values[0], values[1], codes[0], codes[1])
    )
    return Attempt(Solution(x, value, gap, steps, status), left)


def _start(layout: Layout | WorkingSets, x0: Tensor | None) -> Array | None:
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


class _Solved(NamedTuple):
    """What a gradient needs of a solve."""

    layout: Layout | WorkingSets
    found: Any  # what the layout has found, `Results` or `Pooled`
    arguments: Arguments
    settings: Settings
    own: int  # of the inputs below, how many are the layout's
    versions: list[int]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often tensors were changed in place."""
    return [0 if t.is_inference() else t._version for t in tensors]


class _Solution(torch.autograd.Function):
    """x, with the gradient of the exact solution; inputs are tensors that ask for one.

    They are the layout's, which may be derived from those of the arguments, and then these.
    """

    @staticmethod
    def forward(ctx: Any, solved: _Solved, *inputs: Tensor) -> Tensor:
        ctx.solved, ctx.inputs = solved, inputs
        # in memory of its own, as a user may change it and the gradient needs it
        return solved.layout.point(solved.found.x.copy())

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        layout, found, arguments, _, own, versions = solved = ctx.solved
        if _versions(tensors_in((arguments.objective, arguments.constraint))) != versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a tensor of the objective or of the set, after the solve"
            )
        asked: tuple[bool, ...] = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or in_transform(v):
            return None, *_differentiably(solved, ctx.inputs, asked, v)
        arriving = np.ascontiguousarray(v.numpy(), np.float64).reshape(-1, layout.n)
        tensors, needs = layout.tensors, iter(asked[:own])
        among = [t is not None and t.requires_grad for t in tensors]
        wanted = [each and next(needs) for each in among]
        if np.isfinite(arriving.sum()):
            gradients = layout.pullback(wanted, found, arriving)
        else:
            # NaN comes from elsewhere and goes on as it does everywhere in torch
            lost: Array = np.logical_not(np.isfinite(arriving).all(-1))
            gradients = layout.pullback(wanted, found, np.where(lost[:, None], 0.0, arriving))
            _spoil(gradients, torch.from_numpy(lost))
        return None, *compress(gradients, among), *[None] * (len(asked) - own)


def _spoil(gradients: Gradients, lost: Tensor) -> None:
    """Make gradients NaN where one of these problems (B,) has a part in them."""
    for gradient in gradients:
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            gradient.values().fill_(torch.nan)
        elif len(lost) > 1 and gradient.dim() and len(gradient) == len(lost):
            gradient[lost] = torch.nan
        else:
            gradient.fill_(torch.nan)


def _differentiably(
    solved: _Solved, inputs: Sequence[Tensor], asked: Sequence[bool], v: Tensor
) -> Gradients:
    """The same gradients with derivatives of their own, past what was derived from the tensors."""
    layout = solved.layout
    with torch.enable_grad():
        task = bind(solved.arguments, solved.settings).checked()
        at = layout.local(solved.found.x)
        problem, _, place = centred(task.objective, task.constraint, at)
        with torch.no_grad():
            _, _, face = problem.face_at(at)
        moved = place(attach(problem, at, face))
    wanted: dict[int, int] = {}  # by identity, as a tensor may be the argument of several things
    for i, tensor in enumerate(inputs[solved.own :], start=solved.own):
        if asked[i]:
            wanted.setdefault(id(tensor), i)
    gradients = torch.autograd.grad(
        moved,
        [inputs[i] for i in wanted.values()],
        v,
        create_graph=True,
        allow_unused=True,
    )
    out: Gradients = [None] * len(inputs)
    for i, gradient in zip(wanted.values(), gradients, strict=True):
        out[i] = gradient
    return out
