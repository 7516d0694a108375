"""What sets with bounds and a few linear constraints have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dfwlayer.constraints import parameters
from dfwlayer.constraints.base import Atoms
from dfwlayer.constraints.parameters import Kinds
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets, PolyhedralFace, polyhedral_face
from dfwlayer.linalg.scale import Scale

__all__ = ["PolyhedralSet", "soften"]

FAR = 1e7  # times the size of the set, where a projection differs little from a vertex


@dataclass(frozen=True)
class PolyhedralSet(ABC):
    """Parameters, violation and face of a set, from its facets.

    A set adds how points are moved into it and what its vertices are.
    """

    kinds: ClassVar[Kinds]
    harmless: ClassVar[Mapping[str, float]]  # parameters of a set that is like any other
    infinite: ClassVar[frozenset[str]] = frozenset()  # parameters that may be
    lengths: ClassVar[frozenset[str]]  # parameters that grow with the set

    @abstractmethod
    def facets(self, like: Tensor) -> Facets:
        """The parameters as what they mean, for vectors like this one (..., n)."""

    def __post_init__(self) -> None:
        parameters.check(self, self.kinds, self.infinite)
        if parameters.plain(self, self.kinds):
            self.check_values()

    def batch_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """See `Constraint`."""
        return parameters.batch_sizes(self, self.kinds, shape)

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        """See `Constraint`."""
        return parameters.bind(self, self.kinds, shape, dtype, device)

    def float32(self) -> Self:
        """See `Constraint`."""
        return parameters.float32(self, self.kinds)

    def verified(self) -> tuple[Self, Tensor | None]:
        """Finite parameters that leave the set a point, per problem."""
        bad = parameters.flagged(self, self.kinds, self.infinite)
        return self, parameters.merged(bad, self.check_values())

    @abstractmethod
    def check_values(self) -> Tensor | None:
        """Statuses (B,) of the problems whose set is empty or has no meaning, None if none is.

        A ValueError where that is so for what all problems share. What is not finite is reported
        by others and may get any answer here.
        """

    def replace_rows(self, bad: Tensor) -> Self:
        """See `Constraint`."""
        return parameters.replace_rows(self, self.kinds, bad, self.harmless)

    def rows(self, index: Tensor) -> Self:
        """The sets of the problems at these positions."""
        return parameters.part(self, self.kinds, index)

    def scaled(self, factor: Tensor) -> Self:
        """{factor · x : x in the set}, for a factor () or (B,) > 0."""
        return parameters.stretch(self, self.kinds, self.lengths, factor)

    def unbounded(self) -> Tensor | None:
        """Every coordinate is bounded."""
        return None

    def atoms(self) -> Atoms | None:
        """There are too many vertices."""
        return None

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

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> PolyhedralFace:
        """See `dfwlayer.constraints.polyhedra.polyhedral_face.polyhedral_face`."""
        return polyhedral_face(self.facets, x, g, scale)


def soften(g: Tensor, temperature: float, reach: Tensor) -> Tensor:
    """The point whose projection minimises ⟨g, s⟩ + τ/2 ‖s/r‖² over a set of size r, in double.

    It is −g r²/τ, brought back where that is needlessly far out.
    """
    g, reach = g.double(), reach.double()
    steepest = g.detach().abs().amax(-1, keepdim=True)
    floor = steepest * reach.detach() / FAR
    floor = torch.where(floor > 0, floor, 1)
    return -g * (reach / floor.clamp_min(temperature)) * reach


def _constant(value: Tensor) -> Tensor:
    return value.detach().double()
