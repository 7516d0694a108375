"""No gradient is NaN where a set or a slope has no size: centres, radius 0, f without a slope."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dfwlayer as dfw
from dfwlayer.ops.tensors import tensors_in
from helpers import F64

B, N = 3, 4


def leaf(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=F64, requires_grad=True)


def spread(*shape: int) -> Tensor:
    gen = torch.Generator().manual_seed(math.prod(shape))
    return (0.5 + torch.rand(*shape, generator=gen, dtype=F64)).requires_grad_()


def axes(*lead: int) -> Tensor:
    return (torch.eye(N, dtype=F64) + 0.2 * spread(*lead, N, N).detach()).requires_grad_()


SETS: dict[str, Callable[[float], Any]] = {
    **{
        f"LpBall, p={p}": lambda r, p=p: dfw.LpBall(p, leaf(r, B), spread(B, N))
        for p in (1, 1.5, 2, 3, math.inf)
    },
    "LpBall around a centre": lambda r: dfw.LpBall(2, leaf(r, B), centre=spread(B, N)),
    "Ellipsoid": lambda r: dfw.Ellipsoid(axes(B), None, leaf(r, B)),
    "Ellipsoid, shared, around a centre": lambda r: dfw.Ellipsoid(axes(), spread(N), leaf(r)),
    "GroupBall": lambda r: dfw.GroupBall([[0, 1], [2, 3]], leaf(r, B), spread(B, 2)),
    **{
        f"SchattenBall, p={p}": lambda r, p=p: dfw.SchattenBall(p, leaf(r, B), (2, 2))
        for p in (1, 1.5, 2, 3, math.inf)
    },
    "Simplex": lambda r: dfw.Simplex(leaf(r, B)),
    "CappedSimplex": lambda r: dfw.CappedSimplex(leaf(r, B), leaf(r, B, N)),
    "CappedSimplex, full": lambda r: dfw.CappedSimplex(leaf(r, B), leaf(r / N, B, N)),
    "Box": lambda r: dfw.Box(leaf(-r, B, N), leaf(r, B, N)),
    "Box, one point": lambda r: dfw.Box(leaf(r, B, N), leaf(r, B, N)),
    "L1Box": lambda r: dfw.L1Box(leaf(r, B), spread(B, N), leaf(-1.0, B, N), leaf(1.0, B, N)),
    "L1Box, bounds": lambda r: dfw.L1Box(leaf(1.0, B), spread(B, N), leaf(-r, N), leaf(0.0, N)),
    "KSparse": lambda r: dfw.KSparse(leaf(2.0, B), leaf(r, B)),
    "Box in a plane": lambda r: dfw.PlaneCut(
        dfw.Box(leaf(-r, B, N), leaf(r, B, N)), spread(B, N), leaf(0.0, B)
    ),
    "ℓ1 ball in a plane": lambda r: dfw.PlaneCut(
        dfw.LpBall(1, leaf(r, B)), spread(B, N), leaf(0.0, B)
    ),
    "Product": lambda r: dfw.Product([dfw.LpBall(2, leaf(r, B)), dfw.Simplex(leaf(r))], [2, 2]),
    "Shifted": lambda r: dfw.Shifted(dfw.Simplex(leaf(r, B)), spread(B, N)),
    "Birkhoff": lambda _: dfw.Birkhoff(2),
}


def objectives() -> dict[str, dfw.Quadratic]:
    gen = torch.Generator().manual_seed(3)
    R = torch.randn(B, N, N, generator=gen, dtype=F64)
    P = R @ R.mT + torch.eye(N, dtype=F64)
    q = torch.randn(B, N, generator=gen, dtype=F64)
    one = torch.zeros(B, N, dtype=F64)
    one[:, 0] = -1
    pairs = {
        "a projection of zero": (None, 0 * q),
        "least at zero": (P, 0 * q),
        "anywhere": (P, q),
        "on an axis": (torch.eye(N, dtype=F64).expand_as(P), one),
        "constant": (0 * P, 0 * q),
        "linear": (0 * P, q),
    }
    return {
        name: dfw.Quadratic(
            None if P is None else P.clone().requires_grad_(), q.clone().requires_grad_()
        )
        for name, (P, q) in pairs.items()
    }


@pytest.mark.parametrize("radius", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("name", SETS)
def test_gradients_are_finite(name, radius):
    for method in ("dfw", "auto", "active-set"):
        for what, objective in objectives().items():
            constraint = SETS[name](radius)
            x = dfw.solve(objective, constraint, method=method, max_steps=40).x
            leaves = [t for t in tensors_in((objective, constraint)) if t.requires_grad]
            x.backward(torch.arange(1.0, N + 1, dtype=F64).expand_as(x))
            for t in leaves:
                sound = t.grad is None or bool(torch.isfinite(t.grad).all())
                assert sound, f"{method}, {what}: gradient of shape {tuple(t.shape)}"


def test_an_ellipsoid_at_its_centre():
    """x = −P⁻¹q is inside: A and t do not matter. For radius 0 nothing does but the centre."""
    R = spread(N, N).detach()
    P = R @ R.mT + torch.eye(N, dtype=F64)
    v = torch.arange(1.0, N + 1, dtype=F64)
    for radius in (0.0, 1.0):
        A, t, q, c = axes(), leaf(radius), leaf(0.0, N), leaf(0.0, N)
        x = dfw.solve(dfw.Quadratic(P, q), dfw.Ellipsoid(A, c, t)).x
        x.backward(v)
        assert (x == 0).all()
        assert (A.grad == 0).all()
        assert t.grad == 0
        if radius:
            torch.testing.assert_close(q.grad, -torch.linalg.solve(P, v))
            torch.testing.assert_close(c.grad, torch.zeros_like(c), rtol=0, atol=1e-14)
        else:
            assert (q.grad == 0).all()
            torch.testing.assert_close(c.grad, v)


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_the_norm_at_zero(p):
    from dfwlayer.ops.rows import scaled_norm

    a = torch.tensor([[0.0, 0.0], [3.0, -4.0], [0.0, 2.0]], dtype=F64, requires_grad=True)
    scaled_norm(a, p).sum().backward()
    x = a.detach()[1:]
    want = x.sign() * x.abs() ** (p - 1) / (x.abs() ** p).sum(-1, keepdim=True) ** (1 - 1 / p)
    torch.testing.assert_close(a.grad[1:], want)
    assert (a.grad[0] == 0).all()
