"""Episodes in the simulator, and what in them breaks the limit; without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfwlayer_bench.robotics.tasks import Task, make_env, power

__all__ = ["Episodes", "roll_out"]


@dataclass(frozen=True)
class Episodes:
    """What came of some episodes."""

    returns: tuple[float, ...]
    violations: int  # steps whose power was beyond the limit, recounted from what was executed
    steps: int
    largest_power: float

    @property
    def mean_return(self) -> float:
        return sum(self.returns) / len(self.returns)


def roll_out(
    task: Task,
    act: Callable[[NDArray[Any]], NDArray[np.float32]],
    episodes: int,
    seed: int,
) -> Episodes:
    """Run whole episodes, seeded one by one, and count what breaks the limit."""
    env = make_env(task, seed)
    returns, violations, steps, largest = [], 0, 0, 0.0
    for number in range(episodes):
        observation, _ = env.reset(seed=seed + number)
        total, over = 0.0, False
        while not over:
            action = act(observation)
            used = float(power(task, observation, action))
            violations += used > task.limit or bool((np.abs(action) > 1).any())
            largest = max(largest, used)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            steps += 1
            over = terminated or truncated
        returns.append(total)
    env.close()
    return Episodes(tuple(returns), violations, steps, largest)
