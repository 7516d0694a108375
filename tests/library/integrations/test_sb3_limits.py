"""Limits on actions: any set, with bounds on either side, whatever the units."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from dfwlayer import (
    Box,
    Ellipsoid,
    HalfSpace,
    Intersection,
    LpBall,
    Polyhedron,
    Product,
    Quadratic,
    Simplex,
    SolveError,
    solve,
)

pytest.importorskip("stable_baselines3", reason="needs the extra: pip install 'dfwlayer[robotics]'")
gymnasium = pytest.importorskip("gymnasium", reason="needs the extra `robotics`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages warn about each other while they are imported
    from dfwlayer.integrations.sb3 import ActionLimit, ActionSet, LimitedActions
    from dfwlayer.integrations.sb3.limits import Bounds

LOWER = torch.tensor([-0.2, -1.0, 0.3], dtype=torch.float64)
UPPER = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
UNIT, OFFSET = (UPPER - LOWER) / 2, (UPPER + LOWER) / 2
SETS = {
    "l1": LpBall(1, 0.9, torch.tensor([1.0, 2.0, 0.5])),
    "l2": LpBall(2, 0.8),
    "l3": LpBall(3, 0.8),
    "ellipsoid": Ellipsoid(torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.2, 1.0]])),
    "simplex": Simplex(1.0),
    "half-space": HalfSpace(torch.tensor([1.0, -1.0, 1.0]), 0.5),
    "rows": Polyhedron(torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, 2.0]]), torch.tensor([0.7, 1.0])),
    "product": Product([LpBall(1, 0.5), Box(0.1, 0.6)], [2, 1]),
}


def asked(rows=12):
    torch.manual_seed(1)
    return torch.empty(rows, 3, dtype=torch.float64).uniform_(-2, 2)


@pytest.mark.parametrize("name", SETS)
def test_any_set_together_with_the_bounds_of_the_actions(name):
    """Scaled actions are the nearest, in scaled units, of which the set and the bounds hold."""
    z, limit = asked(), ActionSet(SETS[name])
    found = limit(z, torch.zeros(12, 1), UNIT, OFFSET, Bounds(-1.0, 1.0))
    actions = OFFSET + UNIT * found
    wide = limit.of(None, z)
    missed = wide.violation(actions)
    assert (missed <= 1e-7).all()
    assert (found >= -1).all()
    assert (found <= 1).all()

    metric = torch.diag(UNIT.pow(-2))
    objective = Quadratic(metric, -(OFFSET + UNIT * z) @ metric)
    both = solve(objective, Intersection(wide, Box(LOWER, UPPER)))
    torch.testing.assert_close(actions, both.x, rtol=1e-5, atol=1e-6)
    alone = limit(z, torch.zeros(12, 1), UNIT, OFFSET)
    assert (alone.abs() > 1 + 1e-6).any()  # the bounds were in the way


@pytest.mark.parametrize("p", [1, 2])
def test_a_weighted_ball_within_lopsided_bounds(p):
    """An ActionLimit is the set it says, also where 0 is not within the bounds."""
    z, seen = asked(), torch.empty(12, 3, dtype=torch.float64).uniform_(-2, 2)
    limit = ActionLimit(weights=range(3), radius=0.5, p=p)
    same = ActionSet(lambda seen: LpBall(p, 0.5, seen))
    found, want = (one(z, seen, UNIT, OFFSET, Bounds(-1.0, 1.0)) for one in (limit, same))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    power = (seen * (OFFSET + UNIT * found)).norm(p, dim=-1)
    assert (power <= 0.5 * (1 + 1e-9)).all()


def test_gradients_pass_where_the_bounds_are_in_the_way():
    seen = torch.tensor([[1.0, -2.0, 1.5]], dtype=torch.float64)
    for limit in (
        ActionLimit(weights=range(3), radius=0.5),
        ActionSet(LpBall(2, 0.5)),
        ActionLimit(weights=lambda _: seen, radius=0.5, p=2),
    ):
        z = asked(1).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda z, limit=limit: limit(z, seen, UNIT, OFFSET, Bounds(-1.0, 1.0)), z, atol=1e-4
        )


def test_sets_that_follow_the_observations_row_by_row():
    seen = torch.tensor([[0.2], [0.5], [5.0]], dtype=torch.float64)
    limit = ActionSet(lambda seen: LpBall(2, seen[:, 0]))
    z = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]], dtype=torch.float64)
    found = limit(z, seen, bounds=Bounds(-1.0, 1.0))
    want = torch.tensor([[0.2, 0.0], [0.0, 0.5], [1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, want)


def test_no_action_is_left():
    limit = ActionLimit(weights=range(2), radius=0.1)  # and actions of at least ½
    with pytest.raises(SolveError, match="limit: there are observations without a nearest action"):
        limit(torch.ones(2, 2), torch.tensor([[0.0, 0.1], [1.0, 1.0]]), bounds=Bounds(0.5, 1.0))


def test_the_wrapper_obeys_lopsided_bounds_and_the_limit_in_the_spaces_numbers():
    class Still(gymnasium.Env):
        action_space = gymnasium.spaces.Box(np.float32([-0.1, 0.2]), np.float32([2.0, 0.9]))
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.np_random.normal(size=2).astype(np.float32), {}

        def step(self, action):
            self.done = action
            return *self.reset()[:1], 0.0, False, False, {}

    env = LimitedActions(Still(), ActionLimit(weights=range(2), radius=0.8))
    seen, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(60):
        before = seen
        if abs(seen[1]) * 0.2 > 0.8:
            seen, _ = env.reset()
            continue
        seen, *_, info = env.step(rng.uniform(-3, 3, 2).astype(np.float32))
        action = info["executed_action"]
        assert action.dtype == np.float32
        assert env.action_space.contains(action)
        power = np.abs(before.astype(np.float64) * action).sum()
        assert power <= 0.8
        held += power > 0.79
    assert held > 5


def test_functions_without_a_name_are_saved():
    for limit in (
        ActionLimit(weights=lambda seen: seen[:, :2] * 2, radius=1.0),
        ActionSet(lambda seen: LpBall(2, seen[:, 0].abs())),
    ):
        again = pickle.loads(pickle.dumps(limit))
        z, seen = torch.ones(3, 2), torch.randn(3, 4)
        assert torch.equal(again(z, seen), limit(z, seen))
    fixed = ActionSet(SETS["rows"])
    assert torch.equal(pickle.loads(pickle.dumps(fixed)).constraint.G, fixed.constraint.G)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="constraint: expected a set"):
        ActionSet(1.0)
    with pytest.raises(ValueError, match=r"it returned 1\.0"):
        ActionSet(lambda _: 1.0)(torch.ones(1, 2), None)
