"""The vertex against brute force and the dual norm; the soft one against the hard one."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import dfwlayer as dfw
from helpers import DTYPES, F64, PS, close, diameter, dual_exponent, lp_norm, ulps_outside

EVERY_P = (*PS, 1 + 1e-9, 1.001, 1.05, 50.0, 1e6)


def bound_ball(p, radius, weight, n, dtype=F64):
    """The ball as a method sees it."""
    weight = None if weight is None else weight.to(dtype)
    return dfw.LpBall(p, radius, weight).bind((n,), dtype, torch.device("cpu"))


def brute_force(g, p, weight, radius):
    """The least ⟨g, s⟩ over many points of the surface, those of a fine grid included."""
    n = g.shape[-1]
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(20000, n, generator=gen, dtype=F64)
    sharp = torch.sign(z) * z.abs() ** torch.logspace(-2, 1.5, 20000, dtype=F64)[:, None]
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * n).reshape(-1, n)
    axes = torch.eye(n, dtype=F64)
    y = torch.cat((sharp, corners, axes, -axes))
    y = y / lp_norm(y, p)[:, None]  # of the unit ball
    return (radius * (y / weight) @ g).min()


@pytest.mark.parametrize("p", EVERY_P)
def test_vertex_beats_brute_force(p):
    gen = torch.Generator().manual_seed(1)
    for _ in range(5):
        g = torch.randn(3, generator=gen, dtype=F64)
        w = 0.5 + torch.rand(3, generator=gen, dtype=F64)
        s = bound_ball(p, 0.7, w, 3).vertex(g[None])[0]
        best = brute_force(g, p, w, 0.7)
        assert (g @ s) <= best + 1e-12
        # and brute force comes near (both are negative), so that it was a test
        assert best <= 0.97 * (g @ s)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", EVERY_P)
def test_vertex_attains_the_dual_norm(p, dtype):
    """⟨g, s⟩ = −t ‖g/w‖_q on the ball's surface: optimal by Hölder's inequality."""
    gen = torch.Generator().manual_seed(2)
    g = torch.randn(50, 6, generator=gen, dtype=F64).to(dtype)
    g[0] = 0
    g[1, 1:] = 0
    g[2, ::2] = 0
    g[3] = 1  # ties
    g[4] *= 1e-30
    g[5] *= 1e30
    g[6] = torch.tensor([1e-30, 1e30, -1e10, 1e-10, 0, 1], dtype=dtype)
    w = (torch.randn(50, 6, generator=gen, dtype=F64) + 0.1).to(dtype)
    t = torch.rand(50, generator=gen, dtype=F64).to(dtype)
    s = bound_ball(p, t, w, 6, dtype).vertex(g)
    size = lp_norm(w.to(F64) * s.to(F64), p)
    eps = torch.finfo(dtype).eps
    assert (size <= t.to(F64) * (1 + 32 * eps)).all()
    want = -t.to(F64) * lp_norm(g.to(F64) / w.to(F64), dual_exponent(p))
    close((g.to(F64) * s.to(F64)).sum(-1), want, rtol=64 * eps, atol=0)
    assert torch.isfinite(s).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", EVERY_P)
def test_vertex_of_extreme_weights(p, dtype):
    """Weights of many magnitudes at once, also zero: feasible, finite, downhill."""
    w = torch.tensor([1e-20, 1.0, 1e15, 0.0, -3.0], dtype=dtype)
    g = torch.tensor(
        [[1.0, -2.0, 1e10, 5.0, 1e-12], [0, 0, 0, 1.0, 0], [1e-25, 1, 1e20, 0, -1]], dtype=dtype
    )
    for t in (1e-25, 1.0, 1e20):
        ball = bound_ball(p, t, w, 5, dtype)
        for s, row in zip(ball.vertex(g), g, strict=True):
            assert torch.isfinite(s).all()
            assert s[3] == 0  # unbounded coordinates are left to the method
            if p < 1e5:
                assert ulps_outside(s, w, torch.tensor(t, dtype=dtype), p) <= 64
            assert (row.to(F64) * s.to(F64)).sum() <= 0


@pytest.mark.parametrize("p", PS)
def test_vertex_sees_only_the_size_of_weights(p):
    g, w = torch.randn(4, 5, dtype=F64), torch.rand(5, dtype=F64) + 0.5
    flipped = w * torch.tensor([1, -1, 1, -1, -1])
    assert torch.equal(bound_ball(p, 2.0, w, 5).vertex(g), bound_ball(p, 2.0, flipped, 5).vertex(g))
    ones = torch.ones(5, dtype=F64)
    close(bound_ball(p, 2.0, None, 5).vertex(g), bound_ball(p, 2.0, ones, 5).vertex(g), rtol=1e-14)


@pytest.mark.parametrize("p", PS)
def test_zero_gradient_has_a_feasible_vertex(p):
    for weight in (None, torch.rand(4, dtype=F64) + 0.5):
        ball = bound_ball(p, 0.5, weight, 4)
        for s in (
            ball.vertex(torch.zeros(2, 4, dtype=F64)),
            ball.soft_vertex(torch.zeros(2, 4, dtype=F64), 0.1),
        ):
            assert torch.isfinite(s).all()
            assert (ball.violation(s) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", PS)
def test_soft_vertex_tends_to_the_hard_one(p, dtype):
    g = torch.tensor([[3.0, -1.0, 0.5, 0.0], [0.1, 0.2, -0.4, 0.3]], dtype=dtype)
    w = torch.tensor([1.0, -0.5, 2.0, 1.0], dtype=dtype)
    ball = bound_ball(p, 1.5, w, 4, dtype)
    hard = ball.vertex(g)
    distances = [
        float((ball.soft_vertex(g, tau) - hard).abs().max())
        for tau in (1.0, 0.1, 0.01, 1e-3, 1e-10, 1e-30, 0.0)
    ]
    assert all(later <= earlier + 1e-7 for earlier, later in itertools.pairwise(distances))
    assert distances[-1] <= 8 * torch.finfo(dtype).eps
    if p == 1:
        assert distances[0] > 0.1  # it was soft


def test_soft_vertex_is_the_papers_formula():
    g, w, t, tau = torch.randn(3, 5, dtype=F64), torch.rand(5, dtype=F64) + 0.5, 0.8, 0.3
    g_tw = t / w * g
    want = -(t / w) * torch.sign(g_tw) * torch.softmax(g_tw.abs() / tau, -1)
    close(bound_ball(1.0, t, w, 5).soft_vertex(g, tau), want, rtol=1e-13)


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
def test_soft_vertex_is_short_by_at_most_the_entropy(tau):
    """⟨g, ŝ⟩ − ⟨g, s⟩ ≤ τ log n, the δ(τ) of Theorem 1; see test_theory."""
    g = torch.randn(200, 7, dtype=F64)
    ball = bound_ball(1.0, 1.3, torch.rand(7, dtype=F64) + 0.5, 7)
    short = (g * (ball.soft_vertex(g, tau) - ball.vertex(g))).sum(-1)
    assert (short >= -1e-14).all()
    assert (short <= tau * math.log(7)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tau", [1.0, 1e-3, 1e-10, 1e-30, 1e-45, 0.0])
def test_soft_vertex_gradient_is_finite(tau, dtype):
    tiny = torch.finfo(dtype).tiny
    rows = [
        [0.0, 0.0, 0.0],
        [1.0, 1.0, -1.0],  # ties
        [1.0, 0.0, 0.0],
        [tiny, -tiny, 0.0],
        [1e30, 1.0, 1e-30],
        [1.0, 1.0 + torch.finfo(dtype).eps, 0.5],
    ]
    g = torch.tensor(rows, dtype=dtype, requires_grad=True)
    w = torch.tensor([1.0, -1.0, 1.0], dtype=dtype, requires_grad=True)
    t = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    ball = dfw.LpBall(1.0, t, w).bind((3,), dtype, torch.device("cpu"))
    s = ball.soft_vertex(g, tau)
    assert torch.isfinite(s).all()
    for i in range(3):
        for out in torch.autograd.grad(s[:, i].sum(), (g, w, t), retain_graph=True):
            assert torch.isfinite(out).all()


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, 10.0])
def test_vertex_gradient_is_finite_at_zeros(p):
    g = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, -1.0], [1e-200, 1.0, 0.0]], dtype=F64)
    g.requires_grad_()
    s = bound_ball(p, 1.0, torch.ones(3), 3).vertex(g)
    (grad,) = torch.autograd.grad((s * torch.randn(3, 3, dtype=F64)).sum(), g)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", ["vertex", "soft_vertex"])
@pytest.mark.parametrize("p", [*PS, 1.05])
def test_gradcheck(p, kind):
    gen = torch.Generator().manual_seed(3)
    g = torch.randn(2, 4, generator=gen, dtype=F64).requires_grad_()
    w = (torch.randn(2, 4, generator=gen, dtype=F64) + 0.2).requires_grad_()
    t = (torch.rand(2, generator=gen, dtype=F64) + 0.5).requires_grad_()

    def s(g, w, t):
        ball = dfw.LpBall(p, t, w).bind((4,), F64, torch.device("cpu"))
        return ball.vertex(g) if kind == "vertex" else ball.soft_vertex(g, 0.7)

    assert torch.autograd.gradcheck(s, (g, w, t))


@pytest.mark.parametrize("p", EVERY_P)
def test_diameter(p):
    w, t = torch.rand(5, dtype=F64) + 0.5, 0.6
    M = bound_ball(p, t, w, 5).diameter(5)
    close(M, diameter(p, w, torch.tensor(t, dtype=F64)), rtol=1e-12)
    # twice the longest point; no point of the ball is longer, and one is nearly as long
    y = torch.randn(100000, 5, dtype=F64)
    y = torch.sign(y) * y.abs() ** torch.logspace(-2, 1, 100000, dtype=F64)[:, None]
    x = torch.cat((y / lp_norm(y, p)[:, None], torch.eye(5, dtype=F64))) * t / w
    longest = 2 * torch.linalg.vector_norm(x, dim=-1).max()
    assert 0.9 * M <= longest <= M * (1 + 1e-12)


@pytest.mark.parametrize("p", PS)
def test_violation_and_retract(p):
    w = torch.randn(4, dtype=F64)
    ball = bound_ball(p, 0.9, w, 4)
    x = torch.randn(50, 4, dtype=F64)
    want = (lp_norm(w * x, p) - 0.9).clamp_min(0)
    close(ball.violation(x), want, rtol=1e-12, atol=1e-15)
    y = ball.retract(x)
    inside = want == 0
    assert torch.equal(y[inside], x[inside])
    assert (ball.violation(y) <= 4e-16).all()
    # on the ray through x, not at some other point of the ball
    ratio = y / x
    close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", ["Box", "L1Box", "Simplex", "CappedSimplex", "KSparse"])
def test_vertex_in_a_plane_through_vertices(base, dtype):
    """Against linear programming, for planes through corners of S, its outermost ones included."""
    n, whole = 4, np.random.default_rng(11)
    for _ in range(30):
        a, g = (whole.integers(-2, 3, n).astype(float) for _ in range(2))
        upper = whole.integers(1, 4, n).astype(float)
        weight = whole.integers(1, 3, n).astype(float)
        wide, halves = torch.tensor(upper, dtype=dtype), np.vstack((np.eye(n), -np.eye(n)))
        # S as y ≥ 0 with x = y[:n] − y[n:], the rows of an inequality and those of an equation
        caps, limit, total = np.concatenate((upper, 0 * upper)), None, None
        if base == "Box":
            constraint = dfw.Box(torch.zeros(n, dtype=dtype), wide)
        elif base == "Simplex":
            constraint, caps, total = dfw.Simplex(3.0), np.array([3.0, 0]).repeat(n), 3.0
        elif base == "CappedSimplex":
            constraint, total = dfw.CappedSimplex(4.0, wide), 4.0
        elif base == "L1Box":
            constraint = dfw.L1Box(5.0, torch.tensor(weight, dtype=dtype), 0.0, wide)
            limit = 5.0
        else:
            constraint, caps, limit = dfw.KSparse(2.0, 1.5), np.full(2 * n, 1.5), 3.0
            weight = np.ones(n)
        if total is not None and (base == "CappedSimplex" and upper.sum() < total):
            continue
        plain = constraint.bind((n,), dtype, torch.device("cpu"))
        normal = torch.tensor(a, dtype=dtype)
        corners = torch.stack([plain.vertex(v) for v in (normal, -normal, normal.flip(0))])
        for level in (corners @ normal).tolist():
            cut = dfw.PlaneCut(constraint, normal, level).bind((n,), dtype, torch.device("cpu"))
            s = cut.vertex(torch.tensor(g, dtype=dtype)).double().numpy()
            equations, right = [a @ halves.T], [level]
            if total is not None:
                equations, right = [*equations, np.ones(n) @ halves.T], [*right, total]
            best = linprog(
                g @ halves.T,
                A_ub=None if limit is None else np.concatenate((weight, weight))[None],
                b_ub=limit,
                A_eq=equations,
                b_eq=right,
                bounds=[(0, cap) for cap in caps],
            )
            assert g @ s == pytest.approx(best.fun, abs=1e-5)
            assert a @ s == pytest.approx(level, abs=1e-5)
            assert plain.violation(torch.tensor(s, dtype=dtype)) <= 1e-5
