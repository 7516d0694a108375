"""Minimising over the convex hull of points that an oracle gives one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg import dot, norm
from dfwlayer.objectives.base import Objective
from dfwlayer.solution import Status

__all__ = ["Descent", "Hull", "descend_over_hull"]

NEWTON = 3  # models of an f that is not quadratic before the oracle is asked again
SHORTER = 20  # times such a step may be halved
PATIENCE = 2  # steps without a decrease of f, after which only rounding is left


@dataclass(frozen=True)
class Hull:
    """Points of a convex set with weights that say which combination of them is meant."""

    points: Tensor  # (..., m, n)
    weights: Tensor  # (..., m), double, ≥ 0 with sum 1

    @classmethod
    def of(cls, x: Tensor) -> Hull:  # (..., n)
        """One point."""
        return cls(x.unsqueeze(-2), torch.ones_like(x[..., :1], dtype=torch.float64))

    def combination(self) -> Tensor:  # (..., n)
        """Σ weight · point, in double precision until the end."""
        mean = (self.weights.unsqueeze(-2) @ self.points.double()).squeeze(-2)
        return mean.to(self.points.dtype)

    def joined(self, point: Tensor) -> Hull:
        """With one more point (..., n), which has no weight yet."""
        points = torch.cat((self.points, point.unsqueeze(-2)), -2)
        return Hull(points, torch.nn.functional.pad(self.weights, (0, 1)))

    def pruned(self) -> Hull:
        """Without points that no problem of the batch uses, as far as they come last."""
        used = int((self.weights > 0).sum(-1).max())
        order = self.weights.argsort(-1, descending=True)[..., :used]
        index = order.unsqueeze(-1).expand(*order.shape, self.points.shape[-1])
        return Hull(self.points.gather(-2, index), self.weights.gather(-1, order))

    def directions(self) -> Tensor:  # (..., n, r)
        """An orthonormal basis of the differences of points in use, with zeros to fill up."""
        x = self.combination().unsqueeze(-2).double()
        offsets = torch.where((self.weights > 0).unsqueeze(-1), self.points.double() - x, 0)
        _, sizes, rows = torch.linalg.svd(offsets, full_matrices=False)
        rank = sizes > 1e-9 * sizes.amax(-1, keepdim=True).clamp_min(1e-300)
        # a point by itself has offsets of rounding only
        rank = rank & (sizes > 1e-12 * norm(x.squeeze(-2)).unsqueeze(-1))
        basis: Tensor = (rows * rank.unsqueeze(-1)).mT
        return basis.to(self.points.dtype)


class Descent(NamedTuple):
    """Where `descend_over_hull` ended."""

    hull: Hull
    x: Tensor  # (..., n)
    num_steps: Tensor  # (...), calls of the oracle
    status: Tensor  # (...)


def descend_over_hull(
    objective: Objective,
    oracle: Callable[[Tensor], Tensor],  # ∇f(x) (..., n) -> the point of the set it favours most
    start: Tensor,  # (..., n), a point of the set
    tol: float,
    max_steps: int,
) -> Descent:
    """Fully corrective Frank-Wolfe: ask for a vertex, then minimise over all that are in use.

    The second part is that of Wolfe (1976): the minimiser over the affine hull of the points in
    use; where that has a negative weight, go until the first weight is zero, drop its point, and
    look again. Every step lowers f at least as much as a pairwise or an away step would, and for
    a quadratic f over a polytope finitely many steps reach the exact solution.
    """
    hull = Hull.of(start)
    x = start
    value, gradient = objective.value_and_gradient(x)
    going = torch.ones_like(value, dtype=torch.bool)
    steps, stalled = torch.zeros_like(value), torch.zeros_like(value)
    status = torch.full_like(value, int(Status.MAX_STEPS), dtype=torch.long)
    eps, tiny = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny
    for _ in range(max_steps):
        vertex = oracle(gradient)
        d = vertex - x
        gap, curvature = -dot(gradient, d), dot(d, objective.hvp(x, d))
        rounding = 64 * eps * x.shape[-1] ** 0.5 * norm(gradient) * norm(d)
        concave = going & (curvature < -rounding)
        status = torch.where(concave, int(Status.NOT_CONVEX), status)
        # with a margin for the rounding of the final certificate, which has the last word
        close = gap <= 0.9 * tol * value.abs().clamp_min(tiny)
        ended = going & ~concave & (close | (stalled >= PATIENCE))
        status = torch.where(ended, int(Status.ROUNDING_FLOOR), status)
        going = going & ~concave & ~ended
        if not bool(going.any()):
            break
        hull = hull.joined(vertex)
        steps = steps + going
        before = value
        for _ in range(1 if objective.quadratic else NEWTON):
            weights = _corrected(objective, hull, x, gradient, going)
            hull, x, value, gradient = _lowered(objective, hull, weights, x, value, gradient)
        stalled = torch.where(value < before, 0, stalled + 1)
        hull = hull.pruned()
    return Descent(hull, x, steps.long(), status)


def _corrected(
    objective: Objective, hull: Hull, x: Tensor, gradient: Tensor, going: Tensor
) -> Tensor:
    """Weights (..., m) that minimise the quadratic model of f at x, for the problems that go on."""
    points = hull.points.unbind(-2)
    offsets = torch.stack([(point - x).double() for point in points], -2)
    products = torch.stack([objective.hvp(x, point - x).double() for point in points], -2)
    gram, slope = offsets @ products.mT, (offsets @ gradient.double().unsqueeze(-1)).squeeze(-1)
    gram = 0.5 * (gram + gram.mT)
    weights = hull.weights
    used = weights > 0
    used[..., -1] = True  # the new one
    done = ~going
    for _ in range(len(points)):
        change = _affine_step(gram, slope, used)
        falling = used & (change < 0)
        room = torch.where(falling, weights / torch.where(falling, -change, 1), torch.inf)
        limit = room.amin(-1, keepdim=True)
        length = torch.where(done.unsqueeze(-1), 0, limit.clamp(max=1))
        weights = (weights + length * change).clamp_min(0)
        slope = slope + length * (gram @ change.unsqueeze(-1)).squeeze(-1)
        dropped = (room <= limit) & (limit < 1) & ~done.unsqueeze(-1)
        weights, used = torch.where(dropped, 0, weights), used & ~dropped
        done = done | (limit.squeeze(-1) >= 1)
        if bool(done.all()):
            break
    return weights / weights.sum(-1, keepdim=True)


def _affine_step(gram: Tensor, slope: Tensor, used: Tensor) -> Tensor:
    """δ with the least ½⟨δ, Gδ⟩ + ⟨slope, δ⟩ among those with sum 0 that leave the unused at 0."""
    mask = used.to(gram.dtype)
    m = gram.shape[-1]
    level = gram.diagonal(dim1=-2, dim2=-1).abs().amax(-1, keepdim=True).clamp_min(1e-300)
    inner = gram / level.unsqueeze(-1) * mask.unsqueeze(-1) * mask.unsqueeze(-2)
    # a little more on the diagonal chooses among the weights of dependent points
    inner.diagonal(dim1=-2, dim2=-1).add_(1 - mask + 1e-13)
    border = mask.unsqueeze(-1)
    corner = torch.zeros_like(border[..., :1, :])
    matrix = torch.cat((torch.cat((inner, border), -1), torch.cat((border.mT, corner), -1)), -2)
    right = torch.nn.functional.pad(-slope / level * mask, (0, 1)).unsqueeze(-1)
    found = torch.linalg.solve_ex(matrix, right).result
    found = found + torch.linalg.solve_ex(matrix, right - matrix @ found).result
    change = found[..., :m, 0] * mask
    return torch.where(torch.isfinite(change).all(-1, keepdim=True), change, 0)


def _lowered(
    objective: Objective, hull: Hull, weights: Tensor, x: Tensor, value: Tensor, gradient: Tensor
) -> tuple[Hull, Tensor, Tensor, Tensor]:
    """The hull with those weights, or weights on the way there, and x, f, ∇f; never higher."""
    old, length = hull.weights, torch.ones_like(value, dtype=torch.float64)
    for _ in range(SHORTER):
        mixed = Hull(hull.points, torch.lerp(old, weights, length.unsqueeze(-1)))
        trial = mixed.combination()
        f, slope = objective.value_and_gradient(trial)
        higher = ~(f <= value)
        if not bool(higher.any()) or objective.quadratic:
            break
        length = torch.where(higher, 0.5 * length, length)
    kept = higher.unsqueeze(-1)
    return (
        Hull(hull.points, torch.where(kept, old, mixed.weights)),
        torch.where(kept, x, trial),
        torch.where(higher, value, f),
        torch.where(kept, gradient, slope),
    )
