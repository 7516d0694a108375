"""Limited policies of every kind: PPO and A2C, images, dictionaries, normalised observations."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from dfwlayer import Ellipsoid, LpBall

pytest.importorskip("stable_baselines3", reason="needs the extra: pip install 'dfwlayer[robotics]'")
gymnasium = pytest.importorskip("gymnasium", reason="needs the extra `robotics`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages warn about each other while they are imported
    from stable_baselines3 import A2C, PPO, SAC, TD3
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    import dfwlayer.sb3 as dfw

LOW, HIGH = np.float32([-0.5, 0.1]), np.float32([2.0, 1.0])  # not around 0
RADIUS = 0.9
BY_KEY = dfw.ActionLimit(weights=range(2), radius=RADIUS, key="state")
STATE = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
SEEN = np.float32([[3.0, -2.0, 0.5], [0.1, 0.1, 0.0], [-4.0, 4.0, 1.0]])


class Random(gymnasium.Env):
    """Observations at random; counts the power of what is executed by itself."""

    def __init__(self, space=STATE):
        self.observation_space = space
        self.action_space = gymnasium.spaces.Box(LOW, HIGH)
        self.powers, self.steps = [], 0

    def seen(self):
        state = 3 * self.np_random.normal(size=3).astype(np.float32)
        image = self.np_random.integers(0, 255, (36, 36, 1), np.uint8)
        self.state = state
        if self.observation_space is STATE:
            return state
        return image if self.observation_space is IMAGE else {"state": state, "image": image}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.powers.append(np.abs(self.state[:2].astype(np.float64) * action).sum())
        self.steps += 1
        return self.seen(), -float(np.square(action - 1).sum()), False, self.steps % 20 == 0, {}


def powers(actions, seen=SEEN):
    return np.abs(seen[:, :2].astype(np.float64) * actions).sum(-1)


def small_weights(seen):
    """Such that the lower bounds alone never exceed the limit."""
    return seen[:, :2].clamp(-5, 5)


SAFE = dfw.ActionLimit(weights=small_weights, radius=RADIUS)


SETTINGS = {
    "TD3": {"learning_starts": 8, "batch_size": 8, "buffer_size": 100},
    "SAC": {"learning_starts": 8, "batch_size": 8, "buffer_size": 100},
    "PPO": {"n_steps": 16, "batch_size": 8, "n_epochs": 2},
    "A2C": {},
}


def made(algorithm, policy, env, limit, use_sde=False, **kwargs):
    settings = dict(SETTINGS[algorithm.__name__])
    if use_sde:
        settings["use_sde"] = True
    own = {"limit": limit, "net_arch": [8], **kwargs}
    return algorithm(policy, env, policy_kwargs=own, seed=0, device="cpu", **settings)


@pytest.mark.parametrize("algorithm", [PPO, A2C, TD3, SAC])
def test_training_with_bounds_that_are_not_around_zero(algorithm):
    policy = {TD3: dfw.LimitedTD3Policy, SAC: dfw.LimitedSACPolicy}.get(
        algorithm, dfw.LimitedActorCriticPolicy
    )
    world = Random()
    model = made(algorithm, policy, dfw.LimitedActions(world, SAFE), SAFE)
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(32)
    after = list(model.policy.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert len(world.powers) >= 32
    for deterministic in (True, False):
        actions, _ = model.predict(SEEN, deterministic=deterministic)
        assert actions.dtype == np.float32
        assert (powers(actions) <= RADIUS).all()
        assert ((actions >= LOW) & (actions <= HIGH)).all()
    one, _ = model.predict(SEEN[0], deterministic=True)
    assert one.shape == (2,)


def test_densities_are_those_of_the_actions_before_the_limit():
    """The ratios of PPO are 1 before it learns, and the environment gets other actions."""
    world = Random()
    model = made(PPO, dfw.LimitedActorCriticPolicy, dfw.LimitedActions(world, SAFE), SAFE)
    _, callback = model._setup_learn(16, None)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 16)
    buffer = model.rollout_buffer
    seen = torch.as_tensor(buffer.observations[:, 0])
    actions = torch.as_tensor(buffer.actions[:, 0])
    _, log_prob, entropy = model.policy.evaluate_actions(seen, actions)
    torch.testing.assert_close(log_prob, torch.as_tensor(buffer.log_probs[:, 0]))

    found = model.policy.get_distribution(seen).distribution
    features = model.policy.extract_features(seen)
    wanted = model.policy.action_net(model.policy.mlp_extractor.forward_actor(features))
    space = model.action_space
    mean = SAFE.executed(wanted.detach().numpy(), seen, space)
    torch.testing.assert_close(found.mean, torch.as_tensor(mean), rtol=1e-5, atol=1e-6)
    density = torch.distributions.Normal(found.mean, model.policy.log_std.exp())
    torch.testing.assert_close(log_prob, density.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, density.entropy().sum(-1))

    asked = np.abs(small_weights(seen).numpy() * buffer.actions[:, 0]).sum(-1)
    assert (asked > RADIUS).any()  # what the buffer keeps exceeds the limit
    assert max(world.powers) > 0


def test_state_dependent_noise_has_a_limited_mean():
    env = dfw.LimitedActions(Random(), SAFE)
    model = made(PPO, dfw.LimitedActorCriticPolicy, env, SAFE, use_sde=True)
    model.policy.reset_noise(3)
    actions, _ = model.predict(SEEN, deterministic=True)
    assert (powers(actions) <= RADIUS).all()
    values = model.policy.evaluate_actions(torch.as_tensor(SEEN), torch.zeros(3, 2))
    assert torch.isfinite(values[1]).all()
    with pytest.raises(ValueError, match="squash_output: expected False"):
        made(PPO, dfw.LimitedActorCriticPolicy, env, SAFE, use_sde=True, squash_output=True)


BOTH = gymnasium.spaces.Dict({"state": STATE, "image": IMAGE})


@pytest.mark.parametrize(
    ("algorithm", "policy", "space"),
    [
        (TD3, dfw.LimitedTD3CnnPolicy, IMAGE),
        (SAC, dfw.LimitedSACCnnPolicy, IMAGE),
        (PPO, dfw.LimitedActorCriticCnnPolicy, IMAGE),
        (TD3, dfw.LimitedTD3MultiInputPolicy, BOTH),
        (SAC, dfw.LimitedSACMultiInputPolicy, BOTH),
        (A2C, dfw.LimitedMultiInputActorCriticPolicy, BOTH),
    ],
)
def test_images_and_dictionaries(algorithm, policy, space, tmp_path):
    """A set that does not depend on images, and weights by the key of a dictionary."""
    limit, extract = LpBall(2, 0.8), {"features_dim": 8}
    if space is BOTH:
        limit = dfw.ActionLimit(weights=lambda seen: small_weights(seen["state"]), radius=RADIUS)
        extract = {"cnn_output_dim": 8}
    env = dfw.LimitedActions(Random(space), limit)
    model = made(algorithm, policy, env, limit, features_extractor_kwargs=extract)
    model.learn(12)
    seen = env.reset(seed=3)[0]
    action, _ = model.predict(seen, deterministic=True)
    if space is IMAGE:
        assert np.linalg.norm(action.astype(np.float64)) <= 0.8 * (1 + 1e-6)
    else:
        assert np.abs(np.clip(seen["state"][:2], -5, 5) * action).sum() <= RADIUS * (1 + 1e-6)
    assert env.action_space.contains(action)
    model.policy.save(tmp_path / "policy")
    again = policy.load(tmp_path / "policy", device="cpu")
    np.testing.assert_array_equal(again.predict(seen, deterministic=True)[0], action)


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_policies_and_models_are_saved_and_loaded(algorithm, tmp_path):
    """Also with a function that has no name, and a mode of their own."""
    limit = dfw.ActionSet(lambda seen: Ellipsoid(torch.eye(2), radius=1 + seen[:, 2].abs()))
    env = dfw.LimitedActions(Random(), limit)
    mode = dfw.Penalty(0.3)
    model = made(algorithm, dfw.LimitedActorCriticPolicy, env, limit, gradient=mode)
    want, _ = model.predict(SEEN, deterministic=True)
    model.save(tmp_path / "model")
    model.policy.save(tmp_path / "policy")
    for again in (
        algorithm.load(tmp_path / "model", device="cpu").policy,
        dfw.LimitedActorCriticPolicy.load(tmp_path / "policy", device="cpu"),
    ):
        assert again.gradient == mode
        np.testing.assert_array_equal(again.predict(SEEN, deterministic=True)[0], want)


@pytest.mark.parametrize("mode", ["exact", "penalty", "soft"])
def test_actors_learn_in_the_mode_that_is_asked_for(mode):
    model = made(TD3, dfw.LimitedTD3Policy, Random(), LpBall(2, 0.5), gradient=mode)
    actor = model.policy.actor
    modes = {"exact": dfw.Exact(), "penalty": dfw.Penalty(), "soft": dfw.Soft()}
    assert actor.gradient == modes[mode]
    with torch.no_grad():  # far outside
        actor.mu[-2].bias += 2
    action = actor(torch.as_tensor(SEEN))
    normal = (actor.offset + actor.unit * action).detach() * actor.unit  # of the ball, scaled
    found = torch.autograd.grad((action * normal).sum(), actor.mu[-2].bias)[0]
    if mode == "exact":  # nothing along the normal passes
        assert found.abs().max() < 1e-5
    else:
        assert found.abs().max() > 1e-3


def normalised():
    env = VecNormalize(DummyVecEnv([lambda: dfw.LimitedActions(Random(), SAFE)]))
    env.reset()
    for _ in range(20):
        env.step(np.float32([[0.2, 0.2]]))
    return env


def test_normalised_observations_are_refused_or_undone(tmp_path):
    env = normalised()
    with pytest.raises(ValueError, match=r"VecNormalize .*seen_through\(env\)"):
        made(TD3, dfw.LimitedTD3Policy, env, SAFE)
    made(TD3, dfw.LimitedTD3Policy, env, LpBall(2, 0.5))  # does not look at observations

    limit = SAFE.seen_through(env)
    model = made(TD3, dfw.LimitedTD3Policy, env, limit)
    for _ in range(2):
        changed = env.normalize_obs(SEEN)
        actions, _ = model.predict(changed, deterministic=True)
        assert (powers(actions) <= RADIUS * (1 + 1e-5)).all()
        with torch.no_grad():
            raw = SAFE(torch.ones(3, 2), torch.as_tensor(SEEN))
            undone = limit(torch.ones(3, 2), torch.as_tensor(changed, dtype=torch.float32))
        torch.testing.assert_close(undone, raw, rtol=1e-4, atol=1e-5)
        model.learn(12)  # the statistics go on, and the limit with them
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(
        TD3.load(tmp_path / "model", device="cpu").predict(changed, deterministic=True)[0],
        model.predict(changed, deterministic=True)[0],
    )
    other = normalised()  # a model that goes on elsewhere reads the statistics of that place
    loaded = TD3.load(tmp_path / "model", env=other, device="cpu")
    assert loaded.policy.limit == loaded.policy.actor.limit == SAFE.seen_through(other)
    loaded.policy.set_limit(SAFE)
    assert loaded.policy.limit == loaded.policy.actor_target.limit == SAFE
    plain = DummyVecEnv([Random])
    assert SAFE.seen_through(plain) is SAFE


def test_dictionaries_of_which_only_a_part_is_normalised():
    env = VecNormalize(DummyVecEnv([lambda: Random(BOTH)]), norm_obs_keys=["state"])
    env.reset()
    for _ in range(10):
        env.step(np.float32([[0.2, 0.2]]))
    seen = {"state": SEEN, "image": np.zeros((3, 36, 36, 1), np.uint8)}
    changed = {k: torch.as_tensor(v) for k, v in env.normalize_obs(seen).items()}
    raw = {k: torch.as_tensor(v) for k, v in seen.items()}
    z = torch.ones(3, 2)
    found = BY_KEY.seen_through(env)(z, changed)
    torch.testing.assert_close(found, BY_KEY(z, raw), rtol=1e-4, atol=1e-5)
