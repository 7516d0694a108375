"""L is never under-estimated, and not absurdly over-estimated."""

import pytest
import torch

import dfwlayer as dfw
from helpers import DTYPES, F64, close


def spectra(n, gen):
    """Name and eigenvalues of matrices that deceive power iteration in different ways."""
    u = torch.rand(n, generator=gen, dtype=F64)
    yield "random", u
    yield "one huge", torch.cat((torch.tensor([1e6], dtype=F64), u[1:]))
    yield (
        "one slightly larger",
        torch.cat((torch.tensor([1.001], dtype=F64), torch.ones(n - 1, dtype=F64))),
    )
    yield "clustered", 1 + 1e-6 * u
    yield "geometric", 10 ** (-10 * u)
    yield "low rank", torch.where(torch.arange(n) < max(1, n // 10), u + 1, 0)
    yield "zero", torch.zeros(n, dtype=F64)
    yield "negative end", torch.cat((torch.tensor([-5.0], dtype=F64), u[1:]))


def rotated(eigenvalues, gen):
    n = len(eigenvalues)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=gen, dtype=F64))
    P = (Q * eigenvalues) @ Q.T
    return 0.5 * (P + P.T)


def check(high, exact, rough):
    assert (high.to(F64) >= exact).all(), (high.to(F64) / exact).min()
    assert (high.to(F64) <= rough * exact).all(), (high.to(F64) / exact).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 63, 64, 65, 100, 300])
def test_quadratic(n, dtype):
    gen = torch.Generator().manual_seed(n)
    for name, eigenvalues in spectra(n, gen):
        for P in (rotated(eigenvalues, gen), torch.diag(eigenvalues)):
            P = P.to(dtype)
            exact = torch.linalg.eigvalsh(P.to(F64)).abs().max()
            high = dfw.Quadratic(P, torch.zeros(n, dtype=dtype)).curvature().high
            assert high.to(F64) >= exact, (name, n, float(high), float(exact))
            assert high.to(F64) <= 1.5 * exact, (name, n, float(high), float(exact))


@pytest.mark.parametrize("n", [5, 80])
def test_batch(n):
    gen = torch.Generator().manual_seed(n)
    P = torch.stack([rotated(e, gen) for _, e in spectra(n, gen)])
    exact = torch.linalg.eigvalsh(P).abs().amax(-1)
    high = dfw.Quadratic(P, torch.zeros(n, dtype=F64)).curvature().high
    assert high.shape == (len(P),)
    check(high, exact, 1.5)


@pytest.mark.parametrize("n", [70, 200])
def test_top_eigenvector_along_a_coordinate(n):
    """A start without a component along the top eigenvector sees nothing of it."""
    for i in range(0, n, n // 7):
        d = torch.ones(n, dtype=F64)
        d[i] = 100.0
        check(dfw.Quadratic(torch.diag(d), d).curvature().high, d.max(), 1.5)


@pytest.mark.parametrize("n", [66, 128, 300])
def test_many_random_matrices(n):
    gen = torch.Generator().manual_seed(n)
    for _ in range(20):
        R = torch.randn(n, n, generator=gen, dtype=F64)
        P = R.T @ R / n
        high = dfw.Quadratic(P, torch.zeros(n, dtype=F64)).curvature().high
        check(high, torch.linalg.eigvalsh(P)[-1], 1.5)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("n", [6, 90])
def test_scales(n, scale):
    gen = torch.Generator().manual_seed(n)
    R = torch.randn(n, n, generator=gen, dtype=F64)
    for dtype in DTYPES:
        P = (R.T @ R / n * scale).to(dtype)
        exact = torch.linalg.eigvalsh(P.to(F64))[-1]
        check(dfw.Quadratic(P, torch.zeros(n, dtype=dtype)).curvature().high, exact, 1.5)


SHAPES = [(1, 1), (3, 8), (8, 3), (70, 5), (5, 70), (100, 100), (150, 80), (80, 300)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "coo", "csr", "batch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_least_squares(shape, layout, dtype):
    gen = torch.Generator().manual_seed(sum(shape))
    for scale in (1.0, 1e-8, 1e8):
        A = scale * torch.randn(*shape, generator=gen, dtype=F64)
        if layout in ("coo", "csr"):
            A = torch.where(torch.rand(*shape, generator=gen) < 0.3, A, 0)
            A[0, 0] = scale
        if layout == "batch":
            A = torch.stack((A, 3 * A, torch.flip(A, (0,)) + scale))
        A = A.to(dtype)
        exact = torch.linalg.svdvals(A.to(F64))[..., 0] ** 2
        matrix = {"coo": A.to_sparse, "csr": A.to_sparse_csr}.get(layout, lambda a=A: a)()
        high = dfw.LeastSquares(matrix, torch.zeros(shape[0], dtype=dtype)).curvature().high
        assert high.shape == exact.shape
        check(high, exact, 1.5)


@pytest.mark.parametrize("n", [4, 70])
def test_gradient_of_the_bound(n):
    """L moves with P like its largest eigenvalue, so that unrolled gradients are right."""
    gen = torch.Generator().manual_seed(n)
    R = torch.randn(n, n, generator=gen, dtype=F64)
    P = R.T @ R / n
    P[0, 0] += 20  # a clear top eigenvalue, which Lanczos resolves
    P.requires_grad_()
    (got,) = torch.autograd.grad(dfw.Quadratic(P, P[0]).curvature().high, P)
    top = torch.linalg.eigh(P.detach())[1][:, -1]
    torch.testing.assert_close(got, torch.outer(top, top), rtol=1e-6, atol=1e-8)


def clear_top(m, n, gen):
    """A matrix (m, n) whose largest singular value stands out, so that Lanczos resolves it."""
    A = torch.randn(m, n, generator=gen, dtype=F64) / max(m, n) ** 0.5
    A[0, 0] += 10
    return A


BOUNDS = {
    "quadratic, dense": (4, lambda A: dfw.Quadratic(A.mT @ A, A[0])),
    "quadratic, Lanczos": (70, lambda A: dfw.Quadratic(A.mT @ A, A[0])),
    "least squares, dense": (4, lambda A: dfw.LeastSquares(A, A[:, 0])),
    "least squares, Lanczos": (70, lambda A: dfw.LeastSquares(A, A[:, 0])),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_second_derivative_of_the_bound_is_refused(name):
    """It would need the derivative of the eigenvector; the first derivative does not."""
    n, objective = BOUNDS[name]
    A = clear_top(n + 1, n, torch.Generator().manual_seed(n)).requires_grad_()
    (got,) = torch.autograd.grad(objective(A).curvature().high, A, create_graph=True)
    (want,) = torch.autograd.grad(torch.linalg.svdvals(A)[0] ** 2, A)
    close(got, want, rtol=1e-6, atol=1e-8)
    with pytest.raises(RuntimeError, match="differentiate='implicit'"):
        torch.autograd.grad(got.sum(), A)


def unrolled(P, q, rule=None):
    ball = dfw.LpBall(3.0, 0.2)
    objective = dfw.Quadratic(P, q)
    return dfw.solve(objective, ball, method="dfw", tol=0.0, max_steps=5, step_size=rule).x


def test_other_second_derivatives_of_unrolled_solves():
    """In P they are refused, in P and q they are right, and without the bound all are right."""
    gen = torch.Generator().manual_seed(2)
    A = clear_top(5, 4, gen)
    P, q = A.mT @ A + torch.eye(4, dtype=F64), torch.randn(4, generator=gen, dtype=F64)
    d, v = torch.randn(2, 4, generator=gen, dtype=F64)
    P.requires_grad_()
    q.requires_grad_()

    def pulled(P, q):
        return torch.autograd.grad(unrolled(P, q) @ v, (P, q), create_graph=True)

    gP, gq = pulled(P, q)
    with pytest.raises(RuntimeError, match="second derivative in P"):
        torch.autograd.grad(gP.sum(), P, retain_graph=True)
    step = 1e-6
    above, below = (pulled(P, q + sign * step * d)[0] for sign in (1, -1))
    (mixed,) = torch.autograd.grad(gq @ d, P, retain_graph=True)
    close(mixed, (above - below) / (2 * step), rtol=1e-6, atol=1e-8)
    (mixed,) = torch.autograd.grad((gP * torch.outer(v, d)).sum(), q)
    above, below = (pulled(P, q + sign * step * v)[0] for sign in (1, -1))
    close(mixed @ v, ((above - below) * torch.outer(v, d)).sum() / (2 * step), rtol=1e-6)
    for rule in (dfw.ExactStep(), dfw.ShortStep(lipschitz=110.0)):
        assert torch.autograd.gradgradcheck(
            lambda P, q, rule=rule: unrolled(P, q, rule), (P, q), atol=1e-6
        )
