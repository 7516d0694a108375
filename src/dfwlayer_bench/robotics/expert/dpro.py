"""DPro: TD3 whose actions are projected onto the power limit before they are executed and stored.

The critic learns from what was executed, so the projection is part of the environment it sees;
targets and the actor's loss use actions as the actor proposes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dfwlayer_bench.robotics.expert.backprop import Passes, flatten, views
from dfwlayer_bench.robotics.expert.replay import Batch
from dfwlayer_bench.robotics.networks import HIDDEN, Actor, TwinCritic
from dfwlayer_bench.robotics.tasks import Task

__all__ = ["DPro", "Settings", "limited", "proposal"]

Network = TypeVar("Network", Actor, TwinCritic)
# An executed action keeps this far from the limit, relative to it: rounding the action and the
# observation to float32 moves the power by less, so that a recount never finds it exceeded.
MARGIN = 1e-6
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # Adam's


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
        moving = weight > 1e-9 * radius  # slower joints take no part: they use no power
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
            self.actor = Trained(Actor(*sizes).to(device), settings)
            self.critics = Trained(TwinCritic(*sizes).to(device), settings)
        self.first_critic = self.critics.only(0)
        self.noise = torch.Generator(device).manual_seed(seed)
        self.updates = 0

    @torch.no_grad()
    def update(self, batch: Batch) -> None:
        """One step of the critics, and every ``delay`` of them one of actor and targets."""
        settings = self.settings
        noise = torch.empty_like(batch.actions).normal_(
            0.0, settings.target_noise, generator=self.noise
        )
        noise.clamp_(-settings.target_noise_clip, settings.target_noise_clip)
        following = self.actor.target.forward(batch.next_observations.unsqueeze(0))[0].tanh_()
        following = following.add_(noise).clamp_(-1.0, 1.0)
        value = self.critics.target.forward(_pairs(batch.next_observations, following, 2)).amin(0)
        target = batch.rewards + self.task.gamma * (1.0 - batch.terminated) * value.squeeze(-1)
        estimates = self.critics.passes.forward(_pairs(batch.observations, batch.actions, 2))
        # the slope of the sum over both critics of their mean squared errors
        slope = (estimates - target.unsqueeze(-1)).mul_(2.0 / len(target))
        self.critics.passes.backward(slope, self.critics.gradients)
        self.critics.adam.step()
        self.updates += 1
        if self.updates % settings.delay == 0:
            self._update_actor(batch.observations)

    def _update_actor(self, observations: Tensor) -> None:
        """A step of the actor up the first critic's estimate, and one of all targets."""
        actions = self.actor.passes.forward(observations.unsqueeze(0)).tanh_()
        estimates = self.first_critic.forward(_pairs(observations, actions[0], 1))
        slope = torch.full_like(estimates, -1.0 / len(observations))
        slope = self.first_critic.backward(slope, to_inputs=True)[..., -self.task.action_size :]
        self.actor.passes.backward(slope * (1.0 - actions.square()), self.actor.gradients)
        self.actor.adam.step()
        for trained in (self.actor, self.critics):
            trained.follow(self.settings.tau)

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything but ``updates`` that decides how learning goes on, as arrays."""
        found = {"noise": self.noise.get_state()}
        for name, trained in (("actor", self.actor), ("critics", self.critics)):
            found |= {f"{name}.{key}": value for key, value in trained.state().items()}
        return {key: value.cpu().numpy() for key, value in found.items()}

    def restore(self, state: Mapping[str, NDArray[Any]], updates: int) -> None:
        """Go back to a state that was saved."""
        self.noise.set_state(torch.from_numpy(state["noise"].copy()))
        self.updates = updates
        for name, trained in (("actor", self.actor), ("critics", self.critics)):
            trained.restore(_part(state, name))


class Trained(Generic[Network]):
    """A network with its target, its gradient and its optimiser, each a single vector."""

    def __init__(self, network: Network, settings: Settings) -> None:
        self.network: Network = network
        self.rows = settings.batch_size
        self.vector = flatten(network)
        self.target_vector = self.vector.clone()
        self.vector.grad = torch.zeros_like(self.vector)
        self.adam = torch.optim.Adam([self.vector], settings.learning_rate, fused=True)
        self.gradients = self._layers(self.vector.grad)
        self.passes = Passes(*self._layers(self.vector), self.rows)
        self.target = Passes(*self._layers(self.target_vector), self.rows)

    def only(self, number: int) -> Passes:
        """The passes of one of several networks side by side."""
        weights, biases = self._layers(self.vector)
        chosen = slice(number, number + 1)
        return Passes([w[chosen] for w in weights], [b[chosen] for b in biases], self.rows)

    def follow(self, share: float) -> None:
        """Move the target by a share of the way to the network."""
        self.target_vector.lerp_(self.vector, share)

    def _layers(self, vector: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Weights (C, outputs, inputs) and biases (C, 1, outputs) that a vector holds."""
        parts = views(self.network, vector)
        if isinstance(self.network, TwinCritic):
            layers = len(self.network.weights)
            return parts[:layers], parts[layers:]
        return [w.unsqueeze(0) for w in parts[::2]], [b.view(1, 1, -1) for b in parts[1::2]]

    def state(self) -> dict[str, Tensor]:
        """Parameters, the target's, and the optimiser's moments."""
        moments = self.adam.state.get(self.vector, {})
        return {"parameters": self.vector, "target": self.target_vector, **moments}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a state that was saved."""
        self.vector.copy_(state["parameters"])
        self.target_vector.copy_(state["target"])
        moments = {key: value for key, value in state.items() if key in MOMENTS}
        content = self.adam.state_dict()
        self.adam.load_state_dict(content | {"state": {0: moments} if moments else {}})


def _pairs(observations: Tensor, actions: Tensor, critics: int) -> Tensor:
    """What so many critics see: (critics, B, observation_size + action_size)."""
    return torch.cat((observations, actions), -1).expand(critics, -1, -1)


def _part(state: Mapping[str, NDArray[Any]], name: str) -> dict[str, Tensor]:
    """The entries "name.*", without the name."""
    head = f"{name}."
    return {
        key.removeprefix(head): torch.from_numpy(value.copy())
        for key, value in state.items()
        if key.startswith(head)
    }
