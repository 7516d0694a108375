"""Quadratic functions by a fixed number of accelerated projected gradient steps."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.plain import Plain
from dfwlayer.ops.rows import or_one

__all__ = ["descended"]

SQUARINGS = 4  # that make m = 16 in `_largest`


def descended(plain: Plain, P: Tensor, z: Tensor, steps: int) -> Tensor:
    """argmin ½ xᵀPx − ⟨z, x⟩ over the set after so many steps, (..., n) in double precision.

    Nesterov's steps with the projection; momentum starts anew where it points uphill
    (O'Donoghue and Candès, 2015), which makes up for not knowing the least curvature.
    """
    P = P.double()
    rate = 1 / or_one(_largest(P))
    x = plain.nearest(z * rate, steps)
    y, age = x, torch.ones_like(x[..., :1])
    for _ in range(steps):
        gradient = (P @ y.unsqueeze(-1)).squeeze(-1) - z
        ahead = plain.nearest(y - rate * gradient, steps)
        way = ahead - x
        anew = ((y - ahead) * way).sum(-1, keepdim=True) > 0
        older = 0.5 + (0.25 + age * age).sqrt()
        y = ahead + torch.where(anew, 0.0, (age - 1) / older) * way
        x, age = ahead, torch.where(anew, 1.0, older)
    return x


def _largest(P: Tensor) -> Tensor:  # (..., n, n) -> (..., 1)
    """An upper bound on the largest eigenvalue: ‖Pᵐ‖^(1/m) with m = 16, above by n^(1/32) at most.

    In units of ‖P‖, the Frobenius norm, nothing leaves the range of a double.
    """
    size = P.square().sum((-2, -1)).sqrt()
    power = P / or_one(size)[..., None, None]
    bound = size
    share = 1.0
    for _ in range(SQUARINGS):
        power = power @ power
        own = power.square().sum((-2, -1)).sqrt()
        share *= 0.5
        bound = bound * own**share
        power = power / or_one(own)[..., None, None]
    return bound.unsqueeze(-1)
