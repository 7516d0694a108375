"""Points of a convex set, combinations of them, and the directions between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.rows import norm, or_one, where_rows

__all__ = ["Hull", "Mixture", "span"]

RANK = 1e-9  # a direction that is this much shorter than the longest one is rounding


@dataclass(frozen=True)
class Hull:
    """Points of a convex set with weights that say which combination of them is meant."""

    points: Tensor  # (..., m, n)
    weights: Tensor  # (..., m), double, ≥ 0 with sum 1

    @classmethod
    def of(cls, x: Tensor) -> Hull:  # (..., n)
        """One point."""
        return cls(x.unsqueeze(-2), torch.ones_like(x[..., :1], dtype=torch.float64))

    def mean(self) -> Tensor:  # (..., n)
        """Σ weight · point in double precision."""
        return self.sum_of(self.weights)

    def sum_of(self, coefficients: Tensor) -> Tensor:  # (..., m) -> (..., n)
        """Σ coefficient · point in double precision."""
        return (coefficients.unsqueeze(-2) @ self.points.double()).squeeze(-2)

    def combination(self) -> Tensor:  # (..., n)
        """The mean, rounded to the points' dtype."""
        return self.mean().to(self.points.dtype)

    def joined(self, point: Tensor) -> tuple[Hull, Tensor]:
        """With one more point (..., n), which has no weight yet, and where it is (..., m), 1 or 0.

        A point that was there before stays the only one of its kind.
        """
        points = torch.cat((self.points, point.unsqueeze(-2)), -2)
        first = (points == point.unsqueeze(-2)).all(-1).to(torch.uint8).argmax(-1, keepdim=True)
        weights = torch.nn.functional.pad(self.weights, (0, 1))
        return Hull(points, weights), torch.zeros_like(weights).scatter(-1, first, 1.0)

    def pruned(self) -> Hull:
        """Without points that no problem of the batch uses."""
        used = int((self.weights > 0).sum(-1).max())
        order = self.weights.argsort(-1, descending=True)[..., :used]
        index = order.unsqueeze(-1).expand(*order.shape, self.points.shape[-1])
        return Hull(self.points.gather(-2, index), self.weights.gather(-1, order))

    def padded(self, count: int) -> Hull:
        """With so many points, those that are added without weight."""
        more = count - self.weights.shape[-1]
        if not more:
            return self
        again = self.points[..., :1, :].expand(*self.points.shape[:-2], more, -1)
        weights = torch.nn.functional.pad(self.weights, (0, more))
        return Hull(torch.cat((self.points, again), -2), weights)

    def in_use(self, eps: float) -> Tensor:  # (..., m)
        """Mask of the points without which x would be another one, to a relative rounding eps."""
        x = self.mean().unsqueeze(-2)
        share = self.weights * norm(self.points.double() - x)
        size = norm(x) + norm(self.points.double()).amax(-1, keepdim=True)
        # a single point is x itself, at distance zero, and is in use all the same
        alone = self.weights >= self.weights.amax(-1, keepdim=True)
        return (self.weights > 0) & ((share > 16 * eps * size) | alone)


def span(points: Tensor, used: Tensor, eps: float) -> Tensor:  # (..., m, n), (..., m)
    """An orthonormal basis (..., n, r) of the differences of used points, zeros to fill it up.

    It is formed from the points themselves: a mean of theirs is rounded, and that rounding would
    be one more direction. The points are known to a relative ``eps``, and what is not longer
    than that is no direction either. Double precision.
    """
    points, size = points.double(), points.double().abs().amax((-2, -1))
    unit = or_one(size)[..., None, None]
    first = used.to(torch.uint8).argmax(-1)[..., None, None]
    origin = points.gather(-2, first.expand(*first.shape[:-1], points.shape[-1]))
    offsets = torch.where(used.unsqueeze(-1), (points - origin) / unit, 0)
    _, sizes, axes = torch.linalg.svd(offsets, full_matrices=False)
    longest = sizes.amax(-1, keepdim=True)
    rank = sizes > (RANK * longest).clamp_min(64 * eps * points.shape[-2] ** 0.5)
    basis: Tensor = (axes * rank.unsqueeze(-1)).mT
    return basis


class Mixture(NamedTuple):
    """A combination of points, and f there."""

    hull: Hull
    x: Tensor  # (..., n)
    value: Tensor  # (...)
    gradient: Tensor  # (..., n)

    def where(self, mask: Tensor, other: Mixture) -> Mixture:  # both with the same points
        """Itself where the mask (...) holds, the other one elsewhere."""
        weights = where_rows(mask, self.hull.weights, other.hull.weights)
        return Mixture(
            Hull(self.hull.points, weights),
            where_rows(mask, self.x, other.x),
            torch.where(mask, self.value, other.value),
            where_rows(mask, self.gradient, other.gradient),
        )
