"""Projections onto other sets that torch.compile sees through, without an operator."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer as dfw
from dfwlayer.engines.seen import set_in_sight
from dfwlayer.engines.seen.limits import PAIRS
from helpers import close

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is deprecated")


class Drawn:
    """Parameters for some problems, or for one that all of them share."""

    def __init__(self, seed, rows, n, scale):
        self.gen = torch.Generator().manual_seed(seed)
        self.rows, self.n, self.scale = rows, n, scale

    def draw(self, size, low, high):
        lead = (self.rows,) if torch.rand((), generator=self.gen) > 0.5 else ()
        return low + (high - low) * torch.rand((*lead, *size), generator=self.gen)

    def number(self, low=0.1, high=1.0):
        return self.scale * self.draw((), low, high)

    def entries(self, low=0.1, high=1.0):
        return self.scale * self.draw((self.n,), low, high)

    def weight(self):
        weight = self.draw((self.n,), -1.0, 1.0)
        weight[..., 0] *= float(torch.rand((), generator=self.gen) > 0.5)  # a zero holds nothing
        return weight


def around(own):
    """Bounds around a point that may be far from zero."""
    lower = own.entries(-1.0, 0.5)
    return lower, lower + own.scale * own.draw((own.n,), 0.0, 1.0)


# a set from its tensors, and these
SETS = {
    "box": (dfw.Box, around),
    "one side": (lambda u: dfw.Box(None, u), lambda own: (own.entries(-1.0, 1.0),)),
    "positive": (dfw.NonNegative, lambda _: ()),
    "cube": (lambda t: dfw.LpBall(math.inf, t), lambda own: (own.number(),)),
    "weighted cube": (
        lambda t, w: dfw.LpBall(math.inf, t, w),
        lambda own: (own.number(), own.weight()),
    ),
    "ball": (lambda t: dfw.LpBall(2, t), lambda own: (own.number(),)),
    "l1": (lambda t: dfw.LpBall(1, t), lambda own: (own.number(),)),
    "simplex": (dfw.Simplex, lambda own: (own.number(),)),
    "caps": (
        dfw.CappedSimplex,
        lambda own: (own.number(0.1, 0.2) * own.n, own.entries(0.2, 1.0)),
    ),
    "k": (dfw.KSparse, lambda own: (own.number(1.0, 3.0) / own.scale, own.number())),
    "l1 in a box": (
        lambda t, w, size: dfw.L1Box(t, w, -size, 2 * size),
        lambda own: (own.number() * own.n / 4, own.weight(), own.entries()),
    ),
    "l1 beside zero": (
        lambda t, low, up: dfw.L1Box(t, None, low, up),
        lambda own: (own.number(1.0, 1.2) * own.n, *around(own)),
    ),
}


def with_gradients(fn, *tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    x = fn(*leaves)
    v = torch.linspace(-1, 1, x.numel()).reshape(x.shape)
    grads = torch.autograd.grad((x.nan_to_num() * v).sum(), leaves, materialize_grads=True)
    return x.detach(), *grads


def layer_of(make, **options):
    return lambda q, *own: dfw.SetLayer(lambda: make(*own), **options)(q)


@pytest.mark.parametrize("name", SETS)
@given(
    st.integers(0, 10**6),
    st.integers(1, 2 * PAIRS),
    st.sampled_from((1e-20, 1e-3, 1.0, 1e4, 1e15)),
)
@settings(max_examples=15, deadline=None)
def test_numbers_and_gradients_are_those_of_eager_mode(name, seed, n, scale):
    make, drawn = SETS[name]
    own = Drawn(seed, 3, n, scale)
    q, given_to = 2 * scale * torch.randn(3, n, generator=own.gen), drawn(own)
    want = with_gradients(layer_of(make), q, *given_to)
    got = with_gradients(lambda *data: set_in_sight(make(*data[1:]), data[0])[0], q, *given_to)
    for a, b, unit in zip(want, got, (0.0, 1.0, *[1.0 for _ in given_to]), strict=True):
        least = unit * float(q.abs().max() / max(float(t.abs().max()) for t in (q, *given_to)))
        assert (a - b).abs().max() <= 2e-5 * max(float(a.abs().max()), least)
    assert not set_in_sight(make(*given_to), q)[1]
    bound = make(*given_to).bind((n,), q.dtype, q.device)
    # sums of n numbers of this size are rounded
    room = n * max(float(got[0].abs().max()), float(bound.violation(want[0]).max()))
    assert bound.violation(got[0]).max() <= 2e-7 * room


@pytest.mark.parametrize("name", SETS)
def test_one_graph_without_an_operator_for_any_batch(name):
    make, drawn = SETS[name]
    found = []

    def look(graph, _):
        names = [str(node.target) for node in graph.graph.nodes]
        found.append([name for name in names if name.startswith("dfwlayer")])
        return graph

    torch._dynamo.reset()
    own = drawn(Drawn(0, 3, 5, 1.0))
    shared = [t if t.dim() == 0 or tuple(t.shape) == (5,) else t[0] for t in own]
    layer = dfw.SetLayer(make(*shared))
    compiled = torch.compile(layer, backend=look, fullgraph=True)
    for rows in (3, 7, 12, 4):
        q = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
        close(compiled(q), layer(q), rtol=1e-5, atol=1e-6)
    assert len(found) <= 2  # one for the first size, one for all others
    assert all(graph == ["dfwlayer.judged"] for graph in found), found


WRONG = {
    "box": (lambda: (torch.tensor([0.0, -1.0, 1.0]), torch.tensor([1.0, 1.0, 0.5])), "lower"),
    "ball": (lambda: (torch.tensor(-1.0),), "radius"),
    "cube": (lambda: (torch.tensor(-1.0),), "radius"),
    "simplex": (lambda: (torch.tensor(-1.0),), "radius"),
    "caps": (lambda: (torch.tensor(1.0), torch.full((3,), 0.2)), "cap"),
    "k": (lambda: (torch.tensor(0.5), torch.tensor(1.0)), "k"),
    "l1 beside zero": (lambda: (torch.tensor(0.5), torch.ones(3), torch.ones(3) * 2), "radius"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_as_in_eager_mode(name):
    make, (drawn, argument) = SETS[name][0], WRONG[name]
    layer = dfw.SetLayer(make(*drawn()))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    told = []
    for model in (layer, compiled):
        with pytest.raises(ValueError, match=f"^{argument}: expected") as error:
            model(torch.zeros(3))
        told.append(
            str(error.value).splitlines()[0]
        )  # older compilers say where it was in the graph
    assert told[0] == told[1]


@pytest.mark.parametrize("name", SETS)
def test_a_problem_that_is_no_problem_leaves_the_others_alone(name):
    make, drawn = SETS[name]
    own = drawn(Drawn(3, 4, 5, 1.0))
    q = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    q[1, 2], q[2, 0] = torch.nan, torch.inf
    with pytest.warns(RuntimeWarning, match="2 of 4 problems were not solved"):
        want = with_gradients(layer_of(make), q, *own)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, *own: set_in_sight(make(*own), q), fullgraph=True, backend="aot_eager"
    )
    got = with_gradients(lambda *data: compiled(*data)[0], q, *own)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert got[0][1:3].isnan().all()
    assert not got[1][1:3].any()


def test_values_beyond_the_range_are_told():
    q = torch.tensor([1e20, -2e20, 0.5])
    layer = dfw.SetLayer(dfw.Box(-1.0, 3e19), tol=1e-3)  # compiled ones like it warn once
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="1 OUT_OF_RANGE"):
        want = layer(q)
    with pytest.warns(RuntimeWarning, match="1 OUT_OF_RANGE"):
        got = compiled(q)
    assert torch.equal(want, got)


def test_layers_without_a_formula_stay_operators():
    q = torch.randn(4, 5)
    other = (
        (dfw.LpBall(2, 1.0, torch.rand(5)), q),
        (dfw.LpBall(3), q),
        (dfw.LpBall(2, centre=torch.rand(5)), q),
        (dfw.Box(torch.zeros(3, 5), 1.0), q[:3].double()),
        (dfw.Simplex(torch.rand(1)), q),
    )
    for made, given_to in other:
        assert set_in_sight(made, given_to) is None, made
    for options in ({"method": "frank-wolfe"}, {"differentiate": "unroll"}, {"max_steps": 0}):
        names = []

        def look(graph, _, names=names):
            names.extend(str(node.target) for node in graph.graph.nodes)
            return graph

        torch._dynamo.reset()
        layer = dfw.SetLayer(dfw.Simplex(), on_failure="ignore", **options)
        torch.compile(layer, backend=look, fullgraph=True)(q)
        assert "dfwlayer.call" in names, options


def test_transforms():
    q = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    for name, (make, drawn) in SETS.items():
        shared = [
            t if t.dim() == 0 or tuple(t.shape) == (5,) else t[0]
            for t in drawn(Drawn(1, 3, 5, 1.0))
        ]

        rows = torch.func.vmap(torch.func.jacrev(dfw.SetLayer(make(*shared))))
        torch._dynamo.reset()
        compiled = torch.compile(rows, backend="aot_eager", fullgraph=True)
        assert (compiled(q) - rows(q)).abs().max() < 1e-5, name


def test_a_set_is_known_by_its_normal_form():
    class Wide(dfw.Box):
        """A set of somebody else's."""

    q, weight = 4 * torch.randn(3, 5), torch.rand(5)
    assert torch.equal(set_in_sight(Wide(-1.0, weight), q)[0], dfw.Box(-1.0, weight).project(-q))
    # what its own check refuses is not seen, as that check is to say so
    assert set_in_sight(dfw.LpBall(1, 1.0, torch.ones(())), q) is None
    assert set_in_sight(dfw.Product([dfw.Box(-1.0, 1.0), dfw.Simplex()], [2, 3]), q) is None
    assert set_in_sight(dfw.Intersection(dfw.Box(-1.0, 1.0), dfw.LpBall(1)), q) is None
