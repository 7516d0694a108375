"""Costs and rows with kinks: solved in single coordinates, on the pieces that hold the solution."""

import importlib

import cvxpy as cp
import numpy as np
import pytest
import torch

from cvxpy_cases import drawn
from dfwlayer.engines import compiled

pytest.importorskip("cvxpy", minversion="1.9")
from dfwlayer.integrations.cvxpy import CvxpyLayer

F64 = torch.float64
pytestmark = pytest.mark.usefixtures("compiled_code")


def reference(problem, parameters, values, x):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.value = value.detach().numpy()
    problem.solve(solver=cp.CLARABEL, tol_gap_rel=1e-11, tol_gap_abs=1e-11, tol_feas=1e-11)
    return x.value


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("seed", range(24))
def test_solutions_are_those_of_cvxpy_and_gradients_those_of_differences(seed):
    problem, parameters, x, draw = drawn(seed)
    layer = CvxpyLayer(problem, parameters, [x], engine="dfwlayer")
    assert "kinks" in layer.explain()
    for lead in ((), (3,)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            values = draw(lead)
        (found,) = layer(*values)
        gen = torch.Generator().manual_seed(seed)
        weights = torch.randn(found.shape, dtype=F64, generator=gen)
        along = [torch.randn(v.shape, dtype=F64, generator=gen) for v in values]

        def loss(*at, weights=weights):
            return (layer(*at)[0] * weights).sum()

        gradients = torch.autograd.grad(loss(*values), values, allow_unused=True)
        exact = sum((g * d).sum() for g, d in zip(gradients, along, strict=True) if g is not None)
        at, step = [v.detach() for v in values], 1e-6
        ahead, back = (
            loss(*[v + sign * step * d for v, d in zip(at, along, strict=True)]) for sign in (1, -1)
        )
        assert float(exact) == pytest.approx(float((ahead - back) / (2 * step)), rel=1e-4, abs=1e-5)
        if not lead:
            expected = reference(problem, parameters, values, x)
            np.testing.assert_allclose(found.detach(), expected, atol=2e-5)


def test_all_random_problems_are_solved_on_their_pieces():
    """Those with a point; the lifted problem, which takes longer, is for what is left."""
    missed = []
    for seed in range(24):
        problem, parameters, x, draw = drawn(seed)
        model = CvxpyLayer(problem, parameters, [x], engine="dfwlayer")._model
        flat = [v.detach().reshape(-1) for v in draw(())]
        at = model.arrays.at(flat, (False,) * len(flat))
        if model.on_pieces(at) is None:
            missed.append(seed)
    assert not missed


def test_a_weight_of_zero_has_the_derivative_from_the_right():
    """x = −(∇²f)⁻¹(q + λ Eᵀ sign(Ex)) as λ leaves zero."""
    n = 4
    x, q, weight = cp.Variable(n), cp.Parameter(n), cp.Parameter(nonneg=True)
    gen = torch.Generator().manual_seed(0)
    root = torch.randn(n, n, generator=gen, dtype=F64) + 2 * torch.eye(n, dtype=F64)
    cost = 0.5 * cp.sum_squares(root.numpy() @ x) + q @ x + weight * cp.norm1(x)
    layer = CvxpyLayer(cp.Problem(cp.Minimize(cost)), [q, weight], [x], engine="dfwlayer")
    at = torch.randn(n, generator=gen, dtype=F64)
    zero = torch.zeros((), dtype=F64, requires_grad=True)
    (found,) = layer(at, zero)
    slopes = torch.stack([torch.autograd.grad(v, zero, retain_graph=True)[0] for v in found])
    expected = -torch.linalg.solve(root.mT @ root, found.detach().sign())
    torch.testing.assert_close(slopes, expected)


def test_what_is_not_found_on_pieces_is_solved_with_further_variables(monkeypatch):
    """Without compiled code, for sets without a point, for NaN, and inside of torch.func."""
    x, c, t = cp.Variable(3), cp.Parameter(3), cp.Parameter(nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c) + t * cp.norm1(x)), [cp.sum(x) == t])
    layer = CvxpyLayer(problem, [c, t], [x], engine="dfwlayer", on_failure="ignore")
    at, one = torch.tensor([0.3, -0.5, 1.0], dtype=F64), torch.tensor(0.4, dtype=F64)
    (known,) = layer(at, one)
    with compiled.using("off"):
        torch.testing.assert_close(layer(at, one)[0], known)
    rows = torch.stack((at, torch.full_like(at, torch.nan), 2 * at))
    (found,) = layer(rows, one)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[0], known)
    mapped = torch.func.vmap(lambda c: layer(c, one)[0])(rows[::2])
    torch.testing.assert_close(mapped, found[::2])
    for kind in ("Posed", "Where"):
        monkeypatch.setattr(f"dfwlayer.integrations.cvxpy.pieces.{kind}.hold", lambda *_: False)
    torch.testing.assert_close(layer(at, one)[0], known)


def test_second_derivatives_on_pieces():
    x, c, t = cp.Variable(3), cp.Parameter(3), cp.Parameter(nonneg=True)
    cost = cp.sum_squares(x - c) + 0.2 * cp.norm1(x)
    layer = CvxpyLayer(cp.Problem(cp.Minimize(cost), [cp.norm1(x) <= t]), [c, t], [x])
    at = torch.tensor([0.9, -0.7, 0.02], dtype=F64, requires_grad=True)
    limit = torch.tensor(0.8, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, t: layer(c, t)[0], (at, limit))
    assert torch.autograd.gradgradcheck(lambda c, t: layer(c, t)[0].pow(3), (at, limit))


def test_the_code_for_pieces_is_compiled_once():
    """Whatever the problems are: other types would be compiled once more, in the background."""
    pieces = importlib.import_module("dfwlayer.engines.compiled.kernels.pieces")
    for seed in range(4):
        problem, parameters, x, draw = drawn(seed)
        layer = CvxpyLayer(problem, parameters, [x], engine="dfwlayer", on_failure="ignore")
        for lead in ((), (1,), (3,)):
            layer(*draw(lead))
    assert [len(way.signatures) for way in (pieces.search, pieces.judge)] == [1, 1]
