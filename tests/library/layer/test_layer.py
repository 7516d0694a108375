"""DFWLayer as a module: contract, repr, copies, saving, training."""

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
from torch import nn

import dfwlayer as dfw
from helpers import F64, METHODS, PS, close, make_case, solved


def parameters(function):
    return {
        name: (p.kind.name, p.default) for name, p in inspect.signature(function).parameters.items()
    }


def test_signature_of_the_layer():
    init = parameters(dfw.DFWLayer)
    assert init["p"] == ("POSITIONAL_OR_KEYWORD", 1.0)
    for name, default in {
        "method": "auto",
        "differentiate": "auto",
        "tol": 1e-5,
        "max_steps": 1000,
    }.items():
        assert init[name] == ("KEYWORD_ONLY", default)
    forward = parameters(dfw.DFWLayer.forward)
    empty = inspect.Parameter.empty
    assert list(forward) == ["self", "P", "q", "weight", "radius", "centre"]
    assert forward["centre"] == ("KEYWORD_ONLY", None)
    assert [forward[k][1] for k in ("P", "q", "weight", "radius")] == [empty, empty, None, 1.0]


def test_signature_of_solve_and_the_rest():
    solve = parameters(dfw.solve)
    assert list(solve)[:2] == ["objective", "constraint"]
    wanted = {
        "x0": None,
        "method": "auto",
        "differentiate": "auto",
        "tol": 1e-5,
        "max_steps": 1000,
        "step_size": None,
        "temperature": None,
        "verify": True,
    }
    for name, default in wanted.items():
        assert solve[name] == ("KEYWORD_ONLY", default)
    assert list(parameters(dfw.Quadratic)) == ["P", "q"]
    squares = [k for k in parameters(dfw.LeastSquares) if not k.startswith("_")]
    assert squares == ["A", "b", "group"]
    smooth = parameters(dfw.Smooth)
    assert smooth["params"][0] == "VAR_POSITIONAL"
    assert smooth["shape"][0] == "KEYWORD_ONLY"
    ball = {k: v for k, v in parameters(dfw.LpBall).items() if not k.startswith("_")}
    assert list(ball) == ["p", "radius", "weight", "centre"]
    assert ball["radius"][1] == 1.0
    assert ball["weight"][1] is None


def test_public_names():
    for name in dfw.__all__:
        assert hasattr(dfw, name)
    assert {"CONVERGED", "MAX_STEPS", "ROUNDING_FLOOR", "NONFINITE", "NOT_CONVEX"} <= set(
        dfw.Status.__members__
    )
    for status in dfw.Status:
        assert len(status.message) > 20
    assert all(inspect.getdoc(getattr(dfw, name)) for name in dfw.__all__)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", METHODS)
def test_layer_is_solve(method, p):
    case = make_case("quadratic", p, "signed", seed=101)
    settings = {"method": METHODS[method].method, "max_steps": 20, "tol": 1e-3}
    layer = dfw.DFWLayer(p, **settings, on_failure="ignore")
    args = [case.params[k] for k in ("P", "q", "weight", "radius")]
    want = dfw.solve(*case.problem(), **settings)
    assert torch.equal(layer(*args), want.x)
    assert torch.equal(layer.solve(*args).gap, want.gap)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (0, 4)])
def test_x_is_like_q(shape, dtype):
    q = torch.randn(shape, dtype=dtype)
    x = dfw.DFWLayer()(None, q)
    assert (x.shape, x.dtype, x.device) == (q.shape, q.dtype, q.device)


def test_all_settings_reach_the_solver():
    """Each setting of the layer changes the answer, none is lost on the way."""
    case = make_case("quadratic", "p=1", rows=None, seed=102)
    args = [case.params[k] for k in ("P", "q", "weight", "radius")]

    def x(**settings):
        fixed = {"method": "dfw", "tol": 0.0, "max_steps": 8, "on_failure": "ignore"}
        return dfw.DFWLayer(**(fixed | settings))(*args)

    base = x()
    for changed in (
        {"p": 2.0},
        {"method": "frank-wolfe"},
        {"tol": 0.5},
        {"max_steps": 3},
        {"step_size": dfw.OpenLoop(2)},
        {"temperature": 0.01},
    ):
        assert not torch.allclose(base, x(**changed)), changed


def test_repr():
    text = repr(dfw.DFWLayer(p=math.inf, method="dfw", tol=1e-3, max_steps=7))
    for part in ("DFWLayer(", "p=inf", "method='dfw'", "tol=0.001", "max_steps=7"):
        assert part in text
    full = repr(
        dfw.DFWLayer(
            step_size=dfw.OpenLoop(3),
            temperature=dfw.Anneal(period=5),
            verify=False,
            on_failure="raise",
        )
    )
    parts = ("OpenLoop(offset=3", "Anneal(", "period=5", "verify=False", "on_failure='raise'")
    for part in parts:
        assert part in full
    sol = dfw.DFWLayer().solve(None, torch.randn(3, 4))
    assert "CONVERGED 3" in repr(sol)
    assert "(3, 4)" in repr(sol)


class Net(nn.Module):
    """A decision inside a network: everything the layer needs comes from data or parameters."""

    def __init__(self, **settings):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.root = nn.Parameter(torch.eye(4))
        self.weight = nn.Parameter(torch.ones(4))
        self.radius = nn.Parameter(torch.tensor(0.8))
        self.layer = dfw.DFWLayer(**settings)

    def forward(self, z):
        P = self.root @ self.root.mT + 0.1 * torch.eye(4, device=z.device)
        return self.layer(P, self.body(z), self.weight, self.radius.abs())


class Project(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, y):
        return self.layer(None, -y)


def test_in_sequential():
    net = nn.Sequential(nn.Linear(5, 4), Project(dfw.DFWLayer(p=2)), nn.Linear(4, 1))
    net(torch.randn(7, 5)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_training_converges(method):
    """A network learns the decisions of another one through the layer."""
    torch.manual_seed(3)
    z = torch.randn(64, 6)
    settings = {"p": 1.0, "method": METHODS[method].method, "max_steps": 30}
    settings["on_failure"] = "ignore"  # 30 steps are not enough for all methods
    with torch.no_grad():
        target = Net(**settings)(z)
    net = Net(**settings)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = (net(z) - target).pow(2).mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    for parameter in net.parameters():
        assert torch.isfinite(parameter).all()


def test_copies_and_state():
    layer = dfw.DFWLayer(p=1, method="dfw", tol=1e-3, temperature=0.1, step_size=dfw.OpenLoop(2))
    q = torch.randn(3, 4)
    want = layer(None, q)
    assert layer.state_dict() == {}
    assert list(layer.parameters()) == []
    for twin in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(None, q), want)
        assert repr(twin) == repr(layer)
    dfw.DFWLayer().load_state_dict(layer.state_dict())


def test_save_and_load():
    net = Net(p=2.0)
    z = torch.randn(3, 6)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other = Net(p=2.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(z), net(z))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(z), net(z))
    twin = copy.deepcopy(net)
    twin(z).sum().backward()
    assert all(p.grad is None for p in net.parameters())


def test_replicas_as_data_parallel_makes_them():
    """DataParallel copies __dict__ and feeds each replica a part of the batch."""
    layer = dfw.DFWLayer(p=1)
    q = torch.randn(6, 4)
    parts = [layer._replicate_for_data_parallel()(None, part) for part in q.chunk(2)]
    close(torch.cat(parts), layer(None, q), rtol=1e-6, atol=1e-7)


@pytest.mark.cuda
def test_data_parallel():
    net = nn.DataParallel(Net().cuda())
    z = torch.randn(6, 6, device="cuda")
    close(net(z), net.module(z), rtol=1e-5, atol=1e-6)


def test_no_grad_and_inference_mode():
    net = Net()
    z = torch.randn(3, 6)
    want = net(z)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            x = net(z)
        assert not x.requires_grad
        close(x, want, rtol=1e-6, atol=1e-7)


def test_module_moves_and_modes():
    """to, half-way houses such as eval and train: nothing in the layer depends on them."""
    layer = dfw.DFWLayer().double().eval()
    q = torch.randn(4)
    assert layer(None, q).dtype == torch.float32
    assert torch.equal(layer.train()(None, q), layer.eval()(None, q))


def test_same_call_same_answer():
    """No hidden randomness, no hidden state, and the global generator is left alone."""
    case = make_case("shared quadratic", "p=1", n=80, seed=103)
    before = torch.get_rng_state()
    a, b = dfw.solve(*case.problem()), dfw.solve(*case.problem())
    assert torch.equal(a.x, b.x)
    assert torch.equal(before, torch.get_rng_state())


def test_inputs_are_left_alone():
    case = make_case("quadratic", "p=1", "zero weight", seed=104)
    x0 = torch.randn(3, 6, dtype=F64)
    copies = {k: v.clone() for k, v in case.params.items()} | {"x0": x0.clone()}
    for row in METHODS.values():
        solved(row, *case.problem(), x0=x0, max_steps=20)
    for name, value in (case.params | {"x0": x0}).items():
        assert torch.equal(value, copies[name]), name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: dfw.DFWLayer("l1"), r"p: .* such as 1, 2 or math\.inf, got 'l1'"),
        (lambda _: dfw.DFWLayer(1)(None, [1.0, 2.0]), "q: .* got list; use torch.tensor"),
        (lambda q: dfw.DFWLayer(1)(None, q.numpy()), "q: .* got ndarray; use torch.as_tensor"),
        (lambda q: dfw.DFWLayer(1)(None, q, radius=[1.0]), "radius: .* list; use torch.tensor"),
        (lambda _: dfw.DFWLayer(1, tol=[1.0]), "tol: expected a number, got list$"),
        (lambda q: dfw.solve(q, dfw.Simplex()), r"objective: .* Quadratic\(None, q\)"),
        (lambda q: dfw.SetLayer(dfw.Simplex())(q, radius=1.0), r"SetLayer\(lambda radius: …\)"),
    ],
)
def test_errors_say_what_to_write(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 2))
