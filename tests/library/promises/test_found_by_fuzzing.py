"""What random problems brought to light, each as the class it is a member of."""

import math

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from dfwlayer.engines import compiled
from dfwlayer.ops.values import narrowed
from helpers import DTYPES, F64, draw

DONE = (Status.CONVERGED, Status.ROUNDING_FLOOR)


@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_matrix_without_entries_has_a_gradient(layout):
    A = getattr(torch.zeros(4, 3, dtype=F64), layout)().requires_grad_()
    sol = dfw.solve(dfw.LeastSquares(A, draw(2, 4)), dfw.Simplex())
    (grad,) = torch.autograd.grad(sol.x.sum(), A)
    assert not grad.to_dense().any()


def test_a_gradient_in_a_matrix_may_be_as_large_as_the_dtype_allows():
    """Half of the largest number twice is not infinity."""
    P = torch.eye(2, requires_grad=True)
    bound = dfw.Quadratic(P, torch.zeros(2)).bind(None).P
    large = torch.full((2, 2), 3e38)
    (grad,) = torch.autograd.grad(bound, P, large)
    torch.testing.assert_close(grad, large)


@pytest.mark.parametrize("unit", [1e-36, 1e-33, 1e-30, 1.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: dfw.L1Box(t, lower=-t, upper=t),
        lambda t: dfw.LpBall(1, t),
        lambda t: dfw.LpBall(2, t),
    ],
)
def test_small_points_are_moved_and_not_lost(make, unit):
    """Numbers of any size that are normal are brought back into a set by the same factor."""
    x = draw(5, 4, dtype=torch.float32) * unit
    inside = make(torch.tensor(0.5 * unit, dtype=torch.float32)).retract(x)
    want = make(torch.tensor(0.5)).retract(x / unit)
    torch.testing.assert_close(inside / unit, want, rtol=1e-5, atol=1.2e-38 / unit + 1e-7)
    assert inside.any(-1).all()


@pytest.mark.parametrize("method", ["dfw", "frank-wolfe", "auto"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e24])
def test_a_coordinate_without_a_weight_is_certified_in_any_units(method, steps, unit):
    """Its curvature times its slope may leave the range of the dtype."""
    R = draw(6, 6, dtype=torch.float32)
    P = unit * (R @ R.T + torch.eye(6))
    q = 1e-8 * unit * draw(3, 6, seed=1, dtype=torch.float32)
    weight = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 3.0])
    sol = dfw.solve(
        dfw.Quadratic(P, q), dfw.LpBall(3, 1e-8, weight), method=method, max_steps=steps
    )
    assert (sol.status != Status.UNBOUNDED).all()
    assert torch.isfinite(sol.gap).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e7])
def test_piecewise_linear_functions_over_permutations(dtype, size):
    """Without curvature a gradient step has no length; it must not become NaN."""
    F, d, c = (
        draw(7, 4, dtype=dtype),
        1e3 * draw(30, 7, seed=1, dtype=dtype),
        draw(4, seed=2, dtype=dtype),
    )

    def huber(x, F, d, c):
        r = x.flatten(-2) @ F.mT - d
        bent = torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * (r.abs() - 0.15)).sum(-1)
        return size * (bent + (c * x.flatten(-2)).sum(-1))

    sol = dfw.solve(dfw.Smooth(huber, F, d, c, shape=(2, 2)), dfw.Birkhoff(2))
    assert all(int(s) in DONE for s in sol.status)


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize(
    "make", [lambda: dfw.LpBall(3, 4.0), lambda: dfw.KSparse(2, 4.0), lambda: dfw.LpBall(1.5, 9.0)]
)
def test_fits_that_are_exact_end_at_their_floor(make, power):
    """f tends to zero, slower than a quadratic for a fourth power; no relative gap gets small."""
    A = draw(8, 5) + 2 * torch.eye(8, 5, dtype=F64)
    x = torch.zeros(6, 5, dtype=F64)
    x[:, 0] = torch.linspace(-2, 2, 6, dtype=F64)
    fit = dfw.Smooth(lambda x, b: ((x @ A.mT - b) ** power).sum(-1), x @ A.mT, shape=(5,))
    sol = dfw.solve(fit, make())
    assert all(int(s) in DONE for s in sol.status)
    torch.testing.assert_close(sol.x, x, rtol=0, atol=1e-5 if power == 4 else 1e-10)


@pytest.mark.parametrize("method", ["frank-wolfe", "active-set"])
def test_a_wide_side_hides_no_slope(method):
    """A linear function over a box with a side of 1e8 along which it does not change."""
    c = torch.tensor([0.0, -0.85, 0.3, -0.46])
    upper = torch.tensor([1e8, 0.76, 1.3, 3.5])
    sol = dfw.solve(dfw.Smooth(lambda x: x @ c, shape=(4,)), dfw.Box(-upper, upper), method=method)
    torch.testing.assert_close(sol.value, -(c.abs() * upper).sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [2.0, float("inf")])
@pytest.mark.parametrize("seed", range(3))
def test_small_terms_are_solved_beside_large_ones(p, seed):
    """Some entries of q are zero, so that x there rests on terms a millionth of the others."""
    R = torch.randint(-2, 3, (6, 6), generator=torch.Generator().manual_seed(seed)).float()
    P, q = R @ R.T + 2 * torch.eye(6), draw(20, 6, seed=seed, dtype=torch.float32)
    q[:, ::2] = 0
    q = 1e6 * q.round()
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, 1.0))
    exact = dfw.solve(dfw.Quadratic(P.double(), q.double()), dfw.LpBall(p, 1.0), tol=1e-14)
    torch.testing.assert_close(sol.x.double(), exact.x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_functions_are_convex_on_curved_sets(dtype):
    """What is left of a slope along a curved face is rounding, and its curvature means nothing."""
    c = torch.randint(-3, 4, (40, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    linear = dfw.Smooth(lambda x, c: (c * x).sum(-1), c, shape=(9,))
    for ball in (
        dfw.GroupBall([[1, 3, 6], [0, 5], [4, 7], [2, 8]], 50.0),
        dfw.LpBall(2, 50.0),
        dfw.LpBall(3, 50.0),
        dfw.Ellipsoid(torch.eye(9, dtype=dtype), 50.0),
    ):
        sol = dfw.solve(linear, ball)
        assert all(int(s) in DONE for s in sol.status)


@pytest.mark.parametrize(
    ("base", "normal", "level"),
    [
        (dfw.L1Box(3.0, 2.0, -torch.arange(3.0), torch.arange(3.0)), [3.0, 0, 0], 0.0),
        (dfw.CappedSimplex(1.0, torch.tensor([0.7, 0.3, 0.4])), [1.0, 1, 1], 1.0),
    ],
)
def test_a_plane_around_a_set_leaves_its_vertices(base, normal, level):
    """⟨a, x⟩ takes one value on all of S, so that no multiplier tells vertices apart."""
    g = draw(20, 3, dtype=torch.float32)
    cut = dfw.PlaneCut(base, torch.tensor(normal), level)
    torch.testing.assert_close((g * cut.vertex(g)).sum(-1), (g * base.vertex(g)).sum(-1))
    f = dfw.Quadratic(None, g)
    sol = dfw.solve(f, cut, method="active-set")
    torch.testing.assert_close(sol.x, dfw.solve(f, base).x, rtol=0, atol=5e-3)


@pytest.mark.parametrize("product", [False, True])
def test_the_gap_of_a_cut_is_rounded_as_the_vertices_it_is_between(product):
    """The plane x_0 = 0 goes through the middle of long edges, and both terms of the gap are 0."""
    R = draw(20, 3, 2)
    P, q = torch.eye(4, dtype=F64).repeat(20, 1, 1), torch.zeros(20, 4, dtype=F64)
    P[:, :3, :3], q[:, 0] = R @ R.mT, draw(20, seed=1)
    cut = dfw.PlaneCut(dfw.LpBall(1, 0.3), torch.tensor([-0.03, 0.0, 0.0], dtype=F64), 0.0)
    if product:
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.Product([cut, dfw.LpBall(2, 1.0)], [3, 1]))
    else:
        sol = dfw.solve(dfw.Quadratic(P[:, :3, :3], q[:, :3]), cut)
    assert all(int(s) in DONE for s in sol.status)


def test_a_set_that_is_small_beside_its_centre_is_certified():
    """Rounded to float32, x may be better than every point of the set."""
    A = draw(50, 2, 2, seed=1, dtype=torch.float32)
    A[:, 0, 0] += 9
    ellipsoid = dfw.Ellipsoid(A, draw(50, 2, seed=2, dtype=torch.float32), 1.5e-6)

    def misfit(x, F, d):
        return 5e-26 * ((F @ x.unsqueeze(-1)).squeeze(-1) - d).square().sum(-1)

    F, d = draw(50, 3, 2, dtype=torch.float32), draw(50, 3, seed=3, dtype=torch.float32)
    sol = dfw.solve(dfw.Smooth(misfit, F, d, shape=(2,)), ellipsoid)
    assert torch.isfinite(sol.gap).all()
    assert all(int(s) in DONE for s in sol.status)


def test_rounding_of_the_data_is_not_negative_curvature():
    """In float32 a singular P has eigenvalues of either sign, which a wide box makes visible."""
    R = draw(60, 2, 4)
    P, q = (R.mT @ R / 4).float(), draw(60, 4, seed=9, dtype=torch.float32)
    upper = torch.tensor([1e8, 1e8, 0.14, 1e8])
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Box(-upper, upper))
    assert (sol.status != Status.NOT_CONVEX).all()


def huber(x, A, b):
    r = (A @ x.reshape(len(A), -1, 1)).squeeze(-1)
    return torch.nn.functional.huber_loss(r, b, reduction="none", delta=0.3).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ball", "shape"), [(dfw.NuclearBall(2.0), (3, 3)), (dfw.LpBall(1.05, 2.0), (9,))]
)
def test_correlated_columns_over_sets_that_bend(dtype, ball, shape):
    """Neither f nor the face is told by gradients, and a step changes several constraints."""
    A = (draw(20, 11, 1, seed=3) + 0.01 * draw(20, 11, 9, seed=4)).to(dtype)
    b = draw(20, 11, seed=5, dtype=dtype)
    sol = dfw.solve(dfw.Smooth(huber, A, b, shape=shape), ball)
    assert all(int(s) in DONE for s in sol.status)
    assert (sol.num_steps < 1000).all()


@pytest.mark.parametrize("weight", [[-3.0, 2.0], [1.0, 2.0]])
def test_a_gap_within_its_rounding_is_no_progress(weight):
    """It may be halved for ever from one rounding to the next."""
    numbers = torch.arange(-3.0, 1.0)
    F = torch.cartesian_prod(numbers, numbers, numbers, numbers).reshape(-1, 2, 2)
    x, w = torch.tensor([0.0, -2.0]), torch.tensor(weight)

    def misfit(x, F, d):
        return 0.5 * ((F @ x.unsqueeze(-1)).squeeze(-1) - d).square().sum(-1)

    ball = dfw.LpBall(1.05, 0.999 * (w * x).abs().sum(), w)
    sol = dfw.solve(dfw.Smooth(misfit, F, F @ x, shape=(2,)), ball)
    assert all(int(s) in DONE for s in sol.status)


def test_products_with_a_hessian_are_taken_together():
    """A model over all points in use evaluates f a few times, not once for each of them."""
    A, x = draw(50, 40), torch.zeros(3, 40, dtype=F64)
    x[:, :9] = draw(3, 9, seed=1)
    calls = 0

    def misfit(x, b):
        nonlocal calls
        calls += 1
        return (x @ A.mT - b).square().sum(-1)

    fit = dfw.Smooth(misfit, x @ A.mT, shape=(40,))
    radius = 0.999 * x.abs().sum(-1).min()
    sol = dfw.solve(fit, dfw.KSparse(6, radius), method="active-set")
    assert calls < 20 * int(sol.num_steps.max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constraint", [dfw.LpBall(1.0, 1000.0), dfw.Box(-1e8, 1e8)], ids=repr)
def test_an_f_that_is_nearly_piecewise_linear(dtype, constraint):
    """Its model is linear almost everywhere, and there are many pieces."""
    A, b = draw(100, 13, 11, seed=8, dtype=dtype), draw(100, 13, seed=9, dtype=dtype)
    c = draw(100, 11, seed=10, dtype=dtype)
    f = dfw.Smooth(lambda x, A, b, c: huber(x, A, b) + 1.5 * (c * x).sum(-1), A, b, c, shape=(11,))
    sol = dfw.solve(f, constraint)
    assert all(int(s) in DONE for s in sol.status)


def test_a_gradient_beyond_float32_is_none_and_others_are_kept():
    """Of products that overflow a sum made NaN, for all problems that share a matrix."""
    P = (1e-28 * torch.eye(3)).requires_grad_()
    q = (1e-7 * draw(2, 3, dtype=torch.float32)).requires_grad_()
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2.95, 1e24), method="active-set")
    gradients = torch.autograd.grad(sol.x.sum(), (P, q))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert (gradients[1].abs().amax(-1) > 1e20).all()


@pytest.mark.parametrize("arriving", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "constraint",
    [dfw.LpBall(1.0, 0.7), dfw.LpBall(2.0, 0.5), dfw.LpBall(1.5, 9.0), dfw.Box(-1.0, 1.0),
     dfw.Simplex(1.0), dfw.CappedSimplex(0.5), dfw.PlaneCut(dfw.Box(-1.0, 1.0), 1.0, 0.0)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("curved", [True, False])
def test_a_gradient_that_is_not_finite_goes_on(curved, constraint, dtype, arriving):
    """As it does everywhere in torch, where it is how a run finds out that something is wrong."""
    P = torch.eye(3, dtype=dtype) + 0.1 if curved else None
    q = draw(3, 3, seed=2, dtype=dtype).requires_grad_()
    x = dfw.solve(dfw.Quadratic(P, q), constraint).x
    v = torch.ones_like(x)
    v[1, 0] = arriving
    (gradient,) = torch.autograd.grad(x, q, v)
    assert not torch.isfinite(gradient[1]).any()
    assert torch.isfinite(gradient[[0, 2]]).all()


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
def test_what_problems_share_is_not_finite_as_a_whole(p):
    """Also where there are as many of them as coordinates."""
    P, w, t = (
        torch.eye(3, dtype=F64) + 0.1,
        torch.ones(3, dtype=F64),
        0.5 + torch.rand(3, dtype=F64),
    )
    for given in (P, w, t):
        given.requires_grad_()
    x = dfw.solve(dfw.Quadratic(P, draw(3, 3, seed=2)), dfw.LpBall(p, 0.3 * t, w)).x
    v = torch.ones_like(x)
    v[1, 0] = torch.nan
    of_P, of_w, of_t = torch.autograd.grad(x, (P, w, t), v)
    assert not torch.isfinite(of_P).any()
    assert not torch.isfinite(of_w).any()
    assert torch.isfinite(of_t).tolist() == [True, False, True]


@pytest.mark.parametrize("p", [1.1, 1.5, 3.0])
def test_x_has_its_digits_where_the_gap_is_lost(p):
    """On a curved face the gap is the square of the error, and shows half of the digits."""
    R = draw(300, 7, 9)
    f = dfw.Quadratic(R @ R.mT / 7 + 0.1 * torch.eye(7, dtype=F64), draw(300, 7, seed=1))
    sol, exact = (dfw.solve(f, dfw.LpBall(p, 1.5), tol=tol) for tol in (1e-5, 1e-15))
    torch.testing.assert_close(sol.x, exact.x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["auto", "active-set", "frank-wolfe"])
def test_what_stands_in_for_a_bad_problem_is_as_easy_as_the_others(method):
    """It had their f, but a set of size one, in whatever units theirs were."""
    A, b = draw(1, 4, 3).expand(9, 4, 3), draw(9, 4, seed=1)

    def misfit(x, A, b):
        return huber(x * 2.0**80, A, b)

    def solved(b):
        f = dfw.Smooth(misfit, A, b, shape=(3,))
        return dfw.solve(f, dfw.LpBall(torch.inf, 0.3 * 2.0**-80), method=method)

    whole = solved(b)
    b = b.clone()
    b[4, 0] = torch.nan
    with_bad = solved(b)
    assert int(with_bad.status[4]) == Status.NONFINITE
    assert int(with_bad.num_steps[4]) <= int(whole.num_steps.max())


def test_an_exact_fit_that_conjugate_gradients_are_slow_to_find():
    """Each round of them began afresh, and a factorisation never had its turn."""
    n = 172
    U, V = (torch.linalg.qr(draw(n, n, seed=s)).Q for s in (0, 1))
    F = U * torch.logspace(0.3, -2, n, dtype=F64) @ V
    x = draw(2, n, seed=2)

    def misfit(x, d):
        return (0.5 * (x @ F.mT - d).square() + 0.1 * (x @ F.mT - d) ** 4).sum(-1)

    sol = dfw.solve(dfw.Smooth(misfit, x @ F.mT, shape=(n,)), dfw.LpBall(1.1, 1e4))
    assert all(int(s) in DONE for s in sol.status)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f_falls_by_next_to_nothing_and_the_gap_stays(dtype):
    """Such steps are not taken for progress on the right face."""
    A, b = draw(200, 3, 3, seed=6, dtype=dtype), draw(200, 3, seed=7, dtype=dtype)
    c = 0.09 * draw(200, 3, seed=8, dtype=dtype)

    def f(x, A, b, c):
        return 2.0**26 * (huber(x, A, b) + (c * x.reshape(-1, 3)).sum(-1))

    sol = dfw.solve(dfw.Smooth(f, A, b, c, shape=(1, 3)), dfw.SpectralBall(40.0, shape=(1, 3)))
    assert all(int(s) in DONE for s in sol.status)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 10.0, math.inf])
def test_a_ball_that_is_a_point_among_others(p, compiles):
    """Its x is 0 whatever the weights are, and the gradients of the others are theirs alone."""
    gen = torch.Generator().manual_seed(5)
    q, weight = (torch.randn(4, 3, generator=gen, dtype=F64) for _ in range(2))
    P = torch.diag_embed(torch.rand(4, 3, generator=gen, dtype=F64) + 0.5)
    radius = torch.tensor([0.0, 0.3, 0.0, 0.7], dtype=F64)

    def gradients(rows):
        leaves = [t[rows].clone().requires_grad_() for t in (P, q, weight, radius)]
        with compiled.using(compiles):
            x = dfw.solve(dfw.Quadratic(*leaves[:2]), dfw.LpBall(p, leaves[3], leaves[2])).x
        return torch.autograd.grad((x * torch.arange(1.0, 4, dtype=F64)).sum(), leaves)

    together, apart = gradients([0, 1, 2, 3]), gradients([1, 3])
    for all_of_them, others in zip(together, apart, strict=True):
        assert torch.isfinite(all_of_them).all()
        torch.testing.assert_close(all_of_them[[1, 3]], others, rtol=1e-9, atol=1e-12)
    assert (together[2][[0, 2]] == 0).all()


@pytest.mark.parametrize("unit", [-83, 83])
def test_a_matrix_out_of_the_range_of_compiled_code_is_put_in_units_for_it(unit):
    """A box one of whose forces is 1e-9 of the slopes: tensor operations may end at tol before."""
    P = draw(40, 8, 8, seed=3)
    P = P @ P.mT + 0.1 * torch.eye(8, dtype=F64)
    x, force = draw(40, 8, seed=4), torch.zeros(40, 8, dtype=F64)
    force[:, :3] = torch.tensor([1.0, 1e-9, 1e-3], dtype=F64)
    q = -(P @ x.unsqueeze(-1)).squeeze(-1) - force
    upper = torch.where(force > 0, x, torch.inf)

    def solved(size):
        objective = dfw.Quadratic(P / size**3, q / size**2)  # f is in units of 1/size
        return dfw.solve(objective, dfw.Box(upper=upper * size))

    one, other = solved(1.0), solved(2.0**unit)
    torch.testing.assert_close(other.x / 2.0**unit, one.x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", range(4))
def test_functions_in_float32_over_rows_are_refined_in_float64(seed):
    """Multipliers that rounding has moved prove nothing: a gap of infinity is no rounding."""
    F, d, c = (draw(*shape, seed=seed).round().float() for shape in ((60, 12, 12), (60, 12), (12,)))
    unit = 2.0**-27

    def f(x, F, d, c):
        r = (F @ (x / unit).unsqueeze(-1)).squeeze(-1) - d
        huber = torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * (r.abs() - 0.15))
        return huber.sum(-1) + (c * x / unit).sum(-1)

    rows, columns = unit * torch.tensor([16.0, 3.0, 9.0]), unit * torch.tensor([8.0, 8.0, 4.0, 8.0])
    sol = dfw.solve(dfw.Smooth(f, F, d, c, shape=(12,)), dfw.Transport(rows, columns))
    assert torch.isfinite(sol.gap).all()
    assert (sol.gap <= 1e-4 * sol.value.abs()).all()


def test_parts_of_a_gradient_that_float32_can_hold_have_a_sum_that_it_can():
    """Two engines may give a part each to what problems share, and autograd adds them up."""
    most = torch.finfo(torch.float32).max
    wide = torch.tensor([0.0, 1.0, 0.49 * most, 0.99 * most, -3 * most, torch.nan], dtype=F64)
    narrow = narrowed(wide, torch.float32)
    assert torch.isfinite(narrow[:-1] + narrow[:-1]).all()
    assert torch.equal(narrow[:3].double(), wide[:3].float().double())
    assert (narrow[3:5] == 0).all()
    assert narrow[5].isnan()
