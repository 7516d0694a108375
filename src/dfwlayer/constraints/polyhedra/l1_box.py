"""The weighted ℓ1 ball intersected with a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensor, check_tensors, flag_nonfinite
from dfwlayer.constraints.base import measured
from dfwlayer.constraints.parameters import as_column, as_entries, entries, fault, merged, number
from dfwlayer.constraints.polyhedra.box import Box, ends_of, open_side
from dfwlayer.constraints.polyhedra.knapsack import Knapsack, clipped, spend
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets
from dfwlayer.constraints.polyhedra.polyhedral_set import PolyhedralSet, soften
from dfwlayer.constraints.region import Flat
from dfwlayer.constraints.retraction import moved_to, scaled_into
from dfwlayer.ops.recorded import recordable
from dfwlayer.ops.rows import all_seen, common_shape, or_one, where_rows
from dfwlayer.ops.values import Value, on_tensor, shape_of, tensors_among, total
from dfwlayer.solution import Status

__all__ = ["L1Box", "L1BoxSet", "project_l1_box"]


def _shapes(
    z: Tensor,
    weight: Tensor | None,
    radius: Value,
    lower: Value | None,
    upper: Value | None,
) -> tuple[Tensor]:
    """Of `project_l1_box`."""
    each = [shape_of(given) for given in (z, weight, lower, upper)]
    shape = torch.broadcast_shapes(*each, (*shape_of(radius), 1))  # type: ignore[no-untyped-call]
    return (z.new_empty(shape),)


@recordable(shapes=_shapes)
def project_l1_box(
    z: Tensor,  # (..., n)
    weight: Tensor | None,  # (n,) or (..., n), None for ones
    radius: Value,  # a number, () or (...)
    lower: Value | None,  # a number or (n,) or (..., n), None for no bound
    upper: Value | None,  # likewise
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
    for name, value in tensors_among(given).items():
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
        def laid(each: Tensor) -> Tensor:
            if each.dim() == 0:
                return each
            full = each.expand(shape[:-1] if name == "radius" else shape)
            return full if len(shape) == 1 else full.reshape(-1, *full.shape[len(shape) - 1 :])

        return on_tensor(value, laid)

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
    if all_seen(~outside):
        return x
    inner = _Inner.of(facets)
    lower, upper, weight, radius = inner.parts
    y = z - inner.origin
    bound = torch.where(y < 0, -lower, upper)
    # no coordinate can use more than the whole budget
    heavy = weight > 0
    alone = radius / torch.where(heavy, weight, 1)
    bound = torch.where(heavy & (bound > alone), alone, bound)
    # what has no weight is where it was
    bound = torch.where(heavy | torch.isfinite(bound.detach()), bound, y.detach().abs() + 1)
    moved = Knapsack(y.abs(), weight, torch.zeros_like(radius), bound, radius).nearest()
    return torch.where(outside, inner.origin + torch.copysign(moved, y), x)


class _Inner(NamedTuple):
    """The set seen from the point m of the box next to 0: y = x − m has a box that contains 0.

    As x has the sign of m wherever that is not zero, |x| = |m| + |y|, and Σ w|y| ≤ t − Σ w|m|.
    """

    origin: Tensor  # m (..., n)
    parts: tuple[Tensor, Tensor, Tensor, Tensor]  # l − m ≤ 0, u − m ≥ 0, w and what is left of t

    @classmethod
    def of(cls, facets: Facets) -> _Inner:
        lower, upper, weight, radius = _parts(facets)
        beside = (lower > 0) | (upper < 0)
        if all_seen(~beside):
            return cls(torch.zeros_like(lower), (lower, upper, weight, radius))
        m = clipped(torch.zeros_like(lower), lower, upper)
        left = radius - (weight * m.abs()).sum(-1, keepdim=True).clamp_max(radius)
        return cls(m, (lower - m, upper - m, weight, left))


class L1BoxSet(PolyhedralSet):
    """The geometry of {x : Σ w_i |x_i| ≤ t, l ≤ x ≤ u}."""

    def start(self, like: Tensor) -> Tensor:
        """The point of the box next to zero, which is inside."""
        lower, upper, *_ = self.facets(like).detach()
        return clipped(torch.zeros_like(like), lower, upper)

    def unbounded(self) -> Tensor | None:
        """The coordinates without a weight, or of weight zero, that lack a bound."""
        return self._unbounded

    @measured
    def _unbounded(self) -> Tensor | None:
        lower, upper, weight, _ = _parts(self.facets(self.blank(1)).detach())
        mask = (torch.isinf(lower) | torch.isinf(upper)) & (weight == 0)
        return mask if bool(mask.any()) else None

    def open_ended(self, g: Tensor) -> Tensor | None:
        """Of those without a bound the ones that have none on the side of −g."""
        if self._unbounded is None:
            return None
        lower, upper, weight, _ = _parts(self.facets(g))
        return open_side(g, lower, upper) & (weight == 0)

    def vertex(self, g: Tensor) -> Tensor:
        """Go from the point next to zero to the bounds, in the order of |g|/w, until Σ w|x| = t."""
        inner = _Inner.of(self.facets(g))
        lower, upper, weight, radius = inner.parts
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
        s = inner.origin - torch.sign(slope) * torch.where(heavy, way, reach)
        endless = self.open_ended(slope)
        return s if endless is None else torch.where(endless, 0, s)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """argmin ⟨g, s⟩ + τ/2 ‖s/r‖² over the set, which is a projection; r is the largest reach.

        As far out as the projected point may be, double precision has digits left for the result.
        The vertex along coordinates that lack a bound.
        """
        facets = self.facets(g).each(Tensor.double)
        reach = _reach(*_parts(facets))
        reach = torch.where(torch.isinf(reach), 0, reach).amax(-1, keepdim=True)
        far = soften(g, temperature, reach)
        s = _project(facets, far).to(g.dtype)
        unbounded = self._unbounded
        return s if unbounded is None else torch.where(unbounded, self.vertex(g), s)

    def retract(self, x: Tensor) -> Tensor:
        """x, moved to the bounds and scaled towards the point next to 0 where it is outside."""
        facets = self.facets(x).detach()
        lower, upper, weight, radius = _parts(facets)
        near = clipped(x.detach(), lower, upper)
        size = (weight.double() * near.abs()).sum(-1)
        origin, (*_, left) = _Inner.of(facets.each(Tensor.double))
        if all_seen(origin == 0):
            return moved_to(x, scaled_into(near, size, radius.squeeze(-1), weight > 0))
        left, own = left.squeeze(-1), origin.to(x.dtype)
        y = scaled_into(near - own, size - radius.squeeze(-1).double() + left, left, weight > 0)
        moved = clipped(own + y, lower, upper)
        outside = (size > radius.squeeze(-1)).unsqueeze(-1)
        return moved_to(x, torch.where(outside, moved, near))

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
    """{x : Σ w_i |x_i| ≤ t, l ≤ x ≤ u}.

    Args:
        radius: t ≥ 0, a number, a 0-d tensor or (B,); no less than Σ w|x| at the point of the box
            next to 0.
        weight: w, a number, (n,) or (B, n), None for ones. Only |w| matters; a coordinate whose
            weight is zero is bounded by the box alone.
        lower: l, a number, (n,) or (B, n), None for no bound; entries may be −∞.
        upper: u ≥ l, likewise; entries may be ∞.

    """

    radius: Value = field(default=1.0, metadata=number(least=0, grows=True))
    weight: Value | None = field(default=None, metadata=entries())
    lower: Value | None = field(
        default=-1.0, metadata=entries(optional=True, infinite=True, grows=True)
    )
    upper: Value | None = field(
        default=1.0, metadata=entries(optional=True, infinite=True, grows=True)
    )

    def facets(self, like: Tensor) -> Facets:
        weight = as_entries(1.0 if self.weight is None else self.weight, like)
        size = weight.abs() if weight.dim() else weight.abs().unsqueeze(-1)
        radius = as_column(self.radius, like)
        lower, upper = (as_entries(end, like) for end in ends_of(self.lower, self.upper))
        return Facets(lower, upper, size, radius)

    def normal_form(self, n: int) -> Sequence[Flat]:
        """All of it."""
        weight = 1.0 if self.weight is None else self.weight
        return (Flat(n, *ends_of(self.lower, self.upper), weight, total(self.radius)),)

    def check_values(self) -> Tensor | None:
        """A box that is not empty, and a radius that reaches it."""
        empty = Box().changed(lower=self.lower, upper=self.upper).check_values()
        if not self.bound and not any(t.dim() for t in self.tensors().values()):
            return empty  # for how many entries is not known yet
        sound = self if empty is None else self.replace_rows(empty != 0)
        lower, upper, weight, radius = _parts(sound.facets(sound.blank(1)).detach())
        nearest = clipped(torch.zeros_like(lower), lower, upper)
        least = (weight * nearest.abs()).expand(common_shape(*map(_shape, (weight, lower, upper))))
        radius, least = radius.squeeze(-1).double(), least.double().sum(-1)
        rounding = 4 * torch.finfo(weight.dtype).eps * least
        missed = fault(
            least - rounding > radius,
            Status.INFEASIBLE,
            lambda: (
                f"radius: expected numbers ≥ {float(least.amin()):g}, Σ w|x| at the point of the "
                f"box next to 0, found {float(radius.amin()):g}"
            ),
        )
        return merged(empty, missed)


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


def _shape(v: Tensor) -> tuple[int, ...]:
    return tuple(v.shape)
