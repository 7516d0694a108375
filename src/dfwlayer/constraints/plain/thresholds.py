"""The multiplier of one linear constraint by sorting the points at which coordinates meet bounds.

The same problem as that of `dfwlayer.constraints.polyhedra.knapsack`, where it is found by a search
that is quicker for many coordinates, and which asks for values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.ops.rows import or_one

__all__ = ["LARGEST", "above_zero", "between", "level"]

LARGEST = 1e30  # for quotients, so that their products stay within range


def level(z: Tensor, total: Tensor) -> Tensor:  # (..., n), (..., 1) -> (..., 1)
    """θ with Σ (z − θ)₊ = b."""
    top = z.amax(-1, keepdim=True)
    return top - _height(top - z, total)


def _height(delta: Tensor, total: Tensor) -> Tensor:
    """η with Σ (η − δ)₊ = b for a δ ≥ 0."""
    count = torch.arange(1, delta.shape[-1] + 1, dtype=delta.dtype, device=delta.device)
    return ((_ascending(delta)[0].cumsum(-1) + total) / count).amin(-1, keepdim=True)


def above_zero(
    z: Tensor,  # (..., n)
    slope: Tensor | None,  # a > 0, (n,) or (..., n), None for ones
    total: Tensor,  # b ≥ 0, (1,) or (..., 1)
) -> Tensor:
    """x = (z − θa)₊ with Σ a x = b.

    With δ = max(z/a) − z/a that is a(η − δ)₊ with Σ a²(η − δ)₊ = b. Sorted by δ, the η of the first
    k entries, (b + Σ a²δ) / Σ a², is least at the right k.
    """
    pull = z if slope is None else (z / slope).clamp(-LARGEST, LARGEST)
    delta = pull.amax(-1, keepdim=True) - pull
    if slope is None:
        return (_height(delta, total) - delta).clamp_min(0.0)
    ordered, index = _ascending(delta)
    square = (slope * slope).expand_as(delta).gather(-1, index)
    eta = ((square * ordered).cumsum(-1) + total) / square.cumsum(-1)
    return (eta.amin(-1, keepdim=True) - delta).clamp_min(0.0) * slope


def between(
    z: Tensor,  # (..., n)
    slope: Tensor | None,  # a, (), (n,) or (..., n), None for ones
    lower: Tensor,  # l, (), (n,) or (..., n), finite
    upper: Tensor,  # u
    total: Tensor,  # b, (), (1,) or (..., 1)
    least: float | None = None,  # θ is not below it, which is for ⟨a, x⟩ ≤ b
) -> Tensor:
    """x = clip(z − θa, l, u) with ⟨a, x⟩ = b; all bounds are met where they do not let it reach b.

    ⟨a, x⟩ falls with θ and is straight between the θ at which a coordinate meets a bound, so that
    its values there follow from sums along the sorted ones. In the middle of the right piece it is
    known which coordinates are free, and with the others held the equation says what θ is.
    """
    n = z.shape[-1]
    if slope is None:
        kinks, index = _ascending(torch.cat((z - upper, z - lower), -1))
        most = upper.sum(-1, keepdim=True) if upper.dim() else n * upper
        one = torch.ones((), dtype=z.dtype, device=z.device)
        change = torch.where(index < n, one, -one)
    else:
        slope = slope if slope.dim() else slope.expand(n)
        unit = torch.where(slope != 0, slope, 1.0)
        ends = torch.cat(((z - upper) / unit, (z - lower) / unit), -1)
        kinks, index = _ascending(ends.clamp(-LARGEST, LARGEST))
        most = (slope * torch.where(slope > 0, upper, lower)).sum(-1, keepdim=True)
        # a coordinate that rises with θ comes from its lower bound
        steep = torch.cat((slope * slope.abs(), -slope * slope.abs()), -1)
        change = steep[index] if steep.dim() == 1 else steep.expand_as(ends).gather(-1, index)
    left, right = kinks[..., :-1], kinks[..., 1:]
    fall = (change.cumsum(-1)[..., :-1].clamp_min(0.0) * (right - left)).cumsum(-1)
    before = fall < most - total  # pieces at whose end ⟨a, x⟩ is above b still
    left, right = (
        torch.where(before, LARGEST, end).amin(-1, keepdim=True) for end in (left, right)
    )
    middle = 0.5 * (left + right)
    y = z - (middle if slope is None else middle * slope)
    x = torch.minimum(torch.maximum(y, lower), upper)
    free = x == y
    held = torch.where(free, z, x)
    if slope is None:
        share = free.to(z.dtype).sum(-1, keepdim=True).clamp_min(1.0)
    else:
        held = slope * held
        share = or_one(torch.where(free, slope * slope, 0.0).sum(-1, keepdim=True))
    theta = (held.sum(-1, keepdim=True) - total) / share
    # on a piece that is flat, or flat but for rounding, the equation does not say what θ is
    theta = torch.minimum(torch.maximum(theta, left), right)
    if least is not None:
        theta = theta.clamp_min(least)
    y = z - (theta if slope is None else theta * slope)
    return torch.minimum(torch.maximum(y, lower), upper)


def _ascending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted, and their places before; in ONNX fewer operators than those of a sort."""
    ordered, index = values.topk(values.shape[-1], dim=-1, largest=False)
    return ordered, index
