"""Policies that end in the nearest action allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.sac import policies as sac
from stable_baselines3.td3 import policies as td3
from torch import Tensor

from dfwlayer.integrations.actor_gradients import GradientMode, as_mode
from dfwlayer.integrations.sb3.limits import Bounds, Limit, as_limit, fitted
from dfwlayer.integrations.sb3.wrapper import action_box

__all__ = [
    "LimitedActorCriticCnnPolicy",
    "LimitedActorCriticPolicy",
    "LimitedMultiInputActorCriticPolicy",
    "LimitedSACActor",
    "LimitedSACCnnPolicy",
    "LimitedSACMultiInputPolicy",
    "LimitedSACPolicy",
    "LimitedTD3Actor",
    "LimitedTD3CnnPolicy",
    "LimitedTD3MultiInputPolicy",
    "LimitedTD3Policy",
]


class _Limited:
    """What actors and policies with a limit have in common, beside the classes they extend."""

    limit: Limit
    gradient: GradientMode

    def _get_constructor_parameters(self) -> dict[str, Any]:
        extended: Any = super()
        own = {"limit": self.limit, "gradient": self.gradient}
        return {**extended._get_constructor_parameters(), **own}

    def set_limit(self, limit: Any) -> None:
        """Obey another limit from now on."""
        own: Any = self
        found = as_limit(limit)
        for part in own.modules():
            if isinstance(part, _Limited):
                part.limit = found

    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Actions in the environment's units, which obey the limit as they are returned."""
        policy: Any = self
        extended: Any = super()
        actions, state = extended.predict(observation, *args, **kwargs)
        seen, _ = policy.obs_to_tensor(observation)
        rows = actions.reshape(-1, int(np.prod(policy.action_space.shape)))
        return self.limit.executed(rows, seen, policy.action_space).reshape(actions.shape), state


class _LimitedActor(_Limited):
    """An actor of scaled actions a: the environment's are offset + unit ∘ a, |a_i| ≤ 1."""

    unit: Tensor
    offset: Tensor

    def __init__(self, *args: Any, limit: Any, gradient: Any = "exact", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limit, self.gradient = as_limit(limit), as_mode(gradient)
        actor: Any = self
        space = action_box(actor.action_space)
        low, high = (torch.as_tensor(b).flatten().double() for b in (space.low, space.high))
        if not bool(torch.isfinite(high - low).all()):
            raise ValueError(f"action_space: expected finite bounds, got {space}")
        actor.register_buffer("unit", ((high - low) / 2).float(), persistent=False)
        actor.register_buffer("offset", ((high + low) / 2).float(), persistent=False)

    def _limited(self, wanted: Tensor, observations: Any) -> Tensor:
        nearest = self.limit(wanted, observations, self.unit, self.offset, Bounds(-1.0, 1.0))
        return self.gradient(wanted, nearest)


class LimitedTD3Actor(_LimitedActor, td3.Actor):  # type: ignore[misc, unused-ignore]
    """TD3's actor with the limit as its last layer."""

    def forward(self, obs: Any) -> Tensor:
        """The actions, scaled to [−1, 1]."""
        return self._limited(super().forward(obs), obs)


class LimitedSACActor(_LimitedActor, sac.Actor):  # type: ignore[misc, unused-ignore]
    """SAC's actor with the limit as its last layer.

    Its entropy is that of the actions before the limit, whose density the limit, not being
    invertible, does not have.
    """

    def forward(self, obs: Any, deterministic: bool = False) -> Tensor:
        """The actions, scaled to [−1, 1]."""
        return self._limited(super().forward(obs, deterministic), obs)

    def action_log_prob(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Actions within the limit, and the log density of what they were before it."""
        actions, log_prob = super().action_log_prob(obs)
        return self._limited(actions, obs), log_prob


class _LimitedPolicy(_Limited):
    """A policy whose actor obeys the limit."""

    actor_type: ClassVar[type[_LimitedActor]]

    def __init__(self, *args: Any, limit: Any, gradient: Any = "exact", **kwargs: Any) -> None:
        # before the constructor, which makes the actors
        self.limit, self.gradient = fitted(as_limit(limit)), as_mode(gradient)
        super().__init__(*args, **kwargs)

    def make_actor(self, features_extractor: Any = None) -> Any:
        """An actor with the layer."""
        policy: Any = self
        arguments = policy._update_features_extractor(policy.actor_kwargs, features_extractor)
        actor: Any = self.actor_type(limit=self.limit, gradient=self.gradient, **arguments)
        return actor.to(policy.device)


class _LimitedTD3(_LimitedPolicy):
    actor_type = LimitedTD3Actor


class _LimitedSAC(_LimitedPolicy):
    actor_type = LimitedSACActor


class LimitedTD3Policy(_LimitedTD3, td3.TD3Policy):  # type: ignore[misc, unused-ignore]
    """For TD3 and DDPG: ``policy_kwargs={"limit": ActionLimit(...)}``."""


class LimitedSACPolicy(_LimitedSAC, sac.SACPolicy):  # type: ignore[misc, unused-ignore]
    """For SAC: ``policy_kwargs={"limit": ActionLimit(...)}``."""


class LimitedTD3CnnPolicy(_LimitedTD3, td3.CnnPolicy):  # type: ignore[misc, unused-ignore]
    """The same as `LimitedTD3Policy` for images."""


class LimitedSACCnnPolicy(_LimitedSAC, sac.CnnPolicy):  # type: ignore[misc, unused-ignore]
    """The same as `LimitedSACPolicy` for images."""


class LimitedTD3MultiInputPolicy(  # type: ignore[misc, unused-ignore]
    _LimitedTD3, td3.MultiInputPolicy
):
    """The same as `LimitedTD3Policy` for observations that are dictionaries."""


class LimitedSACMultiInputPolicy(  # type: ignore[misc, unused-ignore]
    _LimitedSAC, sac.MultiInputPolicy
):
    """The same as `LimitedSACPolicy` for observations that are dictionaries."""


class _LimitedActorCritic(_Limited):
    """A policy whose Gaussian has a mean that obeys the limit.

    Actions are samples around it and so may exceed the limit. They, their density and what the
    rollout buffer keeps are those of the Gaussian, for which the ratios of PPO are exact; what is
    executed is the nearest action allowed, by `LimitedActions` around the environment, or as
    `predict` returns it.
    """

    lower: Tensor
    upper: Tensor

    def __init__(self, *args: Any, limit: Any, gradient: Any = "penalty", **kwargs: Any) -> None:
        if kwargs.get("squash_output"):
            raise ValueError(
                "squash_output: expected False, as the limit holds for a mean in the units of the "
                "actions, not before a tanh"
            )
        self.limit, self.gradient = fitted(as_limit(limit)), as_mode(gradient)
        self._seen: Any = None
        super().__init__(*args, **kwargs)
        policy: Any = self
        space = action_box(policy.action_space)
        for name, bound in (("lower", space.low), ("upper", space.high)):
            value = torch.as_tensor(bound).flatten().float()
            policy.register_buffer(name, value, persistent=False)

    @contextmanager
    def _seeing(self, observations: Any) -> Iterator[None]:
        """The distribution is made from features, and the limit needs what they were made from."""
        before, self._seen = self._seen, observations
        try:
            yield
        finally:
            self._seen = before

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Any:
        policy: Any = self
        wanted = policy.action_net(latent_pi)
        bounds = Bounds(self.lower, self.upper)
        mean = self.gradient(wanted, self.limit(wanted, self._seen, bounds=bounds))
        noise = (latent_pi,) if policy.use_sde else ()
        return policy.action_dist.proba_distribution(mean, policy.log_std, *noise)

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Actions before the limit, values and log densities."""
        extended: Any = super()
        with self._seeing(obs):
            found: tuple[Tensor, Tensor, Tensor] = extended.forward(obs, deterministic)
        return found

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log densities of actions before the limit, and entropies."""
        extended: Any = super()
        with self._seeing(obs):
            found: tuple[Tensor, Tensor, Tensor | None] = extended.evaluate_actions(obs, actions)
        return found

    def get_distribution(self, obs: Any) -> Any:
        """That of actions before the limit."""
        extended: Any = super()
        with self._seeing(obs):
            return extended.get_distribution(obs)


class LimitedActorCriticPolicy(  # type: ignore[misc, unused-ignore]
    _LimitedActorCritic, ActorCriticPolicy
):
    """For PPO and A2C: ``policy_kwargs={"limit": ActionLimit(...)}``."""


class LimitedActorCriticCnnPolicy(  # type: ignore[misc, unused-ignore]
    _LimitedActorCritic, ActorCriticCnnPolicy
):
    """The same for images."""


class LimitedMultiInputActorCriticPolicy(  # type: ignore[misc, unused-ignore]
    _LimitedActorCritic, MultiInputActorCriticPolicy
):
    """The same for observations that are dictionaries."""
