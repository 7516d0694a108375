"""Problems written in cvxpy: recognised, solved and differentiated, or handed on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor

from cvxpy_cases import CASES, N, parts, values
from dfwlayer import SolveError, Status

pytest.importorskip("cvxpy", minversion="1.9")
from dfwlayer.integrations.cvxpy import (
    CvxpyLayer,
    ForwardedWarning,
    NotRecognisedError,
)

DIFFCP = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


def by_cvxpy(problem: cp.Problem, parameters: list[Any], given: list[Tensor]) -> None:
    for p, value in zip(parameters, given, strict=True):
        p.value = value.detach().numpy()
    tight = {"tol_gap_rel": 1e-11, "tol_gap_abs": 1e-11, "tol_feas": 1e-11}
    with warnings.catch_warnings():  # where rounding does not let it get there
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver=cp.CLARABEL, **tight)


def slope(layer: Any, given: list[Tensor], *, step: float = 1e-6) -> tuple[float, float]:
    """The derivative along a random direction, by backward and by differences."""
    gen = torch.Generator().manual_seed(9)
    along = [torch.randn(v.shape, generator=gen, dtype=v.dtype) for v in given]

    def loss(at: list[Tensor]) -> Tensor:
        return sum((o * torch.linspace(0.5, 1.5, o.numel()).view_as(o)).sum() for o in layer(*at))

    at = [v.clone().requires_grad_() for v in given]
    gradients = torch.autograd.grad(loss(at), at)
    exact = sum(float((g * d).sum()) for g, d in zip(gradients, along, strict=True))
    ahead, back = (
        float(loss([v + sign * step * d for v, d in zip(given, along, strict=True)]))
        for sign in (1, -1)
    )
    return exact, (ahead - back) / (2 * step)


@pytest.mark.parametrize("name", CASES)
def test_problems_are_recognised_solved_and_differentiated(name):
    case = CASES[name]
    problem, parameters, x = parts(case)
    layer = CvxpyLayer(problem, parameters, [x], engine="dfwlayer")
    assert layer.explain().split("over: ")[1] == case.told
    given = values(parameters, case)
    (found,) = layer(*given)
    by_cvxpy(problem, parameters, given)
    assert np.allclose(found.numpy(), x.value, atol=2e-5)
    exact, measured = slope(layer, given)
    assert exact == pytest.approx(measured, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["least squares", "level", "l1", "ellipsoid", "lasso", "rows"])
def test_batches_are_single_problems(name):
    case = CASES[name]
    problem, parameters, x = parts(case)
    layer = CvxpyLayer(problem, parameters, [x])
    given = values(parameters, case, 3)
    given[0] = given[0][0]  # shared
    single = [layer(given[0], *(v[i] for v in given[1:]))[0] for i in range(3)]
    (together,) = layer(*given)
    assert together.shape == (3, N)
    assert torch.allclose(together, torch.stack(single), atol=1e-8)
    exact, measured = slope(layer, given)
    assert exact == pytest.approx(measured, rel=1e-4, abs=1e-5)


def matrices() -> dict[str, tuple[cp.Problem, list[cp.Parameter], list[cp.Variable], str]]:
    found = {}
    for name, limit, told in (
        ("nuclear", lambda X: cp.norm(X, "nuc") <= 1.5, "Schatten 1-norm ball"),
        ("spectral", lambda X: cp.sigma_max(X) <= 0.8, "Schatten inf-norm ball"),
        ("Frobenius", lambda X: cp.norm(X, "fro") <= 1.2, "2-norm ball"),
        ("rows", lambda X: cp.mixed_norm(X, 2, 1) <= 1.5, "ball of the sum of norms of groups"),
        ("columns", lambda X: cp.sum(cp.norm(X, 2, axis=0)) <= 1.5,
         "ball of the sum of norms of groups"),
        ("each row", lambda X: cp.norm(X, 2, axis=1) <= 0.5, "2-norm ball × 2-norm ball"),
    ):  # fmt: skip
        X, B = cp.Variable((2, 3)), cp.Parameter((2, 3))
        problem = cp.Problem(cp.Minimize(cp.sum_squares(X - B)), [limit(X)])
        found[name] = problem, [B], [X], told
    for name, attributes in (("symmetric", {"symmetric": True}), ("PSD", {"PSD": True})):
        X, C = cp.Variable((3, 3), **attributes), cp.Parameter((3, 3), symmetric=True)
        rows = [cp.trace(X) == 1] + ([X >> 0] if name == "symmetric" else [])
        problem = cp.Problem(cp.Minimize(cp.sum_squares(X - C)), rows)
        found[name] = problem, [C], [X], "spectraplex"
    X, C = cp.Variable((3, 3), symmetric=True), cp.Parameter((3, 3), symmetric=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(X - C)), [cp.trace(X) == 1])
    found["symmetric alone"] = problem, [C], [X], "polyhedron (1 equations, 0 inequalities)"
    return found


@pytest.mark.parametrize("name", list(matrices()))
def test_matrices(name):
    problem, parameters, variables, told = matrices()[name]
    layer = CvxpyLayer(problem, parameters, variables, engine="dfwlayer")
    assert layer.explain().split("over: ")[1] == told
    gen = torch.Generator().manual_seed(1)
    B = torch.randn(*parameters[0].shape, generator=gen, dtype=torch.float64)
    if parameters[0].is_symmetric():
        B = B + B.mT
    (X,) = layer(B)
    by_cvxpy(problem, parameters, [B])
    assert np.allclose(X.numpy(), variables[0].value, atol=2e-5)
    exact, measured = slope(layer, [B])
    assert exact == pytest.approx(measured, rel=1e-4, abs=1e-5)


def test_several_variables_in_any_order():
    x, Y, s = cp.Variable(3), cp.Variable((2, 3)), cp.Variable()
    c, B, t = cp.Parameter(3), cp.Parameter((2, 3)), cp.Parameter()
    cost = cp.sum_squares(x - c) + cp.sum_squares(Y - B) + cp.square(s - t)
    limits = [cp.norm(x) <= 1, cp.norm1(Y) <= 1, s >= 0.5]
    problem = cp.Problem(cp.Minimize(cost), limits)
    layer = CvxpyLayer(problem, [t, B, c], [s, x, Y], engine="dfwlayer")
    assert layer.explain().endswith("over: 2-norm ball × 1-norm ball × box")
    given = [torch.tensor(0.1), torch.randn(2, 3), torch.randn(3)]
    given = [v.double() for v in given]
    found = layer(*given)
    by_cvxpy(problem, [t, B, c], given)
    for value, variable in zip(found, (s, x, Y), strict=True):
        assert value.shape == variable.shape
        assert np.allclose(value.numpy(), variable.value, atol=1e-6)
    exact, measured = slope(layer, given)
    assert exact == pytest.approx(measured, rel=1e-4, abs=1e-5)


def test_variables_that_equations_define():
    """A controller: states are gone, and come back as outputs."""
    gen = np.random.default_rng(3)
    A, B = 0.9 * np.eye(2), gen.standard_normal((2, 1))
    start, weight = cp.Parameter(2), cp.Parameter(2, nonneg=True)
    X, U = [cp.Variable(2) for _ in range(4)], [cp.Variable(1) for _ in range(3)]
    rows = [X[0] == start] + [X[i + 1] == A @ X[i] + B @ U[i] for i in range(3)]
    cost = sum(cp.sum(cp.multiply(weight, cp.square(x))) for x in X) + sum(map(cp.sum_squares, U))
    problem = cp.Problem(cp.Minimize(cost), [*rows, *(cp.norm(u, "inf") <= 0.3 for u in U)])
    layer = CvxpyLayer(problem, [start, weight], [U[0], X[3]], engine="dfwlayer")
    assert "3 coordinates over: box" in layer.explain()
    given = [torch.tensor([1.0, -2.0]).double(), torch.tensor([1.0, 0.3]).double()]
    found = layer(*given)
    by_cvxpy(problem, [start, weight], given)
    assert np.allclose(found[0].numpy(), U[0].value, atol=1e-6)
    assert np.allclose(found[1].numpy(), X[3].value, atol=1e-6)
    exact, measured = slope(layer, given)
    assert exact == pytest.approx(measured, rel=1e-4)


def test_products_of_parameters():
    """W̃ = W is an equation, and W̃ x has a parameter x."""
    z, copied = cp.Variable(3), cp.Variable((3, 2))
    W, b, x = cp.Parameter((3, 2)), cp.Parameter(3), cp.Parameter(2)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(z - copied @ x - b)), [z >= 0, copied == W])
    layer = CvxpyLayer(problem, [W, b, x], [z], engine="dfwlayer")
    assert "3 coordinates over: box" in layer.explain()
    given = [torch.randn(s).double() for s in ((5, 3, 2), (3,), (5, 2))]
    expected = torch.relu((given[0] @ given[2].unsqueeze(-1)).squeeze(-1) + given[1])
    assert torch.allclose(layer(*given)[0], expected, atol=1e-10)
    exact, measured = slope(layer, given)
    assert exact == pytest.approx(measured, rel=1e-5)


def test_everything_is_given_by_equations():
    x, b = cp.Variable(3), cp.Parameter(3)
    layer = CvxpyLayer(cp.Problem(cp.Minimize(cp.sum_squares(x)), [x == b]), [b], [x])
    value = torch.randn(3).double().requires_grad_()
    assert torch.allclose(layer(value)[0], value)


def test_a_cost_of_zero_and_no_parameters():
    """x⁺ and x⁻ are not unique without a cost, but x is."""
    case = CASES["lasso"]
    problem, parameters, x = parts(case)
    A, b, t = values(parameters, case)
    A.requires_grad_()
    (found,) = CvxpyLayer(problem, parameters, [x])(A, b, 0 * t)
    exact = torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.squeeze(-1)
    assert torch.allclose(found, exact, atol=1e-8)
    gradients = [torch.autograd.grad(each.sum(), A)[0] for each in (found, exact)]
    assert torch.allclose(*gradients, atol=1e-7)
    y = cp.Variable(3)
    fixed = CvxpyLayer(cp.Problem(cp.Minimize(cp.sum_squares(y - 1)), [y <= 0.5]), [], [y])
    assert torch.allclose(fixed()[0], torch.full((3,), 0.5))


def test_a_square_without_a_weight_has_the_derivative_of_any_function():
    """y = (I + λ DᵀD)⁻¹ x at λ = 0, where cvxpylayers returns another number."""
    n = 6
    y, x, weight = cp.Variable(n), cp.Parameter(n), cp.Parameter(nonneg=True)
    cost = cp.sum_squares(x - y) + weight * cp.sum_squares(cp.diff(y))
    layer = CvxpyLayer(cp.Problem(cp.Minimize(cost)), [x, weight], [y], engine="dfwlayer")
    at = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    D = torch.eye(n, dtype=torch.float64).diff(dim=0)
    (found,) = layer(at, zero)
    assert torch.allclose(found, at)
    slopes = [torch.autograd.grad(each, zero, retain_graph=True)[0] for each in found]
    assert torch.allclose(torch.stack(slopes), -D.mT @ D @ at, atol=1e-10)


def test_the_matrix_of_a_quadratic_form_may_be_a_parameter():
    x, Q, q = cp.Variable(3), cp.Parameter((3, 3), PSD=True), cp.Parameter(3)
    cost = 0.5 * cp.quad_form(x, Q) + q @ x
    layer = CvxpyLayer(cp.Problem(cp.Minimize(cost), [x >= -1, x <= 1]), [Q, q], [x])
    root = torch.randn(3, 3).double()
    given = [root @ root.mT + torch.eye(3), torch.randn(3).double()]
    (found,) = layer(*given)
    at = given[0] @ found + given[1]
    assert torch.allclose((found - at).clamp(-1, 1), found, atol=1e-8)
    largest = CvxpyLayer(cp.Problem(cp.Maximize(-cost), [x >= -1, x <= 1]), [Q, q], [x])
    assert torch.allclose(largest(*given)[0], found)


def test_dual_variables_are_those_of_cvxpy():
    x, A, b, c = cp.Variable(3), cp.Parameter((2, 3)), cp.Parameter(2), cp.Parameter(3)
    equal, below = A @ x == b, x >= 0
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x) + c @ x), [equal, below])
    asked = [below.dual_variables[0], x, equal.dual_variables[0]]
    layer = CvxpyLayer(problem, [A, b, c], asked, engine="dfwlayer")
    A0 = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]])
    given = [A0, torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.5, 4.0])]
    given = [v.double() for v in given]
    found = layer(*given)
    by_cvxpy(problem, [A, b, c], given)
    for value, expected in zip(found, (below.dual_value, x.value, equal.dual_value), strict=True):
        assert np.allclose(value.numpy(), expected, atol=1e-6)
    exact, measured = slope(layer, given)
    assert exact == pytest.approx(measured, rel=1e-4, abs=1e-5)


@pytest.mark.filterwarnings(DIFFCP)
def test_gradients_are_those_of_cvxpylayers():
    theirs = pytest.importorskip("cvxpylayers.torch")
    case = CASES["rows"]
    problem, parameters, x = parts(case)
    given = [v.requires_grad_() for v in values(parameters, case, 2)]
    gradients = []
    for layer in (
        CvxpyLayer(problem, parameters, [x]),
        theirs.CvxpyLayer(problem, parameters, [x], solver_args={"eps": 1e-10}),
    ):
        (out,) = layer(*given)
        gradients.append(torch.autograd.grad(out.square().sum(), given))
    for ours, other in zip(*gradients, strict=True):
        assert torch.allclose(ours, other, atol=1e-4)


def test_second_derivatives_and_torch_func():
    x, c = cp.Variable(3), cp.Parameter(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [cp.norm(x) <= 1])
    layer = CvxpyLayer(problem, [c], [x])
    at = torch.tensor([1.0, 2.0, -1.0]).double()
    assert torch.autograd.gradgradcheck(lambda c: layer(c)[0], at.clone().requires_grad_())
    jacobian = torch.func.jacrev(lambda c: layer(c)[0])(at)
    unit = at / at.norm()
    exact = (torch.eye(3) - torch.outer(unit, unit)) / at.norm()
    assert torch.allclose(jacobian, exact, atol=1e-6)
    rows = torch.randn(4, 3).double()
    assert torch.allclose(torch.func.vmap(lambda c: layer(c)[0])(rows), layer(rows)[0])


def test_dtypes_batches_of_one_and_no_gradient():
    case = CASES["non-negative"]
    problem, parameters, x = parts(case)
    layer = CvxpyLayer(problem, parameters, [x])
    given = values(parameters, case)
    wide, narrow = layer(*given)[0], layer(*(v.float() for v in given))[0]
    assert narrow.dtype == torch.float32
    assert torch.allclose(narrow.double(), wide, atol=1e-5)
    one = layer(*(v[None].requires_grad_() for v in given))[0]
    assert one.shape == (1, N)
    assert one.requires_grad
    with torch.no_grad():
        assert not layer(*given)[0].requires_grad
    assert torch.equal(copy.deepcopy(layer)(*given)[0], wide)


def test_problems_without_a_solution():
    x, p = cp.Variable(2), cp.Parameter(2)
    empty = CvxpyLayer(cp.Problem(cp.Minimize(cp.sum_squares(x)), [x >= p, x <= 0]), [p], [x])
    with pytest.raises(SolveError, match="INFEASIBLE") as caught:
        empty(torch.ones(2).double())
    assert caught.value.solution.status == Status.INFEASIBLE
    endless = CvxpyLayer(cp.Problem(cp.Minimize(cp.sum(x)), [x <= p]), [p], [x])
    with pytest.raises(SolveError, match="UNBOUNDED"):
        endless(torch.ones(2).double())
    patient = CvxpyLayer(
        cp.Problem(cp.Minimize(cp.sum_squares(x)), [x >= p, x <= 0]),
        [p], [x], on_failure="ignore",
    )  # fmt: skip
    rows = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double()
    (found,) = patient(rows)
    assert found[0].isnan().all()
    assert (found[1] == 0).all()


def test_errors_are_those_of_cvxpylayers():
    x, y, A, b = cp.Variable(2), cp.Variable(2), cp.Parameter((3, 2)), cp.Parameter(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(A @ x - b)))
    with pytest.raises(ValueError, match=r"must exactly match problem\.parameters"):
        CvxpyLayer(problem, [A], [x])
    with pytest.raises(ValueError, match=r"must be a subset of problem\.variables"):
        CvxpyLayer(problem, [A, b], [x, y])
    with pytest.raises(ValueError, match="as a list or tuple"):
        CvxpyLayer(problem, {A, b}, [x])
    with pytest.raises(ValueError, match="must be DPP"):
        CvxpyLayer(cp.Problem(cp.Minimize(cp.sum_squares(A @ (A.T @ b) * y[0]))), [A, b], [y])
    layer = CvxpyLayer(problem, [A, b], [x])
    for given, told in (
        ((torch.ones(3, 2),), "A tensor must be provided for each CVXPY parameter"),
        ((torch.ones(3, 2), torch.ones(4)), "Invalid parameter shape for parameter 1"),
        ((torch.ones(3, 2), torch.ones(5, 4)), r"batched shape: \(batch_size, 3\)"),
        ((torch.ones(3, 2), torch.ones(1, 1, 3)), "Invalid parameter dimensionality"),
        ((torch.ones(4, 3, 2), torch.ones(5, 3)), "Inconsistent batch sizes"),
    ):
        with pytest.raises(ValueError, match=told):
            layer(*given)
    with pytest.raises(ValueError, match="engine: expected one of"):
        CvxpyLayer(problem, [A, b], [x], engine="theirs")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x, p: cp.Problem(cp.Minimize(cp.sum(cp.exp(x)) + p @ x)), r"objective term .*exp"),
        (lambda x, p: cp.Problem(cp.Minimize(p @ x), [cp.sum(cp.exp(x)) <= 1]), "constraint .*exp"),
        (lambda x, p: cp.Problem(cp.Minimize(cp.sum_squares(x - p)), [cp.norm(x) <= x[0] + 1]),
         "constraint .*norm"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings(DIFFCP)
def test_what_is_not_recognised_is_named_and_handed_on(make, told):
    x, p = cp.Variable(2), cp.Parameter(2)
    problem = make(x, p)
    with pytest.raises(NotRecognisedError, match=told):
        CvxpyLayer(problem, [p], [x], engine="dfwlayer")
    pytest.importorskip("cvxpylayers.torch")
    with pytest.warns(ForwardedWarning, match="goes to cvxpylayers"):
        layer = CvxpyLayer(problem, [p], [x])
    assert layer.engine == "cvxpylayers"
    assert "cvxpylayers" in repr(layer)
    value = torch.tensor([-0.5, -0.4]).double()
    by_cvxpy(problem, [p], [value])
    assert np.allclose(layer(value)[0].numpy(), x.value, atol=1e-3)


def test_settings_of_solvers_and_the_whole_solution():
    case = CASES["l2"]
    problem, parameters, x = parts(case)
    layer = CvxpyLayer(problem, parameters, [x], solver_args={"eps": 1e-6, "verbose": False})
    given = values(parameters, case)
    more = {"max_iters": 5000, "acceleration_lookback": 0}
    assert torch.allclose(layer(*given, solver_args=more)[0], layer(*given)[0], atol=1e-6)
    assert layer.solve(*given).converged
    assert layer.tol == 1e-8
    assert "2-norm ball" in repr(layer)


@pytest.mark.parametrize("attribute", ["diag", "symmetric", "PSD"])
def test_parameters_of_which_cvxpy_keeps_some_entries(attribute: str) -> None:
    x, b = cp.Variable(3), cp.Parameter(3)
    D = cp.Parameter((3, 3), **{attribute: True})
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x) + b @ x), [D @ x <= 1])
    value = np.diag([1.0, 2.0, 0.8])
    if attribute != "diag":
        value = value + 0.1 * np.array([[0.0, 3, 1], [3, 0, 4], [1, 4, 0]])
    D.value, b.value = value, np.array([1.0, -3.0, -4.0])
    problem.solve(solver=cp.CLARABEL)
    layer = CvxpyLayer(problem, [D, b], [x], engine="dfwlayer")
    (found,) = layer(torch.tensor(value), torch.tensor(b.value))
    assert float(np.max(value @ found.numpy())) == pytest.approx(1.0, abs=1e-12)  # it is held
    np.testing.assert_allclose(found.numpy(), x.value, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Reading from a sparse CVXPY expression")
def test_a_parameter_with_a_pattern_is_refused_by_name() -> None:
    x, S = cp.Variable(3), cp.Parameter((3, 3), sparsity=[(0, 2), (1, 2)], name="pattern")
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - 1)), [S @ x <= 1])
    with pytest.raises(NotRecognisedError, match="pattern"):
        CvxpyLayer(problem, [S], [x], engine="dfwlayer")
