"""The default method arrives at default settings, also where conditioning or data are bad.

Solutions are compared with those of an independent solver, or with the conditions of optimality
evaluated in NumPy.
"""

import math

import numpy as np
import pytest
import torch

from dfwlayer import (
    Birkhoff,
    Box,
    CappedSimplex,
    Ellipsoid,
    GroupBall,
    KSparse,
    L1Box,
    LeastSquares,
    LpBall,
    PlaneCut,
    Product,
    Quadratic,
    SchattenBall,
    Simplex,
    Smooth,
    Status,
    solve,
)
from dfwlayer_bench.fuzz import draw_problem

cp = pytest.importorskip("cvxpy")

D = torch.float64


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, gen):
    return torch.randn(*shape, generator=gen, dtype=D)


def conditioned(m, n, condition, gen):
    """A (m, n) with cond(AᵀA) as given."""
    k = min(m, n)
    left, right = (torch.linalg.qr(randn(size, k, gen=gen))[0] for size in (m, n))
    return left * torch.logspace(0, -math.log10(condition) / 2, k, dtype=D) @ right.mT


def correlated(m, n, rho, gen):
    """Columns that follow each other as AR(1)."""
    noise = randn(m, n, gen=gen)
    columns = [noise[:, 0]]
    for j in range(1, n):
        columns.append(rho * columns[-1] + math.sqrt(1 - rho**2) * noise[:, j])
    return torch.stack(columns, -1)


def lasso(m, n, rho, count, share, seed):
    gen = generator(seed)
    A = correlated(m, n, rho, gen)
    x = torch.zeros(n, dtype=D)
    x[torch.randperm(n, generator=gen)[:count]] = randn(count, gen=gen)
    b = A @ x + 0.5 * randn(m, gen=gen)
    return A, b, float(share * x.abs().sum())


def reference(objective, constraints):
    """f* of a convex problem in x by Clarabel."""
    problem = cp.Problem(cp.Minimize(objective), constraints)
    settings = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}
    problem.solve(solver=cp.CLARABEL, **settings)
    return problem.value


def check(sol, best=None, tol=1e-5):
    assert (sol.status == Status.CONVERGED).all(), sol
    assert (sol.gap <= tol * sol.value.abs()).all(), sol
    if best is not None:
        best = torch.as_tensor(best, dtype=D)
        excess = (sol.value.double() - best).abs()
        assert (excess <= 2 * tol * best.abs()).all(), (sol.value, best)


@pytest.mark.parametrize(("m", "n", "rho"), [(40, 900, 0.99), (60, 150, 0.999), (150, 40, 0.999)])
def test_lasso_with_correlated_columns(m, n, rho):
    A, b, t = lasso(m, n, rho, 12, 0.6, seed=n)
    x = cp.Variable(n)
    best = reference(0.5 * cp.sum_squares(A.numpy() @ x - b.numpy()), [cp.norm1(x) <= t])
    sol = solve(LeastSquares(A, b), LpBall(1, radius=t))
    check(sol, best)
    assert sol.x.abs().sum() <= t * (1 + 1e-14)


def test_a_batch_of_radii_arrives_where_each_radius_does():
    A, b, t = lasso(50, 120, 0.995, 10, 1.0, seed=4)
    radii = t * torch.logspace(-2, -0.1, 12, dtype=D)
    sol = solve(LeastSquares(A, b), LpBall(1, radius=radii))
    check(sol)
    for i, radius in enumerate(radii.tolist()):
        alone = solve(LeastSquares(A, b), LpBall(1, radius=radius))
        check(alone)
        torch.testing.assert_close(alone.x, sol.x[i], rtol=0, atol=1e-7 * float(sol.x[i].norm()))


@pytest.mark.parametrize("condition", [1e8, 1e10, 1e12])
def test_bounded_least_squares(condition):
    gen = generator(1)
    A = conditioned(120, 60, condition, gen)
    b = A @ (2 * randn(60, gen=gen)) + 0.01 * randn(120, gen=gen)
    sol = solve(LeastSquares(A, b), Box(-1.0, 1.0))
    check(sol)
    # the multipliers of Aᵀ(Ax − b) have the signs of the bounds that hold, and vanish elsewhere
    x, g = sol.x.numpy(), (A.mT @ (A @ sol.x - b)).numpy()
    inside = np.abs(x) < 1
    scale = float((A.mT @ b).abs().max())
    assert np.abs(g[inside]).max() <= 1e-12 * scale
    assert (-g[~inside] * x[~inside]).min() >= -1e-12 * scale


SETS = {
    "box": (Box(-1.0, 1.0), lambda x: [cp.norm_inf(x) <= 1]),
    "linf": (LpBall(math.inf, radius=1.0), lambda x: [cp.norm_inf(x) <= 1]),
    "l1": (LpBall(1, radius=20.0), lambda x: [cp.norm1(x) <= 20]),
    "simplex": (Simplex(radius=3.0), lambda x: [x >= 0, cp.sum(x) == 3]),
    "capped": (CappedSimplex(radius=3.0, cap=0.2), lambda x: [x >= 0, x <= 0.2, cp.sum(x) == 3]),
    "k-sparse": (KSparse(10, radius=1.0), lambda x: [cp.norm_inf(x) <= 1, cp.norm1(x) <= 10]),
    "l1 and box": (
        L1Box(radius=15.0, lower=-1.0, upper=0.5),
        lambda x: [cp.norm1(x) <= 15, x >= -1, x <= 0.5],
    ),
    "cut box": (
        PlaneCut(Box(-1.0, 1.0), normal=torch.linspace(-1, 2, 60, dtype=D), level=1.0),
        lambda x: [cp.norm_inf(x) <= 1, np.linspace(-1, 2, 60) @ x == 1],
    ),
    "cut simplex": (
        PlaneCut(Simplex(), normal=torch.linspace(-1, 1, 60, dtype=D), level=0.1),
        lambda x: [x >= 0, cp.sum(x) == 1, np.linspace(-1, 1, 60) @ x == 0.1],
    ),
    "product": (
        Product([Box(-1.0, 1.0), Simplex(), LpBall(1, radius=4.0)], [20, 20, 20]),
        lambda x: [
            cp.norm_inf(x[:20]) <= 1,
            x[20:40] >= 0,
            cp.sum(x[20:40]) == 1,
            cp.norm1(x[40:]) <= 4,
        ],
    ),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])
def test_ill_conditioned_quadratics_over_polyhedra(name, dtype):
    """A factor model: five steep directions and a tiny diagonal, minimised near the boundary."""
    gen = generator(7)
    factors = randn(60, 5, gen=gen)
    P = factors @ factors.mT / 5 + 1e-5 * torch.diag(torch.rand(60, generator=gen, dtype=D) + 0.1)
    q = -(P @ (2 * randn(60, gen=gen))) - 1e-4 * randn(60, gen=gen)
    P, q = P.to(dtype), q.to(dtype)
    constraint, conditions = SETS[name]
    if dtype == torch.float32 and "cut" in name:
        constraint = PlaneCut(constraint.constraint, constraint.normal.float(), constraint.level)
    x = cp.Variable(60)
    wide = 0.5 * (P.double() + P.double().mT)
    f = 0.5 * cp.quad_form(x, cp.psd_wrap(wide.numpy())) + q.double().numpy() @ x
    best = reference(f, conditions(x))
    sol = solve(Quadratic(P, q), constraint)
    if dtype == torch.float64:
        check(sol, best)
    else:
        # the gap may end above tol, at the rounding of the dtype, but x is as good as it gets
        assert sol.status in (Status.CONVERGED, Status.ROUNDING_FLOOR)
        y = sol.x.double()
        value = float(0.5 * y @ wide @ y + q.double() @ y)
        assert abs(value - best) <= 1e-4 * abs(best)


@pytest.mark.parametrize("n", [80, 200])
def test_dual_of_a_support_vector_machine(n):
    gen = generator(n)
    points = randn(n, 4, gen=gen)
    noise = 0.3 * randn(n, gen=gen)
    labels = torch.sign(points[:, 0] + 0.5 * points[:, 1] ** 2 - 0.3 + noise)
    kernel = torch.exp(-0.5 * torch.cdist(points, points) ** 2)
    f = Quadratic(labels[:, None] * labels * kernel, -torch.ones(n, dtype=D))
    sol = solve(f, PlaneCut(Box(0.0, 100.0), normal=labels, level=0.0))
    check(sol)
    # the margins y(f(x) + b) are 1 for support vectors inside, ≥ 1 without, ≤ 1 at the cap
    score = (kernel * labels) @ sol.x
    margin = (sol.x > 1e-6) & (sol.x < 100 - 1e-6)
    assert margin.any()
    offset = (labels - score)[margin]
    assert offset.max() - offset.min() <= 1e-6
    edge = labels * (score + offset.mean())
    assert edge[sol.x <= 1e-6].min() >= 1 - 1e-6


@pytest.mark.parametrize("standard", [False, True])
def test_l1_logistic_regression_on_breast_cancer_data(standard):
    datasets = pytest.importorskip("sklearn.datasets")
    X, y = datasets.load_breast_cancer(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0) if standard else X
    A, s = torch.tensor(X), torch.tensor(2.0 * y - 1)

    def loss(w, A, s):
        return torch.nn.functional.softplus(-(w @ A.mT) * s).sum(-1)

    t = 20.0 if standard else 8.0
    sol = solve(Smooth(loss, A, s, shape=30), LpBall(1, radius=t))
    check(sol)
    x = sol.x.detach()
    # at a solution on the boundary |∇f| is the same on the support, and not more elsewhere
    w = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(w, A, s), w)
    support = x.abs() > 1e-9
    largest = g.abs().max()
    assert abs(float(x.abs().sum()) - t) <= 1e-9 * t
    assert (g.abs()[support] >= largest * (1 - 1e-4)).all()


def test_lasso_on_breast_cancer_data_as_it_is():
    datasets = pytest.importorskip("sklearn.datasets")
    X, y = datasets.load_breast_cancer(return_X_y=True)
    A, b = torch.tensor(X), torch.tensor(y, dtype=D)
    whole = torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.abs().sum()
    radii = whole * torch.tensor([0.1, 0.5, 0.9], dtype=D)
    check(solve(LeastSquares(A, b), LpBall(1, radius=radii)))


CURVED = {
    "p = 1.5": LpBall(1.5, radius=5.0),
    "p = 2": LpBall(2, radius=2.0),
    "p = 2, weighted": LpBall(2, radius=2.0, weight=torch.logspace(-1, 1, 36, dtype=D)),
    "p = 3": LpBall(3, radius=2.0),
    "p = 6": LpBall(6, radius=2.0),
    "groups": GroupBall(torch.arange(36) // 4, radius=8.0),
    "ellipsoid": Ellipsoid(torch.diag(torch.logspace(-1, 1, 36, dtype=D)), radius=3.0),
    "product": Product([Box(-0.5, 0.5), LpBall(2, radius=1.0)], [18, 18]),
    "nuclear": SchattenBall(1, radius=3.0),
    "spectral": SchattenBall(math.inf, radius=0.8),
}


@pytest.mark.parametrize("name", CURVED)
@pytest.mark.parametrize("kind", ["quadratic", "least squares", "smooth"])
def test_ill_conditioned_problems_over_sets_that_bend(name, kind):
    gen = generator(11)
    A = conditioned(60, 36, 1e6, gen)
    b = A @ randn(36, gen=gen) + 0.1 * randn(60, gen=gen)
    matrix = name in ("nuclear", "spectral")
    if kind == "smooth" or matrix:

        def fit(x, A, b):
            r = (x.flatten(-2) if matrix else x) @ A.mT - b
            return torch.log(torch.cosh(r)).sum(-1) if kind == "smooth" else 0.5 * (r * r).sum(-1)

        objective = Smooth(fit, A, b, shape=(6, 6) if matrix else 36)
    elif kind == "quadratic":
        objective = Quadratic(A.mT @ A, -(A.mT @ b))
    else:
        objective = LeastSquares(A, b)
    check(solve(objective, CURVED[name]))


def test_doubly_stochastic_matrices():
    gen = generator(3)
    A = conditioned(60, 36, 1e8, gen)
    x = cp.Variable((6, 6))
    b = A @ randn(36, gen=gen)
    flat = cp.reshape(x, (36,), order="C")
    rows, columns = cp.sum(x, axis=1), cp.sum(x, axis=0)
    best = reference(
        0.5 * cp.sum_squares(A.numpy() @ flat - b.numpy()), [x >= 0, rows == 1, columns == 1]
    )
    check(solve(LeastSquares(A, b), Birkhoff(6)), best)


def test_a_start_where_f_is_infinite():
    """−Σ c log x is infinite at the corner where a box begins."""
    c = torch.linspace(1, 2, 20, dtype=D)

    def barrier(x, c):
        return -(c * torch.log(x)).sum(-1) + 4 * x.sum(-1) ** 2

    sol = solve(Smooth(barrier, c, shape=20), Box(0.0, 1.0))
    check(sol)
    # 8 Σx = c_i/x_i inside, so x is proportional to c
    scale = (c.sum() / 8).sqrt() / c.sum()
    torch.testing.assert_close(sol.x, scale * c, rtol=1e-6, atol=0)


def test_an_f_that_is_infinite_on_the_whole_set_is_said_to_be():
    c = torch.ones(3, dtype=D)
    sol = solve(Smooth(lambda x, c: -(c * torch.log(x - 2)).sum(-1), c, shape=3), Box(0.0, 1.0))
    assert sol.status == Status.OUT_OF_RANGE
    assert "x0" in Status(int(sol.status)).message
    assert ((sol.x >= 0) & (sol.x <= 1)).all()


@pytest.mark.parametrize("kind", ["quadratic", "least squares"])
def test_a_solution_as_a_start_takes_few_steps(kind):
    gen = generator(5)
    A = conditioned(120, 60, 1e9, gen)
    b = A @ (2 * randn(60, gen=gen)) + 0.01 * randn(120, gen=gen)
    box = Box(-1.0, 1.0)
    f = LeastSquares(A, b) if kind == "least squares" else Quadratic(A.mT @ A, -(A.mT @ b))
    cold = solve(f, box)
    free = cold.x.abs() < 1
    moved = torch.where(free, 0.999 * cold.x, cold.x)
    warm = solve(f, box, x0=moved)
    check(warm)
    assert warm.num_steps <= 60
    torch.testing.assert_close(warm.x, cold.x, rtol=0, atol=1e-5)


def test_rows_with_one_hessian_do_not_share_a_penalty():
    """A row beside others ends where it ends alone."""
    gen = generator(9)
    A = conditioned(80, 80, 1e7, gen)
    P, q = A.mT @ A, randn(6, 80, gen=gen) * torch.logspace(-4, 2, 6, dtype=D).unsqueeze(-1)
    radii = torch.logspace(-2, 3, 6, dtype=D)
    sol = solve(Quadratic(P, q), LpBall(1, radius=radii))
    check(sol)
    for i in range(6):
        alone = solve(Quadratic(P, q[i]), LpBall(1, radius=float(radii[i])))
        check(alone)
        size = float(alone.x.norm())
        torch.testing.assert_close(sol.x[i], alone.x, rtol=0, atol=1e-6 * size)


def lopsided(count, m, n, seed):
    """Designs (count, m, n) with one singular value far above and one far below the others."""
    gen = generator(seed)
    left, right = (torch.linalg.qr(randn(count, size, n, gen=gen))[0] for size in (m, n))
    values = torch.cat((torch.tensor([50.0]), torch.linspace(1, 0.1, n - 2), torch.tensor([0.012])))
    A = left * values.to(D) @ right.mT
    target = randn(count, n, gen=gen) / math.sqrt(n)
    b = (A @ target.unsqueeze(-1)).squeeze(-1) + 0.3 * randn(count, m, gen=gen)
    return A, b


def arrived(sol, gap, b):
    """Arrived, or as close as the dtype allows: to the rounding of ½‖b‖² where the fit is exact."""
    done = (sol.status == Status.CONVERGED) | (sol.status == Status.ROUNDING_FLOOR)
    assert done.all(), sol.status
    rounding = 1e3 * torch.finfo(sol.x.dtype).eps * (b.double() ** 2).sum(-1).numpy()
    assert (gap <= 1e-5 * sol.value.double().numpy() + rounding).all(), gap


def slope_of(A, b, x):
    """Aᵀ(Ax − b) of each row."""
    A, b, x = (v.double().numpy() for v in (A, b, x))
    return np.einsum("bmn,bm->bn", A, np.einsum("bmn,bn->bm", A, x) - b), x


@pytest.mark.parametrize("index", [1577, 3137])
def test_correlated_least_squares_over_nuclear_balls(index):
    """The rank of the solution is found, from more of it or less."""
    sol = draw_problem(seed=0, index=index).solve()
    done = (sol.status == Status.CONVERGED) | (sol.status == Status.ROUNDING_FLOOR)
    assert done.all(), sol.status


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])
def test_least_squares_with_few_rows_over_ellipsoids(dtype):
    """f is flat in some directions and the ellipsoid narrow in others."""
    gen = generator(4)
    axes = torch.linalg.qr(randn(60, 8, 8, gen=gen))[0] * torch.logspace(-1, 2, 8, dtype=D)
    axes = (axes @ torch.linalg.qr(randn(60, 8, 8, gen=gen))[0]).to(dtype)
    A, b = (v.to(dtype) for v in lopsided(60, 8, 8, seed=5))
    A, b = A[:, :6], b[:, :6]
    radius = torch.logspace(-1, 1, 60, dtype=dtype)
    sol = solve(LeastSquares(A, b), Ellipsoid(axes, radius=radius))
    g, x = slope_of(A, b, sol.x)
    most = np.linalg.norm(
        np.linalg.solve(axes.double().numpy().swapaxes(-1, -2), g[..., None])[..., 0], axis=-1
    )
    arrived(sol, (g * x).sum(-1) + radius.double().numpy() * most, b)


HUBER_SETS = {
    "Box": lambda like: Box(-1e8 * torch.ones_like(like), 1e8 * torch.ones_like(like)),
    "LpBall 1": lambda like: LpBall(1, 1e3),  # noqa: ARG005
    "LpBall 1.05": lambda like: LpBall(1.05, 1e3),  # noqa: ARG005
}


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("name", HUBER_SETS)
def test_bends_that_are_narrow_beside_the_set(name, dtype):
    """Nearly a linear program: f is a sum of |r_i| but for bends of 0.3."""
    gen = generator(3)
    rows, n = 8, 6
    F, d, c = randn(n + 1, n, gen=gen), randn(rows, n + 1, gen=gen), randn(rows, n, gen=gen)
    F, d, c = (t.to(dtype) for t in (F / n**0.5, d, 0.2 * c))

    def huber(x, F, d, c):
        r = x @ F.mT - d
        bent = torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * (r.abs() - 0.15))
        return bent.sum(-1) + (c * x).sum(-1)

    sol = solve(Smooth(huber, F, d, c, shape=(n,)), HUBER_SETS[name](c[0]))
    ends = {Status.CONVERGED} | ({Status.ROUNDING_FLOOR} if dtype == torch.float32 else set())
    assert {Status(s) for s in sol.status.tolist()} <= ends
    if dtype == torch.float32:
        F, d, c = F.double(), d.double(), c.double()
        wide = solve(Smooth(huber, F, d, c, shape=(n,)), HUBER_SETS[name](c[0]))
        # rounding of x to float32 raises f by as much
        rounding = 2e-7 * (sol.x.abs().double() @ (F.abs().sum(0) + c.abs()).mT).amax(-1)
        higher = huber(sol.x.double(), F, d, c) - wide.value
        assert (higher <= 1e-5 * wide.value.abs() + 16 * rounding).all()


def test_a_minimum_where_the_terms_of_the_gradient_cancel():
    """At x = 0 with ∇f = 0 nothing but f itself tells how large the terms of ∇f are."""
    shift = torch.linspace(-3, 3, 25, dtype=D).reshape(-1, 1)

    def f(x, shift):
        pair = torch.cat((x + shift, x + shift), -1)
        return torch.logsumexp(pair, -1) + (0.25 * x * x - x).sum(-1)

    sol = solve(Smooth(f, shift, shape=(1,)), LpBall(torch.inf, 2.0))
    assert (sol.status == Status.CONVERGED).all()
    assert (sol.x.abs() < 1e-14).all()


def test_correlated_columns_over_a_ball_next_to_the_cross_polytope():
    """Near zero the curvature of the ball is beyond that of f by more than a double has digits."""
    gen = generator(0)
    n = 10
    A = 0.05 * randn(60, 12, n, gen=gen) + randn(60, 12, 1, gen=gen)
    b = randn(60, 12, gen=gen)
    radius = 0.5 * torch.rand(60, generator=gen, dtype=D)
    sol = solve(LeastSquares(A.float(), b.float()), LpBall(1.05, radius.float()))
    assert ((sol.status == Status.CONVERGED) | (sol.status == Status.ROUNDING_FLOOR)).all()
    assert (sol.gap <= 1e-4 * sol.value).all()
