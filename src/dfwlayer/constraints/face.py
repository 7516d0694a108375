"""The local face of a set, and what holds for one unless it says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dfwlayer.ops.rows import Scalar

if TYPE_CHECKING:
    from dfwlayer.linalg.face_system import FaceSystem
    from dfwlayer.objectives.base import Objective

__all__ = ["Face"]

if TYPE_CHECKING:
    preset = property
else:

    class preset:  # noqa: N801
        """A property that a dataclass may also have as a field.

        A field takes its default from the class; seen from there this one does not exist.
        """

        def __init__(self, find: Callable[[Any], Any]) -> None:
            self.find, self.__doc__ = find, find.__doc__

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                raise AttributeError
            return self.find(instance)


class Face:
    """The set as it looks from a solution x: which directions are left, and how it bends.

    With h_1(x; w) ≤ t_1, …, h_m(x; w) ≤ t_m the active constraints beside the pinned
    coordinates, λ_j ≥ 0 their multipliers, a_j = ∇h_j and C = Σ λ_j ∇²h_j,
    nearby solutions differ from x by a d with d = 0 off the free coordinates (but for what pinned
    coordinates do by themselves) and ⟨a_j, d⟩ = 0 (but for the change of h_j and t_j). m is 1 for
    a norm ball, 0 for a box, 2 for a simplex that is also cut by a plane. Equations h_j = t_j are
    constraints that are always active, with multipliers of either sign.

    What is said of coordinates holds for other directions as well: a face that is not aligned
    with the axes has ``free`` None and its own ``restrict``.

    A face is a frozen dataclass. It has a field ``x``, and writes of the rest what is different
    from a flat face without normals and without parameters.
    """

    x: Tensor  # (..., n), where it was found

    @preset
    def free(self) -> Tensor | None:
        """(B, n) mask of the coordinates that move with the solution, None if it has no mask."""
        return None

    @preset
    def normals(self) -> tuple[Tensor, ...]:
        """a_1 … a_m, each (B, n), restricted, and zero in rows where h_j is not active."""
        return ()

    @preset
    def multiplier(self) -> Scalar:
        """λ_1 … λ_m (B, m), or a number if m = 1 and there is one problem."""
        return self.x[..., :0]

    @property
    def bends(self) -> bool:
        """Whether C can be other than zero."""
        return False

    def system(self, objective: Objective) -> FaceSystem | None:
        """A way of its own to solve the linear system on it, None for that of all faces."""
        return None

    def restrict(self, v: Tensor) -> Tensor:
        """Projection of v (B, n) onto the directions that are not pinned: v where free, else 0."""
        return v if self.free is None else v * self.free

    def curvature(self, v: Tensor) -> Tensor:
        """C v: (B, n) -> (B, n), for v in the tangent space."""
        return torch.zeros_like(v)

    def curvature_diagonal(self) -> Tensor | None:
        """C as a diagonal (B, n), None where it is more than that on the tangent space."""
        return None if self.bends else torch.zeros_like(self.x)

    def bent(self, u: Tensor) -> Tensor:
        """u (B, n) of the tangent space, with what x + u needs beside it to stay on the face.

        That is of second order in u, and only asked for where projecting x + u onto the set would
        leave the face, as it does where a face is the matrices of one rank.
        """
        return u

    def force(self) -> Tensor:
        """Σ λ_j ∇h_j(x; w) (B, n), x and λ constant, differentiable in the set's parameters."""
        return torch.zeros_like(self.x)

    def excess(self) -> Tensor:
        """h_j(x; w) − t_j (B, m), x constant, differentiable in the set's parameters."""
        return self.x[..., :0]

    def pinned(self) -> Tensor:
        """x (B, n) in the pinned directions as a function of the parameters; 0 in free ones."""
        return torch.zeros_like(self.x)
