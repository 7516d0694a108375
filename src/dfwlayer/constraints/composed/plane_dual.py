"""A linear function over the part of a set S in a plane, by the multiplier of the plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.polyhedra.polyhedral_face import Equation
from dfwlayer.ops.rows import any_row, quotient

__all__ = ["PlaneDual", "mixed", "plane_dual"]

MOST = 60  # steps for the vertex; each ends the search on one of finitely many pieces


class PlaneDual(NamedTuple):
    """A linear function over the set as one over S."""

    value: Tensor  # (..., 1), its minimum
    multiplier: Tensor  # (..., 1), μ
    below: Tensor  # (..., n), a g + μa whose vertex is below the plane, or in it
    above: Tensor  # (..., n), one whose vertex is above


@torch.no_grad()
def plane_dual(vertex: Callable[[Tensor], Tensor], equation: Equation, g: Tensor) -> PlaneDual:
    """The largest min ⟨g + μa, s⟩ − μb.

    The minimum is concave in μ and piecewise linear, a piece for each vertex s. Two pieces, one
    rising and one falling, meet at the next μ; where no third one is lower, that is the top.
    """
    a, b = equation
    below, above = a.expand_as(g), (-a).expand_as(g)
    low, high = vertex(below), vertex(above)
    eps = torch.finfo(g.dtype).eps
    ends = torch.stack((a * low, a * high))
    width = (ends[1] - ends[0]).sum(-1, keepdim=True)
    # where ⟨a, x⟩ takes one value on S, all of S is in the plane, and μ has no meaning
    single = width <= 4 * eps * ends.abs().sum(-1, keepdim=True).amax(0)
    if any_row(single):
        below, above = torch.where(single, g, below), torch.where(single, g, above)
        low, high = vertex(below), vertex(above)
    best = torch.full_like(g[..., :1], -torch.inf)
    at = torch.zeros_like(best)
    going = ~single
    for _ in range(MOST):
        rise, fall = (((a * s).sum(-1, keepdim=True) - b) for s in (high, low))
        width = torch.where(single, 0, rise - fall)
        cost, other = ((g * s).sum(-1, keepdim=True) for s in (high, low))
        mu = quotient(other - cost, width)
        turned = g + mu * a
        s = vertex(turned)
        value = (turned * s).sum(-1, keepdim=True) - mu * b
        at = torch.where(value > best, mu, at)
        best = torch.maximum(best, value)
        top = cost + mu * rise
        size = (turned * s).abs().sum(-1, keepdim=True) + (mu * b).abs() + top.abs()
        # a vertex that is known has nothing new to say, whatever rounding makes of its value
        known = (s == low).all(-1, keepdim=True) | (s == high).all(-1, keepdim=True)
        going = going & (width > 0) & (top - value > 4 * eps * size) & ~known
        if not any_row(going):
            break
        beyond = (a * s).sum(-1, keepdim=True) - b
        # a vertex in the plane is the minimum itself: it takes the place of both
        rounding = 2 * eps * ((a * s).abs().sum(-1, keepdim=True) + b.abs())
        upward, downward = going & (beyond >= -rounding), going & (beyond <= rounding)
        high, above = torch.where(upward, s, high), torch.where(upward, turned, above)
        low, below = torch.where(downward, s, low), torch.where(downward, turned, below)
    return PlaneDual(best, at, below, above)


def mixed(low: Tensor, high: Tensor, equation: Equation) -> Tensor:
    """The point between two in which ⟨a, x⟩ = b."""
    a, b = equation
    least, most = ((a * s).sum(-1, keepdim=True) for s in (low, high))
    width = most - least
    share = quotient(b - least, width)
    return low + share.clamp(0, 1) * (high - low)
