"""Parameters that are numbers or tensors as they were given: asked and computed with alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = [
    "Value",
    "are_numbers",
    "equal",
    "first_tensor",
    "larger",
    "multiplied",
    "narrowed",
    "on_tensor",
    "shape_of",
    "smaller",
    "tensor_of",
    "tensors_among",
    "total",
    "within",
]

Value = float | Tensor
_T = TypeVar("_T")


def are_numbers(*values: Any) -> bool:
    """Whether none of them is a tensor."""
    return not any(isinstance(value, Tensor) for value in values)


def first_tensor(*values: Any) -> Tensor | None:
    """The first of them that is one."""
    return next((value for value in values if isinstance(value, Tensor)), None)


def tensors_among(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of them that are tensors."""
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def equal(value: Any, number: float) -> bool:
    """Whether a parameter is this number, whatever the data."""
    return are_numbers(value) and bool(value == number)


def within(value: Value, least: float, most: float) -> bool:
    """Whether a parameter is a number from ``least`` to ``most``, whatever the data."""
    return are_numbers(value) and bool(least <= value <= most)


def on_tensor(value: _T, change: Callable[[Tensor], Tensor]) -> _T | Tensor:
    """A parameter, which is changed if it is a tensor."""
    return change(value) if isinstance(value, Tensor) else value


def shape_of(value: Any) -> tuple[int, ...]:
    """That of a tensor, () of a number or of None."""
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def tensor_of(value: Value, like: Tensor | None = None) -> Tensor:
    """A parameter as the tensor that it is in a bound set; a number in the dtype of ``like``."""
    if isinstance(value, Tensor):
        return value
    if like is None:
        return torch.tensor(value)
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def total(value: Value) -> Value:
    """A number for each problem () or (B,) as it stands in a normal form."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value


def larger(a: Value, b: Value) -> Value:
    """The maximum of bounds, either of them a number, (1,), (n,) or (B, n)."""
    like = first_tensor(a, b)
    if like is None:
        return max(a, b)
    if -math.inf in (one for one in (a, b) if are_numbers(one)):
        return like
    both = (torch.as_tensor(v, dtype=like.dtype, device=like.device) for v in (a, b))
    return torch.maximum(*both)


def smaller(a: Value, b: Value) -> Value:
    """The minimum, likewise."""
    return -larger(-a, -b)


def multiplied(a: Value, b: Value, power: int = 1) -> Value:
    """a bᵖ for p = ±1, differentiable; where no gradient arrives none is passed on, also to NaN."""
    like = first_tensor(a, b)
    if like is None:
        return a * b**power
    both = (torch.as_tensor(v, dtype=like.dtype) for v in (a, b))
    out: Tensor = _Multiplied.apply(*both, power)  # type: ignore[no-untyped-call]
    return out


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.power = power
        return a * b if power == 1 else a / b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        none = grad == 0
        b = torch.where(none, 1, b)  # whose derivatives, too, are to be finite where none arrives
        to_a, to_b = (b, a) if ctx.power == 1 else (1 / b, -a / (b * b))
        return (
            torch.where(none, 0, grad * to_a).sum_to_size(a.shape),
            torch.where(none, 0, grad * to_b).sum_to_size(ctx.saved_tensors[1].shape),
            None,
        )


def narrowed(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient in a smaller dtype, zero where that could not hold twice as much.

    What problems share may get its gradient in two parts, from two engines, which autograd adds
    up. NaN and infinity go on.
    """
    if dtype == gradient.dtype:
        return gradient
    narrow, most = gradient.to(dtype), torch.finfo(dtype).max / 2
    if narrow.device.type == "cpu":  # one pass, and nearly always enough
        largest = torch.linalg.vector_norm(narrow, math.inf) if narrow.numel() else 0.0
        if float(largest) <= most:
            return narrow
    return torch.where((narrow.abs() > most) & gradient.isfinite(), 0, narrow)
