"""What random problems found where f* is zero, or all but zero beside its terms."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled

F64 = torch.float64
ENGINES = [pytest.param(True, id="compiled"), pytest.param(False, id="tensors")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def arrived(sol):
    return (sol.status == dfw.Status.CONVERGED) | (sol.status == dfw.Status.ROUNDING_FLOOR)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [1e-25, 1.0, 1e25])
@pytest.mark.parametrize("value", [1e-15, 1.0, 1e15])
def test_a_linear_function_that_is_least_at_zero(engine, length, value):
    """x is zero and f has no curvature: the set is all there is to measure a slack by."""
    rows, n = 24, 5
    q = torch.zeros(rows, n, dtype=F64)
    slopes = value / length * (1 + torch.rand(rows, dtype=F64))
    q[torch.arange(rows), torch.arange(rows) % n] = slopes
    lower = torch.where(q > 0, 0, -torch.rand(rows, n, dtype=F64) * length)
    upper = (1 + torch.rand(rows, n, dtype=F64)) * length
    radius = (1 + torch.rand(rows, dtype=F64)) * length
    P = torch.zeros(rows, n, n, dtype=F64)
    cut = dfw.Intersection(dfw.LpBall(2, radius), dfw.Box(lower, upper))
    with compiled.using(engine):
        sol = dfw.solve(dfw.Quadratic(P, q), cut)
    assert arrived(sol).all()
    assert (sol.value.abs() <= 1e-14 * value).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["squares", "quadratic", "smooth"])
def test_fits_that_a_ball_leaves_out_by_little(engine, kind):
    """The force that keeps x inside is of the size of ∇f's rounding, and needed all the same."""
    rows, n = 48, 3
    A, x = torch.randn(rows, n + 1, n, dtype=F64), torch.randn(rows, n, dtype=F64)
    b = (A @ x.unsqueeze(-1)).squeeze(-1)
    off = 10 ** (-9 - 6 * torch.rand(rows, dtype=F64))
    radius = x.norm(dim=-1) * (1 - off)
    reach = torch.rand(2, rows, n, dtype=F64)
    cut = dfw.Intersection(dfw.LpBall(2, radius), dfw.Box(x - reach[0], x + reach[1]))
    if kind == "squares":
        f = dfw.LeastSquares(A, b)
    elif kind == "quadratic":
        f = dfw.Quadratic(A.mT @ A, -(A.mT @ b.unsqueeze(-1)).squeeze(-1))
    else:
        f = dfw.Smooth(lambda x, A, b: 0.5 * (torch.linalg.vecdot(A, x.unsqueeze(-2)) - b)
                       .square().sum(-1), A, b, shape=(n,))  # fmt: skip
    with compiled.using(engine):
        sol = dfw.solve(f, cut)
    assert arrived(sol).all()
    moved = (sol.x - x).norm(dim=-1)
    sizes = torch.linalg.svdvals(A)
    condition = (sizes[:, 0] / sizes[:, -1]) ** 2
    assert (moved <= condition * (off + 1e-14) * x.norm(dim=-1)).all()


@pytest.mark.parametrize("kind", ["squares", "quadratic"])
@pytest.mark.parametrize("condition", [1e5, 1e7, 1e9])
def test_ill_conditioned_fits_on_the_edge_of_a_ball_and_a_box(kind, condition):
    """Steps go to and fro between the inside of the ball and its face, along which f hardly bends.

    Compiled code has other steps for these.
    """
    rows, n = 32, 7
    Q = torch.linalg.qr(torch.randn(rows, n, n, dtype=F64))[0]
    A = condition ** (-0.5 * torch.linspace(0, 1, n, dtype=F64)).unsqueeze(-1) * Q
    x = torch.randn(rows, n, dtype=F64)
    b = (A @ x.unsqueeze(-1)).squeeze(-1)
    lower, upper = x - torch.rand(rows, n, dtype=F64), x + torch.rand(rows, n, dtype=F64)
    cut = dfw.Intersection(dfw.LpBall(2, x.norm(dim=-1) * (1 - 1e-6)), dfw.Box(lower, upper))
    f = dfw.LeastSquares(A, b)
    if kind == "quadratic":
        f = dfw.Quadratic(A.mT @ A, -(A.mT @ b.unsqueeze(-1)).squeeze(-1))
    with compiled.using(False):
        sol = dfw.solve(f, cut)
    assert arrived(sol).all()


@pytest.mark.parametrize("value", [1.0, 2.0**50, 2.0**-50])
def test_a_linear_function_whose_terms_cancel(value):
    """f* = 0 is a sum of terms that are not: what rounding leaves of these is all of the gap."""
    v = torch.randint(-3, 4, (64, 2), dtype=F64)
    v[(v == 0).all(-1)] = 1.0
    c = (v.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)  # vvᵀ, whose least eigenvalue is zero
    k = torch.randint(-3, 4, (64, 1), dtype=F64)
    c = c + k * torch.tensor([0.0, 1.0, -1.0, 0.0], dtype=F64)  # nothing beside a symmetric x
    f = dfw.Smooth(lambda x, c: value * (c * x).sum(-1), c, shape=(4,))
    sol = dfw.solve(f, dfw.Spectraplex(1.0))
    assert arrived(sol).all()
    assert (sol.value.abs() <= 1e-14 * value * c.abs().sum(-1)).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [1e-25, 1.0, 1e25])
def test_many_fits_of_which_a_ball_keeps_one(engine, length):
    """Forces are lost in rounding and x is hardly told, but f is no higher than it may be."""
    rows, m, n = 40, 3, 5
    A = torch.randint(-3, 4, (m, n), dtype=F64)
    A[:, :m] += 4 * torch.eye(m, dtype=F64)
    b = torch.randint(-3, 4, (rows, m), dtype=F64)
    x = b @ torch.linalg.pinv(A).mT  # the shortest fit
    off = torch.where(torch.arange(rows) % 2 == 0, 0, 10 ** (-9 - 6 * torch.rand(rows, dtype=F64)))
    radius = length * x.norm(dim=-1) * (1 + off)
    reach = length * (0.01 + torch.rand(2, rows, n, dtype=F64))
    cut = dfw.Intersection(
        dfw.LpBall(2, radius), dfw.Box(length * x - reach[0], length * x + reach[1])
    )
    with compiled.using(engine):
        sol = dfw.solve(dfw.LeastSquares(A / length, b), cut)
    assert arrived(sol).all()
    assert (sol.value <= 1e-15 * b.square().sum(-1)).all()
    assert (sol.gap <= 1e-13 * b.square().sum(-1)).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_zero_that_nothing_holds_is_zero(engine):
    """x2 would be zero without its bound, and corrections make it smaller for ever."""
    a = torch.arange(1.0, 13.0, dtype=F64)
    P = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=F64) * a.reshape(-1, 1, 1)
    q = torch.stack((3 * a, torch.zeros_like(a)), -1)
    G = torch.tensor([[-0.25, 0.0], [0.0, -1.0], [0.25, 0.25]], dtype=F64)
    h = torch.tensor([0.0, 0.0, 0.0375], dtype=F64)
    with compiled.using(engine):
        sol = dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(G=G, h=h))
    assert (sol.x == 0).all()
    assert (sol.value == 0).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("squared", [False, True])
def test_zero_in_the_corner_of_a_cone(squared, dtype, compiled):
    """Interior-point steps end next to zero, where forces and slacks are both all but zero."""
    G = [[-0.5, 1.0, 0.5], [0.0, -0.25, 0.0], [0.0, -0.25, -0.25], [4.0, 0.0, 0.0]]
    A = torch.tensor([[1.7642987966537476, 0.0, -0.845552921295166]], dtype=dtype)
    zero = torch.zeros(3, dtype=dtype)
    f = dfw.Quadratic(A.mT @ A, zero) if squared else dfw.LeastSquares(A, zero[:1])
    rows = dfw.Polyhedron(
        G=torch.tensor(G, dtype=dtype), h=torch.tensor([0.0, 0.0, 0.0, 6.0], dtype=dtype)
    )
    with dfw.engines.compiled.using(compiled):
        sol = dfw.solve(f, rows)
    assert int(sol.status) in (dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR)
    assert float(sol.value) <= torch.finfo(dtype).eps ** 2
