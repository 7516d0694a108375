"""What is kept from one small call to the next must not be seen, nor what is left out in it."""

from __future__ import annotations

import pytest
import torch

from dfwlayer import Box, CappedSimplex, LpBall, Quadratic, Simplex, Status, solve
from dfwlayer.engines import compiled
from dfwlayer.engines.compiled import layout

pytestmark = pytest.mark.skipif(not compiled.available(), reason="needs Numba")


@pytest.fixture(autouse=True)
def _compiled():
    with compiled.using("wait"):
        yield


def test_sets_of_numbers_are_kept_by_their_numbers():
    z = torch.tensor([2.0, -3.0, 0.1], dtype=torch.float64)
    for bound in (0.5, 1.0, 0.5, 2.5):
        x = solve(Quadratic(None, -z), Box(-bound, bound)).x
        assert torch.equal(x, z.clamp(-bound, bound))
    # other coordinates, another kind of set with the same numbers
    assert solve(Quadratic(None, -z[:2]), Box(-0.5, 0.5)).x.shape == (2,)
    for radius in (1.0, 2.0):
        assert solve(Quadratic(None, -z), Simplex(radius)).x.sum() == pytest.approx(radius)
        assert solve(Quadratic(None, -z), LpBall(1, radius)).x.abs().sum() <= radius
        assert solve(Quadratic(None, -z), LpBall(2, radius)).x.norm() == pytest.approx(radius)


def test_a_number_that_was_changed_behind_the_back_of_a_set_counts():
    z = torch.tensor([2.0, -3.0], dtype=torch.float64)
    box = Box(-1.0, 1.0)
    assert torch.equal(solve(Quadratic(None, -z), box).x, z.clamp(-1, 1))
    object.__setattr__(box, "upper", 1.5)
    assert torch.equal(solve(Quadratic(None, -z), box).x, z.clamp(-1, 1.5))


def test_not_more_sets_are_kept_than_there_is_room_for():
    q = torch.tensor([1.0, -1.0, 2.0])
    for i in range(3 * layout.MOST):
        solve(Quadratic(None, q), CappedSimplex(1.0, 0.5 + 0.001 * i))
    assert len(layout._of_numbers) <= layout.MOST


@pytest.mark.parametrize("smallest", [1.0, 1e-4, 1e-8])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_multiplier_of_a_round_ball_has_all_its_digits(smallest, weighted):
    random = torch.Generator().manual_seed(3)
    n = 8
    basis = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0]
    P = basis * torch.logspace(0, 1, n, base=smallest, dtype=torch.float64) @ basis.mT
    P = 0.5 * (P + P.mT)
    q = torch.randn(5, n, generator=random, dtype=torch.float64)
    w = torch.rand(n, generator=random, dtype=torch.float64) + 0.5 if weighted else None
    size = torch.ones(n, dtype=torch.float64) if w is None else w
    found = solve(Quadratic(P, q), LpBall(2, 0.3, w), tol=1e-10)
    assert (found.status == Status.CONVERGED).all()
    assert ((size * found.x).norm(dim=-1) - 0.3).abs().max() < 1e-15
    # −∇f is a multiple of W²x
    force, normal = -(found.x @ P + q), size**2 * found.x
    along = (force * normal).sum(-1, keepdim=True) / normal.square().sum(-1, keepdim=True)
    assert (along > 0).all()
    assert (force - along * normal).abs().max() < 1e-13 * force.abs().max()


def test_a_gradient_beyond_the_range_of_its_dtype_is_dropped_alone():
    # u = P⁻¹ v is 1e40 in the first problem and 3 in the other one
    P = torch.diag_embed(torch.tensor([[1e-20, 1e-20], [1.0, 1.0]]))
    q = torch.tensor([[1e-21, -1e-21], [0.25, -0.25]]).requires_grad_()
    x = solve(Quadratic(P, q), Box(-1.0, 1.0)).x
    torch.testing.assert_close(x.detach(), torch.tensor([[-0.1, 0.1], [-0.25, 0.25]]))
    (gradient,) = torch.autograd.grad(x, q, torch.tensor([[1e20, 0.0], [3.0, 0.0]]))
    assert torch.equal(gradient, torch.tensor([[0.0, 0.0], [-3.0, 0.0]]))
