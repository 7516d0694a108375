"""SetLayer: any set as a module, with what belongs to it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import dfwlayer as dfw
from helpers import F64


def ball(radius):
    return dfw.LpBall(1, radius)


SETS = {
    "Simplex": dfw.Simplex,
    "LpBall": lambda: dfw.LpBall(2, radius=nn.Parameter(torch.tensor(0.7))),
    "Box": lambda: dfw.Box(-torch.ones(4), torch.ones(4)),
    "Shifted": lambda: dfw.LpBall(1, 0.5, centre=nn.Parameter(torch.ones(4))),
    "PlaneCut": lambda: dfw.PlaneCut(dfw.Box(0.0, nn.Parameter(torch.ones(4))), 1.0, 1.5),
    "Product": lambda: dfw.Product(
        [dfw.LpBall(1, nn.Parameter(torch.tensor(0.5))), dfw.Box(0.0, torch.ones(2))], [2, 2]
    ),
    "Polyhedron": lambda: dfw.Polyhedron(nn.Parameter(torch.eye(4)), torch.ones(4), lower=-2.0),
}


@pytest.mark.parametrize("name", SETS)
def test_layer_is_solve(name):
    torch.manual_seed(0)
    constraint = SETS[name]()
    layer, q = dfw.SetLayer(constraint), torch.randn(3, 4)
    P = torch.diag(torch.rand(4) + 0.5)
    assert torch.equal(layer(q), dfw.solve(dfw.Quadratic(None, q), constraint).x)
    assert torch.equal(layer(None, q), layer(q))
    assert torch.equal(layer(P, q), dfw.solve(dfw.Quadratic(P, q), constraint).x)
    assert torch.equal(layer.solve(P, q).gap, dfw.solve(dfw.Quadratic(P, q), constraint).gap)
    squares = dfw.LeastSquares(torch.randn(6, 4), torch.randn(6))
    assert torch.equal(layer(squares), dfw.solve(squares, constraint).x)


def test_its_input_is_a_cost():
    z = torch.tensor([0.5, 0.2, -0.1])
    layer = dfw.SetLayer(dfw.Simplex())
    nearest = layer(-z)  # of the simplex to z
    assert torch.allclose(nearest, dfw.Simplex().project(z))
    assert nearest.argmax() == z.argmax()
    assert layer(z).argmax() == z.argmin()


def test_in_a_sequential():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4), dfw.SetLayer(dfw.Simplex()))
    features = torch.randn(64, 6)
    target = torch.softmax(features[:, :4], -1)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        x = net(features)
        assert torch.allclose(x.sum(-1), torch.ones(64), atol=1e-5)
        losses.append((x - target).square().mean())
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("name", SETS)
def test_copies_files_and_dtypes(name):
    torch.manual_seed(0)
    layer, q = dfw.SetLayer(SETS[name](), tol=1e-6), torch.randn(3, 4)
    want = layer(q)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(saved, weights_only=False),
    ):
        assert torch.equal(other(q), want)
        assert repr(other) == repr(layer)
        own = dict(layer.named_parameters())
        for key, parameter in other.named_parameters():
            assert parameter is not own[key]
    fresh = dfw.SetLayer(SETS[name]())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.9)
    fresh.load_state_dict(layer.state_dict())
    assert torch.allclose(fresh(q), layer(q))
    wide = copy.deepcopy(layer).double()
    assert wide(q.double()).dtype == F64
    assert torch.allclose(wide(q.double()).float(), layer(q), atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in SETS if list(dfw.SetLayer(SETS[name]()).parameters())]
)
def test_parameters_of_the_set_are_trained(name):
    torch.manual_seed(0)
    layer = dfw.SetLayer(SETS[name]())
    q = 3 * torch.randn(20, 4)
    layer(q).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.abs().sum() > 0
    before = layer(q)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.8)
    assert not torch.allclose(layer(q), before)


def test_names_in_the_state():
    layer = dfw.SetLayer(SETS["Product"]())
    assert set(layer.state_dict()) == {"constraint.sets_0_radius", "constraint.sets_1_upper"}
    assert [name for name, _ in layer.named_parameters()] == ["constraint.sets_0_radius"]
    assert "Product(" in repr(layer)


def test_a_set_made_from_the_call():
    layer, q = dfw.SetLayer(ball), torch.randn(3, 4)
    radius = torch.tensor([0.1, 0.2, 0.4], requires_grad=True)
    x = layer(q, radius=radius)
    assert torch.equal(x, dfw.solve(dfw.Quadratic(None, q), ball(radius)).x)
    x.square().sum().backward()
    assert (radius.grad > 0).all()
    assert torch.equal(pickle.loads(pickle.dumps(layer))(q, radius=0.3), layer(q, radius=0.3))
    assert torch.equal(layer(torch.eye(4), q, radius=0.3), layer(q, radius=0.3))


class Budget(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, scale=1.0):
        return dfw.LpBall(1, scale * self.log.exp())


def test_a_set_made_by_a_module():
    layer, q = dfw.SetLayer(Budget()), 3 * torch.randn(5, 4)
    assert list(layer.state_dict()) == ["constraint.log"]
    layer(q, scale=0.5).square().sum().backward()
    assert layer.constraint.log.grad > 0


def test_variables_of_a_shape():
    q = torch.randn(5, 2, 3, 4)
    layer = dfw.SetLayer(dfw.Box(torch.zeros(3, 4), 1.0), shape=(3, 4))
    assert torch.allclose(layer(q), (-q).clamp(0, 1))
    assert dfw.SetLayer(dfw.NuclearBall(1.0))(q).shape == q.shape


def test_failures():
    empty = dfw.Polyhedron(torch.tensor([[1.0], [-1.0]]), torch.tensor([-1.0, -1.0]))
    with pytest.warns(RuntimeWarning, match="INFEASIBLE.*SetLayer.solve"):
        dfw.SetLayer(empty)(torch.ones(2, 1))
    with pytest.raises(dfw.SolveError, match="2 of 2"):
        dfw.SetLayer(empty, on_failure="raise")(torch.ones(2, 1))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("constraint", lambda: dfw.SetLayer(3.0)),
        ("constraint", lambda: dfw.SetLayer(lambda: 3.0)(torch.ones(2))),
        ("constraint", lambda: dfw.SetLayer(dfw.Simplex())(torch.ones(2), radius=2.0)),
        ("q", lambda: dfw.SetLayer(dfw.Simplex())(None, torch.ones(2), 2.0)),
        ("q", lambda: dfw.SetLayer(dfw.Simplex())()),
        ("q", lambda: dfw.SetLayer(dfw.Simplex())([1.0])),
        ("tol", lambda: dfw.SetLayer(dfw.Simplex(), tol=-1.0)),
        ("on_failure", lambda: dfw.SetLayer(dfw.Simplex(), on_failure="cry")),
    ],
)
def test_errors_name_the_argument(name, call):
    with pytest.raises(ValueError, match=rf"^{name}:"):
        call()
