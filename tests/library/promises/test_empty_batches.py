"""No problems at all: empty results, and gradients of zero, whatever comes with a batch."""

import math

import pytest
import torch

import dfwlayer as dfw
from helpers import METHODS
from set_cases import CASES
from set_problems import quadratic

DTYPES = (torch.float32, torch.float64)


def check(sol, shape, dtype, leaves):
    assert sol.x.shape == (0, *shape)
    assert sol.x.dtype == dtype
    for part in (sol.value, sol.gap, sol.num_steps, sol.status):
        assert part.shape == (0,)
    assert "x=(0," in repr(sol)
    assert sol.x.requires_grad
    for leaf, grad in zip(
        leaves, torch.autograd.grad(sol.x.sum(), leaves, allow_unused=True), strict=True
    ):
        if grad is not None:
            assert grad.shape == leaf.shape
            assert (grad == 0).all()


def leaf(*shape, dtype):
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def objectives(n, dtype):
    """(the objective, its tensors) by name; the last ones leave the batch to the set."""
    q, shared = leaf(0, n, dtype=dtype), leaf(n, dtype=dtype)
    P, one = leaf(0, n, n, dtype=dtype), torch.eye(n, dtype=dtype).requires_grad_()
    A, b, wide = leaf(0, n + 1, n, dtype=dtype), leaf(0, n + 1, dtype=dtype), leaf(n, dtype=dtype)
    C = torch.eye(n + 1, n, dtype=dtype).requires_grad_()
    thin = C.detach().to_sparse()
    return {
        "quadratic": (dfw.Quadratic(P, q), (P, q)),
        "one P": (dfw.Quadratic(one, q), (one, q)),
        "projection": (dfw.Quadratic(None, q), (q,)),
        "least squares": (dfw.LeastSquares(A, b), (A, b)),
        "one A": (dfw.LeastSquares(C, b), (C, b)),
        "sparse A": (dfw.LeastSquares(thin, b), (b,)),
        "rows": (dfw.Smooth(lambda x, c: ((x - c) ** 2).sum(-1), q, shape=n), (q,)),
        "one problem": (dfw.Quadratic(one, shared), (one, shared)),
        "one function": (dfw.Smooth(lambda x, c: ((x - c) ** 2).sum(), wide, shape=n), (wide,)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_set(name, dtype):
    case = CASES[name]
    n = math.prod(case.shape)
    drawn = case.parameters(torch.Generator().manual_seed(0), 2)
    parameters = {k: v[:0].to(dtype).requires_grad_() for k, v in drawn.items()}
    if len(case.shape) == 1:
        problems = objectives(n, dtype)
    else:
        P, q = leaf(0, n, n, dtype=dtype), leaf(0, n, dtype=dtype)
        problems = {"quadratic": (quadratic(P, q, case.shape), (P, q))}
    for kind, (objective, tensors) in problems.items():
        if kind.startswith("one ") and kind.split()[1] in ("problem", "function") and not drawn:
            continue  # nothing has a batch
        for row in METHODS.values():
            sol = dfw.solve(objective, case.build(parameters), method=row.method)
            check(sol, case.shape, dtype, (*tensors, *parameters.values()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("batched", ["P", "q", "weight", "radius", "centre"])
def test_layers(batched, p, dtype):
    fine = {
        "P": torch.eye(3, dtype=dtype),
        "q": torch.ones(3, dtype=dtype),
        "weight": torch.ones(3, dtype=dtype),
        "radius": torch.tensor(1.0, dtype=dtype),
        "centre": torch.zeros(3, dtype=dtype),
    }
    empty = fine[batched].expand(0, *fine[batched].shape).clone().requires_grad_()
    centre = empty if batched == "centre" else None
    for P in (fine["P"], None):
        given = fine | {"P": P} | ({} if batched == "centre" else {batched: empty})
        if batched == "P" and P is None:
            continue
        args = [given[k] for k in ("P", "q", "weight", "radius")]
        x = dfw.DFWLayer(p)(*args, centre=centre)
        assert x.shape == (0, 3)
        x.sum().backward()
        assert empty.grad is None or empty.grad.shape == empty.shape
        start = torch.zeros(0, 3, dtype=dtype)
        assert dfw.DFWLayer(p).solve(*args, centre=centre, x0=start).x.shape == (0, 3)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)])
def test_project_l1_box(shape):
    z = torch.ones(shape, requires_grad=True)
    for weight in (None, torch.ones(3), torch.ones(0, 3)):
        for radius in (1.0, torch.ones(0)):
            x = dfw.project_l1_box(z, weight, radius, -1.0, torch.ones(3))
            assert x.shape == shape
            x.sum().backward()
