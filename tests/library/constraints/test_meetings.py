"""Intersections of any sets: against cvxpy, where members touch, and their prices."""

import cvxpy as cp
import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from dfwlayer.engines import compiled
from helpers import F64

N, ROWS = 6, 3
SECTORS = (torch.arange(N) % 3 == torch.arange(3)[:, None]).to(F64)


def draw(seed=0, n=N):
    gen = torch.Generator().manual_seed(seed)
    R = torch.randn(ROWS, n, n, generator=gen, dtype=F64)
    P = R @ R.mT / n + 0.2 * torch.eye(n, dtype=F64)
    return P, 3 * torch.randn(ROWS, n, generator=gen, dtype=F64)


def steep(seed=3):
    gen = torch.Generator().manual_seed(seed)
    return torch.eye(N, dtype=F64) + 0.3 * torch.randn(N, N, generator=gen, dtype=F64)


HELD = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1], dtype=F64)
RISK = steep()

# by name: the set of a radius and limits, what it means to cvxpy, these two, and what their prices
# are called
MEETINGS = {
    "ball, box": (
        lambda t, u: dfw.Intersection(dfw.LpBall(2, t), dfw.Box(-0.3, u)),
        lambda x, t, u: [cp.norm(x) <= t, x >= -0.3, x <= u],
        (0.7, [0.4] * N),
        ("0.radius", "1.upper"),
    ),
    "box, planes, ball": (
        lambda t, h: dfw.Intersection(
            dfw.Box(-0.5, 0.5), dfw.Polyhedron(SECTORS, h), dfw.LpBall(2, t)
        ),
        lambda x, t, h: [cp.norm(x) <= t, cp.abs(x) <= 0.5, SECTORS.numpy() @ x <= h],
        (0.8, [0.1, 0.2, 0.3]),
        ("2.radius", "1.h"),
    ),
    "l1, ellipsoid": (
        lambda s, t: dfw.Intersection(dfw.LpBall(1, t), dfw.Ellipsoid(RISK, 0.05, s)),
        lambda x, s, t: [cp.norm1(x) <= t, cp.norm(RISK.numpy() @ (x - 0.05)) <= s],
        (0.6, 1.0),
        ("1.radius", "0.radius"),
    ),
    "portfolio": (
        lambda t, h: dfw.Intersection(
            dfw.CappedSimplex(1.0, 0.45),
            dfw.Polyhedron(SECTORS, h),
            dfw.LpBall(1, t, centre=HELD),  # turnover
            dfw.Ellipsoid(RISK, radius=0.6),
        ),
        lambda x, t, h: [
            x >= 0,
            x <= 0.45,
            cp.sum(x) == 1,
            SECTORS.numpy() @ x <= h,
            cp.norm1(x - HELD.numpy()) <= t,
            cp.norm(RISK.numpy() @ x) <= 0.6,
        ],
        (0.5, [0.52, 0.47, 0.43]),
        ("2.radius", "1.h"),
    ),
    "l3, half-space": (
        lambda t, b: dfw.Intersection(dfw.LpBall(3, t), dfw.HalfSpace(-1.0, b)),
        lambda x, t, b: [cp.pnorm(x, 3) <= t, cp.sum(x) >= -b],
        (0.7, -0.4),
        ("0.radius", "1.level"),
    ),
    "groups, box": (
        lambda t, u: dfw.Intersection(dfw.GroupBall([0, 0, 1, 1, 2, 2], t), dfw.Box(-0.4, u)),
        lambda x, t, u: [
            sum(cp.norm(x[2 * i : 2 * i + 2]) for i in range(3)) <= t,
            x >= -0.4,
            x <= u,
        ],
        (0.9, [0.4] * N),
        ("0.radius", "1.upper"),
    ),
}


def parameters(name):
    _, _, values, _ = MEETINGS[name]
    return [torch.tensor(value, dtype=F64) for value in values]


def by_cvxpy(P, q, limits):
    x = cp.Variable(len(q))
    cost = 0.5 * cp.quad_form(x, cp.psd_wrap(P.numpy())) + q.numpy() @ x
    tight = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
    cp.Problem(cp.Minimize(cost), limits(x)).solve(solver=cp.CLARABEL, **tight)
    return torch.from_numpy(x.value)


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("engine", ["wait", "off"])
@pytest.mark.parametrize("name", MEETINGS)
def test_they_agree_with_cvxpy(name, engine):
    make, limits, values, _ = MEETINGS[name]
    P, q = draw()
    constraint = make(*parameters(name))
    with compiled.using(engine):
        sol = dfw.solve(dfw.Quadratic(P, q), constraint, tol=1e-11)
    assert sol.converged.all()
    assert (constraint.violation(sol.x) <= 1e-14).all()
    for i in range(ROWS):
        expected = by_cvxpy(P[i], q[i], lambda x: limits(x, *map(np.array, values)))
        torch.testing.assert_close(sol.x[i], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MEETINGS)
def test_both_engines_agree(name):
    """To the last digits, in x and in its gradients."""
    make, *_ = MEETINGS[name]
    found = []
    for engine in ("wait", "off"):
        leaves = [t.requires_grad_() for t in (*draw(5), *parameters(name))]
        P, q, *own = leaves
        with compiled.using(engine):
            x = dfw.solve(dfw.Quadratic(P, q), make(*own), tol=1e-11).x
            found.append((x.detach(), *torch.autograd.grad((x**3).sum(), leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", MEETINGS)
def test_prices_are_the_slopes_of_the_value(name):
    make, _, _, names = MEETINGS[name]
    P, q = draw(1)

    def value(*own):
        return dfw.solve(dfw.Quadratic(P, q), make(*own), tol=1e-12)

    own = [t.expand(ROWS, *t.shape).clone() for t in parameters(name)]
    prices = value(*own).multipliers
    step = 1e-5
    for i, price in enumerate(names):
        for j in range(own[i][0].numel()):
            change = [torch.zeros_like(t) for t in own]
            change[i].reshape(ROWS, -1)[:, j] = step
            up = value(*(t + d for t, d in zip(own, change, strict=True))).value
            down = value(*(t - d for t, d in zip(own, change, strict=True))).value
            found = prices[price].reshape(ROWS, -1)[:, j]
            torch.testing.assert_close(found, (down - up) / (2 * step), rtol=1e-5, atol=1e-6)


def test_prices_have_gradients():
    P, q = draw(1)
    radius = torch.full((ROWS,), 0.7, dtype=F64, requires_grad=True)

    def price(q, radius):
        constraint = dfw.Intersection(dfw.LpBall(2, radius), dfw.Box(-0.3, 0.4))
        return dfw.solve(dfw.Quadratic(P, q), constraint, tol=1e-12).multipliers["0.radius"]

    assert torch.autograd.gradcheck(price, (q.requires_grad_(), radius), atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("engine", ["wait", "off"])
def test_second_derivatives(engine):
    P, q = (t[:1] for t in draw(2))
    radius = torch.full((1,), 0.7, dtype=F64, requires_grad=True)

    def solution(q, radius):
        constraint = dfw.Intersection(dfw.LpBall(2, radius), dfw.Box(-0.3, 0.4))
        return dfw.solve(dfw.Quadratic(P, q), constraint, tol=1e-12).x.square()

    with compiled.using(engine):
        leaves = (q.requires_grad_(), radius)
        assert torch.autograd.gradgradcheck(solution, leaves, atol=1e-4, fast_mode=True)


# balls of matrices, whose faces are not aligned with the axes

TABLES = {
    "nuclear, box": (
        lambda t, u: dfw.Intersection(dfw.NuclearBall(t), dfw.Box(-0.3, u)),
        lambda X, t, u: [cp.normNuc(X) <= t, X >= -0.3, u >= X],
        (1.7, 0.35),
    ),
    "spectral, rows": (
        lambda t, h: dfw.Intersection(
            dfw.SpectralBall(t), dfw.HalfSpace(torch.ones(3, 4, dtype=F64), h)
        ),
        lambda X, t, h: [cp.sigma_max(X) <= t, cp.sum(X) <= h],
        (0.8, -0.4),
    ),
    "both balls, a centre": (
        lambda t, s: dfw.Intersection(dfw.NuclearBall(t, centre=0.1), dfw.SpectralBall(s)),
        lambda X, t, s: [cp.normNuc(X - 0.1) <= t, cp.sigma_max(X) <= s],
        (1.2, 0.6),
    ),
}


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("name", TABLES)
def test_balls_of_matrices_reach_all_digits(name):
    make, limits, values = TABLES[name]
    gen = torch.Generator().manual_seed(0)
    Z = torch.randn(2, 3, 4, generator=gen, dtype=F64)
    own = [torch.tensor(value, dtype=F64, requires_grad=True) for value in values]

    def solved(Z, *own):
        f = dfw.Smooth(lambda x, z: 0.5 * ((x - z) ** 2).sum((-2, -1)), Z, shape=(3, 4))
        return dfw.solve(f, make(*own), tol=1e-12)

    sol = solved(Z, *own)
    assert sol.converged.all()
    assert (sol.gap <= 1e-12).all()
    for i in range(len(Z)):
        X = cp.Variable((3, 4))
        problem = cp.Problem(cp.Minimize(cp.sum_squares(X - Z[i].numpy())), limits(X, *values))
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        torch.testing.assert_close(sol.x[i].detach(), torch.from_numpy(X.value), rtol=0, atol=3e-6)
    leaves = (Z[:1].clone().requires_grad_(), *own)
    assert torch.autograd.gradcheck(
        lambda *given: solved(*given).x, leaves, atol=1e-5, rtol=1e-4, fast_mode=True
    )
    prices = list(sol.multipliers.values())
    (slope,) = torch.autograd.grad(solved(Z, *own).value.sum(), own[:1])
    torch.testing.assert_close(prices[0].sum(), -slope, rtol=1e-8, atol=1e-9)


# where members touch, contain each other or do not meet


def test_one_inside_of_the_other():
    P, q = draw(4)
    alone = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2, 0.3), tol=1e-12)
    for other in (dfw.Box(-5.0, 5.0), dfw.LpBall(1, 9.0), dfw.LpBall(2, 0.3)):
        constraint = dfw.Intersection(dfw.LpBall(2, 0.3), other)
        sol = dfw.solve(dfw.Quadratic(P, q), constraint, tol=1e-10)
        assert sol.converged.all()
        torch.testing.assert_close(sol.x, alone.x, rtol=0, atol=1e-8)


def test_members_that_share_one_point():
    """A ball and the plane that touches it, two boxes with a common corner."""
    P, q = draw(4)
    normal = torch.ones(N, dtype=F64) / N**0.5
    touching = dfw.Intersection(dfw.LpBall(2, 1.0), dfw.HalfSpace(-normal, -1.0))
    sol = dfw.solve(dfw.Quadratic(P, q), touching)
    assert not (sol.status == Status.INFEASIBLE).any()
    torch.testing.assert_close(sol.x, normal.expand(ROWS, N), rtol=0, atol=1e-4)
    boxes = dfw.Intersection(dfw.Box(-1.0, 0.2), dfw.Box(0.2, 1.0))
    sol = dfw.solve(dfw.Quadratic(P, q), boxes)
    torch.testing.assert_close(sol.x, torch.full((ROWS, N), 0.2, dtype=F64))
    assert sol.converged.all()


@pytest.mark.parametrize("engine", ["wait", "off"])
def test_an_empty_one_does_not_touch_the_others(engine):
    P, q = draw(6)
    shift = torch.tensor([0.1, 5.0, 0.2], dtype=F64)[:, None].expand(ROWS, N)
    q.requires_grad_()
    constraint = dfw.Intersection(dfw.LpBall(2, 0.5, centre=shift), dfw.Box(-0.3, 0.4))
    with compiled.using(engine):
        sol = dfw.solve(dfw.Quadratic(P, q), constraint)
        assert sol.status.tolist() == [Status.CONVERGED, Status.INFEASIBLE, Status.CONVERGED]
        assert sol.x[1].isnan().all()
        (slope,) = torch.autograd.grad(sol.x[[0, 2]].sum(), q)
        assert (slope[1] == 0).all()
        alone = dfw.solve(
            dfw.Quadratic(P[0], q[0]),
            dfw.Intersection(dfw.LpBall(2, 0.5, centre=shift[0]), dfw.Box(-0.3, 0.4)),
        )
    torch.testing.assert_close(sol.x[0], alone.x, rtol=0, atol=1e-12)


# a cut is an intersection with a plane


CUT = {
    "l1": dfw.LpBall(1, 1.5),
    "box": dfw.Box(-0.5, 0.6),
    "capped": dfw.CappedSimplex(1.0, 0.4),
    "budget": dfw.L1Box(1.5, None, -0.5, 0.6),
}


@pytest.mark.parametrize("name", CUT)
def test_a_plane_cut_is_an_intersection(name):
    """The same numbers on the compiled engine, which sees one normal form."""
    P, q = draw(7)
    normal = torch.linspace(0.5, 1.5, N, dtype=F64)
    cut = dfw.PlaneCut(CUT[name], normal, 0.9)
    both = dfw.Intersection(CUT[name], dfw.Hyperplane(normal, 0.9))
    assert repr(cut.normal_form(N)) == repr(both.normal_form(N))
    for engine, digits in (("wait", 0.0), ("off", 1e-10)):
        with compiled.using(engine):
            one, other = (dfw.solve(dfw.Quadratic(P, q), c, tol=1e-12) for c in (cut, both))
        torch.testing.assert_close(one.x, other.x, rtol=0, atol=digits)
        price = other.multipliers["1.level"]
        torch.testing.assert_close(price, one.multipliers["level"], rtol=1e-8, atol=1e-9)


# as a newcomer writes them


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_portfolio_with_turnover_sectors_and_leverage(dtype):
    torch.manual_seed(0)
    n = 12
    returns = torch.randn(4, n, dtype=dtype, requires_grad=True)
    cov = torch.eye(n, dtype=dtype) * 0.5 + 0.1
    held = torch.full((n,), 1 / n, dtype=dtype)
    sector = torch.zeros(2, n, dtype=dtype)
    sector[0, :4] = sector[1, 4:8] = 1
    constraint = dfw.Intersection(
        dfw.Hyperplane(1.0, 1.0),
        dfw.LpBall(1, radius=1.6),
        dfw.LpBall(1, radius=0.8, centre=held),
        dfw.Polyhedron(sector, 0.5),
        dfw.Box(-0.2, 0.4),
    )
    sol = dfw.solve(dfw.Quadratic(cov, -returns), constraint)
    assert sol.converged.all()
    x, slack = sol.x.detach(), 1e-5 if dtype == torch.float32 else 1e-13
    assert (x.sum(-1) - 1).abs().max() <= slack
    assert x.abs().sum(-1).max() <= 1.6 + slack
    assert (x - held).abs().sum(-1).max() <= 0.8 + slack
    assert (x @ sector.mT).max() <= 0.5 + slack
    assert {"1.radius", "2.radius", "3.h", "4.upper"} <= sol.multipliers.keys()
    sol.x.square().sum().backward()
    assert torch.isfinite(returns.grad).all()


def test_an_image_within_its_range_and_next_to_another():
    torch.manual_seed(0)
    image = torch.rand(2, 16, 16)
    wish = (image + torch.randn_like(image)).requires_grad_()
    budget = dfw.Intersection(dfw.LpBall(2, 1.5, centre=image), dfw.Box(0.0, 1.0))
    sol = dfw.solve(dfw.Quadratic(None, -wish), budget, shape=(16, 16))
    assert sol.converged.all()
    assert sol.x.min() >= 0
    assert sol.x.max() <= 1
    assert (sol.x - image).flatten(1).norm(dim=-1).max() <= 1.5 * (1 + 1e-6)
    sol.x.sum().backward()
    assert torch.isfinite(wish.grad).all()
