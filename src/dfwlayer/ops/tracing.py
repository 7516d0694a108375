"""Whether operations are being recorded, and what to say to tools that cannot record a solve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "as_input",
    "deferred",
    "eager_now",
    "may_be_fake",
    "real_tensors",
    "recorded",
    "recording",
    "refuse_capture",
    "refuse_recording",
    "refuse_tracing",
    "undisturbed",
]

_F = TypeVar("_F", bound=Callable[..., None])

_RECORDERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)
# by names of their own, which are found sooner
_in_dynamo, _in_compiler = torch.compiler.is_dynamo_compiling, torch.compiler.is_compiling
_compiler = torch.compiler  # whose flag is what the latter returns, but for torch.jit.script
_modes, _is_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
# of make_fx(pre_dispatch=True), whose key is on as long as there are any
_included, _EARLY = (
    torch._C._dispatch_tls_is_dispatch_key_included,
    torch._C.DispatchKey.PreDispatch,
)
_here = threading.local()  # .depth: operators of ours we are inside of; .recorded: see there


def recording() -> bool:
    """Whether operations are recorded, by torch.compile, torch.export, make_fx or a fake mode."""
    if _in_dynamo():
        return True
    if not (_modes() or _included(_EARLY) or _compiler._is_compiling_flag):
        return False  # asked in every constructor
    return _recorders_on() and not getattr(_here, "depth", 0)


def as_input(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number that may change from call to call, as a tensor () where operations are recorded."""
    if isinstance(value, Tensor) or not recording():
        return value
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full((), value, dtype=wide, device=like.device)


def undisturbed() -> bool:
    """Whether nothing at all follows what is called: neither of these nor torch.jit.trace."""
    if _in_dynamo():
        return False
    return not (_modes() or _included(_EARLY) or _compiler._is_compiling_flag or _is_tracing())


def _recorders_on() -> bool:
    on = any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDERS)
    return on or _in_compiler() or _included(_EARLY)


class eager_now:  # noqa: N801
    """Inside of an operator of ours, where what is called is done and not recorded."""

    def __enter__(self) -> None:
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1


def may_be_fake() -> bool:
    """Whether tensors may be fake ones: while recording, or where an operator says its shapes."""
    return bool(getattr(_here, "depth", 0)) or getattr(_here, "recorded", False) or recording()


@contextmanager
def recorded() -> Iterator[None]:
    """Where operations may be recorded, as nothing in here asks a tensor for its values."""
    before = getattr(_here, "recorded", False)
    _here.recorded = True
    try:
        yield
    finally:
        _here.recorded = before


@contextmanager
def real_tensors() -> Iterator[None]:
    """Where tensors that are made from numbers have values, whatever is recorded or transformed."""
    with ExitStack() as left:
        if torch._C._len_torch_dispatch_stack():
            left.enter_context(_disable_current_modes())
        if torch._C._are_functorch_transforms_active():
            # what a transform makes has no storage, from which PyTorch 2.6 reads a list
            left.enter_context(torch._C._DisableFuncTorch())
        yield


def deferred(check: _F) -> _F:
    """A ``__post_init__`` that waits while operations are recorded.

    The operator that is recorded makes the object again, and then runs it: what it checks is
    checked then, with values where there are some.
    """

    @wraps(check)
    def wait(self: Any, *given: Any) -> None:
        if recording() and not getattr(_here, "recorded", False):
            object.__setattr__(self, "unchecked", True)
        else:
            check(self, *given)

    wait.deferred = True  # type: ignore[attr-defined]
    return wait  # type: ignore[return-value]


def refuse_recording(by: str) -> NoReturn:
    """Raise for a tool that records operations: it would keep the steps one set of data took."""
    raise RuntimeError(
        f"dfwlayer cannot be recorded by {by}: the number of its steps and the coordinates it "
        "works on depend on the data, so that the recording would hold the solution of one problem "
        "as a constant. What works is to call the model in eager mode, torch.compile, also with "
        "fullgraph=True, and torch.export for programs that run in Python. For ONNX, AOTInductor "
        "and TorchScript put layer.deploy(max_steps=k) in the layer's place: a fixed number of "
        "plain tensor operations, feasible whatever k."
    )


def refuse_capture() -> None:
    """Raise while the caller captures a CUDA graph, in which nothing can be read."""
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialised and torch.cuda.is_current_stream_capturing():
        refuse_recording("a CUDA graph capture")


def refuse_tracing() -> None:
    """Raise inside of torch.jit.trace."""
    if _is_tracing():
        refuse_recording("torch.jit.trace, which torch.onnx.export with dynamo=False uses")
