"""The multiplier of one linear constraint by sorting the points at which coordinates meet bounds.

The same problem as that of `dfwlayer.constraints.polyhedra.knapsack`, where it is found by a search
that is quicker for many coordinates, and which asks for values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.ops.rows import quotient

__all__ = ["above_zero", "between", "level"]

LARGEST = 1e30  # for quotients, so that their products stay within range


def level(z: Tensor, total: Tensor) -> Tensor:  # (..., n), (..., 1) -> (..., 1)
    """θ with Σ (z − θ)₊ = b."""
    top = z.amax(-1, keepdim=True)
    return top - _height(top - z, total)


def _height(delta: Tensor, total: Tensor) -> Tensor:
    """η with Σ (η − δ)₊ = b for a δ ≥ 0."""
    count = torch.arange(1, delta.shape[-1] + 1, dtype=delta.dtype, device=delta.device)
    return ((delta.sort(-1).values.cumsum(-1) + total) / count).amin(-1, keepdim=True)


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
    ordered, index = delta.sort(-1)
    square = (slope * slope).expand_as(delta).gather(-1, index)
    eta = ((square * ordered).cumsum(-1) + total) / square.cumsum(-1)
    return (eta.amin(-1, keepdim=True) - delta).clamp_min(0.0) * slope


def between(
    z: Tensor,  # (..., n)
    slope: Tensor | None,  # a, (), (n,) or (..., n), None for ones
    lower: Tensor,  # l, (), (n,) or (..., n), finite where a is not zero
    upper: Tensor,  # u
    total: Tensor,  # b, (1,) or (..., 1)
) -> Tensor:
    """x = clip(z − θa, l, u) with ⟨a, x⟩ = b; all bounds are met where they do not let it reach b.

    ⟨a, x⟩ falls with θ and is straight between the θ at which a coordinate meets a bound, so that
    its values there follow from sums along the sorted ones. A Newton step from the right piece
    removes what rounding left.
    """
    if slope is None:
        a = square = torch.ones_like(z)
        first, last = z - upper, z - lower
        most = upper.expand_as(z)
    else:
        a, square, some = slope, (slope * slope).expand_as(z), slope != 0
        unit = torch.where(some, a, 1.0)
        ends = (z - lower) / unit, (z - upper) / unit
        first, last = torch.minimum(*ends), torch.maximum(*ends)
        first, last = torch.where(some, first, 0.0), torch.where(some, last, 0.0)
        most = torch.where(some, a * torch.where(a > 0, upper, lower), 0.0).expand_as(z)
    kinks, index = torch.cat((first, last), -1).clamp(-LARGEST, LARGEST).sort(-1)
    width = torch.cat((square, -square), -1).gather(-1, index).cumsum(-1).clamp_min(0.0)
    fall = (width[..., :-1] * (kinks[..., 1:] - kinks[..., :-1])).cumsum(-1)
    top = most.sum(-1, keepdim=True) - total
    excess = torch.cat((top, top - fall), -1)
    over = excess > 0
    left = torch.where(over, kinks, kinks[..., :1]).amax(-1, keepdim=True)
    right = torch.where(over, kinks[..., -1:], kinks).amin(-1, keepdim=True)
    # of the last excess above zero, and the first that is not, what part of the way goes to zero
    high = torch.where(over, excess, torch.inf).amin(-1, keepdim=True)
    low = torch.where(over, -torch.inf, excess).amax(-1, keepdim=True)
    share = torch.where(torch.isinf(high) | torch.isinf(low), 0.0, high / (high - low))
    theta = left + share * (right - left)
    y = z - (theta if slope is None else theta * a)
    x = torch.minimum(torch.maximum(y, lower), upper)
    free = torch.where(x == y, square, 0.0).sum(-1, keepdim=True)
    rest = (x if slope is None else a * x).expand_as(z).sum(-1, keepdim=True) - total
    theta = quotient(rest, free)
    y = y - (theta if slope is None else theta * a)
    return torch.minimum(torch.maximum(y, lower), upper)
