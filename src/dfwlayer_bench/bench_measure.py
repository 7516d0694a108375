"""How far an answer is from another one."""

from __future__ import annotations

from torch import Tensor

__all__ = ["cosine", "relative"]


def relative(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖, or ‖found‖ where the exact answer is zero."""
    size = float(exact.norm())
    return float((found - exact).norm()) / (size if size > 0 else 1.0)


def cosine(found: Tensor, exact: Tensor) -> float | None:
    """Of the angle between them, None where one of them is zero."""
    both = float(found.norm() * exact.norm())
    return float(found @ exact) / both if both > 0 else None
