"""What compiled code has found, as a tensor that carries its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dfwlayer.differentiate.implicit import attach
from dfwlayer.differentiate.transforms import in_transform
from dfwlayer.engines.base import Arguments, bind, centred
from dfwlayer.engines.compiled.background import NotCompiledError, start
from dfwlayer.methods.base import Settings
from dfwlayer.ops.tensors import tensors_in

__all__ = ["Gradients", "Layout", "carrying", "spoiled"]

Gradients = list[Tensor | None]


class Layout(Protocol):
    """A batch of problems as compiled code reads it; ``found`` is what its own search returns."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, None for numbers."""

    def fresh(self, found: Any) -> Tensor:
        """The solution in memory of its own, as a user may change it."""

    def seen(self, found: Any) -> Tensor:
        """The solution as it is seen from the centre of the set."""

    def gradients(self, asked: Sequence[bool], found: Any, v: Tensor) -> Gradients:
        """Gradients in `tensors` from one in the solution; NaN of the latter goes on.

        Raises `NotCompiledError` where the code for it is not there yet.
        """


class _Solved(NamedTuple):
    """What a gradient needs of a solve."""

    layout: Layout
    found: Any
    arguments: Arguments
    settings: Settings
    among: list[bool]  # of the layout's tensors, which ones are inputs below
    given: list[Tensor]  # those of the arguments
    versions: list[int]


def carrying(layout: Layout, found: Any, arguments: Arguments, settings: Settings) -> Tensor | None:
    """The solution with its gradient, None if nothing asks for one."""
    if not torch.is_grad_enabled():
        return None
    tensors = layout.tensors
    among = [t is not None and t.requires_grad for t in tensors]
    inputs = list(compress(tensors, among))
    if not inputs:
        return None
    given = tensors_in((arguments.objective, arguments.constraint))
    solved = _Solved(layout, found, arguments, settings, among, given, _versions(given))
    # those from which the layout's were derived; the same one may stand in several places
    known = {id(t) for t in inputs}
    inputs += (t for t in given if t.requires_grad and id(t) not in known)
    x: Tensor = _Solution.apply(solved, *inputs)  # type: ignore[no-untyped-call]
    return x


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
        return solved.layout.fresh(solved.found)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        layout, found, _, _, among, given, versions = solved = ctx.solved
        if _versions(given) != versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a tensor of the objective or of the set, after the solve"
            )
        asked: tuple[bool, ...] = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or in_transform(v):
            return None, *_differentiably(solved, ctx.inputs, asked, v)
        needs = iter(asked)
        try:
            gradients = layout.gradients([each and next(needs) for each in among], found, v)
        except NotCompiledError as missing:
            start(missing)
            others = _differentiably(solved, ctx.inputs, asked, v)
            return None, *(g if g is None else g.detach() for g in others)
        own = list(compress(gradients, among))
        return None, *own, *[None] * (len(asked) - len(own))


def spoiled(gradients: Gradients, lost: Tensor) -> Gradients:
    """Gradients, NaN where one of these problems (B,) has a part in them, a matrix first."""

    def spoil(gradient: Tensor, rank: int) -> Tensor:
        if gradient.layout != torch.strided:
            return gradient * torch.where(lost.any(), torch.nan, 1.0).to(gradient.dtype)
        own = gradient.dim() > rank and len(gradient) == len(lost)
        mask = lost.reshape(-1, *[1] * (gradient.dim() - 1)) if own else lost.any()
        return torch.where(mask, torch.nan, gradient)

    return [
        None if gradient is None else spoil(gradient, 1 if place else 2)
        for place, gradient in enumerate(gradients)
    ]


def _differentiably(
    solved: _Solved, inputs: Sequence[Tensor], asked: Sequence[bool], v: Tensor
) -> Gradients:
    """The same gradients with derivatives of their own, past what was derived from the tensors."""
    with torch.enable_grad():
        task = bind(solved.arguments, solved.settings).checked()
        at = solved.layout.seen(solved.found)
        problem, _, place = centred(task.objective, task.constraint, at)
        with torch.no_grad():
            _, _, face = problem.face_at(at)
        moved = place(attach(problem, at, face))
    wanted: dict[int, int] = {}  # by identity, as a tensor may be the argument of several things
    places = {id(t) for t in solved.given}
    for i, tensor in enumerate(inputs):
        if asked[i] and id(tensor) in places:
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
