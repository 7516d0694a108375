"""One problem without a batch is answered in arrays, and as tensor operations answer it."""

import copy
import warnings
from functools import partial

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from cvxpy_cases import CASES, drawn, parts, values
from dfwlayer.engines import compiled

pytest.importorskip("cvxpy", minversion="1.9")
from dfwlayer import SolveError
from dfwlayer.integrations.cvxpy import CvxpyLayer
from dfwlayer.layer.base import Layer

F64 = torch.float64
pytestmark = pytest.mark.usefixtures("compiled_code")
# limits that are roots or quotients, and spheres that the image of W cuts
BY_TENSORS = {
    "squares", "sum of squares", "square of a norm", "factor", "tall ellipsoid", "quad_form",
}  # fmt: skip


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


def clipped(**settings):
    """x clipped to [0, 0.5]: the layer, and where its solution has a part at a bound."""
    x, c = cp.Variable(3), cp.Parameter(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x <= 0.5, x >= 0])
    return CvxpyLayer(problem, [c], [x], **settings), torch.tensor([0.2, 0.9, 0.4], dtype=F64)


def below(**settings):
    """A set that varies, of which the bounds of some coordinates are written into others."""
    x, c, h = cp.Variable(3), cp.Parameter(3), cp.Parameter(3)
    rows = [x <= h, x[1:] >= -h[1:], cp.sum(x) <= 1]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), rows)
    given = [torch.tensor(v, dtype=F64) for v in ([0.2, 0.9, 0.4], [0.14, 0.63, 0.28])]
    return CvxpyLayer(problem, [c, h], [x], **settings), given


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # as it is loaded
@pytest.mark.parametrize("asked", [False, True])
def test_tangents_of_forward_mode(asked, answers):
    layer, at = clipped()
    with forward_ad.dual_level():
        (found,) = layer(forward_ad.make_dual(at.requires_grad_(asked), torch.ones(3, dtype=F64)))
        tangent = forward_ad.unpack_dual(found).tangent
    assert torch.equal(tangent.detach(), torch.tensor([1.0, 0.0, 1.0], dtype=F64))
    assert answers == []


def test_settings_of_a_call_are_checked(answers):
    layer, at = clipped()
    for given in ({"eps": torch.inf}, {"eps": torch.nan}, {"eps": -1.0}, {"max_iters": -1}):
        with pytest.raises(ValueError, match=r"(tol|max_steps): expected"):
            layer(at, solver_args=given)
    with pytest.warns(RuntimeWarning, match="MAX_STEPS"):
        layer(at, solver_args={"max_iters": 0})
    assert answers == []


def test_settings_of_a_call_stay_with_it(monkeypatch):
    """The layer as other threads see it does not change meanwhile."""
    layer, at = clipped(on_failure="raise")
    seen = []

    def watched(method):
        whole = getattr(Layer, method)

        def told(self, *args):
            seen.append((self is layer, layer.tol, layer.max_steps, layer.on_failure))
            return whole(self, *args)

        monkeypatch.setattr(Layer, method, told)

    watched("_solved")
    watched("_check")
    with pytest.warns(RuntimeWarning, match="MAX_STEPS"):
        layer(at[None], solver_args={"eps": 1e-3, "max_iters": 0})
    assert seen == [(False, 1e-8, 1000, "raise")] * 2
    layer(at[None], solver_args={"max_iters": 0})  # warned of once


def test_parameters_from_inference_mode(answers):
    layer, (c, h) = below()
    with torch.inference_mode():
        fixed = c * 1
        layer(fixed, h)
    (found,) = layer(fixed, h.requires_grad_())
    (own,) = torch.autograd.grad(found.sum(), h)
    (found,) = layer(c, h)
    (expected,) = torch.autograd.grad(found.sum(), h)
    torch.testing.assert_close(own, expected)
    assert answers == [True, True]


def test_a_first_call_in_inference_mode_or_a_transform():
    """What is kept for other calls serves them, too, and a copy."""
    x, c = cp.Variable(3), cp.Parameter(3)
    bound = x <= 0.5
    cost = cp.quad_form(x, np.eye(3) + 0.1) + c @ x
    problem = cp.Problem(cp.Minimize(cost), [bound])
    at = torch.tensor([-0.2, -1.9, -0.4], dtype=F64, requires_grad=True)
    for first in (torch.inference_mode()(lambda f: f(at)), lambda f: torch.func.jacrev(f)(at)):
        layer = CvxpyLayer(problem, [c], [x, bound.dual_variables[0]])
        first(layer)
        assert torch.autograd.gradcheck(layer, at)
        assert torch.autograd.gradgradcheck(lambda c, f=layer: f(c)[0].pow(2), at)
        (mapped, _) = torch.func.vmap(copy.deepcopy(layer))(at[None])
        torch.testing.assert_close(mapped[0], layer(at)[0])


def test_variables_that_are_the_same_for_all_parameters(answers):
    x, y, c = cp.Variable(3), cp.Variable(2), cp.Parameter(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [x <= 0.5, y == 2])
    layer = CvxpyLayer(problem, [c], [y, x])
    at = torch.tensor([0.2, 0.9, 0.4], dtype=F64, requires_grad=True)
    fixed, moves = layer(at)
    assert not fixed.requires_grad
    total = fixed.square().sum() + moves.square().sum()
    (gradient,) = torch.autograd.grad(total, at, create_graph=True)
    assert torch.allclose(gradient, torch.tensor([0.4, 0.0, 0.8], dtype=F64))
    (second,) = torch.autograd.grad(gradient.sum(), at)
    assert torch.allclose(second, torch.tensor([2.0, 0.0, 2.0], dtype=F64))
    assert answers == [True]


def test_another_device_by_default(answers):
    """Where tensors are made on it, as in code that lays out a model first."""
    x, y, a, b = cp.Variable(3), cp.Variable(3), cp.Parameter(), cp.Parameter(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - a * y)), [y == b, x <= a, cp.sum(x) <= 1])
    at = torch.tensor([0.2, 0.9, -0.4], dtype=F64)
    given = [torch.tensor(0.7, dtype=F64).requires_grad_(), at.requires_grad_()]
    with torch.device("meta"):
        layer = CvxpyLayer(problem, [a, b], [x])
        layer(*given)
    compare(layer, given)
    torch.testing.assert_close(layer(*given)[0], layer(given[0], given[1][None])[0][0])
    assert answers == [True, True, True]


def test_checkpoints(answers):
    """A first call saves as many tensors as the second."""
    layer, given = below()
    wanted = [v.requires_grad_() for v in given]
    found = checkpoint(lambda *v: layer(*v)[0].square(), *given, use_reentrant=False)
    own = torch.autograd.grad(found.sum(), wanted)
    expected = torch.autograd.grad(layer(*given)[0].square().sum(), wanted)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert answers == [True, True, True]


def test_gradients_that_arrive_with_a_sign_to_be_resolved(answers):
    layer, at = clipped()
    at.requires_grad_()
    (found,) = layer(at)
    (gradient,) = torch.autograd.grad(found, at, torch._neg_view(torch.ones(3, dtype=F64)))
    assert torch.equal(gradient, torch.tensor([-1.0, 0.0, -1.0], dtype=F64))
    assert answers == [True]


def test_numbers_beyond_the_range_say_nothing_but_the_error(answers):
    """NumPy would warn of products that are infinite, or raise what it was told to."""
    x, y, a, b = cp.Variable(3), cp.Variable(3), cp.Parameter(), cp.Parameter(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - a * y)), [y == b, x <= 1])
    layer = CvxpyLayer(problem, [a, b], [x])
    large = torch.tensor(1e200, dtype=F64), torch.full((3,), 1e200, dtype=F64)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="NaN or infinite"):
            layer(*large)
    assert answers == [False]


def test_what_went_well_once_is_checked_again(answers):
    """Rows of another call may be of NaN, or hold no point."""
    layer, (c, h) = below()
    layer(c, h)
    for wrong, error in ((torch.nan, ValueError), (-1.0, SolveError)):
        for places in (slice(1, 2), slice(1, 3), slice(3)):
            limit = h.clone()
            limit[places] = wrong
            with pytest.raises(error) as own:
                layer(c, limit)
            with pytest.raises(error) as other:
                layer._answer([c, limit], {})
            assert str(own.value) == str(other.value)
    assert answers == [True] + [False] * 6


def test_only_entries_are_taken_for_entries():
    """A tensor of the set that is more than entries of the arrays is left to tensor operations."""
    made = pytest.importorskip("dfwlayer.integrations.cvxpy.single")._made
    low, high = (torch.arange(3.0, dtype=F64).requires_grad_() for _ in range(2))
    arrays = {"lower": low, "upper": high}
    plain = made((), (None, low.flip(0), torch.cat((high, low))), arrays)
    assert plain.shapes == ()
    at = [(link.tensor, link.name, link.entries.tolist()) for link in plain.links]
    assert at == [(1, "lower", [2, 1, 0]), (2, "lower", [3, 4, 5]), (2, "upper", [0, 1, 2])]
    for wrong in (-low, 2 * low, low + low.flip(0), low.expand(2, 3), low.square()):
        assert made((), (wrong,), arrays).shapes is None


def nearly_linear(seed, curvature, slope, place):
    """A drawn problem with parameters of very different sizes, and what tells f of a solution."""
    problem, parameters, x, draw = drawn(seed)
    factors = {0: curvature, 1: slope} | ({place: 1e6} if place > 1 else {})
    given = [factors.get(i, 1.0) * v.detach() for i, v in enumerate(draw(()))]
    for parameter, value in zip(parameters, given, strict=True):
        parameter.value = value.numpy()

    def cost(found):
        x.value = found.numpy()
        for row in problem.constraints:
            for u in row.variables():
                if u.id != x.id:  # u = x − c
                    u.value = np.zeros(u.shape)
                    u.value = row.args[1].value - row.args[0].value
        assert all(np.max(row.violation()) <= 1e-12 for row in problem.constraints)
        return problem.objective.value

    problem.solve(solver="CLARABEL", tol_gap_rel=1e-12, tol_gap_abs=1e-12, tol_feas=1e-12)
    make = partial(CvxpyLayer, problem, parameters, [x], engine="dfwlayer")
    return make(), given, cost, problem.value


@pytest.mark.parametrize(
    "sizes",
    [
        (5, 1e-6, 1.0, 3), (9, 1e-6, 1e4, 0), (21, 1e-6, 1e4, 3), (39, 1e-7, 1e4, 0),
        (44, 1e-7, 1e4, 0), (52, 1e-6, 1.0, 3),
        (13, 1e-6, 1.0, 3), (17, 1e-6, 1.0, 2),  # the pieces that are found hold no point
    ],
)  # fmt: skip
def test_pieces_that_were_found_with_too_few_digits(sizes):
    """Steps from kink to kink lose them if f is nearly linear; what they find is proven."""
    layer, given, cost, least = nearly_linear(*sizes)
    batch = layer(*[v[None] for v in given])[0][0]
    for (found,) in (layer(*given), layer._answer(given, {}), [batch]):
        assert cost(found) <= least + 1e-7 * abs(least)
