"""Many coordinates in compiled code: bounds that need one pass, and one equation among bounds."""

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F32, F64, attempted, close
from dfwlayer.engines import compiled

INF = float("inf")


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("n", [5, 70_001])
def test_points_between_bounds_are_clipped(n, lead, dtype):
    torch.manual_seed(n)
    q = torch.randn(*lead, n, dtype=dtype, requires_grad=True)
    lower = torch.linspace(-1, -0.1, n, dtype=dtype)
    upper = lower + torch.linspace(0, 1, n, dtype=dtype)  # the first one is fixed
    lower[1], upper[2] = -INF, INF
    lower[3], upper[3] = -INF, INF
    lower.requires_grad_(), upper.requires_grad_()
    found = attempted(dfw.Quadratic(None, q), dfw.Box(lower, upper))
    assert found is not None
    assert found.left is None
    sol = found.solution
    x = (-q).clamp(lower, upper)
    assert torch.equal(sol.x, x)
    close(sol.value, (0.5 * x * x + q * x).sum(-1), 64 * torch.finfo(dtype).eps)
    assert (sol.gap <= 1e-6 * sol.value.abs()).all()
    v = torch.randn_like(q)
    inside = (-q > lower) & (-q < upper)
    (of_q,) = torch.autograd.grad(sol.x, q, v, retain_graph=True)
    assert torch.equal(of_q, torch.where(inside, -v, 0))
    both = torch.autograd.grad(sol.x, (lower, upper), v)
    total = v.where(~inside, 0).reshape(-1, n).sum(0)
    close(both[0] + both[1], total, 8 * torch.finfo(dtype).eps)


def test_a_bound_that_is_met_is_in_doubt_and_a_large_neighbour_is_none():
    """What rounding is for one coordinate does not count for the others."""
    box = dfw.Box(-0.5, 0.5)
    q = torch.tensor([1e12, 0.3, -2.0], dtype=F64)
    found = attempted(dfw.Quadratic(None, q), box)
    assert found is not None
    assert torch.equal(found.solution.x, torch.tensor([-0.5, -0.3, 0.5], dtype=F64))
    assert attempted(dfw.Quadratic(None, torch.tensor([0.1, 0.5], dtype=F64)), box) is None


@pytest.mark.parametrize("bad", [torch.nan, INF, 1e70])
def test_numbers_that_are_not_for_it(bad):
    q = torch.randn(2, 5000, dtype=F64)
    q[1, 4999] = bad
    found = attempted(dfw.Quadratic(None, q), dfw.Box(-0.5, 0.5))
    assert found is not None
    assert found.left is not None
    assert found.left.tolist() == [False, True]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("equations", [0, 1])
def test_a_polyhedron_of_bounds_and_an_equation(equations, dtype):
    """A dual of a support vector machine, where most coordinates are at a bound."""
    n = 150
    gen = torch.Generator().manual_seed(equations)
    points = torch.randn(n, 3, dtype=F64, generator=gen)
    labels = torch.sign(points[:, 0] + 0.3 * torch.randn(n, dtype=F64, generator=gen))
    kernel = torch.exp(-(torch.cdist(points, points) ** 2)) + 0.01 * torch.eye(n)
    P = (labels[:, None] * labels * kernel).to(dtype)
    q = -torch.rand(n, dtype=F64, generator=gen).to(dtype) - 0.5
    A, b = labels.to(dtype)[None][:equations], torch.full((equations,), 0.25, dtype=dtype)
    lower, upper = torch.zeros(n, dtype=dtype), torch.full((n,), 2.0, dtype=dtype)

    def answers(solved, numbers):
        P, q, A, b, lower, upper = (part.clone().requires_grad_() for part in numbers)
        rows = {"A": A, "b": b} if equations else {}
        sol = solved(dfw.Quadratic(P, q), dfw.Polyhedron(lower=lower, upper=upper, **rows))
        asked = (P, q, A, b, lower, upper) if equations else (P, q, lower, upper)
        v = torch.linspace(-1, 1, n, dtype=q.dtype)
        return sol, torch.autograd.grad((v * sol.x).sum(), asked)

    def by_tensors(*given):
        with compiled.using(False):
            return dfw.solve(*given, tol=1e-12)

    numbers = P, q, A, b, lower, upper
    sol, gradients = answers(lambda *given: attempted(*given).solution, numbers)
    right, expected = answers(by_tensors, [part.double() for part in numbers])
    eps = torch.finfo(dtype).eps
    assert sol.status == dfw.Status.CONVERGED
    assert 0 < int(((right.x > 0) & (right.x < 2)).sum()) < n
    close(sol.x.double(), right.x, 1024 * eps)
    for found, wanted in zip(gradients, expected, strict=True):
        close(found.double(), wanted, 1e5 * eps)
