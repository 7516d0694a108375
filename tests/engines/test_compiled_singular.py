"""A P that is singular: a solution on a face where it is not is found, and is the only one."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer as dfw
from compiled_cases import F32, F64, attempted, close
from dfwlayer.engines import compiled
from dfwlayer.engines.compiled import pool
from dfwlayer.engines.compiled.kernels.dense import kernel, leave
from dfwlayer.engines.compiled.kernels.numbers import symmetric


@numba.njit
def without(L, n, index, at, cos, sin):
    leave(L, n, index, at, cos, sin)


@kernel
def mirrors(P, memory):
    return symmetric(P, 2.0**-52, memory)[1]


@numba.njit
def is_symmetric(P):
    return mirrors(P, np.empty_like(P))


def margins(n, features, seed, spread=1.0):
    """The dual of a support vector machine with a linear kernel, whose rank is that of the data."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, features, dtype=F64, generator=generator)
    noise = spread * torch.randn(n, dtype=F64, generator=generator)
    y = (X.sum(-1) / features**0.5 + noise).sign()
    K = (y[:, None] * X) @ (y[:, None] * X).mT
    return dfw.Quadratic(0.5 * (K + K.mT), -torch.ones(n, dtype=F64)), y


def repeated(m, n, dtype, seed):
    """Least squares most of whose columns stand there several times, some with another sign."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(m, n, dtype=F64, generator=generator)
    signs = torch.randn(n, dtype=F64, generator=generator).sign()
    A = torch.cat((A, A * signs, A[:, : n // 2]), -1)
    b = A[:, :5].sum(-1) + 0.3 * torch.randn(m, dtype=F64, generator=generator)
    return A.to(dtype), b.to(dtype)


def at_once(*given, **options):
    found = attempted(*given, **options)
    assert found is not None
    assert found.left is None
    assert found.solution.status == dfw.Status.CONVERGED
    return found.solution


@pytest.mark.parametrize("cap", [0.1, 10.0, 1000.0])
@pytest.mark.parametrize(("n", "features"), [(60, 4), (150, 12), (250, 30)])
def test_the_dual_of_a_linear_machine(n, features, cap):
    """With a cap that few reach, one more are free than P has rank: the plane makes up for it."""
    objective, y = margins(n, features, n, 0.05 if cap > 100 else 1.0)
    q = objective.q.clone().requires_grad_()
    objective = dfw.Quadratic(objective.P, q)
    level = torch.zeros((), dtype=F64, requires_grad=True)
    constraint = dfw.PlaneCut(dfw.Box(torch.zeros(n, dtype=F64), cap), y, level)
    v = torch.linspace(-1, 1, n, dtype=F64)
    sol = at_once(objective, constraint, tol=1e-9)
    own = torch.autograd.grad(sol.x @ v, (q, level))
    with compiled.using(False):
        right = dfw.solve(objective, constraint, tol=1e-12)
        wanted = torch.autograd.grad(right.x @ v, (q, level))
    assert abs(sol.value - right.value) <= 1e-9 * right.value.abs()
    assert float(constraint.violation(sol.x.detach())) <= 1e-12
    close(sol.x, right.x, 1e-6 * float(right.x.detach().abs().max()))
    for mine, theirs in zip(own, wanted, strict=True):
        close(mine, theirs, 1e-5 * float(theirs.abs().max() + 1))


@pytest.mark.parametrize("cap", [0.1, 10.0, 1000.0])
def test_duals_on_whose_face_the_rank_is_known_at_the_end_only(cap):
    """Where the walk begins before a face was tried, nobody knows there that P is singular."""
    for seed in range(20):
        objective, y = margins(40, 3, seed, 0.05 if cap > 100 else 1.0)
        box = dfw.Box(torch.zeros(40, dtype=F64), cap)
        at_once(objective, dfw.PlaneCut(box, y, torch.zeros((), dtype=F64)), tol=1e-9)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("shape", [(60, 20), (100, 40), (40, 60), (60, 300)])
def test_columns_that_are_there_more_than_once(shape, dtype):
    """One of them is taken; the others, whose multipliers are tied, stay out with a slope of 0."""
    A, b = repeated(*shape, dtype, 3)
    b.requires_grad_()
    ball = dfw.LpBall(1, 3.0)
    sol = at_once(dfw.LeastSquares(A, b), ball)
    v = torch.linspace(-1, 1, len(b), dtype=dtype)
    (own,) = torch.autograd.grad(A @ sol.x @ v, b)  # A x is unique
    wide = b.detach().double().requires_grad_()
    with compiled.using(False):
        right = dfw.solve(dfw.LeastSquares(A.double(), wide), ball, tol=1e-12)
        (wanted,) = torch.autograd.grad(A.double() @ right.x @ v.double(), wide)
    eps = torch.finfo(dtype).eps
    close((A @ sol.x).double(), A.double() @ right.x, 1e3 * eps * float(b.detach().norm()))
    close(own.double(), wanted, 1e4 * eps * float(wanted.abs().max()))


def test_columns_beside_a_pool_that_are_there_more_than_once(monkeypatch):
    """One coordinate joins at a time, so that the others that are like it are judged outside."""
    for name, value in {"BLOCK": 1, "LARGE_BLOCK": 1, "SHARE": 10**9}.items():
        monkeypatch.setattr(pool, name, value)
    A, b = repeated(60, 300, F64, 3)
    sol = at_once(dfw.LeastSquares(A, b), dfw.LpBall(1, 3.0))
    with compiled.using(False):
        right = dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, 3.0), tol=1e-12)
    close(A @ sol.x, A @ right.x, 1e-10)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(3, 60),
    st.integers(1, 12),
    st.integers(0, 10**6),
    st.sampled_from(["box", "ball", "plane"]),
)
def test_any_rank_is_right_or_left(n, rank, seed, kind):
    """Whatever is answered has no feasible way down: P of any rank below n, sets of three kinds."""
    generator = torch.Generator().manual_seed(seed)
    R = torch.randn(min(rank, n - 1), n, dtype=F64, generator=generator)
    P, q = R.mT @ R, torch.randn(n, dtype=F64, generator=generator)
    a = torch.randn(n, dtype=F64, generator=generator)
    sets = {
        "box": dfw.Box(-1.0, 0.5),
        "ball": dfw.LpBall(1, 2.0, 0.5 + a.abs()),
        "plane": dfw.PlaneCut(dfw.Box(-1.0, 0.5), a, 0.1),
    }
    objective, constraint = dfw.Quadratic(0.5 * (P + P.mT), q), sets[kind]
    found = attempted(objective, constraint, tol=1e-7)
    if found is None or found.left is not None:
        return
    sol = found.solution
    with compiled.using(False):
        right = dfw.solve(objective, constraint, tol=1e-10)
    size = 1e-7 * (right.value.abs() + 1)
    assert abs(sol.value - right.value) <= size
    assert float(constraint.violation(sol.x)) <= 1e-12


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8, 9, 13, 22])
def test_a_factor_that_a_coordinate_leaves(n):
    draw = np.random.default_rng(n)
    part = draw.standard_normal((n, n))
    P = part @ part.T + np.eye(n)
    for at in range(n):
        L, index = np.tril(np.linalg.cholesky(P)), np.arange(n)
        without(L, n, index, at, np.empty(n), np.empty(n))
        rest = np.delete(np.arange(n), at)
        assert (index[: n - 1] == rest).all()
        wanted = np.linalg.cholesky(P[np.ix_(rest, rest)]) if n > 1 else L[:0, :0]
        np.testing.assert_allclose(np.tril(L[: n - 1, : n - 1]), wanted, atol=1e-12 * P.max())


@pytest.mark.parametrize("n", [65, 100])
@pytest.mark.parametrize("where", [(1, 0), (40, 3), (64, 63)])
def test_what_rounding_made_of_symmetry_is_averaged(n, where):
    """In one entry of thousands, as well: f has the symmetric part of P for a Hessian."""
    generator = torch.Generator().manual_seed(n)
    R = torch.randn(n, n, dtype=F64, generator=generator)
    P, q = R.mT @ R / n + torch.eye(n, dtype=F64), torch.randn(n, dtype=F64, generator=generator)
    P = 0.5 * (P + P.mT)
    skew = P.clone()
    skew[where] += 2e-7
    even = 0.5 * (skew + skew.mT)
    x = at_once(dfw.Quadratic(skew, q), dfw.Box(-1.0, 1.0)).x
    close(x, at_once(dfw.Quadratic(even, q), dfw.Box(-1.0, 1.0)).x, 1e-12)
    assert (x - at_once(dfw.Quadratic(P, q), dfw.Box(-1.0, 1.0)).x).abs().max() > 1e-10


def test_what_is_not_symmetric_is_told():
    P = np.eye(100)
    P[70, 2] = 1e-3
    assert is_symmetric(np.eye(100))
    assert not is_symmetric(P)
