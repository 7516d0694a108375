"""The robots: a simulator, and a limit on the mechanical power Σ|ω_i a_i| of every action."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium
    import torch

__all__ = ["TASKS", "Task", "find_task", "make_env", "missing", "power"]

Rows = TypeVar("Rows", NDArray[Any], "torch.Tensor")
INSTALL = "pip install 'dfwlayer[robotics]'"


@dataclass(frozen=True)
class Task:
    """A simulated robot whose actions a, |a_i| ≤ 1, obey Σ|ω_i a_i| ≤ limit.

    ω are the joints' velocities, in the order of the actuators. ``gamma`` and ``buffer_size`` are
    the expert's discount and the number of transitions it keeps. ``target`` is the return that
    an expert should reach.
    """

    name: str
    env_id: str
    velocity_at: tuple[int, ...]  # where ω stands in an observation
    observation_size: int
    limit: float  # p_max
    gamma: float
    buffer_size: int
    episode_steps: int
    transitions: int  # in a full set of the expert's steps
    packages: tuple[str, ...]  # what has to be importable
    target: float

    @property
    def action_size(self) -> int:
        return len(self.velocity_at)

    @property
    def slug(self) -> str:
        """The name as a file's: "hc_o" for HC+O."""
        return self.name.lower().replace("+", "_")

    def velocities(self, observations: Rows) -> Rows:
        """ω of observations (..., observation_size), as (..., action_size)."""
        return observations[..., list(self.velocity_at)]


def _reacher(name: str, limit: float, target: float) -> Task:
    return Task(
        name=name,
        env_id="ReacherBulletEnv-v0",
        velocity_at=(6, 8),
        observation_size=9,
        limit=limit,
        gamma=0.98,
        buffer_size=200_000,
        episode_steps=150,
        transitions=300_000,
        packages=("gymnasium", "safetensors", "pybullet", "pybullet_envs_gymnasium"),
        target=target,
    )


_CHEETAH = Task(
    name="HC+O",
    env_id="HalfCheetah-v5",
    velocity_at=(11, 12, 13, 14, 15, 16),
    observation_size=17,
    limit=20.0,
    gamma=0.99,
    buffer_size=1_000_000,
    episode_steps=1000,
    transitions=1_000_000,
    packages=("gymnasium", "safetensors", "mujoco"),
    target=5500.0,
)
TASKS: dict[str, Task] = {
    task.name: task
    for task in (_CHEETAH, _reacher("R+O03", 0.3, 16.0), _reacher("R+O10", 1.0, 16.0))
}


def find_task(name: str) -> Task:
    """The task of this name, in any case."""
    task = TASKS.get(name.upper())
    if task is None:
        raise ValueError(f"task: found {name!r}, expected one of {', '.join(TASKS)}")
    return task


def missing(task: Task) -> str | None:
    """A sentence that names what has to be installed for a task; None if it can run."""
    absent = [name for name in task.packages if find_spec(name) is None]
    if not absent:
        return None
    sentence = f"{task.name} needs {', '.join(absent)}; install with {INSTALL}"
    if "pybullet" in absent and sys.version_info >= (3, 12):
        sentence += (
            f". pybullet has no wheel for Python {sys.version_info.major}.{sys.version_info.minor}:"
            " use Python 3.11, or build it from source with pip install pybullet"
            " pybullet-envs-gymnasium"
        )
    return sentence


def make_env(
    task: Task, seed: int | None, render_mode: str | None = None
) -> gymnasium.Env[NDArray[Any], NDArray[Any]]:
    """The simulator, its random numbers seeded; ``reset()`` begins an episode."""
    absent = missing(task)
    if absent:
        raise ModuleNotFoundError(absent)
    with _silent(), _no_log(task), warnings.catch_warnings():
        # the simulators warn about their own models and dependencies
        warnings.simplefilter("ignore")
        import gymnasium

        if "pybullet" in task.packages:
            import pybullet_envs_gymnasium  # noqa: F401 (registers its environments)
        env = gymnasium.make(task.env_id, render_mode=render_mode, disable_env_checker=True)
        env.reset(seed=seed)
    return env


def power(task: Task, observations: NDArray[Any], actions: NDArray[Any]) -> NDArray[np.float64]:
    """Σ|ω_i a_i| of actions (..., action_size) taken at observations (..., observation_size)."""
    products = task.velocities(observations).astype(np.float64) * actions
    total: NDArray[np.float64] = np.abs(products).sum(-1)
    return total


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what the simulators' native code prints while they start."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


@contextmanager
def _no_log(task: Task) -> Iterator[None]:
    """Keep MuJoCo from logging warnings about its own models into the working folder."""
    if "mujoco" not in task.packages:
        yield
        return
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
