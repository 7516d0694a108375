"""The transitions an expert learns from, the oldest overwritten when the memory is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "Replay"]


@dataclass(frozen=True)
class Batch:
    """Transitions: observations, actions, rewards (B,), terminated (B,), next observations."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor  # 1 where the task ended there, 0 where it went on or time ran out
    next_observations: Tensor


class Replay:
    """A ring of transitions, one float32 row each, so that a batch is a single gather."""

    def __init__(self, capacity: int, observation_size: int, action_size: int) -> None:
        self.capacity = capacity
        self.sizes = [observation_size, action_size, 1, 1, observation_size]
        self.ends = np.cumsum(self.sizes).tolist()
        # not filled with zeros: memory that is never written to is never used
        self.rows = torch.empty(capacity, sum(self.sizes))
        self.view: NDArray[np.float32] = self.rows.numpy()
        self.count = 0  # transitions ever added

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def add(
        self,
        observation: NDArray[Any],
        action: NDArray[Any],
        reward: float,
        terminated: bool,
        next_observation: NDArray[Any],
    ) -> None:
        """Keep one transition."""
        row = self.view[self.count % self.capacity]
        first, second, third, fourth, _ = self.ends
        row[:first] = observation
        row[first:second] = action
        row[second] = reward
        row[third] = terminated
        row[fourth:] = next_observation
        self.count += 1

    def sample(self, size: int, random: np.random.Generator, device: torch.device) -> Batch:
        """So many transitions, each drawn from all that are kept."""
        at = torch.from_numpy(random.integers(0, len(self), size))
        rows = self.rows.index_select(0, at).to(device)
        observations, actions, rewards, terminated, following = torch.split(rows, self.sizes, -1)
        return Batch(observations, actions, rewards.squeeze(-1), terminated.squeeze(-1), following)

    @property
    def observations(self) -> NDArray[np.float32]:
        """Observations of the transitions kept, (N, observation_size)."""
        return self.view[: len(self), : self.ends[0]]

    @property
    def actions(self) -> NDArray[np.float32]:
        """Actions of the transitions kept, (N, action_size)."""
        return self.view[: len(self), self.ends[0] : self.ends[1]]

    def saved(self) -> NDArray[np.float32]:
        """The rows in use; with ``count`` they are the whole state."""
        return self.view[: len(self)]

    def restore(self, rows: NDArray[np.float32], count: int) -> None:
        """Go back to a state that was saved."""
        if len(rows) != min(count, self.capacity) or rows.shape[1:] != self.view.shape[1:]:
            raise ValueError(
                f"rows: found {rows.shape} after {count} transitions, expected "
                f"{(min(count, self.capacity), self.view.shape[1])}"
            )
        self.view[: len(rows)] = rows
        self.count = count
