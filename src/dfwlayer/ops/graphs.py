"""CUDA graphs of whole calculations, so that a GPU does not wait for Python between kernels."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["clear_graphs", "may_record", "replay"]

Calculation = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]

KEPT = 16  # graphs; each holds a copy of its inputs
LARGEST = 2**28  # bytes of input; beyond it kernels take longer than it takes to launch them
WARM_UP = 1  # calls that are not recorded: a solve that is made once is not worth a graph


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    packs: dict[torch.dtype, Tensor]  # all results of a dtype, flat, one after the other
    shapes: list[tuple[torch.dtype, torch.Size]]

    def results(self) -> tuple[Tensor, ...]:
        """The results in memory of their own, with one copy for each dtype."""
        pieces = {
            dtype: iter(
                torch.split(pack.clone(), [s.numel() for d, s in self.shapes if d == dtype])
            )
            for dtype, pack in self.packs.items()
        }
        return tuple(next(pieces[dtype]).view(shape) for dtype, shape in self.shapes)


_recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
_calls: OrderedDict[Hashable, int] = OrderedDict()
_lock = threading.Lock()


def may_record(tensors: Sequence[Tensor]) -> bool:
    """Whether a calculation on these tensors may become a graph."""
    return (
        bool(tensors)
        and all(t.is_cuda and t.layout == torch.strided and t.numel() for t in tensors)
        and sum(t.numel() * t.element_size() for t in tensors) <= LARGEST
        and not torch.cuda.is_current_stream_capturing()
    )


def replay(
    name: Hashable, calculate: Calculation, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """``calculate(tensors)`` from its recording, None before there is one or where none may be.

    The first call with a name and shapes is only counted, the second one records, later ones
    replay. A calculation must depend on nothing but the tensors and what the name tells, and
    never wait for the GPU.
    """
    if not may_record(tensors):
        return None
    device = tensors[0].device
    # a recording has one set of inputs, so threads and streams have their own
    stream = torch.cuda.current_stream(device).cuda_stream
    shapes = tuple((t.shape, t.dtype) for t in tensors)
    key = (name, shapes, device, stream, threading.get_ident())
    with _lock:
        found = _recordings.get(key)
        if found is not None:
            _recordings.move_to_end(key)
        else:
            calls = _calls.pop(key, 0)
            _calls[key] = calls + 1
            while len(_calls) > 8 * KEPT:
                _calls.popitem(last=False)
            if calls < WARM_UP:
                return None
    if found is None:
        try:
            found = _record(calculate, tensors)
        except RuntimeError as error:  # the calculation itself will do
            warnings.warn(f"CUDA graph of {key[0]} was not recorded: {error}", stacklevel=2)
            with _lock:
                _calls[key] = -sys.maxsize
            return None
        with _lock:
            _recordings[key] = found
            while len(_recordings) > KEPT:
                _recordings.popitem(last=False)
    else:
        torch._foreach_copy_(found.inputs, list(tensors))
    found.graph.replay()
    return found.results()


def clear_graphs() -> None:
    """Give back the GPU memory that recordings hold."""
    with _lock:
        _recordings.clear()
        _calls.clear()


def _record(calculate: Calculation, tensors: Sequence[Tensor]) -> _Recording:
    inputs = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(tensors[0].device))
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(2):  # libraries set themselves up in their first calls
            calculate(inputs)
    torch.cuda.current_stream(tensors[0].device).wait_stream(side)
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = calculate(inputs)
        packs = {
            dtype: torch.cat([t.reshape(-1) for t in outputs if t.dtype == dtype])
            for dtype in dict.fromkeys(t.dtype for t in outputs)
        }
    return _Recording(graph, inputs, packs, [(t.dtype, t.shape) for t in outputs])
