"""What a set is that can leave Python: a projection and a retraction without a question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dfwlayer.ops.values import Value, tensor_of

__all__ = ["Plain", "PlainFormula", "less", "shrunk", "wide", "wide_column"]


class Plain(ABC):
    """The projection onto a set in a fixed number of tensor operations.

    A dataclass whose tensors are parameters of the set or made from them.
    """

    @property
    def exact(self) -> bool:
        """Whether the projection is a formula, so that there are no steps."""
        return True

    @property
    def short(self) -> bool:
        """Whether it takes so few operations that it may be one step of many."""
        return self.exact

    @abstractmethod
    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """The point of the set nearest to z (..., n), in double precision as z is.

        Where the projection is not `exact` it is a point of the set still, and comes close with
        the steps.
        """

    @abstractmethod
    def inside(self, x: Tensor) -> Tensor:
        """A point of the set, as this dtype can hold it, for an x (..., n) rounded to it."""


@dataclass(frozen=True)
class PlainFormula(Plain):
    """A set whose own projection is a formula, and whose constraints hold up to its rounding."""

    constraint: Any  # a bound set with a method `formula`

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """As the set has it."""
        found: Tensor = self.constraint.formula(z)
        return found

    def inside(self, x: Tensor) -> Tensor:
        """x."""
        return x


def wide(value: Value, like: Tensor) -> Tensor:
    """Entries (n,) or (..., n), or a number as that dtype holds it, in double precision."""
    # a tensor, as numbers in an ONNX file are those of float32 whatever they go with
    return tensor_of(value, like).detach().double()


def wide_column(value: Value, like: Tensor) -> Tensor:
    """A number for each problem, () or (...), as (1,) or (..., 1) in double precision."""
    return wide(value, like).unsqueeze(-1)


def less(value: Tensor, share: Tensor) -> Tensor:
    """A value less a small share of it.

    Not as a product with 1 − share: exporters to ONNX take factors for one that are nearly so.
    """
    return value - value * share


def shrunk(
    x: Tensor,  # (..., n)
    size: Tensor,  # (..., 1), what the ball says of x, in double precision
    radius: Tensor,  # (..., 1), likewise
    units: float | Tensor = 2.0,  # of rounding that are left as room
) -> Tensor:
    """x · radius/size where size > radius up to rounding, else x itself.

    A runtime may leave out that x was rounded before, so that what is next to the radius counts as
    outside: the answer may still be rounded.
    """
    finfo = torch.finfo(x.dtype)
    eps = wide(finfo.eps, x)
    outside = size > less(radius, eps)
    factor = less(radius, eps * units) / torch.where(outside, size, 1.0)
    inner = (x.double() * factor).to(x.dtype)
    # numbers below the normal range are rounded by more than that, and had better vanish
    inner = torch.where(inner.abs() < finfo.tiny, 0.0, inner)
    return torch.where(outside, inner, x)
