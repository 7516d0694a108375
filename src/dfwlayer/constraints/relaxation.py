"""A larger set, for a bound on what f may fall to where a set has no bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:  # which is defined with the help of this
    from dfwlayer.constraints.base import Constraint

__all__ = ["Relaxation"]


class Relaxation(NamedTuple):
    """A set S, and planes ⟨a_j, x⟩ = b_j: the points of another set are in all of them."""

    constraint: Constraint  # S
    normals: tuple[Tensor, ...]  # a_j (..., n)
    multiplier: Tensor  # (..., m), next to those of the planes at the solution
    excess: Tensor  # (..., m), ⟨a_j, x⟩ − b_j at a point of the set, which is rounding
