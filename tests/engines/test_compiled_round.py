"""Projections onto ℓ2 balls of one weight, which compiled code has a formula for."""

from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer
from dfwlayer.engines import compiled
from dfwlayer.engines.base import Arguments
from dfwlayer.methods.settings import check_settings
from dfwlayer.solution import Status

pytest.importorskip("numba")
engine = import_module("dfwlayer.engines.compiled.engine")
SETTINGS = check_settings(
    "auto", "auto", 1e-5, 1000, None, None, True, preferred="projected-newton"
)


def _both(q, v, ball, on):
    """x, value, gap, gradients in q, radius and weight, with compiled code or without."""
    learned = [t.detach().requires_grad_() for t in (q, ball.radius, ball.weight)]
    body = dfwlayer.LpBall(2, *learned[1:])
    with compiled.using("wait" if on else "off"):
        sol = dfwlayer.solve(dfwlayer.Quadratic(None, learned[0]), body, tol=1e-12)
        pulled = torch.autograd.grad((sol.x * v).sum(), learned)
    return sol, pulled


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 5),
    n=st.integers(1, 12),
    scale=st.sampled_from([1e-8, 1.0, 1e8]),
    even=st.booleans(),
    shared=st.booleans(),
)
def test_projections_are_those_of_tensor_operations(seed, batch, n, scale, even, shared):
    rng = torch.Generator().manual_seed(seed)
    q = scale * torch.randn(batch, n, generator=rng, dtype=torch.float64)
    v = torch.randn(batch, n, generator=rng, dtype=torch.float64)
    # one weight and several side by side: each row of a batch goes its own way
    weight = 0.5 + torch.rand(batch, 1, generator=rng, dtype=torch.float64).expand(batch, n)
    if not even:
        weight = weight * (1 + torch.arange(batch)[:, None] % 2 * torch.arange(n) / n)
    weight = weight[0].clone() if shared else weight.clone()
    radius = scale * 3 * torch.rand(batch, generator=rng, dtype=torch.float64) + 1e-3 * scale
    ball = dfwlayer.LpBall(2, radius, weight)
    ours, pulled = _both(q, v, ball, True)
    theirs, expected = _both(q, v, ball, False)
    assert torch.equal(ours.status, theirs.status)
    torch.testing.assert_close(ours.x, theirs.x, rtol=1e-10, atol=1e-12 * scale)
    torch.testing.assert_close(ours.value, theirs.value, rtol=1e-10, atol=1e-20)
    for a, b in zip(pulled, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10 * max(scale, 1.0))
    assert bool(((weight * ours.x).norm(dim=-1) <= radius * (1 + 4e-16 * n)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_answered_without_tensor_operations(dtype):
    """Inside, outside, beyond the range of squares, and NaN, of which each is judged alone."""
    q = torch.tensor([[3.0, 4.0], [0.1, 0.0], [0.0, 0.0], [torch.nan, 1.0], [3e35, 4e35]]).to(dtype)
    arguments = Arguments(dfwlayer.Quadratic(None, q), dfwlayer.LpBall(2, 1.0), None, None)
    with compiled.using("wait"):
        found = engine.attempt(arguments, SETTINGS)
        whole = dfwlayer.solve(arguments.objective, arguments.constraint)
    assert found is not None
    assert found.left is not None
    assert found.left.tolist() == [False, False, False, True, False]
    expected = torch.tensor([[-0.6, -0.8], [-0.1, 0.0], [0.0, 0.0], [0.0, 0.0], [-0.6, -0.8]])
    torch.testing.assert_close(found.solution.x, expected.to(dtype), rtol=1e-6, atol=0)
    assert whole.status.tolist() == [0, 0, 0, int(Status.NONFINITE), 0]
    assert bool(whole.x[3].isnan().all())


def test_a_point_next_to_the_boundary_is_doubted():
    """There the solution has two derivatives, and tensor operations decide."""
    q = torch.tensor([-0.6, -0.8], dtype=torch.float64)
    arguments = Arguments(dfwlayer.Quadratic(None, q), dfwlayer.LpBall(2, 1.0), None, None)
    with compiled.using("wait"):
        found = engine.attempt(arguments, SETTINGS)
        assert found is None
        sol = dfwlayer.solve(arguments.objective, arguments.constraint)
    torch.testing.assert_close(sol.x, -q)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(2, 30),
    digits=st.integers(1, 5),
    force=st.integers(0, 6),
    as_matrix=st.booleans(),
)
def test_ill_conditioned_fits_are_answered_to_their_digits(seed, n, digits, force, as_matrix):
    """A = UΣVᵀ gives x for any λ, and so the radius for which that is the multiplier.

    P = AᵀA has lost twice as many digits as A, so it is asked for less.
    """
    rng = torch.Generator().manual_seed(seed)
    U, V = (torch.randn(8, n, n, generator=rng, dtype=torch.float64) for _ in range(2))
    U, V = torch.linalg.qr(U).Q, torch.linalg.qr(V).Q
    steepness = torch.logspace(0, -digits, n, dtype=torch.float64)
    multiplier = 10.0**-force
    b = torch.randn(8, n, generator=rng, dtype=torch.float64)
    along = (U.mT @ b.unsqueeze(-1)).squeeze(-1) * steepness
    x = (V @ (along / (steepness**2 + multiplier)).unsqueeze(-1)).squeeze(-1)
    A = U * steepness @ V.mT
    if as_matrix:
        P, q = A.mT @ A, -(A.mT @ b.unsqueeze(-1)).squeeze(-1)
        objective = dfwlayer.Quadratic(0.5 * (P + P.mT), q)
    else:
        objective = dfwlayer.LeastSquares(A, b)
    arguments = Arguments(objective, dfwlayer.LpBall(2, x.norm(dim=-1)), None, None)
    least = multiplier + float(steepness[-1]) ** 2
    lost = 1e-15 * n / least if as_matrix else 1e-14 * n / least**0.5
    if lost > 1e-7:
        return  # too few digits are left of x for a gap of 1e-5
    with compiled.using("wait"):
        found = engine.attempt(arguments, SETTINGS)
    assert found is not None
    assert found.left is None or not bool(found.left.any())
    error = (found.solution.x - x).norm(dim=-1) / x.norm(dim=-1)
    assert float(error.max()) < 100 * lost + 1e-13
