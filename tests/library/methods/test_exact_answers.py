"""Every method on every problem of the table, against the exact answer."""

import math

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from engine_cases import places
from helpers import (
    DTYPES,
    F64,
    METHODS,
    OBJECTIVES,
    PS,
    SETS,
    SITUATIONS,
    close,
    lp_norm,
    make_case,
    solved,
)

TOL = {torch.float32: 1e-4, torch.float64: 1e-9}


def check_against_answer(case, sol, row, tol, dtype):
    """What every method owes: a feasible x, honest value and gap, and the accuracy it claims."""
    eps = torch.finfo(dtype).eps
    exact = case.exactly()
    x = sol.x.detach().cpu().to(F64)
    size = lp_norm(exact.params["weight"] * x, case.p)
    assert (size <= exact.params["radius"] * (1 + 4 * eps)).all()
    value = exact.f(x, exact.params)
    scale = value.abs() + (x * x).sum(-1) * case.smooth
    close(sol.value, value, rtol=0, atol=float(200 * eps * scale.max()))
    assert sol.x.dtype == sol.value.dtype == sol.gap.dtype == dtype
    # the certificate: f(x) − f* ≤ gap
    noise = 200 * eps * scale
    assert (case.error(x) <= sol.gap.cpu().to(F64) + noise).all()
    # strong convexity turns it into a distance
    distance = torch.linalg.vector_norm(x - exact.x_star, dim=-1)
    reach = (2 * (sol.gap.cpu().to(F64) + noise) / case.strong).sqrt()
    assert (distance <= reach).all()
    if row.exact(case.p):
        ended = (sol.status == Status.CONVERGED) | (sol.status == Status.ROUNDING_FLOOR)
        assert ended.all(), sol
        converged = (sol.status == Status.CONVERGED).cpu()
        limit = tol * sol.value.abs().cpu()
        assert (sol.gap.cpu() <= limit)[converged].all()
        # the floor may not be an excuse: rounding allows this much and no more
        assert (distance <= (2 * (limit + 20 * noise) / case.strong).sqrt()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("constraint", SETS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_on_every_set(method, constraint, situation, dtype):
    row, case = METHODS[method], make_case("quadratic", constraint, situation).to(dtype)
    max_steps = 1000 if row.exact(case.p) else 60
    sol = solved(row, *case.problem(), tol=TOL[dtype], max_steps=max_steps)
    if sol is not None:
        check_against_answer(case, sol, row, TOL[dtype], dtype)


@pytest.mark.parametrize("constraint", ["p=1", "p=1.5", "p=3", "p=inf"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("method", METHODS)
def test_methods_on_every_objective(method, objective, constraint):
    row, case = METHODS[method], make_case(objective, constraint, "signed", seed=1)
    sol = dfw.solve(
        *case.problem(), method=row.method, tol=1e-9, max_steps=1000 if row.exact(case.p) else 60
    )
    check_against_answer(case, sol, row, 1e-9, F64)


@places
@pytest.mark.parametrize("objective", ["quadratic", "COO least squares", "logistic"])
@pytest.mark.parametrize("method", METHODS)
def test_devices(method, objective, place):
    row, case = METHODS[method], make_case(objective, "p=1", "signed", seed=2).to(place.device)
    sol = place.run(
        lambda: dfw.solve(*case.problem(), method=row.method, tol=1e-9),
        recorded=(method, objective) == ("auto", "quadratic"),
    )
    assert sol.x.device.type == sol.gap.device.type == sol.status.device.type == place.device
    check_against_answer(case, sol, row, 1e-9, F64)


@pytest.mark.parametrize("n", [1, 2, 17, 70, 150])
@pytest.mark.parametrize("p", PS)
def test_sizes(p, n):
    """Also beyond n = 64, where L no longer comes from all eigenvalues."""
    case = make_case("shared quadratic", p, "signed", n=n, rows=2, seed=3)
    sol = dfw.solve(*case.problem(), tol=1e-9)
    check_against_answer(case, sol, METHODS["auto"], 1e-9, F64)


def sort_projection(y, t):
    """Onto the ℓ1 ball, by sorting (Duchi et al., 2008)."""
    if np.abs(y).sum() <= t:
        return y
    u = np.sort(np.abs(y))[::-1]
    total = np.cumsum(u) - t
    k = np.nonzero(u > total / np.arange(1, len(u) + 1))[0][-1]
    return np.sign(y) * np.maximum(np.abs(y) - total[k] / (k + 1), 0)


PROJECTIONS = {
    1.0: sort_projection,
    2.0: lambda y, t: y * min(1.0, t / np.linalg.norm(y)),
    math.inf: lambda y, t: np.clip(y, -t, t),
}


@pytest.mark.parametrize("radius", [0.3, 2.0, 100.0])
@pytest.mark.parametrize("p", PROJECTIONS)
def test_identity_is_projection(p, radius):
    y = torch.randn(20, dtype=F64)
    x = dfw.solve(dfw.Quadratic(None, -y), dfw.LpBall(p, radius), tol=1e-12).x
    # ½‖x − x*‖² ≤ gap ≤ tol · |f|
    atol = (2e-12 * float(y @ y)) ** 0.5
    close(x, torch.from_numpy(PROJECTIONS[p](y.numpy(), radius)), rtol=0, atol=atol)


@pytest.mark.parametrize("p", PS)
def test_agrees_with_conic_solver(p):
    """Nothing designed here: random data, answered by Clarabel."""
    gen = torch.Generator().manual_seed(5)
    n = 8
    A = torch.randn(12, n, generator=gen, dtype=F64)
    b = torch.randn(12, generator=gen, dtype=F64)
    w = torch.randn(n, generator=gen, dtype=F64)
    cp = pytest.importorskip("cvxpy")
    x = cp.Variable(n)
    ball = cp.norm(cp.multiply(w.abs().numpy(), x), "inf" if p == math.inf else p) <= 0.4
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(A.numpy() @ x - b.numpy())), [ball])
    problem.solve(solver=cp.CLARABEL)
    sol = dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(p, 0.4, w), tol=1e-9)
    # Clarabel's own tolerances are 1e-8 relative
    close(sol.value, torch.tensor(problem.value, dtype=F64), rtol=1e-7)
    close(sol.x, torch.from_numpy(x.value), rtol=0, atol=2e-4)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_whole_certificate(p):
    """gap is ⟨g, x⟩ + t‖g/w‖_q whatever the method and wherever it stops, and bounds f − f*."""
    case = make_case("quadratic", p, "signed", rows=20, seed=7)
    w, t = case.params["weight"], case.params["radius"]
    for row in METHODS.values():
        for max_steps in (0, 1, 2, 5, 20, 100):
            sol = dfw.solve(*case.problem(), method=row.method, tol=0.0, max_steps=max_steps)
            g = (case.params["P"] @ sol.x[..., None])[..., 0] + case.params["q"]
            exponent = math.inf if p == 1 else 1 if p == math.inf else p / (p - 1)
            want = (g * sol.x).sum(-1) + t * lp_norm(g / w, exponent)
            close(sol.gap, want.clamp_min(0), rtol=1e-9, atol=1e-13)
            assert (case.error(sol.x) <= sol.gap + 1e-13).all()
            assert (sol.num_steps <= max_steps).all()


@pytest.mark.parametrize("seed", [0, 48, 75, 198, 481, 513, 1179])
def test_a_wrong_face_is_no_rounding_floor(seed):
    """Batches with a problem whose gap was small on a face next to that of the solution."""
    torch.manual_seed(seed)
    M = torch.randn(20, 20)
    P = M @ M.mT + torch.eye(20)
    q = torch.randn(64, 20)
    sol = dfw.DFWLayer(p=1).solve(P, q, radius=0.3)
    exact = dfw.DFWLayer(p=1, tol=1e-12).solve(P.double(), q.double(), radius=0.3)
    assert sol.converged.all()
    error = torch.linalg.vector_norm(sol.x - exact.x, dim=-1)
    assert (error <= 1e-5 * torch.linalg.vector_norm(exact.x, dim=-1)).all()
