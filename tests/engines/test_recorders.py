"""Tools that cannot record a solve are refused at once, with a word on what works."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dfwlayer as dfw

pytestmark = pytest.mark.filterwarnings("ignore:.*", "default::RuntimeWarning:dfwlayer")

P = torch.eye(3) * 2
Q = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.1, -1.0]])
PROJECTION, SOLVE = dfw.DFWLayer(p=1), dfw.DFWLayer(p=2)


def smooth(q):
    f = dfw.Smooth(lambda x, c: ((x - c) ** 2).sum(-1), q, shape=(3,))
    return dfw.solve(f, dfw.Simplex()).x


CALLS = {
    "projection layer": lambda q: PROJECTION(None, q),
    "unverified projection layer": lambda q: dfw.DFWLayer(p=1, verify=False)(None, q),
    "layer": lambda q: SOLVE(P, q),
    "solution of a layer": lambda q: SOLVE.solve(None, q).x,
    "solve": lambda q: dfw.solve(dfw.Quadratic(None, q), dfw.Box(0.0, 1.0)).x,
    "solve smooth": smooth,
    "unrolled": lambda q: dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1), method="dfw").x,
    "project_l1_box": lambda q: dfw.project_l1_box(q, None, 1.0, -1.0, 1.0),
}


class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.call = call

    def forward(self, features):
        return self.call(self.linear(features))


RECORDERS = {
    "jit.trace": lambda call: torch.jit.trace(call, (Q,)),
    "jit.trace of a model": lambda call: torch.jit.trace(Model(call), (Q,)),
    "onnx of old": lambda call: torch.onnx.export(Model(call), (Q,), "/dev/null", dynamo=False),
    "fake tensors": lambda call: call(FakeTensorMode().from_tensor(Q)),
}
WORKS = r"eager mode[\s\S]*fullgraph=True[\s\S]*layer\.deploy"


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("call", CALLS)
def test_recorders_are_refused(call, recorder):
    with pytest.raises(RuntimeError, match=WORKS):
        RECORDERS[recorder](CALLS[call])


def test_the_new_exporter_to_onnx_is_refused():
    pytest.importorskip("onnxscript", reason="the exporter needs it")
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("its error is that of an unknown operator")
    with pytest.raises(RuntimeError) as found:
        torch.onnx.export(Model(CALLS["layer"]), (Q,), "/dev/null", dynamo=True, verbose=False)
    causes, error = [], found.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__
    assert re.search(WORKS, "\n".join(causes))


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = dfw.DFWLayer(p=1)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.layer(None, q)


def calls_solve(q: torch.Tensor) -> torch.Tensor:
    return dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1)).x


def calls_project(q: torch.Tensor) -> torch.Tensor:
    return dfw.project_l1_box(q, None, 1.0, -1.0, 1.0)


@pytest.mark.parametrize(
    "scripted", [PROJECTION, Outer(), dfw.solve, dfw.project_l1_box, calls_solve, calls_project]
)
def test_scripting_is_refused(scripted):
    with pytest.raises(RuntimeError, match=r"torch.jit.script[\s\S]*layer\.deploy"):
        torch.jit.script(scripted)


@pytest.mark.parametrize("call", ["solve", "layer"])
def test_symbolic_tracing_is_refused(call):
    traced = CALLS[call] if call == "solve" else lambda q: dfw.solve(dfw.Quadratic(P, q), None).x
    with pytest.raises(RuntimeError, match=r"torch.fx[\s\S]*layer\.deploy"):
        torch.fx.symbolic_trace(traced)


@pytest.mark.parametrize(
    "model",
    [
        dfw.DFWLayer(p=1),
        dfw.QPLayer(),
        dfw.SetLayer(dfw.Simplex()),
        torch.nn.Sequential(torch.nn.Tanh(), dfw.SetLayer(dfw.Simplex())),
    ],
)
def test_symbolic_tracing_of_a_layer_is_refused(model):
    """All its arguments are made up where it is the whole model, also numbers."""
    with pytest.raises(RuntimeError, match=r"torch.fx[\s\S]*layer\.deploy"):
        torch.fx.symbolic_trace(model)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_left_behind(call):
    """After a refusal plain calls work as before."""
    want = CALLS[call](Q)
    with pytest.raises(RuntimeError, match="eager"):
        torch.jit.trace(CALLS[call], (Q,))
    assert torch.equal(CALLS[call](Q), want)


def test_harmless_modes_are_no_recorders():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert torch.equal(SOLVE(P, Q), SOLVE(P, Q))


@pytest.mark.cuda
@pytest.mark.parametrize("call", ["projection layer", "layer", "solve", "solve smooth"])
def test_a_capture_is_refused(call):
    q, matrix = Q.cuda(), P.cuda()
    CALLS[call](q) if call != "layer" else SOLVE(matrix, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"CUDA graph capture[\s\S]*eager"),
        torch.cuda.graph(graph),
    ):
        CALLS[call](q) if call != "layer" else SOLVE(matrix, q)
