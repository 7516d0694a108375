"""Ill-conditioned problems over flat sets: an active-set method, and what float32 can show."""

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F32, F64, attempted, close, normal
from dfwlayer.engines import compiled
from dfwlayer.ops.tensors import filled, tensors_in


def rotated(n, smallest, generator):
    """A matrix with singular values from 1 to 10^smallest, in random directions."""
    frames = [torch.linalg.qr(torch.randn(n, n, dtype=F64, generator=generator))[0] for _ in "UV"]
    sizes = torch.logspace(0, smallest, n, dtype=F64)
    return frames[0] * sizes @ frames[1].mT


def bounded_fit(n, dtype, seed):
    """Least squares over a box; about half of the coordinates are held."""
    generator = torch.Generator().manual_seed(seed)
    A = rotated(n, -4, generator)  # AᵀA has the square of its condition
    b = A @ torch.randn(n, dtype=F64, generator=generator)
    b = b + 0.1 * torch.randn(n, dtype=F64, generator=generator)
    return dfw.LeastSquares(A.to(dtype), b.to(dtype)), dfw.Box(-1.0, 1.0)


def low_rank(n, dtype, seed, share):
    """½xᵀPx + qᵀx with P of rank n/10 but for a ridge, over a weighted ℓ1 ball."""
    generator = torch.Generator().manual_seed(seed)
    R = torch.randn(n // 10, n, dtype=F64, generator=generator)
    P = R.mT @ R + 1e-3 * n * torch.eye(n, dtype=F64)
    q = n**0.5 * torch.randn(n, dtype=F64, generator=generator)
    w = 0.5 + torch.rand(n, dtype=F64, generator=generator)
    t = share * (w * torch.linalg.solve(P, q)).abs().sum()
    P, q, w, t = (part.to(dtype) for part in (P, q, w, t))
    return dfw.Quadratic(P, q), dfw.LpBall(1, t, w)


def dual(n, seed):
    """The dual of a support vector machine: a box, a plane, and a kernel that is nearly flat."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, dtype=F64, generator=generator)
    y = (X[:, 0] + 0.5 * torch.randn(n, dtype=F64, generator=generator)).sign()
    K = torch.exp(-torch.cdist(X, X).square() / 6) * y.outer(y)
    P = K + 1e-6 * torch.eye(n, dtype=F64)
    plane = dfw.PlaneCut(dfw.Box(0.0, 100.0), y, 0.0)
    return dfw.Quadratic(0.5 * (P + P.mT), -torch.ones(n, dtype=F64)), plane


def wide(objective, constraint):
    """The same numbers in float64."""
    given = objective, constraint
    return filled(given, iter([t.detach().double() for t in tensors_in(given)]))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_conditioning_does_not_count_in_steps(seed, dtype):
    """Steps free coordinates in blocks; spectral steps to the same face are hundreds."""
    n = 120
    given = bounded_fit(n, dtype, seed)
    found = attempted(*given)
    assert found is not None
    assert found.left is None
    sol = found.solution
    assert sol.status == dfw.Status.CONVERGED
    held = int((sol.x.abs() == 1).sum())
    assert n // 4 < held < n
    assert int(sol.num_steps) < n // 2
    with compiled.using(False):
        right = dfw.solve(*wide(*given), tol=1e-13)
    eps = torch.finfo(dtype).eps
    value = given[0].value(sol.x).double()
    assert abs(value - right.value) <= 64 * eps * right.value.abs()
    if dtype == F64:
        close(sol.x, right.x, 1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_with_an_equation(seed):
    objective, constraint = dual(200, seed)
    found = attempted(objective, constraint)
    assert found is not None
    assert found.left is None
    sol = found.solution
    assert sol.status == dfw.Status.CONVERGED
    assert int(sol.num_steps) < 200
    with compiled.using(False):
        right = dfw.solve(objective, constraint, tol=1e-12)
    assert abs(sol.value - right.value) <= 1e-9 * right.value.abs()
    assert float(constraint.violation(sol.x)) <= 1e-12


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("n", [100, 300])
def test_a_slope_that_rounding_left_is_weighed_by_the_curvature(n, dtype):
    """Times the width of the ball it is far more than what x misses: the gap is that of f."""
    given = low_rank(n, dtype, 1, 0.1)
    found = attempted(*given, tol=3e-7)  # slopes times the width are above that in float32
    assert found is not None
    assert found.left is None
    sol = found.solution
    assert sol.status == dfw.Status.CONVERGED
    objective, constraint = wide(*given)
    with compiled.using(False):
        right = dfw.solve(objective, constraint, tol=1e-13)
    over = objective.value(sol.x.double()) - right.value
    rounding = 1e-13 * right.value.abs()
    assert over <= sol.gap.double() + float(right.gap) + rounding  # a bound on what x misses
    room = 4 * torch.finfo(dtype).eps * float(constraint.radius)  # a sum has rounding of its own
    assert float(constraint.violation(sol.x.double())) <= room


def test_the_gradient_has_the_order_of_the_factor():
    """The walk frees coordinates in an order of its own, and so they stand in its factor."""
    objective, constraint = low_rank(100, F64, 2, 0.1)
    q = objective.q.clone().requires_grad_()
    v = normal(100, dtype=F64)
    with compiled.using(True):
        x = dfw.solve(dfw.Quadratic(objective.P, q), constraint).x
        (own,) = torch.autograd.grad(x @ v, q)
    with compiled.using(False):
        x = dfw.solve(dfw.Quadratic(objective.P, q), constraint, tol=1e-13).x
        (right,) = torch.autograd.grad(x @ v, q)
    close(own, right, 1e-7)
