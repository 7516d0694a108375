"""Balls of norms other than ℓ1 and ℓ∞."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.constraints.balls.lp_projection import project_lp
from dfwlayer.constraints.plain.base import Plain, less, shrunk, wide, wide_column
from dfwlayer.constraints.plain.flat import PlainFlat
from dfwlayer.ops.rows import or_one, scaled_norm
from dfwlayer.ops.values import Value

__all__ = ["NEWTON", "PlainEllipsoid", "PlainGroups", "PlainPower"]

NEWTON = 12  # most Newton steps for the multiplier of a curved ball; about 6 are needed


@dataclass(frozen=True)
class PlainPower(Plain):
    """{x : ‖w ∘ x‖_p ≤ t} for 1 < p < ∞; for p = 2 without weights a formula."""

    p: float
    weight: Tensor | None
    radius: Value

    @property
    def exact(self) -> bool:
        """Whether the nearest point is a multiple of z."""
        return self.p == 2 and self.weight is None

    @property
    def short(self) -> bool:
        """Yes, as Newton steps are few."""
        return True

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """By Newton steps for the multiplier."""
        if self.exact:
            t, size = wide_column(self.radius, z), scaled_norm(z, 2.0).unsqueeze(-1)
            return z * (t / or_one(size)).clamp(max=1.0)
        t = wide(self.radius, z).expand(z.shape[:-1])
        weight = self._weight(z).expand_as(z)
        return project_lp(self.p, weight, t, z, weight > 0, min(steps, NEWTON))

    def inside(self, x: Tensor) -> Tensor:
        """Scaled back."""
        weight = self._weight(x)
        size = scaled_norm(weight * x.double(), self.p).unsqueeze(-1)
        return torch.where(weight > 0, shrunk(x, size, wide_column(self.radius, x)), x)

    def _weight(self, like: Tensor) -> Tensor:
        return wide(1.0 if self.weight is None else self.weight, like).abs()


@dataclass(frozen=True)
class PlainGroups(Plain):
    """{x : Σ_g w_g ‖x_g‖₂ ≤ t}, by the ℓ1 ball of the norms."""

    member: Tensor  # (n, G), 1 where a coordinate is in a group
    ball: PlainFlat

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """Each group shrinks to its part of the projection of the norms."""
        norms = self._norms(z)
        shorter = self.ball.nearest(norms, steps)
        return z * self._spread(torch.where(norms > 0, shorter / or_one(norms), 0.0))

    def inside(self, x: Tensor) -> Tensor:
        """Scaled back, group by group."""
        norms = self._norms(x.double())
        # the rounding of x is that of its norms
        share = self.ball.inside(norms.to(x.dtype)).double() / or_one(norms)
        eps = wide(torch.finfo(x.dtype).eps, x)
        factor = torch.where((norms > 0) & (share < 1 - eps), less(share, 2 * eps), 1.0)
        return (x.double() * self._spread(factor)).to(x.dtype)

    def _norms(self, z: Tensor) -> Tensor:
        largest = or_one(z.abs().amax(-1, keepdim=True))
        return ((z / largest).square() @ self.member.double()).sqrt() * largest

    def _spread(self, each: Tensor) -> Tensor:
        return each @ self.member.double().transpose(-2, -1)


@dataclass(frozen=True)
class PlainEllipsoid(Plain):
    """{x : ‖Ax‖₂ ≤ t}, along its principal axes, which are found beforehand."""

    A: Tensor  # (m, n)
    scale: Tensor  # (n,), singular values
    right: Tensor  # (n, n), a column for each
    radius: Value

    @property
    def exact(self) -> bool:
        """No."""
        return False

    @property
    def short(self) -> bool:
        """Yes, as Newton steps are few."""
        return True

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """By Newton steps for the secular equation."""
        right, scale = self.right.double(), self.scale.double()
        y = (z.unsqueeze(-2) @ right).squeeze(-2)
        t = wide(self.radius, z).expand(z.shape[:-1])
        moved = project_lp(2.0, scale.expand_as(y), t, y, None, min(steps, NEWTON))
        x = (moved.unsqueeze(-2) @ right.transpose(-2, -1)).squeeze(-2)
        return torch.where((moved == y).all(-1, keepdim=True), z, x)

    def inside(self, x: Tensor) -> Tensor:
        """Scaled back; an x rounded along a short axis needs the last room."""
        t = wide_column(self.radius, x)
        loss = _length(self.A.abs(), x.abs())
        for units in (2.0, 8.0, 4 + 2 * loss / or_one(_length(self.A, x))):
            x = shrunk(x, _length(self.A, x), t, units)
        return x


def _length(A: Tensor, x: Tensor) -> Tensor:
    """‖Ax‖₂ as (..., 1), in double precision."""
    image = (A.detach().double() @ x.double().unsqueeze(-1)).squeeze(-1)
    return scaled_norm(image, 2.0).unsqueeze(-1)
