"""Products with lists of rows and intersections among the sets, and members that leave x open."""

import pytest
import torch
from torch import Tensor

from dfwlayer import (
    AffineSet,
    Birkhoff,
    Box,
    GroupBall,
    HalfSpace,
    Hyperplane,
    Intersection,
    L1Box,
    LpBall,
    NonNegative,
    NuclearBall,
    Polyhedron,
    Product,
    Quadratic,
    Shifted,
    Smooth,
    Solution,
    Spectraplex,
    Status,
    Transport,
    solve,
)
from dfwlayer.constraints import Constraint

f64 = torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=f64)


def with_rows(side: Tensor) -> dict[str, Constraint]:
    """Sets in four dimensions that "auto" means "sqp" for; ``side`` () is a limit of each."""
    two = torch.tensor([0.5, 1.0], dtype=f64)
    normal = torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=f64)
    return {
        "rows": Polyhedron(torch.stack((normal, normal.flip(0))), side),
        "equations": AffineSet(normal.unsqueeze(0), side),
        "half-space": HalfSpace(normal, side),
        "plane": Hyperplane(normal, side),
        "orthant": Shifted(NonNegative(), side),
        "plan": Transport(two * side, two.flip(0) * side),
        "rows around a centre": Shifted(Polyhedron(normal.unsqueeze(0), side), 0.1 * normal),
        "rows in a ball": Intersection(LpBall(2, 1.0), HalfSpace(normal, side)),
        "two balls": Intersection(LpBall(2, 1.0), LpBall(1, 1 + side)),
        "a product of such": Product([HalfSpace(two, side), LpBall(1, 1.0)], [2, 2]),
    }


def others() -> dict[str, tuple[Constraint, int]]:
    return {
        "ball": (LpBall(2, 0.8), 3),
        "diamond": (LpBall(1, 0.8, centre=torch.ones(3, dtype=f64)), 3),
        "oval": (LpBall(3, 0.5), 3),
        "box": (Box(-0.1, torch.inf), 3),
        "low rank": (NuclearBall(0.7, shape=(2, 2)), 4),
        "densities": (Spectraplex(1.0), 4),
        "permutations": (Birkhoff(2), 4),
        "rows": (Polyhedron(torch.ones(1, 3, dtype=f64), 0.2, lower=-1.0), 3),
        "met": (Intersection(LpBall(2, 1.0), Box(0.0, 0.5)), 3),
    }


KINDS = [*with_rows(torch.tensor(1.0, dtype=f64))]
OTHERS = [*others()]
PAIRS = [(kind, OTHERS[(i + 4 * j) % len(OTHERS)]) for i, kind in enumerate(KINDS) for j in (0, 1)]


@pytest.mark.parametrize(("kind", "beside"), PAIRS)
def test_blocks_that_f_does_not_mix_are_solved_as_they_are_alone(kind: str, beside: str) -> None:
    torch.manual_seed(len(kind) + 100 * len(beside))
    side = torch.tensor(0.3, dtype=f64, requires_grad=True)
    mine = with_rows(side)[kind]
    other, count = others()[beside]
    R, S = drawn(4, 4), drawn(count, count)
    P, Q = R.mT @ R + torch.eye(4, dtype=f64), S.mT @ S + torch.eye(count, dtype=f64)
    p, q = 3 * drawn(3, 4), 3 * drawn(3, count)
    both = torch.cat((p, q), -1).requires_grad_()
    product = Product([mine, other], [4, count])
    found = solve(Quadratic(torch.block_diag(P, Q), both), product, tol=1e-9)
    one, two = (
        solve(Quadratic(*f), body, tol=1e-9) for f, body in (((P, p), mine), ((Q, q), other))
    )
    assert all(each.converged.all() for each in (found, one, two))
    assert torch.allclose(found.x, torch.cat((one.x, two.x), -1), atol=1e-7)
    weight = drawn(3, 4)
    (slope,) = torch.autograd.grad((found.x[:, :4] * weight).sum(), side, retain_graph=True)
    (alone,) = torch.autograd.grad((one.x * weight).sum(), side)
    assert torch.allclose(slope, alone, atol=1e-5)
    if kind == "plan":  # at a corner, where many multipliers hold x
        return
    for i, each in ((0, one), (1, two)):
        for name, price in each.multipliers.items():
            assert torch.allclose(found.multipliers[f"{i}.{name}"], price, atol=1e-5)


def open_sets() -> dict[str, Constraint]:
    """Sets in five dimensions that leave the first two open."""
    weight = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0], dtype=f64)
    return {
        "ball": LpBall(2, 1.0, weight),
        "diamond": LpBall(1, 1.0, weight),
        "oval": LpBall(3, 1.0, weight),
        "groups": GroupBall([0, 0, 1, 1, 1], 1.0, torch.tensor([0.0, 1.0], dtype=f64)),
        "budget": L1Box(1.0, weight, -torch.inf, torch.inf),
        "blocks": Product([Box(), LpBall(2, 1.0)], [2, 3]),
    }


@pytest.mark.parametrize("kind", open_sets())
@pytest.mark.parametrize("curved", [False, True])
def test_rows_within_a_set_that_is_open_are_certified_by_the_bend_of_f(
    kind: str, curved: bool
) -> None:
    torch.manual_seed(len(kind))
    R, q, G = drawn(5, 5), 3 * drawn(4, 5), drawn(4, 5)
    P = R.mT @ R + 0.1 * torch.eye(5, dtype=f64)

    def energy(x: Tensor, q: Tensor) -> Tensor:
        return 0.5 * (x * (x @ P)).sum(-1) + (q * x).sum(-1) + torch.logsumexp(x, -1)

    f = Smooth(energy, q, shape=(5,)) if curved else Quadratic(P, q)
    rows, body = Polyhedron(G, 1.0), open_sets()[kind]
    wide = Box(-1e3, 1e3)  # bounds everything, and holds nothing

    def checked(*sets: Constraint) -> Solution:
        found = solve(f, Intersection(*sets), tol=1e-9)
        assert found.converged.all()
        return found

    assert torch.allclose(checked(rows, body).x, checked(rows, body, wide).x, atol=1e-6)


def test_an_f_that_falls_for_ever_along_what_is_open_is_not_called_solved() -> None:
    P = torch.diag(torch.tensor([0.0, 1.0, 1.0], dtype=f64))
    q = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=f64)
    rows = HalfSpace(torch.tensor([0.0, 1.0, 1.0], dtype=f64), 1.0)
    ball = LpBall(2, 1.0, torch.tensor([0.0, 1.0, 1.0], dtype=f64))
    found = solve(Quadratic(P, q), Intersection(rows, ball))
    assert found.gap[1] == torch.inf
    assert found.status[1] not in (Status.CONVERGED, Status.ROUNDING_FLOOR)
    assert found.converged[0]
    assert torch.allclose(found.x[0, 1:], -torch.ones(2, dtype=f64) / 2**0.5)
