"""The k-sparse polytope, an ℓ1 and an ℓ∞ ball at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dfwlayer.constraints.parameters import (
    Kind,
    Kinds,
    Value,
    check_not_negative,
    columns,
    fault,
    merged,
)
from dfwlayer.constraints.polyhedra.l1_box import L1BoxSet
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets
from dfwlayer.solution import Status

__all__ = ["KSparse"]


@dataclass(frozen=True)
class KSparse(L1BoxSet):
    """{x : ‖x‖₁ ≤ k·t, ‖x‖∞ ≤ t}, for an integer k the hull of the vectors with k entries ±t.

    Args:
        k: Any number ≥ 1, a 0-d tensor or (B,).
        radius: t ≥ 0, likewise.

    """

    k: Value
    radius: Value = 1.0

    kinds: ClassVar[Kinds] = {"k": Kind.NUMBER, "radius": Kind.NUMBER}
    harmless: ClassVar[Mapping[str, float]] = {"k": 1.0, "radius": 1.0}
    lengths: ClassVar[frozenset[str]] = frozenset(("radius",))

    def facets(self, like: Tensor) -> Facets:
        """See `PolyhedralSet`."""
        radius = columns(self.radius, like)
        return Facets(-radius, radius, torch.ones_like(radius), columns(self.k, like) * radius)

    def check_values(self) -> Tensor | None:
        """k ≥ 1 and radius ≥ 0."""
        k = torch.as_tensor(self.k).detach()
        few = fault(
            k < 1,
            Status.INVALID,
            lambda: (
                f"k: expected numbers ≥ 1, found {float(k):g}; below 1 it is LpBall(1, k * radius)"
            ),
        )
        return merged(check_not_negative("radius", self.radius), few)
