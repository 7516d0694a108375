"""What was made from a tensor, kept for as long as that tensor is there and has not changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["Kept"]

_T = TypeVar("_T")


class Kept(Generic[_T]):
    """By tensor; neither the tensor nor, without it, what was made of it is kept alive.

    A change in place is told by torch's version counter. What bypasses that (``.data``) goes
    unseen, so what is kept should not depend on values alone that matter for the result.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, _T]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def of(self, tensor: Tensor, make: Callable[[], _T]) -> _T:
        """What was made of it before, or is made now."""
        if tensor.is_inference():  # has no version counter
            return make()
        key, version = id(tensor), tensor._version
        known = self._found.get(key)
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        value = make()
        self._found[key] = (
            weakref.ref(tensor, lambda _: self._found.pop(key, None)),
            version,
            value,
        )
        return value
