"""One problem without a batch is answered in arrays, and as tensor operations answer it."""

import cvxpy as cp
import pytest
import torch

from cvxpy_cases import CASES, drawn, parts, values
from dfwlayer.engines import compiled

pytest.importorskip("cvxpy", minversion="1.9")
from dfwlayer.integrations.cvxpy import CvxpyLayer

F64 = torch.float64
# limits that are roots or quotients, and spheres that the image of W cuts
BY_TENSORS = {
    "squares", "sum of squares", "square of a norm", "factor", "tall ellipsoid", "quad_form",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _compiled():
    if not compiled.available():
        pytest.skip("there is no compiled code")
    with compiled.using("wait"):
        yield


@pytest.fixture
def answers(monkeypatch):
    """Whether each call since was answered in arrays."""
    found = []
    module = "dfwlayer.integrations.cvxpy.single.Single.found"
    whole = pytest.importorskip("dfwlayer.integrations.cvxpy.single").Single.found

    def told(*args):
        answer = whole(*args)
        found.append(answer is not None)
        return answer

    monkeypatch.setattr(module, told)
    return found


def compare(layer, given):
    """The same variables and gradients in both ways, for one gradient that arrives."""
    wanted = [v for v in given if v.requires_grad]
    both = []
    for outputs in (layer(*given), layer._answer(given, {})):
        total = sum((o * torch.linspace(0.5, 1.5, o.numel()).view_as(o)).sum() for o in outputs)
        both.append((outputs, torch.autograd.grad(total, wanted, allow_unused=True)))
    for own, other in zip(*both, strict=True):
        for one, two in zip(own, other, strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_tensor_operations_find(name, answers):
    case = CASES[name]
    problem, parameters, x = parts(case)
    layer = CvxpyLayer(problem, parameters, [x], engine="dfwlayer")
    for seed in range(3):
        given = values(parameters, case, seed=seed)
        compare(layer, [v.requires_grad_() for v in given])
        compare(layer, [given[0].detach(), *given[1:]])  # not all ask for a gradient
    assert (True in answers) == (name not in BY_TENSORS)


@pytest.mark.parametrize("seed", range(12))
def test_it_is_what_tensor_operations_find_on_pieces(seed, answers):
    problem, parameters, x, draw = drawn(seed)
    layer = CvxpyLayer(problem, parameters, [x], engine="dfwlayer")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        compare(layer, draw(()))
    assert answers == [True]


@pytest.mark.parametrize("radius", [0.3, 30.0])  # on the sphere and inside
@pytest.mark.parametrize("quadratic", [False, True])
def test_ellipsoids(radius, quadratic, answers):
    """W and c with and without a P that varies, and a limit that does."""
    x, W, c, t = cp.Variable(3), cp.Parameter((3, 3)), cp.Parameter(3), cp.Parameter(nonneg=True)
    q, S = cp.Parameter(3), cp.Parameter((3, 3))
    cost = cp.sum_squares(S @ x - q) if quadratic else cp.sum_squares(x - q)
    given = {S: torch.eye(3), q: torch.ones(3), W: torch.eye(3), c: 0.1 * torch.ones(3)}
    gen = torch.Generator().manual_seed(1)
    drawn_values = [v + 0.3 * torch.randn(v.shape, generator=gen) for v in given.values()]
    parameters = [*given, t]
    values = [v.double().requires_grad_() for v in (*drawn_values, torch.tensor(radius))]
    if not quadratic:
        parameters, values = parameters[1:], values[1:]
    problem = cp.Problem(cp.Minimize(cost), [cp.norm(W @ x + c) <= t])
    layer = CvxpyLayer(problem, parameters, [x], engine="dfwlayer")
    compare(layer, values)
    assert answers == [True]


def test_products_of_products_and_variables_made_of_parameters(answers):
    """Terms of three parameters, and an output that the solution has no part in."""
    z, copied, y, u = (cp.Variable(2) for _ in range(4))
    a, b, c = cp.Parameter(), cp.Parameter(), cp.Parameter(2)
    rows = [copied == c, y == a * copied, u == b * y, z >= 0]
    layer = CvxpyLayer(
        cp.Problem(cp.Minimize(cp.sum_squares(z - u)), rows), [a, b, c], [z, y, u],
        engine="dfwlayer",
    )  # fmt: skip
    given = [torch.tensor(v, dtype=F64, requires_grad=True) for v in (0.7, 1.3, [1.0, -2.0])]
    compare(layer, given)
    assert answers == [True]
    assert torch.autograd.gradcheck(lambda *v: layer(*v), given)
    assert torch.autograd.gradgradcheck(lambda *v: layer(*v)[0].pow(2), given)


def test_what_is_changed_in_place(answers):
    """A solution that its owner changes has the gradient it had; a parameter raises."""
    x, c = cp.Variable(3), cp.Parameter(3)
    layer = CvxpyLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x <= 0.5, x >= 0]), [c], [x])
    at = torch.tensor([0.2, 0.9, 0.4], dtype=F64, requires_grad=True)
    (found,) = layer(at)
    found.data.mul_(7)
    (gradient,) = torch.autograd.grad(found.sum(), at)
    assert torch.equal(gradient, torch.tensor([1.0, 0.0, 1.0], dtype=F64))
    moved = at * 1
    (found,) = layer(moved)
    moved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
    assert answers == [True, True]


def test_what_is_left_to_tensor_operations(answers):
    """Batches, transforms, other methods, and numbers that compiled code has no answer to."""
    x, c = cp.Variable(3), cp.Parameter(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x <= 0.5, x >= 0])
    at = torch.tensor([0.2, 0.9, -0.4], dtype=F64)
    expected = at.clamp(0, 0.5)
    layer = CvxpyLayer(problem, [c], [x])
    assert torch.allclose(layer(at[None])[0], expected[None])
    (mapped,) = torch.func.vmap(layer)(at[None])
    assert torch.allclose(mapped, expected[None])
    steps = CvxpyLayer(problem, [c], [x], method="frank-wolfe", tol=1e-6)
    assert torch.allclose(steps(at)[0], expected, atol=1e-2)
    assert answers == []
    with pytest.raises(ValueError, match="NaN or infinite"):
        layer(at * torch.nan)
    assert answers == [False]
    with compiled.using("off"):
        assert torch.allclose(layer(at)[0], expected)
    assert answers == [False, False]


def test_gradients_in_float32(answers):
    case = CASES["rows"]
    problem, parameters, x = parts(case)
    layer = CvxpyLayer(problem, parameters, [x], engine="dfwlayer")
    wide = [v.requires_grad_() for v in values(parameters, case)]
    narrow = [v.detach().float().requires_grad_() for v in wide]
    one, two = (torch.autograd.grad(layer(*v)[0].sum(), v) for v in (wide, narrow))
    for own, other in zip(one, two, strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(own.float(), other, rtol=1e-3, atol=1e-4)
    assert answers == [True, True]
