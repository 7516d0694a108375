"""The same problem in other units has the same solution, status and gradient.

f(x) = k F(x/s) over s·S has the solution s·y with y that of F over S. Powers of two change no digit
of the data, so that everything but rounding of what is beyond the range must be the same.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dfwlayer as dfw
from dfwlayer import Status
from dfwlayer.engines import careful
from helpers import DTYPES, F64

N = 5
SETS = {
    **{f"p={p:g}": lambda s, p=p, **_: dfw.LpBall(p, s) for p in (1, 1.5, 2, 3, math.inf)},
    "weighted": lambda s, w, **_: dfw.LpBall(1, s, w),
    "Box": lambda s, **_: dfw.Box(-0.4 * s, 0.5 * s),
    "Simplex": lambda s, **_: dfw.Simplex(s),
    "CappedSimplex": lambda s, **_: dfw.CappedSimplex(s, 0.4 * s),
    "L1Box": lambda s, w, **_: dfw.L1Box(s, w, -0.4 * s, 0.4 * s),
    "KSparse": lambda s, **_: dfw.KSparse(2, 0.5 * s),
    "PlaneCut": lambda s, w, **_: dfw.PlaneCut(dfw.Box(-s, s), w, 0.5 * s),
    "GroupBall": lambda s, **_: dfw.GroupBall([[0, 1], [2, 3, 4]], s),
    "Ellipsoid": lambda s, A, **_: dfw.Ellipsoid(A, None, s),
    "NuclearBall": lambda s, **_: dfw.NuclearBall(s, (1, 5)),
    "Product": lambda s, **_: dfw.Product([dfw.LpBall(1, s), dfw.Simplex(s)], [2, 3]),
    "around a centre": lambda s, w, **_: dfw.LpBall(2, s, centre=0.3 * s * w),
}


def square(x, A, b, k, s):
    return 0.5 * k * (((x / s) @ A.mT - b) ** 2).sum(-1)


OBJECTIVES = {
    "quadratic": lambda A, b, k, s: dfw.Quadratic(A.mT @ A * (k / s / s), -(b @ A) * (k / s)),
    "least squares": lambda A, b, k, s: dfw.LeastSquares(A * (k**0.5 / s), b * k**0.5),
    "smooth": lambda A, b, k, s: dfw.Smooth(square, A, b, k, s, shape=(N,)),
}


def solved(name, objective, dtype, seed, k, s):
    """x/s, its gradient in b, and the status."""
    gen = torch.Generator().manual_seed(seed)
    A = (torch.randn(N, N, generator=gen, dtype=F64) + 2 * torch.eye(N, dtype=F64)).to(dtype)
    b = (4 * torch.randn(N, generator=gen, dtype=F64)).to(dtype).requires_grad_()
    w = (torch.rand(N, generator=gen, dtype=F64) + 0.5).to(dtype)
    sol = dfw.solve(OBJECTIVES[objective](A, b, k, s), SETS[name](s, w=w, A=A))
    (slope,) = torch.autograd.grad((sol.x / s).sum(), b)
    return sol.x.detach() / s, slope, Status(int(sol.status)), sol


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", SETS)
def test_other_units(name, objective, dtype):
    x, slope, status, _ = solved(name, objective, dtype, 1, 1.0, 1.0)
    assert status == Status.CONVERGED
    largest = 100 if dtype == torch.float32 else 300
    # of f, and of x; P, q and f itself have to be numbers of the dtype
    for f_bits, x_bits in ((-80, 0), (84, 0), (84, 30), (-80, -30), (0, -44), (20, 50), (90, 80)):
        if max(abs(f_bits - 2 * x_bits), abs(f_bits)) > largest:
            continue
        other = solved(name, objective, dtype, 1, 2.0**f_bits, 2.0**x_bits)
        tol = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else 1e-9}
        torch.testing.assert_close(other[0], x, **tol)
        torch.testing.assert_close(other[1], slope, **tol)
        assert other[2] == Status.CONVERGED, (f_bits, x_bits, other[3])


@given(st.integers(-25, 25), st.integers(-25, 25), st.sampled_from(sorted(SETS)), st.booleans())
def test_decimal_units(f_power, x_power, name, single):
    dtype = torch.float32 if single else F64
    if single and max(abs(f_power - 2 * x_power), abs(f_power)) > 30:
        return
    x, slope, _, _ = solved(name, "quadratic", dtype, 2, 1.0, 1.0)
    other = solved(name, "quadratic", dtype, 2, 10.0**f_power, 10.0**x_power)
    tol = {"rtol": 0, "atol": 1e-4 if single else 1e-7}
    torch.testing.assert_close(other[0], x, **tol)
    torch.testing.assert_close(other[1], slope, **tol)
    assert other[2] == Status.CONVERGED


def test_a_problem_of_another_size_leaves_its_neighbours_alone():
    """Rows of all sizes in one batch, each as if it were alone."""
    powers = torch.tensor([0, -25, 18, 3, -12, 12])
    q = (torch.tensor([3.0, -1.0, 0.5]) * 10.0 ** powers[:, None]).requires_grad_()
    P = torch.diag(torch.tensor([1.0, 2.0, 3.0])) + 0.1
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 10.0 ** powers.float()))
    assert sol.converged.all()
    (together,) = torch.autograd.grad(sol.x.sum(), q)
    for i, row in enumerate(q.detach()):
        row.requires_grad_()
        alone = dfw.solve(dfw.Quadratic(P, row), dfw.LpBall(1, 10.0 ** float(powers[i])))
        torch.testing.assert_close(sol.x[i], alone.x, rtol=1e-6, atol=0)
        (slope,) = torch.autograd.grad(alone.x.sum(), row)
        torch.testing.assert_close(together[i], slope)


def test_a_value_beyond_the_largest_number_is_no_proof():
    """x is right, but neither f nor the gap can be said in float32."""
    P, q = 1e30 * torch.eye(3), torch.tensor([-3e38, 1e38, 0.0])
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2, 1e8))
    assert sol.status == Status.OUT_OF_RANGE
    torch.testing.assert_close(
        sol.x, torch.tensor([0.9487e8, -0.3162e8, 0.0]), rtol=1e-3, atol=1e-3
    )


def test_float32_is_refined_in_float64():
    """What its digits cannot find is found: the solution, rounded, and its certificate."""
    gen = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(20, 20, generator=gen, dtype=F64))[0]
    P64 = U @ torch.diag(torch.logspace(-5, 0, 20, dtype=F64)) @ U.mT
    P = (0.5 * (P64 + P64.mT)).float()
    q = torch.randn(20, generator=gen)
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 50.0))
    exact = dfw.solve(dfw.Quadratic(P.double(), q.double()), dfw.LpBall(1, 50.0), tol=1e-12)
    assert sol.converged
    torch.testing.assert_close(sol.x.double(), exact.x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_refined_beside_a_problem_out_of_range(seed, monkeypatch):
    """Of one batch some problems need more digits and others another range; both get them.

    With tol=0 every float32 problem that ends at its floor goes on in float64.
    """
    in_units, rows = careful._in_units, []

    def counted(run, task):
        rows.append(len(task.point))
        return in_units(run, task)

    monkeypatch.setattr(careful, "_in_units", counted)
    gen = torch.Generator().manual_seed(seed)
    R = torch.randn(8, 8, generator=gen)
    P, q = R @ R.mT + torch.eye(8), torch.randn(2, 8, generator=gen)
    far = torch.tensor([1.0, 1e15])
    alone = dfw.solve(dfw.Quadratic(P, q[:1]), dfw.LpBall(2, 0.1), tol=0.0)
    refined = len(rows)
    both = dfw.solve(dfw.Quadratic(P, q * far[:, None]), dfw.LpBall(2, 0.1 * far), tol=0.0)
    assert len(rows) - refined >= refined + 1
    torch.testing.assert_close(both.x[:1], alone.x, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["GroupBall", "Ellipsoid", "LpBall", "L1Box"])
def test_refined_and_isolated_problems_keep_all_gradients(name):
    """A second solve, or a bad neighbour, costs no parameter its gradient."""
    gen = torch.Generator().manual_seed(0)
    R = torch.randn(N, N, generator=gen, dtype=F64)
    P, q = R.mT @ R + torch.eye(N, dtype=F64), 4 * torch.randn(3, N, generator=gen, dtype=F64)
    count = {"GroupBall": (2,), "Ellipsoid": (N, N)}.get(name, (N,))
    given = torch.rand(3, *count, generator=gen, dtype=F64) + 0.5
    if name == "Ellipsoid":
        given = given + 3 * torch.eye(N, dtype=F64)

    def gradient(dtype, tol, bad):
        own = given.to(dtype).requires_grad_()
        linear = q.to(dtype, copy=True)
        linear[1] = linear[1] * (math.nan if bad else 1)
        constraint = {
            "GroupBall": lambda: dfw.GroupBall([[0, 1], [2, 3, 4]], 0.5, own),
            "Ellipsoid": lambda: dfw.Ellipsoid(own, None, 0.5),
            "LpBall": lambda: dfw.LpBall(1.5, 0.5, own),
            "L1Box": lambda: dfw.L1Box(0.5, own, -0.3, 0.3),
        }[name]()
        x = dfw.solve(dfw.Quadratic(P.to(dtype), linear), constraint, tol=tol).x
        (found,) = torch.autograd.grad(x[0].sum() + x[2].sum(), own)
        return found.double()

    exact = gradient(F64, 1e-12, bad=False)
    assert exact[0].abs().max() > 1e-3
    for dtype, tol, bad in ((F64, 1e-12, True), (torch.float32, 0.0, False)):
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
        torch.testing.assert_close(gradient(dtype, tol, bad), exact, **close)


def test_a_second_solve_has_the_steps_that_are_left():
    """Both together take no more than were allowed, each problem for itself."""
    gen = torch.Generator().manual_seed(4)
    U = torch.linalg.qr(torch.randn(6, 12, 12, generator=gen, dtype=F64))[0]
    spectra = torch.stack([torch.logspace(-k, 0, 12, dtype=F64) for k in range(1, 7)])
    P = U @ torch.diag_embed(spectra) @ U.mT
    P = (0.5 * (P + P.mT)).float()
    q = torch.randn(6, 12, generator=gen)
    for max_steps in (12, 30, 60, 1000):
        settings = {"tol": 1e-9, "max_steps": max_steps}
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 20.0), **settings)
        assert (sol.num_steps <= max_steps).all()
        for i in range(6):
            alone = dfw.solve(dfw.Quadratic(P[i], q[i]), dfw.LpBall(1, 20.0), **settings)
            assert alone.num_steps <= max_steps
