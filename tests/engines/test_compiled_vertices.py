"""Vertices at which bounds alone hold a row, in compiled code: caps that add up to the total."""

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import attempted
from dfwlayer.engines import compiled

B, N = 40, 12

SETS = {
    "caps that are exact": lambda: dfw.CappedSimplex(1.0, 0.25),
    "caps that add up to rounding": lambda: dfw.CappedSimplex(1.0, 0.2),
    "ten caps": lambda: dfw.CappedSimplex(1.0, 0.1),
    "a box in a plane": lambda: dfw.PlaneCut(dfw.Box(-0.1, 0.3), level=0.4),
    "a budget in a box": lambda: dfw.L1Box(0.6, None, -0.2, 0.3),
    "k-sparse": lambda: dfw.KSparse(3.0, 0.2),
    "two simplices": lambda: dfw.Product(
        [dfw.CappedSimplex(1.0, 0.5), dfw.CappedSimplex(0.9, 0.3)], [5, N - 5]
    ),
}


def problems(dtype, flat=0.05):
    """A linear part so large that vertices solve most of them."""
    draw = torch.Generator().manual_seed(5)
    R = torch.randn(B, N, N, generator=draw, dtype=torch.float64)
    P = flat * (R @ R.mT / N + 0.1 * torch.eye(N))
    return P.to(dtype), torch.randn(B, N, generator=draw, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SETS)
def test_they_are_answered_and_do_not_move_with_f(name, dtype):
    P, q = (part.clone().requires_grad_() for part in problems(dtype))
    found = attempted(dfw.Quadratic(P, q), SETS[name](), tol=1e-6)
    left = torch.zeros(B, dtype=torch.bool) if found.left is None else found.left
    with compiled.using(False):
        sol = dfw.solve(dfw.Quadratic(P, q), SETS[name](), tol=1e-6)
    x, eps = found.solution.x, torch.finfo(dtype).eps
    right = sol.x
    at_bounds = (right.diff(dim=-1) == 0).any(-1)  # several entries at one bound
    assert at_bounds.sum() > B // 2
    assert left.sum() <= B // 10
    torch.testing.assert_close(x[~left], right[~left], rtol=0, atol=32 * eps)
    v = torch.cos(torch.arange(B * N, dtype=dtype)).reshape(B, N)
    keep = (~left).unsqueeze(-1)
    mine = torch.autograd.grad((v * x * keep).sum(), (P, q))
    theirs = torch.autograd.grad((v * right * keep).sum(), (P, q))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e4 * eps)
    still = (mine[1][~left] == 0).all(-1).float().mean()
    assert still > 0.3  # vertices, indeed


def test_what_asks_for_a_gradient_in_the_set_is_left_to_others():
    """There is more than one: which of the rows and bounds hold x is a matter of choice."""
    P, q = problems(torch.float64, flat=1e-3)
    free = attempted(dfw.Quadratic(P, q), dfw.CappedSimplex(1.0, 0.25), tol=1e-9)
    assert free.left is None
    total = torch.ones(B, dtype=torch.float64, requires_grad=True)
    asked = attempted(dfw.Quadratic(P, q), dfw.CappedSimplex(total, 0.25), tol=1e-9)
    assert asked is None or asked.left.sum() > B // 2


@pytest.mark.parametrize("name", SETS)
def test_the_certificate_holds(name):
    P, q = problems(torch.float64)
    body = SETS[name]()
    sol = dfw.solve(dfw.Quadratic(P, q), body, tol=1e-9)
    assert (sol.status == dfw.Status.CONVERGED).all()
    g = (P @ sol.x.unsqueeze(-1)).squeeze(-1) + q
    own = ((sol.x - body.vertex(g)) * g).sum(-1)  # Frank-Wolfe's gap, by the set's own vertex
    assert (own <= 1e-12).all()
    assert (sol.gap >= 0).all()
    assert (sol.gap <= 1e-9 * sol.value.abs()).all()


def test_a_box_that_touches_without_a_force_stays_in_doubt():
    """x is at a bound where ∇f is zero: a kink, decided in one place for all engines."""
    q = -torch.tensor([[0.3, 0.1]], dtype=torch.float64).expand(4, 2).clone().requires_grad_()
    P = torch.eye(2, dtype=torch.float64).expand(4, 2, 2)
    body = dfw.Box(0.0, torch.tensor([0.3, 1.0], dtype=torch.float64))
    assert attempted(dfw.Quadratic(P, q), body) is None
