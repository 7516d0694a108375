"""The comparison of gradient modes: its machines, its agents, and the command."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors", reason="needs the extra: pip install 'dfwlayer[robotics]'")
pytest.importorskip("typer", reason="needs the extra: pip install 'dfwlayer[cli]'")
pytest.importorskip("matplotlib", reason="needs the extra: pip install 'dfwlayer[bench]'")

from typer.testing import CliRunner

from dfwlayer_bench.cli import build_app
from dfwlayer_bench.report.intervals import interval
from dfwlayer_bench.robotics.gradients.plants import PLANTS
from dfwlayer_bench.robotics.gradients.report import rows_of
from dfwlayer_bench.robotics.gradients.training import MODES, Agents, Plan


def plan(**changes):
    known = {"task": "arm", "modes": tuple(MODES), "seeds": (0, 3), "steps": 40}
    return Plan(**(known | {"evaluate_every": 20} | changes))


def test_the_pendulum_is_that_of_gymnasium():
    gymnasium = pytest.importorskip("gymnasium", reason="needs the extra `robotics`")
    plant, env = PLANTS["pendulum"], gymnasium.make("Pendulum-v1")
    seen, _ = env.reset(seed=1)
    state = torch.tensor(env.unwrapped.state, dtype=torch.float64).unsqueeze(0)
    for torque in np.random.default_rng(0).uniform(-2, 2, 40).astype(np.float32):
        np.testing.assert_allclose(plant.observe(state)[0], seen, atol=1e-5)
        seen, want, *_ = env.step(np.array([torque]))
        state, reward = plant.move(state, torch.tensor([[torque / 2]], dtype=torch.float64))
        assert reward.item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("name", PLANTS)
def test_a_machine_at_rest_spends_nothing(name):
    plant = PLANTS[name]
    state = plant.begin(torch.rand(50, plant.draws, dtype=torch.float64))
    for _ in range(10):
        state, _ = plant.move(state, torch.full((50, plant.action_size), 0.3).double())
    moving = slice(2, 4) if name == "arm" else slice(1, 2)
    largest = {"arm": 1.0, "pendulum": 2.0}[name]  # force of an action of 1
    weights = plant.weights(plant.observe(state))
    torch.testing.assert_close(weights, largest * state[:, moving])
    state[:, moving] = 0
    assert (plant.weights(plant.observe(state)) == 0).all()


def test_agents_of_a_seed_begin_alike_and_learn_each_in_its_way(tmp_path):
    agents = Agents(plan(), tmp_path / "checkpoint.safetensors")
    first = agents.actors.weights[0].detach().unflatten(0, (len(MODES), 2))
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[:, 0], first[:, 1])
    bias = agents.actors.weights[-1]
    with torch.no_grad():
        bias += 1  # more than is allowed
    seen = 3 * torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(0)).expand(8, -1, -1)
    wanted, done = agents.acted(agents.actors, seen)
    (found,) = torch.autograd.grad(done.sum(), bias)
    none, exact, penalty, soft = found.view(len(MODES), 2, -1).unbind()
    nearest = agents._allowed(wanted, seen)
    assert torch.equal(done[:2], wanted[:2])
    assert torch.equal(done[2:], nearest[2:])
    slope = 1 - wanted.square()
    pull = (slope * (wanted - nearest)).mean(1)[4:6]
    torch.testing.assert_close(penalty, exact + pull)
    torch.testing.assert_close(soft, (none + exact) / 2)
    assert not torch.allclose(exact, none)


def test_an_agent_does_not_depend_on_the_others(tmp_path):
    agents = Agents(plan(), tmp_path / "checkpoint.safetensors")
    agents.run(lambda _: None)
    assert all(point["violation_rate"] == 0 for point in agents.curve)
    assert len(agents.curve) == 2 * len(MODES) * 2
    alone = Agents(plan(modes=("penalty",), seeds=(3,)), tmp_path / "alone.safetensors")
    alone.run(lambda _: None)
    own = [p for p in agents.curve if p["mode"] == "penalty" and p["seed"] == 3]
    for found, want in zip(alone.curve, own, strict=True):
        assert found["mean_return"] == pytest.approx(want["mean_return"], rel=1e-3)


def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(tmp_path):
    class StopError(Exception):
        pass

    def stop(step):
        if step == 30:
            raise StopError

    whole = Agents(plan(), tmp_path / "whole.safetensors")
    whole.run(lambda _: None)
    first = Agents(plan(), tmp_path / "parts.safetensors")
    with pytest.raises(StopError):
        first.run(stop)
    second = Agents(plan(), tmp_path / "parts.safetensors")
    second.resume()
    assert second.step == 20
    second.run(lambda _: None)
    longer = Agents(plan(steps=60), tmp_path / "parts.safetensors")
    longer.resume()
    assert longer.step == 40
    again = Agents(plan(steps=20), tmp_path / "parts.safetensors")  # has already gone further
    again.resume()
    again.run(lambda _: None)
    assert again.step == 40
    longer.run(lambda _: None)
    assert longer.curve[: len(second.curve)] == second.curve
    assert second.curve == whole.curve
    for found, want in zip(second.actors.weights, whole.actors.weights, strict=True):
        assert torch.equal(found, want)
    with pytest.raises(ValueError, match="made differently"):
        Agents(plan(seeds=(0, 1)), tmp_path / "parts.safetensors").resume()


def test_intervals_and_gains_are_by_hand():
    assert interval([1.0]) is None
    assert interval([0.0, 2.0]) == pytest.approx(12.706)
    curve = [
        {
            "mode": mode,
            "seed": seed,
            "step": 10,
            "mean_return": seed + shift,
            "violation_rate": 0.0,
            "outside": 0.5,
            "distance": 0.1,
            "lost": 0.2,
        }
        for mode, shift in (("exact", 0.0), ("soft", 2.0))
        for seed in (0, 1)
    ]
    exact, soft = rows_of("arm", curve)
    assert (exact.end, exact.gain, soft.end) == (0.5, 0.0, 2.5)
    assert (soft.gain, soft.gain_interval) == (2.0, 0.0)


def test_the_command_writes_and_resumes(tmp_path):
    words = ["robotics", "gradients", "--tasks", "arm", "--steps", "20", "--seeds", "0"]
    words += ["--out", str(tmp_path)]
    for _ in range(2):
        found = CliRunner().invoke(build_app(), words)
        assert found.exit_code == 0, found.output
    folder = tmp_path / "gradients"
    with (folder / "curves.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(MODES) * 10
    content = json.loads((folder / "gradients.json").read_text(encoding="utf-8"))
    assert {row["mode"] for row in content["rows"]} == set(MODES)
    assert {row["violation_rate"] for row in content["rows"]} == {0.0}
    for name in ("gradients.md", "gradients-arm.png"):
        assert (folder / name).exists()
    wrong = CliRunner().invoke(build_app(), ["robotics", "gradients", "--modes", "hard"])
    assert wrong.exit_code == 2
