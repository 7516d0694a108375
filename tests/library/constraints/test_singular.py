"""Functions of singular values, the curvature they make, and large matrices by leading pairs."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.constraints.balls import schatten_ball
from dfwlayer.constraints.balls.leading import low_rank, norm_bound, shrunk, top_pair
from helpers import F64


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def schatten_norm(x, p):
    """‖σ(x)‖_p as an expression that autograd can differentiate twice."""
    return torch.linalg.vector_norm(torch.linalg.svdvals(x), p)


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (2, 4)])
def test_curvature_is_the_second_derivative_of_the_norm(p, shape):
    """Against autograd twice through the singular values, on the tangent space."""
    x, d = normal(1, *shape), normal(2, *shape)
    x.requires_grad_()
    t = schatten_norm(x, p)
    (slope,) = torch.autograd.grad(t, x, create_graph=True)
    ball = dfw.SchattenBall(p, t.detach()).bind(shape, F64, x.device)
    face = ball.face(x.detach().flatten(), -2 * slope.detach().flatten())
    (a,) = face.normals
    torch.testing.assert_close(a, slope.detach().flatten())
    v = d.flatten() - a * (a @ d.flatten()) / (a @ a)
    (product,) = torch.autograd.grad(slope, x, v.reshape(shape))
    torch.testing.assert_close(face.curvature(v), 2 * product.flatten())


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, torch.inf])
def test_vertices_can_be_differentiated(p):
    """By finite differences, in g and in the radius."""
    g, t = normal(3, 4, 3).requires_grad_(), torch.tensor(1.3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g, t: dfw.SchattenBall(p, t).vertex(g), (g, t))
    assert torch.autograd.gradcheck(lambda g, t: dfw.SchattenBall(p, t).soft_vertex(g, 0.3), (g, t))


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, torch.inf])
def test_equal_singular_values(p):
    """argmin of 0.75‖X‖² − 2 tr X is a multiple of the identity, known in closed form."""
    t = torch.tensor(0.5, dtype=F64, requires_grad=True)
    q = (-2 * torch.eye(4, dtype=F64)).flatten().requires_grad_()
    P = 1.5 * torch.eye(16, dtype=F64)
    want = 0.5 / (1 if p == torch.inf else 4 ** (1 / p))
    for method in ("auto", "dfw"):
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.SchattenBall(p, t, (4, 4)), method=method)
        in_t, in_q = torch.autograd.grad(sol.x[0], (t, q))
        assert in_q.isfinite().all()
        if method == "auto":
            torch.testing.assert_close(sol.x.reshape(4, 4), want * torch.eye(4, dtype=F64))
            torch.testing.assert_close(in_t.item(), want / 0.5)


def low(seed, rows, columns, rank):
    return normal(seed, rows, rank) @ normal(seed + 1, rank, columns)


def test_factors_of_low_rank():
    x = low(4, 230, 200, 9)
    found = low_rank(x)
    want = torch.linalg.svdvals(x)[:9]
    torch.testing.assert_close(found.at.values, want)
    torch.testing.assert_close(found.at.product(found.at.values), x)
    assert low_rank(normal(5, 200, 200)) is None


def test_the_bound_is_above_and_next_to_the_norm():
    """Also from a guess that is far below, and where the largest singular values are equal."""
    left, right = (torch.linalg.qr(normal(s, 200, 12))[0] for s in (6, 7))
    for g in (normal(8, 220, 200), left @ right.mT + 0.01 * normal(9, 200, 200) / 200**0.5):
        exact = torch.linalg.matrix_norm(g, 2)
        found = top_pair(g).values[0]
        assert exact <= norm_bound(g, found) <= exact * (1 + 1e-6)
        assert exact <= norm_bound(g, 0.5 * exact) <= exact * (1 + 1e-9)
        assert (found - exact).abs() <= 1e-6 * exact


def test_a_projection_by_leading_pairs_is_the_projection():
    ball = dfw.LpBall(1, torch.tensor(300.0, dtype=F64))
    x = low(10, 210, 200, 5)
    z = x + 0.02 * normal(12, 210, 200)
    left, values, right = torch.linalg.svd(z, full_matrices=False)
    want = (left * ball.project(values)) @ right
    for near in (None, x):
        found = shrunk(z, near, ball.project)
        error = torch.linalg.matrix_norm(found.product(found.values) - want)
        assert error <= (1e-8 if near is None else 1e-5) * torch.linalg.matrix_norm(want)


def test_large_is_small_made_fast(monkeypatch):
    """Completion with and without full decompositions: one solution, one gradient, one proof."""
    n = 200
    seen = torch.randperm(n * n, generator=torch.Generator().manual_seed(0))[: n * n // 4].sort()[0]
    data = low(13, n, n, 3).flatten()[seen] + 0.1 * normal(15, len(seen))
    A = torch.sparse_coo_tensor(
        torch.stack((torch.arange(len(seen)), seen)),
        torch.ones(len(seen), dtype=F64),
        (len(seen), n * n),
        is_coalesced=True,
        check_invariants=True,
    )
    probe, found = normal(16, n * n), []
    for large in (192, 10**9):
        monkeypatch.setattr(schatten_ball, "LARGE", large)
        b, t = data.clone().requires_grad_(), torch.tensor(450.0, dtype=F64, requires_grad=True)
        sol = dfw.solve(dfw.LeastSquares(A, b), dfw.NuclearBall(t, shape=(n, n)), tol=1e-8)
        assert sol.converged
        values = torch.linalg.svdvals(sol.x.detach().reshape(n, n))
        assert values.sum() <= t * (1 + 1e-14)
        assert (values > 1e-9).sum() < 10
        found.append((sol.x.detach(), *torch.autograd.grad((sol.x * probe).sum(), (b, t))))
    for fast, full in zip(*found, strict=True):
        torch.testing.assert_close(fast, full, rtol=1e-6, atol=1e-8 * float(full.abs().max()))


def test_groups_that_are_none():
    for groups, message in (
        ([[0, 1], [1, 2]], "groups: coordinate 1 is in groups 0 and 1; overlapping"),
        ([[0, 0], [1]], "groups: coordinate 0 is in one group twice"),
        ([[0], [2]], "groups: coordinates 1 are in no group; give each a group of its own"),
        ([[0], [-1]], "groups: expected indices from 0 on, found -1"),
        ([[0], []], "groups: expected lists of at least one index"),
        ([], "groups: expected a list of index lists"),
        ([0, 2, 2], "groups: labels go up to 2, but 1 are not in use"),
        ([0, -1], "groups: expected labels from 0 on, found -1"),
        (torch.rand(3), "groups: expected integer labels, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            dfw.GroupBall(groups)
    for groups, message in (
        ([[0, 1]], "groups: coordinates 2, 3 are in no group"),
        ([0, 0, 0, 0, 1], "groups: found coordinates up to 4, but the variable has 4 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            dfw.solve(dfw.Quadratic(None, torch.ones(4)), dfw.GroupBall(groups))


def test_a_matrix_is_needed():
    with pytest.raises(ValueError, match="shape: a Schatten ball is a set of matrices"):
        dfw.solve(dfw.Quadratic(None, torch.ones(4)), dfw.NuclearBall())
    with pytest.raises(ValueError, match="shape: a Schatten ball is a set of matrices"):
        dfw.solve(dfw.Quadratic(None, torch.ones(4)), dfw.NuclearBall(shape=(3, 2)))


@pytest.mark.parametrize("shape", [(3, 3), (4, 5), (5, 2)])
@pytest.mark.parametrize("ball", ["nuclear", "spectraplex"])
def test_a_step_along_matrices_of_one_rank_keeps_the_rank(ball, shape):
    torch.manual_seed(2)
    r, c = shape if ball == "nuclear" else (shape[0], shape[0])
    X = torch.randn(8, r, 1, dtype=torch.float64) * torch.randn(8, 1, c, dtype=torch.float64)
    if ball == "nuclear":
        norm = torch.linalg.matrix_norm(X, "nuc")
        set_ = dfw.NuclearBall(1.0, shape=(r, c))
    else:
        X = X[..., :1] @ X[..., :1].mT
        norm = X.diagonal(dim1=-2, dim2=-1).sum(-1)
        set_ = dfw.Spectraplex(1.0)
    X = X / norm[:, None, None]
    slope = -X.flatten(-2)  # so that the constraint is active
    x, set_ = X.flatten(-2), set_.bind((r, c), F64, X.device)
    face = set_.face(x, slope)
    u = face.restrict(0.05 * torch.randn_like(x))
    u = u - face.normals[0] * (u * face.normals[0]).sum(-1, keepdim=True)
    plain, bent = (torch.linalg.svdvals((x + v).reshape(8, r, c)) for v in (u, face.bent(u)))
    assert (plain[:, 1] > 1e-5).all()
    assert (bent[:, 1] <= 1e-15).all()


@pytest.mark.parametrize("shape", [(3, 3), (4, 5)])
def test_every_problem_over_a_nuclear_ball_ends_in_steps_of_newtons(shape):
    """A step along the tangent has to be bent, or the rank of some comes out too large."""
    torch.manual_seed(1)
    n = shape[0] * shape[1]
    A, q = torch.randn(400, n, n, dtype=torch.float64), torch.randn(400, n, dtype=torch.float64)
    P = A @ A.mT / n + 0.05 * torch.eye(n, dtype=torch.float64)
    radius = torch.rand(400, dtype=torch.float64) + 0.2
    sol = dfw.solve(dfw.Quadratic(P, 2 * q), dfw.NuclearBall(radius, shape=shape))
    assert (sol.gap <= 1e-12 * sol.value.abs()).all()
    assert int(sol.num_steps.max()) <= 70
