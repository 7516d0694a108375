"""DPro: TD3 whose actions are projected onto the power limit before they are executed and stored.

The critic learns from what was executed, so the projection is part of the environment it sees;
targets and the actor's loss use actions as the actor proposes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dfwlayer_bench.robotics.networks import HIDDEN, Actor, TwinCritic
from dfwlayer_bench.robotics.replay import Batch
from dfwlayer_bench.robotics.tasks import Task

__all__ = ["DPro", "Settings", "limited", "proposal"]

# An executed action keeps this far from the limit, relative to it: rounding the action and the
# observation to float32 moves the power by less, so that a recount never finds it exceeded.
MARGIN = 1e-6


@dataclass(frozen=True)
class Settings:
    """What TD3 leaves open."""

    hidden: tuple[int, ...] = HIDDEN
    batch_size: int = 100
    learning_rate: float = 1e-3
    tau: float = 0.005  # share of the networks that enters their targets in a step
    delay: int = 2  # steps of the critics for one of the actor
    exploration_noise: float = 0.1
    target_noise: float = 0.2
    target_noise_clip: float = 0.5
    random_steps: int = 10_000  # of uniformly random proposals, before anything is learnt


def limited(task: Task, observation: NDArray[Any], proposed: NDArray[Any]) -> NDArray[np.float32]:
    """The nearest action to the proposed one with Σ|ω_i a_i| ≤ limit and |a_i| ≤ 1.

    a_i = sign(z_i) clip(|z_i| − λ|ω_i|, 0, 1), with the least λ ≥ 0 that obeys the limit. The power
    falls piecewise linearly in λ: its breakpoints are tried all at once, and λ lies on the line
    between two of them. One observation and action at a time, because it is called in every step.
    """
    size = np.abs(proposed.astype(np.float64))
    weight = np.abs(task.velocities(observation).astype(np.float64))
    radius = task.limit * (1 - MARGIN)
    amount = np.minimum(size, 1.0)
    if weight @ amount > radius:
        moving = weight > 0
        slopes = weight[moving]
        breaks = np.concatenate((size[moving] / slopes, (size[moving] - 1.0) / slopes, (0.0,)))
        breaks = np.sort(breaks[breaks >= 0])
        powers = np.clip(size - breaks[:, None] * weight, 0.0, 1.0) @ weight
        # powers[0] is that of λ = 0, beyond the radius; the last one is 0
        at = int(np.argmax(powers <= radius))
        share = (powers[at - 1] - radius) / (powers[at - 1] - powers[at])
        multiplier = breaks[at - 1] + share * (breaks[at] - breaks[at - 1])
        amount = np.clip(size - multiplier * weight, 0.0, 1.0)
    action: NDArray[np.float32] = np.copysign(amount, proposed).astype(np.float32)
    return action


def proposal(actor: Actor, observation: NDArray[Any]) -> NDArray[np.float32]:
    """The actor's action for one observation, before the limit."""
    device = next(actor.parameters()).device
    with torch.inference_mode():
        rows = torch.from_numpy(observation.astype(np.float32)).to(device).unsqueeze(0)
        action: NDArray[np.float32] = actor(rows).squeeze(0).cpu().numpy()
    return action


class DPro:
    """Networks, their slowly moving targets, optimisers, and the updates of TD3."""

    def __init__(self, task: Task, settings: Settings, seed: int, device: torch.device) -> None:
        self.task = task
        self.settings = settings
        self.device = device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = task.observation_size, task.action_size, settings.hidden
            self.actor = Actor(*sizes).to(device)
            self.critics = TwinCritic(*sizes).to(device)
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.actor_adam = self._adam(self.actor)
        self.critic_adam = self._adam(self.critics)
        self.noise = torch.Generator(device).manual_seed(seed)
        self.updates = 0

    def _adam(self, network: nn.Module) -> torch.optim.Adam:
        return torch.optim.Adam(network.parameters(), self.settings.learning_rate, fused=True)

    def update(self, batch: Batch) -> None:
        """One step of the critics, and every ``delay`` of them one of actor and targets."""
        settings = self.settings
        with torch.no_grad():
            noise = torch.empty_like(batch.actions).normal_(
                0.0, settings.target_noise, generator=self.noise
            )
            noise.clamp_(-settings.target_noise_clip, settings.target_noise_clip)
            following = self.target_actor(batch.next_observations).add_(noise).clamp_(-1.0, 1.0)
            value = self.target_critics(batch.next_observations, following).amin(0)
            target = batch.rewards + self.task.gamma * (1.0 - batch.terminated) * value
        estimates = self.critics(batch.observations, batch.actions)
        # the sum over both critics of their mean squared errors
        loss = 2.0 * functional.mse_loss(estimates, target.expand_as(estimates))
        self.critic_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.critic_adam.step()
        self.updates += 1
        if self.updates % settings.delay == 0:
            self._update_actor(batch.observations)

    def _update_actor(self, observations: Tensor) -> None:
        loss = -self.critics.first(observations, self.actor(observations)).mean()
        self.actor_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.actor_adam.step()
        with torch.no_grad():
            for network, target in (
                (self.actor, self.target_actor),
                (self.critics, self.target_critics),
            ):
                torch._foreach_lerp_(
                    list(target.parameters()), list(network.parameters()), self.settings.tau
                )

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything but ``updates`` that decides how learning goes on, as arrays."""
        found: dict[str, Tensor] = {"noise": self.noise.get_state()}
        for name, network in self._networks().items():
            found |= {f"{name}.{key}": value for key, value in network.state_dict().items()}
        for name, adam in self._optimisers().items():
            for number, moments in adam.state_dict()["state"].items():
                found |= {f"{name}.{number}.{key}": value for key, value in moments.items()}
        return {key: value.detach().cpu().numpy() for key, value in found.items()}

    def restore(self, state: Mapping[str, NDArray[Any]], updates: int) -> None:
        """Go back to a state that was saved."""
        self.noise.set_state(torch.from_numpy(state["noise"].copy()))
        self.updates = updates
        for name, network in self._networks().items():
            network.load_state_dict(_part(state, name))
        for name, adam in self._optimisers().items():
            content = adam.state_dict()
            for key, value in _part(state, name).items():
                number, moment = key.split(".")
                content["state"].setdefault(int(number), {})[moment] = value
            adam.load_state_dict(content)

    def _networks(self) -> dict[str, nn.Module]:
        return {
            "actor": self.actor,
            "critics": self.critics,
            "target_actor": self.target_actor,
            "target_critics": self.target_critics,
        }

    def _optimisers(self) -> dict[str, torch.optim.Adam]:
        return {"actor_adam": self.actor_adam, "critic_adam": self.critic_adam}


def _part(state: Mapping[str, NDArray[Any]], name: str) -> dict[str, Tensor]:
    """The entries "name.*", without the name."""
    head = f"{name}."
    return {
        key.removeprefix(head): torch.from_numpy(value.copy())
        for key, value in state.items()
        if key.startswith(head)
    }
