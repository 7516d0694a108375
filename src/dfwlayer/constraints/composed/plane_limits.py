"""Finite bounds in place of absent ones, for what is asked of the part of a set in a plane."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dfwlayer.constraints.parameters import fault
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets
from dfwlayer.ops.rows import common_shape, or_one
from dfwlayer.solution import Status

__all__ = ["level_fault", "vertex_limits", "within_reach"]

LARGEST = 1e300  # for bounds that stand for none


def level_fault(
    facets: Facets, vertex: Callable[[Tensor], Tensor], unbounded: Tensor | None
) -> Tensor | None:
    """Statuses of the problems whose plane misses the set, None if none does; see `fault`.

    Args:
        facets: Those of the part in the plane, which is the last equation.
        vertex: Of the set with `vertex_limits`.
        unbounded: The coordinates that these limit.

    """
    normal, level = facets.equations[-1]
    slope = normal.expand(common_shape(*(part.shape for part in facets.tensors())))
    ends = vertex(slope).detach(), vertex(-slope).detach()
    low, high = ((slope * s).sum(-1, keepdim=True) for s in ends)
    # the range is a sum that may be small compared to its terms
    size = torch.maximum(*((slope * s).abs().sum(-1, keepdim=True) for s in ends))
    rounding = 16 * torch.finfo(normal.dtype).eps * size
    if unbounded is not None:
        up, down = (torch.isinf(end) & unbounded for end in (facets.upper, facets.lower))
        rises = ((up & (slope > 0)) | (down & (slope < 0))).any(-1, keepdim=True)
        falls = ((up & (slope < 0)) | (down & (slope > 0))).any(-1, keepdim=True)
        low, high = torch.where(falls, -torch.inf, low), torch.where(rises, torch.inf, high)
    missed = torch.maximum(low - level, level - high) - rounding  # (1,) or (B, 1)
    return fault(
        (missed > 0).squeeze(-1),
        Status.INFEASIBLE,
        lambda: (
            f"level: expected a number between {float(low):g} and {float(high):g}, the range "
            f"of ⟨normal, x⟩ on the set, found {float(level):g}"
        ),
    )


def vertex_limits(facets: Facets, unbounded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds (..., n) within which the part in the plane has all its vertices, if not all of it.

    A vertex has one coordinate at most that is not at a bound, or spends what is left of a budget.

    Args:
        facets: Those of the part in the plane, which is the last equation.
        unbounded: Mask of the coordinates that nothing else bounds on a side or on both.

    Returns:
        l, u, differentiable where they are bounds of the set, and the problems (...) in which the
        plane does not bound all coordinates. It does where ⟨a, x⟩ grows along all open sides, or
        falls along all of them.

    """
    dtype = facets.lower.dtype
    shape = common_shape(*(part.shape for part in facets.tensors()))
    lower, upper, weight, radius, (*_, (a, b)) = facets.each(lambda v: v.detach().double())
    lower, upper, a = (part.expand(shape) for part in (lower, upper, a))
    down, up = (torch.isinf(end) & unbounded for end in (lower, upper))
    extent = torch.maximum(*(torch.where(torch.isinf(v), 0, v.abs()) for v in (lower, upper)))
    if weight is not None and radius is not None:
        extent = torch.where(weight > 0, radius / or_one(weight), extent)
    most = b.abs() + (a.abs() * extent).sum(-1, keepdim=True)
    reach = torch.where(a != 0, 2 * most / or_one(a.abs()), 0)
    reach = torch.where(reach > 0, reach, 1 + extent.amax(-1, keepdim=True))
    reach = (reach + extent).clamp_max(torch.finfo(dtype).max ** 0.5)
    slopes = torch.where(up, a, torch.nan), torch.where(down, -a, torch.nan)
    rises = torch.stack([(v > 0) | v.isnan() for v in slopes]).all(0).all(-1)
    falls = torch.stack([(v < 0) | v.isnan() for v in slopes]).all(0).all(-1)
    reach = reach.to(dtype)
    bounds = torch.where(down, -reach, facets.lower), torch.where(up, reach, facets.upper)
    return *bounds, ~(rises | falls)


def within_reach(
    z: Tensor, a: Tensor, b: Tensor, lower: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor]:
    """Finite bounds, in double, for the point of {l ≤ x ≤ u, ⟨a, x⟩ = b} nearest to z.

    It is clip(z − θa, l, u), and on the way from θ = 0 all coordinates move in directions that are
    known. One that has no bound there would get to the plane alone, so that θ is no larger than
    it needs for that, and no coordinate further than it goes then.
    """
    z, a, b, lower, upper = (part.detach().double() for part in (z, a, b, lower, upper))
    inner = torch.minimum(torch.maximum(z, lower), upper)
    excess = (a * inner).sum(-1, keepdim=True) - b
    way = -torch.sign(excess) * torch.sign(a)
    slope = torch.where(a != 0, a.abs(), 1)
    free = (way != 0) & torch.isinf(torch.where(way > 0, upper, lower))
    alone = ((z - inner).abs() + excess.abs() / slope) / slope
    theta = torch.where(free, alone, torch.inf).amin(-1, keepdim=True)
    reach = 2 * a.abs() * torch.where(torch.isfinite(theta), theta, 0) + 1e-3 * (1 + z.abs())
    reach = reach.clamp_max(LARGEST)
    return (
        torch.where(torch.isinf(lower), torch.minimum(z, inner) - reach, lower),
        torch.where(torch.isinf(upper), torch.maximum(z, inner) + reach, upper),
    )
