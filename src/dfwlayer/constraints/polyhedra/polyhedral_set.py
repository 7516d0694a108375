"""What sets with bounds and a few linear constraints have in common."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.plain import Plain, PlainFlat
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets, PolyhedralFace, polyhedral_face
from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron
from dfwlayer.constraints.region import Flat, Region
from dfwlayer.ops.rows import common_shape, or_one
from dfwlayer.ops.scale import Scale

__all__ = ["PolyhedralSet", "soften"]

FAR = 1e7  # times the size of the set, where a projection differs little from a vertex


class PolyhedralSet(Constraint):
    """Violation and face of a set, from its facets.

    A set adds how points are moved into it and what its vertices are.
    """

    @abstractmethod
    def facets(self, like: Tensor) -> Facets:
        """The parameters as what they mean, for vectors like this one (..., n)."""

    def violation(self, x: Tensor) -> Tensor:
        """The largest amount by which a constraint is missed."""
        lower, upper, weight, radius, equations = self.facets(x).each(_constant)
        y = x.double()
        most = torch.maximum(lower - y, y - upper).amax(-1)
        if weight is not None and radius is not None:
            most = torch.maximum(most, (weight * y.abs()).sum(-1) - radius.squeeze(-1))
        for a, b in equations:
            most = torch.maximum(most, ((a * y).sum(-1) - b.squeeze(-1)).abs())
        return most.clamp_min(0).to(x.dtype)

    def plain(self, *, fixed: bool = True) -> Plain | None:
        """From the normal form."""
        form = self.normal_form(0)
        return PlainFlat.of(form[0]) if form and isinstance(form[0], Flat) else None

    def region(self, like: Tensor) -> Region:
        """The facets."""
        lower, upper, weight, radius, equations = self.facets(like)
        budgets = [] if weight is None or radius is None else [(weight, radius)]
        return Region.of(like, lower, upper, budgets, equations)

    def as_polyhedron(self, like: Tensor) -> Polyhedron | None:
        """The bounds and equations, where there is nothing else."""
        lower, upper, weight, _, equations = self.facets(like)
        if weight is not None:
            return None
        n, lead = like.shape[-1], common_shape(*(a.shape[:-1] for e in equations for a in e))
        wide = [(a.expand(*lead, n), b.expand(*lead, 1)) for a, b in equations]
        A = torch.stack([a for a, _ in wide], -2) if wide else None
        b = torch.cat([b for _, b in wide], -1) if wide else None
        bounds = (part.expand(*part.shape[:-1], n) for part in (lower, upper))
        return Polyhedron(None, None, A, b, *bounds).as_bound()

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> PolyhedralFace:
        """See `dfwlayer.constraints.polyhedra.polyhedral_face.polyhedral_face`."""
        return polyhedral_face(self.facets, x, g, scale)


def soften(g: Tensor, temperature: float, reach: Tensor) -> Tensor:
    """The point whose projection minimises ⟨g, s⟩ + τ/2 ‖s/r‖² over a set of size r, in double.

    It is −g r²/τ, brought back where that is needlessly far out.
    """
    g, reach = g.double(), reach.double()
    steepest = g.detach().abs().amax(-1, keepdim=True)
    floor = or_one(steepest * reach.detach() / FAR)
    return -g * (reach / floor.clamp_min(temperature)) * reach


def _constant(value: Tensor) -> Tensor:
    return value.detach().double()
