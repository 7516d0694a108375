"""A tensor changed in place between solve and backward is an error, never another gradient."""

import pytest
import torch

import dfwlayer as dfw
from helpers import F64
from set_cases import CASES
from set_problems import draw, quadratic

MODES = ("implicit", "unroll")


def spoil(x, leaves, name):
    """Change one of the leaves, then ask for all gradients."""
    with torch.no_grad():
        leaves[name].mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.square().sum().backward()


def leaves_of(tensors, asked=None):
    return {k: v.clone().requires_grad_(asked is None or k in asked) for k, v in tensors.items()}


SET_PARAMETERS = [
    (name, parameter)
    for name, case in CASES.items()
    for parameter in case.parameters(torch.Generator().manual_seed(0), 2)
]


# a product lays the centres of its sets side by side, in memory of its own; and the table moves the
# column sums of plans to the total of the rows
COPIED = {("Product", "centre"), ("Transport", "columns")}


@pytest.mark.parametrize("asked", ["all", "q alone"])
@pytest.mark.parametrize(
    ("name", "parameter"), [pair for pair in SET_PARAMETERS if pair not in COPIED]
)
def test_every_parameter_of_every_set(name, parameter, asked):
    """Also one that asks for no gradient itself: those of the others depend on it."""
    case, problem = CASES[name], draw(name)
    given = problem.parameters | {"P": problem.P, "q": problem.q}
    leaves = leaves_of(given, None if asked == "all" else ("q",))
    objective = quadratic(leaves["P"], leaves["q"], case.shape)
    spoil(dfw.solve(objective, case.build(leaves)).x, leaves, parameter)


@pytest.mark.parametrize(("name", "parameter"), sorted(COPIED))
def test_what_is_copied_may_be_changed(name, parameter):
    case, problem = CASES[name], draw(name)

    def gradients(factor):
        leaves = leaves_of(problem.parameters | {"P": problem.P, "q": problem.q})
        objective = quadratic(leaves["P"], leaves["q"], case.shape)
        x = dfw.solve(objective, case.build(leaves)).x
        with torch.no_grad():
            leaves[parameter].mul_(factor)
        return torch.autograd.grad(x.square().sum(), list(leaves.values()))

    for got, want in zip(gradients(1.5), gradients(1.0), strict=True):
        assert torch.equal(got, want)


A = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
OBJECTIVES = {
    "quadratic": ({"P": A.T @ A, "q": A[0]}, lambda p: dfw.Quadratic(p["P"], p["q"])),
    "batch": (
        {"P": (A.T @ A).expand(5, 3, 3), "q": A},
        lambda p: dfw.Quadratic(p["P"], p["q"]),
    ),
    "one P for a batch": ({"P": (A.T @ A)[None], "q": A}, lambda p: dfw.Quadratic(p["P"], p["q"])),
    "projection": ({"q": A}, lambda p: dfw.Quadratic(None, p["q"])),
    "diagonal": (
        {"P": torch.diag(A[0].abs() + 1), "q": A},
        lambda p: dfw.Quadratic(p["P"], p["q"]),
    ),
    "least squares": ({"A": A, "b": A[:, 0]}, lambda p: dfw.LeastSquares(p["A"], p["b"])),
    "smooth": (
        {"A": A, "b": A[:, 0]},
        lambda p: dfw.Smooth(
            lambda x, A, b: (torch.nn.functional.softplus(A @ x) - b * (A @ x)).sum(),
            p["A"],
            p["b"],
            shape=3,
        ),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k, (given, _) in OBJECTIVES.items() for n in given]
)
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_every_parameter_of_every_objective(kind, name, p, mode):
    given, build = OBJECTIVES[kind]
    leaves = leaves_of(given | {"radius": torch.tensor(0.3, dtype=F64)})
    x = dfw.solve(build(leaves), dfw.LpBall(p, leaves["radius"]), differentiate=mode).x
    with torch.no_grad():
        leaves[name].mul_(1.5)
    wanted = list(leaves.values())
    if mode == "implicit" or name not in ("q", "b", "radius"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(x.square().sum(), wanted)
        return
    # the steps may not read a tensor again, whose change then is of no consequence
    try:
        got = torch.autograd.grad(x.square().sum(), wanted)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return
    leaves = leaves_of(given | {"radius": torch.tensor(0.3, dtype=F64)})
    x = dfw.solve(build(leaves), dfw.LpBall(p, leaves["radius"]), differentiate=mode).x
    want = torch.autograd.grad(x.square().sum(), list(leaves.values()))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix(layout):
    b = A[:, 0].clone().requires_grad_()
    S = getattr(A, layout)()
    x = dfw.solve(dfw.LeastSquares(S, b), dfw.LpBall(2, 0.3)).x
    S.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


@pytest.mark.parametrize("name", ["q", "weight", "radius"])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_a_projection_layer(name, shape):
    given = {"q": 3 * torch.randn(shape), "weight": torch.rand(shape) + 0.5}
    leaves = leaves_of(given | {"radius": torch.ones(shape[:-1])})
    x = dfw.DFWLayer(p=1)(None, leaves["q"], leaves["weight"], leaves["radius"])
    spoil(x, leaves, name)


@pytest.mark.parametrize("name", ["q", "weight", "radius", "centre"])
def test_a_layer_around_a_centre(name):
    given = {"q": torch.randn(3, 4), "weight": torch.rand(3, 4) + 0.5, "radius": torch.ones(3)}
    leaves = leaves_of(given | {"centre": torch.randn(3, 4)})
    x = dfw.DFWLayer(p=2)(None, *[leaves[k] for k in given], centre=leaves["centre"])
    spoil(x, leaves, name)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["P", "q", "weight", "radius"])
def test_a_recorded_solve(name):
    gen = torch.Generator().manual_seed(2)
    R = torch.randn(50, 50, generator=gen)
    given = {"P": R @ R.T / 50 + torch.eye(50), "q": torch.randn(8, 50, generator=gen)}
    given |= {"weight": torch.rand(8, 50, generator=gen) + 0.5, "radius": torch.ones(8)}
    layer = dfw.DFWLayer(p=1)
    for _ in range(4):  # counted, recorded, replayed
        leaves = leaves_of({k: v.cuda() for k, v in given.items()})
        x = layer(*leaves.values())
    spoil(x, leaves, name)


def test_an_optimiser_step_before_backward_is_found():
    P = torch.nn.Parameter(torch.eye(3) * 2)
    optimiser = torch.optim.SGD([P], lr=0.1)
    for _ in range(2):
        x = dfw.DFWLayer(p=2)(P, torch.tensor([1.0, -2.0, 0.5]))
        x.sum().backward()
        optimiser.step()
    x = dfw.DFWLayer(p=2)(P, torch.tensor([1.0, -2.0, 0.5]))
    optimiser.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
