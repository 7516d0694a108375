"""Actions within a power limit, for Stable-Baselines3: a layer for its actors.

    limit = ActionLimit(weights=range(11, 17), radius=20.0)   # Σ|ω_i a_i| ≤ 20, ω = obs[11:17]
    env = LimitedActions(gymnasium.make("HalfCheetah-v5"), limit)
    model = TD3(LimitedTD3Policy, env, policy_kwargs={"limit": limit})

The policy ends in the nearest action that obeys the limit, and learns through it. What an
algorithm adds afterwards, noise or random actions at the beginning, is limited by the wrapper
around the environment, which for algorithms without a policy here (PPO) is enough by itself.

Needs stable-baselines3; nothing else in this package imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.sac.policies import Actor as SACActor
from stable_baselines3.sac.policies import SACPolicy
from stable_baselines3.td3.policies import Actor as TD3Actor
from stable_baselines3.td3.policies import TD3Policy
from torch import Tensor

from dfwlayer.arguments import as_number, check_tensor, shown
from dfwlayer.layer import DFWLayer
from dfwlayer.ops.tracing import uncompiled

__all__ = ["ActionLimit", "LimitedActions", "LimitedSACPolicy", "LimitedTD3Policy"]


@dataclass(frozen=True)
class ActionLimit:
    """‖w(observation) ∘ action‖_p ≤ radius, in the units of the environment's actions.

    Args:
        weights: Where the weights stand in an observation, one index for each action, or a
            function from observations (B, ...) to weights (B, n). A model is saved by pickling:
            for that, let the function be one with a name.
        radius: The limit.
        p: Of the norm, 1 to limit a sum of absolute values.

    Observations are taken as the policy gets them. If they are normalised on the way
    (VecNormalize), pass a function that undoes it.

    """

    weights: Sequence[int] | Callable[[Any], Tensor]
    radius: float
    p: float = 1.0
    layer: DFWLayer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        radius = as_number("radius", self.radius, "a number of at least 0", least=0)
        object.__setattr__(self, "radius", radius)
        if not callable(self.weights):
            indices = isinstance(self.weights, Sequence) and not isinstance(self.weights, str)
            if not indices or not all(isinstance(i, int | np.integer) for i in self.weights):
                raise ValueError(
                    "weights: expected the indices of the weights in an observation, or a function "
                    f"from observations to weights, got {shown(self.weights)}"
                )
        object.__setattr__(self, "layer", DFWLayer(p=self.p))

    def of(self, observations: Any) -> Tensor:
        """The weights (B, n) of a batch of observations."""
        if callable(self.weights):
            found = self.weights(observations)
            check_tensor("weights", found, "a function that returns a tensor")
            return found
        if not isinstance(observations, Tensor) or observations.dim() != 2:
            raise ValueError(
                "weights: indices need observations that are vectors; pass a function from your "
                "observations to the weights"
            )
        width = observations.shape[1]
        outside = [int(i) for i in self.weights if not -width <= i < width]
        if outside:
            raise ValueError(
                f"weights: expected indices of observations with {width} entries, got {outside}"
            )
        return observations[:, [int(i) for i in self.weights]]

    @uncompiled
    def __call__(
        self,
        actions: Tensor,  # (B, n)
        observations: Any,  # (B, ...)
        unit: Tensor | float = 1.0,  # (n,), of the actions given, in the environment's
    ) -> Tensor:
        """The nearest actions that obey the limit."""
        weight = self.of(observations).to(actions.dtype) * unit
        if weight.shape != actions.shape:
            raise ValueError(
                f"weights: expected one for each of the actions {tuple(actions.shape)}, got "
                f"{tuple(weight.shape)}"
            )
        nearest: Tensor = self.layer(None, -actions, weight, self.radius)
        return nearest


class LimitedActions(gymnasium.Wrapper):  # type: ignore[misc, unused-ignore]
    """An environment that executes the nearest allowed action to the one it is asked for.

    To a learner the limit is then part of the environment's dynamics, so it may keep what it
    asked for. ``info["executed_action"]`` holds what was done.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], limit: ActionLimit) -> None:
        super().__init__(env)
        _unit(env.action_space)
        self.limit = _checked(limit)
        self.observation: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.observation, info = self.env.reset(**kwargs)
        return self.observation, info

    def step(self, action: NDArray[Any]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Do the nearest thing that is allowed."""
        if self.observation is None:
            raise ValueError("step: the environment was not reset; call reset() first")
        space: Any = self.env.action_space
        asked = np.clip(action, space.low, space.high)
        with torch.no_grad():
            rows = torch.as_tensor(asked, dtype=torch.float64).unsqueeze(0)
            exact = self.limit(rows, _batch_of_one(self.observation)).squeeze(0).numpy()
        executed = exact.astype(space.dtype)
        # rounded towards 0, so that not even rounding exceeds the limit
        executed = np.where(
            np.abs(executed) > np.abs(exact), np.nextafter(executed, executed * 0), executed
        )
        self.observation, reward, terminated, truncated, info = self.env.step(executed)
        info = {**info, "executed_action": executed}
        return self.observation, reward, terminated, truncated, info


class _Limited:
    """What actors and policies with a limit have in common, beside the classes they extend."""

    limit: ActionLimit

    def _get_constructor_parameters(self) -> dict[str, Any]:
        extended: Any = super()
        return {**extended._get_constructor_parameters(), "limit": self.limit}


class _LimitedActor(_Limited):
    unit: Tensor

    def __init__(self, limit: ActionLimit, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limit = _checked(limit)
        actor: Any = self
        actor.register_buffer("unit", _unit(actor.action_space), persistent=False)


class _LimitedPolicy(_Limited):
    actor_type: ClassVar[type[_LimitedActor]]

    def __init__(self, *args: Any, limit: ActionLimit, **kwargs: Any) -> None:
        self.limit = _checked(limit)  # the constructor makes the actors
        super().__init__(*args, **kwargs)

    def make_actor(self, features_extractor: Any = None) -> Any:
        """An actor with the layer."""
        policy: Any = self
        arguments = policy._update_features_extractor(policy.actor_kwargs, features_extractor)
        actor: Any = self.actor_type(self.limit, **arguments)
        return actor.to(policy.device)


class LimitedTD3Actor(_LimitedActor, TD3Actor):  # type: ignore[misc, unused-ignore]
    """TD3's actor with the limit as its last layer."""

    def forward(self, obs: Any) -> Tensor:
        """The actions, scaled to [−1, 1]."""
        return self.limit(super().forward(obs), obs, self.unit)


class LimitedSACActor(_LimitedActor, SACActor):  # type: ignore[misc, unused-ignore]
    """SAC's actor with the limit as its last layer.

    Its entropy is that of the actions before the limit, whose density the limit, not being
    invertible, does not have.
    """

    def forward(self, obs: Any, deterministic: bool = False) -> Tensor:
        """The actions, scaled to [−1, 1]."""
        return self.limit(super().forward(obs, deterministic), obs, self.unit)

    def action_log_prob(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Actions within the limit, and the log density of what they were before it."""
        actions, log_prob = super().action_log_prob(obs)
        return self.limit(actions, obs, self.unit), log_prob


class LimitedTD3Policy(_LimitedPolicy, TD3Policy):  # type: ignore[misc, unused-ignore]
    """For TD3 and DDPG: ``policy_kwargs={"limit": ActionLimit(...)}``."""

    actor_type = LimitedTD3Actor


class LimitedSACPolicy(_LimitedPolicy, SACPolicy):  # type: ignore[misc, unused-ignore]
    """For SAC: ``policy_kwargs={"limit": ActionLimit(...)}``."""

    actor_type = LimitedSACActor


def _checked(limit: Any) -> ActionLimit:
    if not isinstance(limit, ActionLimit):
        raise ValueError(f"limit: expected an ActionLimit, got {type(limit).__name__}")
    return limit


def _unit(space: Any) -> Tensor:
    """What 1 of a scaled action is in the environment's units, (n,)."""
    if not isinstance(space, gymnasium.spaces.Box) or space.low.ndim != 1:
        raise ValueError(f"action_space: expected a Box of vectors, got {space}")
    if not np.array_equal(space.low, -space.high) or not np.isfinite(space.high).all():
        raise ValueError(
            f"action_space: expected finite bounds symmetric around 0, got {space.low} to "
            f"{space.high}; wrap the environment in gymnasium.wrappers.RescaleAction"
        )
    return torch.as_tensor(space.high, dtype=torch.float32)


def _batch_of_one(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {name: _batch_of_one(part) for name, part in observation.items()}
    return torch.as_tensor(np.asarray(observation)).unsqueeze(0)
