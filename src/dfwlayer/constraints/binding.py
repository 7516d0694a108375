"""How a set that is asked on its own is bound first, what a bound one keeps, and copies of sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from dfwlayer.ops.recorded.text import with_checks
from dfwlayer.ops.tensors import fields_of
from dfwlayer.ops.tracing import recording
from dfwlayer.ops.values import on_tensor

if TYPE_CHECKING:
    from dfwlayer.constraints.base import Constraint

__all__ = ["ASKED", "bound_first", "bound_type", "copied", "measured"]

_Set = TypeVar("_Set", bound="Constraint")
_T = TypeVar("_T")

# what a set may be asked before it is bound, and which of the answers are points
POINTS = frozenset(("start", "vertex", "soft_vertex", "retract", "project"))
ASKED = POINTS | {"lowest", "violation", "nearest", "face", "diameter"}


def copied(constraint: Constraint, kind: type[_Set], values: dict[str, Any]) -> _Set:
    """A copy of that type with other values, unchecked and without what it has kept."""
    copy, known = object.__new__(kind), vars(constraint)
    vars(copy).update({name: known[name] for name in fields_of(kind)} | values)
    return copy


@cache
def bound_type(kind: type[_Set]) -> type[_Set]:
    """The type of bound sets of that type, whose methods need not be bound first."""
    if kind.bound:
        return kind
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "bound": True}
    found = ((name, getattr(kind, name)) for name in ASKED)
    direct = {name: ask.__wrapped__ for name, ask in found if hasattr(ask, "__wrapped__")}
    make: Any = type(kind)
    made: type[_Set] = make(kind.__name__, (kind,), names | direct)
    return made


def bound_first(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which a set that is not bound yet asks of one that is."""

    @wraps(method)
    def ask(self: Constraint, *given: Any, **named: Any) -> Any:
        if self.bound:
            return method(self, *given, **named)
        if self.unchecked and not recording():
            self = with_checks(self)
        first = (*given, *named.values())[0]
        like = first if isinstance(first, Tensor) else self.blank(first)
        shape = tuple(like.shape[-self.variable_dims :])
        bound = self.bind(shape, like.dtype, like.device)

        def flat(value: Any) -> Any:
            return on_tensor(value, lambda tensor: tensor.flatten(-len(shape)))

        named = {key: flat(value) for key, value in named.items()}
        found = getattr(bound, name)(*map(flat, given), **named)
        return found.unflatten(-1, shape) if name in POINTS else found

    return ask


class measured(Generic[_T]):  # noqa: N801
    """A property that a bound set finds once, with autograd: a method, which runs without, may be
    the first to ask. Any other set finds it anew, as its graph may be gone and its tensors changed.
    """

    def __init__(self, find: Callable[[Any], _T]) -> None:
        self.find, self.__doc__ = torch.enable_grad()(find), find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> _T:
        if instance is None:
            raise AttributeError(self.name)
        value: _T = self.find(instance)
        if instance.bound:
            vars(instance)[self.name] = value
        return value
