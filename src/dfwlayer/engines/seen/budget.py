"""Projection onto a weighted ℓ1 ball, from the coordinates that it leaves free.

With δ = max(|z|/w) − |z|/w the projection of z is sign(z) w (η − δ)₊, Σ w²(η − δ)₊ = t, as in
`dfwlayer.constraints.balls.l1_nearest`. Which coordinates are free is found without a gradient;
with these held, η is a quotient of two sums, whose derivative is that of the projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.engines.seen.limits import PAIRS

__all__ = ["project_in_sight"]


def project_in_sight(
    q: Tensor,  # (..., n)
    weight: Tensor | None,  # (n,) or (..., n)
    radius: Tensor,  # () or (...)
) -> tuple[Tensor, Tensor]:
    """The point of Σ |w x| ≤ t nearest to −q, and whether there are numbers that cannot be.

    Problems with such numbers become NaN, and have no gradient.
    """
    z, t = -q.double(), radius.double().unsqueeze(-1)
    sound = z.isfinite().all(-1, keepdim=True) & t.isfinite() & (t >= 0)
    if weight is None:
        w = torch.ones_like(z)
    else:
        w = weight.double().abs().expand_as(z)
        sound = sound & w.isfinite().all(-1, keepdim=True)
    z, w, t = torch.where(sound, z, 0.0), torch.where(sound, w, 1.0), torch.where(sound, t, 0.0)
    finfo = torch.finfo(q.dtype)
    held = w > t / finfo.max  # the bound of another, t/w, cannot be written in this dtype
    w, size = torch.where(held, w, 1.0), torch.where(held, z.abs(), 0.0)
    square, pull = torch.where(held, w * w, 0.0), size / w
    with torch.no_grad():
        felt = (square * pull).sum(-1, keepdim=True) > t
        top = pull.amax(-1, keepdim=True)
        free = held & (top - pull < _height(square, top - pull, t))
    delta = top - pull
    square = torch.where(free, square, 0.0)
    total = square.sum(-1, keepdim=True)
    height = ((square * delta).sum(-1, keepdim=True) + t) / torch.where(total > 0, total, 1.0)
    x = torch.where(free, (height - delta).clamp_min(0.0) * w, 0.0) * z.sign()
    x = torch.where(held & felt, x, z)
    with torch.no_grad():
        length = torch.where(held, w * x.to(q.dtype).double().abs(), 0.0).sum(-1, keepdim=True)
        outside = length > t
        # twice eps makes room for the rounding of the product
        shrink = torch.where(outside, t / torch.where(outside, length, 1.0), 1.0)
        shrink = torch.where(outside, shrink * (1 - 2 * finfo.eps), 1.0)
    x = torch.where(held, x * shrink, x)
    # numbers below the normal range are rounded by more than that, and had better vanish
    x = torch.where(held & outside & (x.detach().abs() < finfo.tiny), 0.0, x)
    return torch.where(sound, x, torch.nan).to(q.dtype), ~sound.all()


def _height(square: Tensor, delta: Tensor, t: Tensor) -> Tensor:
    """The least (t + Σ w²δ) / Σ w² over the k smallest δ, for all k: (..., 1)."""
    if delta.shape[-1] <= PAIRS:
        before = delta.unsqueeze(-2) <= delta.unsqueeze(-1)
        mass = torch.where(before, square.unsqueeze(-2), 0.0).sum(-1)
        moment = torch.where(before, (square * delta).unsqueeze(-2), 0.0).sum(-1)
    else:
        ordered, index = delta.sort(-1)
        square = square.gather(-1, index)
        mass, moment = square.cumsum(-1), (square * ordered).cumsum(-1)
    heights = (moment + t) / torch.where(mass > 0, mass, 1.0)
    return torch.where(mass > 0, heights, torch.inf).amin(-1, keepdim=True)
