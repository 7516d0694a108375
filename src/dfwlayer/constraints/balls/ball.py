"""What the balls of norms have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.composed.shifted import Shifted
from dfwlayer.constraints.retraction import scaled_into
from dfwlayer.ops.values import Value, tensor_of

__all__ = ["Ball"]


class Ball(Constraint):
    """{x : h(x) ≤ t} for a norm h, a set around the origin.

    Its constructor takes a ``centre`` as well, and with one makes the `Shifted` set.
    """

    radius: Value  # t

    def __new__(cls, *args: Any, centre: Value | None = None, **settings: Any) -> Self:
        """The set, or one around a centre."""
        if centre is None:
            return super().__new__(cls)
        return Shifted(cls(*args, **settings), centre)  # type: ignore[return-value]

    def __post_init__(self, centre: Value | None = None) -> None:
        super().__post_init__()

    @abstractmethod
    def size(self, x: Tensor) -> Tensor:
        """h(x), in double precision so that measuring does not add rounding in float32."""

    def start(self, like: Tensor) -> Tensor:
        """The centre."""
        return torch.zeros_like(like)

    def violation(self, x: Tensor) -> Tensor:
        """max(0, h(x) − t)."""
        return (self.size(x) - tensor_of(self.radius).double()).clamp_min(0).to(x.dtype)

    def retract(self, x: Tensor) -> Tensor:
        """x, scaled back where it is outside."""
        return scaled_into(x, self.size(x.detach()), tensor_of(self.radius), self.bounded())

    def bounded(self) -> Tensor | None:
        """Mask of the coordinates that are scaled, None for all."""
        return None
