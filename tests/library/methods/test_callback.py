"""callback=: what it sees of a solve, and how it ends one."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled
from helpers import F64

METHODS = ["dfw", "frank-wolfe", "projected-newton", "active-set"]


def problems(rows=3, n=6, seed=0):
    gen = torch.Generator().manual_seed(seed)
    R = torch.randn(rows, n, n, generator=gen, dtype=F64)
    return dfw.Quadratic(
        R @ R.mT + torch.eye(n, dtype=F64), torch.randn(rows, n, generator=gen, dtype=F64)
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("centre", [None, 5.0])
def test_it_sees_feasible_points_their_values_and_gaps(method, centre):
    f = problems()
    ball = dfw.LpBall(
        1, 0.3, centre=None if centre is None else torch.full((6,), centre, dtype=F64)
    )
    seen = []
    sol = dfw.solve(f, ball, method=method, max_steps=100, callback=seen.append)
    assert len(seen) >= 2
    assert (seen[0].num_steps == 0).all()
    assert (seen[-1].num_steps <= sol.num_steps).all()
    for at in seen:
        assert at.x.shape == (3, 6)
        assert not at.x.requires_grad
        x = at.x - (0 if centre is None else centre)
        assert (x.abs().sum(-1) <= 0.3 + 1e-14 * (centre or 1)).all()
        value = 0.5 * (at.x.unsqueeze(-2) @ f.P @ at.x.unsqueeze(-1)).squeeze() + (f.q * at.x).sum(
            -1
        )
        torch.testing.assert_close(
            at.value, value, rtol=1e-12, atol=1e-12 * float(value.abs().max())
        )
        assert (at.value - at.gap <= sol.value + 1e-9 * sol.value.abs()).all()
    torch.testing.assert_close(seen[-1].value, sol.value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_true_ends_the_solve(method):
    seen = []

    def third(at):
        seen.append(at)
        return len(seen) == 2

    f = problems(n=12)
    sol = dfw.solve(f, dfw.LpBall(1, 0.5), method=method, tol=1e-14, callback=third)
    assert len(seen) == 2
    ended = {int(s) for s in sol.status}
    assert ended <= {dfw.Status.STOPPED, dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR}
    assert (sol.x.abs().sum(-1) <= 0.5 * (1 + 1e-15)).all()
    with compiled.using(False):  # as with a callback
        whole = dfw.solve(f, dfw.LpBall(1, 0.5), method=method, tol=1e-14)
    assert (sol.num_steps <= whole.num_steps).all()
    if method in ("dfw", "frank-wolfe"):
        assert (sol.status == dfw.Status.STOPPED).all()
        assert (sol.num_steps == 1).all()
        assert dfw.Status.STOPPED.message


def test_it_changes_nothing():
    f = problems(rows=40, n=8)
    for method in METHODS:
        got = dfw.solve(f, dfw.Simplex(), method=method, callback=lambda _: None)
        want = dfw.solve(f, dfw.Simplex(), method=method)
        torch.testing.assert_close(got.x, want.x, rtol=0, atol=1e-7)
        assert (got.status == want.status).all()


def test_bad_problems_are_nan_to_it():
    f = problems()
    q = f.q.clone()
    q[1, 2] = torch.nan
    seen = []
    dfw.solve(dfw.Quadratic(f.P, q), dfw.LpBall(2, 0.1), callback=seen.append)
    for at in seen:
        assert at.x[1].isnan().all()
        assert at.value[1].isnan()
        assert at.x[[0, 2]].isfinite().all()


def test_a_matrix_variable_and_one_problem():
    target = torch.randn(3, 4, dtype=F64)
    f = dfw.Smooth(lambda x: ((x - target) ** 2).sum(), shape=(3, 4))
    seen = []
    dfw.solve(f, dfw.NuclearBall(1.0), callback=seen.append)
    assert all(at.x.shape == (3, 4) and at.value.shape == () for at in seen)


def test_what_is_not_a_function():
    with pytest.raises(ValueError, match="callback"):
        dfw.solve(problems(), dfw.Box(0.0, 1.0), callback=3)
