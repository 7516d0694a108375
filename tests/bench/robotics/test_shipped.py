"""The experts and samples that come with the package, recounted in the real simulators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="needs the extra: pip install 'dfwlayer[robotics]'")

from dfwlayer_bench.robotics.expert import expert_policy
from dfwlayer_bench.robotics.expert.collect import fingerprint
from dfwlayer_bench.robotics.files import ASSETS, load_actor, load_dataset
from dfwlayer_bench.robotics.tasks import TASKS, Task, make_env, missing

SHIPPED = [task for task in TASKS.values() if (ASSETS / f"{task.slug}_expert.safetensors").exists()]


def expert_file(task: Task) -> Path:
    return ASSETS / f"{task.slug}_expert.safetensors"


def simulated(task: Task) -> Any:
    reason = missing(task)
    return pytest.param(
        task, id=task.name, marks=pytest.mark.skipif(reason is not None, reason=reason or "")
    )


def test_experts_of_all_tasks_are_there() -> None:
    assert {task.name for task in SHIPPED} == {"HC+O", "R+O03", "R+O10"}


@pytest.mark.parametrize("task", [simulated(task) for task in SHIPPED])
def test_expert_does_as_recorded_without_violation(task: Task) -> None:
    actor, about = load_actor(expert_file(task), task)
    act = expert_policy(task, actor)
    env = make_env(task, None)
    returns, violations = [], 0
    for seed in range(77, 77 + (40 if task.episode_steps < 1000 else 2)):
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            action = act(observation)
            used = sum(
                abs(float(observation[at]) * float(action[i]))
                for i, at in enumerate(task.velocity_at)
            )
            violations += used > task.limit or np.abs(action).max() > 1
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    env.close()
    assert violations == 0
    # the episodes are others than those it was chosen by, and the reacher's differ a lot
    assert np.mean(returns) >= 0.75 * about["chosen"]["return"]


@pytest.mark.parametrize("task", SHIPPED, ids=lambda task: task.name)
def test_curve_tells_of_at_least_300000_steps_without_violation(task: Task) -> None:
    _, about = load_actor(expert_file(task), task)
    curve = about["curve"]
    assert curve[-1]["step"] >= 300_000
    assert all(point["violations"] == point["training_violations"] == 0 for point in curve)
    assert about["chosen"] == max(curve, key=lambda point: point["return"])
    lines = (ASSETS / f"{task.slug}_curve.csv").read_text().splitlines()
    assert [float(line.split(",")[1]) for line in lines[1:]] == [p["return"] for p in curve]


@pytest.mark.parametrize("task", SHIPPED, ids=lambda task: task.name)
def test_sample_is_the_experts_and_obeys_the_limit(task: Task) -> None:
    actor, _ = load_actor(expert_file(task), task)
    sample = load_dataset(ASSETS / f"{task.slug}_sample.npz", task)
    assert sample.metadata["made_by"]["expert"] == fingerprint(actor)
    assert 10_000 <= len(sample) <= 20_000
    used = np.zeros(len(sample))
    for i, at in enumerate(task.velocity_at):
        used += np.abs(sample.observations[:, at].astype(np.float64) * sample.actions[:, i])
    assert used.max() <= task.limit
    assert np.abs(sample.actions).max() <= 1
