"""Sets of rows in any unit: limits and objectives of 1e±25, a set of one point, an f of zero."""

import pytest
import torch

import dfwlayer as dfw

UNITS = [2.0**-83, 2.0**-30, 1.0, 2.0**30, 2.0**83]


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    A = torch.randn(6, 4, 4, dtype=torch.float64)
    return A @ A.mT + 0.5 * torch.eye(4, dtype=torch.float64), torch.randn(6, 4).double()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("value", UNITS)
def test_a_solution_and_its_gradient_do_not_depend_on_units(unit: float, value: float) -> None:
    P, q = matrices()
    ones = torch.ones(2, dtype=torch.float64)

    def solved(t: float, f: float) -> tuple[torch.Tensor, torch.Tensor]:
        slope = (f / t * q).requires_grad_()
        sol = dfw.solve(dfw.Quadratic(f / t**2 * P, slope), dfw.Transport(t * ones, t * ones))
        assert (sol.status == dfw.Status.CONVERGED).all()
        (gradient,) = torch.autograd.grad(sol.x[:, 0].sum(), slope)
        return sol.x.detach() / t, gradient * f / t**2

    x, gradient = solved(unit, value)
    expected, slope = solved(1.0, 1.0)
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-12)
    assert slope.abs().amax() > 1e-2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("unit", "value"), [(2.0**-50, 2.0**50), (2.0**83, 1.0), (1.0, 2.0**-90)])
def test_nor_where_f_does_not_bend_in_every_coordinate(
    unit: float, value: float, compiled: bool
) -> None:
    torch.manual_seed(7)
    F = torch.randint(-2, 3, (40, 2, 4)).double()
    F[:20, :, 0] = 0.0  # a coordinate without any curvature
    q = torch.randint(-3, 4, (40, 4)).double()
    sums = torch.tensor([2.0, 3.0]).double(), torch.tensor([3.0, 2.0]).double()

    def solved(t: float, f: float) -> torch.Tensor:
        plans = dfw.Transport(t * sums[0], t * sums[1])
        with dfw.engines.compiled.using(compiled):
            sol = dfw.solve(dfw.Quadratic(f / t**2 * (F.mT @ F), f / t * q), plans)
        assert set(sol.status.tolist()) <= {dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR}
        X = sol.x.reshape(-1, 2, 2) / t
        torch.testing.assert_close(X.sum(-1), sums[0].expand(40, 2), rtol=1e-14, atol=0)
        torch.testing.assert_close(X.sum(-2), sums[1].expand(40, 2), rtol=1e-14, atol=0)
        return sol.value / f

    expected = solved(1.0, 1.0)  # the solution need not be unique, its value is
    torch.testing.assert_close(solved(unit, value), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bends", [False, True])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("trace", [2.0**-53, 2.0**-30])
def test_a_limit_that_is_all_but_zero_is_no_unit(
    unit: float, trace: float, bends: bool, compiled: bool
) -> None:
    """A row whose level is what rounding left of zero, beside bounds that are far from it."""
    torch.manual_seed(5)
    n = 8
    P = torch.diag_embed((torch.rand(10, n) < 0.3).double()) if bends else torch.zeros(10, n, n)
    q = torch.randint(-2, 3, (10, n)).double()
    lower, upper = -torch.randint(1, 9, (n,)).double(), torch.randint(1, 9, (n,)).double()
    A = torch.ones(1, n, dtype=torch.float64)

    def solved(t: float) -> torch.Tensor:
        level = torch.full((1,), -trace * t, dtype=torch.float64)
        rows = dfw.Polyhedron(A=A, b=level, lower=t * lower, upper=t * upper)
        with dfw.engines.compiled.using(compiled):
            sol = dfw.solve(dfw.Quadratic(P.double() / t**2, q / t), rows)
        assert set(sol.status.tolist()) <= {dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR}
        assert ((sol.x @ A[0] - level).abs() <= 1e-14 * n * t * upper.max()).all()
        return sol.value

    torch.testing.assert_close(solved(unit), solved(1.0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cone_that_is_one_point(dtype: torch.dtype) -> None:
    P, q = (part.to(dtype) for part in matrices())
    T = torch.eye(4, dtype=dtype) + torch.diag(torch.ones(3, dtype=dtype), 1)
    rows = dfw.Polyhedron(G=torch.cat((T, -T)), h=torch.zeros(8, dtype=dtype))
    sol = dfw.solve(dfw.Quadratic(P, 1e6 * q), rows)
    assert (sol.x == 0).all()
    # f is zero there, so tol, which is relative to it, cannot be met
    assert set(sol.status.tolist()) <= {dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR}


def test_a_function_that_is_zero_is_least_everywhere() -> None:
    q = torch.zeros(3, 4)
    sol = dfw.solve(dfw.Quadratic(torch.zeros(4, 4), q), dfw.Transport(q[0, :2] + 1, q[0, :2] + 1))
    assert (sol.status == dfw.Status.CONVERGED).all()
    assert (sol.gap == 0).all()


def test_newton_steps_end_where_f_falls_no_more() -> None:
    torch.manual_seed(0)
    F, d = torch.randn(40, 5, 4, dtype=torch.float64), torch.randn(40, 5, dtype=torch.float64)
    objective = dfw.Smooth(
        lambda x, F, d: ((F @ x.unsqueeze(-1)).squeeze(-1) - d).pow(4).sum(-1), F, d, shape=(4,)
    )
    half = torch.full((2,), 0.5, dtype=torch.float64)
    sol = dfw.solve(objective, dfw.Transport(half, half))
    assert (sol.status == dfw.Status.CONVERGED).all()
    assert int(sol.num_steps.max()) < 40


def test_a_certificate_holds_for_f_with_kinks_in_its_slope() -> None:
    torch.manual_seed(1)
    F, d = torch.randint(-2, 3, (64, 10, 8)).double(), torch.randint(-3, 4, (64, 10)).double()
    c = torch.randint(-2, 3, (64, 8)).double()

    def huber(x: torch.Tensor, F: torch.Tensor, d: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        r = (F @ x.unsqueeze(-1)).squeeze(-1) - d
        bent = torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * (r.abs() - 0.15))
        return bent.sum(-1) + (c * x).sum(-1)

    sums = torch.tensor([2.0, 4.0, 2.0, 2.0]).double(), torch.tensor([8.0, 2.0]).double()
    plans = dfw.Transport(*sums)
    sol = dfw.solve(dfw.Smooth(huber, F, d, c, shape=(8,)), plans)
    # Frank-Wolfe steps from there find nothing better than the certificate allows
    better = dfw.solve(
        dfw.Smooth(huber, F, d, c, shape=(8,)),
        dfw.Polyhedron(*_rows(sums), lower=0.0),
        x0=sol.x,
        method="frank-wolfe",
        max_steps=30,
    )
    assert (sol.value - better.value <= sol.gap + 1e-9).all()
    done = sol.status == dfw.Status.CONVERGED
    assert (sol.gap <= 1e-5 * sol.value.abs())[done].all()
    assert done.sum() > 40


def _rows(sums: tuple[torch.Tensor, torch.Tensor]) -> tuple[None, None, torch.Tensor, torch.Tensor]:
    m, k = (len(part) for part in sums)
    one = torch.ones(1, k).double(), torch.ones(1, m).double()
    A = torch.cat((torch.kron(torch.eye(m).double(), one[0]), torch.kron(one[1], torch.eye(k))))
    return None, None, A, torch.cat(sums)


def test_a_wish_is_a_word() -> None:
    q = torch.ones(2, 4)
    with pytest.raises(ValueError, match="on_infeasible"):
        dfw.solve(dfw.Quadratic(None, q), dfw.NonNegative(), on_infeasible=q.numpy())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_rows_without_entries_say_nothing_about_units(unit: float, compiled: bool) -> None:
    """0·x ≤ h holds whatever h ≥ 0 is, also beside numbers 1e20 times as large or small."""
    torch.manual_seed(23)
    count, n = 24, 3
    F = torch.randint(-2, 3, (count, 2, n)).double()  # f does not bend in all directions
    q = torch.randn(count, n).double()
    G = torch.cat((torch.eye(n), -torch.eye(n), torch.zeros(1, n))).double()
    limits = torch.cat((torch.ones(2 * n), torch.tensor([1.0]))).double()

    def solved(blank: float, t: float) -> dfw.Solution:
        h = t * limits
        h[-1] = blank
        with dfw.engines.compiled.using(compiled):
            return dfw.solve(
                dfw.Quadratic(F.mT @ F / t**2, q / t), dfw.Polyhedron(G=G, h=h), shape=(n,)
            )

    expected = solved(1.0, 1.0).value
    for blank in (0.0, 1e-20, 1.0, 1e20):
        sol = solved(blank, unit)
        assert (sol.status == dfw.Status.CONVERGED).all()
        torch.testing.assert_close(sol.value, expected, rtol=1e-10, atol=1e-12)
    for blank in (-1.0, -1e20):
        assert (solved(blank * unit, unit).status == dfw.Status.INFEASIBLE).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_entries_that_are_zero_at_the_solution_are_zero(unit: float, compiled: bool) -> None:
    """f bends in one coordinate only, and a row of several holds the others far from zero."""
    torch.manual_seed(29)
    slopes = torch.randint(1, 4, (16, 1)).double()
    G = torch.tensor([[-4.0, 0.0, 0.0], [0.0, -0.25, 0.0], [-0.25, 0.0, -0.25]]).double()
    A = torch.tensor([[2.0, 1.0, 1.0]]).double()
    levels = unit * torch.rand(16, 1).double()
    rows = torch.cat((slopes, torch.zeros(16, 2)), -1).unsqueeze(-2) * 2.0**-20 / unit
    polyhedron = dfw.Polyhedron(G=G, h=torch.zeros(3).double(), A=A, b=levels)
    with dfw.engines.compiled.using(compiled):
        sol = dfw.solve(dfw.LeastSquares(rows, torch.zeros(16, 1).double()), polyhedron)
    assert (sol.x[:, 0] == 0).all()
    assert (sol.value == 0).all()
    assert set(sol.status.tolist()) <= {dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR}


@pytest.mark.parametrize("size", [1.0, 1e8, 1e20, 1e40])
def test_a_soft_vertex_of_far_costs_is_in_the_set(size: float) -> None:
    """With a gradient too: the cost's rounding is larger than the whole set."""
    torch.manual_seed(31)
    sums = 2.0**-50 * torch.tensor([1.0, 2.0, 1.0]).double()
    cube = 2.0**-50 * torch.ones(9).double()
    rows = torch.randn(2, 9).double()
    sets = (
        dfw.Transport(sums, sums),
        dfw.Polyhedron(G=rows, h=cube[:2], lower=-cube, upper=cube),
        dfw.Polyhedron(A=rows, b=0.1 * cube[:2], lower=-cube, upper=cube),
    )
    cost = size * torch.randn(6, 9).double()
    for constraint in sets:
        bound = constraint.bind((9,), torch.float64, torch.device("cpu"))
        with torch.no_grad():
            plain = bound.soft_vertex(cost, 1.0)
        learned = bound.soft_vertex(cost.clone().requires_grad_(), 1.0)
        torch.testing.assert_close(learned.detach(), plain, rtol=0, atol=0)
        allowed = 32 * torch.finfo(torch.float64).eps * plain.abs().sum(-1).amax()
        assert bound.violation(plain).amax() <= allowed
        sol = dfw.solve(dfw.Quadratic(None, cost), constraint, method="dfw", max_steps=4)
        assert bound.violation(sol.x).amax() <= allowed
        best = dfw.solve(dfw.Quadratic(None, cost), constraint).value
        assert ((sol.value - best) <= 1e-6 * best.abs() + sol.gap).all()
