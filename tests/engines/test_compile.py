"""Models with the layer inside of torch.compile."""

import subprocess
import sys

import pytest
import torch

import dfwlayer as dfw
from helpers import close

# what the compiler does at every graph break, and hides unless warnings are errors
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:.*torch.jit"
)


class Compiled(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.layer = dfw.DFWLayer(p)
        self.P = torch.nn.Parameter(2 * torch.eye(4))

    def forward(self, features):
        y = self.linear(features).relu()
        x = self.layer(self.P, y - 1, radius=torch.sigmoid(y.sum(-1)))
        return (2 * x).sin()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("p", [1.0, 3.0])
def test_compiled_models(p, backend):
    torch._dynamo.reset()
    model, features = Compiled(p), torch.randn(8, 4)
    compiled = torch.compile(model, backend=backend)
    model(features).sum().backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        out = compiled(features)
        close(out, model(features), rtol=1e-6, atol=1e-7)
        out.sum().backward()
        for parameter, expected in zip(model.parameters(), want, strict=True):
            close(parameter.grad, expected, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(features).graph_count == 1


CALLS = {
    "LpBall": "dfw.solve(f, dfw.LpBall(1)).x",
    "PlaneCut": "dfw.solve(f, dfw.PlaneCut(dfw.Box(-1.0, 1.0), level=0.5)).x",
    "Product": "dfw.solve(f, dfw.Product([dfw.LpBall(1, centre=one), dfw.Box(0, 1)], [2, 2])).x",
    "free Product": "dfw.solve(f, dfw.Product([dfw.LpBall(1, 1, 0 * one), dfw.Box()], [2, 2])).x",
    "Smooth": "dfw.solve(dfw.Smooth(quartic, q, shape=4), dfw.LpBall(2)).x",
    "active-set": "dfw.solve(dfw.Smooth(quartic, q, shape=4), dfw.Simplex(), method=active).x",
    "project_l1_box": "dfw.project_l1_box(q, None, 1.0, -1.0, 1.0)",
    "layer": "dfw.DFWLayer(2)(torch.eye(4), q)",
    # last, as PyTorch 2.6 loads the compiler for any vmap, which is then not this library's doing
    "vmap": "torch.func.vmap(lambda x: x * x)(q)",
    "mapped Smooth": "dfw.solve(dfw.Smooth(quartic, q, shape=4), dfw.LpBall(2, one)).x",
}
LOADED = """
import sys, torch, dfwlayer as dfw
LARGE = "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic"
q = torch.linspace(-1, 1, 4).requires_grad_()
f, one, active = dfw.Quadratic(None, q), torch.ones(2), dfw.ActiveSet()
quartic = lambda x, c: ((x - c) ** 4).sum()
assert "torch._dynamo" not in sys.modules, "import"
for name, call in CALLS.items():
    before = set(sys.modules)
    eval(call).sum().backward()
    new = set(sys.modules) - before
    large = {m for m in new if m.split(".")[0] in ("sympy", "mpmath") or m.startswith(LARGE)}
    assert name == "vmap" or not large, (name, sorted(large)[:5])
"""


def test_first_calls_load_nothing_large():
    """Symbolic mathematics, the compiler: seconds, for a call of milliseconds."""
    subprocess.run([sys.executable, "-c", f"CALLS = {CALLS}{LOADED}"], check=True)
