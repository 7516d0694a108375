"""What proves that a problem has no solution, and the prices of one that had to give way."""

import pytest
import torch
from torch.testing import assert_close as close

import dfwlayer as dfw
from dfwlayer import Status

F64 = torch.float64
INF = float("inf")


def tensor(*numbers):
    return torch.tensor(numbers, dtype=F64)


def check_farkas(proof, G, h, A, b, lower, upper):
    """No x satisfies all rows: a combination of them reads 0 < 0."""
    lean, level, low, high = (proof[name] for name in ("h", "b", "lower", "upper"))
    assert (lean >= 0).all()
    assert (high >= 0).all()
    assert (low <= 0).all()
    size = max(float(part.abs().max()) for part in (lean, level, low, high) if part.numel())
    close(G.mT @ lean + A.mT @ level + low + high, torch.zeros_like(low), rtol=0, atol=1e-9 * size)
    total = 0.0
    for part, side in ((lean, h), (level, b), (low, lower), (high, upper)):
        assert (part[~side.isfinite()] == 0).all()
        total += float((part * side)[side.isfinite()].sum())
    assert total < 0
    return total


@pytest.mark.parametrize("seed", range(5))
def test_farkas_multipliers(seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=F64)

    n, m, k = 6, 5, 2
    G, A, x = normal(3, m, n), normal(3, k, n), normal(3, n)
    h = (G @ x.unsqueeze(-1)).squeeze(-1) + 0.1
    b = (A @ x.unsqueeze(-1)).squeeze(-1)
    lower, upper = x - 1, torch.where(normal(3, n) > 0, x + 1, INF)
    # row 1: G_0 x ≥ h_0 + 1 contradicts G_0 x ≤ h_0; row 2: the equations leave the bounds
    G[1, 1], h[1, 1] = -G[1, 0], -h[1, 0] - 1
    lower[2], upper[2], b[2] = -1.0, 1.0, 100.0
    sol = dfw.solve(
        dfw.Quadratic(torch.eye(n, dtype=F64), normal(3, n)),
        dfw.Polyhedron(G, h, A, b, lower, upper),
    )
    assert sol.status.tolist() == [Status.CONVERGED, Status.INFEASIBLE, Status.INFEASIBLE]
    assert all(part[0].isnan().all() for part in sol.proof.values())
    assert sol.proof["direction"].isnan().all()
    for row in (1, 2):
        own = {name: part[row] for name, part in sol.proof.items()}
        gives = own["h"].square().sum() + own["b"].square().sum()
        total = check_farkas(own, G[row], h[row], A[row], b[row], lower[row], upper[row])
        close(total, -float(gives), rtol=1e-8, atol=1e-10)


def test_bounds_that_cross():
    sol = dfw.solve(
        dfw.Quadratic(None, tensor(1.0, 2.0)),
        dfw.Polyhedron(lower=tensor(0.0, 3.0), upper=tensor(1.0, 2.0)),
    )
    close(sol.proof["upper"], tensor(0.0, 1.0))
    close(sol.proof["lower"], tensor(0.0, -1.0))
    one = dfw.solve(
        dfw.Quadratic(None, torch.ones(2, 2, dtype=F64)),
        dfw.Box(torch.zeros(2, 2, dtype=F64), tensor(1.0, -1.0).unsqueeze(-1).expand(2, 2)),
    )
    assert one.status.tolist() == [Status.CONVERGED, Status.INFEASIBLE]
    assert (one.proof["upper"][1] - one.proof["lower"][1]).sum() == 2


def test_the_direction_in_which_f_falls():
    P = torch.diag(tensor(1.0, 0.0, 0.0))
    G = tensor(0.0, 1.0, 1.0).unsqueeze(0)
    q = torch.stack((tensor(1.0, 1.0, 2.0), tensor(1.0, 0.0, 0.0)))
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(G, 1.0, upper=tensor(INF, 0.5, INF)))
    assert sol.status[0] == Status.UNBOUNDED
    d = sol.proof["direction"][0]
    close(P @ d, torch.zeros(3, dtype=F64))
    assert (G @ d <= 1e-12).all()
    assert d[1] <= 1e-12
    assert q[0] @ d < 0
    assert sol.proof["direction"][1].isnan().all()
    plain = dfw.solve(dfw.Quadratic(0 * P, q[0]), dfw.NonNegative())
    assert plain.status == Status.CONVERGED
    open_ended = dfw.solve(dfw.Quadratic(0 * P, -q[0]), dfw.NonNegative())
    assert open_ended.status == Status.UNBOUNDED
    close(open_ended.proof["direction"], q[0])


def test_curved_sets_have_no_such_proof():
    sol = dfw.solve(dfw.Quadratic(None, tensor(1.0, 2.0)), dfw.LpBall(2))
    with pytest.raises(ValueError, match="constraint: a proof"):
        _ = sol.proof


@pytest.mark.parametrize("lead", [(), (2,)])
def test_prices_of_a_problem_that_gave_way(lead):
    """They are those of the rows as far as they gave way."""
    G = torch.stack((tensor(1.0, 0.0), tensor(-1.0, 0.0), tensor(0.0, 1.0)))
    h = tensor(-1.0, -1.0, 0.5).requires_grad_()  # x_1 ≤ −1 and x_1 ≥ 1
    q = tensor(0.3, -2.0).expand(*lead, 2)
    sol = dfw.solve(
        dfw.Quadratic(torch.eye(2, dtype=F64), q),
        dfw.Polyhedron(G, h),
        on_infeasible="least-violation",
    )
    assert (sol.status == Status.RELAXED).all()
    close(sol.x.detach(), tensor(0.0, 0.5).expand(*lead, 2), rtol=0, atol=1e-7)
    prices = sol.multipliers["h"]
    assert prices.shape == (*lead, 3)
    close(prices[..., 2].detach(), torch.full(lead, 1.5, dtype=F64), rtol=1e-6, atol=0)
    close((prices[..., 1] - prices[..., 0]).detach(), torch.full(lead, 0.3, dtype=F64))
    (slope,) = torch.autograd.grad(prices[..., 2].sum(), h)
    close(slope[2], tensor(-1.0)[0] * max(1, *lead, 1))
    close(sol.violation.detach(), torch.ones(lead, dtype=F64), rtol=1e-7, atol=0)
    total = check_farkas(
        {name: part[(0,) * len(lead)] for name, part in sol.proof.items()},
        G,
        h.detach(),
        torch.zeros(0, 2, dtype=F64),
        tensor(),
        tensor(-INF, -INF),
        tensor(INF, INF),
    )
    close(total, -2.0)


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1.0, 1e20, 1e25])
@pytest.mark.parametrize("body", ["l1", "l2", "box", "polyhedron"])
def test_prices_of_numbers_whose_squares_are_out_of_range(size, body):
    """In float32: x in units of ``size``."""
    q = torch.tensor([-3.0, 1.0, 0.5])
    make = {
        "l1": lambda size: dfw.LpBall(1, 1.0 * size),
        "l2": lambda size: dfw.LpBall(2, 1.0 * size),
        "box": lambda size: dfw.Box(-0.5 * size, 0.6 * size),
        "polyhedron": lambda size: dfw.Polyhedron(
            torch.tensor([[1.0, 1.0, 1.0]]), 0.2 * size, lower=-1.0 * size, upper=2.0 * size
        ),
    }[body]
    plain = dfw.solve(dfw.Quadratic(None, q), make(1.0)).multipliers
    found = dfw.solve(dfw.Quadratic(None, q * size), make(size)).multipliers
    for name, price in plain.items():
        close(found[name] / size, price, rtol=1e-4, atol=1e-5)
