"""Back into a set, rounding included, by a shift that is constant for autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.ops.rows import all_seen

__all__ = ["moved_to", "scaled_into"]


def moved_to(x: Tensor, inner: Tensor) -> Tensor:
    """``inner``, which was found from the values of x; a gradient in it passes on to x."""
    return x + (inner - x.detach()) if x.requires_grad else inner


def scaled_into(
    x: Tensor,
    size: Tensor,
    radius: Tensor,
    moved: Tensor | None = None,
    units: float | Tensor = 2.0,
) -> Tensor:
    """x · radius/size where size > radius, else x itself; a constant shift for autograd.

    Args:
        x: (..., n).
        size: (...), what the ball says of x, in double precision.
        radius: (...).
        moved: Mask (..., n) of the coordinates that count, None for all.
        units: Room left for the rounding of x, in units in the last place of the radius, a number
            or (...).

    """
    finfo = torch.finfo(x.dtype)
    at, radius = x.detach(), radius.detach().double()
    outside = size > radius
    if all_seen(~outside):
        return x
    shrink = (radius / torch.where(outside, size, 1) * (1 - units * finfo.eps)).unsqueeze(-1)
    # numbers below the normal range are rounded by more than that, and had better vanish
    inner = (at * shrink).to(x.dtype)
    inner = torch.where(inner.abs() < finfo.tiny, 0, inner)
    mask = outside.unsqueeze(-1)
    return moved_to(x, torch.where(mask if moved is None else mask & moved, inner, at))
