"""The policies for Stable-Baselines3, trained for a moment on a real environment."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="needs the extra: pip install 'dfwlayer[robotics]'")
gymnasium = pytest.importorskip("gymnasium", reason="needs the extra `robotics`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages warn about each other while they are imported
    from stable_baselines3 import DDPG, SAC, TD3
    from stable_baselines3.common.noise import NormalActionNoise

    from dfwlayer.integrations.sb3 import (
        ActionLimit,
        LimitedActions,
        LimitedSACPolicy,
        LimitedTD3Policy,
    )

STEPS = 120
RADIUS = 1.5  # |angular velocity × torque|, of a pendulum whose torque is at most 2
LIMIT = ActionLimit(weights=[2], radius=RADIUS)
ALGORITHMS = {
    "TD3": (TD3, LimitedTD3Policy),
    "DDPG": (DDPG, LimitedTD3Policy),
    "SAC": (SAC, LimitedSACPolicy),
}


class Watched(gymnasium.Wrapper):
    """Counts independently what is executed, with the velocity before the step."""

    def __init__(self, env):
        super().__init__(env)
        self.powers = []

    def reset(self, **kwargs):
        self.seen, info = self.env.reset(**kwargs)
        return self.seen, info

    def step(self, action):
        self.powers.append(abs(float(self.seen[2]) * float(action[0])))
        self.seen, *rest = self.env.step(action)
        return self.seen, *rest


def trained(name):
    algorithm, policy = ALGORITHMS[name]
    watched = Watched(gymnasium.make("Pendulum-v1"))
    noise = NormalActionNoise(np.zeros(1), 0.3 * np.ones(1))
    model = algorithm(
        policy,
        LimitedActions(watched, LIMIT),
        policy_kwargs={"limit": LIMIT, "net_arch": [16, 16]},
        learning_starts=40,
        batch_size=32,
        action_noise=noise,
        seed=0,
        device="cpu",
    )
    before = [p.detach().clone() for p in model.policy.actor.parameters()]
    model.learn(STEPS)
    after = model.policy.actor.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return model, watched


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_never_exceeds_the_limit(name):
    model, watched = trained(name)
    assert len(watched.powers) == STEPS
    assert max(watched.powers) <= RADIUS
    assert max(watched.powers) > 0.99 * RADIUS  # it was in the way

    # and the policy alone obeys it up to rounding, whatever it sees
    seen = np.float32([[np.cos(a), np.sin(a), w] for a in (0, 2, 4) for w in (-8, -1, 0, 3, 8)])
    actions, _ = model.predict(seen, deterministic=True)
    assert (np.abs(seen[:, 2:] * actions.astype(np.float64)) <= RADIUS * (1 + 1e-6)).all()


def test_a_model_is_saved_and_loaded(tmp_path):
    model, _ = trained("TD3")
    model.save(tmp_path / "model")
    loaded = TD3.load(tmp_path / "model", device="cpu")
    assert loaded.policy.limit == LIMIT
    seen = np.float32([[1.0, 0.0, 7.0], [0.0, 1.0, -3.0]])
    np.testing.assert_array_equal(loaded.predict(seen)[0], model.predict(seen)[0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_policies_and_actors_are_saved_and_loaded_by_themselves(name, tmp_path):
    algorithm, policy = ALGORITHMS[name]
    env = LimitedActions(gymnasium.make("Pendulum-v1"), LIMIT)
    model = algorithm(policy, env, policy_kwargs={"limit": LIMIT, "net_arch": [8]}, device="cpu")
    seen = torch.tensor([[1.0, 0.0, 7.0], [0.0, 1.0, -3.0]])
    model.policy.save(tmp_path / "policy")
    model.policy.actor.save(tmp_path / "actor")
    whole = type(model.policy).load(tmp_path / "policy", device="cpu")
    alone = type(model.policy.actor).load(tmp_path / "actor", device="cpu")
    deterministic = {"deterministic": True} if name == "SAC" else {}
    with torch.no_grad():
        want = model.policy.actor(seen, **deterministic)
        assert torch.equal(whole.actor(seen, **deterministic), want)
        assert torch.equal(alone(seen, **deterministic), want)
    assert whole.limit == alone.limit == LIMIT


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_an_actor_cannot_be_recorded():
    env = LimitedActions(gymnasium.make("Pendulum-v1"), LIMIT)
    model = TD3(LimitedTD3Policy, env, policy_kwargs={"limit": LIMIT}, device="cpu")
    with pytest.raises(RuntimeError, match=r"layer\.deploy"):
        torch.jit.trace(model.policy.actor, (torch.ones(1, 3),))


def test_scaled_actions_are_projected_in_the_units_of_the_environment():
    limit = ActionLimit(weights=lambda seen: seen, radius=1.0)
    wanted = torch.tensor([[0.9, 0.8]], dtype=torch.float64, requires_grad=True)
    unit = torch.tensor([2.0, 3.0])
    # the weights in scaled units are (2, 3), so (0.9, 0.8) − θ(2, 3) with 2x + 3y = 1
    theta = (2 * 0.9 + 3 * 0.8 - 1) / 13
    actions = limit(wanted, torch.ones(1, 2), unit)
    expected = torch.tensor([[0.9 - 2 * theta, 0.8 - 3 * theta]], dtype=torch.float64)
    torch.testing.assert_close(actions, expected)
    # the derivative is the projection onto the face's directions
    actions[0, 0].backward()
    slope = torch.tensor([[1 - 4 / 13, -6 / 13]], dtype=torch.float64)
    torch.testing.assert_close(wanted.grad, slope)


def test_observations_of_several_parts_need_a_function_or_a_key():
    parts = {"joints": torch.tensor([[4.0, 0.5]]), "camera": torch.zeros(1, 2, 2)}
    with pytest.raises(ValueError, match="pass a function"):
        ActionLimit(weights=[0, 1], radius=1.0)(torch.ones(1, 2), parts)
    theta = (4 + 0.5 - 1) / (16 + 0.25)
    for by_name in (
        ActionLimit(weights=lambda seen: seen["joints"], radius=1.0),
        ActionLimit(weights=range(2), radius=1.0, key="joints"),
    ):
        actions = by_name(torch.ones(1, 2), parts)
        torch.testing.assert_close(actions, torch.tensor([[1 - 4 * theta, 1 - 0.5 * theta]]))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"radius: .* got -1"):
        ActionLimit(weights=[0], radius=-1)
    for radius in (np.nan, np.inf, "1", None, 10**400, torch.ones(2)):
        with pytest.raises(ValueError, match="radius: expected a number"):
            ActionLimit(weights=[0], radius=radius)
    for weights in (3, "01", [0.5], None, ["a"], torch.zeros(2)):
        with pytest.raises(ValueError, match="weights: expected the indices"):
            ActionLimit(weights=weights, radius=1.0)
    for index in (3, -4, 10**400):
        with pytest.raises(ValueError, match=r"weights: expected indices of .* 3 entries, got \["):
            ActionLimit(weights=[index], radius=1.0)(torch.ones(1, 1), torch.ones(1, 3))
    with pytest.raises(ValueError, match="weights: expected a function that returns a tensor"):
        ActionLimit(weights=lambda _: [1.0], radius=1.0)(torch.ones(1, 1), torch.ones(1, 3))
    for key, seen in (("joint", {"joints": torch.ones(1, 3)}), ("joints", torch.ones(1, 3))):
        with pytest.raises(ValueError, match="key: expected one of"):
            ActionLimit(weights=[0], radius=1.0, key=key)(torch.ones(1, 1), seen)
    for key, weights in ((1, [0]), ("joints", torch.abs)):
        with pytest.raises(ValueError, match="key: expected the name"):
            ActionLimit(weights=weights, radius=1.0, key=key)
    with pytest.raises(ValueError, match="limit: expected an ActionLimit, got float"):
        LimitedActions(gymnasium.make("Pendulum-v1"), 1.5)
    with pytest.raises(ValueError, match="one for each of the actions"):
        LIMIT(torch.ones(1, 2), torch.ones(1, 3))
    env = LimitedActions(gymnasium.make("Pendulum-v1"), LIMIT)
    with pytest.raises(ValueError, match="reset"):
        env.step(np.zeros(1))
    with pytest.raises(ValueError, match="action_space: expected a Box"):
        LimitedActions(gymnasium.make("CartPole-v1"), LIMIT)
