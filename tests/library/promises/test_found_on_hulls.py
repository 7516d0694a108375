"""Sets of which only vertices are known, and points as sums of them, as fuzzing has found them."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from dfwlayer.certificate import certify
from dfwlayer.methods import Problem
from helpers import F64, draw

DONE = (Status.CONVERGED, Status.ROUNDING_FLOOR)


@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e13, 1e25])
def test_a_function_that_returns_vertices_gets_costs_it_can_compute_with(unit):
    """Costs times corners would leave the range of the set's dtype."""
    corners = unit * draw(9, 4, dtype=torch.float32)
    polytope = dfw.CustomSet(lambda c: corners[(c @ corners.mT).argmin(-1)], batched=True)
    near_linear = dfw.Quadratic(1e-3 / unit * torch.eye(4), draw(5, 4, seed=1, dtype=torch.float32))
    for method in ("frank-wolfe", "active-set"):
        sol = dfw.solve(near_linear, polytope, method=method)
        gradient = near_linear.gradient(sol.x).double()
        gap = (gradient * sol.x.double()).sum(-1) - (gradient @ corners.double().mT).amin(-1)
        terms = (gradient.abs() * corners.double().abs().amax(0)).sum(-1)
        assert (gap <= sol.gap.double() + 1e-5 * terms).all()


def test_a_function_that_does_not_minimise_proves_nothing():
    """Its vertex is worse than x, which a true one cannot be."""
    q = draw(3, 4)
    liar = dfw.CustomSet(torch.sign, batched=True)  # the worst corner of the cube
    f, cube = dfw.Quadratic(None, q).bind(3), liar.bind((4,), F64, q.device)
    x = -0.5 * torch.sign(q)
    open_ended = torch.full((3,), int(Status.MAX_STEPS))
    problem = Problem(f, cube, None)
    gap, status = certify(problem, x, *f.value_and_gradient(x), open_ended, tol=1.0)
    assert torch.isinf(gap).all()
    assert (status == Status.OUT_OF_RANGE).all()


@pytest.mark.parametrize("power", [-83, 49, 83])
@pytest.mark.parametrize("seed", range(3))
def test_a_hull_is_the_same_in_any_units_of_x(power, seed):
    """Its face at a point is asked for without a scale of f, which g and x stand in for."""
    F, d, c = draw(6, 6, seed=seed), draw(6, seed=seed + 50), draw(6, seed=seed + 90)
    corners = torch.cat((torch.eye(6, dtype=F64), -torch.eye(6, dtype=F64)))

    def solved(unit):
        def f(x, F, d, c):
            return 0.25 * (x / unit @ F.mT - d).pow(4).sum(-1) + (c * x / unit).sum(-1)

        hull = dfw.CustomSet(
            lambda cost: unit * corners[(cost @ corners.mT).argmin(-1)], batched=True
        )
        return dfw.solve(dfw.Smooth(f, F, d, c, shape=(6,)), hull, method="projected-newton")

    one, other = solved(1.0), solved(2.0**power)
    assert other.status in DONE
    assert other.num_steps == one.num_steps
    torch.testing.assert_close(other.x / 2.0**power, one.x, rtol=0, atol=1e-12)


def test_points_of_a_hull_that_are_far_beyond_x():
    """A sum of points is rounded as they are, and so is a change of it that moves x by one."""
    A = draw(12, 15, 16, seed=1).round()
    x = draw(12, 16, seed=2).round()
    wide = torch.where(draw(16, seed=3) > 0.5, 1e8, 3.0).double()
    body = dfw.Box(-wide, wide)
    sol = dfw.solve(
        dfw.LeastSquares(A, (A @ x.unsqueeze(-1)).squeeze(-1)), body, method="active-set"
    )
    assert (sol.status == Status.ROUNDING_FLOOR).all()
    assert sol.value.max() < 1e-13  # x is a sum of points of 1e8, to sixteen digits of these
    assert sol.num_steps.max() < 400


def test_a_point_of_a_hull_keeps_its_zeros_in_a_smaller_dtype():
    """A projection onto a face through it would spread the rounding of the others over them."""
    corners = torch.eye(4)
    hull = dfw.CustomSet(lambda c: corners[(c @ corners.mT).argmin(-1)], batched=True)
    q = torch.tensor([7.4e-16, 0.0, 0.0, 0.0])
    P = 1e-22 * torch.eye(4)
    for seed in range(20):
        force = 1e-22 * draw(4, seed=seed, dtype=torch.float32).abs() * 0.1
        sol = dfw.solve(dfw.Quadratic(P, q - force), hull, method="projected-newton")
        assert sol.x[0] == 0
        assert sol.gap <= 1e-5 * sol.value.abs()
