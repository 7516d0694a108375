"""Well-conditioned problems whose faces have many free coordinates: conjugate gradients on them."""

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F32, F64, attempted, close
from dfwlayer.engines import compiled


def spread_out(n, dtype, seed, share, condition=5.0):
    """½xᵀPx + qᵀx with eigenvalues from 1 to the condition, over a weighted ℓ1 ball."""
    generator = torch.Generator().manual_seed(seed)
    R = torch.randn(n, n, dtype=F64, generator=generator)
    P = R.mT @ R / n * (condition - 1) / 4 + torch.eye(n, dtype=F64)
    q = torch.randn(n, dtype=F64, generator=generator)
    w = 0.5 + torch.rand(n, dtype=F64, generator=generator)
    t = share * (w * torch.linalg.solve(P, q)).abs().sum()
    P, q, w, t = (part.to(dtype) for part in (0.5 * (P + P.mT), q, w, t))
    return P, q, w, t


def answers(given, solved):
    """x, and gradients of a functional of it in all numbers."""
    P, q, w, t = (part.clone().requires_grad_() for part in given)
    sol = solved(dfw.Quadratic(P, q), dfw.LpBall(1, t, w))
    v = torch.linspace(-1, 1, len(q), dtype=q.dtype)
    return sol, torch.autograd.grad((v * sol.x).sum(), (P, q, w, t))


def at_once(*given):
    found = attempted(*given)
    assert found is not None
    assert found.left is None
    return found.solution


def by_tensors(*given):
    with compiled.using(False):
        return dfw.solve(*given, tol=1e-13 if given[0].q.dtype == F64 else 1e-6)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("share", [0.6, 3.0], ids=["held", "loose"])
@pytest.mark.parametrize("n", [300, 400, 700])
def test_broad_faces_have_exact_solutions_and_gradients(n, share, dtype):
    """The sizes beyond 600 as well, which tensor operations took before."""
    given = spread_out(n, dtype, n, share)
    sol, gradients = answers(given, at_once)
    assert sol.status == dfw.Status.CONVERGED
    assert int((sol.x != 0).sum()) > 160
    right, expected = answers([part.double() for part in given], by_tensors)
    eps = torch.finfo(dtype).eps
    close(sol.x.double(), right.x, 256 * eps)
    for found, wanted in zip(gradients, expected, strict=True):
        close(found.double(), wanted, 4096 * eps)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("share", [0.85, 0.93, 0.97])
@pytest.mark.parametrize("seed", range(4))
def test_faces_that_hold_only_a_few(seed, share, dtype):
    """The first face that spectral steps settle on is seldom that of the solution there."""
    given = spread_out(300, dtype, seed, share)
    sol, gradients = answers(given, at_once)
    assert sol.status == dfw.Status.CONVERGED
    right, expected = answers([part.double() for part in given], by_tensors)
    # tensor operations end once the gap is small, with entries that may be what rounding left
    assert 0 < int((right.x.abs() <= 1e-14).sum()) < 100
    eps = torch.finfo(dtype).eps
    close(sol.x.double(), right.x, 256 * eps)
    for found, wanted in zip(gradients, expected, strict=True):
        close(found.double(), wanted, 4096 * eps)


def test_equations_and_caps_on_broad_faces():
    P, q, _, _ = spread_out(300, F64, 8, 1.0)
    for constraint in (dfw.Simplex(200.0), dfw.CappedSimplex(150.0, 0.9), dfw.Box(-0.5, 0.5)):
        sol, right = (
            at_once(dfw.Quadratic(P, q), constraint),
            by_tensors(dfw.Quadratic(P, q), constraint),
        )
        assert sol.status == dfw.Status.CONVERGED
        close(sol.x, right.x, 1e-11)


def test_a_condition_that_steps_did_not_show_is_left_to_a_factor():
    """q has no part along what P hardly bends in, v has: too many steps for conjugate gradients."""
    n = 300
    generator = torch.Generator().manual_seed(4)
    frame = torch.linalg.qr(torch.randn(n, n, dtype=F64, generator=generator))[0]
    sizes = torch.ones(n, dtype=F64)
    sizes[: n // 2] = torch.logspace(-7, -1, n // 2, dtype=F64)
    P = (frame * sizes) @ frame.mT
    P = 0.5 * (P + P.mT)
    q = frame[:, n // 2 :] @ torch.randn(n - n // 2, dtype=F64, generator=generator)
    q.requires_grad_()
    sol = at_once(dfw.Quadratic(P, q), dfw.Box(-50.0, 50.0))
    v = torch.randn(n, dtype=F64, generator=generator)
    (gradient,) = torch.autograd.grad((v * sol.x).sum(), q)
    close(gradient, -torch.linalg.solve(P, v), 1e-8)


@pytest.mark.parametrize("batched", [False, True], ids=["one", "batch"])
def test_batches_beyond_600_are_left(batched):
    P, q, w, t = spread_out(650, F64, 1, 0.4)
    found = attempted(dfw.Quadratic(P, torch.stack([q, -q]) if batched else q), dfw.LpBall(1, t, w))
    assert (found is None) == batched
