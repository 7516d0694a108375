"""What a set answers that was asked to minimise a quadratic function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from dfwlayer.constraints.face import Face

__all__ = ["Minimum"]


@dataclass(frozen=True)
class Minimum(ABC):
    """The minimisers of ½ xᵀPx + qᵀx over the sets of B problems, in double precision."""

    x: Tensor  # (B, n), a point of the set also where f falls for ever
    exact: Tensor  # (B,), optimal to rounding
    empty: Tensor  # (B,), the set has no point, which is proven
    endless: Tensor  # (B,), f falls for ever
    steps: Tensor  # (B,)
    missed: Tensor  # (B,), by how much x is outside, relative to the terms of what it misses

    @abstractmethod
    def gap(self, x: Tensor, gradient: Tensor) -> Tensor:
        """f(x) − f* ≤ gap (B,) at a point next to the minimiser, both (B, n), by duality."""

    @abstractmethod
    def face(self, x: Tensor, noise: Tensor) -> Face | None:
        """The face at x (..., n); multipliers below their noise (B,) count as zero.

        None to tell it by `Constraint.face`.
        """

    def moved(self, x: Tensor) -> Self:
        """The same multipliers at another point."""
        return replace(self, x=x)
