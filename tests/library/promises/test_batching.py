"""A batch is its problems, solved alone; broadcasting is PyTorch's; shared tensors get sums."""

import itertools
import math

import pytest
import torch

import dfwlayer as dfw
from helpers import DEVICES, F64, METHODS, PS, close, make_case


def solve_and_differentiate(case, params, method, max_steps, tol=1e-6):
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    sol = dfw.solve(*case.build(leaves), method=method, tol=tol, max_steps=max_steps)
    n = sol.x.shape[-1]
    loss = (sol.x * torch.arange(1.0, n + 1, dtype=sol.x.dtype, device=sol.x.device)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return sol, dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", METHODS)
def test_batch_equals_single(method, p, device):
    case = make_case("quadratic", p, "signed", rows=5, seed=31).to(device)
    # more steps, and the rounding of the first would grow: Frank-Wolfe is chaotic in its steps, and
    # on a round ball, where every step adds a point, the active set decides by less than that
    settings = METHODS[method].method, 8 if method == "active-set" else 12
    whole, whole_grads = solve_and_differentiate(case, case.params, *settings)
    for i in range(5):
        one, grads = solve_and_differentiate(
            case, {k: v[i] for k, v in case.params.items()}, *settings
        )
        assert whole.num_steps[i] == one.num_steps
        assert whole.status[i] == one.status
        close(whole.x[i], one.x, rtol=0, atol=1e-10)
        close(whole.value[i], one.value, rtol=1e-11)
        close(whole.gap[i], one.gap, rtol=1e-6, atol=1e-11)
        for name, grad in grads.items():
            close(whole_grads[name][i], grad, rtol=0, atol=1e-8 * (1 + float(grad.abs().max())))


def test_problems_stop_on_their_own():
    case = make_case("quadratic", "p=1", rows=12, seed=32)
    steps = dfw.solve(*case.problem(), method="frank-wolfe", tol=1e-9).num_steps
    assert len(set(steps.tolist())) > 3


SHAPES = {
    "P": [None, (4, 4), (1, 4, 4), (3, 4, 4)],
    "q": [(4,), (1, 4), (3, 4)],
    "weight": [None, (4,), (1, 4), (3, 4)],
    "radius": [0.5, (), (1,), (3,)],
}
STARTS = itertools.cycle([None, (4,), (1, 4), (3, 4), None])  # beside them, not crossed


@pytest.mark.parametrize("method", ["auto", "dfw"])
def test_every_broadcast(method):
    """All combinations of shapes against the expanded tensors, gradients summed."""
    gen = torch.Generator().manual_seed(0)

    def rand(shape):
        return torch.rand(shape, generator=gen, dtype=F64) + 0.5

    for shapes in itertools.product(*SHAPES.values()):
        named = dict(zip(SHAPES, shapes, strict=True)) | {"x0": next(STARTS)}
        data = {k: rand(s) for k, s in named.items() if isinstance(s, tuple)}
        data["q"] = data["q"] - 3
        if "P" in data:
            data["P"] = data["P"] + data["P"].mT + 3 * torch.eye(4, dtype=F64)
        core = {"P": 2, "q": 1, "weight": 1, "radius": 0, "x0": 1}
        leads = [v.shape[: v.dim() - core[k]] for k, v in data.items()]
        lead = torch.broadcast_shapes(*leads)
        ends = {k: v.shape[v.dim() - core[k] :] for k, v in data.items()}
        full = {k: v.expand((*lead, *ends[k])).clone() for k, v in data.items()}
        results = []
        for given in (data, full):
            leaves = {k: v.clone().requires_grad_(k != "x0") for k, v in given.items()}
            sol = dfw.solve(
                dfw.Quadratic(leaves.get("P"), leaves["q"]),
                dfw.LpBall(1.0, leaves.get("radius", 0.5), leaves.get("weight")),
                x0=leaves.get("x0"),
                method=method,
                max_steps=6 if method == "dfw" else 1000,
            )
            assert sol.x.shape == (*lead, 4), named
            assert sol.value.shape == sol.gap.shape == sol.status.shape == lead, named
            wanted = {k: v for k, v in leaves.items() if k != "x0"}
            loss = (sol.x * torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=F64)).sum()
            grads = torch.autograd.grad(loss, list(wanted.values()))
            results.append((sol, dict(zip(wanted, grads, strict=True))))
        (sol, grads), (full_sol, full_grads) = results
        close(sol.x, full_sol.x, rtol=1e-9, atol=1e-11)
        for name, grad in grads.items():
            summed = full_grads[name].sum_to_size(grad.shape)
            close(grad, summed, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("objective", ["shared quadratic", "COO least squares", "logistic"])
def test_shared_tensor_gets_the_sum(objective):
    case = make_case(objective, "p=1", rows=3, n=4, seed=33)
    name = {"shared quadratic": "P", "COO least squares": "A", "logistic": "F"}[objective]
    _, grads = solve_and_differentiate(case, case.params, "auto", 1000, 1e-11)
    total = torch.zeros_like(case.params[name])
    for i in range(3):
        one = {k: v if k == name else v[i] for k, v in case.params.items()}
        total += solve_and_differentiate(case, one, "auto", 1000, 1e-11)[1][name]
    close(grads[name], total, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("objective", ["quadratic", "shared quadratic", "least squares"])
def test_empty_batch(objective, method, p):
    case = make_case(objective, p, rows=2)
    keep = {"P", "A"} if objective == "shared quadratic" else set()
    empty = {k: v if k in keep else v[:0] for k, v in case.params.items()}
    leaves = {k: v.clone().requires_grad_() for k, v in empty.items()}
    sol = dfw.solve(*case.build(leaves), method=METHODS[method].method)
    assert sol.x.shape == (0, 6)
    assert sol.value.shape == sol.gap.shape == sol.num_steps.shape == sol.status.shape == (0,)
    repr(sol)
    for grad in torch.autograd.grad(sol.x.sum(), list(leaves.values())):
        assert (grad == 0).all()


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", METHODS)
def test_batch_of_one_and_one_dimension(method, p):
    """n = 1: the minimiser of ½ax² + bx, cut to [−t/|w|, t/|w|]."""
    a = torch.tensor([2.0], dtype=F64)
    for b, t, w in ((3.0, 0.5, -2.0), (0.1, 1.0, 1.0), (-5.0, 2.0, 0.5)):
        sol = dfw.solve(
            dfw.Quadratic(a.reshape(1, 1, 1), torch.tensor([[b]], dtype=F64)),
            dfw.LpBall(p, t, torch.tensor([w], dtype=F64)),
            method=METHODS[method].method,
            tol=1e-10,
        )
        assert sol.x.shape == (1, 1)
        assert float(sol.x) == pytest.approx(max(-t / abs(w), min(t / abs(w), -b / 2)), rel=1e-4)


def test_a_radius_that_is_barely_enough():
    """A ball that just reaches the minimiser: alone and in a batch x is exact on its face."""
    gen = torch.Generator().manual_seed(0)
    rows, n = 120, 12
    R = torch.randn(n, n, generator=gen, dtype=torch.float64)
    P = R.mT @ R / n + 0.1 * torch.eye(n, dtype=torch.float64)
    q = torch.randn(rows, n, generator=gen, dtype=torch.float64)
    weight = torch.rand(n, generator=gen, dtype=torch.float64) + 0.5
    size = (weight * torch.linalg.solve(P, -q.mT).mT).abs().sum(-1)
    radius = size * (1 + torch.tensor([-1e-3, -1e-6, 0.0, 1e-6]).double().repeat(rows // 4))
    x = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, radius, weight)).x
    alone = torch.stack(
        [dfw.solve(dfw.Quadratic(P, q[i]), dfw.LpBall(1, radius[i], weight)).x for i in range(rows)]
    )
    assert ((x - alone).abs().amax(-1) <= 1e-12 * x.abs().amax(-1)).all()
