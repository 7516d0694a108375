"""Which constraints hold a solution back: the rule of `dfwlayer.ops.scale`, on every set.

The problems have solutions inside of the set where f* is zero or ∇f is rounding, so that every
quantity that vanishes there misleads. The exact derivative is that of the problem without a set.
"""

import math

import pytest
import torch

import dfwlayer as dfw
from helpers import DTYPES, F64

N = 6


def inside(size: float, dtype: torch.dtype) -> dict[str, object]:
    """Sets that contain a ball of radius size/10 around 0, by name."""
    gen = torch.Generator().manual_seed(3)
    A = torch.randn(N + 2, N, generator=gen, dtype=F64) / 4 + torch.eye(N + 2, N, dtype=F64)
    weight = (torch.rand(N, generator=gen, dtype=F64) + 0.5).to(dtype)
    ends = torch.full((N,), math.inf, dtype=dtype)
    return {
        **{f"p={p:g}": dfw.LpBall(p, size) for p in (1, 1.05, 1.5, 2, 3, 10, math.inf)},
        **{f"p={p:g} weighted": dfw.LpBall(p, size, weight) for p in (1, 1.5, 2, math.inf)},
        "around a centre": dfw.LpBall(2, size, centre=torch.full((N,), 0.01 * size, dtype=dtype)),
        "Box": dfw.Box(-size, size),
        "Box, one side far": dfw.Box(-0.5 * size, 1e8 * size),
        "Box, both far": dfw.Box(-1e8 * size, 1e8 * size),
        "Box, endless": dfw.Box(-ends, ends),
        "L1Box": dfw.L1Box(size, None, -0.5 * size, 0.5 * size),
        "L1Box, far": dfw.L1Box(size, weight, -1e8 * size, 1e8 * size),
        "KSparse": dfw.KSparse(3, size),
        "GroupBall": dfw.GroupBall([[0, 1], [2, 3, 4], [5]], size),
        "Ellipsoid": dfw.Ellipsoid(A.to(dtype), None, 2 * size),
        "NuclearBall": dfw.NuclearBall(size, (2, 3)),
        "SpectralBall": dfw.SpectralBall(size, (2, 3)),
        "SchattenBall": dfw.SchattenBall(1.5, size, (2, 3)),
        "Product": dfw.Product([dfw.LpBall(1, size), dfw.Box(-size, size)], [2, 4]),
    }


def square(x, A, b):
    return 0.5 * ((x @ A.mT - b) ** 2).sum(-1)


OBJECTIVES = {
    "least squares": dfw.LeastSquares,
    "quadratic": lambda A, b: dfw.Quadratic(A.mT @ A, -(b @ A)),
    "smooth": lambda A, b: dfw.Smooth(square, A, b, shape=(N,)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", inside(1.0, F64))
def test_exact_fit_inside(name, objective, dtype):
    """d⟨v, x⟩/db is A⁻ᵀv, wherever in the set the fit is, and at every size of it."""
    for seed in range(6):
        gen = torch.Generator().manual_seed(seed)
        A = torch.randn(N, N, generator=gen, dtype=F64) + 3 * torch.eye(N, dtype=F64)
        fit = 0.2 * (torch.rand(N, generator=gen, dtype=F64) - 0.5)
        fit = (fit, fit * (torch.arange(N) < 2), 0 * fit)[seed % 3]
        v = torch.randn(N, generator=gen, dtype=F64)
        size = 4.0 ** (seed - 2)
        matrix = A.to(dtype)
        b = (size * (matrix.double() @ fit)).to(dtype).requires_grad_()
        sol = dfw.solve(OBJECTIVES[objective](matrix, b), inside(4 * size, dtype)[name])
        (got,) = torch.autograd.grad(sol.x @ v.to(dtype), b)
        want = torch.linalg.solve(matrix.double().mT, v)
        tol = 1e-9 if dtype == F64 else 1e-3
        assert (got.double() - want).norm() <= tol * want.norm(), (seed, got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "constraint",
    [
        dfw.L1Box(4.0, None, -1.0, 1.0),
        dfw.KSparse(3, 1.0),
        dfw.LpBall(1, 4.0),
        dfw.Product([dfw.KSparse(2, 1.0)], [3]),
    ],
    ids=lambda c: type(c).__name__,
)
def test_an_entry_at_zero_is_free_while_the_budget_is_slack(constraint, dtype):
    """The kink of |x| holds nothing as long as Σ|x| ≤ t does not."""
    q = torch.tensor([0.3, 0.0, -0.2], dtype=dtype, requires_grad=True)
    P = torch.eye(3, dtype=dtype)
    for objective in (dfw.Quadratic(None, q), dfw.Quadratic(P, q), dfw.LeastSquares(P, -q)):
        x = dfw.solve(objective, constraint).x
        jacobian = torch.stack([torch.autograd.grad(e, q, retain_graph=True)[0] for e in x])
        torch.testing.assert_close(jacobian, -P, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weak_force_counts_and_rounding_does_not(dtype):
    """A force of 10⁻⁴ of the gradient's terms holds, one of rounding does not."""
    eps = torch.finfo(dtype).eps
    for share, held in ((1e-4, True), (eps / 4, False)):
        q = torch.tensor([-1.0 - share, 0.25], dtype=dtype, requires_grad=True)
        x = dfw.solve(dfw.Quadratic(torch.eye(2, dtype=dtype), q), dfw.Box(-1.0, 1.0)).x
        (slope,) = torch.autograd.grad(x.sum(), q)
        assert slope.tolist() == [0.0 if held else -1.0, -1.0]
