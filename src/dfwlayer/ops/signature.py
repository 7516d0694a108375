"""What the calls of a loop have in common, so that it is checked in the first one only.

Two calls with one signature differ in the values of their tensors, and in nothing else that a check
of types, shapes, dtypes, devices, numbers and settings could see. They record gradients in the same
ones of their tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from dfwlayer.ops.tensors import PLAIN, field_names

__all__ = ["Known", "Signature", "signature_of"]

_T = TypeVar("_T")


class Signature:
    """Of a call.

    Attributes:
        key: What the calls have in common.
        tensors: Of this call, as `dfwlayer.ops.tensors.tensors_in` finds them.
        versions: Of these, as `dfwlayer.ops.tensors.versions_of` tells them.
        numbers: The second object has no tensors.
        kept: What others have found out about calls with this key, by names of their own, so that
            the key is looked up once a call.

    """

    __slots__ = ("kept", "key", "numbers", "tensors", "versions")

    def __init__(
        self,
        key: tuple[Hashable, ...],
        tensors: list[Tensor],
        versions: list[int],
        numbers: bool,
    ) -> None:
        self.key, self.tensors, self.versions, self.numbers = key, tensors, versions, numbers
        self.kept: dict[str, Any] = {}


def signature_of(first: Any, second: Any, settings: tuple[Any, ...]) -> Signature | None:
    """That of two dataclasses and some settings; None unless they hold plain tensors and numbers.

    Tensors of another type have answers of their own to any question, and so have those whose sign
    is still to be changed; objects other than numbers, strings and None may change. Equal values of
    different types, like 1 and True, differ.
    """
    kinds = tuple(map(type, settings))
    if not PLAIN.issuperset(kinds):
        return None
    key: list[Hashable] = [settings, kinds]
    tensors: list[Tensor] = []
    versions: list[int] = []
    before, recording = 0, torch.is_grad_enabled()
    for part in (first, second):
        whole: type = type(part)
        own, names = getattr(part, "__dict__", None), field_names(whole)
        if own is None or len(own) != len(names):  # it holds more than its fields, or has none
            return None
        before = len(tensors)
        key.append(whole)
        for name in names:
            value = own.get(name, key)
            kind: type = type(value)
            if kind is Tensor or kind is Parameter:
                if value.is_neg():
                    return None
                tensors.append(value)
                versions.append(0 if value.is_inference() else value._version)
                asked = value.requires_grad and recording
                key += (value.shape, value.dtype, value.layout, value.device, asked)
            elif kind in PLAIN:
                key += (kind, value)
            else:
                return None
    return Signature(tuple(key), tensors, versions, len(tensors) == before)


class Known(Generic[_T]):
    """What was found out about the last signatures, at most so many of them."""

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self.found: dict[Hashable, _T] = {}
        self.get = self.found.get

    def keep(self, key: Hashable, found: _T) -> None:
        """For the calls to come."""
        if len(self.found) >= self.most:
            self.found.clear()
        self.found[key] = found
