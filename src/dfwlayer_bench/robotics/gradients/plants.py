"""Small machines with a power limit, many copies at once: a planar arm and a pendulum.

States, observations and actions are rows (R, …); actions are scaled to [−1, 1]. The power of an
action is Σ|w_i a_i| with weights that follow from the observation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PLANTS", "Plant"]

STEP = 0.05  # seconds


@dataclass(frozen=True)
class Plant:
    """A machine, how it moves, and what it may spend."""

    name: str
    begin: Callable[[Tensor], Tensor]  # draws (R, draws) -> states
    observe: Callable[[Tensor], Tensor]  # states -> observations
    weights: Callable[[Tensor], Tensor]  # observations -> (R, action_size)
    move: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # states, actions -> states, rewards
    action_size: int
    draws: int  # uniform numbers in [0, 1] that make a state
    limit: float
    episode: int  # steps
    gamma: float  # discount
    steps: int = 12_000  # of training


# an arm of two links of length ½, whose tip reaches for a point: q, ω, target


def _begin_arm(draws: Tensor) -> Tensor:
    angles = (2 * draws[:, :2] - 1) * math.pi
    radius, direction = 0.2 + 0.7 * draws[:, 2], 2 * math.pi * draws[:, 3]
    target = torch.stack((radius * direction.cos(), radius * direction.sin()), -1)
    return torch.cat((angles, torch.zeros_like(angles), target), -1)


def _missed(state: Tensor) -> Tensor:
    """From the target to the tip, (R, 2)."""
    first, second = state[:, 0], state[:, 0] + state[:, 1]
    tip = torch.stack((first.cos() + second.cos(), first.sin() + second.sin()), -1) / 2
    return tip - state[:, 4:]


def _observe_arm(state: Tensor) -> Tensor:
    angles, velocities = state[:, :2], state[:, 2:4]
    return torch.cat((angles.cos(), angles.sin(), velocities, _missed(state)), -1)


def _weights_of_arm(seen: Tensor) -> Tensor:
    return seen[:, 4:6]


def _move_arm(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Each joint by itself obeys ω̇ = 8a − ω/2; semi-implicit Euler."""
    velocities = (state[:, 2:4] + STEP * (8 * action - state[:, 2:4] / 2)).clamp(-8, 8)
    after = torch.cat((state[:, :2] + STEP * velocities, velocities, state[:, 4:]), -1)
    return after, -_missed(after).norm(dim=-1) - 0.05 * action.square().sum(-1)


# the pendulum of Gymnasium's Pendulum-v1, torque 2a: angle from the top, ω


def _begin_pendulum(draws: Tensor) -> Tensor:
    return (2 * draws - 1) * torch.tensor([math.pi, 1.0])


def _observe_pendulum(state: Tensor) -> Tensor:
    return torch.stack((state[:, 0].cos(), state[:, 0].sin(), state[:, 1]), -1)


def _weights_of_pendulum(seen: Tensor) -> Tensor:
    return 2 * seen[:, 2:]


def _move_pendulum(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    angle, velocity, torque = state[:, 0], state[:, 1], 2 * action[:, 0]
    from_top = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
    cost = from_top.square() + 0.1 * velocity.square() + 0.001 * torque.square()
    velocity = (velocity + STEP * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
    return torch.stack((angle + STEP * velocity, velocity), -1), -cost


ARM = (_begin_arm, _observe_arm, _weights_of_arm, _move_arm)
PENDULUM = (_begin_pendulum, _observe_pendulum, _weights_of_pendulum, _move_pendulum)
PLANTS: dict[str, Plant] = {
    plant.name: plant
    for plant in (
        Plant("arm", *ARM, action_size=2, draws=4, limit=0.5, episode=60, gamma=0.95),
        Plant("pendulum", *PENDULUM, action_size=1, draws=2, limit=4.0, episode=200, gamma=0.98),
    )
}
