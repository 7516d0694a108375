"""Imitation: a policy with a layer at its end learns an expert's actions from its observations.

Every layer and seed is a run of its own, kept in one file that holds all it needs to go on. With
the same seed all layers begin with the same weights and see the same batches.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dfwlayer_bench.robotics.expert.dpro import MARGIN
from dfwlayer_bench.robotics.files import (
    Dataset,
    FileError,
    load_arrays,
    load_run,
    save_arrays,
    versions,
)
from dfwlayer_bench.robotics.imitation.layers import Limit, find_layer
from dfwlayer_bench.robotics.networks import Actor
from dfwlayer_bench.robotics.tasks import Task, power

__all__ = ["Imitation", "Plan", "Policy", "Split", "Step", "load_policy", "run_file", "split"]

CHUNK = 10_000  # test samples in one call of a layer
PERIOD = 1000  # of batches drawn at once from a seed of their own, so that none has to be stored
TRAINED = 0.8  # share of the samples that is trained on
LATEST = 100  # losses whose mean tells how training goes


class Policy(nn.Module):
    """Observations (B, observation_size) to actions (B, action_size): a network, then a layer.

    The layer gets the limit less a margin, as the expert's projection does, so that rounding
    never shows as a violation.
    """

    def __init__(self, task: Task, layer: Limit) -> None:
        super().__init__()
        self.task = task
        self.actor = Actor(task.observation_size, task.action_size)
        self.layer = layer

    def forward(self, observations: Tensor) -> Tensor:
        wanted = self.actor(observations)
        limit = self.task.limit * (1 - MARGIN)
        return self.layer(wanted, self.task.velocities(observations), limit)


@dataclass(frozen=True)
class Split:
    """Samples to train on and samples to test on."""

    observations: Tensor  # (N, observation_size)
    actions: Tensor  # (N, action_size)
    test_observations: Tensor
    test_actions: Tensor
    fingerprint: str  # of the whole data

    def __len__(self) -> int:
        return len(self.observations)


def split(dataset: Dataset) -> Split:
    """Four fifths to train on, one to test on, the same ones whatever the seed of a run."""
    if len(dataset) < 10:
        raise FileError(f"data: found {len(dataset)} samples, expected at least 10; collect more")
    order = np.random.default_rng(0).permutation(len(dataset))
    first = int(TRAINED * len(dataset))
    observations, actions = dataset.observations[order], dataset.actions[order]
    check = zlib.crc32(dataset.actions.tobytes(), zlib.crc32(dataset.observations.tobytes()))
    return Split(
        torch.from_numpy(observations[:first]),
        torch.from_numpy(actions[:first]),
        torch.from_numpy(observations[first:]),
        torch.from_numpy(actions[first:]),
        f"{len(dataset)} samples, {check:08x}",
    )


@dataclass(frozen=True)
class Plan:
    """What the runs have in common. Runs that differ in ``steps`` alone continue each other."""

    task: Task
    steps: int = 4000
    batch_size: int = 64
    learning_rate: float = 1e-4
    test_every: int = 200

    def identity(self, data: Split) -> dict[str, Any]:
        """What must agree between a file and the run that continues it."""
        return {
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "test_every": self.test_every,
            "data": data.fingerprint,
        }


@dataclass(frozen=True)
class Step:
    """Where a run stands."""

    step: int
    loss: float  # mean of the latest
    tested: dict[str, float] | None = None  # the curve's newest point, right after it was made


def assess(policy: Policy, data: Split) -> dict[str, float]:
    """The errors and the violations on the whole test set, powers recounted in float64."""
    rows = data.test_observations
    with torch.no_grad():
        parts = [policy(rows[first : first + CHUNK]) for first in range(0, len(rows), CHUNK)]
    found = torch.cat(parts)
    powers = power(policy.task, rows.numpy(), found.numpy())
    return {
        "mse": float(functional.mse_loss(found, data.test_actions)),
        **violations(powers, policy.task.limit),
    }


def violations(powers: NDArray[np.float64], limit: float) -> dict[str, float]:
    """The share of actions beyond the limit, and by how much: on average over those, and most."""
    over = powers[powers > limit] - limit
    return {
        "violation_rate": len(over) / max(powers.size, 1),
        "mean_violation": float(over.mean()) if len(over) else 0.0,
        "largest_violation": float(over.max()) if len(over) else 0.0,
    }


class Imitation:
    """One run: a layer and a seed."""

    def __init__(self, plan: Plan, data: Split, layer: str, seed: int, folder: Path) -> None:
        self.plan, self.data, self.layer, self.seed = plan, data, layer, seed
        self.path = run_file(folder, layer, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = Policy(plan.task, find_layer(layer).build())
        self.adam = torch.optim.Adam(self.policy.parameters(), lr=plan.learning_rate)
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self._batches: NDArray[np.int64] = np.empty((0, 0), np.int64)

    @property
    def finished(self) -> bool:
        return self.step >= self.plan.steps

    def resume(self) -> bool:
        """Go on from the run's file; False if there is none."""
        if not self.path.exists():
            return False
        arrays, metadata = load_run(self.path, self.plan.task, self.plan.identity(self.data))
        _fill(self.policy.actor, arrays)
        state = self.adam.state_dict()
        for name, array in arrays.items():
            head, number, *moment = name.split(".")
            if head == "adam":
                entry = state["state"].setdefault(int(number), {})
                entry[".".join(moment)] = torch.from_numpy(array.copy())
        self.adam.load_state_dict(state)
        for name in ("step", "seconds", "curve"):
            setattr(self, name, metadata[name])
        if not self.finished and not state["state"]:
            raise FileError(
                f"{self.path} holds a policy of {self.step} steps without the optimiser's moments, "
                "so that it cannot go on; ask for as many steps, or choose another --out"
            )
        return True

    def run(self, report: Callable[[Step], None]) -> None:
        """Train until the plan's steps are done; what was interrupted goes on from a test."""
        plan = self.plan
        if not self.curve:
            self.curve.append({"step": 0, "loss": float("nan"), **assess(self.policy, self.data)})
        losses: list[float] = []
        while not self.finished:
            started = time.perf_counter()
            losses.append(self.train_once(*self.batch(self.step)))
            self.seconds += time.perf_counter() - started
            self.step += 1
            loss = float(np.mean(losses[-LATEST:]))
            point = None
            if self.step % plan.test_every == 0 or self.finished:
                point = {"step": self.step, "loss": loss, **assess(self.policy, self.data)}
                self.curve.append(point)
                self.save()
            report(Step(self.step, loss, point))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Observations and actions for this step: whatever was run before, they are the same."""
        at = step % PERIOD
        if at == 0 or not len(self._batches):
            random = np.random.default_rng([self.seed, step // PERIOD])
            size = (PERIOD, self.plan.batch_size)
            self._batches = random.integers(0, len(self.data), size)
        rows = torch.from_numpy(self._batches[at])
        return self.data.observations[rows], self.data.actions[rows]

    def train_once(self, observations: Tensor, actions: Tensor) -> float:
        """One step of Adam; the loss before it."""
        loss = functional.mse_loss(self.policy(observations), actions)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        return loss.item()

    def save(self) -> None:
        """Write the policy, the optimiser's moments and the curve."""
        arrays = {f"actor.{k}": v.numpy() for k, v in self.policy.actor.state_dict().items()}
        for number, moments in self.adam.state_dict()["state"].items():
            arrays |= {f"adam.{number}.{name}": value.numpy() for name, value in moments.items()}
        metadata = {
            "task": self.plan.task.name,
            "layer": self.layer,
            "seed": self.seed,
            **self.plan.identity(self.data),
            "step": self.step,
            "seconds": self.seconds,
            "versions": versions(),
            "curve": self.curve,
        }
        save_arrays(self.path, arrays, metadata)


def run_file(folder: Path, layer: str, seed: int) -> Path:
    """Where a run is kept."""
    return folder / "runs" / f"{layer}-{seed}.safetensors"


def load_policy(folder: Path, task: Task, layer: str, seed: int) -> tuple[Policy, dict[str, Any]]:
    """The policy of a run and the run's metadata."""
    arrays, metadata = load_arrays(run_file(folder, layer, seed), task)
    policy = Policy(task, find_layer(layer).build())
    _fill(policy.actor, arrays)
    return policy.eval(), metadata


def _fill(actor: Actor, arrays: Mapping[str, NDArray[Any]]) -> None:
    head = "actor."
    state = {
        name.removeprefix(head): torch.from_numpy(array.copy())
        for name, array in arrays.items()
        if name.startswith(head)
    }
    actor.load_state_dict(state)
