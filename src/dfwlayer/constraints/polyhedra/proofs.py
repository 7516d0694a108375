"""Why a program over linear rows has no solution: multipliers, or a direction, that prove it."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.polyhedra.polyhedron import LinearSet
from dfwlayer.linalg.quadratic import Program, minimise, thinned

__all__ = ["direction_down", "proof_of_empty"]


def proof_of_empty(constraint: LinearSet, like: Tensor) -> dict[str, Tensor]:
    """Farkas multipliers of bound sets without a point, for vectors like these (B, n).

    With s ≥ 0 and t of least ‖s‖² + ‖t‖² for which G x ≤ h + s and A x = b + t has a point within
    the bounds, there are forces of the bounds, u ≥ 0 above and l ≤ 0 below, with

        Gᵀs + Aᵀt + u + l = 0   and   ⟨s, h⟩ + ⟨t, b⟩ + ⟨u, upper⟩ + ⟨l, lower⟩ = −‖s‖² − ‖t‖²,

    which is negative: the rows contradict each other. Bounds that cross do so by themselves. In
    double precision, by the names of `Polyhedron`.
    """
    given = constraint.linear(like)
    assert isinstance(given, Program)
    h, b, lower, upper = given.h, given.b, given.lower, given.upper
    (batch, n), m = lower.shape, h.shape[-1]
    crossed = lower > upper
    middle = 0.5 * (lower + upper)
    low, high = torch.where(crossed, middle, lower), torch.where(crossed, middle, upper)
    elastic = given.between(h, b, low, high).elastic(torch.zeros_like(lower), 0.0)
    found = minimise(thinned(elastic)).x
    s, t = found[:, n : n + m].clamp_min(0), found[:, n + m :]
    s = torch.where(torch.isfinite(h), s, 0)
    force = given.pulled(t) + given.gathered(torch.cat((s, s.new_zeros(batch, 2 * n)), -1))
    above = torch.where((force < 0) & torch.isfinite(upper), -force, 0)
    below = torch.where((force > 0) & torch.isfinite(lower), -force, 0)
    unit = torch.nn.functional.one_hot((lower - upper).argmax(-1), n).to(s)
    alone = crossed.any(-1, keepdim=True)
    return {
        "h": torch.where(alone, 0, s),
        "b": torch.where(alone, 0, t),
        "lower": torch.where(alone, -unit, below),
        "upper": torch.where(alone, unit, above),
    }


def direction_down(constraint: LinearSet, P: Tensor, q: Tensor, like: Tensor) -> Tensor:
    """d (B, n) with P d = 0, A d = 0 and G d ≤ 0, along no bound, and ⟨q, d⟩ = −‖d‖² < 0.

    It is the projection of −q onto the directions in which no row ends and f does not bend; q is
    (B, n) and P (n, n) or (B, n, n), in double precision.
    """
    given, n = constraint.linear(like), like.shape[-1]
    assert isinstance(given, Program)
    return minimise(thinned(given._replace(P=P.reshape(-1, n, n), q=q).cone())).x
