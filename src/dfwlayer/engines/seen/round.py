"""Projection onto a Euclidean ball."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.plain.base import shrunk
from dfwlayer.engines.seen.limits import settled_at

__all__ = ["project_onto_round"]


def project_onto_round(q: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:  # (..., n), () or (...)
    """The point of ‖x‖₂ ≤ t nearest to −q, and whether there are numbers that cannot be."""
    z, t = -q.double(), radius.double().unsqueeze(-1)
    sound = z.isfinite().all(-1, keepdim=True) & t.isfinite() & (t >= 0)
    z, t = torch.where(sound, z, 0.0), torch.where(sound, t, 0.0)
    with torch.no_grad():
        felt = (z.square().sum(-1, keepdim=True) >= t * t) & (z != 0).any(-1, keepdim=True)
    size = torch.where(felt, z, 1.0).square().sum(-1, keepdim=True).sqrt()
    x = torch.where(felt, z * (t / size), torch.where(t > 0, z, 0.0))
    with torch.no_grad():
        near = x.to(q.dtype)
        inner = shrunk(near, near.double().square().sum(-1, keepdim=True).sqrt(), t)
    return settled_at(x, inner, sound), ~sound.all()
