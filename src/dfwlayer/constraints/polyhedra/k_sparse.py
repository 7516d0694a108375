"""The k-sparse polytope, an ℓ1 and an ℓ∞ ball at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dfwlayer.constraints.parameters import as_column, number
from dfwlayer.constraints.polyhedra.l1_box import L1BoxSet
from dfwlayer.constraints.polyhedra.polyhedral_face import Facets
from dfwlayer.constraints.region import Flat
from dfwlayer.ops.values import Value, multiplied, on_tensor, total

__all__ = ["KSparse"]


@dataclass(frozen=True)
class KSparse(L1BoxSet):
    """{x : ‖x‖₁ ≤ k·t, ‖x‖∞ ≤ t}, for an integer k the hull of the vectors with k entries ±t.

    Args:
        k: Any number ≥ 1, a 0-d tensor or (B,).
        radius: t ≥ 0, likewise.

    """

    k: Value = field(metadata=number(least=1, hint="below 1 it is LpBall(1, k * radius)"))
    radius: Value = field(default=1.0, metadata=number(least=0, grows=True))

    def facets(self, like: Tensor) -> Facets:
        radius = as_column(self.radius, like)
        return Facets(-radius, radius, torch.ones_like(radius), as_column(self.k, like) * radius)

    def normal_form(self, n: int) -> Sequence[Flat]:
        """A cube and a budget; none for a k below 1."""
        k = on_tensor(self.k, lambda k: torch.where(k.detach() >= 1, k, torch.nan))
        reach = total(self.radius)
        return (Flat(n, -reach, reach, 1.0, multiplied(total(k), reach)),)

    def form_in_sight(self, n: int) -> Sequence[Flat]:
        """The same, with a product that transforms of a traced function know."""
        reach = total(self.radius)
        return (Flat(n, -reach, reach, 1.0, total(self.k) * reach),)
