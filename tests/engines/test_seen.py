"""Projections onto ℓ1 balls that torch.compile sees through, without an operator."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer as dfw
from dfwlayer.engines.seen import project_in_sight, set_in_sight
from dfwlayer.engines.seen.limits import PAIRS
from helpers import close

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is deprecated")


def whole(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def limited(q, weight, radius):
    return dfw.DFWLayer(1)(None, q, weight, radius)


def with_gradients(fn, *tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    x = fn(*leaves)
    v = torch.linspace(-1, 1, x.numel()).reshape(x.shape)
    grads = torch.autograd.grad(torch.where(x.isnan(), 0.0, x * v).sum(), leaves)
    return x.detach(), *grads


def drawn(gen, rows, n, shared, scale=1.0):
    lead = () if shared else (rows,)
    weight = torch.randn(*lead, n, generator=gen)
    weight[..., 0] *= float(torch.rand((), generator=gen) > 0.5)  # a zero weight holds nothing
    return (
        scale * torch.randn(rows, n, generator=gen),
        weight,
        scale * 3 * torch.rand(lead, generator=gen),
    )


@given(
    st.integers(0, 10**6),
    st.integers(2, 2 * PAIRS),
    st.booleans(),
    st.sampled_from((1e-20, 1e-3, 1.0, 1e4, 1e20)),
)
@settings(max_examples=60, deadline=None)
def test_numbers_and_gradients_are_those_of_eager_mode(seed, n, shared, scale):
    gen = torch.Generator().manual_seed(seed)
    data = drawn(gen, 5, n, shared, scale)
    want = with_gradients(limited, *data)
    got = with_gradients(lambda *given: project_in_sight(*given)[0], *data)
    for a, b in zip(want, got, strict=True):
        assert (a - b).abs().max() <= 2e-5 * max(float(a.abs().max()), 1e-30)
    size = (data[1].double() * got[0].double()).abs().sum(-1)
    limit = torch.where((data[1] != 0).any(-1), data[2], torch.inf)
    assert (size <= limit * (1 + 2e-7)).all()


@pytest.mark.parametrize("extreme", [0.0, 1e-38, 1e20, 3e38])
@pytest.mark.parametrize("n", [3, PAIRS + 3])
def test_extreme_numbers(extreme, n):
    q = torch.randn(4, n, generator=torch.Generator().manual_seed(0))
    q[0], q[1, 0], q[2] = extreme, -extreme, 1.0  # ties, too
    for radius in (0.0, 1e-30, 1.0, 1e30):
        given = q, torch.ones(n), torch.tensor(radius)
        x, suspect = project_in_sight(*given)
        want = limited(*given)
        assert not suspect
        assert (x - want).abs().max() <= 1e-5 * want.abs().max()
        assert (x.double().abs().sum(-1) <= radius * (1 + 2e-7)).all()


def operators(fn, *given):
    """The names of the library's operators in the graph of a function."""
    found = []

    def look(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(fn, backend=look, fullgraph=True)(*given)
    return [name for name in found if name.startswith("dfwlayer")]


def test_which_calls_are_seen_through():
    q, one = torch.randn(3, 4), torch.ones(())

    assert operators(dfw.DFWLayer(1), None, q, None, one) == ["dfwlayer.judged"]
    assert operators(dfw.DFWLayer(1, verify=False), None, q, None, one) == []
    assert operators(dfw.DFWLayer(2), None, q, None, one) == ["dfwlayer.judged"]
    other = (
        (dfw.DFWLayer(3), None, q, None, one),
        (dfw.DFWLayer(2), None, q, torch.ones(4), one),
        (dfw.DFWLayer(1, method="dfw"), None, q, None, one),
        (dfw.DFWLayer(1, differentiate="unroll"), None, q, None, one),
        (dfw.DFWLayer(1), torch.eye(4), q, None, one),
        (dfw.DFWLayer(1), None, q.double(), None, one.double()),
    )
    for layer, *given_to in other:
        assert operators(layer, *given_to) == ["dfwlayer.call"], layer
    assert set_in_sight(dfw.LpBall(1, torch.ones(2)), q) is None
    assert set_in_sight(dfw.LpBall(1, one, torch.ones(3)), q) is None


def test_what_is_wrong_is_said_as_in_eager_mode():
    q, weight, radius = drawn(torch.Generator().manual_seed(0), 4, 5, False)
    q[1, 2], weight[2, 0] = torch.nan, torch.inf
    layer = dfw.DFWLayer(1, tol=1e-3)  # compiled layers with the same settings warn once
    compiled = whole(lambda *given: layer(None, *given))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = with_gradients(limited, q, weight, radius)
    with pytest.warns(RuntimeWarning, match="2 of 4 problems were not solved"):
        got = with_gradients(compiled, q, weight, radius)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert got[0][1:3].isnan().all()
    assert not got[1][1:3].any()
    with pytest.raises(ValueError, match="radius: expected numbers ≥ 0"):
        compiled(q[0], weight[0], torch.tensor(-1.0))
    with pytest.raises(ValueError, match="q: 1 of 5 values are NaN"):
        compiled(q[1], weight[0], radius[0])
    raising = dfw.DFWLayer(1, on_failure="raise")
    with pytest.raises(dfw.SolveError, match="1 of 4"):
        whole(lambda q: raising(None, q))(q)


def test_transforms():
    q, weight, radius = drawn(torch.Generator().manual_seed(1), 3, 4, False)
    mapped = torch.func.vmap(limited)
    close(whole(mapped)(q, weight, radius), mapped(q, weight, radius), rtol=1e-6, atol=1e-6)
    rows = torch.func.vmap(torch.func.jacrev(limited, argnums=(0, 1, 2)))
    for a, b in zip(whole(rows)(q, weight, radius), rows(q, weight, radius), strict=True):
        close(a, b, rtol=1e-5, atol=1e-6)
    q[1, 2] = torch.nan
    own = dfw.DFWLayer(1, tol=1e-4)  # compiled layers with the same settings warn once
    with pytest.warns(RuntimeWarning, match="1 of 3 problems were not solved"):
        x = whole(torch.func.vmap(lambda q: own(None, q)))(q)
    assert x.isnan().any(-1).tolist() == [False, True, False]


def test_the_operator_is_sound():
    q = torch.randn(3, 4)
    given_to = (torch.tensor(False), [q, torch.ones(())], "()", "never read")
    torch.library.opcheck(torch.ops.dfwlayer.judged.default, given_to)
