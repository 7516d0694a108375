"""The networks of expert and imitator: layers of 400 and 300 units with ReLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["HIDDEN", "Actor", "TwinCritic"]

HIDDEN = (400, 300)


class Actor(nn.Module):
    """Observations (B, observation_size) to actions (B, action_size) in [−1, 1]."""

    def __init__(
        self, observation_size: int, action_size: int, hidden: Sequence[int] = HIDDEN
    ) -> None:
        super().__init__()
        sizes = (observation_size, *hidden)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], action_size), nn.Tanh())

    def forward(self, observations: Tensor) -> Tensor:
        actions: Tensor = self.layers(observations)
        return actions


class TwinCritic(nn.Module):
    """Two independent estimates of the return of actions, side by side in batched products."""

    def __init__(
        self, observation_size: int, action_size: int, hidden: Sequence[int] = HIDDEN
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList()  # (2, outputs, inputs) each
        self.biases = nn.ParameterList()  # (2, 1, outputs) each
        for inputs, outputs in pairwise((observation_size + action_size, *hidden, 1)):
            bound = 1 / math.sqrt(inputs)  # as in nn.Linear
            self.weights.append(torch.empty(2, outputs, inputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Both estimates, (2, B)."""
        values = torch.cat((observations, actions), -1).expand(2, -1, -1)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = torch.baddbmm(bias, values, weight.mT)
            if layer < last:
                values = values.relu()
        return values.squeeze(-1)
