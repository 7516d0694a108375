"""How sure a mean over few seeds is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["interval"]

# the 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % interval by Student's t, None for a single value."""
    if len(values) < 2:
        return None
    quantile = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else 1.96
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
