"""What a method and the implicit gradient may ask of a set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeGuard, cast

import torch
from torch import Tensor

from dfwlayer.linalg.hull import Descent
from dfwlayer.linalg.scale import Scale

__all__ = [
    "Atoms",
    "Constraint",
    "Face",
    "RecordableConstraint",
    "constraint_is_direct",
    "constraint_is_shifted",
    "constraint_knows_hulls",
    "constraint_records",
    "constraint_steps",
    "rows_of_set",
    "scaled_set",
]


class Face(Protocol):
    """The set as it looks from a solution x: which directions are left, and how it bends.

    With h_1(x; w) ≤ t_1, …, h_m(x; w) ≤ t_m the active constraints beside the pinned
    coordinates, λ_j ≥ 0 their multipliers, a_j = ∇h_j and C = Σ λ_j ∇²h_j,
    nearby solutions differ from x by a d with d = 0 off the free coordinates (but for what pinned
    coordinates do by themselves) and ⟨a_j, d⟩ = 0 (but for the change of h_j and t_j). m is 1 for
    a norm ball, 0 for a box, 2 for a simplex that is also cut by a plane. Equations h_j = t_j are
    constraints that are always active, with multipliers of either sign.

    What is said of coordinates holds for other directions as well: a face that is not aligned
    with the axes has ``free`` None and its own ``restrict``.
    """

    @property
    def free(self) -> Tensor | None:
        """(B, n) mask of the coordinates that move with the solution, None if it has no mask."""

    def restrict(self, v: Tensor) -> Tensor:
        """Projection of v (B, n) onto the directions that are not pinned: v where free, else 0."""

    @property
    def bends(self) -> bool:
        """Whether C can be other than zero."""

    @property
    def normals(self) -> tuple[Tensor, ...]:
        """a_1 … a_m, each (B, n), restricted, and zero in rows where h_j is not active."""

    def curvature(self, v: Tensor) -> Tensor:
        """C v: (B, n) -> (B, n), for v in the tangent space."""

    def curvature_diagonal(self) -> Tensor | None:
        """C as a diagonal (B, n), None where it is more than that on the tangent space."""

    def force(self) -> Tensor:
        """Σ λ_j ∇h_j(x; w) (B, n), x and λ constant, differentiable in the set's parameters."""

    def excess(self) -> Tensor:
        """h_j(x; w) − t_j (B, m), x constant, differentiable in the set's parameters."""

    def pinned(self) -> Tensor:
        """x (B, n) in the pinned directions as a function of the parameters; 0 in free ones."""


class Atoms(Protocol):
    """The vertices of a polytope, for methods that keep x as a convex combination of them."""

    def scores(self, g: Tensor) -> Tensor:
        """⟨g, vertex⟩ for every vertex: (B, n) -> (B, m)."""

    def combine(self, weights: Tensor) -> Tensor:
        """Σ weight · vertex: (B, m) -> (B, n)."""

    def weights(self, x: Tensor, g: Tensor) -> Tensor:
        """Convex weights (B, m) of few vertices that give x, ready for a step against g."""


class Constraint(Protocol):
    """A convex set, one per problem; vectors are rows (B, n), or (n,) for a single problem.

    Some coordinates may be unbounded (those of zero weight); the set leaves them alone, and
    methods move them along the gradient.
    """

    def batch_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Batch size of every parameter that has a batch dimension, by name.

        ``shape`` is that of one problem's variable.
        """

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """The set over flattened variables of that shape, its parameters as tensors."""

    def float32(self) -> Constraint:
        """The same set with half-precision parameters in float32."""

    def verified(self) -> tuple[Constraint, Tensor | None]:
        """Raise ValueError for values no set can have; what is wrong with single problems.

        That is a status (B,), 0 for problems that can be solved, or a mask (B,) of those with NaN
        or infinity, or None. See `dfwlayer.constraints.parameters.fault`.
        """

    def replace_rows(self, bad: Tensor) -> Constraint:
        """The set with harmless constants in place of the problems that are flagged."""

    def start(self, like: Tensor) -> Tensor:
        """A point of the set for every row of ``like`` (B, n)."""

    def unbounded(self) -> Tensor | None:
        """Mask (n,) or (B, n) of the coordinates the set does not bound, None if there are none."""

    def vertex(self, g: Tensor) -> Tensor:
        """A minimiser of ⟨g, s⟩ over the set, zero along unbounded coordinates."""

    def lowest(self, g: Tensor) -> Tensor:
        """min ⟨g, s⟩ over the set, leaving unbounded coordinates aside: (..., n) -> (...)."""

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """A point of the set that depends smoothly on g and tends to the vertex as τ → 0."""

    def atoms(self) -> Atoms | None:
        """The vertices where they are few, None otherwise."""

    def violation(self, x: Tensor) -> Tensor:
        """How far x is outside, in the units of the radius; 0 inside: (B, n) -> (B,)."""

    def retract(self, x: Tensor) -> Tensor:
        """A point of the set next to x, and x itself where x is inside."""

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """The point of the set nearest to z: (..., n) -> (..., n).

        ``near`` is a point whose face may be that of the result, for sets that can use a guess.
        """

    def diameter(self, n: int) -> Tensor:
        """Largest Euclidean distance of two points in n dimensions, () or (B,), or infinity."""

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> Face:
        """The local face at x, given ∇f(x) = g.

        Without ``scale`` it is the face x lies on to rounding. With the scale of f at x it is the
        face on which the solution next to x is expected, as `dfwlayer.linalg.scale` tells it.
        """


class DirectConstraint(Constraint, Protocol):
    """A set for which a diagonal Hessian leaves a projection, nothing more."""

    def nearest(self, z: Tensor) -> tuple[Tensor, Face]:
        """The point of the set nearest to z (..., n), feasible to rounding, and its face."""

    def stretched(self, factor: Tensor) -> Constraint:
        """{factor ∘ x : x in the set} for a positive factor (n,) or (B, n)."""


class PartConstraint(Constraint, Protocol):
    """A set whose problems can be taken apart."""

    def rows(self, index: Tensor) -> Constraint | None:
        """The sets of the problems at these positions, None where that cannot be."""


class ScalableConstraint(Constraint, Protocol):
    """A set of any size."""

    def scaled(self, factor: Tensor) -> Constraint | None:
        """{factor · x : x in the set} for a factor () or (B,) > 0, None where that cannot be."""


class SteppingConstraint(Constraint, Protocol):
    """A set with a kernel for a projected step on a GPU."""

    def step(self, x: Tensor, gradient: Tensor, curvature: Tensor) -> Tensor | None:
        """The projection of x − gradient/curvature, None where there is no kernel for it."""


class ShiftedConstraint(Constraint, Protocol):
    """{x : x − c ∈ S}, a set that is another one around a centre; `solve` looks for x − c."""

    def centred(self) -> tuple[Constraint, Tensor]:
        """S, and c (n,) or (B, n)."""

    def placed(self, y: Tensor) -> Tensor:
        """The x = c + y of the set for a y of S, both (..., n)."""


class HullConstraint(Constraint, Protocol):
    """A set that knows a face only from points of it."""

    def face_of_hull(self, found: Descent) -> Face:
        """The face at the point that was found as a combination of others."""


class RecordableFace(Face, Protocol):
    """A face that a CUDA graph can find."""

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors it consists of beside x and the set's parameters."""


class RecordableConstraint(Constraint, Protocol):
    """A set, a dataclass, whose operations may be recorded in a CUDA graph.

    None of them may make the host wait, or only through `dfwlayer.linalg.rows.any_row`.
    """

    @property
    def recordable(self) -> bool:
        """Whether that is so for these parameters."""

    def suspect(self) -> Tensor:
        """Whether ``verified`` should have a closer look, or a coordinate is unbounded: ()."""

    def assume_bounded(self) -> Self:
        """The set, known to bound every coordinate."""

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> RecordableFace:
        """See `Constraint`."""

    def face_of(self, x: Tensor, parts: Sequence[Tensor]) -> RecordableFace:
        """The face at x that consists of these parts."""


def constraint_is_direct(constraint: Constraint) -> TypeGuard[DirectConstraint]:
    """Whether a set offers more than ``project`` for diagonal Hessians."""
    return hasattr(constraint, "nearest")


def constraint_is_shifted(constraint: Constraint) -> TypeGuard[ShiftedConstraint]:
    """Whether a set is another one around a centre."""
    return hasattr(constraint, "centred")


def constraint_knows_hulls(constraint: Constraint) -> TypeGuard[HullConstraint]:
    """Whether a set tells a face from points of it."""
    return hasattr(constraint, "face_of_hull")


def constraint_records(constraint: Constraint) -> TypeGuard[RecordableConstraint]:
    """Whether a set can be part of a CUDA graph."""
    return getattr(constraint, "recordable", False)


def rows_of_set(constraint: Constraint, index: Tensor) -> Constraint | None:
    """The sets of the problems at these positions, None where they cannot be taken apart."""
    part = cast("PartConstraint", constraint)
    return part.rows(index) if hasattr(constraint, "rows") else None


def scaled_set(constraint: Constraint, factor: Tensor) -> Constraint | None:
    """{factor · x : x in the set}, None for a set that comes in one size."""
    part = cast("ScalableConstraint", constraint)
    return part.scaled(factor) if hasattr(constraint, "scaled") else None


def constraint_steps(constraint: Constraint) -> TypeGuard[SteppingConstraint]:
    """Whether a set may have a kernel for projected steps."""
    return hasattr(constraint, "step")
