"""Temperature schedules for the soft vertex: a function from the step to τ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dfwlayer.arguments import as_integer, as_number

__all__ = ["Anneal", "Constant", "Temperature", "as_temperature"]

Temperature = Callable[[int], float]
"""Any function of the step k = 0, 1, 2, … that returns a temperature τ_k ≥ 0."""


@dataclass(frozen=True)
class Constant:
    """τ_k = value."""

    value: float

    def __post_init__(self) -> None:
        expected = "a temperature, a positive number"
        object.__setattr__(self, "value", as_number("value", self.value, expected, above=0))

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
        start = as_number("start", self.start, "a temperature, a positive number", above=0)
        factor = as_number("factor", self.factor, "a number in (0, 1]", above=0, most=1)
        period = as_integer("period", self.period, 1)
        for name, value in (("start", start), ("factor", factor), ("period", period)):
            object.__setattr__(self, name, value)

    def __call__(self, step: int) -> float:
        return float(self.start * self.factor ** (step // self.period))


def as_temperature(temperature: float | Temperature | None) -> Temperature:
    """A number becomes a constant schedule, None the paper's annealing."""
    if temperature is None:
        return Anneal()
    if isinstance(temperature, (Anneal, Constant)):
        return temperature
    if callable(temperature) and not isinstance(temperature, type):
        return _Checked(temperature)
    kind = "a positive number, a schedule such as Anneal(), or a function of the step"
    return Constant(as_number("temperature", temperature, "a positive number", kind=kind, above=0))


@dataclass(frozen=True)
class _Checked:
    """A schedule of the user's, whose every temperature is looked at."""

    schedule: Temperature

    def __call__(self, step: int) -> float:
        found = self.schedule(step)
        if isinstance(found, Tensor) and found.numel() == 1 and not found.is_meta:
            found = found.item()
        return as_number(
            "temperature",
            found,
            f"a number ≥ 0 at every step (here step {step})",
            kind="a schedule that returns numbers",
            least=0,
        )
