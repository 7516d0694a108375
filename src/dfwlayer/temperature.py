"""Temperature schedules for the soft vertex: a function from the step to τ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Anneal", "Constant", "Temperature", "as_temperature"]

Temperature = Callable[[int], float]
"""Any function of the step k = 0, 1, 2, … that returns a temperature τ_k ≥ 0."""


@dataclass(frozen=True)
class Constant:
    """τ_k = value."""

    value: float

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise ValueError(f"value: a temperature must be positive, got {self.value}")

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class Anneal:
    """Geometric annealing τ_k = start · factor^⌊k / period⌋.

    The defaults are the paper's, τ_k = 2^(−⌊k/30⌋).
    """

    start: float = 1.0
    factor: float = 0.5
    period: int = 30

    def __post_init__(self) -> None:
        if not self.start > 0:
            raise ValueError(f"start: a temperature must be positive, got {self.start}")
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor: expected a number in (0, 1], got {self.factor}")
        if self.period < 1:
            raise ValueError(f"period: expected at least one step, got {self.period}")

    def __call__(self, step: int) -> float:
        return float(self.start * self.factor ** (step // self.period))


def as_temperature(temperature: float | Temperature | None) -> Temperature:
    """A number becomes a constant schedule, None the paper's annealing."""
    if temperature is None:
        return Anneal()
    if callable(temperature):
        return temperature
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < math.inf:
        raise ValueError(
            "temperature: expected a positive number, a schedule such as Anneal(), or a function "
            f"of the step, got {temperature!r}"
        )
    return Constant(float(temperature))
