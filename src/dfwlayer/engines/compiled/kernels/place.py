"""Where a coordinate is: free, at a bound, or at the kink of |x| in a budget, at zero."""

from __future__ import annotations

__all__ = ["FREE", "HIGH", "LOW", "ZERO"]

FREE, LOW, HIGH, ZERO = 0, 1, 2, 3
