"""The local face of the weighted ℓp ball, for the implicit gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.constraints.face import Face
from dfwlayer.ops import fused
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    column,
    fill,
    inner,
    maximum,
    number,
    number_mask,
    or_one,
    ratio,
    scaled_norm,
    select,
)
from dfwlayer.ops.scale import Scale

__all__ = ["LpFace", "lp_face"]


def lp_face(
    p: float,
    weight: Tensor,  # (n,) or (..., n), not negative
    radius: Tensor,  # (...)
    x: Tensor,  # (..., n)
    g: Tensor,  # (..., n), ∇f(x)
    scale: Scale | None,
    unbounded: Tensor | None,  # mask of the coordinates of zero weight, None if there are none
) -> LpFace:
    """Tell the face from x and g.

    Without a scale it is the face x lies on, to rounding, unless the multiplier says that x
    wants to leave it for the inside. With one it is the face of the solution next to x, as
    `dfwlayer.ops.scale` tells it. Where slack and force are both zero the solution is not
    differentiable, and the face without the coordinate or constraint in question is taken,
    which gives one of the one-sided derivatives.
    """
    constant = weight.detach()
    if p == 1 and unbounded is None:
        found = fused.face_l1(constant, radius.detach(), x, g, scale)
        if found is not None:
            return LpFace(p, weight, radius, x, *found)
    t = number(radius.detach())
    tiny, rounding = torch.finfo(x.dtype).tiny, 8 * torch.finfo(x.dtype).eps
    if p == torch.inf:
        reach = t / constant
        force = -g * torch.sign(x)
        if scale is None:
            at_bound = (x.abs() >= (1 - rounding) * reach) & (force > 0)
        else:
            at_bound = scale.holds(force, (reach - x.abs()).clamp_min(0))
        at_bound = at_bound | (t == 0)
        if unbounded is not None:
            at_bound = at_bound & ~unbounded
        zero = fill(0.0, t)
        return LpFace(p, weight, radius, x, ~at_bound, zero, torch.zeros_like(x), zero)
    weighted = constant * x.abs()
    size = number(scaled_norm(weighted, p))
    bounded = x if unbounded is None else x.masked_fill(unbounded, 0)
    multiplier = ratio(-inner(g, bounded), size, 0.0)  # g = −λ ∇h
    normal = constant * torch.sign(x)
    if p != 1:
        normal = normal * (weighted / maximum(size, tiny)) ** (p - 1)
    tight: Mask
    if scale is None:
        tight = 1 - size / maximum(t, tiny) <= rounding * x.shape[-1] ** 0.5
    else:
        gauge = bounded / maximum(size, tiny)
        felt = scale.felt(column(multiplier, x), column(t - size, x), normal, gauge)
        tight = number_mask(felt.squeeze(-1))
    active = tight & (multiplier > 0)
    multiplier = select(active, multiplier, 0.0)
    if active is False:
        free = torch.ones_like(x, dtype=torch.bool)
        normal = torch.zeros_like(x)
    else:
        free = _free(p, constant, x, g, size, multiplier, scale)
        if unbounded is not None:
            free = free | unbounded
        if active is not True:
            free = free | ~torch.as_tensor(active)
            normal = torch.where(torch.as_tensor(active), normal, 0)
    pinned: Mask = t == 0
    if pinned is not False:
        free = free & ~(torch.as_tensor(pinned) & (constant > 0))
    return LpFace(p, weight, radius, x, free, multiplier, normal * free, size)


def _free(
    p: float,
    weight: Tensor,
    x: Tensor,
    g: Tensor,
    size: Scalar,
    multiplier: Scalar,
    scale: Scale | None,
) -> Tensor:
    """Mask of the coordinates that can move along an active face."""
    if p >= 2:
        return torch.ones_like(x, dtype=torch.bool)
    if p > 1 or scale is None:  # for p < 2 the curvature is infinite at 0: what is there stays
        return x != 0
    # the kink of |x_i| holds a coordinate with what λw_i has left beyond |g_i|
    blur = weight * scale.blur(x / maximum(size, torch.finfo(x.dtype).tiny))
    return (x != 0) & ~scale.holds(weight * multiplier - g.abs(), x.abs(), blur)


@dataclass(frozen=True)
class LpFace(Face):
    """A face of the ℓp ball with h(x; w) = ‖w ∘ x‖_p; see `dfwlayer.constraints.Face`."""

    p: float
    weight: Tensor  # w or |w|
    radius: Tensor
    x: Tensor
    free: Tensor
    multiplier: Scalar
    normal: Tensor
    size: Scalar  # h(x; w)

    @property
    def normals(self) -> tuple[Tensor, ...]:
        """∇h."""
        return (self.normal,)

    @property
    def bends(self) -> bool:
        """For 1 < p < ∞."""
        return self.p not in (1, torch.inf)

    def curvature(self, v: Tensor) -> Tensor:
        """λ(p − 1)/h · w² y^(p−2) v, y = w|x|/h; the rest of C vanishes on the tangent space."""
        return self.curvature_diagonal() * v

    def curvature_diagonal(self) -> Tensor:
        """λ(p − 1)/h · w² y^(p−2), zero for p = 1 and p = ∞."""
        if not self.bends:
            return torch.zeros_like(self.x)
        finfo = torch.finfo(self.x.dtype)
        size = maximum(self.size, finfo.tiny)
        weight = self.weight.detach().abs()
        relative = weight * self.x.detach().abs() / size
        usable = self.free & (relative > 0)
        if self.p == 2:
            bend = torch.ones_like(relative)
        else:
            bend = torch.where(usable, torch.where(usable, relative, 1) ** (self.p - 2), 0)
        # for p < 2 it grows without limit towards 0, and what does not move need not move less
        curvature = (self.multiplier * (self.p - 1)) / size * weight**2 * bend
        return curvature.clamp(max=finfo.max**0.75)

    def force(self) -> Tensor:
        """λ ∇h(x; w) with λ and x constant: λ w_i sign(x_i) (w_i |x_i| / h)^(p−1)."""
        if self.p == torch.inf:
            return torch.zeros_like(self.x)
        weight = self.weight.abs()
        slope = weight * torch.sign(self.x)
        if 1 < self.p < 2:
            # entries may be so small that only their (p − 1)th power is a number of ordinary size;
            # in logarithms its derivatives are, too
            x = self._magnitude()
            positive = (weight > 0) & (x > 0)
            size = or_one(weight).log() - self._size().log().unsqueeze(-1)
            power = ((self.p - 1) * (size + torch.where(positive, x, 1).log())).exp()
            slope = torch.where(positive, slope * power, 0)
        elif self.p >= 2:
            part = weight * self.x.abs() / self._size().unsqueeze(-1)
            positive = part > 0
            slope = torch.where(positive, slope * torch.where(positive, part, 1) ** (self.p - 1), 0)
        return self.multiplier * slope

    def excess(self) -> Tensor:
        """h(x; w) − t where the constraint is active, 0 elsewhere."""
        if self.p == torch.inf:
            return torch.zeros_like(self.x[..., :1])
        active = torch.as_tensor(self.multiplier > 0).expand_as(self.x[..., :1])
        return torch.where(active, (self._size() - self.radius).unsqueeze(-1), 0)

    def pinned(self) -> Tensor:
        """p = ∞: sign(x) t/w at the bound; else 0."""
        if self.p != torch.inf:
            return torch.zeros_like(self.x)
        weight = torch.where(self.free, 1, self.weight.abs())
        return torch.where(self.free, 0, torch.sign(self.x) * self.radius.unsqueeze(-1) / weight)

    def _size(self) -> Tensor:
        """h(x; w), differentiable in w; 1 where x = 0, which has no active constraint."""
        weighted = self.weight.abs() * self._magnitude()
        if self.p == 1:
            return weighted.sum(-1)
        # powers of ratios to the largest entry stay within range and do not meet 0
        largest = or_one(weighted.detach().amax(-1, keepdim=True))
        ratio = weighted / largest
        # less adds nothing, and for p < 2 its second derivatives could leave the range
        least = torch.finfo(ratio.dtype).eps ** 2 if self.p < 2 else 0.0
        positive = ratio > least
        total = torch.where(positive, torch.where(positive, ratio, 1) ** self.p, 0).sum(-1)
        return largest.squeeze(-1) * or_one(total) ** (1 / self.p)

    def _magnitude(self) -> Tensor:
        """|x|, a constant where it is so small that for 1 < p < 2 the curvature holds it.

        With y = w|x|/h relative to the largest, an entry moves y^(2−p) times as much as others.
        """
        x = self.x.abs()
        if not 1 < self.p < 2 or not x.requires_grad:
            return x
        weighted = (self.weight.abs() * x).detach()
        least = torch.finfo(x.dtype).eps ** (2 / (2 - self.p))
        held = weighted <= least * weighted.amax(-1, keepdim=True)
        return torch.where(held, x.detach(), x)
