"""The parameters of sets: numbers or tensors, one for all problems or one for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from dfwlayer.arguments import as_number, check_tensor, flag_nonfinite
from dfwlayer.linalg.sparse import check_sparse, stored_entries
from dfwlayer.ops.rows import in_one_batch, on_host
from dfwlayer.ops.values import Value, within
from dfwlayer.solution import Status

__all__ = [
    "Kind",
    "Parameter",
    "as_column",
    "as_entries",
    "entries",
    "fault",
    "matrix",
    "merged",
    "number",
    "table",
    "variable_of",
]


class Kind(IntEnum):
    """How many dimensions one problem's parameter has in a bound set."""

    NUMBER = 0
    ENTRIES = 1  # one for each coordinate
    MATRIX = 2


@dataclass(frozen=True)
class Parameter:
    """What may be said of a parameter once for all values; a tensor may have a batch in front.

    Args:
        kind: Its dimensions.
        harmless: Its value in a set like any other, which takes the place of a bad one; None for
            the default of the field.
        optional: It may be None, as where that is the default of the field.
        least: No value may be smaller.
        most: Nor larger.
        hint: For values beyond these, what else to do.
        infinite: Whether values may be infinite.
        grows: With the set: {cx : x in the set} has c times this parameter.
        numbers: Whether a number may stand for entries that are all alike.
        apart: Entries that are not those of the variable; how many there are is for the set to say.
        sparse: Whether a matrix that all problems share may be a sparse tensor.

    """

    kind: Kind
    harmless: float | None = None
    optional: bool = False
    least: float = -math.inf
    most: float = math.inf
    hint: str = ""
    infinite: bool = False
    grows: bool = False
    numbers: bool = True
    apart: bool = False
    sparse: bool = False

    def with_default(self, default: Any) -> Parameter:
        """With what follows from the default of the field."""
        plain = default if isinstance(default, int | float) else 1.0
        harmless = plain if self.harmless is None else self.harmless
        return replace(self, harmless=harmless, optional=self.optional or default is None)

    def check(self, name: str, value: Any) -> Value | None:
        """The value, a number as a float; raise for types, shapes and numbers it cannot have."""
        if value is None and self.optional:
            return None
        if isinstance(value, Tensor) or not self.numbers:
            expected = "a tensor or None" if self.optional else "a tensor"
            check_tensor(name, value, expected, self.sparse)
            if value.layout != torch.strided:
                check_sparse(name, value)
            found: Tensor = value
            return found
        given = as_number(name, value, kind="a number or a tensor", infinite=self.infinite)
        self.out_of_range(name, given)
        return given

    def flat(self, name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """As (), (n,) or a matrix, or with a batch in front, n the entries of the shape."""
        if self.kind is not Kind.ENTRIES or self.apart:
            return value
        if value.dim() == 0 and self.numbers:
            value = value.expand(shape)
        lead = value.dim() - len(shape)
        if lead not in (0, 1) or tuple(value.shape[lead:]) != shape:
            raise self._misfit(name, value, shape)
        return value.reshape(*value.shape[:lead], math.prod(shape))

    def in_one_batch(
        self, name: str, value: Tensor, shape: tuple[int, ...], lead: tuple[int, ...]
    ) -> Tensor:
        """Like `flat`, with all batch dimensions of the value, which are of ``lead``, as one."""
        rank = self.dims(shape)
        if self.kind is Kind.ENTRIES and not self.apart:
            if value.dim() == 0 and self.numbers:
                return value
            if value.dim() < rank or tuple(value.shape[-rank:]) != shape:
                raise self._misfit(name, value, shape)
            value, rank = value.flatten(-rank), 1
        return in_one_batch(value, rank, lead)

    def _misfit(self, name: str, value: Tensor, shape: tuple[int, ...]) -> ValueError:
        sizes = ", ".join(str(s) for s in shape)
        return ValueError(
            f"{name}: expected {'a number, ' if self.numbers else ''}shape "
            f"({sizes}{',' if len(shape) == 1 else ''}) or (B, {sizes}), got "
            f"{tuple(value.shape)}"
        )

    def dims(self, shape: tuple[int, ...]) -> int:
        """Those of one problem's value, for entries of that shape."""
        return len(shape) if self.kind is Kind.ENTRIES and not self.apart else int(self.kind)

    def not_finite(self, name: str, value: Tensor) -> Tensor | None:
        """Mask (B,) of the problems with NaN, or infinity if that may not be, None for none."""
        if value.layout != torch.strided:
            value = stored_entries(value)
        if self.infinite:
            value = torch.where(torch.isinf(value.detach()), 0, value)
        return flag_nonfinite(name, value, int(self.kind))

    def out_of_range(self, name: str, value: Value) -> Tensor | None:
        """Statuses of the problems beyond ``least`` and ``most``, as in `fault`."""
        endless = self.least == -math.inf, self.most == math.inf
        if all(endless) or within(value, self.least, self.most):
            return None
        given, hint = torch.as_tensor(value).detach(), f"; {self.hint}" if self.hint else ""

        def beyond(wrong: Tensor, words: str, worst: Callable[[], Tensor]) -> Tensor | None:
            return fault(
                wrong.any(-1) if self.kind is Kind.ENTRIES else wrong,
                Status.INVALID,
                lambda: f"{name}: expected numbers {words}, found {float(worst()):g}{hint}",
            )

        below, above = endless
        return merged(
            None if below else beyond(given < self.least, f"≥ {self.least:g}", given.amin),
            None if above else beyond(given > self.most, f"≤ {self.most:g}", given.amax),
        )

    def is_plain(self, value: Tensor, like: Tensor) -> bool:
        """Whether a tensor goes with vectors like these (..., n) and, where it is shared by all
        problems, has values it may have. On a GPU they are not looked at, as it would have to wait.
        """
        if value.dtype != like.dtype or value.device != like.device or value.numel() == 0:
            return False
        lead = value.dim() - self.kind
        if lead > 1 or value.layout != torch.strided or value.is_nested:
            return False
        if self.kind is Kind.ENTRIES:
            fits = lead == -1 and self.numbers
            fits = fits or (lead >= 0 and (self.apart or value.shape[-1] == like.shape[-1]))
        else:
            fits = lead >= 0
        if not fits or not self.looks_at(value):
            return fits
        return on_host(value, lambda: self.covers(value)) is not False

    def looks_at(self, value: Tensor) -> bool:
        """Whether `is_plain` asks for the values of a tensor, beside its type and shape."""
        ranged = self.least > -math.inf or self.most < math.inf
        return ranged and value.dim() <= self.kind

    def allowed(self, value: Tensor) -> Tensor:
        """Mask of the numbers that may be, as `not_finite` and `out_of_range` tell; of any shape.

        Nothing is asked for a value here, so that compilers can follow.
        """
        within_range = (value >= self.least) & (value <= self.most)  # NaN is not
        return within_range if self.infinite else within_range & value.isfinite()

    def covers(self, value: Tensor) -> bool:
        """Whether all numbers are within range; NaN is not."""
        if value.numel() == 1:
            return self.least <= value.item() <= self.most
        low, high = torch.aminmax(value.detach())
        return self.least <= float(low) and float(high) <= self.most

    def replaced(self, value: Tensor, bad: Tensor) -> Tensor:
        """With that of the first sound problem for those that are flagged (B,).

        So it goes with what an objective takes from there. Where no problem is sound it is
        something harmless.
        """
        stand_in: Tensor | float
        if value.layout != torch.strided:  # that of all problems
            return value
        shared = value.dim() == self.kind or len(value) == 1
        if bool((~bad).any()):
            if self.kind is Kind.MATRIX and value.dim() == self.kind:  # nothing to be replaced
                return value
            stand_in = (value if shared else value[int((~bad).long().argmax())]).detach()
        elif self.kind is Kind.MATRIX:
            stand_in = torch.eye(*value.shape[-2:], dtype=value.dtype, device=value.device)
        else:
            assert self.harmless is not None
            stand_in = self.harmless
        return torch.where(self.beside(bad), stand_in, value)

    def beside(self, each: Tensor) -> Tensor:
        """A number for each problem () or (B,), in a shape that goes with the parameter."""
        return each[(..., *[None] * self.kind)]


def number(**about: Any) -> Mapping[str, Parameter]:
    """Metadata of a set's field for a number, a 0-d tensor or (B,); ``about`` as in `Parameter`."""
    return {"parameter": Parameter(Kind.NUMBER, **about)}


def entries(**about: Any) -> Mapping[str, Parameter]:
    """Metadata of a set's field for a number, (*shape) or (B, *shape)."""
    return {"parameter": Parameter(Kind.ENTRIES, **about)}


def matrix(**about: Any) -> Mapping[str, Parameter]:
    """Metadata of a set's field for a tensor (m, n) or (B, m, n)."""
    return {"parameter": Parameter(Kind.MATRIX, numbers=False, **about)}


def table(cls: type) -> Mapping[str, Parameter]:
    """The parameters of a set by the names of their fields."""
    known = _tables.get(cls)
    return _table(cls) if known is None else known


_tables: dict[type, Mapping[str, Parameter]] = {}


def _table(cls: type) -> Mapping[str, Parameter]:
    declared = ((f, f.metadata.get("parameter")) for f in fields(cls))
    found = {f.name: about.with_default(f.default) for f, about in declared if about is not None}
    return _tables.setdefault(cls, found)


# for compilers, which cannot follow it; so does torch.compiler.assume_constant_result
_table._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


def variable_of(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape a set knows where a tensor of these sizes ends in it, and not in all its entries.

    None where its last dimension holds a variable as a vector, or it fits neither way.
    """
    vector = sizes[-1] == math.prod(shape)
    # in this order, as a batch that may be of any size is not to be compared with a shape
    return shape if not vector and sizes[-len(shape) :] == shape else None


def as_column(value: Value, like: Tensor) -> Tensor:
    """A number for each problem as (1,) or (B, 1), to go with vectors (..., n)."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).unsqueeze(-1)


def as_entries(value: Value, like: Tensor) -> Tensor:
    """Entries as a tensor that goes with vectors (..., n)."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)
