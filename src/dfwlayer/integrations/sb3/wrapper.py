"""An environment that limits what it is asked to do."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from dfwlayer.integrations.sb3.limits import as_limit, batch_of

__all__ = ["LimitedActions", "action_box"]


class LimitedActions(gymnasium.Wrapper):  # type: ignore[misc, unused-ignore]
    """An environment that executes the nearest allowed action to the one it is asked for.

    To a learner the limit is then part of the environment's dynamics, so it may keep what it
    asked for. ``info["executed_action"]`` holds what was done. The limit is an `ActionLimit` or
    `ActionSet`, a set of the library, or a function from observations to one.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], limit: Any) -> None:
        super().__init__(env)
        self.box = action_box(env.action_space)
        self.limit = as_limit(limit)
        self.observation: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.observation, info = self.env.reset(**kwargs)
        return self.observation, info

    def step(self, action: NDArray[Any]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Do the nearest thing that is allowed."""
        if self.observation is None:
            raise ValueError("step: the environment was not reset; call reset() first")
        asked = np.asarray(action)
        executed = self.limit.executed(asked.reshape(1, -1), batch_of(self.observation), self.box)
        executed = executed.reshape(asked.shape)
        self.observation, reward, terminated, truncated, info = self.env.step(executed)
        info = {**info, "executed_action": executed}
        return self.observation, reward, terminated, truncated, info


def action_box(space: Any) -> gymnasium.spaces.Box:
    """The space of actions, if those are numbers within bounds."""
    if not isinstance(space, gymnasium.spaces.Box):
        raise ValueError(f"action_space: expected a Box, got {space}")
    return space
