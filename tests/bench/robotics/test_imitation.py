"""Imitation within a power limit: layers, training, evaluation, commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="needs the extra: pip install 'dfwlayer[robotics]'")
pytest.importorskip("safetensors", reason="needs the extra: pip install 'dfwlayer[robotics]'")
pytest.importorskip("typer", reason="needs the extra: pip install 'dfwlayer[cli]'")

from typer.testing import CliRunner

from dfwlayer_bench import cli
from dfwlayer_bench.robotics.expert.dpro import MARGIN, limited
from dfwlayer_bench.robotics.files import (
    ASSETS,
    Dataset,
    FileError,
    load_arrays,
    load_dataset,
    save_actor,
    save_arrays,
    save_dataset,
)
from dfwlayer_bench.robotics.imitation.evaluate import (
    EVALUATION,
    FRESH_SEED,
    Policies,
    act_of,
    evaluate,
    roll_out_together,
)
from dfwlayer_bench.robotics.imitation.layers import LAYERS, find_layer
from dfwlayer_bench.robotics.imitation.timing import time_layers
from dfwlayer_bench.robotics.imitation.training import (
    Imitation,
    Plan,
    Policy,
    load_policy,
    split,
    violations,
)
from dfwlayer_bench.robotics.networks import Actor
from dfwlayer_bench.robotics.tasks import TASKS, make_env, missing

CHEETAH, REACHER = TASKS["HC+O"], TASKS["R+O03"]
NO_TERMINAL = dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS")) | {
    "COLUMNS": "200"
}
# largest error of the layers that look for the projection, from the tolerances they are set to
PROJECTING = {"dfwlayer": 1e-5, "optnet": 1e-4, "alt-diff": 5e-3, "cvxpylayers": 1e-4}
RIVALS_WARN = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SCALES = {"HC+O": 8.0, "R+O03": 1.0}  # of the velocities


def simulated(task):
    reason = missing(task)
    marks = pytest.mark.skipif(reason is not None, reason=reason or "")
    return pytest.param(task, id=task.name, marks=marks)


def built(name):
    reason = LAYERS[name].missing()
    if reason:
        pytest.skip(reason)
    return LAYERS[name].build()


def problems(task, count=64, seed=0):
    """Wanted actions and velocities; some velocities are 0, as after a reset."""
    random = np.random.default_rng(seed)
    wanted = random.uniform(-1, 1, (count, task.action_size)).astype(np.float32)
    size = random.uniform(0.1, 2.0, wanted.shape) * SCALES[task.name]
    velocity = (size * random.choice([-1, 1], wanted.shape)).astype(np.float32)
    velocity[:3] = 0
    velocity[3:6, 0] = 0
    return torch.from_numpy(wanted), torch.from_numpy(velocity)


def nearest(wanted, velocity, limit):
    """The projection in float64, by bisection on its multiplier."""
    wanted, weight = wanted.double(), velocity.double().abs()
    low = torch.zeros(len(wanted), 1, dtype=torch.float64)
    high = torch.full_like(low, 1e9)

    def shrunk(multiplier):
        return (wanted.abs() - multiplier * weight).clamp_min(0)

    for _ in range(200):
        middle = 0.5 * (low + high)
        over = (weight * shrunk(middle)).sum(-1, keepdim=True) > limit
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    outside = (weight * wanted.abs()).sum(-1, keepdim=True) > limit
    return torch.where(outside, wanted.sign() * shrunk(high), wanted)


@RIVALS_WARN
@pytest.mark.parametrize("task", [CHEETAH, REACHER], ids=lambda task: task.name)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_do_what_they_say(name, task):
    layer = built(name)
    wanted, velocity = problems(task)
    exact = nearest(wanted, velocity, task.limit)
    found = layer(wanted, velocity, task.limit).double()
    powers = (velocity.double() * found).abs().sum(-1)
    if not name.startswith("dfw-"):  # an approximation may leave the bounds of the actions
        assert found.abs().max() <= 1 + 1e-6
    if name in PROJECTING:
        assert (found - exact).abs().max() <= PROJECTING[name]
    if name == "none":
        assert torch.equal(found, wanted.double())
    else:
        assert (powers <= task.limit * (1 + (1e-3 if name == "alt-diff" else 1e-6))).all()
    if name == "radial":
        inside = (velocity.double() * wanted).abs().sum(-1) <= task.limit
        assert torch.equal(found[inside], wanted.double()[inside])
        assert ((powers[~inside] / task.limit - 1).abs() <= 1e-6).all()
    if name.startswith("dfw-"):  # feasible points are no nearer than the projection
        far, near = ((x - wanted.double()).square().sum(-1) for x in (found, exact))
        assert (far >= near - 1e-6).all()


@RIVALS_WARN
@pytest.mark.parametrize("name", PROJECTING)
def test_gradients_are_those_of_the_projection(name):
    layer = built(name)
    wanted, velocity = (part.double() for part in problems(CHEETAH, 16))
    direction, cotangent = torch.randn(2, *wanted.shape, generator=torch.manual_seed(1)).double()
    step = 1e-6
    ahead, behind = (nearest(wanted + s * direction, velocity, 20.0) for s in (step, -step))
    slope = (cotangent * (ahead - behind)).sum(-1) / (2 * step)
    # a kink between the two has no slope to compare
    smooth = (ahead == 0).eq(behind == 0).all(-1)
    leaf = wanted.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(leaf, velocity, 20.0), leaf, cotangent)
    found = (gradient * direction).sum(-1)
    tolerance = 3e-2 if name == "alt-diff" else 1e-4
    assert smooth.sum() >= 12
    assert ((found - slope)[smooth].abs() <= tolerance * (1 + slope[smooth].abs())).all()


@pytest.mark.parametrize("task", [CHEETAH, REACHER], ids=lambda task: task.name)
def test_no_action_of_ours_exceeds_the_limit_even_by_rounding(task):
    wanted, velocity = problems(task, 20_000, seed=5)
    found = built("dfwlayer")(wanted, velocity, task.limit * (1 - MARGIN)).double()
    powers = (velocity.double() * found).abs().sum(-1)
    assert powers.max() <= task.limit
    assert (powers > 0.999 * task.limit).float().mean() > 0.1  # the limit was in the way


def test_a_layer_that_is_missing_says_what_to_install():
    absent = replace(LAYERS["radial"], packages=("no-such-distribution",))
    assert "needs no-such-distribution; pip install" in absent.missing()
    with pytest.raises(ValueError, match="expected one of none, dfwlayer"):
        find_layer("soft")


def made_up(task, count=600, seed=3):
    """Actions of a random network, limited, at random observations."""
    random = np.random.default_rng(seed)
    observations = random.standard_normal((count, task.observation_size)).astype(np.float32)
    observations[:, list(task.velocity_at)] *= SCALES[task.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        actor = Actor(task.observation_size, task.action_size)
    with torch.no_grad():
        proposed = torch.tanh(30 * actor(torch.from_numpy(observations))).numpy()
    actions = np.stack([limited(task, o, a) for o, a in zip(observations, proposed, strict=True)])
    return Dataset(task.name, observations, actions)


def expert_data(task, steps=400):
    """The package's sample, or what a random network does in the simulator."""
    sample = ASSETS / f"{task.slug}_sample.npz"
    if sample.exists():
        return load_dataset(sample, task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        actor = Actor(task.observation_size, task.action_size)
    env = make_env(task, 0)
    observation, _ = env.reset(seed=0)
    seen, done = [], []
    for _ in range(steps):
        with torch.no_grad():
            row = torch.from_numpy(observation.astype(np.float32))[None]
            proposed = torch.tanh(30 * actor(row))[0].numpy()
        action = limited(task, observation, proposed)
        seen.append(observation.astype(np.float32))
        done.append(action)
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    return Dataset(task.name, np.stack(seen), np.stack(done))


def test_the_split_keeps_every_sample_once():
    data = made_up(REACHER, 50)
    parts = split(data)
    assert (len(parts.observations), len(parts.test_observations)) == (40, 10)
    both = torch.cat([parts.observations, parts.test_observations]).numpy()
    order = np.lexsort(both.T), np.lexsort(data.observations.T)
    np.testing.assert_array_equal(both[order[0]], data.observations[order[1]])
    actions = torch.cat([parts.actions, parts.test_actions]).numpy()
    np.testing.assert_array_equal(actions[order[0]], data.actions[order[1]])
    assert parts.fingerprint != split(made_up(REACHER, 50, seed=4)).fingerprint
    with pytest.raises(FileError, match="found 5 samples"):
        split(made_up(REACHER, 5))


def test_violations_are_counted_strictly():
    found = violations(np.array([1.0, 2.0, 2.0 + 1e-9, 5.0]), 2.0)
    assert found["violation_rate"] == 0.5
    assert found["mean_violation"] == pytest.approx(1.5)
    assert found["largest_violation"] == 3.0


@pytest.mark.parametrize("task", [simulated(CHEETAH), simulated(REACHER)])
def test_imitation_learns_within_the_limit(task, tmp_path):
    data = split(expert_data(task))
    plan = Plan(task, steps=200, test_every=100)
    curves = {}
    for name in ("none", "dfwlayer"):
        run = Imitation(plan, data, name, 0, tmp_path)
        run.run(lambda _: None)
        curves[name] = run.curve
        first, last = run.curve[0], run.curve[-1]
        assert [point["step"] for point in run.curve] == [0, 100, 200]
        assert last["mse"] < 0.9 * first["mse"]
    for point in curves["dfwlayer"]:
        assert point["violation_rate"] == point["largest_violation"] == 0
    # what is told of the test set is so
    policy, metadata = load_policy(tmp_path, task, "none", 0)
    with torch.no_grad():
        found = policy(data.test_observations)
    error = (found - data.test_actions).double().square().mean()
    assert metadata["curve"][-1]["mse"] == pytest.approx(float(error), rel=1e-5)
    speed = data.test_observations[:, list(task.velocity_at)].double()
    over = (speed * found).abs().sum(-1) > task.limit
    assert metadata["curve"][-1]["violation_rate"] == pytest.approx(float(over.double().mean()))


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    data = split(made_up(CHEETAH))
    plan = Plan(CHEETAH, steps=30, test_every=10)
    through = Imitation(plan, data, "dfwlayer", 7, tmp_path / "through")
    assert not through.resume()
    through.run(lambda _: None)

    class KilledError(Exception):
        pass

    def kill(step):
        if step.step == 15:  # between two tests: what came after the last one is lost
            raise KilledError

    stopped = Imitation(plan, data, "dfwlayer", 7, tmp_path / "stopped")
    with pytest.raises(KilledError):
        stopped.run(kill)
    again = Imitation(plan, data, "dfwlayer", 7, tmp_path / "stopped")
    assert again.resume()
    assert again.step == 10
    again.run(lambda _: None)
    for one, other in zip(through.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(through.curve, again.curve, strict=True):
        assert {**one, "loss": 0} == {**other, "loss": 0}  # a mean of the steps since the start

    other = Imitation(replace(plan, learning_rate=1e-3), data, "dfwlayer", 7, tmp_path / "stopped")
    with pytest.raises(FileError, match=r"made differently \(learning_rate 0.0001 → 0.001\)"):
        other.resume()


def test_a_policy_without_its_optimiser_counts_but_does_not_go_on(tmp_path):
    data = split(made_up(CHEETAH))
    plan = Plan(CHEETAH, steps=10, test_every=10)
    run = Imitation(plan, data, "none", 0, tmp_path)
    run.run(lambda _: None)
    arrays, metadata = load_arrays(run.path, CHEETAH)
    policy = {name: array for name, array in arrays.items() if name.startswith("actor.")}
    save_arrays(run.path, policy, metadata)
    again = Imitation(plan, data, "none", 0, tmp_path)
    assert again.resume()
    assert again.finished
    with pytest.raises(FileError, match="10 steps without the optimiser's moments"):
        Imitation(replace(plan, steps=20), data, "none", 0, tmp_path).resume()


def test_layers_get_the_same_start_and_the_same_batches(tmp_path):
    data = split(made_up(CHEETAH))
    runs = [Imitation(Plan(CHEETAH), data, name, 2, tmp_path) for name in ("none", "radial")]
    for one, other in zip(*(run.policy.parameters() for run in runs), strict=True):
        assert torch.equal(one, other)
    for step in (0, 1, 1000):
        assert torch.equal(runs[0].batch(step)[0], runs[1].batch(step)[0])
    assert not torch.equal(runs[0].batch(0)[0], runs[0].batch(1)[0])


def test_timings_are_of_the_same_turns():
    found = time_layers(Plan(REACHER), split(made_up(REACHER)), ["none", "dfwlayer"], 4)
    none, ours = found
    assert (none.layer, none.times_none, none.repeats) == ("none", 1.0, 4)
    assert ours.low <= ours.median <= ours.high
    assert ours.times_none is not None
    assert ours.times_none > 1


@pytest.mark.parametrize("task", [simulated(CHEETAH), simulated(REACHER)])
def test_powers_in_the_simulator_are_recounted(task):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        policy = Policy(task, LAYERS["none"].build())
    with torch.no_grad():
        policy.actor.layers[-2].weight *= 50  # bold enough to break the limit
    short = replace(task, limit=0.2 * task.limit)
    found = roll_out_together(short, act_of(policy), 2)
    envs = [make_env(task, None) for _ in range(2)]
    seen = np.stack([env.reset(seed=FRESH_SEED + i)[0] for i, env in enumerate(envs)])
    for step in range(20):
        with torch.no_grad():
            actions = policy(torch.tensor(seen, dtype=torch.float32)).numpy()
        for number, env in enumerate(envs):
            speeds = [float(seen[number, place]) for place in task.velocity_at]
            used = sum(abs(w * float(a)) for w, a in zip(speeds, actions[number], strict=True))
            assert used == pytest.approx(found.powers[step, number], rel=1e-12)
            seen[number] = env.step(actions[number])[0]
    for env in envs:
        env.close()
    assert found.powers.shape == (task.episode_steps, 2)
    told = evaluate(short, act_of(policy), "none", 0, 0, 2)
    assert told.violation_rate == (found.powers > short.limit).mean() > 0
    assert told.largest_violation == found.powers.max() - short.limit
    assert told.returns == found.returns.tolist()


@pytest.mark.parametrize(
    ("returns", "number"), [([5.0], 0), ([1.0, 9.0, 4.0], 2), ([3, 1, 2, 9], 2)]
)
def test_the_episode_that_is_filmed_is_no_lucky_one(tmp_path, returns, number):
    content = {"none-7": {"returns": returns}}
    (tmp_path / EVALUATION).write_text(json.dumps(content), encoding="utf-8")
    known = Policies(tmp_path, CHEETAH, Actor(CHEETAH.observation_size, CHEETAH.action_size))
    assert known.median_episode("none", 7) == number


def dfw(*arguments):
    return CliRunner(env=NO_TERMINAL).invoke(cli.build_app(), ["robotics", *arguments])


@pytest.mark.skipif(missing(REACHER) is not None, reason=missing(REACHER) or "")
def test_commands_from_data_to_report(tmp_path):
    out = tmp_path / "results"
    save_dataset(out / REACHER.slug / "data" / "transitions.npz", made_up(REACHER))
    actor = Actor(REACHER.observation_size, REACHER.action_size)
    expert = tmp_path / "expert.safetensors"
    save_actor(expert, actor.state_dict(), {"task": REACHER.name})
    common = ["--task", "R+O03", "--layers", "none", "dfwlayer", "--quick", "--out", str(out)]
    found = dfw("imitate", *common, "--steps", "20", "--test-every", "10", "--repeats", "2")
    assert found.exit_code == 0, found.output
    assert "dfwlayer (exact)" in found.output
    assert "A quick run: up to" in found.output
    assert "[40 of 40] R+O03 dfwlayer, seed 0: loss" in found.output  # how far it is, and when
    folder = out / REACHER.slug / "imitation"
    kept = {path: path.stat().st_mtime_ns for path in (folder / "runs").glob("*.safetensors")}
    assert len(kept) == 2
    again = dfw("imitate", *common, "--steps", "20", "--test-every", "10", "--repeats", "2")
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing was done twice

    found = dfw("evaluate", *common, "--expert", str(expert), "--no-animation")
    assert found.exit_code == 0, found.output
    assert "[3 of 3] dfwlayer, seed 0: return" in found.output
    content = json.loads((folder / "imitation.json").read_text())
    assert "--steps 20 --slow-steps 10 --seeds 0" in content["command"]
    assert content["command"].endswith("--learning-rate 0.0001 --test-every 10")
    rows = {row["layer"]: row for row in content["rows"]}
    assert rows["dfwlayer"]["steps"] == 20
    assert rows["dfwlayer"]["violation_rate"] == rows["dfwlayer"]["episode_violation_rate"] == 0
    assert rows["expert"]["episode_violation_rate"] == 0
    for name in ("imitation.md", "imitation.csv", "curves.csv", "report.html"):
        assert (folder / name).stat().st_size > 0
    for name in ("imitation.png", "power.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(missing(REACHER) is not None, reason=missing(REACHER) or "")
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["imitate", "--layers", "soft"], 2, "--layers: unknown soft"),
        (["imitate", "--seeds", "x"], 2, "--seeds: expected integers"),
        (["imitate", "--data", "nowhere.npz"], 1, "nowhere.npz is not there"),
        (["evaluate"], 1, "make them with `dfw robotics imitate`"),
    ],
)
def test_mistakes_are_named(arguments, code, told, tmp_path):
    expert = Path(tmp_path) / "r_o03" / "expert" / "expert.safetensors"
    state = Actor(REACHER.observation_size, REACHER.action_size).state_dict()
    save_actor(expert, state, {"task": REACHER.name})
    found = dfw(*arguments, "--task", "R+O03", "--out", str(tmp_path))
    assert found.exit_code == code
    assert told in " ".join(found.output.replace("│", " ").split())
