"""Tensors that are passed on as they are, while their gradients are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_gradient"]


def with_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor as it is; its gradient is what ``change`` makes of the one that arrives."""
    out: Tensor = _Passed.apply(tensor, change)  # type: ignore[no-untyped-call]
    return out


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None
