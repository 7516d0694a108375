"""The local face of the weighted ℓp ball, for the implicit gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.linalg import dot, scaled_norm

__all__ = ["lp_face"]


def lp_face(
    p: float,
    weight: Tensor,  # (B, n), not negative
    radius: Tensor,  # (B,)
    x: Tensor,  # (B, n)
    g: Tensor,  # (B, n), ∇f(x)
    scale: Tensor | None,  # (B,), size of the objective's values
) -> LpFace:
    """Tell the face from x and g.

    Without a scale it is the face x lies on, to rounding, unless the multiplier says that x
    wants to leave it for the inside. With one it is the face of the solution next to x: at a
    solution each coordinate, and the constraint as a whole, has either a primal slack or a
    dual one, and the other is zero up to rounding. So the larger of the two, both measured
    relative to their own scale, tells the side; this also holds for a solution that is only
    approximate. Where both are zero the solution is not differentiable, and the face without
    the coordinate or constraint in question is taken, which gives one of the one-sided
    derivatives.
    """
    weight_const, t = weight.detach(), radius.detach()
    bounded = weight_const > 0
    tiny = torch.finfo(x.dtype).tiny
    rounding = 8 * torch.finfo(x.dtype).eps
    share = weight_const * x.abs() / t.clamp_min(tiny).unsqueeze(-1)  # w_i |x_i| / t
    if p == torch.inf:
        force = -g * x  # the multiplier −g_i sign(x_i) of a bound, times |x_i|
        if scale is None:
            at_bound = (share >= 1 - rounding) & (force > 0)
        else:
            pressed = force / scale.clamp_min(tiny).unsqueeze(-1)
            at_bound = (pressed >= 1 - share) & (share > 0.5)
        at_bound = bounded & (at_bound | (t == 0).unsqueeze(-1))
        zero = torch.zeros_like(t)
        return LpFace(p, weight, radius, x, ~at_bound, zero, torch.zeros_like(x), zero)
    size = scaled_norm(weight_const * x, p)
    multiplier = -dot(g, torch.where(bounded, x, 0)) / size.clamp_min(tiny)  # g = −λ ∇h
    room = 1 - size / t.clamp_min(tiny)
    if scale is None:
        tight = room <= rounding * x.shape[-1] ** 0.5
    else:
        tight = multiplier * size / scale.clamp_min(tiny) > room
    active = tight & (multiplier > 0)
    multiplier = torch.where(active, multiplier, 0)
    relative = torch.where(bounded, weight_const * x.abs(), 0) / size.clamp_min(tiny).unsqueeze(-1)
    free = torch.ones_like(bounded)
    if p == 1:
        pull = g.abs() / torch.where(bounded, weight_const, 1)
        dual = 1 - pull / multiplier.clamp_min(tiny).unsqueeze(-1)
        on_support = (x != 0) if scale is None else (relative > dual) & (x != 0)
        free = ~bounded | on_support | ~active.unsqueeze(-1)
        slope = weight_const * torch.sign(x)
    else:
        if p < 2:  # the curvature is infinite at 0: such a coordinate stays there
            free = ~bounded | (relative > 0) | ~active.unsqueeze(-1)
        slope = weight_const * torch.sign(x) * relative ** (p - 1)
    free = free & ~(bounded & (t == 0).unsqueeze(-1))
    normal = torch.where(free & bounded & active.unsqueeze(-1), slope, 0)
    return LpFace(p, weight, radius, x, free, multiplier, normal, size)


@dataclass(frozen=True)
class LpFace:
    """A face of the ℓp ball with h(x; w) = ‖w ∘ x‖_p; see `dfwlayer.constraints.Face`."""

    p: float
    weight: Tensor
    radius: Tensor
    x: Tensor
    free: Tensor
    multiplier: Tensor
    normal: Tensor
    size: Tensor  # (B,), h(x; w)

    def curvature(self, v: Tensor) -> Tensor:
        """λ(p − 1)/h · w² y^(p−2) v, y = w|x|/h; the rest of C vanishes on the tangent space."""
        return self.curvature_diagonal() * v

    def curvature_diagonal(self) -> Tensor:
        """λ(p − 1)/h · w² y^(p−2), zero for p = 1 and p = ∞."""
        if self.p in (1, torch.inf):
            return torch.zeros_like(self.x)
        tiny = torch.finfo(self.x.dtype).tiny
        size = self.size.clamp_min(tiny).unsqueeze(-1)
        weight = self.weight.detach()
        relative = weight * self.x.abs() / size
        usable = self.free & (relative > 0)
        bend = torch.where(usable, torch.where(usable, relative, 1) ** (self.p - 2), 0)
        if self.p == 2:
            bend = torch.ones_like(bend)
        return (self.multiplier * (self.p - 1)).unsqueeze(-1) / size * weight**2 * bend

    def force(self) -> Tensor:
        """λ ∇h(x; w) with λ and x constant: λ w_i sign(x_i) (w_i |x_i| / h)^(p−1)."""
        if self.p == torch.inf:
            return torch.zeros_like(self.x)
        slope = self.weight * torch.sign(self.x)
        if self.p > 1:
            part = self.weight * self.x.abs() / self._size().unsqueeze(-1)
            positive = part > 0
            slope = torch.where(positive, slope * torch.where(positive, part, 1) ** (self.p - 1), 0)
        return self.multiplier.unsqueeze(-1) * slope

    def excess(self) -> Tensor:
        """h(x; w) − t where the constraint is active, 0 elsewhere."""
        if self.p == torch.inf:
            return torch.zeros_like(self.multiplier)
        return torch.where(self.multiplier > 0, self._size() - self.radius, 0)

    def pinned(self) -> Tensor:
        """p = ∞: sign(x) t/w at the bound; else 0."""
        if self.p != torch.inf:
            return torch.zeros_like(self.x)
        weight = torch.where(self.free, 1, self.weight)
        return torch.where(self.free, 0, torch.sign(self.x) * self.radius.unsqueeze(-1) / weight)

    def _size(self) -> Tensor:
        """h(x; w), differentiable in w; 1 where x = 0, which has no active constraint."""
        weighted = self.weight * self.x.abs()
        if self.p == 1:
            return weighted.sum(-1)
        # powers of ratios to the largest entry stay within range and do not meet 0
        largest = weighted.detach().amax(-1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1)
        ratio = weighted / largest
        positive = ratio > 0
        total = torch.where(positive, torch.where(positive, ratio, 1) ** self.p, 0).sum(-1)
        return largest.squeeze(-1) * torch.where(total > 0, total, 1) ** (1 / self.p)
