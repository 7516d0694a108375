"""What one problem or a batch of them is asked for: x, and the gradient of a functional v·x."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Functional"]


class Functional:
    """Over n coordinates, (...) being () for one problem, (B,) for a batch of B."""

    q: Tensor  # (..., n), the linear part of f
    v: Tensor  # (..., n)

    @property
    def n(self) -> int:
        return self.q.shape[-1]

    @property
    def batched(self) -> bool:
        return self.q.dim() == 2

    def value(self, x: Tensor) -> Tensor:
        """The functional, of all problems together."""
        return (self.v * x).sum()
