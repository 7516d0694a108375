"""Gradients of polytopes that are known by a function, against their optimality conditions.

With V the vertices, x the solution and g = ∇f(x), nearby solutions are on the face of the
vertices with ⟨g, v − x⟩ = 0, as long as x is inside of it: with Z a basis of the differences of
these, the gradient of ⟨v, x⟩ in q is −Z (Zᵀ P Z)⁻¹ Zᵀ v. All of that is NumPy and double precision.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import dfwlayer as dfw
from helpers import F64


def _vertices(name):
    rng = np.random.default_rng(11)
    eye = np.eye(5)
    if name == "simplex":
        return eye
    if name == "l1":
        return np.concatenate((eye, -eye))
    if name == "box":
        return np.array(list(itertools.product((-1.0, 1.0), repeat=4)))
    if name == "birkhoff":
        orders = itertools.permutations(range(3))
        return np.array([np.eye(3)[list(order)].ravel() for order in orders])
    # whole numbers, so that points between them are exact in float32
    corners = rng.integers(-64, 65, (16, 5)) / 64.0
    if name == "random":
        return corners
    middles = 0.5 * (corners[:6] + corners[1:7])
    return np.concatenate((corners, corners[:4], middles))  # "redundant"


def _face(V, P, q, x):
    """A basis of the face's directions, and by how much x is inside and others are outside."""
    g = P @ x + q
    unit = (np.abs(P).sum() * np.abs(V).max() + np.abs(q).sum()) * np.abs(V).max()
    cost = (V - x) @ g / unit
    assert cost.min() >= -1e-10, "x is not the solution"
    on = V[cost <= 1e-9]
    outside = cost[cost > 1e-9].min(initial=1.0)
    k, n = on.shape
    # the largest weight that all points of the face can have in a combination that is x
    limits = np.c_[-np.eye(k), np.ones(k)]
    equal = np.r_[np.c_[on.T, np.zeros(n)], [np.r_[np.ones(k), 0]]]
    found = linprog(
        np.r_[np.zeros(k), -1], limits, np.zeros(k), equal, np.r_[x, 1], [(0, 1)] * (k + 1)
    )
    inside = -found.fun if found.status == 0 else 0.0
    left, sizes, _ = np.linalg.svd((on - on[0]).T, full_matrices=False)
    return left[:, sizes > 1e-9], min(inside, outside)


def _oracle(rows, batched=True):
    return dfw.CustomSet(lambda cost: rows[(cost @ rows.mT).argmin(-1)], batched=batched)


def _problems(kind, V, rows=60):
    rng = np.random.default_rng(13)
    n = V.shape[-1]
    R = rng.standard_normal((rows, n, n))
    P = R @ R.transpose(0, 2, 1) / n + 0.1 * np.eye(n)
    q = 2 * rng.standard_normal((rows, n))
    if kind == "whole numbers":
        P, q = np.broadcast_to(2 * np.eye(n), P.shape).copy(), rng.integers(-3, 4, q.shape) * 1.0
    elif kind == "exact fit":
        weights = rng.dirichlet(np.ones(len(V)), rows)
        q = -(P @ (weights @ V)[..., None])[..., 0]
    elif kind == "centre":  # which has many representations
        q = -(P @ V.mean(0))
    return P, q, rng.standard_normal(q.shape)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("kind", ["random", "whole numbers", "exact fit", "centre"])
@pytest.mark.parametrize("name", ["simplex", "l1", "box", "birkhoff", "random", "redundant"])
def test_against_the_optimality_conditions(name, kind, dtype):
    V = _vertices(name)
    P, q, v = (torch.tensor(t, dtype=dtype) for t in _problems(kind, V))
    leaf = q.clone().requires_grad_()
    sol = dfw.solve(dfw.Quadratic(P, leaf), _oracle(torch.tensor(V, dtype=dtype)))
    (got,) = torch.autograd.grad((sol.x * v).sum(), leaf)
    exact = dfw.solve(dfw.Quadratic(P.double(), q.double()), _oracle(torch.tensor(V)), tol=1e-13).x
    margin, rtol = (1e-4, 1e-3) if dtype == torch.float32 else (1e-8, 1e-7)
    compared = 0
    for i in range(len(q)):
        P_i, q_i, v_i, x_i = (t[i].double().numpy() for t in (P, q, v, exact))
        Z, slack = _face(V, P_i, q_i, x_i)
        if slack < margin:  # too near to a kink to tell its sides apart
            continue
        compared += 1
        want = -Z @ np.linalg.solve(Z.T @ P_i @ Z, Z.T @ v_i)
        size = max(np.abs(want).max(), 1e-3 * np.abs(v_i).max())
        np.testing.assert_allclose(got[i].double().numpy(), want, rtol=0, atol=rtol * size)
    # whole numbers are often at kinks
    assert compared >= (6 if kind == "whole numbers" else 50)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("method", ["active-set", "projected-newton"])
def test_against_the_sets_of_the_library(method, dtype):
    """Also in P, and with the face found from x alone."""
    gen = torch.Generator().manual_seed(17)
    eye = torch.eye(5, dtype=dtype)
    R = torch.randn(40, 5, 5, generator=gen, dtype=F64)
    P = (R @ R.mT / 5 + 0.2 * torch.eye(5)).to(dtype).requires_grad_()
    q = torch.randn(40, 5, generator=gen, dtype=F64).to(dtype).requires_grad_()
    v = torch.randn(40, 5, generator=gen, dtype=F64).to(dtype)
    sets = (
        (_oracle(eye), dfw.Simplex()),
        (_oracle(torch.cat((eye, -eye))), dfw.LpBall(1)),
    )
    for function, known in sets:
        got, want = (
            torch.autograd.grad(
                (dfw.solve(dfw.Quadratic(P, q), constraint, tol=1e-7, **kw).x * v).sum(), (P, q)
            )
            for constraint, kw in ((function, {"method": method}), (known, {}))
        )
        for a, b in zip(got, want, strict=True):
            off = (a - b).abs().flatten(1).amax(-1) > 2e-3 * b.abs().max()
            assert not off.any()


def test_a_vertex_does_not_move_and_inside_all_does():
    eye = torch.eye(3, dtype=F64)
    rows = torch.cat((eye, -eye))
    for q, want in (
        (torch.tensor([5.0, 1.0, 0.0], dtype=F64), torch.zeros(3, 3, dtype=F64)),
        (torch.zeros(3, dtype=F64), -eye),
        (torch.tensor([0.5, 0.0, 0.0], dtype=F64), -eye),  # found on an axis, but inside
    ):
        leaf = q.clone().requires_grad_()
        x = dfw.solve(dfw.Quadratic(None, leaf), _oracle(rows, batched=False)).x
        slopes = torch.stack([torch.autograd.grad(e, leaf, retain_graph=True)[0] for e in x])
        torch.testing.assert_close(slopes, want, rtol=0, atol=1e-12)
