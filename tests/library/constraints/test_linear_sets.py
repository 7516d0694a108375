"""Half-spaces, planes, affine sets and the orthant: formulas, and problems without a solution."""

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.constraints.polyhedra.polyhedron import LinearSet
from helpers import F64

N = 5


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


SETS = {  # and their parameters
    "HalfSpace": (dfw.HalfSpace, (numbers(4, N), numbers(4, seed=1))),
    "Hyperplane": (dfw.Hyperplane, (numbers(4, N), numbers(4, seed=1))),
    "AffineSet": (dfw.AffineSet, (numbers(2, N, seed=2), numbers(4, 2, seed=3))),
    "NonNegative": (dfw.NonNegative, ()),
}


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e200])
@pytest.mark.parametrize("name", SETS)
def test_formula_of_the_projection(name, size):
    """The steps for any polyhedron give the same, and so does a solve; in any units of the rows."""
    make, given = SETS[name]
    constraint = make(*(size * part for part in given))
    z = 3 * numbers(4, N, seed=4)
    x = constraint.project(z)
    bound = make(*given).bind((N,), F64, z.device).as_polyhedron(z)
    torch.testing.assert_close(x, LinearSet.project(bound, z), rtol=1e-12, atol=1e-12)
    assert (constraint.violation(x) <= 1e-13 * size).all()
    if size == 1:
        sol = dfw.solve(dfw.Quadratic(None, -z), constraint)
        assert sol.converged.all()
        torch.testing.assert_close(sol.x, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["HalfSpace", "Hyperplane", "AffineSet"])
def test_gradients(name):
    R = numbers(N, N, seed=5)
    P, q = R @ R.mT + torch.eye(N, dtype=F64), numbers(2, N, seed=6)
    make, given = SETS[name]
    own = [part[:2].clone().requires_grad_() for part in given]

    def solution(q, *own):
        return dfw.solve(dfw.Quadratic(P, q), make(*own), tol=1e-13).x.square()

    leaves = [q.requires_grad_(), *own]
    assert torch.autograd.gradcheck(solution, leaves, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(solution, leaves, atol=1e-5, fast_mode=True)


def test_conditions_of_optimality_on_the_orthant():
    R = numbers(3, N, N, seed=7)
    P, q = R @ R.mT, numbers(3, N, seed=8)
    x = dfw.solve(dfw.Quadratic(P, q), dfw.NonNegative(), tol=1e-12).x
    g = (P @ x.unsqueeze(-1)).squeeze(-1) + q
    assert (x >= 0).all()
    assert (g >= -1e-10).all()
    assert ((g * x).abs() <= 1e-10).all()


@pytest.mark.parametrize("name", SETS)
def test_a_function_that_falls_for_ever(name):
    make, given = SETS[name]
    slope = -torch.ones(4, N, dtype=F64)
    flat = torch.zeros(N, N, dtype=F64)
    sol = dfw.solve(dfw.Quadratic(flat, slope), make(*given))
    assert (sol.status == dfw.Status.UNBOUNDED).all()


def test_a_linear_function_that_is_bounded_on_a_plane():
    a, b = SETS["Hyperplane"][1]
    sol = dfw.solve(dfw.Quadratic(torch.zeros(N, N, dtype=F64), 2 * a), dfw.Hyperplane(a, b))
    torch.testing.assert_close(sol.value, 2 * b)


def test_empty_sets_stay_alone():
    A = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]], dtype=F64)
    b = torch.tensor([[1.0, 2.0], [1.0, 3.0]], dtype=F64)  # twice the first row, and not
    f = dfw.Quadratic(None, numbers(2, 3))
    zero = torch.zeros(2, 3, dtype=F64)
    for constraint in (
        dfw.AffineSet(A, b),
        dfw.Hyperplane(zero, torch.tensor([0.0, 1.0], dtype=F64)),
        dfw.HalfSpace(zero, torch.tensor([1.0, -1.0], dtype=F64)),
    ):
        sol = dfw.solve(f, constraint)
        assert sol.status.tolist() == [dfw.Status.CONVERGED, dfw.Status.INFEASIBLE]
        assert sol.x[0].isfinite().all()
        assert sol.x[1].isnan().all()
        assert constraint.project(f.q)[1].isnan().all()
    with pytest.raises(ValueError, match="bounded where ⟨g, x⟩ falls, found a NonNegative"):
        dfw.NonNegative().vertex(-torch.ones(3))


def test_they_meet_as_one_polyhedron():
    q = numbers(4, N)
    both = dfw.Intersection(dfw.NonNegative(), dfw.Hyperplane(1.0, 1.0))
    x = dfw.solve(dfw.Quadratic(None, q), both).x
    torch.testing.assert_close(x, dfw.Simplex().project(-q), rtol=1e-10, atol=1e-10)


def test_a_normal_may_have_the_shape_of_the_variable():
    normal = numbers(2, 3)
    target = numbers(2, 3, seed=1)
    f = dfw.Smooth(lambda x, c: ((x - c) ** 2).sum((-2, -1)), target, shape=(2, 3))
    x = dfw.solve(f, dfw.Hyperplane(normal, 0.5)).x
    torch.testing.assert_close(
        x, dfw.Hyperplane(normal.flatten(), 0.5).project(target.flatten()).reshape(2, 3)
    )
