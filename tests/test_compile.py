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
    assert torch._dynamo.explain(model)(features).graph_count == 2


@pytest.mark.skipif(torch.__version__ < "2.8", reason="no place for a message")
def test_a_full_graph_is_refused_with_a_reason():
    torch._dynamo.reset()
    model = torch.compile(Compiled(1.0), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without fullgraph=True"):
        model(torch.randn(8, 4))


def test_solving_does_not_load_the_compiler():
    code = (
        "import sys, torch, dfwlayer as dfw;"
        "dfw.solve(dfw.Quadratic(None, torch.ones(3, requires_grad=True)), dfw.LpBall(1)).x"
        ".sum().backward();"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
