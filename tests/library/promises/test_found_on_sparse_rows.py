"""Found by attacks on programs: units, faces that hardly bend, bounds that are one."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close as close

import dfwlayer as dfw
from dfwlayer.engines import compiled
from dfwlayer.linalg.quadratic.program import Program
from dfwlayer.linalg.quadratic.units import in_units

F64 = torch.float64
SOLVED = {dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR}


def designed(seed, n=40, bends=True):
    """P, q, G, h, lower, upper and the solution of a program some of whose coordinates are fixed.

    Slacks and forces are away from zero, so x is the only solution where P bends.
    """
    make = np.random.default_rng(seed)
    P = make.standard_normal((n // 3, n)) * (make.random((n // 3, n)) < 0.2)
    P = P.T @ P + 0.1 * np.eye(n) if bends else np.zeros((n, n))
    x = make.standard_normal(n)
    lower, upper, pull = x - make.uniform(0.1, 2, n), x + make.uniform(0.1, 2, n), np.zeros(n)
    kind = make.permutation(n) % 4
    lower[kind <= 1] = x[kind <= 1]
    upper[kind == 0] = x[kind == 0]
    pull[kind == 1] = -make.uniform(0.5, 2, (kind == 1).sum())
    if not bends:  # then only corners are solutions that are alone
        upper[kind == 2] = x[kind == 2]
        pull[kind == 2] = make.uniform(0.5, 2, (kind == 2).sum())
    free = kind == 3
    G = make.standard_normal((n, n)) * (make.random((n, n)) < 0.2) + np.eye(n)
    held = np.arange(n) < (free.sum() // 2 if bends else free.sum())
    z = np.where(held, make.uniform(0.5, 2, n), 0.0)
    h = G @ x + np.where(held, 0.0, make.uniform(0.5, 2, n))
    q = -(P @ x + G.T @ z + pull)
    return [torch.from_numpy(np.asarray(part)) for part in (P, q, G, h, lower, upper, x)]


def laid_out(matrix, layout):
    return matrix if layout == "dense" else matrix.to_sparse()


@pytest.mark.parametrize("layout", ["dense", "COO"])
@pytest.mark.parametrize("bends", [True, False])
@pytest.mark.parametrize(("unit", "value"), [(2.0**31, 2.0**-7), (2.0**-31, 1.0), (1.0, 2.0**20)])
@pytest.mark.parametrize("n", [40, 160])
def test_a_coordinate_that_is_fixed_has_the_units_of_the_others(unit, value, bends, layout, n):
    """Its curvature stood for itself as 1, beside a P of 1e-20, and told the units of all."""
    P, q, G, h, lower, upper, x = designed(3, n, bends)
    rows = dfw.Polyhedron(G=laid_out(G / unit, layout), h=h, lower=lower * unit, upper=upper * unit)
    with compiled.using(False):
        sol = dfw.solve(dfw.Quadratic(P * value / unit**2, q * value / unit), rows)
    assert int(sol.status) in SOLVED
    close(sol.value / value, 0.5 * x @ P @ x + q @ x, rtol=1e-9, atol=1e-11)
    if bends:
        close(sol.x / unit, x, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("value", [2.0**-40, 2.0**15, 2.0**40])
def test_the_units_of_x_are_not_told_by_those_of_f(value):
    P, q, G, h, lower, upper, _ = (part[None] for part in designed(5))
    none = torch.zeros(1, 0, P.shape[-1], dtype=F64)
    own, scaled = (
        in_units(Program(f * P, f * q, G, h, none, none[..., 0], lower, upper))[1]
        for f in (1.0, value)
    )
    for one, other in zip(own[:3], scaled[:3], strict=True):
        assert ((one / other - 1).abs() <= 1.0).all()  # powers of two may round to the next one
    close(scaled.cost / own.cost, torch.full_like(own.cost, value), rtol=1.01, atol=0)


def tied_transport(seed, m=12, n=15):
    """Costs u_i + v_j on half of all ways, and larger ones on the others, and a plan's sums."""
    make = np.random.default_rng(seed)
    tied = make.random((m, n)) < 0.5
    cost = (
        make.random(m)[:, None] + make.random(n) + np.where(tied, 0, make.uniform(0.5, 2, (m, n)))
    )
    plan = np.where(tied, make.uniform(0.5, 1.5, (m, n)), 0.0)
    A = np.concatenate((np.kron(np.eye(m), np.ones(n)), np.kron(np.ones(m), np.eye(n))))
    return A, cost.ravel(), A @ plan.ravel(), tied.ravel()


def least_plan(A, b, tied):
    """The plan of least norm on these ways: x = (Aᵀy)₊, by Newton's method for y."""
    ways, y = A[:, tied], np.zeros(len(b))

    def fall(y):
        return 0.5 * np.square(np.maximum(ways.T @ y, 0)).sum() - b @ y

    for turn in range(100):
        inside = ways[:, ways.T @ y > 0] if turn else ways
        left = b - ways @ np.maximum(ways.T @ y, 0)
        if np.abs(left).max() <= 1e-13 * b.max():
            break
        step, length = np.linalg.lstsq(inside @ inside.T, left, rcond=1e-12)[0], 1.0
        while fall(y + length * step) > fall(y) and length > 1e-6:
            length /= 2
        y = y + length * step
    x = np.zeros(A.shape[1])
    x[tied] = np.maximum(ways.T @ y, 0)
    return x


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("bend", [1e-6, 1e-10, 1e-11])
def test_linear_programs_with_a_little_curvature_are_solved_to_their_condition(bend, seed, mode):
    """f is right to rounding long before x is: x was off by half of itself in compiled code."""
    A, cost, b, tied = tied_transport(seed)
    q = torch.from_numpy(cost).requires_grad_()
    P = (bend * torch.eye(len(cost), dtype=F64)).to_sparse()
    rows = dfw.Polyhedron(A=torch.from_numpy(A).to_sparse(), b=torch.from_numpy(b), lower=0.0)
    with compiled.using(mode):
        sol = dfw.solve(dfw.Quadratic(P, q), rows)
    expected = least_plan(A, b, tied)
    assert int(sol.status) == dfw.Status.CONVERGED
    close(sol.x.detach(), torch.from_numpy(expected), rtol=0, atol=2e-15 / bend + 1e-11)
    v = np.random.default_rng(0).standard_normal(len(cost))
    (gradient,) = torch.autograd.grad((sol.x * torch.from_numpy(v)).sum(), q)
    inside = expected > 1e-9
    N = A[:, inside]
    own = v[inside] - N.T @ np.linalg.lstsq(N.T, v[inside], rcond=1e-12)[0]
    slope = np.zeros_like(v)
    slope[inside] = -own / bend
    close(gradient, torch.from_numpy(slope), rtol=0, atol=1e-9 / bend)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_along_a_face_that_hardly_bends(seed):
    """A curvature of 1e-8 beside one of 100 was taken for none at all, or for part of one."""
    make = np.random.default_rng(seed)
    n, k = 200, 40
    bend = 10 ** make.uniform(-8, 2, n)
    A = make.standard_normal((k, n)) * (make.random((k, n)) < 0.03)
    A[np.arange(k), make.permutation(n)[:k]] += 1.0
    x, nu, v = (make.standard_normal(size) for size in (n, k, n))
    q = torch.from_numpy(-(bend * x + A.T @ nu)).requires_grad_()
    P = torch.diag(torch.from_numpy(bend)).to_sparse()
    rows = dfw.Polyhedron(A=torch.from_numpy(A).to_sparse(), b=torch.from_numpy(A @ x))
    with compiled.using(False):
        sol = dfw.solve(dfw.Quadratic(P, q), rows)
    (gradient,) = torch.autograd.grad((sol.x * torch.from_numpy(v)).sum(), q)
    # by the Schur complement, whose units are those of the rows
    S = (A / bend) @ A.T
    d = 1 / np.sqrt(np.diag(S))
    mu = d * np.linalg.solve(S * d[:, None] * d, d * (A @ (v / bend)))
    u = torch.from_numpy((v - A.T @ mu) / bend)
    close(gradient, -u, rtol=0, atol=1e-5 * float(u.abs().max()))


def shut_sets(lower, upper):
    """Sets with these bounds, of four coordinates."""
    ones = torch.ones(4, dtype=F64)
    return {
        "box": dfw.Box(lower, upper),
        "budget": dfw.L1Box(lower=lower, upper=upper, radius=1.2),
        "cut": dfw.PlaneCut(dfw.Box(lower, upper), ones, 1.0),
        "rows": dfw.Polyhedron(A=ones[None], b=ones[:1], lower=lower, upper=upper),
        "beside a ball": dfw.Intersection(dfw.Box(lower, upper), dfw.LpBall(2, 5.0)),
    }


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("name", ["box", "budget", "cut", "rows", "beside a ball"])
@pytest.mark.parametrize("bends", [True, False])
@pytest.mark.parametrize("pull", [5.0, -5.0])
def test_of_two_bounds_that_are_one_the_one_that_holds_moves_x(pull, bends, name, mode):
    """The other can move away only, and nothing follows; both prices went to the lower one."""
    make = torch.Generator().manual_seed(1)
    root = torch.randn(4, 4, generator=make, dtype=F64)
    P = root @ root.mT + torch.eye(4, dtype=F64) if bends else None
    q, v = torch.linspace(pull, pull + 0.1, 4, dtype=F64), torch.linspace(0.3, 1, 4, dtype=F64)

    def solved(down=0.0, up=0.0):
        lower, upper = torch.full((4,), -1.0, dtype=F64), torch.full((4,), 1.0, dtype=F64)
        lower[1], upper[1] = 0.5 - down, 0.5 + up
        ends = lower.requires_grad_(), upper.requires_grad_()
        with compiled.using(mode):
            sol = dfw.solve(dfw.Quadratic(P, q), shut_sets(*ends)[name], tol=1e-9)
        return torch.stack(((sol.x * v).sum(), sol.value)), ends

    here, ends = solved()
    step = 1e-6
    expected = [(here - solved(down=step)[0]) / step, (solved(up=step)[0] - here) / step]
    for which in range(2):
        slopes = torch.autograd.grad(here[which], ends, retain_graph=True)
        for slope, difference in zip(slopes, expected, strict=True):
            close(slope[1], difference[which].detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("bends", [True, False])
def test_a_cap_of_zero_has_a_price(bends, mode):
    """What could be gained by the first unit of what is forbidden: it was zero."""
    P = 2 * torch.eye(4, dtype=F64) + 0.3 if bends else None
    q = torch.tensor([-5.0, -1.0, 0.1, 0.2], dtype=F64)

    def solved(first):
        cap = torch.tensor([first, 0.5, 0.6, 0.7], dtype=F64, requires_grad=True)
        with compiled.using(mode):
            return dfw.solve(dfw.Quadratic(P, q), dfw.CappedSimplex(1.0, cap), tol=1e-9), cap

    sol, cap = solved(0.0)
    more, _ = solved(1e-6)
    for moved, here in ((more.value, sol.value), (more.x[2], sol.x[2])):
        (slope,) = torch.autograd.grad(here, cap, retain_graph=True)
        close(slope[0], (moved - here).detach() / 1e-6, rtol=1e-4, atol=1e-6)
    close(sol.multipliers["cap"][0], -torch.autograd.grad(sol.value, cap)[0][0])


@pytest.mark.parametrize("mode", ["wait", "off"])
@pytest.mark.parametrize("layout", ["dense", "COO"])
@pytest.mark.parametrize("n", [40, 160])
@pytest.mark.parametrize("unit", [1.0, 2.0**-26, 2.0**26])
def test_gradients_do_not_depend_on_the_units_of_rows(unit, n, layout, mode):
    """A row with large entries has a small multiplier, which counted as none."""
    P, q, G, h, lower, upper, x = designed(7, n)
    make = np.random.default_rng(1)
    units = torch.from_numpy(2.0 ** make.integers(-20, 21, n))
    v = torch.from_numpy(make.standard_normal(n))

    def gradients(factor):
        slope, level = q.clone().requires_grad_(), (factor * h).requires_grad_()
        rows = dfw.Polyhedron(
            G=laid_out(factor[:, None] * G, layout), h=level, lower=lower, upper=upper
        )
        with compiled.using(mode):
            sol = dfw.solve(dfw.Quadratic(P, slope), rows)
        close(sol.x.detach(), x, rtol=1e-9, atol=1e-9)
        of_q, of_h = torch.autograd.grad((sol.x * v).sum(), (slope, level))
        return of_q, factor * of_h

    for own, plain in zip(
        gradients(unit * units), gradients(torch.ones(n, dtype=F64)), strict=True
    ):
        close(own, plain, rtol=1e-7, atol=1e-7 * float(plain.abs().max()))
