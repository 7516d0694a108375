"""Training an expert: steps in the simulator, updates, evaluations, checkpoints."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dfwlayer_bench.robotics.episodes import Episodes, roll_out
from dfwlayer_bench.robotics.expert.dpro import DPro, Settings, limited, proposal
from dfwlayer_bench.robotics.expert.replay import Replay
from dfwlayer_bench.robotics.files import (
    load_run,
    save_actor,
    save_arrays,
    versions,
    writing,
)
from dfwlayer_bench.robotics.networks import Actor
from dfwlayer_bench.robotics.tasks import Task, make_env, power

__all__ = ["Episodes", "Plan", "Progress", "Training", "expert_policy", "roll_out"]

CHECKPOINT, EXPERT, CURVE, SUMMARY = (
    "checkpoint.safetensors",
    "expert.safetensors",
    "curve.csv",
    "expert.json",
)
# Episodes are numbered, and a number is a seed: training, evaluation and later use never share one
EVALUATION_SEED = 1_000_000_000
EVALUATION_STEPS = 3000


@dataclass(frozen=True)
class Plan:
    """What a training run is. Runs that differ in ``steps`` alone continue each other."""

    task: Task
    steps: int
    seed: int = 0
    evaluate_every: int = 10_000
    settings: Settings = field(default_factory=Settings)
    device: str = "cpu"
    evaluation_episodes: int | None = None  # None for as many as give a steady mean

    @property
    def episodes(self) -> int:
        """Episodes of one evaluation."""
        return self.evaluation_episodes or max(5, EVALUATION_STEPS // self.task.episode_steps)

    def identity(self) -> dict[str, Any]:
        """What must agree between a checkpoint and the run that continues it."""
        return {
            "seed": self.seed,
            "evaluate_every": self.evaluate_every,
            "settings": json.loads(json.dumps(asdict(self.settings))),
        }


@dataclass(frozen=True)
class Progress:
    """Where training stands."""

    step: int
    episode: int
    episode_return: float  # of the last finished one, with exploration
    violations: int  # in all of training
    steps_per_second: float
    evaluated: dict[str, float] | None = None  # the curve's newest point, right after it was made


class Training:
    """A run in a folder: everything needed to go on is in its checkpoint.

    Checkpoints are taken where an episode ends, and an episode's seed is its number, so a run
    that was stopped and continued does what one that ran through does.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        task = plan.task
        self.plan = plan
        self.folder = folder
        self.learner = DPro(task, plan.settings, plan.seed, torch.device(plan.device))
        self.replay = Replay(task.buffer_size, task.observation_size, task.action_size)
        self.random = np.random.default_rng(plan.seed)
        self.step = 0
        self.episode = 0
        self.violations = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self.best: dict[str, NDArray[Any]] = {}

    @property
    def finished(self) -> bool:
        return self.step >= self.plan.steps

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; False if there is none."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return False
        arrays, metadata = load_run(path, self.plan.task, self.plan.identity())
        self.learner.restore(arrays, metadata["updates"])
        self.replay.restore(arrays["replay"], metadata["transitions"])
        self.random.bit_generator.state = metadata["random"]
        self.best = {
            name.removeprefix("best."): array.copy()
            for name, array in arrays.items()
            if name.startswith("best.")
        }
        for name in ("step", "episode", "violations", "seconds", "curve"):
            setattr(self, name, metadata[name])
        return True

    def run(self, report: Callable[[Progress], None], stop: Callable[[], bool]) -> None:
        """Train until the plan's steps are done, or until ``stop()`` at the end of an episode."""
        env = make_env(self.plan.task, self.plan.seed)
        due = self._next_evaluation()
        try:
            while not self.finished:
                started, first = time.perf_counter(), self.step
                total = self._run_episode(env)
                seconds = time.perf_counter() - started
                self.seconds += seconds
                point = None
                if self.step >= due or self.finished:
                    point = self._evaluate()
                    due = self._next_evaluation()
                    self.save()
                rate = (self.step - first) / seconds
                report(Progress(self.step, self.episode, total, self.violations, rate, point))
                if stop() and not self.finished:
                    self.save()
                    return
        finally:
            env.close()

    def _next_evaluation(self) -> int:
        every = self.plan.evaluate_every
        return (self.step // every + 1) * every

    def _run_episode(self, env: Any) -> float:
        plan, learner = self.plan, self.learner
        task, settings, size = plan.task, plan.settings, plan.task.action_size
        # a run's episodes follow those of other seeds at a distance no run reaches
        observation, _ = env.reset(seed=plan.seed * 1_000_000 + self.episode)
        total, over = 0.0, False
        while not over:
            if self.step < settings.random_steps:
                proposed = self.random.uniform(-1.0, 1.0, size)
            else:
                noise = self.random.normal(0.0, settings.exploration_noise, size)
                proposed = proposal(learner.actor.network, observation) + noise
            action = limited(task, observation, proposed)
            self.violations += bool(power(task, observation, action) > task.limit)
            following, reward, terminated, truncated, _ = env.step(action)
            self.replay.add(observation, action, float(reward), terminated, following)
            self.step += 1
            if self.step > settings.random_steps:
                batch = self.replay.sample(settings.batch_size, self.random, learner.device)
                learner.update(batch)
            observation = following
            total += float(reward)
            over = terminated or truncated or self.finished
        self.episode += 1
        return total

    def _evaluate(self) -> dict[str, float]:
        """A new point of the curve; the best actor so far is kept and written."""
        task, actor = self.plan.task, self.learner.actor.network
        found = roll_out(task, expert_policy(task, actor), self.plan.episodes, EVALUATION_SEED)
        point = {
            "step": self.step,
            "return": found.mean_return,
            "return_std": float(np.std(found.returns)),
            "violations": found.violations,
            "largest_power": found.largest_power,
            "training_violations": self.violations,
            "seconds": round(self.seconds, 1),
        }
        if all(point["return"] > earlier["return"] for earlier in self.curve):
            state = actor.state_dict().items()
            self.best = {name: value.detach().cpu().numpy().copy() for name, value in state}
        self.curve.append(point)
        return point

    def metadata(self) -> dict[str, Any]:
        """What a reader of the results needs to know about the run."""
        return {
            "task": self.plan.task.name,
            "algorithm": "DPro",
            **self.plan.identity(),
            "step": self.step,
            "episode": self.episode,
            "violations": self.violations,
            "seconds": self.seconds,
            "versions": versions(),
            "curve": self.curve,
        }

    def save(self) -> None:
        """Write the checkpoint, the best actor so far, and the curve."""
        metadata = self.metadata()
        if self.curve:
            best = max(self.curve, key=lambda point: point["return"])
            chosen = {name: torch.from_numpy(array) for name, array in self.best.items()}
            save_actor(self.folder / EXPERT, chosen, metadata | {"chosen": best})
            with writing(self.folder / CURVE) as draft, draft.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(best))
                writer.writeheader()
                writer.writerows(self.curve)
        with writing(self.folder / SUMMARY) as draft:
            draft.write_text(json.dumps(metadata, indent=1), encoding="utf-8")
        arrays = self.learner.state() | {"replay": self.replay.saved()}
        arrays |= {f"best.{name}": array for name, array in self.best.items()}
        state = {
            "updates": self.learner.updates,
            "transitions": self.replay.count,
            "random": self.random.bit_generator.state,
        }
        save_arrays(self.folder / CHECKPOINT, arrays, metadata | state)


def expert_policy(task: Task, actor: Actor) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
    """The expert as it is shipped: the actor's action, projected onto the limit."""
    return lambda observation: limited(task, observation, proposal(actor, observation))
