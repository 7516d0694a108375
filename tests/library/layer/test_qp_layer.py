"""QPLayer: the call of qpth, and what its users do with it."""

import pickle

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import nn

import dfwlayer as dfw
from helpers import F64

NONE = torch.Tensor()  # how qpth's users say that there is no such part


def problem(rows=3, n=4, m=5, k=1):
    torch.manual_seed(0)
    root = torch.randn(rows, n, n, dtype=F64)
    inside = 0.1 * torch.randn(rows, n, dtype=F64)
    G, A = torch.randn(rows, m, n, dtype=F64), torch.randn(rows, k, n, dtype=F64)
    return {
        "Q": root @ root.mT + 0.1 * torch.eye(n, dtype=F64),
        "p": torch.randn(rows, n, dtype=F64),
        "G": G,
        "h": (G @ inside.unsqueeze(-1)).squeeze(-1) + 0.1 * torch.rand(rows, m, dtype=F64),
        "A": A,
        "b": (A @ inside.unsqueeze(-1)).squeeze(-1),
    }


def reference(Q, p, G=None, h=None, A=None, b=None):
    x = cp.Variable(len(p))
    parts = [] if G is None else [G.numpy() @ x <= h.numpy()]
    parts += [] if A is None else [A.numpy() @ x == b.numpy()]
    cost = 0.5 * cp.quad_form(x, cp.psd_wrap(Q.numpy())) + p.numpy() @ x
    cp.Problem(cp.Minimize(cost), parts).solve(solver=cp.CLARABEL)
    return torch.from_numpy(np.asarray(x.value))


@pytest.mark.parametrize("parts", [("G", "h"), ("A", "b"), ("G", "h", "A", "b"), ()])
@pytest.mark.parametrize("missing", [None, NONE])
def test_against_a_conic_solver(parts, missing):
    given = problem()
    call = {k: v if k in ("Q", "p", *parts) else missing for k, v in given.items()}
    x = dfw.QPLayer()(*call.values())
    assert x.shape == (3, 4)
    for row in range(3):
        want = reference(*(given[k][row] if k in ("Q", "p", *parts) else None for k in given))
        assert torch.allclose(x[row], want, atol=1e-5)


def test_shared_parts_get_the_sum_of_gradients():
    given = {k: v.requires_grad_() for k, v in problem().items()}
    shared = {k: given[k][0].detach().clone().requires_grad_() for k in ("Q", "G", "h", "A", "b")}
    own = {k: v.detach().expand(3, *v.shape).clone().requires_grad_() for k, v in shared.items()}
    layer = dfw.QPLayer(tol=1e-10)
    x = layer(*[(shared | {"p": given["p"]})[k] for k in given])
    y = layer(*[(own | {"p": given["p"]})[k] for k in given])
    assert torch.allclose(x, y, atol=1e-8)
    pull = torch.randn_like(x)
    (x * pull).sum().backward()
    (y * pull).sum().backward()
    for name, tensor in shared.items():
        assert torch.allclose(tensor.grad, own[name].grad.sum(0), atol=1e-6), name


def test_gradients_in_all_arguments():
    given = [v[:2].requires_grad_() for v in problem().values()]

    def x(Q, *others):
        return dfw.QPLayer(tol=1e-12)(0.5 * (Q + Q.mT), *others)

    assert torch.autograd.gradcheck(x, given, atol=1e-5)


def test_any_batch_dimensions_and_a_single_problem():
    given = problem()
    x = dfw.QPLayer()(*given.values())
    one = dfw.QPLayer()(*(v[1] for v in given.values()))
    assert one.shape == (4,)
    assert torch.allclose(one, x[1], atol=1e-6)
    stacked = given | {"p": torch.stack((given["p"], 2 * given["p"]))}
    deep = dfw.QPLayer()(*stacked.values())
    assert deep.shape == (2, 3, 4)
    assert torch.allclose(deep[0], x, atol=1e-6)


def test_a_linear_program():
    G = torch.cat((torch.eye(2), -torch.eye(2)))
    x = dfw.QPLayer()(torch.zeros(2, 2), torch.tensor([1.0, -2.0]), G, torch.ones(4))
    assert torch.allclose(x, torch.tensor([-1.0, 1.0]), atol=1e-5)


def test_optnet_learns_its_constraints():
    """Decisions under unknown Gx ≤ h, explained by a G and an h that are learned."""
    torch.manual_seed(0)
    n, m = 3, 4
    true = torch.randn(m, n, dtype=F64), torch.full((m,), 0.3, dtype=F64)
    Q, layer = torch.eye(n, dtype=F64), dfw.QPLayer(on_failure="raise")
    p = 2 * torch.randn(40, n, dtype=F64)
    with torch.no_grad():
        decisions = layer(Q, p, *true, NONE, NONE)
    G = nn.Parameter(torch.randn(m, n, dtype=F64))
    # OptNet's own way to keep the set from being empty: h = G z + s with s ≥ 0
    z, s = (nn.Parameter(v) for v in (torch.zeros(n, dtype=F64), torch.ones(m, dtype=F64)))
    optimiser = torch.optim.Adam([G, z, s], lr=3e-2)
    losses = []
    for _ in range(60):
        x = layer(Q, p, G, G @ z + s.abs(), NONE, NONE)
        loss = (x - decisions).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_statuses_and_failures():
    G, h = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    args = torch.eye(1), torch.ones(2, 1), G, h
    sol = dfw.QPLayer().solve(*args)
    assert sol.status.tolist() == [dfw.Status.CONVERGED, dfw.Status.INFEASIBLE]
    with pytest.warns(RuntimeWarning, match="1 of 2 problems.*INFEASIBLE.*QPLayer"):
        x = dfw.QPLayer()(*args)
    assert x[0] == -1
    assert x[1].isnan()
    with pytest.raises(dfw.SolveError):
        dfw.QPLayer(on_failure="raise")(*args)


def test_rows_that_give_way():
    G, h = torch.tensor([[1.0], [-1.0]], dtype=F64), torch.tensor([-1.0, -1.0], dtype=F64)
    layer = dfw.QPLayer(on_infeasible="least-violation", on_failure="ignore")
    x = layer(torch.eye(1, dtype=F64), torch.zeros(1, dtype=F64), G, h)
    assert torch.allclose(x, torch.zeros(1, dtype=F64), atol=1e-6)
    with pytest.raises(ValueError, match=r"^on_infeasible:"):
        dfw.QPLayer(on_infeasible="hope")


def test_it_is_a_module():
    layer = dfw.QPLayer(tol=1e-7)
    again = pickle.loads(pickle.dumps(layer))
    assert repr(again) == repr(layer)
    assert "QPLayer(" in repr(layer)
    assert not layer.state_dict()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Q", {"Q": torch.eye(3, dtype=F64)}),
        ("Q", {"Q": torch.eye(4)}),
        ("Q", {"Q": torch.eye(4, dtype=F64) + torch.ones(4, 4, dtype=F64).triu(1)}),
        ("p", {"p": torch.tensor(1.0)}),
        ("G", {"G": torch.ones(5, 3, dtype=F64)}),
        ("h", {"h": torch.ones(4, dtype=F64)}),
        ("h", {"h": None}),
        ("G", {"G": NONE}),
        ("b", {"b": torch.ones(2, 1, dtype=F64)}),
    ],
)
def test_errors_name_the_argument(name, change):
    with pytest.raises(ValueError, match=rf"^{name}:"):
        dfw.QPLayer()(*(problem() | change).values())
