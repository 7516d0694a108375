"""Linear programs and quadratic ones: what holds beyond the table of sets."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from helpers import DTYPES, F64


def rows(seed, count, n, m, k, rank=None):
    """P, q, G, h, A, b of programs with a feasible point."""
    gen = torch.Generator().manual_seed(seed)
    R = torch.randn(count, n, n if rank is None else rank, generator=gen, dtype=F64)
    x = torch.randn(count, n, generator=gen, dtype=F64)
    G = torch.randn(count, m, n, generator=gen, dtype=F64)
    A = torch.randn(count, k, n, generator=gen, dtype=F64)
    h = (G @ x[..., None])[..., 0] + torch.rand(count, m, generator=gen, dtype=F64)
    q = torch.randn(count, n, generator=gen, dtype=F64)
    return R @ R.mT, q, G, h, A, (A @ x[..., None])[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_conditions_of_optimality(dtype, scale):
    """Feasible to the rounding of the terms of each row, and a gap of rounding."""
    P, q, G, h, A, b = (t.to(dtype) for t in rows(0, 8, 7, 12, 2))
    h, b, q = scale * h, scale * b, scale * q
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(G, h, A, b))
    assert sol.converged.all()
    x, eps = sol.x.double().unsqueeze(-1), torch.finfo(dtype).eps
    G, h, A, b = (t.double() for t in (G, h, A, b))
    terms = (G.abs() @ x.abs()).squeeze(-1) + h.abs()
    assert ((G @ x).squeeze(-1) - h <= 8 * eps * terms).all()
    terms = (A.abs() @ x.abs()).squeeze(-1) + b.abs()
    assert (((A @ x).squeeze(-1) - b).abs() <= 8 * eps * terms).all()


def test_more_rows_than_are_needed():
    """Copies, multiples, sums of rows and rows of zeros change neither x nor its gradient."""
    P, q, G, h, A, b = rows(1, 5, 6, 8, 2)
    zero = torch.zeros(5, 1, 6, dtype=F64)
    more = torch.cat((G, 2 * G[:, :3], G[:, :1] + G[:, 1:2], zero), -2)
    limits = torch.cat((h, 2 * h[:, :3], h[:, :1] + h[:, 1:2], zero[:, :, 0] + 1), -1)
    again, levels = torch.cat((A, A.sum(-2, keepdim=True)), -2), torch.cat((b, b.sum(-1, True)), -1)
    found = []
    for G_, h_, A_, b_ in ((G, h, A, b), (more, limits, again, levels)):
        at = q.clone().requires_grad_()
        sol = dfw.solve(dfw.Quadratic(P, at), dfw.Polyhedron(G_, h_, A_, b_))
        assert sol.converged.all()
        found.append((sol.x.detach(), *torch.autograd.grad(sol.x[:, 0].sum(), at)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_linear_programs():
    """Vertices, exactly: as many rows as coordinates hold x."""
    _, q, G, h, _, _ = rows(2, 20, 4, 30, 0)
    nothing = torch.zeros(4, 4, dtype=F64)
    sol = dfw.solve(dfw.Quadratic(nothing, q), dfw.Polyhedron(G, h))
    ends = sol.status != Status.UNBOUNDED
    assert ends.any()
    slack = h - (G @ sol.x.unsqueeze(-1)).squeeze(-1)
    assert ((slack.abs() < 1e-12).sum(-1) >= 4)[ends].all()
    assert torch.isinf(sol.gap[~ends]).all()


@pytest.mark.parametrize("kind", ["rows", "equations", "bounds", "mixed"])
def test_no_point_is_feasible(kind):
    """For half of the problems, which the others do not notice."""
    P, q, G, h, A, b = rows(3, 40, 5, 6, 2)
    lower = torch.full((40, 5), -1e3, dtype=F64)
    upper = -lower
    odd = torch.arange(40) % 2 == 1
    if kind == "rows":
        G[odd, 1], h[odd, 1] = -G[odd, 0], -h[odd, 0] - 0.1
    elif kind == "equations":
        A[odd, 1], b[odd, 1] = 2 * A[odd, 0], 2 * b[odd, 0] + 1
    elif kind == "bounds":
        lower[odd, 2], upper[odd, 2] = 1.0, 0.5
    else:
        G[odd, 0], h[odd, 0] = 1.0, -6e3
    constraint = dfw.Polyhedron(G, h, A, b, lower, upper)
    sol = dfw.solve(dfw.Quadratic(P, q), constraint)
    assert ((sol.status == Status.INFEASIBLE) == odd).all()
    assert sol.converged[~odd].all()
    assert (sol.x.isnan().all(-1) == odd).all()


def test_f_falls_for_ever():
    """Along the null space of P, where q points and no row is in the way."""
    P, q, _, _, A, b = rows(4, 30, 6, 0, 2, rank=2)
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(A=A, b=b))
    assert (sol.status == Status.UNBOUNDED).all()
    assert (dfw.Polyhedron(A=A, b=b).violation(sol.x) < 1e-12).all()
    bounded = dfw.Polyhedron(A=A, b=b, lower=-50.0, upper=50.0)
    assert dfw.solve(dfw.Quadratic(P, q), bounded).converged.all()


def test_degenerate_vertices_have_finite_gradients():
    """More rows than coordinates meet in x; by symmetry they share what holds it."""
    G = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 2.0]], dtype=F64)
    h = torch.tensor([1.0, 1.0, 2.0, 4.0], dtype=F64, requires_grad=True)
    q = torch.tensor([-5.0, -5.0], dtype=F64, requires_grad=True)
    sol = dfw.solve(dfw.Quadratic(torch.eye(2, dtype=F64), q), dfw.Polyhedron(G, h))
    torch.testing.assert_close(sol.x.detach(), torch.ones(2, dtype=F64))
    of_q, of_h = torch.autograd.grad(sol.x.sum(), (q, h))
    assert torch.isfinite(of_h).all()
    torch.testing.assert_close(of_q, torch.zeros(2, dtype=F64), rtol=0, atol=1e-8)


def test_a_function_that_is_not_quadratic():
    """Entropy over a simplex with a limit on two of its coordinates."""
    scores = torch.tensor([2.0, 1.0, 0.5, -1.0], dtype=F64)

    def f(x, c):
        return (x * x.clamp_min(1e-300).log()).sum(-1) - (c * x).sum(-1)

    G = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=F64)
    A = torch.ones(1, 4, dtype=F64)
    constraint = dfw.Polyhedron(G, 0.6, A, 1.0, lower=1e-9)
    start = torch.full((4,), 0.25, dtype=F64)
    sol = dfw.solve(dfw.Smooth(f, scores, shape=4), constraint, x0=start, tol=1e-8)
    assert sol.converged
    first, second = scores[:2].softmax(0) * 0.6, scores[2:].softmax(0) * 0.4
    torch.testing.assert_close(sol.x, torch.cat((first, second)), rtol=1e-5, atol=1e-7)


def test_rows_give_way_as_little_as_they_can():
    G = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=F64)
    h = torch.tensor([[1.0, -2.0], [1.0, -0.5]], dtype=F64, requires_grad=True)
    q = torch.tensor([[-3.0, 0.0]], dtype=F64).repeat(2, 1).requires_grad_()
    P = torch.eye(2, dtype=F64)

    def solution(q, h):
        constraint = dfw.Polyhedron(G, h)
        return dfw.solve(dfw.Quadratic(P, q), constraint, on_infeasible="least-violation")

    sol = solution(q, h)
    assert sol.status.tolist() == [Status.RELAXED, Status.CONVERGED]
    expected = torch.tensor([[2.25, -0.75], [2.0, -1.0]], dtype=F64)
    torch.testing.assert_close(sol.x.detach(), expected)
    assert torch.autograd.gradcheck(lambda q, h: solution(q, h).x, (q, h), atol=1e-5)
    A = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=F64)
    affine = dfw.AffineSet(A, torch.tensor([1.0, 2.0], dtype=F64))
    sol = dfw.solve(dfw.Quadratic(P, q[0]), affine, on_infeasible="least-violation")
    torch.testing.assert_close(sol.x.detach(), expected[0], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="on_infeasible: expected 'nan' or 'least-violation'"):
        dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(G, h), on_infeasible="zero")
