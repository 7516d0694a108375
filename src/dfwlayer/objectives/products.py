"""Quadratic functions that are known by their products with P."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from dfwlayer.objectives.base import Objective
from dfwlayer.ops.rows import dot

__all__ = ["ProductQuadratic"]


class ProductQuadratic(Objective):
    """½ xᵀPx + qᵀx."""

    q: Tensor  # (..., n)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:  # (..., n) -> (..., n)
        """P x."""

    def value(self, x: Tensor) -> Tensor:
        """f(x)."""
        return dot(x, 0.5 * self.product(x) + self.q)

    def gradient(self, x: Tensor) -> Tensor:
        """Px + q."""
        return self.product(x) + self.q

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one product with P."""
        product = self.product(x)
        return dot(x, 0.5 * product + self.q), product + self.q
