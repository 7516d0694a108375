"""Experts with a power limit: projection, learning, files, commands, in the real simulators."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("gymnasium", reason="needs the extra: pip install 'dfwlayer[robotics]'")
pytest.importorskip("safetensors", reason="needs the extra: pip install 'dfwlayer[robotics]'")
pytest.importorskip("typer", reason="needs the extra: pip install 'dfwlayer[cli]'")

from typer.testing import CliRunner

from dfwlayer.constraints.polyhedra.l1_box import project_l1_box
from dfwlayer_bench import cli
from dfwlayer_bench.robotics import tasks
from dfwlayer_bench.robotics.expert import collect
from dfwlayer_bench.robotics.expert.collect import Collection, Request, fingerprint
from dfwlayer_bench.robotics.expert.dpro import DPro, Settings, limited
from dfwlayer_bench.robotics.expert.replay import Batch, Replay
from dfwlayer_bench.robotics.expert.training import CHECKPOINT, Plan, Training
from dfwlayer_bench.robotics.files import FileError, load_dataset
from dfwlayer_bench.robotics.networks import Actor
from dfwlayer_bench.robotics.tasks import TASKS, Task, find_task, make_env, missing, power

CHEETAH, REACHER = TASKS["HC+O"], TASKS["R+O03"]
SMALL = Settings(hidden=(32, 16), batch_size=20, random_steps=100)
NO_TERMINAL = dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS")) | {
    "COLUMNS": "200"
}


def simulated(task: Task) -> Any:
    reason = missing(task)
    return pytest.param(
        task, id=task.name, marks=pytest.mark.skipif(reason is not None, reason=reason or "")
    )


every_task = pytest.mark.parametrize("task", [simulated(CHEETAH), simulated(REACHER)])


def run(*arguments: str, columns: int = 200) -> Any:
    narrow = NO_TERMINAL | {"COLUMNS": str(columns)}
    return CliRunner(env=narrow).invoke(cli.build_app(), ["robotics", *arguments])


def trained(task: Task, steps: int, folder: Path, **changes: Any) -> Training:
    changes = {"settings": SMALL, "evaluate_every": 400, "evaluation_episodes": 1} | changes
    plan = Plan(task, steps, **changes)
    training = Training(plan, folder)
    training.resume()
    training.run(lambda _: None, lambda: False)
    return training


def observation_with(task: Task, velocities: NDArray[np.float64]) -> NDArray[np.float64]:
    observation = np.zeros(task.observation_size)
    observation[list(task.velocity_at)] = velocities
    return observation


# --- the projection


def nearest(task: Task, velocities: NDArray[Any], proposed: NDArray[Any]) -> NDArray[Any]:
    cvxpy = pytest.importorskip("cvxpy")
    x = cvxpy.Variable(task.action_size)
    limits = [cvxpy.norm1(cvxpy.multiply(velocities, x)) <= task.limit, cvxpy.abs(x) <= 1]
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(x - proposed)), limits)
    problem.solve(cvxpy.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    found: NDArray[Any] = x.value
    return found


@pytest.mark.parametrize("task", [CHEETAH, REACHER], ids=lambda task: task.name)
@pytest.mark.parametrize("case", range(8))
def test_executed_action_is_the_nearest_one_allowed(task: Task, case: int) -> None:
    random = np.random.default_rng(case)
    scale = 4 * task.limit * 10.0 ** random.integers(-2, 2)
    velocities = random.normal(size=task.action_size) * scale
    velocities[random.random(task.action_size) < 0.25] = 0.0
    proposed = random.normal(size=task.action_size)  # some are beyond ±1
    action = limited(task, observation_with(task, velocities), proposed)
    expected = nearest(task, velocities, proposed)
    np.testing.assert_allclose(action, expected, atol=3e-6)
    numbers = torch.from_numpy(proposed), torch.from_numpy(velocities), task.limit, -1.0, 1.0
    np.testing.assert_allclose(project_l1_box(*numbers), expected, atol=3e-6)


speeds = st.floats(-1e3, 1e3) | st.just(0.0) | st.floats(-1e-30, 1e-30)


@given(
    velocities=st.lists(speeds, min_size=6, max_size=6),
    proposed=st.lists(st.floats(-3.0, 3.0), min_size=6, max_size=6),
)
def test_limit_holds_for_what_the_simulator_gets_and_for_what_is_stored(
    velocities: list[float], proposed: list[float]
) -> None:
    observation = observation_with(CHEETAH, np.array(velocities))
    action = limited(CHEETAH, observation, np.array(proposed))
    assert np.abs(action).max() <= 1
    for seen in (observation, observation.astype(np.float32)):
        used = sum(abs(float(seen[11 + i]) * float(action[i])) for i in range(6))
        assert used <= CHEETAH.limit
    inside = sum(abs(v) * min(abs(p), 1.0) for v, p in zip(velocities, proposed, strict=True))
    if inside < CHEETAH.limit * (1 - 1e-5):  # nothing to do but keep to ±1
        np.testing.assert_array_equal(action, np.clip(proposed, -1, 1).astype(np.float32))


def test_robot_at_rest_may_do_anything() -> None:
    proposed = np.array([0.7, -2.0])
    action = limited(REACHER, observation_with(REACHER, np.zeros(2)), proposed)
    np.testing.assert_array_equal(action, np.array([0.7, -1.0], dtype=np.float32))


# --- learning


def random_batch(random: torch.Generator, rows: int) -> Batch:
    return Batch(
        torch.randn(rows, 17, generator=random),
        torch.rand(rows, 6, generator=random) * 2 - 1,
        torch.randn(rows, generator=random),
        (torch.rand(rows, generator=random) < 0.3).float(),
        torch.randn(rows, 17, generator=random),
    )


def test_updates_are_those_of_td3_written_with_autograd() -> None:
    settings = Settings(hidden=(40, 30), batch_size=50)
    learner = DPro(CHEETAH, settings, 3, torch.device("cpu"))
    actor = deepcopy(learner.actor.network).requires_grad_()
    critics = deepcopy(learner.critics.network).requires_grad_()
    old_actor, old_critics = deepcopy(actor), deepcopy(critics)
    adams = [torch.optim.Adam(net.parameters(), 1e-3) for net in (actor, critics)]
    noises, batches = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    for step in range(1, 9):
        batch = random_batch(batches, 50)
        learner.update(batch)
        with torch.no_grad():
            noise = torch.empty(50, 6).normal_(0, 0.2, generator=noises).clamp(-0.5, 0.5)
            following = (old_actor(batch.next_observations) + noise).clamp(-1, 1)
            value = old_critics(batch.next_observations, following).min(0).values
            target = batch.rewards + 0.99 * (1 - batch.terminated) * value
        losses = (critics(batch.observations, batch.actions) - target).square().mean(1)
        adams[1].zero_grad()
        losses.sum().backward()
        adams[1].step()
        if step % 2 == 0:
            adams[0].zero_grad()
            (-critics(batch.observations, actor(batch.observations))[0].mean()).backward()
            adams[0].step()
            with torch.no_grad():
                for old, new in ((old_actor, actor), (old_critics, critics)):
                    for before, now in zip(old.parameters(), new.parameters(), strict=True):
                        before += 0.005 * (now - before)
    for mine, theirs in ((learner.actor.network, actor), (learner.critics.network, critics)):
        for ours, reference in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, reference, atol=2e-6, rtol=1e-4)
    moved = torch.cat([parameter.detach().reshape(-1) for parameter in old_critics.parameters()])
    torch.testing.assert_close(learner.critics.target_vector, moved, atol=2e-6, rtol=1e-4)


def test_memory_overwrites_the_oldest_and_samples_whole_rows() -> None:
    replay = Replay(5, 2, 1)
    for number in range(7):
        value = float(number)
        replay.add(np.full(2, value), np.full(1, value), value, number % 2 == 1, np.full(2, value))
    assert len(replay) == 5
    assert sorted(replay.observations[:, 0].tolist()) == [2, 3, 4, 5, 6]
    batch = replay.sample(200, np.random.default_rng(0), torch.device("cpu"))
    assert set(batch.rewards.tolist()) == {2, 3, 4, 5, 6}
    for part in (batch.observations, batch.actions, batch.next_observations):
        torch.testing.assert_close(part, batch.rewards.unsqueeze(-1).expand_as(part))
    torch.testing.assert_close(batch.terminated, batch.rewards % 2)


@every_task
def test_every_action_of_training_obeys_the_limit(task: Task, tmp_path: Path) -> None:
    training = trained(task, 500, tmp_path)
    seen, done = training.replay.observations, training.replay.actions
    assert seen.shape == (500, task.observation_size)
    used = np.zeros(500)
    for i, at in enumerate(task.velocity_at):
        used += np.abs(seen[:, at].astype(np.float64) * done[:, i])
    assert used.max() <= task.limit
    assert np.abs(done).max() <= 1
    assert (used > 0.99 * task.limit).mean() > 0.02  # the limit was met, not avoided
    assert training.violations == 0
    assert training.learner.updates == 400
    assert [point["violations"] for point in training.curve] == [0] * len(training.curve)


@every_task
def test_stopped_run_ends_where_one_that_ran_through_does(task: Task, tmp_path: Path) -> None:
    steps = 2 * task.episode_steps + 100
    settings = replace(SMALL, random_steps=task.episode_steps - 60)  # learning begins before
    through = trained(task, steps, tmp_path / "through", settings=settings)
    plan = through.plan
    stopped = Training(plan, tmp_path / "stopped")
    stopped.run(lambda _: None, lambda: True)
    assert stopped.step == task.episode_steps
    resumed = Training(plan, tmp_path / "stopped")
    assert resumed.resume()
    resumed.run(lambda _: None, lambda: False)
    assert resumed.step == through.step == steps
    np.testing.assert_array_equal(resumed.replay.saved(), through.replay.saved())
    for name, array in through.learner.state().items():
        np.testing.assert_array_equal(resumed.learner.state()[name], array, err_msg=name)
    assert [p["return"] for p in resumed.curve] == [p["return"] for p in through.curve]


@every_task
def test_seed_decides(task: Task, tmp_path: Path) -> None:
    first = trained(task, 150, tmp_path / "a", seed=1)
    again = trained(task, 150, tmp_path / "b", seed=1)
    other = trained(task, 150, tmp_path / "c", seed=2)
    np.testing.assert_array_equal(first.replay.saved(), again.replay.saved())
    assert not np.array_equal(first.replay.saved(), other.replay.saved())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@every_task
def test_full_disk_is_told_and_the_checkpoint_survives(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(task, 150, tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()

    def no_room(_: Path, content: bytes) -> None:
        with Path("/dev/full").open("wb") as file:
            file.write(content)

    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.raises(FileError, match="No space left on device"):
        training.save()
    assert (tmp_path / CHECKPOINT).read_bytes() == before


# --- collecting


@every_task
def test_interrupted_collection_is_completed_with_the_same_data(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "CHUNK", task.episode_steps)
    torch.manual_seed(1)
    actor = Actor(task.observation_size, task.action_size, (16,))
    request = Request(task, task.episode_steps + 50, 0, fingerprint(actor))
    whole = Collection(request, actor, tmp_path / "whole.npz").run(lambda _: None)

    def interrupt(done: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    path = tmp_path / "parts.npz"
    with pytest.raises(KeyboardInterrupt):
        Collection(request, actor, path).run(interrupt)
    assert not path.exists()
    saved = (tmp_path / "parts.parts" / "0000.npz").stat().st_mtime_ns
    told: list[int] = []

    def note(done: int) -> None:
        if done == 1:
            told.append((tmp_path / "parts.parts" / "0000.npz").stat().st_mtime_ns)

    Collection(request, actor, path).run(note)
    assert told == [saved]  # the first chunk was not made again
    found = load_dataset(path, task)
    np.testing.assert_array_equal(found.observations, whole.observations)
    np.testing.assert_array_equal(found.actions, whole.actions)
    assert len(found) == task.episode_steps + 50
    assert power(task, found.observations, found.actions).max() <= task.limit
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts.npz", "whole.npz"]


# --- tasks and commands


def joint_velocities(task: Task, simulator: Any) -> NDArray[Any]:
    """As the simulator itself knows them, in the order of its actuators."""
    if "pybullet" in task.packages:
        return np.array([simulator.robot.theta_dot, simulator.robot.gamma_dot])
    joints = simulator.model.actuator_trnid[:, 0]
    velocities: NDArray[Any] = simulator.data.qvel[simulator.model.jnt_dofadr[joints]]
    return velocities


@every_task
def test_velocities_are_those_of_the_joints_in_the_actuators_order(task: Task) -> None:
    env = make_env(task, 0)
    env.reset(seed=5)
    for _ in range(5):
        observation, *_ = env.step(np.linspace(0.2, 1.0, task.action_size, dtype=np.float32))
        expected = joint_velocities(task, env.unwrapped)
        np.testing.assert_allclose(task.velocities(observation), expected, rtol=1e-6)
        assert np.abs(expected).min() > 0
    env.close()


@every_task
def test_simulator_leaves_nothing_behind(
    task: Task,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    env = make_env(task, 0)
    env.reset()
    env.close()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_unknown_task_and_missing_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_task("hc+o") is CHEETAH
    with pytest.raises(ValueError, match="expected one of HC"):
        find_task("HC")
    result = run("train-expert", "--task", "Walker")
    assert result.exit_code == 2
    assert "Walker" in result.output
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if name == "gymnasium" else name)
    result = run("train-expert")
    assert result.exit_code == 1
    assert result.output.strip().splitlines() == [
        "dfw robotics: HC+O needs gymnasium; install with pip install 'dfwlayer[robotics]'"
    ]
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if "pybullet" in name else name)
    version = namedtuple("version", "major minor micro releaselevel serial")
    monkeypatch.setattr(sys, "version_info", version(3, 13, 0, "final", 0))
    assert "no wheel for Python 3.13: use Python 3.11" in str(missing(REACHER))


@every_task
def test_commands_train_go_on_and_collect(task: Task, tmp_path: Path) -> None:
    options = ["--task", task.name, "--out", str(tmp_path)]
    few = ["--random-steps", "100", "--evaluate-every", "100", "--episodes", "1"]
    result = run("train-expert", *options, *few, "--steps", "120", columns=60)
    assert result.exit_code == 0, result.output
    assert "Best actor: return" in result.output
    # a line is a line, however narrow a file counts as
    assert re.search(rf"^{re.escape(task.name)} step 120: .* steps/s$", result.output, re.MULTILINE)
    folder = tmp_path / task.slug / "expert"
    summary = json.loads((folder / "expert.json").read_text())
    assert summary["step"] == 120
    assert summary["versions"]["torch"] == torch.__version__
    result = run("train-expert", *options, *few, "--steps", "150")
    assert "Going on from step 120" in result.output
    assert len((folder / "curve.csv").read_text().splitlines()) == 1 + 2
    result = run("train-expert", *options, *few, "--steps", "150", "--seed", "1")
    assert result.exit_code == 1
    assert "seed 0 → 1" in result.output
    result = run("collect", *options, "--transitions", "40")
    assert result.exit_code == 0, result.output
    data = load_dataset(tmp_path / task.slug / "data" / "transitions.npz", task)
    assert len(data) == 40
    assert data.metadata["violations"] == 0
    smallest = torch.tensor(5e-324, dtype=torch.float64)
    assert smallest * 1 > 0, "training has to leave subnormal numbers as it found them"


@pytest.mark.skipif(missing(CHEETAH) is not None, reason=missing(CHEETAH) or "")
def test_killed_training_goes_on(tmp_path: Path) -> None:
    words = ["robotics", "train-expert", "--task", "HC+O", "--out", str(tmp_path)]
    words += ["--steps", "1000000", "--random-steps", "5000", "--evaluate-every", "1000"]
    script = "from dfwlayer_bench.cli import main; main()"
    command = [sys.executable, "-c", script, *words, "--episodes", "1"]
    checkpoint = tmp_path / "hc_o" / "expert" / CHECKPOINT
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    training = Training(
        Plan(CHEETAH, 10, evaluate_every=1000, settings=Settings(random_steps=5000)),
        checkpoint.parent,
    )
    assert training.resume()
    assert training.step >= 1000
    assert training.step == len(training.replay)
    assert training.step % 1000 == 0
