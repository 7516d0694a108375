"""Data for imitation: what a trained expert does, step by step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dfwlayer_bench.robotics.expert.dpro import limited
from dfwlayer_bench.robotics.files import (
    Dataset,
    FileError,
    load_dataset,
    save_dataset,
    versions,
)
from dfwlayer_bench.robotics.networks import Actor
from dfwlayer_bench.robotics.tasks import Task, make_env, power

__all__ = ["Collection", "Request", "fingerprint"]

FIRST_SEED = 3_000_000_000  # apart from the episodes of training and of evaluations
CHUNK = 20_000  # transitions in a file, roughly; what an interruption can lose
TOGETHER = 8  # episodes side by side, so that the network sees a few rows at once


@dataclass(frozen=True)
class Request:
    """What to collect."""

    task: Task
    transitions: int
    seed: int
    expert: str  # the actor's fingerprint

    @property
    def episodes_per_chunk(self) -> int:
        return -(-min(CHUNK, self.transitions) // self.task.episode_steps)

    @property
    def chunks(self) -> int:
        return -(-self.transitions // (self.episodes_per_chunk * self.task.episode_steps))

    def episode_seeds(self, chunk: int) -> range:
        first = FIRST_SEED + self.seed * 1_000_000 + chunk * self.episodes_per_chunk
        return range(first, first + self.episodes_per_chunk)


def fingerprint(actor: Actor) -> str:
    """A number that changes with the actor's parameters."""
    sums = [zlib.crc32(value.cpu().numpy().tobytes()) for value in actor.state_dict().values()]
    return f"{zlib.crc32(repr(sums).encode()):08x}"


class Collection:
    """Chunks in a folder until all of them are there, then one file."""

    def __init__(self, request: Request, actor: Actor, path: Path) -> None:
        self.request = request
        self.actor = actor
        self.path = path
        self.parts = path.with_suffix(".parts")

    def run(self, report: Callable[[int], None]) -> Dataset:
        """Collect what is missing, telling how many chunks are done; the whole, as written."""
        request = self.request
        found = []
        for number in range(request.chunks):
            chunk = self._load(number)
            if chunk is None:
                chunk = _chunk(request, self.actor, request.episode_seeds(number))
                save_dataset(self._part(number), chunk)
            found.append(chunk)
            report(number + 1)
        whole = _join(request, found)
        save_dataset(self.path, whole)
        for number in range(request.chunks):
            self._part(number).unlink(missing_ok=True)
        if not any(self.parts.iterdir()):
            self.parts.rmdir()
        return whole

    def _part(self, number: int) -> Path:
        return self.parts / f"{number:04}.npz"

    def _load(self, number: int) -> Dataset | None:
        """A chunk of an earlier run of the same request, None if there is none."""
        try:
            chunk = load_dataset(self._part(number), self.request.task)
        except FileError:
            return None
        same = chunk.metadata.get("made_by") == _made_by(self.request)
        return chunk if same and chunk.rewards is not None else None


def _made_by(request: Request) -> dict[str, Any]:
    return {"expert": request.expert, "seed": request.seed}


def _chunk(request: Request, actor: Actor, seeds: Sequence[int]) -> Dataset:
    """The transitions of whole episodes, one after the other."""
    task = request.task
    # made anew for each chunk, so that a chunk does not depend on those before it
    envs = [make_env(task, seed) for seed in seeds[:TOGETHER]]
    episodes: list[tuple[NDArray[np.float32], ...]] = []
    for start in range(0, len(seeds), TOGETHER):
        episodes += _episodes(task, actor, envs, seeds[start : start + TOGETHER])
    for env in envs:
        env.close()
    observations, actions, rewards = (
        np.concatenate(parts) for parts in zip(*episodes, strict=True)
    )
    returns = [float(rewards.sum(dtype=np.float64)) for *_, rewards in episodes]
    metadata = {"made_by": _made_by(request), "returns": returns}
    return Dataset(task.name, observations, actions, rewards, metadata)


def _episodes(
    task: Task, actor: Actor, envs: Sequence[Any], seeds: Sequence[int]
) -> list[tuple[NDArray[np.float32], ...]]:
    """Observations, actions and rewards of an episode for each seed, run side by side."""
    current = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=False)]
    steps: list[list[tuple[NDArray[Any], NDArray[np.float32], float]]] = [[] for _ in seeds]
    running = list(range(len(seeds)))
    while running:
        rows = torch.from_numpy(np.stack([current[i] for i in running]).astype(np.float32))
        with torch.inference_mode():
            proposed = actor(rows).numpy()
        going = []
        for i, proposal in zip(running, proposed, strict=True):
            action = limited(task, current[i], proposal)
            following, reward, terminated, truncated, _ = envs[i].step(action)
            steps[i].append((current[i], action, float(reward)))
            current[i] = following
            if not (terminated or truncated):
                going.append(i)
        running = going
    return [
        tuple(np.array(part, dtype=np.float32) for part in zip(*episode, strict=True))
        for episode in steps
    ]


def _join(request: Request, chunks: Sequence[Dataset]) -> Dataset:
    """The chunks as one, cut to the number of transitions asked for."""
    task, size = request.task, request.transitions
    observations = np.concatenate([chunk.observations for chunk in chunks])[:size]
    actions = np.concatenate([chunk.actions for chunk in chunks])[:size]
    rewards = np.concatenate([c.rewards for c in chunks if c.rewards is not None])[:size]
    powers = power(task, observations, actions)
    returns = [value for chunk in chunks for value in chunk.metadata["returns"]]
    metadata = {
        "made_by": _made_by(request),
        "transitions": len(observations),
        "first_episode_seed": request.episode_seeds(0).start,
        "mean_return": float(np.mean(returns)),
        "violations": int((powers > task.limit).sum()),
        "largest_power": float(powers.max()),
        "limit": task.limit,
        "versions": versions(),
    }
    return Dataset(task.name, observations, actions, rewards, metadata)
