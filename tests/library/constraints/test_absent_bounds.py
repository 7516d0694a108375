"""Sets whose coordinates lack a bound, on one side or on both: answers, certificates, statuses."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, lsq_linear, nnls

import dfwlayer as dfw
from dfwlayer.engines import compiled

F32, F64 = torch.float32, torch.float64
INF = torch.inf


@pytest.fixture(params=[True, False], ids=["compiled", "eager"])
def engine(request):
    with compiled.using(request.param):
        yield request.param


def drawn(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def bounds(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """A random pattern of absent bounds."""
    lower = rng.standard_normal(shape)
    upper = lower + 2 * rng.random(shape)
    lower[rng.random(shape) < 0.4] = -np.inf
    upper[rng.random(shape) < 0.4] = np.inf
    return lower, upper


def optimality(x: np.ndarray, g: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> float:
    """How far x is from where a projected gradient step would take it."""
    return float(np.abs(x - np.clip(x - g, lower, upper)).max())


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("shape", [(20, 8), (8, 20), (6, 300), (60, 60)], ids=str)
def test_non_negative_least_squares(shape, dtype, engine):
    rng = drawn(shape[1])
    A, b = rng.random(shape), rng.standard_normal(shape[0])
    given = torch.tensor(A, dtype=dtype), torch.tensor(b, dtype=dtype)
    for matrix in (given[0], given[0].to_sparse()):
        sol = dfw.solve(dfw.LeastSquares(matrix, given[1]), dfw.Box(lower=0.0))
        want, residual = nnls(*(t.double().numpy() for t in given))
        assert dfw.Status(int(sol.status)) is dfw.Status.CONVERGED
        assert (sol.x >= 0).all()
        allowed = 1e-9 if dtype == F64 else 1e-4
        np.testing.assert_allclose(sol.x.numpy(), want, atol=allowed * np.abs(want).max())
        eps = torch.finfo(dtype).eps
        assert float(sol.value) - residual**2 / 2 <= float(sol.gap) + 100 * eps * residual**2


def test_columns_that_depend_on_each_other(engine):
    """There f has many minimisers; one of them is found, with a certificate."""
    rng = drawn(3)
    A = rng.standard_normal((12, 5)) @ rng.standard_normal((5, 9))
    b = rng.standard_normal((4, 12))
    for own in (torch.tensor(A), torch.tensor(A).to_sparse()):
        sol = dfw.solve(dfw.LeastSquares(own, torch.tensor(b)), dfw.Box(lower=0.0))
        assert sol.converged.all()
        least = np.array([nnls(A, row)[1] ** 2 / 2 for row in b])
        np.testing.assert_allclose(sol.value.numpy(), least, rtol=1e-10)


@pytest.mark.parametrize("seed", range(6))
def test_random_patterns(seed, engine):
    rng = drawn(seed)
    A, b = rng.standard_normal((5, 14, 9)), 3 * rng.standard_normal((5, 14))
    lower, upper = bounds(rng, 5, 9)
    scale = 10.0 ** rng.integers(-10, 11)
    sets = dfw.Box(torch.tensor(lower * scale), torch.tensor(upper * scale))
    sol = dfw.solve(dfw.LeastSquares(torch.tensor(A), torch.tensor(b * scale)), sets)
    assert sol.converged.all()
    for i in range(5):
        want = lsq_linear(A[i], b[i], (lower[i], upper[i]), tol=1e-14)
        np.testing.assert_allclose(sol.x[i].numpy() / scale, want.x, atol=1e-7)
        x = sol.x[i].numpy() / scale
        assert optimality(x, A[i].T @ (A[i] @ x - b[i]), lower[i], upper[i]) <= 1e-12
        assert float(sol.value[i]) / scale**2 - want.cost <= float(sol.gap[i]) / scale**2 + 1e-12


@pytest.mark.parametrize("method", ["auto", "frank-wolfe", "dfw"])
@pytest.mark.parametrize("steps", [1, 3, 20])
def test_the_gap_is_a_bound_wherever_it_stops(method, steps, engine):
    rng = drawn(steps)
    R = rng.standard_normal((6, 7, 7))
    P, q = R.transpose(0, 2, 1) @ R + 0.1 * np.eye(7), 3 * rng.standard_normal((6, 7))
    lower, upper = bounds(rng, 6, 7)
    f = dfw.Quadratic(torch.tensor(P), torch.tensor(q))
    sets = dfw.Box(torch.tensor(lower), torch.tensor(upper))
    best = dfw.solve(f, sets, tol=1e-13).value
    sol = dfw.solve(f, sets, method=method, max_steps=steps)
    assert (sol.value - best <= sol.gap + 1e-10).all()
    assert torch.isfinite(sol.gap).all()
    assert (sol.x >= torch.tensor(lower)).all()
    assert (sol.x <= torch.tensor(upper)).all()


def test_none_is_no_bound(engine):
    q = torch.tensor([[-2.0, 0.5, 3.0]], dtype=F64)
    for box, want in (
        (dfw.Box(), [2.0, -0.5, -3.0]),
        (dfw.Box(0.0), [2.0, 0.0, 0.0]),
        (dfw.Box(upper=0.0), [0.0, -0.5, -3.0]),
        (dfw.Box(-1.0, None), [2.0, -0.5, -1.0]),
        (dfw.Box(None, torch.tensor([1.0, INF, -4.0], dtype=F64)), [1.0, -0.5, -4.0]),
        (dfw.L1Box(1.5, None, None, None), [0.25, 0.0, -1.25]),
        (dfw.Shifted(dfw.Box(0.0), 1.0), [2.0, 1.0, 1.0]),
        (dfw.Product([dfw.Box(0.0), dfw.Box(upper=1.0)], [2, 1]), [2.0, 0.0, -3.0]),
    ):
        sol = dfw.solve(dfw.Quadratic(None, q), box)
        assert sol.converged.all()
        torch.testing.assert_close(sol.x, torch.tensor([want], dtype=F64))


def falls(P: np.ndarray, q: np.ndarray, lower: np.ndarray, upper: np.ndarray, a=None) -> bool:
    """Whether a direction stays in the set along which f has no curvature and falls."""
    rows = P if a is None else np.vstack((P, a))
    sides = [(-float(np.isinf(i)), float(np.isinf(j))) for i, j in zip(lower, upper, strict=True)]
    return linprog(q, A_eq=rows, b_eq=np.zeros(len(rows)), bounds=sides).fun < -1e-7


@cache
def singular_problems(cut):
    """240 problems whose P are singular, or zero, in batches, and which of them fall for ever."""
    rng, made = drawn(11), []
    for trial in range(40):
        n, rows = int(rng.integers(1, 8)), 6
        R = rng.integers(-3, 4, (rows, int(rng.integers(0, n + 1)), n)).astype(float)
        P, q = R.transpose(0, 2, 1) @ R, rng.standard_normal((rows, n))
        if trial % 3 == 0:  # none falls for ever where q is in the range of P
            q = (P @ q[..., None])[..., 0] + (rng.random((rows, n)) if trial % 2 else 0)
        lower, upper = bounds(rng, rows, n)
        normal = rng.integers(-2, 3, (rows, n)).astype(float)
        level = (normal * np.clip(rng.standard_normal((rows, n)), lower, upper)).sum(-1)
        sets: dfw.Constraint = dfw.Box(torch.tensor(lower), torch.tensor(upper))
        if cut:
            sets = dfw.PlaneCut(sets, torch.tensor(normal), torch.tensor(level))
        f = dfw.Quadratic(torch.tensor(P), torch.tensor(q))
        own = [normal[i] if cut else None for i in range(rows)]
        made.append((f, sets, [*map(falls, P, q, lower, upper, own)]))
    return made


@pytest.mark.parametrize("cut", [False, True], ids=["box", "cut"])
def test_functions_that_fall_for_ever(cut, engine):
    """Others of a batch are not touched."""
    count = 0
    for trial, (f, sets, forever) in enumerate(singular_problems(cut)):
        sol = dfw.solve(f, sets)
        count += sum(forever)
        for i, endless in enumerate(forever):
            status = dfw.Status(int(sol.status[i]))
            assert (status is dfw.Status.UNBOUNDED) == endless, (trial, i, status)
            assert torch.isinf(sol.gap[i]) == endless
            if not endless:
                assert status in (dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR)
    assert count > 20


def test_one_problem_that_falls_for_ever_leaves_the_others_alone(engine):
    P = torch.diag_embed(torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.0, 3.0]], dtype=F64))
    q = torch.tensor([[1.0, -2.0, -3.0]] * 2, dtype=F64).requires_grad_()
    lower = torch.zeros(2, 3, dtype=F64).requires_grad_()
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Box(lower))
    assert [dfw.Status(int(s)).name for s in sol.status] == ["CONVERGED", "UNBOUNDED"]
    torch.testing.assert_close(sol.x[0].detach(), torch.tensor([0.0, 1.0, 1.0], dtype=F64))
    sol.x[0].sum().backward()
    torch.testing.assert_close(q.grad[0], torch.tensor([0.0, -1 / 2, -1 / 3], dtype=F64))
    torch.testing.assert_close(lower.grad[0], torch.tensor([1.0, 0.0, 0.0], dtype=F64))


def test_gradients_of_infinite_bounds_are_zero(engine):
    rng = drawn(5)
    R = torch.tensor(rng.standard_normal((6, 6)))
    P, q = R.mT @ R + torch.eye(6), torch.tensor(3 * rng.standard_normal((3, 6)))
    lower, upper = (torch.tensor(v) for v in bounds(rng, 3, 6))

    def solved(q, lower, upper):
        return dfw.solve(dfw.Quadratic(P, q), dfw.Box(lower, upper), tol=1e-13).x

    leaves = [t.clone().requires_grad_() for t in (q, lower, upper)]
    assert torch.autograd.gradcheck(solved, leaves, atol=1e-6)
    grads = torch.autograd.grad(solved(*leaves).square().sum(), leaves, create_graph=True)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.isfinite().all()
        assert (grad[leaf.isinf()] == 0).all()
    (second,) = torch.autograd.grad(grads[0].square().sum(), leaves[:1])
    assert second.isfinite().all()


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_a_cut_through_the_orthant_is_the_simplex(dtype, engine):
    gen = torch.Generator().manual_seed(2)
    R = torch.randn(9, 9, generator=gen, dtype=dtype)
    P, q = R.mT @ R + 0.1 * torch.eye(9, dtype=dtype), torch.randn(5, 9, generator=gen, dtype=dtype)
    total = torch.tensor([0.3, 1.0, 2.0, 1e-3, 50.0], dtype=dtype)
    f = dfw.Quadratic(P, q)
    found = dfw.solve(f, dfw.PlaneCut(dfw.Box(lower=0.0), 1.0, total))
    want = dfw.solve(f, dfw.Simplex(total))
    assert found.converged.all()
    allowed = 1e-10 if dtype == F64 else 1e-5
    torch.testing.assert_close(found.x, want.x, atol=allowed, rtol=allowed)
    cut = dfw.PlaneCut(dfw.Box(lower=0.0), 1.0, total)
    torch.testing.assert_close(cut.vertex(q), dfw.Simplex(total).vertex(q))
    torch.testing.assert_close(cut.project(q), dfw.Simplex(total).project(q))


@pytest.mark.parametrize("singular", [False, True], ids=["regular", "singular"])
def test_equations_alone(singular, engine):
    """Without bounds a cut is a linear system; P may be singular outside of the plane."""
    rng = drawn(8)
    R = rng.standard_normal((4, 6 if singular else 8, 7))
    P, q, a = R.transpose(0, 2, 1) @ R, rng.standard_normal((4, 7)), rng.standard_normal((4, 7))
    sets = dfw.PlaneCut(dfw.Box(), torch.tensor(a), 2.0)
    sol = dfw.solve(dfw.Quadratic(torch.tensor(P), torch.tensor(q)), sets)
    assert sol.converged.all()
    for i in range(4):
        system = np.block([[P[i], a[i][:, None]], [a[i][None], np.zeros((1, 1))]])
        want = np.linalg.solve(system, np.append(-q[i], 2.0))[:7]
        np.testing.assert_allclose(sol.x[i].numpy(), want, rtol=1e-7, atol=1e-7)


def test_a_budget_beside_zero(engine):
    """{1 ≤ x ≤ 3, Σ|x| ≤ 5}: everything starts from the point of the box next to zero."""
    sets = dfw.L1Box(5.0, None, 1.0, 3.0)
    q = torch.tensor([[-9.0, -2.0, 4.0], [0.0, 0.0, 0.0], [-1.5, -1.5, -1.5]], dtype=F64)
    sol = dfw.solve(dfw.Quadratic(None, q), sets)
    want = torch.tensor([[3.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.5, 1.5, 1.5]], dtype=F64)
    assert sol.converged.all()
    torch.testing.assert_close(sol.x, want)
    g = torch.tensor([-1.0, -2.0, 3.0], dtype=F64)
    torch.testing.assert_close(sets.vertex(g), torch.tensor([1.0, 3.0, 1.0], dtype=F64))
    with pytest.raises(ValueError, match="radius: expected numbers ≥ 3"):
        dfw.solve(dfw.Quadratic(None, q[0]), dfw.L1Box(2.0, None, 1.0, 3.0))


def test_many_columns_are_a_matter_of_a_working_set():
    """Compiled code takes them by columns; what it finds is proven."""
    rng = drawn(4)
    A, b = torch.tensor(rng.random((60, 1500)) - 0.35), torch.tensor(rng.standard_normal(60))
    leaf = b.clone().requires_grad_()
    with compiled.using(True):
        sol = dfw.solve(dfw.LeastSquares(A, leaf), dfw.Box(lower=0.0))
    assert dfw.Status(int(sol.status)) is dfw.Status.CONVERGED
    assert int(sol.num_steps) < 40
    want, _ = nnls(A.numpy(), b.numpy())
    np.testing.assert_allclose(sol.x.detach().numpy(), want, atol=1e-9)
    (grad,) = torch.autograd.grad(sol.x.square().sum(), leaf)
    with compiled.using(False):
        other = dfw.solve(dfw.LeastSquares(A, leaf), dfw.Box(lower=0.0), tol=1e-12)
    (expected,) = torch.autograd.grad(other.x.square().sum(), leaf)
    torch.testing.assert_close(grad, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("n", [3, 90])
@pytest.mark.parametrize(
    ("sort", "name", "wrong"),
    [
        (dfw.Box, "lower", INF),
        (dfw.Box, "upper", -INF),
        (dfw.Polyhedron, "lower", INF),
        (dfw.Polyhedron, "upper", -INF),
        (dfw.Polyhedron, "h", -INF),
    ],
)
def test_a_side_that_is_infinite_where_no_point_is(name, wrong, sort, n, engine):
    """It is an error where all problems share it, and otherwise the affair of its problem."""
    rows = {"G": torch.ones(1, n, dtype=F64), "h": torch.ones(1, dtype=F64)}
    given = rows if sort is dfw.Polyhedron else {}
    q = torch.linspace(-1, 1, n, dtype=F64)
    sides = torch.ones(len(given["h"]) if name == "h" else n, dtype=F64) * (-wrong)
    for objective in (dfw.Quadratic(None, q), dfw.Quadratic(torch.diag(2 + q), q)):
        for side in (wrong, sides.index_fill(0, torch.tensor([0]), wrong)):
            with pytest.raises(ValueError, match=f"{name}: expected numbers .* no point meets"):
                dfw.solve(objective, sort(**(given | {name: side})))
        free = dfw.solve(objective, sort(**(given | {name: sides})))
        some = torch.stack((sides, side, sides))
        sol = dfw.solve(objective, sort(**(given | {name: some})))
        assert sol.status.tolist() == [0, dfw.Status.INFEASIBLE, 0]
        torch.testing.assert_close(sol.x[::2], free.x.expand(2, n))
