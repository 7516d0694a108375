"""Layers over a set that is known by its vertices: smoothed by noise, or by a squared norm.

``vertex`` is a function from costs (B, n) to the vertices (B, n) with the least ⟨cost, vertex⟩.
Both layers map θ (B, n) to a point of the convex hull, and are written from the papers:

- perturbed (Berthet et al., 2020): x(θ) = E argmax ⟨θ + σZ, v⟩ with Z ~ N(0, I), by a mean of
  samples; the derivative is E v(θ + σZ) Zᵀ / σ, from the same samples.
- regularised Frank-Wolfe (Dalle et al., 2022): x(θ) = argmax ⟨θ, x⟩ − ½λ‖x‖² by Frank-Wolfe with
  away steps, the vertices in use being kept; the derivative is that of the best mixture of these
  vertices.

``loss`` is the Fenchel-Young loss of a layer: convex in θ, zero where x(θ) is the target, with the
gradient x(θ) − target, so that training with it differentiates no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Perturbed", "RegularisedFrankWolfe"]

Vertex = Callable[[Tensor], Tensor]  # costs (B, n) -> vertices (B, n)


@dataclass(frozen=True)
class Perturbed:
    """The mean of the vertices for θ and noise.

    Args:
        vertex: See above.
        sigma: σ.
        samples: How many.
        baseline: Whether the mean is taken off the samples in the derivative: no bias, and less
            variance.

    """

    vertex: Vertex
    sigma: float = 1.0
    samples: int = 100
    baseline: bool = True
    seed: int = 0

    def __call__(self, theta: Tensor) -> Tensor:  # (B, n) -> (B, n)
        found: Tensor = _Mean.apply(theta, self)  # type: ignore[no-untyped-call]
        return found

    def loss(self, theta: Tensor, target: Tensor) -> Tensor:
        """E max ⟨θ + σZ, v⟩ − ⟨θ, target⟩ + a constant, (B,); see above."""
        noise, points = self.draw(theta.detach())
        best = ((theta + self.sigma * noise) * points).sum(-1).mean(0)
        return best - (theta * target).sum(-1)

    def draw(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The noise and its vertices, (samples, B, n) each; the same ones for the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(self.samples, *theta.shape, generator=generator, dtype=theta.dtype)
        costs = -(theta + self.sigma * noise).reshape(-1, theta.shape[-1])
        return noise, self.vertex(costs).reshape(noise.shape)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, layer: Perturbed) -> Tensor:
        noise, points = layer.draw(theta.detach())
        ctx.save_for_backward(noise, points)
        ctx.layer = layer
        return points.mean(0)

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor, None]:
        noise, points = ctx.saved_tensors
        (v,) = weights
        layer: Perturbed = ctx.layer
        worth = (points * v).sum(-1, keepdim=True)  # (samples, B, 1)
        count = layer.samples
        if layer.baseline and count > 1:
            worth, count = worth - worth.mean(0), count - 1
        return (worth * noise).sum(0) / (count * layer.sigma), None


@dataclass(frozen=True)
class RegularisedFrankWolfe:
    """argmax ⟨θ, x⟩ − ½λ‖x‖² over the hull, one problem after the other.

    Args:
        vertex: See above.
        strength: λ.
        tol: The gap ⟨∇, x − v⟩ at which a problem is done.
        max_steps: Most steps.

    """

    vertex: Vertex
    strength: float = 1.0
    tol: float = 1e-6
    max_steps: int = 10_000

    def __call__(self, theta: Tensor) -> Tensor:  # (B, n) -> (B, n)
        return torch.stack([self._one(row) for row in theta])

    def loss(self, theta: Tensor, target: Tensor) -> Tensor:
        """⟨θ, x − target⟩ + ½λ(‖target‖² − ‖x‖²), (B,); see above."""
        with torch.no_grad():
            x = self(theta)
        worth = 0.5 * self.strength * (target.square() - x.square())
        return (theta * (x - target) + worth).sum(-1)

    def _one(self, theta: Tensor) -> Tensor:
        target = theta.detach() / self.strength
        atoms, weights = self._mixture(target)
        point: Tensor = weights @ atoms
        # moves of x keep to the span of differences of the atoms in use
        basis = atoms[1:] - atoms[0]
        if len(basis) == 0 or not theta.requires_grad:
            return point
        _, values, directions = torch.linalg.svd(basis, full_matrices=False)
        kept = directions[values > 1e-9 * values[0]]  # (r, n), orthonormal
        moved = (theta / self.strength - target) @ kept.mT @ kept  # zero, with the derivative
        found: Tensor = point + moved
        return found

    def _mixture(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The atoms in use and their weights, for the point of the hull nearest to the target."""
        atoms = self.vertex(-target.unsqueeze(0))
        weights = target.new_ones(1)
        for _ in range(self.max_steps):
            x = weights @ atoms
            slope = x - target
            best = self.vertex(slope.unsqueeze(0)).squeeze(0)
            scores = atoms @ slope
            worst = int(scores.argmax())
            gap, away = float(slope @ (x - best)), float(scores[worst] - slope @ x)
            if gap <= self.tol:
                break
            if gap >= away:
                direction, most = best - x, 1.0
            else:
                share = float(weights[worst])
                direction, most = x - atoms[worst], share / (1 - share) if share < 1 else 1.0
            step = min(most, max(gap, away) / max(float(direction @ direction), 1e-300))
            if gap >= away:
                same = (atoms - best).abs().amax(-1) <= 1e-9
                weights = (1 - step) * weights
                if bool(same.any()):
                    weights[int(same.nonzero()[0])] += step
                else:
                    atoms = torch.cat([atoms, best.unsqueeze(0)])
                    weights = torch.cat([weights, weights.new_tensor([step])])
            else:
                weights = (1 + step) * weights
                weights[worst] -= step
            used = weights > 1e-12
            atoms, weights = atoms[used], weights[used]
        return atoms, weights
