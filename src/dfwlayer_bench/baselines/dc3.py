"""DC3 (Donti, Rolnick and Kolter, 2021): a network, completed and corrected.

A network maps the data of a problem to some coordinates z of the solution. Completion finds the
others from the equations, x = φ(z); correction takes gradient steps on the violation of the
inequalities along the equations, unrolled. The network is trained on the objective plus a
penalty. Written from the formulas of the paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["DC3", "BallRule", "Completion", "LinearRule", "Training", "train"]


class Rule(Protocol):
    """Inequalities g(x) ≤ 0."""

    def excess(self, x: Tensor) -> Tensor:
        """max(g(x), 0), (..., m)."""

    def slope(self, x: Tensor) -> Tensor:
        """∇‖max(g(x), 0)‖², (..., n)."""


@dataclass(frozen=True)
class LinearRule:
    """Gx ≤ h."""

    G: Tensor  # (m, n)
    h: Tensor  # (m,)

    def excess(self, x: Tensor) -> Tensor:
        """max(Gx − h, 0)."""
        return (x @ self.G.mT - self.h).clamp_min(0)

    def slope(self, x: Tensor) -> Tensor:
        """2Gᵀ max(Gx − h, 0)."""
        return 2 * self.excess(x) @ self.G


@dataclass(frozen=True)
class BallRule:
    """‖w ∘ x‖₁ ≤ t, one inequality."""

    w: Tensor  # (n,)
    t: Tensor  # ()

    def excess(self, x: Tensor) -> Tensor:
        """max(‖w ∘ x‖₁/t − 1, 0): in units of the radius."""
        return ((self.w * x).abs().sum(-1, keepdim=True) / self.t - 1).clamp_min(0)

    def slope(self, x: Tensor) -> Tensor:
        """2 max(‖w ∘ x‖₁/t − 1, 0) w ∘ sign(x) / t."""
        return 2 * self.excess(x) * (self.w / self.t) * x.sign()


class Completion:
    """x = Zz + Cb: all coordinates from the free ones, so that Ax = b.

    With D the dependent columns and F the free ones, x_D = A_D⁻¹(b − A_F z). The dependent
    columns are those that a QR factorisation with pivots picks, which keeps A_D far from singular
    (the paper draws them).
    """

    def __init__(self, A: Tensor) -> None:  # (k, n)
        k, n = A.shape
        dependent = _pivots(A)
        free = [j for j in range(n) if j not in set(dependent)]
        self.Z, self.C = A.new_zeros(n, n - k), A.new_zeros(n, k)  # (n, n − k), (n, k)
        self.Z[free] = torch.eye(n - k, dtype=A.dtype)
        self.Z[dependent] = -torch.linalg.solve(A[:, dependent], A[:, free])
        self.C[dependent] = torch.linalg.inv(A[:, dependent])

    def __call__(self, z: Tensor, b: Tensor) -> Tensor:  # (..., n − k), (..., k) -> (..., n)
        return z @ self.Z.mT + b @ self.C.mT


def _pivots(A: Tensor) -> list[int]:
    """k columns of A that are far from dependent, each the longest one of what is left."""
    left, chosen = A.clone(), []
    for _ in range(len(A)):
        j = int(left.norm(dim=0).argmax())
        direction = left[:, j] / left[:, j].norm()
        left = left - direction.unsqueeze(-1) * (direction @ left)
        left[:, j] = 0
        chosen.append(j)
    return chosen


class DC3(nn.Module):
    """The layer: from the data of a problem to a point that satisfies its equations.

    Args:
        inputs: Numbers that describe a problem to the network.
        completion: See `Completion`.
        rule: The inequalities.
        steps: Corrections, each z ← z − m with m ← γΔz + βm and Δz = Zᵀ∇‖max(g(x), 0)‖².
        rate: γ. The paper has 1e-7; 1/L, with L the largest curvature, is as much as is stable.
        momentum: β.
        width: Of the two hidden layers.
        unit: Of z, so that the network has numbers near one to learn.

    """

    def __init__(
        self,
        inputs: int,
        completion: Completion,
        rule: Rule,
        *,
        rate: float,
        steps: int = 10,
        momentum: float = 0.5,
        width: int = 200,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        self.completion, self.rule = completion, rule
        self.rate, self.steps, self.momentum, self.unit = rate, steps, momentum, unit
        outputs, dtype = completion.Z.shape[1], completion.Z.dtype
        self.network = nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        ).to(dtype)

    def forward(self, data: Tensor, b: Tensor) -> Tensor:
        """x (..., n) from the data (..., inputs) and the right side b (..., k) of Ax = b."""
        z: Tensor = self.unit * self.network(data)
        x, move = self.completion(z, b), torch.zeros_like(z)
        for _ in range(self.steps):
            move = self.rate * self.rule.slope(x) @ self.completion.Z + self.momentum * move
            x = x - move @ self.completion.Z.mT
        return x


@dataclass(frozen=True)
class Training:
    """How long the network is trained, whichever ends first, and on what."""

    steps: int = 10_000
    seconds: float = 60.0
    batch: int = 200
    rate: float = 1e-3  # of Adam, falling to zero along a cosine; the paper has 1e-4 throughout
    penalty: float = 10.0  # of the squared violation, as in the paper


def train(
    layer: DC3,
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]],
    value: Callable[[Tensor, Tensor], Tensor],
    given: Training,
    seed: int = 0,
) -> tuple[int, float]:
    """Minimise the mean of value(x, data) + penalty · ‖max(g(x), 0)‖² over problems drawn anew.

    ``draw`` makes (data, b) for so many problems. Returns the steps taken and their seconds.
    """
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(layer.parameters(), lr=given.rate)
    begin = time.perf_counter()
    steps = 0
    spent = 0.0
    while steps < given.steps and spent < given.seconds:
        done = max(steps / given.steps, spent / given.seconds)
        for group in optimiser.param_groups:
            group["lr"] = given.rate * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done)).item())
        data, b = draw(given.batch, generator)
        x = layer(data, b)
        excess = layer.rule.excess(x).square().sum(-1)
        loss = (value(x, data) + given.penalty * excess).mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        steps, spent = steps + 1, time.perf_counter() - begin
    layer.requires_grad_(False)
    return steps, spent
