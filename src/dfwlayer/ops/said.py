"""Warnings that point at the line of the caller."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__ = ["warn"]

# frames of these are between a warning and the line that it is about
OWN = Path(__file__).parents[1].as_posix() + "/"
BETWEEN = ("torch/nn/modules/", "torch/_library/", "torch/_ops.py", "torch/autograd/")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, as of the line from which this library was called."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename).as_posix()
        if not path.startswith(OWN) and not any(part in path for part in BETWEEN):
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
