"""What sets share in handling their parameters: numbers or tensors, per problem if wanted.

A set is a dataclass; a table gives the kind of each of its parameters by the name of the field.
Parameters that are None, which only those may be whose default it is, are left alone by every
function here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from dfwlayer.arguments import as_number, check_tensor
from dfwlayer.objectives.base import check_tensors, flag_nonfinite
from dfwlayer.solution import Status

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Kind",
    "Kinds",
    "Value",
    "batch_sizes",
    "bind",
    "check",
    "check_not_negative",
    "columns",
    "example",
    "fault",
    "flagged",
    "float32",
    "merged",
    "part",
    "plain",
    "replace_rows",
    "rows",
    "stretch",
]

Value = float | Tensor
_Set = TypeVar("_Set", bound="DataclassInstance")


class Kind(Enum):
    """What one problem's parameter is; tensors may have a batch dimension in front."""

    NUMBER = "a number, a 0-d tensor or shape (B,)"
    ENTRIES = "a number, a 0-d tensor or, with a number for each entry, a tensor"


Kinds = Mapping[str, Kind]


def check(constraint: _Set, kinds: Kinds, infinite: Collection[str] = ()) -> None:
    """Raise for types, dtypes and devices no parameter can have, and for numbers not finite.

    Numbers become floats.

    Args:
        constraint: The set.
        kinds: The kind of each of its parameters.
        infinite: Those that may be infinite.

    """
    optional = {field.name for field in fields(constraint) if field.default is None}
    for name in kinds:
        value = getattr(constraint, name)
        if value is None and name in optional:
            continue
        if isinstance(value, Tensor):
            check_tensor(name, value)
            if kinds[name] is Kind.NUMBER and value.dim() > 1:
                raise ValueError(f"{name}: expected {kinds[name].value}, got {tuple(value.shape)}")
        else:
            kind = "a number or a tensor"
            number = as_number(name, value, kind=kind, infinite=name in infinite)
            object.__setattr__(constraint, name, number)
    tensors = _tensors(constraint, kinds)
    if tensors:
        check_tensors(tensors, half_allowed=True)


def fault(wrong: Tensor, status: Status, message: Callable[[], str]) -> Tensor | None:
    """Statuses (B,) of the problems that are wrong, 0 for the others, None if none is.

    Args:
        wrong: Mask (B,), or () for what all problems share; if that is wrong there is nothing to
            solve, which is a ValueError.
        status: What the problems get.
        message: Of the error.

    """
    if not bool(wrong.any()):
        return None
    if wrong.dim() == 0:
        raise ValueError(message())
    return torch.where(wrong, int(status), 0)


def merged(*found: Tensor | None) -> Tensor | None:
    """One table of statuses (B,) from several, or from masks of problems that are not finite.

    Of a problem with several faults the first one counts.
    """
    codes: Tensor | None = None
    for each in found:
        if each is None:
            continue
        if each.dtype == torch.bool:
            each = torch.where(each, int(Status.NONFINITE), 0)
        codes = each if codes is None else torch.where(codes != 0, codes, each)
    return codes


def check_not_negative(
    name: str, value: Value, reason: str = "", kind: Kind = Kind.NUMBER
) -> Tensor | None:
    """Raise if a number is negative; of a parameter per problem the statuses, as in `fault`."""
    number = torch.as_tensor(value).detach()
    wrong = number < 0
    because = f"; {reason}" if reason else ""
    return fault(
        wrong if kind is Kind.NUMBER else wrong.any(-1),
        Status.INVALID,
        lambda: f"{name}: expected numbers ≥ 0, found {float(number.amin()):g}{because}",
    )


def batch_sizes(constraint: _Set, kinds: Kinds, shape: tuple[int, ...]) -> dict[str, int]:
    """See `Constraint`."""
    return {
        name: tensor.shape[0]
        for name, tensor in _tensors(constraint, kinds).items()
        if tensor.dim() > _rank(kinds[name], shape)
    }


def bind(
    constraint: _Set,
    kinds: Kinds,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> _Set:
    """The set with tensors for parameters: () or (B,) for a number, (n,) or (B, n) for entries."""
    values: dict[str, Tensor] = {}
    for name, value in _values(constraint, kinds).items():
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=dtype, device=device)
        values[name] = _flat(name, value, shape) if kinds[name] is Kind.ENTRIES else value
    check_tensors({"the objective": torch.empty(0, dtype=dtype, device=device)} | values)
    return replace(constraint, **values)


def _flat(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Entries (n,) or (B, n)."""
    if value.dim() == 0:
        value = value.expand(shape)
    lead = value.dim() - len(shape)
    if lead not in (0, 1) or tuple(value.shape[lead:]) != shape:
        sizes = ", ".join(str(s) for s in shape)
        raise ValueError(
            f"{name}: expected a number, shape ({sizes}{',' if len(shape) == 1 else ''}) or "
            f"(B, {sizes}), got {tuple(value.shape)}"
        )
    return value.reshape(*value.shape[:lead], math.prod(shape))


def float32(constraint: _Set, kinds: Kinds) -> _Set:
    """The set with half-precision parameters in float32."""
    wide = {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for name, tensor in _tensors(constraint, kinds).items()
    }
    return replace(constraint, **wide)


def flagged(constraint: _Set, kinds: Kinds, infinite: Collection[str] = ()) -> Tensor | None:
    """Mask (B,) of the problems with NaN or infinity in a bound set's parameters, None for none."""
    bad: Tensor | None = None
    for name, tensor in _tensors(constraint, kinds).items():
        if name in infinite:
            tensor = torch.where(torch.isinf(tensor.detach()), 0, tensor)
        found = flag_nonfinite(name, tensor, 0 if kinds[name] is Kind.NUMBER else 1)
        if found is not None:
            bad = found if bad is None else bad | found
    return bad


def replace_rows(
    constraint: _Set, kinds: Kinds, bad: Tensor, harmless: Mapping[str, float]
) -> _Set:
    """A bound set with harmless numbers in place of the parameters of problems flagged (B,)."""
    values = {
        name: torch.where(
            bad if kinds[name] is Kind.NUMBER else bad.unsqueeze(-1), harmless[name], tensor
        )
        for name, tensor in _tensors(constraint, kinds).items()
    }
    return replace(constraint, **values)


def part(constraint: _Set, kinds: Kinds, index: Tensor) -> _Set:
    """A bound set with the parameters of the problems at these positions."""
    values = {
        name: tensor[index]
        for name, tensor in _tensors(constraint, kinds).items()
        if tensor.dim() > (0 if kinds[name] is Kind.NUMBER else 1) and len(tensor) > 1
    }
    return replace(constraint, **values)


def stretch(constraint: _Set, kinds: Kinds, lengths: Collection[str], factor: Tensor) -> _Set:
    """A bound set with the parameters that are lengths multiplied by a factor () or (B,)."""
    tensors = _tensors(constraint, kinds)
    values = {
        name: tensors[name] * (factor if kinds[name] is Kind.NUMBER else factor.unsqueeze(-1))
        for name in lengths
        if name in tensors
    }
    return replace(constraint, **values)


def columns(value: Value, like: Tensor) -> Tensor:
    """A number for each problem as (1,) or (B, 1), to go with vectors (..., n)."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).unsqueeze(-1)


def rows(value: Value, like: Tensor) -> Tensor:
    """Entries as a tensor that goes with vectors (..., n)."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def example(constraint: _Set, kinds: Kinds, n: int) -> Tensor:
    """A vector (n,) of the parameters' dtype and device."""
    for tensor in _tensors(constraint, kinds).values():
        return torch.zeros(n, dtype=tensor.dtype, device=tensor.device)
    return torch.zeros(n)


def plain(constraint: _Set, kinds: Kinds) -> bool:
    """Whether all parameters are numbers, which can be looked at for free."""
    return not _tensors(constraint, kinds)


def _rank(kind: Kind, shape: tuple[int, ...]) -> int:
    return 0 if kind is Kind.NUMBER else len(shape)


def _values(constraint: _Set, kinds: Kinds) -> dict[str, Value]:
    values = {name: getattr(constraint, name) for name in kinds}
    return {name: value for name, value in values.items() if value is not None}


def _tensors(constraint: _Set, kinds: Kinds) -> dict[str, Tensor]:
    values = _values(constraint, kinds)
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
