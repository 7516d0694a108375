"""Sets with bounds and budgets: projections, extreme cases and higher derivatives."""

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer import CappedSimplex, PlaneCut
from dfwlayer.constraints.polyhedra.knapsack import Knapsack
from helpers import F64

DTYPES = (torch.float32, torch.float64)


def bisected(z, a, lower, upper, total, low, high):
    """clip(z − θa, l, u) with ⟨a, ·⟩ = total, by bisection of one row."""
    for _ in range(200):
        theta = 0.5 * (low + high)
        x = np.clip(z - theta * a, lower, upper)
        low, high = (theta, high) if a @ x > total else (low, theta)
    return x


def l1_box_projection(z, w, t, lower, upper):
    x = np.clip(z, lower, upper)
    if np.abs(w * x).sum() <= t:
        return x
    bound = np.where(z < 0, -lower, upper)
    high = (np.abs(z) / np.where(w > 0, w, np.inf)).max()
    return np.sign(z) * bisected(np.abs(z), w, 0 * z, bound, t, 0.0, high)


@pytest.mark.parametrize("n", [1, 6, 16, 17, 300])
@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
def test_projection_onto_l1_box(n, scale):
    rng = np.random.default_rng(n)
    rows = 20
    z = scale * rng.standard_normal((rows, n))
    w = rng.random((rows, n)) * (rng.random((rows, n)) < 0.8)
    lower, upper = -rng.random((rows, n)), rng.random((rows, n))
    lower[:, -1] = 0
    t = 0.3 * n * rng.random(rows)
    want = np.stack([l1_box_projection(*row) for row in zip(z, w, t, lower, upper, strict=True)])
    args = [torch.from_numpy(v) for v in (z, w, t, lower, upper)]
    found = dfw.project_l1_box(*args)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13 * max(1, scale))
    single = dfw.project_l1_box(*(v[0] for v in args))
    np.testing.assert_allclose(single, want[0], rtol=0, atol=1e-13 * max(1, scale))
    near = dfw.project_l1_box(*(v.float() for v in args))
    np.testing.assert_allclose(near, want, rtol=0, atol=3e-6 * max(1, scale))


def test_gradient_of_the_l1_box_projection():
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(5, 6, generator=gen, dtype=F64, requires_grad=True)
    w = torch.rand(5, 6, generator=gen, dtype=F64, requires_grad=True)
    t = (0.3 + torch.rand(5, generator=gen, dtype=F64)).requires_grad_()
    lower = (-0.1 - torch.rand(6, generator=gen, dtype=F64)).requires_grad_()
    upper = (0.1 + torch.rand(6, generator=gen, dtype=F64)).requires_grad_()
    assert torch.autograd.gradcheck(dfw.project_l1_box, (z, w, t, lower, upper))


@pytest.mark.parametrize("n", [2, 9, 40, 500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_projection_onto_simplices(n, dtype):
    rng = np.random.default_rng(n)
    z = rng.standard_normal((30, n)).astype(np.float32).astype(np.float64)
    t = 0.2 + rng.random(30).astype(np.float32)
    cap = (0.1 + rng.random((30, n)) + 2 / n).astype(np.float32).astype(np.float64)
    for constraint, upper in (
        (dfw.Simplex(torch.from_numpy(t).to(dtype)), np.full((30, n), np.inf)),
        (dfw.CappedSimplex(torch.from_numpy(t).to(dtype), torch.from_numpy(cap).to(dtype)), cap),
    ):
        want = np.stack(
            [
                bisected(row, np.ones(n), 0, bound, total, row.min() - 2, row.max())
                for row, bound, total in zip(z, upper, t, strict=True)
            ]
        )
        x = dfw.solve(dfw.Quadratic(None, -torch.from_numpy(z).to(dtype)), constraint).x.double()
        np.testing.assert_allclose(x, want, rtol=0, atol=20 * torch.finfo(dtype).eps)
        assert (x >= 0).all()
        assert (x <= torch.from_numpy(upper)).all()
        total = torch.from_numpy(t).double()
        assert ((x.sum(-1) - total).abs() <= 4 * torch.finfo(dtype).eps * total).all()


def problems(n=6, rows=4):
    gen = torch.Generator().manual_seed(3)
    R = torch.randn(n, n, generator=gen, dtype=F64)
    return R @ R.mT + torch.eye(n, dtype=F64), torch.randn(rows, n, generator=gen, dtype=F64)


SMALL = {
    "Box": (lambda t: dfw.Box(-t, 0.5 * t), (0.1,)),
    "Simplex": (lambda t: dfw.Simplex(t), (1.0,)),
    "CappedSimplex": (lambda t, c: dfw.CappedSimplex(t, c), (1.0, 0.4)),
    "L1Box": (lambda t, u: dfw.L1Box(t, None, -0.1, u), (0.25, 0.12)),
    "KSparse": (lambda k, t: dfw.KSparse(k, t), (2.5, 0.08)),
    "PlaneCut": (lambda t, b: dfw.PlaneCut(dfw.LpBall(1, t), 1.0, b), (0.6, 0.3)),
}


@pytest.mark.parametrize("name", SMALL)
def test_second_derivatives(name):
    build, numbers = SMALL[name]
    P, q = problems(rows=2)
    leaves = [torch.tensor(v, dtype=F64, requires_grad=True) for v in numbers]

    def solution(q, *leaves):
        return dfw.solve(dfw.Quadratic(P, q), build(*leaves), tol=1e-14).x.square()

    q = q.requires_grad_()
    assert torch.autograd.gradcheck(solution, (q, *leaves), atol=1e-5)
    assert torch.autograd.gradgradcheck(solution, (q, *leaves), atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_transforms(name):
    build, numbers = SMALL[name]
    P, q = problems()
    leaves = [torch.tensor(v, dtype=F64) for v in numbers]

    def loss(q, *leaves):
        return dfw.solve(dfw.Quadratic(P, q), build(*leaves), tol=1e-13).x.square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), (0, *[None] * len(leaves)))(q, *leaves)
    for row, got in zip(q, mapped, strict=True):
        leaf = row.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(leaf, *leaves), leaf)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_unrolled_gradient_is_that_of_the_steps(name):
    build, numbers = SMALL[name]
    P, q = problems(rows=2)
    leaves = [torch.tensor(v, dtype=F64, requires_grad=True) for v in numbers]

    def steps(q, *leaves):
        return dfw.solve(
            dfw.Quadratic(P, q),
            build(*leaves),
            method="dfw",
            tol=0.0,
            max_steps=4,
            temperature=0.5,
            step_size=dfw.OpenLoop(),
        ).x

    assert torch.autograd.gradcheck(lambda q: steps(q, *leaves), q.requires_grad_(), atol=1e-5)
    if name in ("Box", "L1Box", "KSparse"):  # whose start, a constant, does not depend on them
        assert torch.autograd.gradcheck(steps, (q, *leaves), atol=1e-5)


def test_diagonal_hessian():
    """A projection onto a stretched set gives the same as the general way."""
    gen = torch.Generator().manual_seed(4)
    d = 0.5 + torch.rand(7, generator=gen, dtype=F64)
    q = torch.randn(3, 7, generator=gen, dtype=F64)
    for constraint in (dfw.Simplex(0.8), dfw.Box(-0.3, 0.2)):
        found = dfw.solve(dfw.Quadratic(torch.diag(d), q), constraint, tol=1e-12).x
        A = torch.diag(d.sqrt())
        want = dfw.solve(dfw.LeastSquares(A, -q / d.sqrt()), constraint, tol=1e-13).x
        torch.testing.assert_close(found, want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sets_with_a_single_point(dtype):
    P, q = (v.to(dtype) for v in problems())
    zero, one = torch.zeros(6, dtype=dtype), torch.ones(6, dtype=dtype)
    points = {
        dfw.Box(0.3 * one, 0.3 * one): 0.3 * one,
        dfw.Simplex(0.0): zero,
        dfw.CappedSimplex(3.0, 0.5): 0.5 * one,
        dfw.L1Box(0.0): zero,
        dfw.L1Box(1.0, None, 0.0, 0.0): zero,
        dfw.KSparse(2.0, 0.0): zero,
        dfw.PlaneCut(dfw.Box(0.0, 1.0), 1.0, 6.0): one,
        dfw.PlaneCut(dfw.L1Box(2.0, None, -1.0, 1.0), one.cumsum(0), 11.0): (
            torch.tensor([0, 0, 0, 0, 1, 1], dtype=dtype)
        ),
    }
    for constraint, point in points.items():
        q = q.clone().requires_grad_()
        for method in ("auto", "frank-wolfe"):
            sol = dfw.solve(dfw.Quadratic(P, q), constraint, method=method)
            torch.testing.assert_close(sol.x, point.expand_as(sol.x))
            (grad,) = torch.autograd.grad(sol.x.sum(), q)
            torch.testing.assert_close(grad, torch.zeros_like(q), atol=1e-5, rtol=0)


def test_coordinates_without_bounds():
    P, q = problems()
    lower, upper = torch.full((6,), -0.1, dtype=F64), torch.full((6,), 0.1, dtype=F64)
    lower[2], upper[2] = -torch.inf, torch.inf
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Box(lower, upper), tol=1e-10)
    assert sol.converged.all()
    gradient = sol.x @ P + q
    torch.testing.assert_close(gradient[:, 2], torch.zeros(4, dtype=F64), atol=1e-8, rtol=0)
    pressed = torch.where(sol.x.abs() < 0.1 - 1e-9, gradient.abs(), (gradient * sol.x).clamp_min(0))
    pressed[:, 2] = 0
    assert (pressed <= 1e-8).all()


def test_messages_of_sets_that_make_no_sense():
    q = torch.zeros(2, 4)
    f = dfw.Quadratic(None, q)
    with pytest.raises(ValueError, match=r"constraint: expected Box, .*, got LpBall with p = 3"):
        dfw.PlaneCut(dfw.LpBall(3))
    with pytest.raises(ValueError, match=r"a number between 0 and inf, .* found -1"):
        dfw.solve(f, dfw.PlaneCut(dfw.Box(lower=0.0), 1.0, -1.0))
    with pytest.raises(ValueError, match=r"radius: expected numbers ≥ 4, .* found 1"):
        dfw.solve(f, dfw.L1Box(1.0, None, 1.0, 2.0))
    with pytest.raises(ValueError, match=r"between -1 and 1, .* found 2"):
        dfw.solve(f, dfw.PlaneCut(dfw.LpBall(1), 1.0, 2.0))
    with pytest.raises(ValueError, match=r"a sum of 0\.8; raise the caps"):
        dfw.solve(f, dfw.CappedSimplex(1.0, torch.full((4,), 0.2)))
    with pytest.raises(ValueError, match="cap: batch of 3 problems does not go with the 2 of q"):
        dfw.solve(f, dfw.CappedSimplex(1.0, torch.ones(3, 4)))


def test_a_search_ends_where_there_is_nothing_to_find(monkeypatch):
    """Rows whose bounds do not reach the radius take no steps, so that others do not wait."""
    calls = []
    at = Knapsack._at
    monkeypatch.setattr(Knapsack, "_at", lambda self, theta: calls.append(1) or at(self, theta))
    gen = torch.Generator().manual_seed(0)
    z = 10 * torch.randn(64, 40, generator=gen, dtype=torch.float64)
    lower, upper = torch.zeros_like(z), torch.rand(64, 40, generator=gen, dtype=torch.float64)
    total = upper.sum(-1, keepdim=True) * torch.linspace(0.5, 1.5, 64).double().unsqueeze(-1)
    x = Knapsack(z, torch.ones(1).double(), lower, upper, total).nearest()
    expected = torch.minimum(total, upper.sum(-1, keepdim=True))
    assert torch.allclose(x.sum(-1, keepdim=True), expected, rtol=1e-14)
    assert len(calls) <= 40


@pytest.mark.parametrize("off", [-3e-9, 3e-9])
def test_a_plane_that_misses_the_set_by_rounding(monkeypatch, off):
    """A level given in float32 may be beyond what a set with one point reaches in double."""
    calls = []
    nearest = Knapsack.nearest
    monkeypatch.setattr(Knapsack, "nearest", lambda self: calls.append(1) or nearest(self))
    gen = torch.Generator().manual_seed(0)
    cap = torch.rand(5, 8, generator=gen, dtype=torch.float64) + 0.5
    normal = torch.randn(5, 8, generator=gen, dtype=torch.float64)
    level = (normal * cap).sum(-1) + off
    single = PlaneCut(CappedSimplex(cap.sum(-1), cap), normal, level)
    z = torch.randn(5, 8, generator=gen, dtype=torch.float64)
    x = single.bind((8,), z.dtype, z.device).project(z)
    assert torch.allclose(x, cap, rtol=1e-14)
    assert len(calls) <= 100


@pytest.mark.parametrize("with_p", [False, True])
@pytest.mark.parametrize("n", [5, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_are_caps_of_zero(dtype, n, with_p):
    """The solution over the other entries, no gradient on those, and nothing left is infeasible."""
    gen = torch.Generator().manual_seed(n)
    masked = torch.rand(4, n, generator=gen) < 0.5
    masked[0, 0], masked[2], masked[3] = False, True, False
    q = torch.randn(4, n, generator=gen, dtype=dtype).masked_fill(masked, 0).requires_grad_()
    R = torch.randn(n, n, generator=gen, dtype=dtype) / n
    P = R @ R.mT + torch.eye(n, dtype=dtype) if with_p else None
    cap = torch.full_like(q, torch.inf).masked_fill(masked, 0)
    sol = dfw.solve(dfw.Quadratic(P, q), CappedSimplex(1.0, cap))
    others = [0, 1, 3]
    assert sol.status.tolist() == [0, 0, dfw.Status.INFEASIBLE, 0]
    assert sol.x[2].isnan().all()
    assert (sol.x[masked & ~masked.all(-1, keepdim=True)] == 0).all()
    (grad,) = torch.autograd.grad(sol.x[others].square().sum(), q)
    assert grad.isfinite().all()
    assert (grad[masked] == 0).all()
    for i in others:
        left = ~masked[i]
        own = q[i].detach()[left].requires_grad_()
        part = None if P is None else P[left][:, left]
        want = dfw.solve(dfw.Quadratic(part, own), dfw.Simplex()).x
        torch.testing.assert_close(sol.x[i][left], want, rtol=1e-3, atol=1e-5)
        (slope,) = torch.autograd.grad(want.square().sum(), own)
        torch.testing.assert_close(grad[i][left], slope, rtol=1e-3, atol=1e-5)
