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


def test_solving_does_not_load_the_compiler():
    code = (
        "import sys, torch, dfwlayer as dfw;"
        "dfw.solve(dfw.Quadratic(None, torch.ones(3, requires_grad=True)), dfw.LpBall(1)).x"
        ".sum().backward();"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


CALLS = {
    "PlaneCut": "dfw.solve(f, dfw.PlaneCut(dfw.Box(-1.0, 1.0), level=0.5)).x",
    "Product": "dfw.solve(f, dfw.Product([dfw.LpBall(1, centre=one), dfw.Box(0, 1)], [2, 2])).x",
    "free Product": "dfw.solve(f, dfw.Product([dfw.LpBall(1, 1, 0 * one), dfw.Box()], [2, 2])).x",
    "Smooth": "dfw.solve(dfw.Smooth(quartic, q, shape=4), dfw.LpBall(2)).x",
    "mapped Smooth": "dfw.solve(dfw.Smooth(quartic, q, shape=4), dfw.LpBall(2, one)).x",
    "active-set": "dfw.solve(dfw.Smooth(quartic, q, shape=4), dfw.Simplex(), method=active).x",
    "project_l1_box": "dfw.project_l1_box(q, None, 1.0, -1.0, 1.0)",
    "layer": "dfw.DFWLayer(2)(torch.eye(4), q)",
}


@pytest.mark.parametrize("name", CALLS)
def test_first_calls_load_nothing_large(name):
    """Symbolic mathematics, the compiler: seconds, for a call of milliseconds."""
    # PyTorch 2.6 loads the compiler for any vmap, which is then not this library's doing
    vmap = "torch.func.vmap(abs)(torch.ones(1));" if name.startswith("mapped") else ""
    code = (
        f"import sys, torch, dfwlayer as dfw;{vmap}"
        "before = set(sys.modules);"
        "q = torch.linspace(-1, 1, 4).requires_grad_(); f = dfw.Quadratic(None, q);"
        "one = torch.ones(2); active = dfw.ActiveSet();"
        "quartic = lambda x, c: ((x - c) ** 4).sum();"
        f"({CALLS[name]}).sum().backward();"
        "loaded = {m for m in set(sys.modules) - before if m.split('.')[0] in ('sympy', 'mpmath')"
        " or m.startswith(('torch._dynamo', 'torch._inductor', 'torch.fx.experimental.symbolic'))};"
        "assert not loaded, sorted(loaded)[:5]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
