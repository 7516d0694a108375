"""The steps that methods and sets are made of, where random problems found them wanting."""

import math

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.constraints.composed.plane_dual import plane_dual
from dfwlayer.constraints.polyhedra.knapsack import falling_root
from dfwlayer.constraints.polyhedra.polyhedral_face import Equation
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.methods import Problem
from dfwlayer.methods.face_newton import newton_step
from dfwlayer.methods.interior_point import interior_point
from dfwlayer.methods.phases import Iterate
from dfwlayer.methods.region_face import on_face
from helpers import F64, draw


def test_the_interior_point_method_meets_equations():
    """The middle of the bounds minimises f, but is not in the plane."""
    A, middle = draw(10, 12), draw(1, 12, seed=1)
    cut = dfw.PlaneCut(dfw.Box(middle - 1.5, middle + 1.5), 1.0, middle.sum(-1) - 3)
    bound = cut.bind((12,), F64, A.device)
    model = dfw.LeastSquares(A, middle @ A.mT).bind(1).model(middle)
    pair, _ = interior_point(model, bound.region(middle), middle, torch.tensor([60]))
    torch.testing.assert_close(pair.x.sum(-1), middle.sum(-1) - 3, rtol=0, atol=1e-9)
    assert ((pair.x - middle).abs() <= 1.5 + 1e-9).all()


FLAT_SETS = {
    "l1": dfw.LpBall(1.0, 700.0),
    "weighted": dfw.LpBall(1.0, 7e-5, torch.linspace(0.5, 3, 7, dtype=F64)),
    "box": dfw.Box(-torch.linspace(1, 3, 7, dtype=F64), torch.linspace(1, 900, 7, dtype=F64)),
    "simplex": dfw.Simplex(30.0),
    "capped": dfw.CappedSimplex(0.3),
    "l1 and box": dfw.L1Box(radius=5.0, lower=-2.0, upper=3.0),
}


@pytest.mark.parametrize("curvature", [0.0, 1e-20, 1e-9])
@pytest.mark.parametrize("name", FLAT_SETS)
def test_a_model_without_curvature_has_a_vertex_for_minimiser(name, curvature):
    """In units of a curvature that is none, every multiplier was larger than its slack."""
    slope, constraint = draw(40, 7), FLAT_SETS[name]
    problem = dfw.Quadratic(curvature * torch.eye(7, dtype=F64), slope)
    model, bound = problem.bind(40).model(slope), constraint.bind((7,), F64, slope.device)
    assert model is not None
    region, most = bound.region(slope), torch.full((40,), 80)
    at, _ = interior_point(model, region, torch.zeros_like(slope), most)
    x, settled = on_face(model, region, at)
    x = torch.where(settled.unsqueeze(-1), x, at.x)
    best = (slope * bound.vertex(slope)).sum(-1)
    torch.testing.assert_close((slope * x).sum(-1), best, rtol=1e-5, atol=0)


def test_a_root_closer_than_the_next_number_is_found_at_once():
    """A Newton step that does not move is no reason to look for a bracket from afar."""
    calls = 0

    def evaluate(theta):
        nonlocal calls
        calls += 1
        off = (-673341417.7448046 - theta) + 2.6e-8  # less than the numbers there are apart
        return (4589.06 * off).clamp(-2500, 2500), torch.where(off < -0.5, 0.0, 4589.06)

    none = torch.zeros(1, 1, dtype=F64)
    guess = none - 673341417.86
    root = falling_root(evaluate, none - torch.inf, none + torch.inf, guess, none + 1e-9)
    torch.testing.assert_close(root, none - 673341417.7448046, rtol=1e-15, atol=0)
    assert calls <= 8


def test_the_search_for_a_vertex_in_a_plane_ends_where_there_is_no_other():
    """Rounding may promise a better one for ever."""
    set_, calls = dfw.LpBall(1.0).bind((6,), F64, torch.device("cpu")), 0

    def vertex(g):
        nonlocal calls
        calls += 1
        return set_.vertex(g)

    a, g = draw(500, 6), draw(500, 6, seed=1)
    g = g - (g * a).sum(-1, keepdim=True) / (a * a).sum(-1, keepdim=True) * a + 1e9 * a
    plane_dual(vertex, Equation(a, 0.1 * a.abs().amax(-1, keepdim=True)), g)
    assert calls < 20


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_newton_on_a_face_with_several_normals(rows):
    """A step for one problem and for a batch is the same."""
    gen = torch.Generator().manual_seed(8)
    constraint = dfw.Product([dfw.LpBall(1, 0.4), dfw.LpBall(1, 0.3)], [3, 2])
    A = torch.randn(6, 5, generator=gen, dtype=F64)
    b = torch.randn(6, generator=gen, dtype=F64)
    objective = dfw.LeastSquares(A, b).bind(None)
    x = dfw.solve(objective, constraint).x
    bound = constraint.bind((5,), F64, x.device)
    at = x if rows is None else x.expand(rows, 5)
    problem = Problem(objective, bound, None)
    value, gradient, face = problem.face_at(at)
    assert len(face.normals) > 1
    iterate = Iterate(problem, at, value, gradient, 0.0, math.inf, False, 100, 0.0)
    step = newton_step(iterate, FaceSystem(objective, face, at))
    assert step is not None
    torch.testing.assert_close(step.reshape(-1, 5), torch.zeros_like(at).reshape(-1, 5))
