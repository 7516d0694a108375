"""What a system makes of a problem: its passes, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dfwlayer_bench.systems.base import Setting

__all__ = ["Passes"]


@dataclass(frozen=True)
class Passes:
    """A system made ready for one problem.

    Attributes:
        forward: Finds x, (..., n).
        both: Finds x and d(v·x)/dq, (..., n) each; None for a system that has no gradients.
        settings: What it was told, for the record.

    """

    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, Tensor]] | None
    settings: dict[str, Setting]
