"""Zeros everywhere, singular matrices, odd starts: all have a right answer."""

import math

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from helpers import F64, METHODS, PS, close, dual_exponent, lp_norm, make_case, solved

every_method = pytest.mark.parametrize("method", [m.method for m in METHODS.values()], ids=METHODS)
exact_method = pytest.mark.parametrize("method", ["auto", "frank-wolfe"])
every_p = pytest.mark.parametrize("p", PS)


@every_p
@every_method
def test_zero_radius(method, p):
    case = make_case("quadratic", p, seed=71)
    leaves = {k: v.clone().requires_grad_() for k, v in case.params.items()}
    leaves["radius"] = torch.zeros(3, dtype=F64, requires_grad=True)
    sol = dfw.solve(*case.build(leaves), method=method)
    assert (sol.x == 0).all()
    assert (sol.value == 0).all()
    assert (sol.gap == 0).all()
    assert (sol.status == Status.CONVERGED).all()
    grads = torch.autograd.grad(sol.x.sum(), list(leaves.values()))
    assert all(torch.isfinite(g).all() for g in grads)


@every_p
@exact_method
def test_all_weights_zero(method, p):
    """No constraint at all: x = −P⁻¹q, and its gradient −P⁻¹."""
    case = make_case("quadratic", p, seed=72)
    P, q = case.params["P"], case.params["q"].clone().requires_grad_()
    weight = torch.zeros(6, dtype=F64)
    sol = dfw.solve(
        dfw.Quadratic(P, q), dfw.LpBall(p, 1.0, weight), method=method, tol=1e-12, max_steps=3000
    )
    want = -torch.linalg.solve(P, q)
    close(sol.x, want, rtol=0, atol=1e-5)
    assert (sol.status != Status.MAX_STEPS).all()
    assert (case.f(sol.x, case.params) - case.f(want, case.params) <= sol.gap + 1e-12).all()
    v = torch.randn(3, 6, dtype=F64)
    (grad,) = torch.autograd.grad((v * sol.x).sum(), q)
    close(grad, -torch.linalg.solve(P, v), rtol=1e-6, atol=1e-7)


@every_p
@pytest.mark.parametrize("method", METHODS)
def test_zero_weight_in_dfw_and_others(method, p):
    """Every method moves the free coordinate to where it belongs, given time, or refuses to."""
    case = make_case("identity", p, "zero weight", seed=73)
    sol = solved(METHODS[method], *case.problem(), max_steps=200, tol=0.0)
    if sol is not None:
        close(sol.x[:, 0], case.x_star[:, 0], rtol=0, atol=1e-3)


@every_p
@exact_method
def test_a_descent_without_end_is_reported(method, p):
    """Zero weight and no curvature along it: f has no minimum."""
    P = torch.diag(torch.tensor([0.0, 1.0, 2.0], dtype=F64))
    q = torch.tensor([1.0, 1.0, 1.0], dtype=F64)
    weight = torch.tensor([0.0, 1.0, 1.0], dtype=F64)
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, 1.0, weight), method=method)
    assert sol.status == Status.UNBOUNDED
    assert sol.gap == math.inf
    assert lp_norm(sol.x[1:], p) <= 1 + 1e-15


@every_p
@every_method
def test_zero_gradient_at_the_start(method, p):
    """q = 0: the start is the solution, and there is no step to divide by."""
    P = make_case("quadratic", p, seed=74).params["P"]
    sol = dfw.solve(
        dfw.Quadratic(P, torch.zeros(3, 6, dtype=F64)), dfw.LpBall(p, 1.0), method=method
    )
    assert (sol.x == 0).all()
    assert (sol.gap == 0).all()
    assert (sol.status == Status.CONVERGED).all()


@every_p
@every_method
def test_linear_objective(method, p):
    """P = 0: the solution is the vertex, f* = −t‖q/w‖_q."""
    gen = torch.Generator().manual_seed(75)
    q = torch.randn(4, 5, generator=gen, dtype=F64)
    w = torch.rand(4, 5, generator=gen, dtype=F64) + 0.5
    sol = dfw.solve(
        dfw.Quadratic(torch.zeros(5, 5, dtype=F64), q),
        dfw.LpBall(p, 0.7, w),
        method=method,
        temperature=1e-6,
    )
    close(sol.value, -0.7 * lp_norm(q / w, dual_exponent(p)), rtol=1e-9)
    assert (sol.status == Status.CONVERGED).all()


@every_p
@exact_method
def test_singular_matrix(method, p):
    """Rank one: the value and the gap are what counts, x is not unique."""
    gen = torch.Generator().manual_seed(76)
    a = torch.randn(3, 5, generator=gen, dtype=F64)
    q = a * 0.5 * torch.tensor([[1.0], [-1.0], [20.0]], dtype=F64)
    P = a[:, :, None] * a[:, None, :]
    sol = dfw.solve(
        dfw.Quadratic(P, q), dfw.LpBall(p, 1.0), method=method, tol=1e-6, max_steps=3000
    )
    # f is a function of z = ⟨a, x⟩ alone, |z| ≤ ‖a‖_q
    reach = lp_norm(a, dual_exponent(p))
    z = (-torch.tensor([0.5, -0.5, 10.0], dtype=F64)).clamp(-reach, reach)
    want = 0.5 * z * z + torch.tensor([0.5, -0.5, 10.0], dtype=F64) * z
    close(sol.value, want, rtol=1e-5)
    assert (sol.value - want <= sol.gap + 1e-12).all()


@every_p
@every_method
def test_start_outside_is_moved_in(method, p):
    case = make_case("quadratic", p, "signed", seed=77)
    x0 = 100 * torch.randn(3, 6, dtype=F64)
    w, t = case.params["weight"], case.params["radius"]
    at = dfw.solve(*case.problem(), x0=x0, method=method, max_steps=0)
    close(lp_norm(w * at.x, p), t, rtol=1e-12)
    assert (at.num_steps == 0).all()
    inside = 0.5 * at.x
    kept = dfw.solve(*case.problem(), x0=inside, method=method, max_steps=0)
    assert torch.equal(kept.x, inside)
    if method in ("auto", "frank-wolfe") and p <= 2:
        sol = dfw.solve(*case.problem(), x0=x0, method=method, tol=1e-10)
        close(sol.x, case.x_star, rtol=0, atol=1e-4)


@every_method
def test_start_with_nan_rows_starts_afresh(method):
    """The last solution may hold NaN rows; used as a start it must not spread them."""
    case = make_case("quadratic", "p=1", seed=78)
    x0 = torch.full((3, 6), 0.01, dtype=F64)
    x0[1] = math.nan
    x0[2, 0] = math.inf
    clean = x0.clone()
    clean[1:] = 0
    got = dfw.solve(*case.problem(), x0=x0, method=method, max_steps=9)
    want = dfw.solve(*case.problem(), x0=clean, method=method, max_steps=9)
    close(got.x, want.x, rtol=1e-12, atol=1e-14)


@exact_method
@every_p
def test_start_at_the_solution_stays(method, p):
    case = make_case("quadratic", p, "signed", seed=79)
    sol = dfw.solve(*case.problem(), x0=case.x_star, method=method, tol=1e-10)
    # at most one last solve on the face, whose conjugate gradients end within n steps
    assert (sol.num_steps <= case.x_star.shape[-1] + 2).all()
    assert (sol.status != Status.MAX_STEPS).all()
    close(sol.x, case.x_star, rtol=0, atol=1e-6)


@every_p
@every_method
def test_no_steps_returns_the_start(method, p):
    case = make_case("quadratic", p, seed=80)
    sol = dfw.solve(*case.problem(), method=method, max_steps=0)
    assert (sol.x == 0).all()
    assert (sol.num_steps == 0).all()
    assert (sol.status == Status.MAX_STEPS).all()
    assert (sol.gap > 0).all()


@every_p
@every_method
def test_zero_tolerance_ends(method, p):
    """tol = 0 is met at the rounding floor, by the cap, or exactly; x is the best there is."""
    case = make_case("quadratic", p, "signed", seed=81)
    sol = dfw.solve(*case.problem(), method=method, tol=0.0, max_steps=300)
    assert (case.error(sol.x) <= sol.gap + 1e-12).all()
    if method == "auto":
        assert (sol.status != Status.MAX_STEPS).all()
        close(sol.x, case.x_star, rtol=0, atol=1e-6)


@exact_method
def test_float32_stops_at_the_rounding_floor(method):
    case = make_case("quadratic", "p=1", "signed", n=20, seed=82).to(torch.float32)
    sol = dfw.solve(*case.problem(), method=method, tol=1e-12, max_steps=5000)
    assert ((sol.status == Status.ROUNDING_FLOOR) | (sol.status == Status.CONVERGED)).all(), sol
    assert (sol.num_steps < 5000).all()
    assert (sol.gap <= 1e-4 * sol.value.abs()).all()


@every_p
def test_exact_zeros_in_the_solution(p):
    """A coordinate without any force stays at 0, also where the ball's curvature is infinite."""
    q = torch.tensor([-3.0, 0.0, 2.0, 0.0], dtype=F64, requires_grad=True)
    t = torch.tensor(1.0, dtype=F64, requires_grad=True)
    x = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(p, t), tol=1e-12).x
    assert (x[[1, 3]].abs() <= 1e-6).all()
    for i in range(4):
        grads = torch.autograd.grad(x[i], (q, t), retain_graph=True)
        assert all(torch.isfinite(g).all() for g in grads)


@every_p
def test_scale_equivariance(p):
    """x*(P, cq, w, ct) = c x*(P, q, w, t), from 1e-30 to 1e30."""
    case = make_case("quadratic", p, "signed", seed=83)
    want = dfw.solve(*case.problem()).x
    for c in (1e-30, 1e-10, 1e10, 1e30):
        scaled = {"q": c * case.params["q"], "radius": c * case.params["radius"]}
        got = dfw.solve(*case.problem(**scaled))
        close(got.x / c, want, rtol=1e-6, atol=1e-8)


@every_p
def test_units_of_the_objective_do_not_matter(p):
    """x*(cP, cq) = x*(P, q)."""
    case = make_case("quadratic", p, "signed", seed=84)
    want = dfw.solve(*case.problem()).x
    for c in (1e-30, 1e30):
        got = dfw.solve(*case.problem(P=c * case.params["P"], q=c * case.params["q"]))
        close(got.x, want, rtol=1e-6, atol=1e-8)


def test_p_next_to_one_and_to_infinity():
    """The solution is continuous in p."""
    case = make_case("quadratic", "p=1", seed=85)
    w, t = case.params["weight"], case.params["radius"]
    objective = case.problem()[0]
    for p, q in ((1.0, 1 + 1e-6), (math.inf, 1e6)):
        a = dfw.solve(objective, dfw.LpBall(p, t, w), method="frank-wolfe", max_steps=300)
        b = dfw.solve(objective, dfw.LpBall(q, t, w), method="frank-wolfe", max_steps=300)
        error = (a.value - b.value).abs()
        assert (error <= a.gap + b.gap + 1e-4 * a.value.abs()).all()


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_rounding_is_no_lack_of_convexity(p):
    """Among many small problems some have minima inside, where the gradient is all rounding."""
    torch.manual_seed(0)
    R = torch.randn(10_000, 5, 5)
    P = R.mT @ R + 0.1 * torch.eye(5)
    q, radius = torch.randn(10_000, 5), 3 * torch.rand(10_000)
    sol = dfw.DFWLayer(p=p).solve(P, q, radius=radius)
    assert not (sol.status == Status.NOT_CONVEX).any()
