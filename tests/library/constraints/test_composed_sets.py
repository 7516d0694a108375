"""What sets that are made of others, or of a function, owe beyond the table of sets."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer.constraints.polyhedra.assignment import assign_one, potentials
from helpers import F64, lp_norm


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_small_ball_far_away(p, dtype):
    """Feasible in the dtype's own numbers, though x is rounded by more than the radius's eps."""
    gen = torch.Generator().manual_seed(0)
    centre = (1000 * torch.randn(20, 6, generator=gen, dtype=F64)).to(dtype)
    weight = (0.5 + torch.rand(6, generator=gen, dtype=F64)).to(dtype)
    q = torch.randn(20, 6, generator=gen, dtype=F64).to(dtype)
    for P in (None, torch.eye(6, dtype=dtype) + 0.1):
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, 0.5, weight, centre=centre))
        size = lp_norm(weight.double() * (sol.x.double() - centre.double()), p)
        assert (size <= 0.5 * (1 + 4 * torch.finfo(dtype).eps)).all()
        assert sol.converged.all()


def test_a_centre_is_a_change_of_variables():
    """argmin of f(x) around c is c + argmin of f(c + y) around zero; the layer takes it, too."""
    gen = torch.Generator().manual_seed(1)
    R = torch.randn(8, 8, generator=gen, dtype=F64)
    P, q, c = R @ R.mT + torch.eye(8), *torch.randn(2, 5, 8, generator=gen, dtype=F64)
    for p in (1.0, 2.0, math.inf):
        layer = dfw.DFWLayer(p, tol=1e-12)
        want = c + layer(P, q + c @ P, radius=0.7)
        torch.testing.assert_close(layer(P, q, radius=0.7, centre=c), want, rtol=1e-7, atol=1e-8)
        ball = dfw.LpBall(p, torch.tensor(0.7, dtype=F64), centre=c)
        assert isinstance(ball, dfw.Shifted)
        assert (ball.violation(want) <= 1e-12).all()
        assert (ball.violation(want + 2) > 0.1).all()


def test_second_derivatives_in_the_centre():
    gen = torch.Generator().manual_seed(2)
    q, c = (v.requires_grad_() for v in 2 * torch.randn(2, 5, generator=gen, dtype=F64))

    def x(q, c):
        return dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(2, 0.7, centre=c), tol=1e-13).x

    assert torch.autograd.gradgradcheck(x, (q, c), eps=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_assignment_against_all_permutations(n):
    rng = np.random.default_rng(n)
    for k in range(20):
        # whole numbers have ties
        cost = rng.standard_normal((n, n)) if k % 2 else rng.integers(0, 3, (n, n)).astype(float)
        found = assign_one(cost)
        rows = np.arange(n)
        best = min(cost[rows, list(p)].sum() for p in itertools.permutations(range(n)))
        assert cost[rows, found].sum() == pytest.approx(best, abs=1e-12)
        vertex = dfw.Birkhoff(n).vertex(torch.from_numpy(cost).flatten())
        assert float(vertex @ torch.from_numpy(cost).flatten()) == pytest.approx(best, abs=1e-12)
        u, v = potentials(torch.from_numpy(cost), torch.from_numpy(found))
        reduced = torch.from_numpy(cost) - u[:, None] - v
        assert reduced.min() >= -1e-12
        assert reduced[rows, found].abs().max() <= 1e-12
        if k % 2 and n > 1:  # only one is best
            reduced[rows, found] = 1.0
            assert reduced.min() > 1e-6


def test_soft_permutations():
    """Doubly stochastic at every temperature, the best permutation when it is cold."""
    cost = torch.randn(6, 25, dtype=F64)
    ball = dfw.Birkhoff(5)
    for temperature in (10.0, 1.0, 0.1, 1e-3, 0.0):
        soft = ball.soft_vertex(cost, temperature)
        assert (ball.violation(soft) <= 1e-14).all()
    torch.testing.assert_close(soft, ball.vertex(cost), rtol=0, atol=1e-6)
    hot = ball.soft_vertex(cost, 1e6)
    torch.testing.assert_close(hot, torch.full_like(hot, 0.2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e6])
def test_projection_onto_birkhoff(scale):
    """⟨Z − X, Y − X⟩ ≤ 0 for all Y of the set, the worst of which is a permutation."""
    gen = torch.Generator().manual_seed(3)
    z = scale * torch.randn(10, 64, generator=gen, dtype=F64)
    ball = dfw.Birkhoff(8)
    x = ball.retract(ball.project(z))
    assert (ball.violation(x) <= 1e-14).all()
    away = x - z
    gap = (away * x).sum(-1) - ball.lowest(away)
    assert (gap <= 2e-11 * (1 + scale)).all()


def test_retract_keeps_zeros():
    x = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])
    off = x * (1 + 1e-5 * torch.randn(3, 3))
    back = dfw.Birkhoff(3).retract(off.flatten()).reshape(3, 3)
    assert ((back == 0) == (x == 0)).all()
    assert (back.double().sum(0) - 1).abs().max() <= 1e-7
    torch.testing.assert_close(back, x, rtol=0, atol=1e-4)


def l1_vertex(cost):
    best = cost.abs().argmax(-1, keepdim=True)
    return torch.zeros_like(cost).scatter(-1, best, -torch.sign(cost.gather(-1, best)))


def test_a_function_instead_of_a_set():
    """The same solution, gap and gradient as the set in the library, for f quadratic or not."""
    gen = torch.Generator().manual_seed(4)
    A = torch.randn(30, 8, generator=gen, dtype=F64, requires_grad=True)

    def loss(x, A):
        return torch.nn.functional.softplus(x @ A.mT).sum(-1)

    for objective in (
        dfw.LeastSquares(A, torch.randn(3, 30, generator=gen, dtype=F64)),
        dfw.Smooth(loss, A, shape=(8,)),
    ):
        custom = dfw.solve(objective, dfw.CustomSet(l1_vertex), tol=1e-13)
        ball = dfw.solve(objective, dfw.LpBall(1), tol=1e-13)
        torch.testing.assert_close(custom.x, ball.x, rtol=1e-7, atol=1e-8)
        weights = torch.randn(custom.x.shape, generator=gen, dtype=F64)
        got, want = (torch.autograd.grad((s.x * weights).sum(), A)[0] for s in (custom, ball))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_batched_oracle_and_other_methods():
    q = torch.randn(4, 6, dtype=F64)
    objective = dfw.Quadratic(torch.eye(6, dtype=F64), q)
    want = dfw.solve(objective, dfw.LpBall(1), tol=1e-12).x
    batched = dfw.CustomSet(l1_vertex, batched=True)
    for method, atol in {"auto": 1e-7, "projected-newton": 1e-7, "frank-wolfe": 0.1}.items():
        sol = dfw.solve(objective, batched, method=method, tol=1e-12, max_steps=200)
        torch.testing.assert_close(sol.x, want, rtol=0, atol=atol)
    within = dfw.solve(dfw.Quadratic(None, q), dfw.Product([batched, dfw.LpBall(2)], [4, 2]))
    assert (within.x[:, :4].abs().sum(-1) <= 1 + 1e-12).all()
    assert within.converged.all()


def test_a_slow_problem_does_not_ask_for_the_others():
    """A function of one cost is called about as often for a batch as for its problems alone."""
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 3)
    asked = []

    def corner(cost):
        asked.append(cost)
        return corners[(corners @ cost).argmin()]

    gen = torch.Generator().manual_seed(1)
    A = torch.eye(3, dtype=F64).repeat(16, 1, 1)
    A[5] = 1 + 0.05 * torch.randn(3, 3, generator=gen, dtype=F64)  # columns that are all but one
    b = torch.randn(16, 3, generator=gen, dtype=F64)
    calls = {}
    for rows in (slice(None), 5, 6):
        asked.clear()
        objective = dfw.LeastSquares(A[rows], b[rows])
        sol = dfw.solve(objective, dfw.CustomSet(corner), method="projected-newton")
        assert (sol.gap <= 1e-9).all()
        calls[str(rows)] = len(asked)
    together, slow, quick = calls.values()
    assert slow > 5 * quick  # so that going on with all would be 5 times the work
    assert together <= 2 * (slow + 15 * quick)


def test_soft_vertices_of_a_function():
    """The mean over noise, whose derivative is that of the mean: against many more samples."""
    cost = torch.tensor([0.1, -0.2, 0.3], dtype=F64, requires_grad=True)
    few = dfw.CustomSet(l1_vertex, batched=True, samples=4000)
    (slope,) = torch.autograd.grad(few.soft_vertex(cost, 0.5)[0], cost)
    gen = torch.Generator().manual_seed(9)
    noise = 0.5 * torch.randn(200000, 3, generator=gen, dtype=F64)
    with torch.no_grad():
        for i in range(3):
            d = 0.1 * torch.eye(3, dtype=F64)[i]
            up, down = (l1_vertex(cost + s * d + noise)[:, 0].mean() for s in (1, -1))
            assert float(slope[i]) == pytest.approx(float(up - down) / 0.2, abs=0.1)
    sol = dfw.solve(dfw.Quadratic(None, cost), dfw.CustomSet(l1_vertex), method="dfw", tol=0.0)
    assert sol.x.abs().sum() <= 1 + 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dfw.CustomSet(3), "vertex: expected a function of the cost, got int"),
        (lambda: dfw.CustomSet(l1_vertex, samples=0), "samples: expected an integer ≥ 1, got 0"),
        (lambda: dfw.CustomSet(lambda c: c[:2]), r"vertex: expected a tensor of the cost's shape"),
        (lambda: dfw.CustomSet(lambda c: c * torch.nan), "vertex: returned NaN or infinity"),
        (lambda: dfw.Birkhoff(0), "n: expected an integer ≥ 1, got 0"),
        (lambda: dfw.Birkhoff(3), r"n: 3 goes with variables of shape \(3, 3\) or \(9,\)"),
        (lambda: dfw.Product([], []), "sizes: expected one for each of the sets, got 0 for 0"),
        (lambda: dfw.Product([dfw.LpBall(1)], [0]), r"sizes\[0\]: expected a positive integer"),
        (lambda: dfw.Product([1], [5]), r"sets\[0\]: expected a set such as LpBall, got int"),
        (lambda: dfw.Product([dfw.LpBall(1)], [4]), r"sizes: \[4\] are 4 coordinates, expected"),
        (lambda: dfw.Shifted(1, torch.zeros(5)), "constraint: expected a set such as LpBall"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        dfw.solve(dfw.Quadratic(None, torch.randn(5)), make())


def test_active_set_needs_a_bounded_set():
    ball = dfw.LpBall(1, 1.0, torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="method: 'active-set' needs a bounded set"):
        dfw.solve(dfw.Quadratic(None, torch.randn(2)), ball, method="active-set")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_projection_onto_the_spectraplex(dtype, scale):
    """⟨Z − X, Y − X⟩ ≤ 0 for all Y of the set, and a projection stays where it is."""
    gen = torch.Generator().manual_seed(5)
    z = scale * torch.randn(10, 6, 6, generator=gen, dtype=F64).to(dtype)
    trace = 0.5 + torch.rand(10, generator=gen, dtype=F64).to(dtype)
    constraint, eps = dfw.Spectraplex(trace), torch.finfo(dtype).eps
    x = constraint.project(z)
    assert torch.equal(constraint.retract(x), x)
    assert (constraint.violation(x) <= 8 * eps * trace).all()
    away = x - z
    gap = (away * x).sum((-2, -1)) - constraint.lowest(away)
    assert (gap <= 200 * eps * (1 + scale)).all()
    assert torch.equal(dfw.Spectraplex(0.0).project(z), torch.zeros_like(z))


def test_gradients_on_the_spectraplex():
    gen = torch.Generator().manual_seed(6)
    R = torch.randn(9, 9, generator=gen, dtype=F64)
    P = R @ R.mT / 9 + 0.1 * torch.eye(9, dtype=F64)
    q = (3 * torch.randn(3, 9, generator=gen, dtype=F64)).requires_grad_()
    t = torch.tensor([0.5, 1.0, 3.0], dtype=F64, requires_grad=True)

    def solution(q, t):
        return dfw.solve(dfw.Quadratic(P, q), dfw.Spectraplex(t), tol=1e-13).x

    assert torch.autograd.gradcheck(solution, (q, t), atol=1e-6, fast_mode=True)
    soft = q.detach().reshape(3, 3, 3).clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda g, t: dfw.Spectraplex(t).soft_vertex(g, 0.7), (soft, t), fast_mode=True
    )
    with pytest.raises(ValueError, match="trace: a Spectraplex is a set of square matrices"):
        dfw.solve(dfw.Quadratic(None, q[:, :8]), dfw.Spectraplex())


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0, -1.0])
def test_a_euclidean_ball_in_a_plane(level):
    """The same as an intersection; at the ends of the levels a point; copies and pickles."""
    gen = torch.Generator().manual_seed(7)
    normal = torch.randn(5, generator=gen, dtype=F64)
    normal = normal / normal.norm()
    z = torch.randn(6, 5, generator=gen, dtype=F64) * torch.logspace(-2, 1, 6, dtype=F64)[:, None]
    cut = pickle.loads(pickle.dumps(dfw.PlaneCut(dfw.LpBall(2, 1.0), normal, level)))
    flat = dfw.PlaneCut(dfw.Simplex(), 1.0, 1.0)
    assert repr(copy.deepcopy(flat)) == repr(flat)
    sol = dfw.solve(dfw.Quadratic(None, -z), cut, tol=1e-12)
    assert sol.converged.all()
    assert (cut.violation(sol.x) <= 4e-16).all()
    if abs(level) == 1:
        torch.testing.assert_close(sol.x, (level * normal).expand(6, 5), rtol=0, atol=1e-7)
        return
    both = dfw.Intersection(dfw.LpBall(2, 1.0), dfw.Hyperplane(normal, level))
    torch.testing.assert_close(sol.x, dfw.solve(dfw.Quadratic(None, -z), both).x)
    away = sol.x - z
    gap = (away * sol.x).sum(-1) - cut.lowest(away)
    assert (gap <= 1e-13).all()


def test_gradients_of_a_euclidean_ball_in_a_plane():
    """Also where the ball does not hold x, and without a normal."""
    gen = torch.Generator().manual_seed(8)
    R = torch.randn(5, 5, generator=gen, dtype=F64)
    P = R @ R.mT / 5 + 0.2 * torch.eye(5, dtype=F64)
    size = torch.tensor([0.05, 1.0, 10.0], dtype=F64)[:, None]
    q = (size * torch.randn(3, 5, generator=gen, dtype=F64)).requires_grad_()
    normal = torch.randn(3, 5, generator=gen, dtype=F64).requires_grad_()
    radius = torch.full((3,), 1.2, dtype=F64, requires_grad=True)
    level = torch.full((3,), 0.3, dtype=F64, requires_grad=True)

    def solution(q, radius, normal, level):
        cut = dfw.PlaneCut(dfw.LpBall(2, radius), normal, level)
        return dfw.solve(dfw.Quadratic(P, q), cut, tol=1e-13).x.square()

    leaves = (q, radius, normal, level)
    assert torch.autograd.gradcheck(solution, leaves, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(solution, leaves, atol=1e-5, fast_mode=True)
    everything = dfw.PlaneCut(dfw.LpBall(2, radius), torch.zeros(5, dtype=F64), 0.0)
    ball = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2, radius), tol=1e-12)
    torch.testing.assert_close(
        dfw.solve(dfw.Quadratic(P, q), everything, tol=1e-12).x, ball.x, rtol=1e-7, atol=1e-8
    )
    with pytest.raises(ValueError, match="p = 2 and no weights"):
        dfw.PlaneCut(dfw.LpBall(2, 1.0, torch.ones(3)), 1.0, 0.5)
