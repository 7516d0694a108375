"""Tools that record operations: compilers are passed by, the others are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

import torch

__all__ = ["refuse_capture", "refuse_recording", "uncompiled"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# what torch.compile(..., fullgraph=True) and torch.export(..., strict=True) say; before 2.8 there
# is no place for a message
_REASON = (
    {
        "msg": "dfwlayer.solve cannot be part of one graph, as its number of steps depends on "
        "the data. Compile without fullgraph=True: it then runs between two graphs. It cannot be "
        "exported; plain eager calls and torch.compile without fullgraph=True work."
    }
    if torch.__version__ >= "2.8"
    else {}
)
_RECORDERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def refuse_recording(by: str) -> NoReturn:
    """Raise for a tool that records operations: it would keep the steps one set of data took."""
    raise RuntimeError(
        f"dfwlayer cannot be recorded by {by}: the number of its steps and the coordinates it "
        "works on depend on the data, so that the recording would hold the solution of one problem "
        "as a constant. What works is to call the model as it is, in eager mode, and torch.compile "
        "without fullgraph=True. To export a model, export what comes before the layer and what "
        "comes after it."
    )


def refuse_capture() -> None:
    """Raise while the caller captures a CUDA graph, in which nothing can be read."""
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialised and torch.cuda.is_current_stream_capturing():
        refuse_recording("a CUDA graph capture")


def _refuse_recorders() -> None:
    """Raise inside of the tools that record operations; they are all asked for in a microsecond."""
    if torch._C._is_tracing():
        refuse_recording("torch.jit.trace, which torch.onnx.export with dynamo=False uses")
    modes = torch._C._len_torch_dispatch_stack()
    if modes and any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDERS):
        refuse_recording("torch.export, torch.onnx.export, make_fx or fake tensors")
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():  # type: ignore[no-untyped-call]
        refuse_recording("make_fx(..., pre_dispatch=True)")


def _refuse_scripting() -> NoReturn:
    """What torch.jit.script calls before it looks at a function or a module."""
    refuse_recording("torch.jit.script")


def uncompiled(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Leave a function to eager mode inside of torch.compile, and refuse to be recorded.

    torch.compiler.disable does the first, but it loads the compiler, which takes seconds; here it
    is called only once somebody has loaded it.
    """
    eager: Callable[_P, _T] | None = None

    def plain(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        _refuse_recorders()
        return fn(*args, **kwargs)

    @wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal eager
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(**_REASON)
        if "torch._dynamo" not in sys.modules:
            _refuse_recorders()
            return fn(*args, **kwargs)
        if eager is None:
            eager = torch.compiler.disable(plain)  # type: ignore[no-untyped-call]
        return eager(*args, **kwargs)

    call.__prepare_scriptable__ = _refuse_scripting  # type: ignore[attr-defined]
    return call
