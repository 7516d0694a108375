"""Functions that are called as they are, or by an operator where operations are recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from dfwlayer.ops.recorded.text import described, rebuilt
from dfwlayer.ops.tracing import recording, refuse_recording, refuse_tracing, undisturbed

__all__ = ["CALLS", "Call", "called", "recordable", "uncompiled"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

CALLS: dict[str, Call] = {}

Pull = Callable[[Tensor, Sequence[bool]], Sequence[Tensor | None]]
Direct = Callable[..., tuple[Tensor, Pull] | None]
Seen = Callable[..., tuple[Tensor, Tensor | None] | None]

# what a compiler does about the frames of this thread, None for nothing: an optimiser loads it,
# too, and keeping it away takes longer than asking; where PyTorch does not tell, it may be there
_follower: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True
)
_HALF = (torch.float16, torch.bfloat16)

# before 2.8 there is no place for a message
_REASON = (
    {
        "msg": "dfwlayer: this problem holds something that cannot go into one graph: a function "
        "made inside of the compiled code, a callback, a sparse tensor, or an object that is no "
        "dataclass. Make functions outside of what is compiled, with tensors as params of Smooth; "
        "or compile without fullgraph=True: the solve then runs between two graphs."
    }
    if torch.__version__ >= "2.8"
    else {}
)


@dataclass(frozen=True)
class Call:
    """What an operator has to know of a function beside its arguments."""

    run: Callable[..., Any]
    parts: Callable[[Any], Sequence[Tensor]]  # of what it returns, those with gradients first
    smooth: int  # how many have one
    shapes: Callable[..., Sequence[Tensor]]  # the parts without values, from arguments without
    again: Callable[..., Sequence[Tensor]]  # (parts with gradients, …) ↦ these, differentiably
    direct: Direct | None = None


def recordable(
    *,
    shapes: Callable[..., Sequence[Tensor]],
    again: Callable[..., Sequence[Tensor]] | None = None,
    direct: Direct | None = None,
    seen: Seen | None = None,
    parts: Callable[[Any], Sequence[Tensor]] = lambda x: (x,),
    whole: Callable[..., Any] = lambda x: x,
    smooth: int = 1,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let a function be recorded as one operator by torch.compile, torch.export and make_fx.

    Args:
        shapes: A function of the same arguments, whose tensors have no values, that returns tensors
            of the shapes and dtypes of the result's parts.
        again: A function of the parts with gradients, known from a call before, and the arguments
            that returns these parts, differentiable in the arguments; None to call again.
        direct: A function of the arguments that returns a result of one part, and what makes of a
            gradient in it those in the tensors among the arguments, without autograd; or None
            where it does not know.
        seen: A function of the arguments that torch.compile follows in the operator's place: a
            result of one part, and a tensor that is true if the values have to be looked at, or
            None where they need not be. None for both where it does not know.
        parts: The tensors of a result, those with gradients first.
        whole: The result from its parts.
        smooth: How many parts have gradients.

    """

    def decorate(fn: Callable[_P, _T]) -> Callable[_P, _T]:
        name = f"{fn.__module__}:{fn.__qualname__}"

        def once_more(_: Sequence[Tensor], *args: Any, **named: Any) -> Sequence[Tensor]:
            return parts(fn(*args, **named))[:smooth]

        CALLS[name] = Call(fn, parts, smooth, shapes, again or once_more, direct)
        plain = _in_eager_mode(fn)

        @wraps(fn)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if undisturbed() and ("torch._dynamo" not in sys.modules or _follower() is None):
                return fn(*args, **kwargs)
            if recording():
                parts_there = _in_sight(name, seen, args, kwargs)
                if parts_there is None:
                    parts_there = _recorded(name, args, kwargs)
                if parts_there is not None:
                    found: _T = whole(*parts_there)
                    return found
            return plain(*args, **kwargs)

        call.__prepare_scriptable__ = _refuse_scripting  # type: ignore[attr-defined]
        return call

    return decorate


def uncompiled(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Leave a function to eager mode inside of torch.compile, and refuse to be recorded."""
    plain = _in_eager_mode(fn)

    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(**_REASON)
        if recording():
            refuse_recording("torch.export, torch.onnx.export, make_fx or fake tensors")
        return plain(*args, **kwargs)

    call.__prepare_scriptable__ = _refuse_scripting  # type: ignore[attr-defined]
    return call


def _in_eager_mode(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, which no compiler follows and no tracer records."""
    eager: Callable[_P, _T] | None = None

    def plain(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        refuse_tracing()
        return fn(*args, **kwargs)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal eager
        if "torch._dynamo" not in sys.modules:
            return plain(*args, **kwargs)
        if eager is None:
            # without a compiler there is nothing to be said, and saying so would load it
            eager = torch.compiler.disable(plain)  # type: ignore[no-untyped-call]
        return eager(*args, **kwargs)

    return call


def _in_sight(
    name: str, seen: Seen | None, args: tuple[Any, ...], named: dict[str, Any]
) -> list[Tensor] | None:
    """The result by operations that torch.compile follows, None where an operator is needed.

    Values that are not what they should be are left to a second operator, which calls the function
    itself: that has the words for it. An exported program has one operator, which checks.
    """
    if seen is None or _exporting() or not torch.compiler.is_dynamo_compiling():
        return None
    found = seen(*args, **named)
    if found is None:
        return None
    x, suspect = found
    if suspect is not None:
        tensors: list[Tensor] = []
        missing: list[str] = []
        text = described((name, args, named), tensors, missing)
        if len(missing) > 0:
            return None
        plain = [t.detach() for t in tensors]
        x = x + torch.ops.dfwlayer.judged(suspect, plain, "()", text)
    return [x]


def _recorded(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor] | None:
    """The parts, by an operator; torch.compile follows this function.

    None after a break in its graph: eager mode goes on from there.
    """
    tensors: list[Tensor] = []
    missing: list[str] = []
    if named.get("callback") is not None:  # is to be called in the caller's own mode
        missing.append("a callback")
    text = "" if len(missing) > 0 else described((name, args, named), tensors, missing)
    check_recorder()
    if len(missing) > 0:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(**_REASON)
            return None
        raise RuntimeError(
            f"dfwlayer: {missing[0]} cannot go into a recorded graph; call the model in eager "
            "mode, or use torch.compile without fullgraph=True"
        )
    if len(tensors) > 0 and torch.is_autocast_enabled(tensors[0].device.type):
        # the operator runs without autocast, so what that means for a solve is done here
        tensors = [t.float() if t.dtype in _HALF else t for t in tensors]
    # what a gradient needs is kept if one may be asked for, but not for a program on a file
    kept = torch.is_grad_enabled() and not _exporting()
    needs = [kept and t.requires_grad for t in tensors]
    found: list[Tensor] = torch.ops.dfwlayer.call(tensors, needs, "()", text)
    return found[:-1]


def _exporting() -> bool:
    """Whether the program that is made of this will leave the process."""
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    return torch.compiler.is_dynamo_compiling() and _older_exports()


def _older_exports() -> bool:
    """The same asked of PyTorch 2.6, which has no word for it; compilers take it as constant."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().export)


_older_exports._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `names_of`


def check_recorder() -> str:
    """Raise for an exporter that knows no operators but its own; "" otherwise."""
    if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
        refuse_recording("torch.onnx.export")
    return ""


check_recorder._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `names_of`


def _refuse_scripting() -> NoReturn:
    """What torch.jit.script calls before it looks at a function or a module."""
    refuse_recording("torch.jit.script")


def called(text: str, tensors: Sequence[Tensor]) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """The function of a text, and its arguments."""
    name, args, named = rebuilt(text, tensors)
    return CALLS[name], args, named
