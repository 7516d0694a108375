"""Models in one graph: torch.compile(fullgraph=True), torch.export, make_fx."""

import gc
import shutil
from dataclasses import is_dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dfwlayer as dfw
from dfwlayer import constraints
from dfwlayer.constraints import parameters
from dfwlayer.constraints.base import Constraint
from dfwlayer.ops.recorded import operators
from dfwlayer.ops.recorded.text import described
from helpers import close
from set_cases import CASES

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit",
    "ignore:.*is deprecated",
    "ignore::torch.jit.TracerWarning",
    "ignore:The CUDA Graph is empty",  # with which torch begins its own recordings
)
functions_go = pytest.mark.skipif(
    torch.__version__ < "2.8", reason="older compilers cannot hand a function over"
)


def whole(fn, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True)


def problem(name, rows=3, seed=0):
    gen = torch.Generator().manual_seed(seed)
    case = CASES[name]
    params = {k: t.requires_grad_() for k, t in case.parameters(gen, rows).items()}
    q = torch.randn(rows, *case.shape, dtype=F64, generator=gen)
    return case, params, q.requires_grad_()


class OverSet(torch.nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = case

    def forward(self, q, params):
        return dfw.solve(dfw.Quadratic(None, q), self.case.build(params), shape=self.case.shape)


@pytest.mark.parametrize("name", CASES)
def test_every_set_compiles(name):
    """The same numbers as in eager mode, and the same gradients."""
    if name == "CustomSet" and torch.__version__ < "2.8":
        pytest.skip("older compilers cannot hand a function over")
    case, params, q = problem(name)
    model = OverSet(case)
    want, got = model(q, params), whole(model)(q, params)
    tensors = [q, *params.values()]
    for field in ("x", "value", "gap", "num_steps", "status"):
        close(getattr(got, field), getattr(want, field), rtol=0, atol=0)
        assert getattr(got, field).requires_grad == getattr(want, field).requires_grad
    grads = [
        torch.autograd.grad(s.x.sin().sum() + s.value.sum(), tensors, materialize_grads=True)
        for s in (want, got)
    ]
    for a, b in zip(*grads, strict=True):
        close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "body",
    [dfw.Box(-0.3, 0.4), dfw.KSparse(2, 1.0), dfw.Product([dfw.Simplex(), dfw.Box(-1.0)], [2, 2])],
)
def test_numbers_of_a_set_may_be_symbols(body):
    """As they are with dynamic=True, which begins again where one has to be known."""
    layer = dfw.SetLayer(body)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        q = torch.randn(rows, 4)
        close(compiled(q), layer(q), 1e-6)


def test_what_a_compiler_asks_of_a_set_is_known_before():
    """A table that is made while it traces is there when it begins again: another way, an error."""
    for name in constraints.__all__:
        kind = getattr(constraints, name)
        if isinstance(kind, type) and issubclass(kind, Constraint) and is_dataclass(kind):
            assert kind in parameters._tables


@pytest.mark.parametrize("name", CASES)
def test_every_set_is_exported_or_refused(name):
    """An exported program solves the problem it is given, and never returns a constant."""
    case, params, q = problem(name)
    params = {k: t.detach() for k, t in params.items()}
    model, q = OverSet(case), q.detach()
    exported = torch.export.export(model, (q, params), strict=False).module()
    _, others, q2 = problem(name, seed=1)
    close(exported(q2, others).x, model(q2, others).x, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"layer\.deploy"):
        torch.jit.trace(lambda q: model(q, params).x, (q,))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_batches_are_dynamic(strict):
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), dfw.SetLayer(dfw.Simplex()))
    size = torch.export.Dim("size", min=2)
    program = torch.export.export(
        model, (torch.randn(4, 5),), dynamic_shapes=({0: size},), strict=strict
    )
    for rows in (2, 9):
        z = torch.randn(rows, 5)
        close(program.module()(z), model(z), rtol=0, atol=0)


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(7, 4)
        self.limit = dfw.DFWLayer(1)
        self.box = dfw.SetLayer(dfw.Box(-0.5, torch.nn.Parameter(torch.full((4,), 0.5))))
        self.rows = dfw.QPLayer()
        self.G = torch.nn.Parameter(torch.ones(1, 4))

    def forward(self, z, radius=0.7):
        a = self.net(z)
        b = self.limit(None, -a, z[:, :4], radius)
        c = self.box(torch.eye(4) * 2, b)
        d = self.rows(torch.eye(4), -c, self.G, torch.full((1,), 0.1))
        return b + d


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers_in_one_graph(backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no compiler for C++")
    torch.manual_seed(0)
    model = Policy()
    compiled = whole(model, backend)
    for rows in (5, 3):
        z = torch.randn(rows, 7)
        if backend == "inductor":  # one graph for any batch at once, as C++ takes long to compile
            torch._dynamo.mark_dynamic(z, 0)
        grads = []
        for each in (model, compiled):
            out = each(z)
            grads.append([out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))])
        for a, b in zip(*grads, strict=True):
            close(b, a, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            close(compiled(z), model(z), rtol=1e-6, atol=1e-6)


def test_nothing_is_compiled_again():
    torch._dynamo.utils.counters.clear()
    model = Policy()
    compiled = whole(model, "eager")
    for call in range(100):
        compiled(torch.randn(2 + call % 10, 7))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    for radius in (0.1, 0.2, 0.3, 0.4, 0.5):  # a number that changes is one more graph at most
        close(compiled(z := torch.randn(4, 7), radius), model(z, radius), rtol=1e-6, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_what_is_kept_for_gradients_goes():
    """Not before the gradient was had, and with the graph."""
    model, z = Policy(), torch.randn(3, 7)
    compiled = whole(model)
    outs = [compiled(z) for _ in range(3)]
    assert len(operators._kept) == 6  # of box and rows; compilers see through the ball
    for out in outs:
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    kept = [out.detach() for out in outs]
    del outs, out
    gc.collect()
    assert len(operators._kept) == 0
    with torch.no_grad():
        compiled(z)
    assert len(operators._kept) == 0
    assert kept


def test_autocast_is_that_of_eager_mode():
    torch.manual_seed(0)
    model, z = Policy(), torch.randn(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.nn.Sequential(model.net, dfw.SetLayer(dfw.Simplex()))
        ball = lambda z: model.limit(None, model.net(z), None, 0.7)  # noqa: E731
        for each in (half, ball):
            want, got = each(z), whole(each)(z)
            assert got.dtype == want.dtype == torch.float32
            close(got, want, rtol=1e-6, atol=1e-6)
            got.sum().backward()


def fourth(x, c):
    return ((x - c) ** 4).sum(-1) + ((x - c) ** 2).sum(-1)


Q = torch.tensor([[0.3, -1.0, 0.5], [1.0, 0.1, -0.7]], dtype=F64)
BALL = dfw.DFWLayer(2)
CALLS = {
    "projection": lambda q: dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1)).x,
    "ball": lambda q: BALL(2 * torch.eye(3, dtype=F64), q),
    "box": lambda q: dfw.solve(dfw.Quadratic(None, q), dfw.Box(0.0, 1.0)).x,
    "unrolled": lambda q: dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1), method="dfw").x,
}


def loss(call):
    return lambda q: (call(q).sin() * q).sum()


TRANSFORMS = {
    "vmap": torch.func.vmap,
    "grad": lambda call: torch.func.grad(loss(call)),
    "vmap of grad": lambda call: torch.func.vmap(torch.func.grad(loss(call))),
    "jacrev": torch.func.jacrev,
    "grad of grad": lambda call: torch.func.grad(
        lambda q: torch.func.grad(loss(call))(q).square().sum()
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", CALLS)
def test_transforms_inside_of_a_graph(call, transform):
    f = TRANSFORMS[transform](CALLS[call])
    close(whole(f)(Q), f(Q), rtol=1e-9, atol=1e-9)


def test_forward_mode_is_refused():
    def pushed(q):
        return torch.func.jvp(CALLS["box"], (q,), (torch.ones_like(q),))[1]

    with pytest.raises(RuntimeError, match="jacrev"):
        whole(pushed)(Q)


@functions_go
def test_functions_from_outside():
    def call(q):
        return dfw.solve(dfw.Smooth(fourth, q, shape=(3,)), dfw.Simplex()).x

    q = Q.clone().requires_grad_()
    want, got = call(q), whole(call)(q)
    close(got, want, rtol=0, atol=0)
    grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (want, got)]
    close(*grads, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_recorded_breaks_the_graph():
    """As without fullgraph=True everything has to work."""
    steps = []

    def call(q):
        sol = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(2), callback=lambda p: steps.append(p))
        return 2 * sol.x

    torch._dynamo.reset()
    close(torch.compile(call, backend="eager")(Q), call(Q), rtol=0, atol=0)
    assert steps
    if torch.__version__ >= "2.8":
        with pytest.raises(torch._dynamo.exc.Unsupported, match="callback"):
            whole(call)(Q)


def test_errors_name_the_argument():
    def call(q, radius):
        return dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, radius)).x

    with pytest.raises(Exception, match="radius: batch of 3 problems"):
        whole(call)(Q, torch.ones(3, dtype=F64))
    with pytest.raises(ValueError, match="radius: expected numbers ≥ 0"):
        whole(call)(Q, torch.tensor(-1.0, dtype=F64))
    q = torch.cat((Q, torch.full((1, 3), torch.nan, dtype=F64)))
    x = whole(call)(q, torch.ones((), dtype=F64))
    assert torch.isnan(x[2]).all()
    assert torch.isfinite(x[:2]).all()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_functions(mode):
    traced = make_fx(CALLS["box"], tracing_mode=mode)(Q)
    close(traced(3 * Q), CALLS["box"](3 * Q), rtol=0, atol=0)


def test_fake_tensors_have_shapes():
    with FakeTensorMode() as mode:
        assert CALLS["box"](mode.from_tensor(Q)).shape == Q.shape


def test_the_operators_are_sound():
    ball = dfw.LpBall(1, torch.rand(2, dtype=F64))
    tensors: list[torch.Tensor] = []
    call = ("dfwlayer.solve:solve", (dfw.Quadratic(None, Q), ball), {})
    text = described(call, tensors, [])
    own = [t.clone().requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.dfwlayer.call.default, (own, [True, True], "()", text))
    x, value, *_ = torch.ops.dfwlayer.call(tensors, [False, False], "()", text)
    program = repr(("pull", (0,), (2, 3), ("carry", (), text)))
    inputs = [torch.ones_like(x).requires_grad_(), x, value, *own]
    torch.library.opcheck(torch.ops.dfwlayer.derived.default, (inputs, None, program))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_graphs_of_cuda(mode):
    torch._dynamo.reset()
    model = Policy().cuda()
    z = torch.randn(8, 7, device="cuda")
    compiled = torch.compile(
        lambda z: model.limit(None, model.net(z)) + 1, mode=mode, fullgraph=True
    )
    for _ in range(4):
        model.zero_grad(set_to_none=True)  # gradients are memory of the graphs, which is used again
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(z)
        want = model.limit(None, model.net(z)) + 1
        close(out, want, rtol=1e-5, atol=1e-5)
        out.sum().backward()
