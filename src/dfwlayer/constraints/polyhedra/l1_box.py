"""The weighted ℓ1 ball intersected with a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensor, check_tensors, flag_nonfinite
from dfwlayer.constraints.parameters import (
    Value,
    as_column,
    as_entries,
    entries,
    fault,
    merged,
    number,
)
from dfwlayer.constraints.polyhedra.knapsack import Knapsack, clipped, spend
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets
from dfwlayer.constraints.polyhedra.polyhedral_set import PolyhedralSet, soften
from dfwlayer.constraints.region import Flat, total
from dfwlayer.constraints.retraction import moved_to, scaled_into
from dfwlayer.ops.rows import common_shape, or_one, settled, where_rows
from dfwlayer.ops.tracing import uncompiled
from dfwlayer.solution import Status

__all__ = ["L1Box", "L1BoxSet", "project_l1_box"]


@uncompiled
def project_l1_box(
    z: Tensor,  # (..., n)
    weight: Tensor | None,  # (n,) or (..., n), None for ones
    radius: Value,  # a number, () or (...)
    lower: Value,  # a number or (n,) or (..., n), not positive
    upper: Value,  # likewise, not negative
) -> Tensor:
    """The point of {x : Σ w_i |x_i| ≤ t, l ≤ x ≤ u} nearest to z, differentiable in all of it.

    That is clip(sign(z)(|z| − θw)₊, l, u) with θ = 0, or θ > 0 such that Σ w|x| = t. Only |w|
    matters. Everything is checked as by `L1Box`: with a batch, a problem whose own numbers are
    not finite or make no set becomes NaN, with gradient zero, and leaves the others alone.
    """
    check_tensors({"z": z})
    if z.dim() == 0 or z.shape[-1] == 0:
        raise ValueError(f"z: expected shape (..., n) with n ≥ 1, got {tuple(z.shape)}")
    given = {"radius": radius, "weight": weight, "lower": lower, "upper": upper}
    shape = tuple(z.shape)
    for name, value in given.items():
        if isinstance(value, Tensor):
            check_tensor(name, value)
            own = (*value.shape, 1) if name == "radius" else tuple(value.shape)
            try:
                shape = common_shape(shape, own)
            except ValueError:
                raise ValueError(
                    f"{name}: expected shape {'(...)' if name == 'radius' else '(..., n)'} to go "
                    f"with z of shape {tuple(z.shape)}, got {tuple(value.shape)}"
                ) from None
    n = shape[-1]
    if n != z.shape[-1]:
        raise ValueError(f"z: expected {n} entries, as the others have, got {tuple(z.shape)}")

    def laid_out(name: str, value: Value | None) -> Value | None:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        full = value.expand(shape[:-1] if name == "radius" else shape)
        return full if len(shape) == 1 else full.reshape(-1, *full.shape[len(shape) - 1 :])

    at = z.expand(shape).reshape(-1, n) if len(shape) > 1 else z
    constraint = L1Box(**{k: laid_out(k, v) for k, v in given.items()})  # type: ignore[arg-type]
    bound, bad = constraint.bind((n,), z.dtype, z.device).verified()
    assert isinstance(bound, L1Box)
    bad = merged(flag_nonfinite("z", at, 1), bad)
    if bad is None:
        return _project(bound.facets(at), at).reshape(shape)
    lost = (bad != 0).expand(len(at))
    x = _project(bound.replace_rows(lost).facets(at), where_rows(~lost, at, 0))
    return where_rows(~lost, x, torch.nan).reshape(shape)


def _project(facets: Facets, z: Tensor) -> Tensor:
    lower, upper, weight, radius = _parts(facets)
    x = clipped(z, lower, upper)
    weighted = (weight * x.abs()).sum(-1, keepdim=True)
    outside = weighted > radius
    if settled(~outside):
        return x
    bound = torch.where(z < 0, -lower, upper)
    # no coordinate can use more than the whole budget
    heavy = weight > 0
    alone = radius / torch.where(heavy, weight, 1)
    bound = torch.where(heavy & (bound > alone), alone, bound)
    moved = Knapsack(z.abs(), weight, torch.zeros_like(radius), bound, radius).nearest()
    return torch.where(outside, torch.copysign(moved, z), x)


class L1BoxSet(PolyhedralSet):
    """The geometry of {x : Σ w_i |x_i| ≤ t, l ≤ x ≤ u} with l ≤ 0 ≤ u."""

    def start(self, like: Tensor) -> Tensor:
        """Zero, which is inside."""
        return torch.zeros_like(like)

    def vertex(self, g: Tensor) -> Tensor:
        """Go to the bounds, in the order of |g|/w, until Σ w|x| = t."""
        lower, upper, weight, radius = _parts(self.facets(g))
        slope = g.detach()
        reach = torch.where(slope > 0, -lower, torch.where(slope < 0, upper, 0))
        heavy = weight > 0
        cost = torch.where(heavy, weight, 1)
        # in units in which neither a quotient nor a product leaves the range of a double
        steepest = slope.abs().amax(-1, keepdim=True).double()
        size = slope.abs() / or_one(steepest)
        merit = size / (cost / cost.amin(-1, keepdim=True)).detach()
        merit = torch.where(heavy, merit, torch.inf)
        order = merit.argsort(-1, descending=True)
        alone = torch.minimum(reach, radius / cost)
        price = torch.where(heavy, torch.minimum(cost * reach, radius), 0)
        spent = spend(radius, price, order)
        way = torch.where(spent < price, torch.minimum(spent / cost, alone), alone)
        return -torch.sign(slope) * torch.where(heavy, way, reach)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """argmin ⟨g, s⟩ + τ/2 ‖s/r‖² over the set, which is a projection; r is the largest reach.

        As far out as the projected point may be, double precision has digits left for the result.
        """
        facets = self.facets(g).each(Tensor.double)
        reach = _reach(*_parts(facets)).amax(-1, keepdim=True)
        far = soften(g, temperature, reach)
        return _project(facets, far).to(g.dtype)

    def retract(self, x: Tensor) -> Tensor:
        """x, moved to the bounds and scaled towards 0 where it is outside."""
        lower, upper, weight, radius = _parts(self.facets(x).detach())
        inner = clipped(x.detach(), lower, upper)
        size = (weight.double() * inner.abs()).sum(-1)
        return moved_to(x, scaled_into(inner, size, radius.squeeze(-1), weight > 0))

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """See `project_l1_box`."""
        with torch.no_grad():
            return _project(self.facets(z), z)

    def diameter(self, n: int) -> Tensor:
        """At most: from ‖u − l‖ and from Σ x² ≤ max(|x_i|/w_i) · Σ w|x|."""
        one = self.blank(n)
        lower, upper, weight, radius = _parts(self.facets(one).detach())
        box = torch.linalg.vector_norm((upper - lower) * one, dim=-1)
        way = _reach(lower, upper, weight, radius)
        share = torch.where(weight > 0, radius * way / weight, torch.inf)
        return torch.minimum(box, 2 * share.amax(-1).sqrt())


@dataclass(frozen=True)
class L1Box(L1BoxSet):
    """{x : Σ w_i |x_i| ≤ t, l ≤ x ≤ u}, with l ≤ 0 ≤ u.

    Args:
        radius: t ≥ 0, a number, a 0-d tensor or (B,).
        weight: w, a number, (n,) or (B, n), None for ones. Only |w| matters; a coordinate whose
            weight is zero is bounded by the box alone.
        lower: l ≤ 0, a number, (n,) or (B, n); −∞ for no bound, where the weight is not zero.
        upper: u ≥ 0, likewise.

    """

    radius: Value = field(default=1.0, metadata=number(least=0, grows=True))
    weight: Value | None = field(default=None, metadata=entries())
    lower: Value = field(
        default=-1.0,
        metadata=entries(most=0, hint="the set has to contain 0", infinite=True, grows=True),
    )
    upper: Value = field(
        default=1.0,
        metadata=entries(least=0, hint="the set has to contain 0", infinite=True, grows=True),
    )

    def facets(self, like: Tensor) -> Facets:
        weight = as_entries(1.0 if self.weight is None else self.weight, like)
        size = weight.abs() if weight.dim() else weight.abs().unsqueeze(-1)
        radius = as_column(self.radius, like)
        return Facets(as_entries(self.lower, like), as_entries(self.upper, like), size, radius)

    def normal_form(self, n: int) -> Sequence[Flat]:
        """All of it."""
        weight = 1.0 if self.weight is None else self.weight
        return (Flat(n, self.lower, self.upper, weight, total(self.radius)),)

    def check_values(self) -> Tensor | None:
        """A bound for every coordinate."""
        if self.weight is None:
            return None
        lower, upper, weight = (
            torch.as_tensor(v).detach() for v in (self.lower, self.upper, self.weight)
        )
        endless = torch.isinf(lower) | torch.isinf(upper)
        return fault(
            (endless & (weight == 0)).any(-1),
            Status.INVALID,
            lambda: (
                "weight: expected no zero where lower or upper is infinite, as nothing would bound "
                "that coordinate; give it a weight or bounds"
            ),
        )


def _parts(facets: Facets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """l, u, w and t."""
    assert facets.weight is not None
    assert facets.radius is not None
    return facets.lower, facets.upper, facets.weight, facets.radius


def _reach(lower: Tensor, upper: Tensor, weight: Tensor, radius: Tensor) -> Tensor:
    """The largest |x_i|."""
    heavy = weight > 0
    alone = torch.where(heavy, radius / torch.where(heavy, weight, 1), torch.inf)
    return torch.minimum(torch.maximum(upper, -lower), alone)
