"""How far an answer is from another one, how long a call takes, and what it leaves in memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dfwlayer_bench.systems.base import Answer, timed

__all__ = ["cosine", "held_bytes", "relative", "typical_seconds"]

LONG = 2.0  # seconds; a call longer than this is timed once after the first
CALLS = 3

Result = TypeVar("Result")


def relative(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖, or ‖found‖ where the exact answer is zero."""
    size = float(exact.norm())
    return float((found - exact).norm()) / (size if size > 0 else 1.0)


def cosine(found: Tensor, exact: Tensor) -> float | None:
    """Of the angle between them, None where one of them is zero."""
    both = float(found.norm() * exact.norm())
    return float(found @ exact) / both if both > 0 else None


def typical_seconds(call: Callable[[], Answer], device: torch.device) -> tuple[Answer, float]:
    """The answer, and the median time of a few calls after a first one.

    Where a call is long, the second one alone tells: the first may have loaded or compiled code.
    """
    answer, first = timed(call, device)
    if first > LONG:
        _, second = timed(call, device)
        if second > LONG:
            return answer, second
    return answer, statistics.median(timed(call, device)[1] for _ in range(CALLS))


def held_bytes(call: Callable[[], Result], own: Iterable[Tensor] = ()) -> tuple[Result, int]:
    """What ``call`` returns, and the bytes of tensors it made that live on because of that.

    For a forward pass that is what the backward pass will need. The tensors in ``own``, which
    were there before, do not count.
    """
    watch = _Allocations(own)
    with watch:
        result = call()
    return result, watch.held()


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weak references to the memory of every result of an operation."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self._own:
                    # the reference keeps the id from being used again, not the memory
                    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._found.setdefault(reference.cdata, (reference, storage.nbytes()))
        return out

    def held(self) -> int:
        """Bytes of the memory that is still there."""
        total = 0
        for reference, size in self._found.values():
            if not reference.expired():  # type: ignore[no-untyped-call]
                total += size
        return total
