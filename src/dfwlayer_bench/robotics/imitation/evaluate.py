"""Policies in the simulator: what they earn, and what power they use, counted from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dfwlayer_bench.robotics.expert.dpro import limited
from dfwlayer_bench.robotics.files import writing
from dfwlayer_bench.robotics.imitation.training import Policy, load_policy, violations
from dfwlayer_bench.robotics.networks import Actor
from dfwlayer_bench.robotics.tasks import Task, make_env, power

__all__ = [
    "EVALUATION",
    "EXPERT_NAME",
    "FRESH_SEED",
    "Evaluation",
    "Policies",
    "Rollout",
    "act_of",
    "act_of_expert",
    "evaluate",
    "roll_out_together",
]

Act = Callable[[NDArray[Any]], NDArray[np.float32]]  # observations (K, …) to actions (K, …)
EXPERT_NAME = "expert"
EVALUATION = "evaluation.json"
FRESH_SEED = 2_000_000_000  # of the first episode; experts are trained and chosen on others


@dataclass(frozen=True)
class Rollout:
    """K episodes side by side."""

    returns: NDArray[np.float64]  # (K,)
    powers: NDArray[np.float64]  # (steps, K), NaN after the end of an episode
    largest_action: float  # |a_i|, which should not be beyond 1


@dataclass(frozen=True)
class Evaluation:
    """What one policy did in the simulator."""

    layer: str
    seed: int
    trained_steps: int
    returns: list[float]
    steps: int
    violation_rate: float
    mean_violation: float
    largest_violation: float
    largest_action: float

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))


def roll_out_together(task: Task, act: Act, episodes: int, seed: int = FRESH_SEED) -> Rollout:
    """Run episodes seeded seed, seed + 1, … in step, so that a policy is called once for all.

    The power is that of the action given to the simulator at the velocities it reported.
    """
    envs = [make_env(task, seed + number) for number in range(episodes)]
    try:
        observations = np.stack(
            [env.reset(seed=seed + number)[0] for number, env in enumerate(envs)]
        )
        returns = np.zeros(episodes)
        running = np.ones(episodes, dtype=bool)
        powers: list[NDArray[np.float64]] = []
        largest = 0.0
        while running.any():
            actions = act(observations)
            used = power(task, observations, actions)
            powers.append(np.where(running, used, np.nan))
            largest = max(largest, float(np.abs(actions[running]).max()))
            for number in np.flatnonzero(running):
                following, reward, terminated, truncated, _ = envs[number].step(actions[number])
                observations[number] = following
                returns[number] += float(reward)
                running[number] = not (terminated or truncated)
    finally:
        for env in envs:
            env.close()
    return Rollout(returns, np.stack(powers), largest)


def act_of(policy: Policy) -> Act:
    """The actions of an imitating policy."""

    def act(observations: NDArray[Any]) -> NDArray[np.float32]:
        with torch.no_grad():
            actions = policy(torch.from_numpy(observations.astype(np.float32)))
        found: NDArray[np.float32] = actions.numpy()
        return found

    return act


def act_of_expert(task: Task, actor: Actor) -> Act:
    """The actions of the expert, each projected onto the limit."""

    def act(observations: NDArray[Any]) -> NDArray[np.float32]:
        with torch.no_grad():
            wanted = actor(torch.from_numpy(observations.astype(np.float32))).numpy()
        pairs = zip(observations, wanted, strict=True)
        return np.stack([limited(task, observation, action) for observation, action in pairs])

    return act


class Policies:
    """The runs of a folder and what is known of them in the simulator.

    What was evaluated before, with as many steps and episodes, is not evaluated again.
    """

    def __init__(self, folder: Path, task: Task, expert: Actor) -> None:
        self.folder, self.task, self.expert = folder, task, expert
        self.path = folder / EVALUATION
        self.known: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.known = json.loads(self.path.read_text(encoding="utf-8"))

    def act(self, layer: str, seed: int) -> tuple[Act, int]:
        """A policy's actions, and the steps it was trained for."""
        if layer == EXPERT_NAME:
            return act_of_expert(self.task, self.expert), 0
        policy, metadata = load_policy(self.folder, self.task, layer, seed)
        return act_of(policy), int(metadata["step"])

    def median_episode(self, layer: str, seed: int) -> int:
        """The number of an episode whose return is the median, or the next lower, of a policy's."""
        returns = self.known[f"{layer}-{seed}"]["returns"]
        return int(np.argsort(returns)[(len(returns) - 1) // 2])

    def evaluate(self, layer: str, seed: int, episodes: int) -> Evaluation:
        """Fresh episodes of one policy, or what is known of them."""
        act, steps = self.act(layer, seed)
        key = f"{layer}-{seed}"
        before = self.known.get(key)
        if before and before["trained_steps"] == steps and len(before["returns"]) == episodes:
            return Evaluation(**before)
        found = evaluate(self.task, act, layer, seed, steps, episodes)
        self.known[key] = asdict(found)
        with writing(self.path) as draft:
            draft.write_text(json.dumps(self.known, indent=1), encoding="utf-8")
        return found


def evaluate(
    task: Task, act: Act, layer: str, seed: int, trained_steps: int, episodes: int
) -> Evaluation:
    """Returns and violations in fresh episodes, the same ones for every policy."""
    found = roll_out_together(task, act, episodes)
    powers = found.powers[~np.isnan(found.powers)]
    return Evaluation(
        layer=layer,
        seed=seed,
        trained_steps=trained_steps,
        returns=found.returns.tolist(),
        steps=powers.size,
        largest_action=found.largest_action,
        **violations(powers, task.limit),
    )
