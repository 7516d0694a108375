"""Points that several sets have in common."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from helpers import F64

N, ROWS = 6, 4


def draw(seed=0):
    gen = torch.Generator().manual_seed(seed)
    R = torch.randn(ROWS, N, N, generator=gen, dtype=F64)
    P = R @ R.mT / N + 0.2 * torch.eye(N, dtype=F64)
    return P, 3 * torch.randn(ROWS, N, generator=gen, dtype=F64)


def numbers(value, *shape):
    return torch.full(shape, value, dtype=F64)


# by name: how the set is made of its parameters, and these
MADE = {
    "ball and box": (
        lambda t, u: dfw.Intersection(dfw.LpBall(2, t), dfw.Box(-0.3, u)),
        (numbers(1.0, ROWS), numbers(0.4, N)),
    ),
    "simplex and sectors": (
        lambda h: dfw.Intersection(
            dfw.CappedSimplex(1.0, 0.6), dfw.Polyhedron(torch.eye(N, dtype=F64)[:2], h)
        ),
        (numbers(0.1, 2),),
    ),
    "two balls": (
        lambda s, t: dfw.Intersection(dfw.LpBall(1, s), dfw.LpBall(2, t)),
        (numbers(1.0, ROWS), numbers(0.6, ROWS)),
    ),
    "ball and ellipsoid": (
        lambda t, A, c: dfw.Intersection(dfw.LpBall(1, t), dfw.Ellipsoid(A, c, 0.7)),
        (numbers(1.0, ROWS), torch.eye(N, dtype=F64) + 0.1, numbers(0.1, N)),
    ),
    "shifted": (
        lambda c: dfw.Intersection(dfw.Shifted(dfw.LpBall(2, 0.7), c), dfw.Box(-0.2, 0.5)),
        (numbers(0.1, N),),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_solutions_are_optimal_and_feasible(name):
    make, parameters = MADE[name]
    P, q = draw()
    constraint = make(*parameters)
    sol = dfw.solve(dfw.Quadratic(P, q), constraint, tol=1e-10)
    assert (sol.status == Status.CONVERGED).all()
    assert (constraint.violation(sol.x) <= 1e-14).all()
    # no point of the set next to x is better
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for size in (1e-3, 1e-1):
            near = sol.x + size * torch.randn(ROWS, N, generator=gen, dtype=F64)
            other = dfw.solve(dfw.Quadratic(None, -near), constraint).x
            f = dfw.Quadratic(P, q).value
            assert (f(other) >= f(sol.x) - 1e-13).all()


@pytest.mark.parametrize("name", MADE)
def test_gradients(name):
    make, parameters = MADE[name]
    P, q = draw(1)
    leaves = [t[:2] if len(t) == ROWS else t for t in (P, q, *parameters)]
    leaves = [t.clone().requires_grad_() for t in leaves]

    def solution(P, q, *rest):
        objective = dfw.Quadratic(0.5 * (P + P.mT), q)
        return dfw.solve(objective, make(*rest), tol=1e-12).x

    assert torch.autograd.gradcheck(solution, leaves, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_it_is_one_polyhedron_where_that_is_all():
    bound = dfw.Intersection(dfw.Box(0.0, 1.0), dfw.Simplex(1.0)).bind(
        (3,), F64, torch.device("cpu")
    )
    assert type(bound.as_polyhedron(torch.zeros(3, dtype=F64))).__name__ == "Polyhedron"
    P, q = torch.eye(3, dtype=F64), torch.tensor([-3.0, 0.5, -2.5], dtype=F64)
    together = dfw.solve(dfw.Quadratic(P, q), dfw.Intersection(dfw.Box(0.0, 1.0), dfw.Simplex(1.0)))
    alone = dfw.solve(dfw.Quadratic(P, q), dfw.Simplex(1.0))
    torch.testing.assert_close(together.x, alone.x, rtol=0, atol=1e-14)


def test_sets_without_a_common_point():
    """The rows whose sets meet are solved as if the others were not there."""
    P, q = draw(2)
    level = torch.tensor([5.0, 0.3, 9.0, -0.2], dtype=F64).unsqueeze(-1)
    A = torch.ones(1, N, dtype=F64)
    q.requires_grad_()
    sol = dfw.solve(
        dfw.Quadratic(P, q), dfw.Intersection(dfw.LpBall(2, 1.0), dfw.Polyhedron(A=A, b=level))
    )
    empty = torch.tensor([True, False, True, False])
    assert ((sol.status == Status.INFEASIBLE) == empty).all()
    assert sol.x[empty].isnan().all()
    torch.testing.assert_close(sol.x[~empty].sum(-1), level[~empty, 0])
    (grad,) = torch.autograd.grad(sol.x[~empty].sum(), q)
    assert (grad[empty] == 0).all()
    assert torch.isfinite(grad).all()


OPEN = {
    "box": (dfw.Box(lower=0.0), dfw.Box(0.0, 1.0)),
    "half-space": (
        dfw.Polyhedron(-torch.eye(N, dtype=F64)[:2], 0.1),
        dfw.Polyhedron(-torch.eye(N, dtype=F64)[:2], 0.1, lower=-1.0, upper=1.0),
    ),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", OPEN)
def test_a_set_without_bounds_on_some_sides(name, first):
    """Wherever it stops, in whatever order they are given: feasible, and with a true bound."""
    ball, (half, closed) = dfw.LpBall(2, 1.0), OPEN[name]
    constraint = dfw.Intersection(half, ball) if first else dfw.Intersection(ball, half)
    P, q = draw(3)
    expected = dfw.solve(dfw.Quadratic(P, q), dfw.Intersection(ball, closed), tol=1e-10)
    for most in (1, 3, 1000):
        sol = dfw.solve(dfw.Quadratic(P, q), constraint, max_steps=most)
        assert (constraint.violation(sol.x) <= 1e-14).all()
        assert (sol.value - expected.value <= sol.gap + 1e-12).all()
    assert sol.converged.all()
    torch.testing.assert_close(sol.x, expected.x, rtol=0, atol=1e-9)


def test_a_solution_at_the_corner_of_all_sets():
    """x = 0, beside which no distance of the copies is small."""
    z = torch.tensor([[-0.2, -0.1, -0.5], [-3.0, -0.1, -0.2]], dtype=F64)
    constraint = dfw.Intersection(dfw.LpBall(2, 1.0), dfw.Box(lower=0.0))
    sol = dfw.solve(dfw.Quadratic(None, -z), constraint)
    assert (sol.x == 0).all()
    assert (sol.num_steps < 100).all()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ((), "sets: expected at least one"),
        ((3,), r"sets\[0\]: expected a set such as LpBall, got int"),
        (([dfw.Simplex()],), r"sets\[0\]: .* got list; give the sets one by one"),
    ],
)
def test_bad_input(sets, message):
    with pytest.raises(ValueError, match=message):
        dfw.Intersection(*sets)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_where_leverage_and_turnover_meet(seed):
    """Three names sold short make both limits one: their forces may be split in many ways.

    x moves with μ as it does on the face that both sides have in common, where there is one.
    """
    n, batch, step = 30, 64, 1e-6
    drawn = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=drawn, dtype=F64)

    factors, own = 0.1 * draw(n, 8), 0.005 + 0.02 * torch.rand(n, generator=drawn, dtype=F64)
    covariance = factors @ factors.mT + own.diag()
    held, weights, way = numbers(1 / n, n), draw(n), draw(batch, n)
    mean = (0.05 * draw(batch, n)).requires_grad_()
    short = 0.315
    allowed = dfw.Intersection(
        dfw.Hyperplane(1.0, 1.0),
        dfw.LpBall(1, radius=1 + 2 * short),
        dfw.LpBall(1, radius=2 * (short + 3 / n), centre=held),
        dfw.Box(-0.15, 0.25),
    )

    def moved(by):
        at = mean + by * way
        return dfw.solve(dfw.Quadratic(4 * covariance, -at), allowed, tol=1e-10).x @ weights

    here = moved(0.0)
    (slope,) = torch.autograd.grad(here.sum(), mean)
    along = (slope * way).sum(-1)
    with torch.no_grad():
        right, left = (moved(step) - here) / step, (here - moved(-step)) / step
    size = 1e-4 * (1 + right.abs())
    smooth = (right - left).abs() <= size
    assert int(smooth.sum()) > batch // 2
    assert bool(((along - (right + left) / 2).abs() <= size)[smooth].all())
