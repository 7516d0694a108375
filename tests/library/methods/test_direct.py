"""P = None and diagonal P: a projection, no iterations, against roots found by bisection."""

import math

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer.engines import compiled
from helpers import F64, close

PS = [1.0, 1.5, 2.0, 3.0, math.inf]


def norm(x, w, p):
    return np.abs(w * x).max() if p == math.inf else (np.abs(w * x) ** p).sum() ** (1 / p)


def given_multiplier(lam, d, q, w, p):
    """The x with Dx + q + λ ∇(‖w∘x‖_p^p / p) = 0, coordinate by coordinate."""
    size = np.abs(q)
    if p == 1:
        x = np.maximum(size - lam * w, 0) / d
    elif p == 2:
        x = size / (d + lam * w**2)
    else:
        low, high = np.zeros_like(size), size / d
        for _ in range(64):
            middle = (low + high) / 2
            above = d * middle + lam * w**p * middle ** (p - 1) > size
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        x = (low + high) / 2
    return -np.sign(q) * x


def reference(d, q, w, t, p):
    x = -q / d
    if norm(x, w, p) <= t:
        return x
    if p == math.inf:
        return np.clip(x, -t / w, t / w)
    low, high = 0.0, 1.0
    while norm(given_multiplier(high, d, q, w, p), w, p) > t:
        high *= 2
    for _ in range(64):
        middle = (low + high) / 2
        if norm(given_multiplier(middle, d, q, w, p), w, p) > t:
            low = middle
        else:
            high = middle
    return given_multiplier((low + high) / 2, d, q, w, p)


def data(batch=5, n=7, seed=0):
    rng = np.random.default_rng(seed)
    d, w = rng.uniform(0.2, 5, (batch, n)), rng.uniform(0.5, 2, (batch, n))
    q = rng.standard_normal((batch, n)) * 3
    t = np.array([0.3, 1.0, 2.0, 5.0, 1e3])[:batch]  # the last constraint is inactive
    return d, q, w, t


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("which", ["none", "diagonal", "shared diagonal"])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-6), (F64, 1e-13)])
def test_against_bisection(p, which, dtype, tol):
    d, q, w, t = data()
    if which == "none":
        d = np.ones_like(d)
    elif which == "shared diagonal":
        d = np.broadcast_to(d[0], d.shape)
    P = None if which == "none" else torch.diag_embed(torch.tensor(d, dtype=dtype))
    if which == "shared diagonal":
        P = P[0]
    parts = [torch.tensor(a, dtype=dtype) for a in (q, w, t)]
    with compiled.using(False):  # which takes more than one step with a diagonal P
        sol = dfw.DFWLayer(p=p).solve(P, *parts)
    assert sol.converged[:-1].all()  # a gap over a radius of 1e3 is mostly rounding in float32
    assert (sol.num_steps == 1).all()
    expected = np.stack([reference(*row, p) for row in zip(d, q, w, t, strict=True)])
    close(sol.x, torch.tensor(expected), rtol=0, atol=tol * np.abs(expected).max())
    rows = zip(*(a.double().numpy() for a in (sol.x, *parts[1:])), strict=True)
    limit = 1 + 4 * torch.finfo(dtype).eps
    assert all(norm(x, weight, p) <= radius * limit for x, weight, radius in rows)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("batched", [True, False])
def test_gradients(p, batched):
    d, q, w, t = data(batch=3, n=4, seed=1)
    pick = slice(None) if batched else 0
    tensors = [torch.tensor(a[pick], dtype=F64, requires_grad=True) for a in (d, q, w, t)]

    def solution(d, q, w, t):
        return dfw.DFWLayer(p=p, tol=1e-13)(torch.diag_embed(d), q, w, t)

    assert torch.autograd.gradcheck(solution, tensors)
    assert torch.autograd.gradcheck(
        lambda q, w, t: dfw.DFWLayer(p=p, tol=1e-13)(None, q, w, t), tensors[1:]
    )


def test_gradient_at_a_radius_of_zero_and_inside():
    """Nothing moves a projection onto one point but its radius; inside nothing bends it."""
    q = torch.randn(2, 5, dtype=F64, requires_grad=True)
    radius = torch.tensor([0.0, 1e3], dtype=F64, requires_grad=True)
    x = dfw.DFWLayer(p=1)(None, q, radius=radius)
    (gradient,) = torch.autograd.grad(x.sum(), q, retain_graph=True)
    close(gradient[0], torch.zeros(5, dtype=F64), rtol=0)
    close(gradient[1], -torch.ones(5, dtype=F64), rtol=1e-14)
    assert torch.isfinite(torch.autograd.grad(x.sum(), radius)[0]).all()


def test_nearly_diagonal_is_not_diagonal():
    d, q, w, t = data()
    P = torch.diag_embed(torch.tensor(d))
    P[4, 3, 4] = P[4, 4, 3] = 0.1
    sol = dfw.DFWLayer(p=1, tol=1e-12).solve(P, *map(torch.tensor, (q, w, t)))
    exact = reference(d[4], q[4], w[4], t[4], 1.0)
    assert np.abs(sol.x[4].numpy() - exact).max() > 1e-3
    assert sol.converged.all()


def test_weights_far_beyond_the_range_of_squares():
    """What a double cannot square goes another way."""
    q = torch.tensor([[-3.0, 1.0], [-3.0, 1.0]], dtype=F64)
    weight = torch.tensor([[1e-200, 1e-200], [1e200, 1e200]], dtype=F64)
    radius = torch.tensor([1e-200, 1e200], dtype=F64)
    x = dfw.DFWLayer(p=1)(None, q, weight, radius)
    close(x, torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=F64), rtol=1e-12)


def test_zero_beside_tiny_weights():
    """A coordinate without a weight stays; the others keep their digits in float32."""
    q = torch.tensor([[-0.9, 0.7, 0.3], [-0.5, -2.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[5.8e-5, 1.02, 0.0], [1.0, 0.0, 2.0]])
    x = dfw.DFWLayer(p=1)(None, q, weight, 0.3)
    for row in range(2):
        held = weight[row] > 0
        parts = [a[row][held].detach().double().numpy() for a in (q, weight)]
        exact = reference(np.ones(2), *parts, 0.3, 1.0)
        close(x[row][held].detach(), torch.tensor(exact), rtol=0, atol=2e-7)
        close(x[row][~held].detach(), -q[row][~held].detach(), rtol=0)
    x.sum().backward()
    assert q.grad[0, 2] == -1
    assert q.grad[1, 1] == -1
