"""Bounds on every coordinate, each of which may be absent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dfwlayer.constraints.base import measured
from dfwlayer.constraints.parameters import as_entries, entries, fault, merged
from dfwlayer.constraints.polyhedra.knapsack import clipped
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets, PolyhedralFace
from dfwlayer.constraints.polyhedra.polyhedral_set import PolyhedralSet
from dfwlayer.constraints.polyhedra.rows import out_of_reach
from dfwlayer.constraints.region import Flat
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.values import Value, are_numbers, tensor_of
from dfwlayer.solution import Status

__all__ = ["Box", "ends_of", "open_side"]


@dataclass(frozen=True)
class Box(PolyhedralSet):
    """{x : l ≤ x ≤ u}.

    Args:
        lower: l, a number, (n,) or (B, n), None for no bound; entries may be −∞.
        upper: u ≥ l, likewise; entries may be ∞. ``Box(lower=0.0)`` is x ≥ 0.

    """

    lower: Value | None = field(
        default=None, metadata=entries(harmless=0.0, infinite=True, grows=True)
    )
    upper: Value | None = field(
        default=None, metadata=entries(harmless=1.0, infinite=True, grows=True)
    )

    @property
    def ends(self) -> tuple[Value, Value]:
        """l and u, infinite for None."""
        return ends_of(self.lower, self.upper)

    def facets(self, like: Tensor) -> Facets:
        lower, upper = (as_entries(end, like) for end in self.ends)
        return Facets(lower, upper)

    def normal_form(self, n: int) -> Sequence[Flat]:
        """The bounds."""
        return (Flat(n, *self.ends),)

    def check_values(self) -> Tensor | None:
        """lower ≤ upper, and neither of them infinite on the wrong side."""
        low, high = self.ends
        if are_numbers(low, high) and low <= high and low < math.inf and high > -math.inf:
            return None
        beyond = out_of_reach("lower", low, math.inf), out_of_reach("upper", high, -math.inf)
        lower, upper = (torch.as_tensor(end).detach() for end in (low, high))
        room = upper - lower
        apart = fault(
            (room < 0).any(-1),
            Status.INFEASIBLE,
            lambda: (
                "lower: expected numbers below upper, found a bound that is "
                f"{-float(room.amin()):g} above the upper one"
            ),
        )
        return merged(*beyond, apart)

    def start(self, like: Tensor) -> Tensor:
        """The point next to zero."""
        return self.project(torch.zeros_like(like))

    def unbounded(self) -> Tensor | None:
        """The coordinates without a bound on one side at least."""
        return self._unbounded

    @measured
    def _unbounded(self) -> Tensor | None:
        lower, upper = (tensor_of(end).detach() for end in self.ends)
        mask = torch.isinf(lower) | torch.isinf(upper)
        return mask if bool(mask.any()) else None

    def open_ended(self, g: Tensor) -> Tensor | None:
        """Without a bound on the side of −g."""
        if self._unbounded is None:
            return None
        lower, upper, *_ = self.facets(g)
        return open_side(g, lower, upper)

    def vertex(self, g: Tensor) -> Tensor:
        """u where g < 0, l elsewhere."""
        lower, upper, *_ = self.facets(g)
        s = torch.where(g.detach() < 0, upper, lower)
        return s if self._unbounded is None else torch.where(torch.isinf(s.detach()), 0, s)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """l + (u − l) ∘ sigmoid((l − u) ∘ g / τ), the minimiser with the entropy of both sides.

        The vertex where there are not two of them.
        """
        lower, upper, *_ = self.facets(g)
        unbounded = self._unbounded
        if unbounded is not None:
            s = self.vertex(g)
            lower, upper = torch.where(unbounded, s, lower), torch.where(unbounded, s, upper)
        way = upper - lower
        finfo = torch.finfo(g.dtype)
        scores = (way * g).clamp(-finfo.max / 4, finfo.max / 4)
        # below the rounding of the scores soft and hard are the same
        floor = (scores.detach().abs().amax(-1, keepdim=True) * finfo.eps).clamp_min(finfo.tiny)
        return clipped(
            lower + way * torch.sigmoid(-scores / floor.clamp_min(temperature)), lower, upper
        )

    def retract(self, x: Tensor) -> Tensor:
        """The same as the projection."""
        return moved_to(x, self.project(x.detach()))

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """clip(z, l, u)."""
        lower, upper, *_ = self.facets(z).detach()
        return clipped(z, lower, upper)

    def nearest(self, z: Tensor) -> tuple[Tensor, PolyhedralFace]:
        """The projection, whose face is plain from it."""
        x = self.project(z)
        none = z[..., :0]
        return x, PolyhedralFace(self.facets, x, x == z, none, (), None, torch.sign(z - x))

    def stretched(self, factor: Tensor) -> Box:
        """The same with other bounds."""
        lower, upper = (as_entries(end, factor) for end in self.ends)
        return self.changed(lower=factor * lower, upper=factor * upper)

    def diameter(self, n: int) -> Tensor:
        """‖u − l‖."""
        lower, upper, *_ = self.facets(self.blank(n)).detach()
        size: Tensor = torch.linalg.vector_norm(upper - lower, dim=-1)
        return size


def ends_of(lower: Value | None, upper: Value | None) -> tuple[Value, Value]:
    """Bounds, infinite for None."""
    return -math.inf if lower is None else lower, math.inf if upper is None else upper


def open_side(g: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Mask (..., n) of the coordinates that have no bound on the side of −g, or none at all."""
    down, up = torch.isinf(lower), torch.isinf(upper)
    return (down & up) | (down & (g > 0)) | (up & (g < 0))
