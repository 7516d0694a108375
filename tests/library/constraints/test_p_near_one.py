"""ℓp balls with p just above 1, whose solutions have entries of any small size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dfwlayer as dfw

DTYPES = [torch.float32, torch.float64]
PS = [1.01, 1.02, 1.05, 1.1, 1.2]


class Reference:
    """Newton for s = sign(x)(w|x|/t)^(p−1), which is of ordinary size where x vanishes.

    The conditions are P x + q + λ w s = 0 and Σ |s|^(p/(p−1)) = 1, in which x is
    sign(s)|s|^(1/(p−1)) t/w. They are smooth in s and λ, and so are their derivatives in q, w, t.
    """

    def __init__(self, P, q, w, t, p, start):
        self.P, self.q, self.w, self.t, self.p = P, q, w, t, p
        g = P @ start + q
        self.multiplier = -(g @ start) / t
        self.s = -g / (w * self.multiplier)
        for _ in range(100):
            residual = self.residual(self.s, self.multiplier)
            step = np.linalg.solve(self.jacobian(), -residual)
            size, length = abs(residual).max(), 1.0
            while length > 1e-3 and size > 1e-13:
                trial = self.s + length * step[:-1], self.multiplier + length * step[-1]
                if abs(self.residual(*trial)).max() <= (1 - 0.1 * length) * size:
                    break
                length /= 2
            self.s = self.s + length * step[:-1]
            self.multiplier += length * step[-1]
            if abs(step).max() < 1e-15:
                break
        assert abs(self.residual(self.s, self.multiplier)).max() < 1e-10
        assert self.multiplier > 0

    def point(self, s):
        return np.sign(s) * abs(s) ** (1 / (self.p - 1)) * self.t / self.w

    def residual(self, s, multiplier):
        slope = self.P @ self.point(s) + self.q + multiplier * self.w * s
        return np.append(slope, (abs(s) ** (self.p / (self.p - 1))).sum() - 1)

    @property
    def speed(self):
        """dx/ds."""
        power = 1 / (self.p - 1)
        return power * abs(self.s) ** (power - 1) * self.t / self.w

    def jacobian(self):
        n, power = len(self.q), self.p / (self.p - 1)
        found = np.zeros((n + 1, n + 1))
        found[:n, :n] = self.P * self.speed + np.diag(self.multiplier * self.w)
        found[:n, n] = self.w * self.s
        found[n, :n] = power * np.sign(self.s) * abs(self.s) ** (power - 1)
        return found

    def pull_back(self, v):
        """Gradients of ⟨v, x⟩ in q, w and t."""
        x = self.point(self.s)
        a = np.linalg.solve(self.jacobian().T, np.append(self.speed * v, 0))[:-1]
        weight = -(v - self.P @ a) * x / self.w - self.multiplier * self.s * a
        return -a, weight, (v - self.P @ a) @ x / self.t


def problem(n, seed, dtype):
    """P, q, w, t and v, rounded to the dtype."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, n))
    P, q = A @ A.T / n + 0.1 * np.eye(n), 2 * rng.normal(size=n)
    drawn = (P, q, rng.random(n) + 0.5, 0.7, rng.normal(size=n))
    return [torch.tensor(v, dtype=dtype) for v in drawn]


def solved(p, drawn, create_graph):
    P, *inputs = drawn[:4]
    inputs = [v.clone().requires_grad_() for v in inputs]
    q, w, t = inputs
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, t, w), tol=1e-12)
    return sol, inputs, torch.autograd.grad(sol.x, inputs, drawn[4], create_graph=create_graph)


def worst(found, want):
    """The largest difference relative to the size of what is wanted, of each pair."""
    pairs = zip(found, want, strict=True)
    return max(abs(f.double().numpy() - w).max() / (1 + abs(np.asarray(w)).max()) for f, w in pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", PS)
def test_gradients(p, dtype):
    tol = (
        {torch.float32: 2e-2, torch.float64: 1e-4}
        if p < 1.05
        else {
            torch.float32: 1e-3,
            torch.float64: 1e-6,
        }
    )
    for n in (3, 10, 30):
        for seed in range(4):
            drawn = problem(n, seed, dtype)
            sol, _, found = solved(p, drawn, create_graph=False)
            P, q, w, t, v = (d.double().numpy() for d in drawn)
            exact = Reference(P, q, w, float(t), p, sol.x.detach().double().numpy())
            assert all(bool(torch.isfinite(f).all()) for f in found)
            assert worst(found, exact.pull_back(v)) <= tol[dtype], (n, seed)


@pytest.mark.parametrize("p", [1.02, 1.05, 1.1, 1.2])
def test_second_derivatives(p):
    """Against differences of exact first ones, along one direction in all parameters."""
    step = 1e-6
    for n in (3, 10, 30):
        for seed in range(3):
            drawn = problem(n, seed, torch.float64)
            sol, inputs, first = solved(p, drawn, create_graph=True)
            torch.manual_seed(seed)
            along = [torch.randn_like(v) for v in inputs]
            total = sum((f * a).sum() for f, a in zip(first, along, strict=True))
            found = torch.autograd.grad(total, inputs)
            P, q, w, t, v = (d.numpy() for d in drawn)
            start = sol.x.detach().numpy()

            def at(side, P=P, q=q, w=w, t=t, v=v, along=along, start=start):
                dq, dw, dt = (side * step * a.numpy() for a in along)
                return Reference(P, q + dq, w + dw, float(t + dt), p, start).pull_back(v)

            want = [(f - b) / (2 * step) for f, b in zip(at(1), at(-1), strict=True)]
            assert worst(found, want) <= (1e-6 if p >= 1.1 else 1e-3), (n, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [1.001, 1.01, 1.05])
def test_everything_is_finite(p, dtype):
    """Also the second derivatives, and for one weight that many problems share."""
    torch.manual_seed(0)
    n, B = 30, 16
    A = torch.randn(B, n, n, dtype=dtype)
    P, q = A @ A.mT / n + 0.1 * torch.eye(n, dtype=dtype), 2 * torch.randn(B, n, dtype=dtype)
    w = (torch.rand(n, dtype=dtype) + 0.5).requires_grad_()
    t = torch.full((B,), 0.7, dtype=dtype, requires_grad=True)
    q.requires_grad_()
    x = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(p, t, w)).x
    first = torch.autograd.grad(x, (q, w, t), torch.randn_like(x), create_graph=True)
    second = torch.autograd.grad(sum((f * torch.randn_like(f)).sum() for f in first), (q, w, t))
    for each in (*first, *second):
        assert bool(torch.isfinite(each).all())
        assert float(each.detach().abs().amax()) < 1e6
