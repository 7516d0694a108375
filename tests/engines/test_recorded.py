"""CUDA graphs: every call gives what the first, unrecorded one gives, whatever came between."""

import math

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled
from dfwlayer.ops import graphs
from helpers import F64

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def no_graphs():
    """None from before; and small problems do not go to programs, which need no recording."""
    graphs.clear_graphs()
    with compiled.using(False):
        yield
    graphs.clear_graphs()


def problem(rows, n, seed, dtype=F64, identity=False):
    """P, q, weight, radius with binding constraints, on the CPU."""
    gen = torch.Generator().manual_seed(seed)
    lead = () if rows is None else (rows,)
    R = torch.randn(*lead, n, n, generator=gen, dtype=F64)
    P = R.mT @ R + n * torch.eye(n, dtype=F64)
    q = torch.randn(*lead, n, generator=gen, dtype=F64)
    weight = torch.rand(*lead, n, generator=gen, dtype=F64) + 0.5
    radius = 0.3 * (weight * torch.linalg.solve(P, -q)).abs().sum(-1)
    tensors = [None if identity else 0.5 * (P + P.mT), q, weight, radius]
    return [None if t is None else t.to(dtype) for t in tensors]


def run(layer, tensors, device):
    """The solution and the gradients of a fixed functional, on the CPU."""
    leaves = [None if t is None else t.to(device).requires_grad_() for t in tensors]
    P, q, weight, radius = leaves
    sol = layer.solve(P, q, weight, radius)
    v = torch.arange(1.0, q.shape[-1] + 1, dtype=q.dtype, device=device)
    grads = torch.autograd.grad((sol.x * v).sum(), [t for t in leaves if t is not None])
    return sol, [g.cpu() for g in grads]


def agree(got, want, tol):
    torch.testing.assert_close(got[0].x.detach().cpu(), want[0].x.detach().cpu(), rtol=0, atol=tol)
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=10 * tol * (1 + float(b.abs().max())))


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
@pytest.mark.parametrize(("rows", "n"), [(None, 30), (1, 30), (7, 30), (64, 6)])
@pytest.mark.parametrize("identity", [False, True])
def test_every_call_is_like_the_cpu(p, rows, n, identity):
    layer = dfw.DFWLayer(p, tol=1e-12)
    for call in range(5):
        tensors = problem(rows, n, call, identity=identity)
        agree(run(layer, tensors, "cuda"), run(layer, tensors, "cpu"), 1e-8)
    if p in (1.0, math.inf):  # others watch their own convergence
        assert graphs._recordings


def test_points_on_the_boundary():
    """A projection of what has just been projected changes nothing but rounding."""
    gen = torch.Generator().manual_seed(3)
    for n in (6, 30, 100):
        z, weight = (torch.rand(512, n, generator=gen, dtype=F64).cuda() + 0.1 for _ in range(2))
        radius = 0.3 * (weight * z).sum(-1)
        once = dfw.LpBall(1.0, radius, weight).project(z)
        again = dfw.LpBall(1.0, radius, weight).project(once)
        torch.testing.assert_close(again, once, rtol=1e-12, atol=1e-13)


def test_two_solves_before_two_backward_passes():
    layer = dfw.DFWLayer(1.0, tol=1e-12)
    cases = [problem(None, 20, seed) for seed in range(4)]
    wanted = [run(layer, case, "cpu") for case in cases]
    for _ in range(3):
        leaves = [[t.cuda().requires_grad_() for t in case] for case in cases]
        xs = [layer(*tensors) for tensors in leaves]
        v = torch.arange(1.0, 21, dtype=F64, device="cuda")
        for tensors, x, want in reversed(list(zip(leaves, xs, wanted, strict=True))):
            grads = torch.autograd.grad((x * v).sum(), tensors)
            torch.testing.assert_close(x.detach().cpu(), want[0].x.detach(), rtol=0, atol=1e-9)
            for a, b in zip(grads, want[1], strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-7)


def test_values_that_need_a_closer_look():
    """NaN, an asymmetric P, zero weights and a negative radius, after recordings were made."""
    layer = dfw.DFWLayer(1.0, tol=1e-10)
    P, q, weight, radius = (t.cuda() for t in problem(5, 8, 0))
    for _ in range(3):
        sound = layer.solve(P, q, weight, radius)
    bad = q.clone()
    bad[2, 3] = math.nan
    sol = layer.solve(P, bad, weight, radius)
    assert sol.status.tolist() == [0, 0, dfw.Status.NONFINITE, 0, 0]
    others = [0, 1, 3, 4]
    torch.testing.assert_close(sol.x[others], sound.x[others], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="symmetric"):
        layer.solve(P + torch.triu(torch.ones_like(P)), q, weight, radius)
    assert layer.solve(P, q, weight, -radius).status.tolist() == [dfw.Status.INVALID] * 5
    with pytest.raises(ValueError, match="radius"):
        layer.solve(P, q, weight, -radius[0])
    free = weight.clone()
    free[:, 0] = 0
    got = layer.solve(P, q, free, radius).x.cpu()
    want = layer.solve(P.cpu(), q.cpu(), free.cpu(), radius.cpu()).x
    torch.testing.assert_close(got, want, rtol=0, atol=1e-8)


def test_a_problem_that_needs_more_than_a_recording():
    """Condition 1e4: not done after the first round, and done in the end."""
    gen = torch.Generator().manual_seed(1)
    Q, _ = torch.linalg.qr(torch.randn(60, 60, generator=gen, dtype=F64))
    P = (Q * torch.logspace(0, -4, 60, dtype=F64)) @ Q.mT
    P, q = 0.5 * (P + P.mT), torch.randn(60, generator=gen, dtype=F64)
    radius = 0.1 * torch.linalg.solve(P, -q).abs().sum()
    want = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1.0, radius), tol=1e-10)
    for _ in range(4):
        ball = dfw.LpBall(1.0, radius.cuda())
        sol = dfw.solve(dfw.Quadratic(P.cuda(), q.cuda()), ball, tol=1e-10)
        assert sol.converged
        torch.testing.assert_close(
            sol.x.cpu(), want.x, rtol=0, atol=1e-6 * float(want.x.abs().max())
        )


@pytest.mark.parametrize("n", [20, 100, 500])
def test_gradient_steps_that_arrive_need_no_second_recording(n):
    """Well conditioned, few non-zeros: what is left to the polish is rounding, and it says so."""
    gen = torch.Generator().manual_seed(n)
    R = torch.randn(n, n, generator=gen)
    P, q = R.T @ R / n + 0.1 * torch.eye(n), torch.randn(n, generator=gen)
    want = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1.0, 1.0))
    for _ in range(5):
        sol = dfw.solve(dfw.Quadratic(P.cuda(), q.cuda()), dfw.LpBall(1.0, 1.0))
        assert sol.converged
        assert int(sol.num_steps) <= int(want.num_steps) + 10
    assert len(graphs._recordings) == 1


def test_a_start_that_is_given():
    layer = dfw.DFWLayer(1.0, tol=1e-10)
    P, q, weight, radius = (t.cuda() for t in problem(3, 12, 2))
    want = layer.solve(P, q, weight, radius).x
    for _ in range(4):
        sol = layer.solve(P, q, weight, radius, x0=want + 1e-3)
        torch.testing.assert_close(sol.x, want, rtol=0, atol=1e-9)
    stale = want.clone()
    stale[1] = math.nan
    sol = layer.solve(P, q, weight, radius, x0=stale)
    torch.testing.assert_close(sol.x, want, rtol=0, atol=1e-9)
