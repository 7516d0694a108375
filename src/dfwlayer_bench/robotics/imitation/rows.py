"""What a report is made of: the curve of a run, and a row for a layer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row", "Run"]


@dataclass(frozen=True)
class Run:
    """One layer and seed: its tests."""

    layer: str
    seed: int
    step: int
    curve: list[dict[str, float]]


@dataclass(frozen=True)
class Row:
    """A layer over all its seeds; None where something was not measured."""

    layer: str
    label: str
    seeds: int = 0
    steps: int = 0
    mse: float | None = None
    mse_std: float | None = None
    violation_rate: float | None = None
    mean_violation: float | None = None  # over the actions in violation
    largest_violation: float | None = None
    step_seconds: float | None = None
    step_cpu_seconds: float | None = None
    times_none: float | None = None
    episode_return: float | None = None
    episode_return_std: float | None = None
    episode_violation_rate: float | None = None
    episode_largest_violation: float | None = None
    detail: str = ""  # why there is nothing
    # half the widths of the means' 95 % intervals, by Student's t over the seeds
    mse_interval: float | None = None
    violation_rate_interval: float | None = None
    episode_return_interval: float | None = None
    mse_change: float | None = None  # of the mean, over the last quarter of the steps, relative
