"""What random problems brought to light, each as the class it is a member of."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from dfwlayer.certificate import certify
from dfwlayer.methods import Problem
from helpers import DTYPES, F64

DONE = (Status.CONVERGED, Status.ROUNDING_FLOOR)


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_matrix_without_entries_has_a_gradient(layout):
    A = getattr(torch.zeros(4, 3, dtype=F64), layout)().requires_grad_()
    sol = dfw.solve(dfw.LeastSquares(A, draw(2, 4)), dfw.Simplex())
    (grad,) = torch.autograd.grad(sol.x.sum(), A)
    assert not grad.to_dense().any()


def test_a_gradient_in_a_matrix_may_be_as_large_as_the_dtype_allows():
    """Half of the largest number twice is not infinity."""
    P = torch.eye(2, requires_grad=True)
    bound = dfw.Quadratic(P, torch.zeros(2)).bind(None).P
    large = torch.full((2, 2), 3e38)
    (grad,) = torch.autograd.grad(bound, P, large)
    torch.testing.assert_close(grad, large)


@pytest.mark.parametrize("unit", [1e-36, 1e-33, 1e-30, 1.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: dfw.L1Box(t, lower=-t, upper=t),
        lambda t: dfw.LpBall(1, t),
        lambda t: dfw.LpBall(2, t),
    ],
)
def test_small_points_are_moved_and_not_lost(make, unit):
    """Numbers of any size that are normal are brought back into a set by the same factor."""
    x = draw(5, 4, dtype=torch.float32) * unit
    inside = make(torch.tensor(0.5 * unit, dtype=torch.float32)).retract(x)
    want = make(torch.tensor(0.5)).retract(x / unit)
    torch.testing.assert_close(inside / unit, want, rtol=1e-5, atol=1.2e-38 / unit + 1e-7)
    assert inside.any(-1).all()


@pytest.mark.parametrize("method", ["dfw", "frank-wolfe", "auto"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e24])
def test_a_coordinate_without_a_weight_is_certified_in_any_units(method, steps, unit):
    """Its curvature times its slope may leave the range of the dtype."""
    R = draw(6, 6, dtype=torch.float32)
    P = unit * (R @ R.T + torch.eye(6))
    q = 1e-8 * unit * draw(3, 6, seed=1, dtype=torch.float32)
    weight = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 3.0])
    sol = dfw.solve(
        dfw.Quadratic(P, q), dfw.LpBall(3, 1e-8, weight), method=method, max_steps=steps
    )
    assert (sol.status != Status.UNBOUNDED).all()
    assert torch.isfinite(sol.gap).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e7])
def test_piecewise_linear_functions_over_permutations(dtype, size):
    """Without curvature a gradient step has no length; it must not become NaN."""
    F, d, c = (
        draw(7, 4, dtype=dtype),
        1e3 * draw(30, 7, seed=1, dtype=dtype),
        draw(4, seed=2, dtype=dtype),
    )

    def huber(x, F, d, c):
        r = x.flatten(-2) @ F.mT - d
        bent = torch.where(r.abs() < 0.3, 0.5 * r * r, 0.3 * (r.abs() - 0.15)).sum(-1)
        return size * (bent + (c * x.flatten(-2)).sum(-1))

    sol = dfw.solve(dfw.Smooth(huber, F, d, c, shape=(2, 2)), dfw.Birkhoff(2))
    assert all(int(s) in DONE for s in sol.status)


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize(
    "make", [lambda: dfw.LpBall(3, 4.0), lambda: dfw.KSparse(2, 4.0), lambda: dfw.LpBall(1.5, 9.0)]
)
def test_fits_that_are_exact_end_at_their_floor(make, power):
    """f tends to zero, slower than a quadratic for a fourth power; no relative gap gets small."""
    A = draw(8, 5) + 2 * torch.eye(8, 5, dtype=F64)
    x = torch.zeros(6, 5, dtype=F64)
    x[:, 0] = torch.linspace(-2, 2, 6, dtype=F64)
    fit = dfw.Smooth(lambda x, b: ((x @ A.mT - b) ** power).sum(-1), x @ A.mT, shape=(5,))
    sol = dfw.solve(fit, make())
    assert all(int(s) in DONE for s in sol.status)
    torch.testing.assert_close(sol.x, x, rtol=0, atol=1e-5 if power == 4 else 1e-10)


@pytest.mark.parametrize("method", ["frank-wolfe", "active-set"])
def test_a_wide_side_hides_no_slope(method):
    """A linear function over a box with a side of 1e8 along which it does not change."""
    c = torch.tensor([0.0, -0.85, 0.3, -0.46])
    upper = torch.tensor([1e8, 0.76, 1.3, 3.5])
    sol = dfw.solve(dfw.Smooth(lambda x: x @ c, shape=(4,)), dfw.Box(-upper, upper), method=method)
    torch.testing.assert_close(sol.value, -(c.abs() * upper).sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [2.0, float("inf")])
@pytest.mark.parametrize("seed", range(3))
def test_small_terms_are_solved_beside_large_ones(p, seed):
    """Some entries of q are zero, so that x there rests on terms a millionth of the others."""
    R = torch.randint(-2, 3, (6, 6), generator=torch.Generator().manual_seed(seed)).float()
    P, q = R @ R.T + 2 * torch.eye(6), draw(20, 6, seed=seed, dtype=torch.float32)
    q[:, ::2] = 0
    q = 1e6 * q.round()
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, 1.0))
    exact = dfw.solve(dfw.Quadratic(P.double(), q.double()), dfw.LpBall(p, 1.0), tol=1e-14)
    torch.testing.assert_close(sol.x.double(), exact.x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e13, 1e25])
def test_a_function_that_returns_vertices_gets_costs_it_can_compute_with(unit):
    """Costs times corners would leave the range of the set's dtype."""
    corners = unit * draw(9, 4, dtype=torch.float32)
    polytope = dfw.CustomSet(lambda c: corners[(c @ corners.mT).argmin(-1)], batched=True)
    near_linear = dfw.Quadratic(1e-3 / unit * torch.eye(4), draw(5, 4, seed=1, dtype=torch.float32))
    for method in ("frank-wolfe", "active-set"):
        sol = dfw.solve(near_linear, polytope, method=method)
        gradient = near_linear.gradient(sol.x).double()
        gap = (gradient * sol.x.double()).sum(-1) - (gradient @ corners.double().mT).amin(-1)
        terms = (gradient.abs() * corners.double().abs().amax(0)).sum(-1)
        assert (gap <= sol.gap.double() + 1e-5 * terms).all()


def test_a_function_that_does_not_minimise_proves_nothing():
    """Its vertex is worse than x, which a true one cannot be."""
    q = draw(3, 4)
    liar = dfw.CustomSet(torch.sign, batched=True)  # the worst corner of the cube
    f, cube = dfw.Quadratic(None, q).bind(3), liar.bind((4,), F64, q.device)
    x = -0.5 * torch.sign(q)
    open_ended = torch.full((3,), int(Status.MAX_STEPS))
    problem = Problem(f, cube, None)
    gap, status = certify(problem, x, *f.value_and_gradient(x), open_ended, tol=1.0)
    assert torch.isinf(gap).all()
    assert (status == Status.OUT_OF_RANGE).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_functions_are_convex_on_curved_sets(dtype):
    """What is left of a slope along a curved face is rounding, and its curvature means nothing."""
    c = torch.randint(-3, 4, (40, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    linear = dfw.Smooth(lambda x, c: (c * x).sum(-1), c, shape=(9,))
    for ball in (
        dfw.GroupBall([[1, 3, 6], [0, 5], [4, 7], [2, 8]], 50.0),
        dfw.LpBall(2, 50.0),
        dfw.LpBall(3, 50.0),
        dfw.Ellipsoid(torch.eye(9, dtype=dtype), 50.0),
    ):
        sol = dfw.solve(linear, ball)
        assert all(int(s) in DONE for s in sol.status)
