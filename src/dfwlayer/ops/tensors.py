"""The tensors inside of dataclasses and containers: found, replaced, and what is there beside."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "PLAIN",
    "SEQUENCES",
    "added",
    "field_names",
    "fields_of",
    "filled",
    "names_of",
    "static_of",
    "tensors_in",
    "unwrapped",
    "versions_in",
    "versions_of",
]


SEQUENCES = (tuple, list)
PLAIN = frozenset((float, int, bool, str, type(None)))  # without tensors in them


def fields_of(node: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields, none for other objects."""
    kind = node if isinstance(node, type) else type(node)
    if torch.compiler.is_dynamo_compiling():
        listed = names_of(kind)
        return tuple(listed.split(",")) if listed not in ("", "?") else ()
    return field_names(kind)


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """The same of a class, for code that no compiler follows."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def names_of(kind: type) -> str:
    """The names of a dataclass's fields, "?" for another class; compilers take it as constant."""
    return ",".join(field_names(kind)) if is_dataclass(kind) else "?"


# what torch.compiler.assume_constant_result does; that would load the compiler
names_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tensors_in(node: Any, sparse: bool = True) -> list[Tensor]:
    """The tensors in a dataclass or container, in a fixed order; transforms know no sparse ones."""
    found: list[Tensor] = []
    _collect(node, found)
    return found if sparse else [t for t in found if t.layout == torch.strided]


def _collect(node: Any, found: list[Tensor]) -> None:
    kind: type = type(node)
    if kind in PLAIN:
        return
    if isinstance(node, Tensor):
        found.append(node)
    elif isinstance(node, tuple | list):
        for part in node:
            _collect(part, found)
    elif isinstance(node, dict):
        for part in node.values():
            _collect(part, found)
    elif not isinstance(node, type):
        for name in field_names(kind):
            part = getattr(node, name)
            if isinstance(part, Tensor):
                found.append(part)
            elif part is not None:
                _collect(part, found)


def added(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients for the same tensors, None for none, added one by one."""
    pairs = zip(a, b, strict=True)
    return [own if other is None else other if own is None else own + other for own, other in pairs]


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each of them was changed in place."""
    return [0 if t.is_inference() else t._version for t in tensors]


def versions_in(parts: Iterable[Any]) -> list[int]:
    """How often each of `tensors_in` was changed in place; asked in every solve, so in one pass."""
    found: list[int] = []
    _count(parts, found)
    return found


def _count(parts: Iterable[Any], found: list[int]) -> None:
    for part in parts:
        kind: Any = type(part)
        if kind in PLAIN:
            continue
        if isinstance(part, Tensor):
            found.append(0 if part.is_inference() else part._version)
        elif isinstance(part, SEQUENCES):
            _count(part, found)
        elif isinstance(part, dict):
            _count(part.values(), found)
        else:
            _count([getattr(part, name) for name in field_names(kind)], found)


def filled(node: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy with other tensors in place of those that are not sparse, in the same order.

    What an object has cached is not copied.
    """
    # compilers follow numbers, which have no attributes; that of PyTorch 2.6 knows no set of types
    if node is None or isinstance(node, (float, int, str)):
        return node
    if isinstance(node, Tensor):
        return next(tensors) if node.layout == torch.strided else node
    if isinstance(node, SEQUENCES):
        parts = [filled(part, tensors) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
    if isinstance(node, dict):
        return {key: filled(part, tensors) for key, part in node.items()}
    if isinstance(node, type) or not hasattr(node, "__dataclass_fields__"):
        return node
    copy = object.__new__(type(node))
    for name in fields_of(node):  # the constructor's checks were passed before
        object.__setattr__(copy, name, filled(getattr(node, name), tensors))
    return copy


def static_of(node: Any) -> Hashable:
    """What tells two such objects apart beside the values of their tensors."""
    if isinstance(node, Tensor):
        return Tensor
    if isinstance(node, tuple | list):
        return type(node), *map(static_of, node)
    if isinstance(node, type) or not hasattr(node, "__dataclass_fields__"):
        own: Hashable = node
        return own
    return type(node), *(static_of(getattr(node, name)) for name in fields_of(node))


def unwrapped(t: Tensor) -> Tensor:
    """The plain tensor under all levels of torch.func, with the dimensions they map over."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t
