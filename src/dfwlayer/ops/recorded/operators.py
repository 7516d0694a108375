"""The operators of torch by which calls of this library are recorded, and their derivatives.

``dfwlayer::call`` runs a function (`Call`) on real tensors. It returns the parts of the result and
a ticket, an empty tensor whose storage tells what is kept for the gradient: as long as somebody
holds the ticket, the graph that autograd made of the call is there, and the gradient is what it is
in eager mode. Without it (an activation that was moved or recomputed, a torch.func transform, a
derivative of a derivative) the gradient is computed from the solution, which is known; nothing is
solved again.

``dfwlayer::derived`` is everything that follows from a call. Its text is one of

    ('carry', maps, call)          (parts, tensors) ↦ parts, differentiable in the tensors
    ('pull', given, wanted, of)    (gradients in some outputs, inputs) ↦ gradients in some inputs
    ('map', dims, of)              the function, mapped over dimensions of its inputs

so that the derivative of a `derived` is another, and so is what torch.func.vmap makes of one.

``dfwlayer::judged`` stands beside a result that the compiler has seen through. It makes the call if
a flag says that its values are not what they should be, for what that has to say about them, and
returns 0, which the graph adds to the result.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.recorded.calls import CALLS, Call, called
from dfwlayer.ops.tracing import eager_now

__all__ = [
    "CALL",
    "DERIVED",
    "UNSAFE",
    "Operator",
    "judged",
    "judged_mapped",
    "judged_shape",
]

Function = Callable[..., Sequence[Tensor]]
Dims = tuple[int | None, ...]

# where torch knows the tag, CUDA graphs leave the operators out; a graph with a tensor of the CPU
# is never one, so elsewhere the ticket is there
UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)

# what a thread looks at by itself, outside of operators, modes and transforms
_OUTSIDE = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)


# ---------------------------------------------------------------------------------------------
# what is kept for a gradient


class _Kept(NamedTuple):
    """How the gradient of a call is had, from those in its parts to those in its tensors."""

    pull: Callable[[Sequence[int], Sequence[Tensor], Sequence[int]], Sequence[Tensor | None]]
    needs: Sequence[bool]  # to which tensors
    ticket: weakref.ref[Any]


_kept: dict[int, _Kept] = {}  # by the storage of the ticket


def _keep(ticket: Tensor, pull: Callable[..., Any], needs: Sequence[bool]) -> None:
    storage = ticket.untyped_storage()
    key = storage._cdata
    gone = weakref.ref(storage, lambda _: _kept.pop(key, None))
    _kept[key] = _Kept(pull, needs, gone)


def _ticket(tensors: Sequence[Tensor]) -> Tensor:
    if tensors and UNSAFE is not None:
        return torch.empty(0, device=tensors[0].device)
    return torch.empty(0)


@contextmanager
def _with_autograd() -> Iterator[None]:
    """As outside of an operator, inside of which autograd does not look."""
    with torch.inference_mode(False), torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
        yield


# ---------------------------------------------------------------------------------------------
# the call


def _call(tensors: list[Tensor], needs: list[bool], maps: str, text: str) -> list[Tensor]:
    """With real tensors."""
    with _with_autograd():
        return _work(tensors, needs, maps, text)


def _work(tensors: list[Tensor], needs: list[bool], maps: str, text: str) -> list[Tensor]:
    """Where autograd looks."""
    ticket = _ticket(tensors)
    keep = maps == "()" and True in needs
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(keep)
    try:
        with eager_now():
            if not keep:
                own = [t.detach() if t.requires_grad else t for t in tensors]
                parts = _mapped(lambda *own: _run(text, own), _literal(maps))(*own)
                return [*_separate(parts, tensors), ticket]
            return [*_with_graph(ticket, tensors, needs, text), ticket]
    finally:
        torch._C._set_grad_enabled(before)


def _with_graph(
    ticket: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool], text: str
) -> list[Tensor]:
    """The parts of a call, of which what a gradient needs is kept."""
    if _named(text).direct is not None:
        what, args, named = called(text, [t.detach() if t.requires_grad else t for t in tensors])
        assert what.direct is not None
        direct = what.direct(*args, **named)
        if direct is not None:
            x, back = direct
            every = range(len(tensors))
            _keep(ticket, lambda _, v, wanted: back(v[0], [i in wanted for i in every]), needs)
            return [x]
    leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    what, args, named = called(text, leaves)
    parts = what.parts(what.run(*args, **named))
    smooth = parts[: what.smooth]

    def pull(given: Sequence[int], v: Sequence[Tensor], wanted: Sequence[int]) -> Any:
        known = torch.autograd.grad(
            [smooth[i] for i in given],
            [leaves[i] for i in wanted],
            v,
            retain_graph=True,
            allow_unused=True,
        )
        found = dict(zip(wanted, known, strict=True))
        return [found.get(i) for i in range(len(leaves))]

    _keep(ticket, pull, needs)
    fresh = [t.detach().clone(memory_format=torch.contiguous_format) for t in smooth]
    return [*fresh, *_separate(parts[what.smooth :], tensors)]


def _run(text: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    what, args, named = called(text, tensors)
    return tuple(what.parts(what.run(*args, **named)))


def _separate(parts: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results in memory of their own, as those of an operator have to be."""
    taken: set[int] | None = None
    out = []
    for part in parts:
        t = part.detach() if part.requires_grad else part
        if not t.is_contiguous():
            t = t.contiguous()
        elif t._is_view():
            if taken is None:
                taken = {each.untyped_storage()._cdata for each in inputs}
            t = t.clone() if t.untyped_storage()._cdata in taken else t
        elif any(t is each for each in inputs):
            t = t.clone()
        out.append(t)
    return out


def _mapped(f: Function, levels: Sequence[Dims], first: int = 0) -> Function:
    """Mapped over dimensions of its inputs, the innermost level first.

    Before them come ``first`` inputs that are mapped over their first dimension.
    """
    for dims in levels:
        f = torch.func.vmap(f, in_dims=((0,) * first + dims), out_dims=0)
    return f


def _call_shapes(tensors: list[Tensor], _: list[bool], maps: str, text: str) -> list[Tensor]:
    with eager_now():
        levels, sizes, own = _literal(maps), [], list(tensors)
        for dims in reversed(levels):
            sizes.append(_size(own, dims))
            own = _inside(own, dims)
        what, args, named = called(text, own)
        parts = what.shapes(*args, **named)
        return [*(t.new_empty((*sizes, *t.shape)) for t in parts), _ticket(tensors)]


def _size(tensors: Sequence[Tensor], dims: Dims) -> int:
    return next(t.shape[dim] for t, dim in zip(tensors, dims, strict=True) if dim is not None)


def _inside(tensors: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    """What a mapped function sees."""
    pairs = zip(tensors, dims, strict=True)
    return [t if dim is None else t.select(dim, 0) for t, dim in pairs]


def _call_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, _, maps, text = inputs
    smooth = _smooth(text)
    ctx.maps, ctx.text, ctx.smooth, ctx.count = maps, text, smooth, len(tensors)
    ctx.save_for_backward(*tensors, *output[:smooth], output[-1])
    ctx.mark_non_differentiable(*output[smooth:])
    ctx.set_materialize_grads(False)


def _call_backward(
    ctx: Any, needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    *saved, ticket = ctx.saved_tensors
    tensors, found = saved[: ctx.count], saved[ctx.count :]
    given = tuple(i for i in range(ctx.smooth) if grads[i] is not None)
    wanted = tuple(ctx.smooth + i for i, need in enumerate(needs) if need)
    if not given or not wanted:
        return [None] * len(tensors)
    carry = ("carry", _literal(ctx.maps), ctx.text)
    # the solution is known, and what it depends on is in the tensors alone
    inputs = [*(grads[i] for i in given), *(t.detach() for t in found), *tensors]
    pulled = torch.ops.dfwlayer.derived(inputs, ticket, repr(("pull", given, wanted, carry)))
    each = iter(pulled)
    return [next(each) if need else None for need in needs]


def _call_mapped(
    _: Any,
    in_dims: tuple[Any, ...],
    tensors: list[Tensor],
    needs: list[bool],
    maps: str,
    text: str,
) -> tuple[list[Tensor], list[int | None]]:
    levels = (*_literal(maps), tuple(in_dims[0]))
    out = torch.ops.dfwlayer.call(tensors, [False] * len(needs), repr(levels), text)
    return out, [*[0] * (len(out) - 1), None]


# ---------------------------------------------------------------------------------------------
# what is said of values that a compiler has not looked at


def judged(suspect: Tensor, tensors: list[Tensor], maps: str, text: str) -> Tensor:
    """With real tensors."""
    if bool(suspect.any()):
        torch.ops.dfwlayer.call(tensors, [False] * len(tensors), maps, text)
    return judged_shape(suspect, tensors, maps, text).zero_()


def judged_shape(_: Tensor, tensors: list[Tensor], __: str, ___: str) -> Tensor:
    """Of what is added."""
    return tensors[0].new_empty(())


def judged_mapped(
    _: Any,
    in_dims: tuple[Any, ...],
    suspect: Tensor,
    tensors: list[Tensor],
    maps: str,
    text: str,
) -> tuple[Tensor, None]:
    """For all problems at once."""
    levels = (*_literal(maps), tuple(in_dims[1]))
    return torch.ops.dfwlayer.judged(suspect, tensors, repr(levels), text), None


# ---------------------------------------------------------------------------------------------
# what follows from it


def _derived(inputs: list[Tensor], ticket: Tensor | None, text: str) -> list[Tensor]:
    with _with_autograd():
        return _work_derived(inputs, ticket, text)


def _work_derived(inputs: list[Tensor], ticket: Tensor | None, text: str) -> list[Tensor]:
    program = _literal(text)
    before = torch.is_grad_enabled()
    with eager_now():
        plain = [t.detach() if t.requires_grad else t for t in inputs]
        kept = None if ticket is None else _kept.get(ticket.untyped_storage()._cdata)
        try:  # by these calls and not in a context, as compiled programs come here in every step
            torch._C._set_grad_enabled(False)
            found = None if kept is None else _redeemed(kept, program, plain)
            if found is None:
                torch._C._set_grad_enabled(True)
                found = _function(program)(*plain)
        finally:
            torch._C._set_grad_enabled(before)
        return _separate(found, plain)


def _redeemed(kept: _Kept, program: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The gradient that eager mode has, None where another one is asked for; without a graph."""
    _, given, wanted, carry = program
    smooth = _smooth(carry[2])
    own = [i - smooth for i in wanted]
    if not all(kept.needs[i] for i in own):
        return None
    tensors = inputs[len(given) + smooth :]
    found = kept.pull(given, inputs[: len(given)], own)
    return [torch.zeros_like(tensors[i]) if (g := found[i]) is None else g for i in own]


def _function(program: Any) -> Function:
    """What a text stands for, on real tensors and inside of transforms."""
    match program:
        case ("carry", levels, text):
            smooth = _smooth(text)

            def carried(*inputs: Tensor) -> tuple[Tensor, ...]:
                what, args, named = called(text, inputs[smooth:])
                return tuple(what.again(inputs[:smooth], *args, **named))

            return _mapped(carried, levels, smooth)
        case ("map", dims, of):
            return _mapped(_function(of), (dims,))
        case ("pull", given, wanted, of):
            f = _function(of)

            def pulled(*inputs: Tensor) -> Sequence[Tensor]:
                at = inputs[len(given) :]

                def some(*moving: Tensor) -> tuple[Tensor, ...]:
                    own = list(at)
                    for i, tensor in zip(wanted, moving, strict=True):
                        own[i] = tensor
                    out = f(*own)
                    return tuple(out[i] for i in given)

                pull: Any = torch.func.vjp(some, *(at[i] for i in wanted))[1]
                grads: Sequence[Tensor] = pull(tuple(inputs[: len(given)]))
                return grads

            return pulled
    raise ValueError(f"text: expected what an operator of dfwlayer is given, found {program!r}")


def _derived_shapes(inputs: list[Tensor], _: Tensor | None, text: str) -> list[Tensor]:
    return _shapes(_literal(text), inputs)


def _shapes(program: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    match program:
        case ("map", dims, of):
            size = _size(inputs, dims)
            return [t.new_empty((size, *t.shape)) for t in _shapes(of, _inside(inputs, dims))]
        case ("pull", given, wanted, _):
            at = inputs[len(given) :]
            return [at[i].new_empty(at[i].shape) for i in wanted]
    raise ValueError(f"text: expected what an operator of dfwlayer is given, found {program!r}")


def _derived_saves(ctx: Any, inputs: tuple[Any, ...], _: list[Tensor]) -> None:
    ctx.text = inputs[2]
    ctx.save_for_backward(*inputs[0])
    ctx.set_materialize_grads(False)


def _derived_backward(
    ctx: Any, needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    of = _literal(ctx.text)
    given = tuple(i for i, g in enumerate(grads) if g is not None)
    known = _known(of)
    needs = [need and i not in known for i, need in enumerate(needs)]
    wanted = tuple(i for i, need in enumerate(needs) if need)
    if not given or not wanted:
        return [None] * len(needs)
    inputs = [*(grads[i] for i in given), *ctx.saved_tensors]
    program = ("pull", given, wanted, of)
    each = iter(torch.ops.dfwlayer.derived(inputs, None, repr(program)))
    return [next(each) if need else None for need in needs]


def _known(program: Any) -> set[int]:
    """The inputs that are parts of a known result: what they depend on is in the others."""
    match program:
        case ("carry", _, text):
            return set(range(_smooth(text)))
        case ("pull", given, _, of):
            return {len(given) + i for i in _known(of)}
    return _known(program[2])  # of what is mapped


def _derived_mapped(
    _: Any,
    in_dims: tuple[Any, ...],
    inputs: list[Tensor],
    __: Tensor | None,
    text: str,
) -> tuple[list[Tensor], list[int]]:
    program = ("map", tuple(in_dims[0]), _literal(text))
    out = torch.ops.dfwlayer.derived(inputs, None, repr(program))
    return out, [0] * len(out)


@lru_cache(maxsize=1024)
def _literal(text: str) -> Any:
    return ast.literal_eval(text)


@lru_cache(maxsize=1024)
def _named(text: str) -> Call:
    """The function of a call."""
    name: str = ast.literal_eval(text)[1][0][1]
    return CALLS[name]


def _smooth(text: str) -> int:
    """How many parts of a call's result have gradients."""
    return _named(text).smooth


class Operator(NamedTuple):
    """What torch has to know of an operator."""

    name: str
    kernel: Callable[..., list[Tensor]]  # below autograd
    work: Callable[..., list[Tensor]]  # the same, where autograd looks
    shapes: Callable[..., list[Tensor]]
    saves: Callable[..., None]
    backward: Callable[..., list[Tensor | None]]
    mapped: Callable[..., Any]


CALL = Operator("call", _call, _work, _call_shapes, _call_saves, _call_backward, _call_mapped)
DERIVED = Operator(
    "derived",
    _derived,
    _work_derived,
    _derived_shapes,
    _derived_saves,
    _derived_backward,
    _derived_mapped,
)
