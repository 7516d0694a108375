"""Solutions that are not unique, and values that are zero, over polyhedra in compiled code."""

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F64, answers, attempted, close, leaf
from dfwlayer.engines import compiled
from polyhedron_cases import problem, random


def solved(objective, constraint):
    found = attempted(objective, constraint, tol=1e-9)
    assert found is not None
    assert found.left is None
    return found.solution


def test_the_solutions_are_the_side_of_a_square():
    """f = ½(x₀ − 1)²: x₁ is any number of the square, and does not move."""
    P = leaf(torch.diag(torch.tensor([1.0, 0.0], dtype=F64)))
    q = leaf(torch.tensor([-1.0, 0.0], dtype=F64))
    h = leaf(torch.full((2,), 5.0, dtype=F64))
    G = torch.eye(2, dtype=F64)
    sol = solved(*problem(P, q, lower=0.0, upper=2.0, G=G, h=h))
    assert sol.status == dfw.Status.CONVERGED
    assert abs(sol.x[0] - 1) < 1e-15
    assert 0 <= sol.x[1] <= 2
    of_first, of_second = (torch.autograd.grad(x, q, retain_graph=True)[0] for x in sol.x)
    close(of_first, torch.tensor([-1.0, 0.0], dtype=F64), 1e-15)
    assert not of_second.any()


def split(seed, lead=()):
    """A problem in x = y − z with y, z ≥ 0, of which x alone is told, and the one in x."""
    parts = random(seed, 6, 5, 2, lead, box=False)
    mirror = torch.cat((torch.eye(6, dtype=F64), -torch.eye(6, dtype=F64)), -1)
    wide = {"P": mirror.mT @ parts["P"] @ mirror, "q": parts["q"] @ mirror}
    wide |= {name: parts[name] @ mirror for name in ("G", "A")}
    wide |= {name: parts[name] for name in ("h", "b")}
    return parts, wide, mirror


@pytest.mark.parametrize("seed", range(3))
def test_what_is_unique_is_found_and_differentiated(seed):
    parts, wide, mirror = split(seed, (3,))
    direct, both = solved(*problem(**parts)), solved(*problem(**wide, lower=0.0))
    x = both.x @ mirror.mT
    close(x, direct.x, 1e-9)
    close(both.value, direct.value, 1e-9)
    v = torch.cos(torch.arange(18, dtype=F64)).reshape(3, 6)
    names = list(parts)
    own = torch.autograd.grad((v * x).sum(), [parts[name] for name in names])
    right = torch.autograd.grad((v * direct.x).sum(), [parts[name] for name in names])
    for one, expected in zip(own, right, strict=True):
        close(one, expected, 1e-6)


def test_equations_that_depend_on_each_other_where_f_is_flat_are_left():
    """Neither x nor what they carry is unique, which matters where a gradient is asked for."""
    P = torch.diag(torch.tensor([1.0, 0.0, 0.0], dtype=F64))
    q = torch.tensor([1.0, 0.0, 0.0], dtype=F64, requires_grad=True)
    A = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=F64)
    b = torch.tensor([2.0, 2.0, 1.0], dtype=F64)
    assert attempted(*problem(P, q, A=A, b=b)) is None


def test_a_least_value_of_zero_is_told_as_rounding():
    """As in control at rest: f* = 0, where no gap is small against f; and rows through zero."""
    make = torch.Generator().manual_seed(3)
    A = torch.randn(4, 9, dtype=F64, generator=make)
    b = torch.randn(4, dtype=F64, generator=make)
    P = torch.diag(torch.tensor([1e-3, 1.0, 2.0] + 6 * [0.0], dtype=F64))
    G = torch.zeros(4, 9, dtype=F64)
    G[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    G[:, 1] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    parts = {"P": P, "q": torch.zeros(9, dtype=F64), "A": A, "b": b}
    parts |= {"G": G, "h": torch.zeros(4, dtype=F64)}
    sol = solved(*problem(**parts))
    with compiled.using(False):
        other = dfw.solve(*problem(**parts))
    # converged if zeros of x, and so f and its gap, are zeros to the last digit
    for found in (sol, other):
        assert found.status in (dfw.Status.CONVERGED, dfw.Status.ROUNDING_FLOOR)
        assert found.value.abs() < 1e-20
        assert found.gap < 1e-10
    assert sol.x[:3].abs().max() < 1e-10
    assert (A @ sol.x - b).abs().max() < 1e-13


def test_a_value_of_zero_has_a_gradient():
    """That of the projection onto the rows, on which f is zero at one point only."""
    P, q = torch.eye(2, dtype=F64), leaf(torch.zeros(2, dtype=F64))
    G, h = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64), torch.zeros(2, dtype=F64)
    objective, constraint = problem(P, q, G=G, h=h)
    own = answers(objective, constraint)
    with compiled.using(False):
        other = answers(objective, constraint)
    assert torch.equal(own[0].status, other[0].status)
    close(own[0].x, other[0].x, 1e-15)


def test_terms_that_cancel_are_told_by_the_largest_entry():
    """Trades that pay for their own costs: rows whose sum is zero, of numbers that are not."""
    make = torch.Generator().manual_seed(0)
    n = 12
    root = torch.eye(n, dtype=F64) + torch.randn(n, n, dtype=F64, generator=make) / n**0.5
    P = root.mT @ root
    P = torch.cat((torch.cat((P, -P), -1), torch.cat((-P, P), -1)), -2)
    slope = 3 * torch.randn(16, n, dtype=F64, generator=make)
    q = leaf(torch.cat((slope, -slope), -1))
    paid = torch.cat((torch.full((n,), 1.01), torch.full((n,), -0.99))).to(F64)
    sol = solved(*problem(P, q, G=paid[None], h=torch.zeros(1, dtype=F64), lower=0.0))
    assert (sol.status == dfw.Status.CONVERGED).all()
    assert torch.isfinite(torch.autograd.grad(sol.x.sum(), q)[0]).all()


def test_rows_that_depend_on_each_other():
    """Five rows through a point of the plane: many sets of multipliers, and one x, which stays."""
    P, q = torch.eye(2, dtype=F64), torch.tensor([-9.0, -8.0], dtype=F64)
    angles = torch.linspace(0.1, 1.4, 5, dtype=F64)
    G = torch.stack((angles.cos(), angles.sin()), -1)
    at = torch.tensor([1.0, 2.0], dtype=F64)
    sol = solved(*problem(P, q, G=G, h=G @ at))
    assert sol.status == dfw.Status.CONVERGED
    close(sol.x, at, 1e-14)
    objective, constraint = problem(P, leaf(q), G=G, h=G @ at)
    moved = torch.autograd.grad(solved(objective, constraint).x.sum(), q)[0]
    assert float(moved.abs().max()) < 1e-15
    h = leaf(G @ at)
    objective, constraint = problem(P, q, G=G, h=h)
    (moved,) = torch.autograd.grad(solved(objective, constraint).x.sum(), h)
    # where the rows go on meeting in a point, h = G y, that point is x
    close(moved @ G, torch.ones(2, dtype=F64), 1e-12)
    with torch.no_grad():
        close(solved(objective, constraint).x, at, 1e-14)


def network(side):
    """Flows of one unit across a grid, x ≥ 0: where nothing flows, more rows are met than hold."""
    nodes = [(i, j) for i in range(side) for j in range(side)]
    edges = [(a, b) for a in nodes for b in nodes if (b[0] - a[0], b[1] - a[1]) in ((0, 1), (1, 0))]
    A = torch.zeros(len(nodes) - 1, len(edges), dtype=F64)
    for k, (a, b) in enumerate(edges):
        for node, sign in ((a, 1.0), (b, -1.0)):
            if node != nodes[-1]:
                A[nodes.index(node), k] = sign
    total = torch.zeros(len(A), dtype=F64)
    total[0] = 1.0
    return A, total


@pytest.mark.parametrize("data", ["projection", "quadratic", "least squares"])
def test_many_multipliers_and_one_derivative_in_the_data_of_f(data):
    """Whichever of them hold x leave it the same directions, so f's data have one derivative."""
    A, total = network(4)
    n = A.shape[-1]
    gen = torch.Generator().manual_seed(3)
    q = leaf(torch.randn(24, n, dtype=F64, generator=gen))
    root = leaf(torch.randn(n, n, dtype=F64, generator=gen) + 3 * torch.eye(n, dtype=F64))
    objective = {
        "projection": lambda: dfw.Quadratic(None, q),
        "quadratic": lambda: dfw.Quadratic(root.mT @ root, q),
        "least squares": lambda: dfw.LeastSquares(root, q),
    }[data]()
    body = dfw.Polyhedron(A=A, b=total, lower=0.0)
    found = attempted(objective, body, tol=1e-9)
    assert found is not None
    assert found.left is None or found.left.sum() <= 2  # where a multiplier is zero
    sol, gradients = answers(objective, body)
    with compiled.using(False):
        expected, right = answers(objective, body)
    close(sol.x, expected.x, 1e-12)
    for own, other in zip(gradients, right, strict=True):
        close(own, other, 1e-9)
    # derivatives in the sides depend on which multipliers those are, but not along moves of b
    # that coordinates inside of their bounds can follow
    sides = leaf(total.expand(24, -1).clone())
    asked = dfw.Polyhedron(A=A, b=sides, lower=0.0)
    rest = attempted(objective, asked, tol=1e-9)
    assert rest is not None
    assert rest.left is None or rest.left.sum() <= 2
    v = torch.randn(24, n, dtype=F64, generator=gen)
    answered = dfw.solve(objective, asked, tol=1e-9)
    (own,) = torch.autograd.grad((v * answered.x).sum(), sides)
    with compiled.using(False):
        expected = dfw.solve(objective, asked, tol=1e-9)
        (other,) = torch.autograd.grad((v * expected.x).sum(), sides)
    free = (expected.x > 1e-6).to(F64)
    close((own @ A) * free, (other @ A) * free, 1e-8)
    assert float(((other @ A) * free).abs().max()) > 0.1
