"""What compiled code has found, as a tensor that carries its gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from dfwlayer.differentiate.implicit import attach
from dfwlayer.differentiate.transforms import any_in_transform
from dfwlayer.engines.base import Arguments, bind, centred
from dfwlayer.engines.compiled.background import NotCompiledError, start
from dfwlayer.methods.base import Settings
from dfwlayer.ops.signature import Signature
from dfwlayer.ops.tensors import added, filled, tensors_in, versions_of

__all__ = ["Gradients", "Layout", "asks", "carrying", "spoiled"]

Gradients = list[Tensor | None]


class Layout(Protocol):
    """A batch of problems as compiled code reads it; ``found`` is what its own search returns."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, None for numbers; the two of f come first."""

    def fresh(self, found: Any) -> Tensor:
        """The solution in memory of its own, as a user may change it."""

    def seen(self, found: Any) -> Tensor:
        """The solution as it is seen from the centre of the set."""

    def gradients(self, asked: Sequence[bool], found: Any, v: Tensor) -> Gradients:
        """Gradients in `tensors` from one in the solution; NaN of the latter goes on.

        Raises `NotCompiledError` where the code for it is not there yet.
        """

    def gradients_of_value(self, asked: Sequence[bool], found: Any, w: Tensor) -> Gradients | None:
        """The same from one in each value, None where only tensor operations know."""


class _Solved(NamedTuple):
    """What a gradient needs of a solve."""

    layout: Layout
    found: Any
    value: list[Tensor]  # taken out when it becomes an output, which would be kept for ever
    arguments: Arguments
    settings: Settings
    among: list[bool]  # of the layout's tensors, which ones are inputs below
    given: list[Tensor]  # those of the arguments
    versions: list[int]


def asks(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a gradient in one of them may be asked for."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def carrying(
    layout: Layout,
    found: Any,
    value: Tensor,
    arguments: Arguments,
    settings: Settings,
    signature: Signature | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The solution and its value with their gradients, None if nothing asks for one."""
    if not torch.is_grad_enabled():
        return None
    among: list[bool] = []
    inputs: list[Tensor] = []
    known: list[int] = []  # three lists by one loop, as each in brackets is a call of its own
    for tensor in layout.tensors:
        if tensor is not None and tensor.requires_grad:
            among.append(True)
            inputs.append(_unwrapped(tensor))
            known.append(id(tensor))
        else:
            among.append(False)
    if not inputs:
        return None
    if signature is not None:
        given, versions = signature.tensors, signature.versions
    else:
        given = tensors_in((arguments.objective, arguments.constraint))
        versions = versions_of(given)
    # those from which the layout's were derived; the same one may stand in several places
    inputs += [_unwrapped(t) for t in given if t.requires_grad and id(t) not in known]
    solved = _Solved(layout, found, [value], arguments, settings, among, given, versions)
    found_so: tuple[Tensor, Tensor] = _Solution.apply(solved, *inputs)  # type: ignore[attr-defined]
    return found_so


_unwrapped = torch._C._functorch.unwrap_if_dead  # of tensors that have left a transform


class _Solution(_SingleLevelFunction):
    """x and f, with the gradients of the exact solution; inputs are tensors that ask for one.

    They are the layout's, which may be derived from those of the arguments, and then these. There
    are no transforms where it is applied, so it has no rules for them, which takes less time.
    """

    @staticmethod
    def forward(ctx: Any, solved: _Solved, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.solved, ctx.inputs = solved, inputs
        ctx.set_materialize_grads(False)
        return solved.layout.fresh(solved.found), solved.value.pop()

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, w: Tensor | None) -> tuple[Tensor | None, ...]:
        solved: _Solved = ctx.solved
        layout, found, among = solved.layout, solved.found, solved.among
        if versions_of(solved.given) != solved.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a tensor of the objective or of the set, after the solve"
            )
        asked: tuple[bool, ...] = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or any_in_transform(v, w):
            return None, *_differentiably(solved, ctx.inputs, asked, v, w)
        wanted = among
        if False in asked:
            needs = iter(asked)
            wanted = [each and next(needs) for each in among]
        out: Gradients = [None] * len(asked)
        if v is not None:
            try:
                gradients = layout.gradients(wanted, found, v)
                for i, gradient in enumerate(compress(gradients, among)):
                    out[i] = gradient
            except NotCompiledError as missing:
                start(missing)
                out = _detached(_differentiably(solved, ctx.inputs, asked, v, None))
        if w is not None:
            known = layout.gradients_of_value(wanted, found, w)
            if known is None:
                more = _detached(_differentiably(solved, ctx.inputs, asked, None, w))
            else:
                own = list(compress(known, among))
                more = [*own, *[None] * (len(asked) - len(own))]
            out = added(out, more)
        return None, *out


def spoiled(gradients: Gradients, lost: Tensor, matrices: Collection[int] = (0,)) -> Gradients:
    """Gradients, NaN where one of these problems (B,) has a part in them; which are matrices."""

    def spoil(gradient: Tensor, rank: int) -> Tensor:
        if gradient.layout != torch.strided:
            return gradient * torch.where(lost.any(), torch.nan, 1.0).to(gradient.dtype)
        own = gradient.dim() > rank and len(gradient) == len(lost)
        mask = lost.reshape(-1, *[1] * (gradient.dim() - 1)) if own else lost.any()
        return torch.where(mask, torch.nan, gradient)

    return [
        None if gradient is None else spoil(gradient, 2 if place in matrices else 1)
        for place, gradient in enumerate(gradients)
    ]


def _detached(gradients: Gradients) -> Gradients:
    return [gradient if gradient is None else gradient.detach() for gradient in gradients]


def _differentiably(
    solved: _Solved,
    inputs: Sequence[Tensor],
    asked: Sequence[bool],
    v: Tensor | None,
    w: Tensor | None,
) -> Gradients:
    """Gradients with derivatives of their own, past what was derived from the tensors."""
    with torch.enable_grad():
        # one may be derived from another, like both sides of a box from one number: a view of each
        # keeps what flows into the one out of the other
        views = {id(t): t.view_as(t) for t in solved.given if t.layout == torch.strided}
        own = [views[id(t)] for t in tensors_in(solved.arguments[:2], sparse=False)]
        objective, constraint = filled(solved.arguments[:2], iter(own))
        arguments = solved.arguments._replace(objective=objective, constraint=constraint)
        task = bind(arguments, solved.settings).checked()
        at = solved.layout.seen(solved.found)
        problem, _, place = centred(task.objective, task.constraint, at)
        with torch.no_grad():
            value, _, face = problem.face_at(at)
        moved, value_there = attach(problem, at, face, value)
        assert value_there is not None
        outputs = [(place(moved), v), (value_there, w)]
    wanted: dict[int, int] = {}  # by identity, as a tensor may be the argument of several things
    places = {id(t) for t in solved.given}
    for i, tensor in enumerate(inputs):
        if asked[i] and id(tensor) in places:
            wanted.setdefault(id(tensor), i)
    out: Gradients = [None] * len(inputs)
    if not wanted:
        return out
    pairs = [(output, each) for output, each in outputs if each is not None]
    gradients = torch.autograd.grad(
        [output for output, _ in pairs],
        [views.get(key, inputs[i]) for key, i in wanted.items()],
        [each for _, each in pairs],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    for i, gradient in zip(wanted.values(), gradients, strict=True):
        out[i] = gradient
    return out
