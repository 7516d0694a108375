"""The expert as one module, to be exported: its network, and the limit as a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dfwlayer import SetLayer
from dfwlayer.constraints import L1Box
from dfwlayer.deploy import Report, export
from dfwlayer_bench.robotics.expert.dpro import MARGIN
from dfwlayer_bench.robotics.networks import Actor
from dfwlayer_bench.robotics.tasks import Task

__all__ = ["LimitedActor", "export_policy"]

COUNT = 2000  # observations to check a file on


class LimitedActor(nn.Module):
    """Observations to actions with Σ|ω_i a_i| ≤ limit and |a_i| ≤ 1, ω from the observation."""

    def __init__(self, task: Task, actor: Actor) -> None:
        super().__init__()
        self.task, self.actor = task, actor
        radius = task.limit * (1 - MARGIN)
        self.limit = SetLayer(lambda weight: L1Box(radius, weight))

    def forward(self, observations: Tensor) -> Tensor:  # (B, observation_size)
        velocities = self.task.velocities(observations)
        actions: Tensor = self.limit(-self.actor(observations), weight=velocities)
        return actions


def export_policy(task: Task, actor: Actor, path: Path, observations: Any) -> Report:
    """The policy as a file, checked on these observations (N, observation_size)."""
    given = torch.as_tensor(observations[:COUNT], dtype=torch.float32)

    def violation(x: Tensor, seen: Tensor) -> Tensor:
        power = (task.velocities(seen).double() * x.double()).abs().sum(-1)
        beyond = (x.double().abs() - 1).amax(-1)
        return torch.maximum(power / task.limit - 1, beyond).clamp_min(0)

    return export(
        LimitedActor(task, actor.eval()),
        path,
        given[:4],
        samples=lambda count: given[:count],
        count=len(given),
        violation=violation,
    )
