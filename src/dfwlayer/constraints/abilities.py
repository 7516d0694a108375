"""What some sets can do beside: answers of a set that are objects of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from dfwlayer.constraints.face import Face

if TYPE_CHECKING:
    from dfwlayer.constraints.base import Constraint

__all__ = ["Atoms", "Recordable"]


class Atoms(Protocol):
    """The vertices of a polytope, for methods that keep x as a convex combination of them."""

    def scores(self, g: Tensor) -> Tensor:
        """⟨g, vertex⟩ for every vertex: (B, n) -> (B, m)."""

    def combine(self, weights: Tensor) -> Tensor:
        """Σ weight · vertex: (B, m) -> (B, n)."""

    def weights(self, x: Tensor, g: Tensor) -> Tensor:
        """Convex weights (B, m) of few vertices that give x, ready for a step against g."""


class Recordable(Protocol):
    """A set whose operations may be recorded in a CUDA graph.

    None of them makes the host wait, or only through `dfwlayer.ops.rows.any_row`.
    """

    def suspect(self) -> Tensor:
        """Whether ``verified`` should look closer, or the set is unbounded: ()."""

    def assume_bounded(self) -> Constraint:
        """The set, known to bound every coordinate."""

    def face_parts(self, face: Face) -> tuple[Tensor, ...]:
        """The tensors of a face of it beside x and the set's parameters."""

    def face_of(self, x: Tensor, parts: Sequence[Tensor]) -> Face:
        """The face at x that consists of these parts."""
