"""Bounds on every coordinate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dfwlayer.constraints.base import measured
from dfwlayer.constraints.parameters import Value, as_entries, entries, fault, merged, tensor_of
from dfwlayer.constraints.polyhedra.knapsack import clipped
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets, PolyhedralFace
from dfwlayer.constraints.polyhedra.polyhedral_set import PolyhedralSet
from dfwlayer.constraints.region import Flat
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.rows import on_host
from dfwlayer.solution import Status

__all__ = ["Box"]


@dataclass(frozen=True)
class Box(PolyhedralSet):
    """{x : l ≤ x ≤ u}.

    Args:
        lower: l, a number, (n,) or (B, n).
        upper: u ≥ l, likewise. A coordinate may have no bounds, −∞ and ∞, but not only one.

    """

    lower: Value = field(default=0.0, metadata=entries(infinite=True, grows=True))
    upper: Value = field(default=1.0, metadata=entries(infinite=True, grows=True))

    def facets(self, like: Tensor) -> Facets:
        return Facets(as_entries(self.lower, like), as_entries(self.upper, like))

    def normal_form(self, n: int) -> Sequence[Flat]:
        """The bounds."""
        return (Flat(n, self.lower, self.upper),)

    def is_plain(self, like: Tensor) -> bool:
        """And no bound without the other, as far as one can tell without waiting for a GPU."""
        if not super().is_plain(like):
            return False
        return on_host(like, self.closed) is not False

    def closed(self) -> bool:
        """Whether no coordinate has a bound without the other."""
        if self._numbers():
            return True  # looked at when they were given
        ends = (torch.as_tensor(end).isinf() for end in (self.lower, self.upper))
        return not bool(torch.ne(*ends).any())

    def _numbers(self) -> bool:
        """Whether the bounds are numbers that may be bounds."""
        low, high = self.lower, self.upper
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return False
        ordered = low <= high and low < math.inf and high > -math.inf
        return ordered and math.isinf(low) == math.isinf(high)

    def check_values(self) -> Tensor | None:
        """lower ≤ upper, and no bound without the other."""
        if self._numbers():
            return None
        lower, upper = (torch.as_tensor(v).detach() for v in (self.lower, self.upper))
        room = upper - lower
        empty = fault(
            (~(room >= 0)).any(-1),  # −∞ − (−∞) and ∞ − ∞ are NaN
            Status.INFEASIBLE,
            lambda: (
                "lower: expected numbers below upper, found a bound that is "
                f"{-float(room.amin()):g} above the upper one"
            ),
        )
        alone = fault(
            (torch.isinf(lower) != torch.isinf(upper)).any(-1),
            Status.INVALID,
            lambda: (
                "lower, upper: expected both finite, or −inf and inf for a coordinate without "
                "bounds, found one without the other; put a large number in place of infinity"
            ),
        )
        return merged(empty, alone)

    def start(self, like: Tensor) -> Tensor:
        """The point next to zero."""
        return self.project(torch.zeros_like(like))

    def unbounded(self) -> Tensor | None:
        """The coordinates without bounds."""
        return self._unbounded

    @measured
    def _unbounded(self) -> Tensor | None:
        mask = torch.isinf(tensor_of(self.lower).detach())
        return mask if bool(mask.any()) else None

    def vertex(self, g: Tensor) -> Tensor:
        """u where g < 0, l elsewhere."""
        lower, upper = self._finite(g)
        return torch.where(g.detach() < 0, upper, lower)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """l + (u − l) ∘ sigmoid((l − u) ∘ g / τ), the minimiser with the entropy of both sides."""
        lower, upper = self._finite(g)
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
        return self.changed(lower=factor * self.lower, upper=factor * self.upper)

    def diameter(self, n: int) -> Tensor:
        """‖u − l‖."""
        lower, upper, *_ = self.facets(self.blank(n)).detach()
        size: Tensor = torch.linalg.vector_norm(upper - lower, dim=-1)
        return size

    def _finite(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """The bounds, 0 where there are none."""
        lower, upper, *_ = self.facets(g)
        unbounded = self._unbounded
        if unbounded is None:
            return lower, upper
        return torch.where(unbounded, 0, lower), torch.where(unbounded, 0, upper)
