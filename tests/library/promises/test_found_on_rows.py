"""What random problems found of rows, intersections and verdicts, by class."""

import math

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.constraints.balls import lp_projection
from dfwlayer.engines import compiled
from dfwlayer.methods.base import Problem, confirmed

F32, F64 = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def ball_and_box(rows, n, dtype, radius=0.7):
    lower = -torch.rand(rows, n, dtype=dtype)
    return dfw.Intersection(
        dfw.LpBall(2, radius), dfw.Box(lower, torch.rand(rows, n, dtype=dtype))
    ), lower


@pytest.mark.parametrize("method", ["auto", "active-set", "frank-wolfe"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_bounds_of_an_intersection_are_met_to_the_last_bit(method, dtype):
    cut, lower = ball_and_box(4, 5, dtype)
    most = {} if method == "auto" else {"max_steps": 3}
    A, b = torch.randn(4, 7, 5, dtype=dtype), torch.randn(4, 7, dtype=dtype)
    for engine in (True, False):
        with compiled.using(engine):
            x = dfw.solve(dfw.LeastSquares(A, b), cut, method=method, **most).x
        assert (x >= lower).all()
        assert (x <= cut.sets[1].upper).all()


@pytest.mark.parametrize("radius", [1e-6, 1e-3])
def test_a_ball_that_is_small_beside_the_slope(radius):
    """Where f hardly bends on the ball, the first penalty has to be of the size of its slope."""
    n = 4
    A = torch.randn(16, 2, n, dtype=F64)  # AᵀA is singular
    P, q = A.mT @ A, torch.randn(16, n, dtype=F64)
    cut, _ = ball_and_box(16, n, F64, radius)
    with compiled.using(False):
        sol = dfw.solve(dfw.Quadratic(P, q), cut)
    assert sol.converged.all()
    # with f(x) = ⟨q, x⟩ but for O(radius²): each coordinate that is free has the slope −μx
    g = (P @ sol.x.unsqueeze(-1)).squeeze(-1) + q
    inside = (sol.x > cut.sets[1].lower) & (sol.x < cut.sets[1].upper) & (sol.x != 0)
    ratio = torch.where(inside, -g / sol.x, torch.nan)
    spread = ratio.nan_to_num(-torch.inf).amax(-1) - ratio.nan_to_num(torch.inf).amin(-1)
    assert (spread <= 1e-6 * g.abs().amax(-1) / radius).all()


@pytest.mark.parametrize("steps", [1, 7, 40])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_traces_are_right_to_the_last_digits(dtype, steps):
    """However many matrices were added up on the way."""
    A, b = torch.randn(20, 18, 16, dtype=dtype), torch.randn(20, 18, dtype=dtype)
    for method in ("frank-wolfe", "dfw", "auto"):
        sol = dfw.solve(
            dfw.LeastSquares(A, b), dfw.Spectraplex(3.7), method=method, max_steps=steps
        )
        for matrix in sol.x.reshape(-1, 4, 4):
            trace = math.fsum(matrix.diagonal().tolist())
            t = float(torch.tensor(3.7, dtype=dtype))
            assert abs(trace - t) <= 3 * torch.finfo(dtype).eps * t


@pytest.mark.parametrize("function", ["huber", "quartic", "log-sum-exp"])
def test_smooth_functions_of_float32_over_rows_end(function):
    """The last minimiser of a model is taken where f cannot tell it from the last point."""
    rows, n = 60, 12
    F, d, c = torch.randn(rows, 13, n), torch.randn(rows, 13), torch.randn(rows, n)

    def f(x, F, d, c):
        r = (F @ x.unsqueeze(-1)).squeeze(-1) - d
        value = {
            "huber": lambda: torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * r.abs() - 0.045).sum(-1),
            "quartic": lambda: 0.25 * r.pow(4).sum(-1),
            "log-sum-exp": lambda: torch.logsumexp(r, -1),
        }[function]()
        return value + (c * x).sum(-1)

    transport = dfw.Transport(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    sol = dfw.solve(dfw.Smooth(f, F, d, c, shape=(n,)), transport)
    assert ((sol.status == dfw.Status.CONVERGED) | (sol.status == dfw.Status.ROUNDING_FLOOR)).all()


@pytest.mark.parametrize("p", [1.05, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("method", ["auto", "frank-wolfe"])
def test_positive_eigenvalues_are_not_called_negative(p, method):
    """Products with the curvature of a ball may be; a factorisation of P has the last word."""
    n, rows = 7, 300
    for _ in range(6 if method == "auto" else 1):
        root = torch.randn(n, n)
        P = root @ root.mT / n + 0.1 * torch.eye(n)
        weight = torch.randn(rows, n) * (torch.rand(rows, n) < 0.7)
        ball = dfw.LpBall(p, 10 * torch.rand(rows), weight)
        with compiled.using(False):
            most = {} if method == "auto" else {"max_steps": 40}
            sol = dfw.solve(dfw.Quadratic(P, torch.randn(rows, n)), ball, method=method, **most)
        assert (sol.status != dfw.Status.NOT_CONVEX).all()


def test_what_seems_to_bend_down_is_factorised():
    """Whatever was met on the way: a matrix has negative eigenvalues or it does not."""
    up, down = (
        torch.diag(torch.tensor([1.0, 2.0, 1e-6])),
        torch.diag(torch.tensor([1.0, 2.0, -0.1])),
    )
    x, all_rows = torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
    ball = dfw.LpBall(2).bind((3,), F32, x.device)
    for objective, right in (
        (dfw.Quadratic(torch.stack((up, down)), torch.ones(2, 3)), [False, True]),
        (dfw.LeastSquares(down, torch.ones(2, 3)), [False, False]),
    ):
        problem = Problem(objective.bind(2), ball, None)
        assert confirmed(problem, x, all_rows, 0.0).tolist() == right
        assert not confirmed(problem, x, ~all_rows, 0.0).any()


def test_a_gradient_that_is_all_rounding_shows_no_curvature():
    """Steps of two units in the last place of x."""
    rows = 400
    F, d = torch.randn(rows, 4, 1) * 3, torch.randn(rows, 4) * 5

    def f(x, F, d):
        return torch.logsumexp((F @ x.unsqueeze(-1)).squeeze(-1) + d, -1)

    sol = dfw.solve(
        dfw.Smooth(f, F, d, shape=(1,)), dfw.LpBall(1, 2.0), method="frank-wolfe", max_steps=60
    )
    assert (sol.status != dfw.Status.NOT_CONVEX).all()


def test_a_function_that_bends_down_is_still_told():
    P = torch.diag(torch.tensor([1.0, 2.0, -0.5]))
    for objective in (
        dfw.Quadratic(P, torch.randn(5, 3)),
        dfw.Smooth(
            lambda x, q: (x * x * P.diagonal()).sum(-1) + (q * x).sum(-1),
            torch.randn(5, 3),
            shape=(3,),
        ),
    ):
        for method in ("auto", "frank-wolfe"):
            sol = dfw.solve(objective, dfw.LpBall(3, 2.0), method=method, max_steps=100)
            assert (sol.status == dfw.Status.NOT_CONVEX).any()


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_nothing_to_fit_is_fitted_by_zero(scale):
    """½‖Ax‖² over rows that have zero, beside problems that take their time."""
    rows = 160
    A, b = torch.randn(rows, 2, 2) * scale, torch.randn(rows, 2) * scale
    b[::3] = 0
    body = dfw.Polyhedron(
        A=torch.ones(1, 2), b=torch.zeros(1), lower=torch.tensor([-0.25, -0.75]), upper=0.5
    )
    for engine in (True, False):
        with compiled.using(engine):
            sol = dfw.solve(dfw.LeastSquares(A, b), body)
        assert (sol.x[::3] == 0).all()
        assert (sol.status[::3] == dfw.Status.CONVERGED).all()


def test_corrections_that_lead_back_and_forth_end():
    """Interior-point steps of a problem of six unknowns that went in a circle."""
    T = torch.eye(6, dtype=F64)
    T[0, 1], T[0, 2], T[4, 1], T[4, 3] = 1.0, -1.0, 1.0, 1.0
    scale = torch.tensor([1.0, 0.5, 2.0, 4.0, 0.25, 4.0, 0.25, 0.5, 4.0, 4.0], dtype=F64)
    G = -scale[:, None] * T[[0, 1, 2, 3, 4, 5, 4, 1, 3, 2]]
    h = torch.tensor([0.0] * 6 + [1.075] * 3 + [0.0], dtype=F64)
    A = torch.tensor([[1.0, 3.0, 0.0, 2.0, 1.0, 1.0]], dtype=F64)
    body = dfw.Polyhedron(G, h, torch.cat((A, -2 * A)), torch.tensor([0.075, -0.15], dtype=F64))
    q = torch.randn(300, 6, dtype=F64) * 0.3
    q[:, 2] += 1.7
    root = torch.randn(300, 6, 6, dtype=F64)
    P = 0.5 * torch.eye(6, dtype=F64) + root.mT @ root / 30
    with compiled.using(False):
        sol = dfw.solve(dfw.Quadratic(P, q), body)
    assert sol.converged.all()


def test_the_only_point_is_where_the_slope_ends():
    """x* = 0, at bounds: what is left of it is not measured by its own size."""
    n = 6
    root = torch.randn(40, n, n, dtype=F64)
    q = torch.zeros(40, n, dtype=F64)
    q[:, 0] = torch.rand(40, dtype=F64)
    for radius in (0.0, 1e-3, 1.0):
        cut = dfw.Intersection(dfw.LpBall(2, radius), dfw.Box(0.0, torch.ones(n, dtype=F64)))
        with compiled.using(False):
            sol = dfw.solve(dfw.Quadratic(root.mT @ root, q), cut)
        assert sol.status.le(dfw.Status.ROUNDING_FLOOR).all()
        assert (sol.status != dfw.Status.MAX_STEPS).all()
        # f = ½‖Rx‖² + q_1 x_1 with x ≥ 0 is smallest at zero
        assert float(sol.x.abs().max()) <= 1e-9


@pytest.mark.parametrize("unit", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("tilt", [0.0, 1e-14, 1e-12, 1e-9])
def test_rows_alone_bound_a_slope_that_is_all_but_orthogonal_to_a_face(tilt, unit):
    """Multipliers that steps found leave some of such a slope, and it falls along a line."""
    n, rows = 5, 24
    eye = torch.eye(n, dtype=F64)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * n)
    T = eye + torch.triu(torch.randint(-2, 3, (n, n)).to(F64), 1)
    G, h = torch.cat((T, -T)), unit * torch.ones(2 * n, dtype=F64)
    vertices = unit * torch.linalg.solve_triangular(T, corners.mT, upper=True).mT
    z = torch.rand(rows, 2 * n, dtype=F64) * (torch.rand(rows, 2 * n) < 0.25)
    g = -z @ G
    g = g + tilt * g.abs().amax(-1, keepdim=True) * torch.randn(rows, n, dtype=F64)
    bound = dfw.Polyhedron(G, h).bind((n,), F64, torch.device("cpu"))
    low, known = bound.lowest(g), (g @ vertices.mT).amin(-1)
    size = (g.abs() @ vertices.abs().mT).amax(-1)
    assert (low <= known + 1e-12 * size).all()
    assert (low >= known - (1e-9 + 10 * tilt) * size).all()


def test_few_vertices_that_are_left_are_looked_for_alone(monkeypatch):
    """What a few problems of a batch take is not asked of the others, and is the same alone."""
    n, rows = 5, 16
    upper = torch.ones(n, dtype=F64)
    pull = 0.3 * torch.rand(rows, n, dtype=F64)
    pull[:13] += 50.0  # beyond what bends: the minimiser is a corner
    sizes, whole = [], Problem.rows

    def counted(problem, index):
        sizes.append(len(index))
        return whole(problem, index)

    monkeypatch.setattr(Problem, "rows", counted)

    def f(x, pull):
        return (torch.cosh(2 * x) - pull * x).sum(-1) + x.sum(-1).square()

    def solved(pull):
        smooth = dfw.Smooth(f, pull, shape=(n,))
        return dfw.solve(smooth, dfw.Box(-upper, upper), method="active-set")

    sol = solved(pull)
    assert sizes
    assert max(sizes) <= rows // 4
    assert sol.converged.all()
    assert (sol.x[:13] == upper).all()
    for i in (0, 13, 15):
        single = solved(pull[i])
        torch.testing.assert_close(sol.x[i], single.x, rtol=1e-6, atol=1e-6)
        assert sol.num_steps[i] == single.num_steps


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("tilt", [1e-16, 1e-15, 1e-14, 1e-12, 1e-6, 1.0])
def test_vertices_of_a_disc_are_in_its_plane_whatever_the_slope(dtype, tilt):
    """At a solution inside of the disc ∇f is along the normal, but for its last digits."""
    rows, n = 64, 5
    a = torch.randn(rows, n, dtype=dtype)
    level = 0.4 * a.double().norm(dim=-1).to(dtype)
    disc = dfw.PlaneCut(dfw.LpBall(2, 1.0), a, level)
    g = (3 * a.double() + tilt * torch.randn(rows, n, dtype=F64)).to(dtype)
    s = disc.bind((n,), dtype, torch.device("cpu")).vertex(g).double()
    eps, wide = torch.finfo(dtype).eps, a.double()
    terms = (wide * s).abs().sum(-1) + level.abs()
    assert ((wide * s).sum(-1) - level).abs().le(8 * eps * terms).all()
    assert (s.norm(dim=-1) <= 1 + 8 * eps).all()


@pytest.mark.parametrize("method", ["auto", "active-set", "frank-wolfe"])
def test_solutions_inside_of_a_disc(method):
    """No point of the plane is better than the minimiser in it, which has a formula."""
    rows, n = 32, 5
    a, b = torch.randn(rows, n, dtype=F64), 0.2 * torch.randn(rows, dtype=F64)
    z = 0.3 * torch.randn(rows, n, dtype=F64)
    sol = dfw.solve(
        dfw.Quadratic(None, -z),
        dfw.PlaneCut(dfw.LpBall(2, 5.0), a, b),
        method=method,
        max_steps=400,
    )
    away = ((a * z).sum(-1) - b) / a.square().sum(-1)
    exact = z - away.unsqueeze(-1) * a
    least = (0.5 * exact.square() - z * exact).sum(-1)
    assert (sol.value >= least - 1e-12).all()
    assert (sol.value - least <= sol.gap + 1e-12).all()
    assert ((a * sol.x).sum(-1) - b).abs().max() <= 1e-13
    if method != "frank-wolfe":
        assert (sol.value - least <= 1e-4 * least.abs() + 1e-9).all()


@pytest.mark.parametrize("tilt", [0.0, 1e-14, 1e-12, 1e-9])
@pytest.mark.parametrize("kind", ["transport", "open upwards"])
def test_rows_and_bounds_on_one_side_prove_what_is_lowest(kind, tilt):
    """As above, with coordinates that bounds hold by large forces beside those that rows hold."""
    rows, m, k = 16, 2, 3
    r, c = torch.tensor([4.0, 1.0], dtype=F64), torch.tensor([1.0, 3.0, 1.0], dtype=F64)
    # a slope u_i + v_j + z_ij with z ≥ 0 is lowest wherever z is zero, if there is such a plan
    u, v = 100 * torch.randn(rows, m, 1, dtype=F64), 100 * torch.randn(rows, 1, k, dtype=F64)
    held = torch.zeros(m, k, dtype=F64)
    held[1, 0] = 600.0
    g = (u + v + held + tilt * 100 * torch.randn(rows, m, k, dtype=F64)).flatten(1)
    known = (u.squeeze(-1) * r).sum(-1) + (v.squeeze(-2) * c).sum(-1)
    if kind == "transport":
        plans = dfw.Transport(r, c)
    else:
        eye = torch.eye(m * k, dtype=F64).reshape(m, k, m * k)
        A, b = torch.cat((eye.sum(1), eye.sum(0))), torch.cat((r, c))
        plans = dfw.Polyhedron(A=A, b=b, lower=0.0)
    low = plans.bind((m * k,), F64, torch.device("cpu")).lowest(g)
    assert (low - known).abs().max() <= (1e-9 + 10 * tilt) * 1e3


@pytest.mark.parametrize("weighted", [False, True])
def test_points_inside_of_a_ball_do_not_prolong_the_projection_of_others(weighted, monkeypatch):
    """Their multiplier is zero, and a step that would make it negative is none."""
    w = 0.5 + torch.rand(8, 5, dtype=F64) if weighted else torch.ones(8, 5, dtype=F64)
    z = 5 * torch.randn(8, 5, dtype=F64)
    steps, inner = [], lp_projection.dot
    monkeypatch.setattr(lp_projection, "dot", lambda a, b: steps.append(1) or inner(a, b))

    def projected(z):
        steps.clear()
        x = lp_projection.project_lp(2.0, w, torch.ones(8, dtype=F64), z)
        return x, len(steps)

    far, most = projected(z)
    z[::2] *= 1e-3 / z[::2].norm(dim=-1, keepdim=True)
    x, taken = projected(z)
    assert (x[::2] == z[::2]).all()
    torch.testing.assert_close(x[1::2], far[1::2], rtol=1e-14, atol=0)
    assert taken <= most


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("off", [-1e-6, 0.0, 1e-6])
def test_fits_that_a_ball_just_allows(dtype, off):
    """f* is zero, or all but zero beside its terms: nothing has stalled where rounding is left."""
    rows, n = 32, 3
    A = torch.randn(rows, 1, n, dtype=F64)
    x = A.mT.squeeze(-1) * torch.rand(rows, 1, dtype=F64)  # of least norm
    radius = x.norm(dim=-1) * (1 + off)
    upper = 2 * x.abs().amax(-1, keepdim=True).expand(rows, n)
    A, b, radius, upper = (
        t.to(dtype) for t in (A, (A @ x.unsqueeze(-1)).squeeze(-1), radius, upper)
    )
    cut = dfw.Intersection(dfw.LpBall(2, radius), dfw.Box(-upper, upper))
    for engine in (True, False):
        with compiled.using(engine):
            sol = dfw.solve(dfw.LeastSquares(A, b), cut)
        arrived = (sol.status == dfw.Status.CONVERGED) | (sol.status == dfw.Status.ROUNDING_FLOOR)
        assert arrived.all()
        floor = 64 * torch.finfo(dtype).eps * b.square().sum(-1)
        least = 0.5 * (min(off, 0) * b.double()).square().sum(-1)
        assert (sol.value - least <= 1e-5 * least + floor).all()


def test_a_wide_disc_around_a_solution_inside_of_it():
    """In float32 its gap is rounding times the radius, which falls and rises from step to step."""
    rows, n = 64, 9
    P = torch.diag_embed(0.5 + 1.5 * torch.rand(rows, n))
    q, a = 1.5 * torch.randn(rows, n), torch.randn(rows, n)
    level, radius = 3 * torch.randn(rows), torch.full((rows,), 300.0)
    with compiled.using(False):
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.PlaneCut(dfw.LpBall(2, radius), a, level))
    arrived = (sol.status == dfw.Status.CONVERGED) | (sol.status == dfw.Status.ROUNDING_FLOOR)
    assert arrived.all()
    # the minimiser in the plane: x = −P⁻¹(q + μa)
    inverse, wide = 1 / P.diagonal(dim1=-2, dim2=-1).double(), a.double()
    mu = -(level + (wide * inverse * q).sum(-1)) / (wide * inverse * wide).sum(-1)
    exact = -inverse * (q + mu.unsqueeze(-1) * wide)
    assert ((sol.x - exact).norm(dim=-1) <= 1e-5 * (1 + exact.norm(dim=-1))).all()


@pytest.mark.parametrize("engine", [True, False], ids=["compiled", "tensors"])
@pytest.mark.parametrize("turned", [False, True], ids=["axes", "turned"])
def test_rows_without_a_force_that_are_an_equation_together(engine, turned):
    """Nothing pulls at x, and yet it moves along the rows only: no multiplier tells."""
    n = 4
    P = torch.randn(n, n, dtype=F64)
    P = P @ P.mT + torch.eye(n, dtype=F64)
    a, c = torch.randn(2, n, dtype=F64) if turned else torch.eye(n, dtype=F64)[:2]
    # −a, a − c and c add up to zero
    G = torch.stack((-a, a - c, 2 * c, torch.ones(n, dtype=F64)))
    x = torch.randn(n, dtype=F64)
    h = torch.cat(((G @ x)[:3], (G @ x)[3:] + 1))
    q = (-P @ x).requires_grad_()
    with compiled.using(engine):
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(G=G, h=h))
        (got,) = torch.autograd.grad(sol.x @ torch.arange(1.0, n + 1, dtype=F64), q)
    torch.testing.assert_close(sol.x, x)
    # x(q) on {⟨a, x⟩, ⟨c, x⟩ constant}
    Z = torch.linalg.svd(torch.stack((a, c)))[2][2:].mT
    want = -Z @ torch.linalg.solve(Z.mT @ P @ Z, Z.mT @ torch.arange(1.0, n + 1, dtype=F64))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("engine", [True, False], ids=["compiled", "tensors"])
@pytest.mark.parametrize("seed", range(20))
def test_rows_that_meet_in_sets_without_an_interior(engine, seed):
    """Interior-point steps do not come close to a solution that is on the edge of every point."""
    make = torch.Generator().manual_seed(seed)
    n, rank = 7, 2

    def whole(*size):
        return torch.randint(-3, 4, size, generator=make).to(F64)

    base, x = whole(rank, n), whole(n)
    parts = whole(3, rank)
    parts = torch.cat((parts, -parts.sum(0, keepdim=True), whole(2, rank)))  # the first four cancel
    G = parts @ base
    root = whole(n, n)
    P = root.mT @ root / 8 + torch.eye(n, dtype=F64)
    q = -P @ x - G.mT @ torch.randint(1, 5, (len(G),), generator=make).to(F64)
    lower = torch.where(torch.arange(n) % 3 == 0, x, -10.0)
    with compiled.using(engine):
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(G=G, h=G @ x, lower=lower))
    assert sol.status in (dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR)
    torch.testing.assert_close(sol.x, x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_ball_whose_radius_f_hardly_feels(seed):
    torch.manual_seed(seed)
    n = 12
    common = torch.randn(n, 1, dtype=F64)
    spread = 10.0 ** torch.empty(n, 1, dtype=F64).uniform_(-2.5, -1)
    A = common + spread * torch.randn(n, n, dtype=F64)
    b, weight = torch.randn(n, dtype=F64), torch.empty(n, dtype=F64).uniform_(0.5, 1.5)
    U, S, _ = torch.linalg.svd(A / weight)
    c = U.mT @ b
    far = (c / S).norm()  # ‖Wx‖ at the exact fit
    radius = far * torch.linspace(0.02, 0.98, 15, dtype=F64)
    low, high = torch.zeros(15, 1, dtype=F64), S.new_full((15, 1), 1e6)
    for _ in range(200):  # the λ at which ‖Wx‖ = t, by halves
        mid = torch.where(low > 0, (low * high).sqrt(), 1e-24)
        above = (S * c / (S**2 + mid)).norm(dim=-1, keepdim=True) > radius[:, None]
        low, high = torch.where(above, mid, low), torch.where(above, high, mid)
    best = 0.5 * (high * c / (S**2 + high)).square().sum(-1)
    body = dfw.LpBall(2, radius, weight)
    with compiled.using("wait"):
        found = dfw.solve(dfw.LeastSquares(A, b.expand(15, n)), body)
    assert found.converged.all()
    assert found.num_steps.median() < 60  # factors, where steps of other kinds took hundreds
    assert torch.allclose(found.value, best, rtol=1e-6, atol=1e-9)
    assert ((weight * found.x).norm(dim=-1) <= radius * (1 + 1e-15)).all()
