"""Exact answers whatever the conditioning: the gap, computed here, at the rounding floor."""

import math

import pytest
import torch

import dfwlayer as dfw
from helpers import F64


def spread(n, condition, seed):
    """A problem whose Hessian has eigenvalues from 1 down to 1/condition, evenly on a log scale."""
    gen = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=gen, dtype=F64))
    P = (Q * torch.logspace(0, -math.log10(condition), n, dtype=F64)) @ Q.mT
    weight = torch.rand(n, generator=gen, dtype=F64) + 0.5
    return 0.5 * (P + P.mT), torch.randn(n, generator=gen, dtype=F64), weight


def relative_gap(P, q, weight, t, p, x):
    """(⟨g, x⟩ + t ‖g/w‖_q) / |f(x)| with 1/p + 1/q = 1, from nothing but the problem."""
    dual = {1.0: math.inf, math.inf: 1.0}.get(p, p / (p - 1) if p > 1 else math.inf)
    g = P @ x + q
    value = 0.5 * x @ (P @ x) + q @ x
    return float((g @ x + t * torch.linalg.vector_norm(g / weight, dual)) / value.abs())


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("condition", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("fraction", [0.3, 1e-2, 1e-4])
def test_condition_numbers(condition, p, fraction):
    P, q, weight = spread(60, condition, 3)
    free = torch.linalg.solve(P, -q)
    t = fraction * torch.linalg.vector_norm(weight * free, p)
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, t, weight), tol=1e-9)
    assert torch.linalg.vector_norm(weight * sol.x, p) <= t * (1 + 1e-15)
    assert sol.status in (dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR)
    # the rounding of the gradient is about eps · condition of the value
    assert relative_gap(P, q, weight, t, p, sol.x) <= max(1e-9, 1e3 * 2.2e-16 * condition)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_a_batch_that_shares_the_matrix(condition, dtype):
    """Problems that need several rounds, each with a penalty of its own to wish for."""
    P, _, weight = spread(20, condition, 4)
    gen = torch.Generator().manual_seed(5)
    q = (
        torch.randn(64, 20, generator=gen, dtype=F64)
        * torch.logspace(-1, 1, 64, dtype=F64)[:, None]
    )
    t = 0.3 * (weight * torch.linalg.solve(P, -q.mT).mT).abs().sum(-1)
    P, q, weight, t = (v.to(dtype) for v in (P, q, weight, t))
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1.0, t, weight), tol=1e-4)
    # the rounding of the gradient is about eps · condition of the value
    reachable = max(1e-4, 10 * torch.finfo(dtype).eps * condition)
    assert (sol.gap <= reachable * sol.value.abs()).all()
    for i in range(0, 64, 7):
        alone = dfw.solve(dfw.Quadratic(P, q[i]), dfw.LpBall(1.0, t[i], weight), tol=1e-4)
        scale = float(alone.x.abs().max())
        assert float((alone.x - sol.x[i]).abs().max()) <= 1e-2 * scale


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_gradient_of_an_ill_conditioned_problem(p):
    """Conjugate gradients cannot solve this system; a factorisation can."""
    P, q, weight = spread(40, 1e7, 6)
    t = 1e-2 * torch.linalg.vector_norm(weight * torch.linalg.solve(P, -q), p)
    q.requires_grad_()

    def solution(q):
        return dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, t, weight), tol=1e-12).x

    (slope,) = torch.autograd.grad(solution(q)[:7].sum(), q)
    gen = torch.Generator().manual_seed(7)
    d = torch.randn(40, generator=gen, dtype=F64)
    step = 1e-6
    with torch.no_grad():
        change = (solution(q + step * d) - solution(q - step * d))[:7].sum() / (2 * step)
    assert float(slope @ d) == pytest.approx(float(change), rel=1e-3)
