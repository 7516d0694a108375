"""The local face of an intersection: those of its members at one point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dfwlayer.constraints.composed.contact import across
from dfwlayer.constraints.composed.seen import Seen
from dfwlayer.constraints.face import Face
from dfwlayer.constraints.polyhedra.linear_face import saddle_system
from dfwlayer.ops.matrices import times
from dfwlayer.ops.rows import column

if TYPE_CHECKING:
    from dfwlayer.linalg.face_system import FaceSystem
    from dfwlayer.objectives.base import Objective

__all__ = ["StackedFace"]


@dataclass(frozen=True)
class StackedFace(Face):
    """The faces of several sets at one point; see `dfwlayer.constraints.Face`.

    Directions that a face pins which are not coordinates, as those of a ball of matrices, are
    further normals of it.
    """

    sets: tuple[Seen, ...]
    faces: tuple[Face, ...]
    bases: tuple[Tensor | None, ...]  # (..., r, n), of what faces without a mask pin
    origin: Tensor  # the point the faces were found at
    x: Tensor
    multiplier: Tensor  # (..., m), of all faces

    @classmethod
    def of(
        cls, sets: tuple[Seen, ...], faces: Sequence[Face], forces: Sequence[Tensor], x: Tensor
    ) -> StackedFace:
        """Of faces and the forces (..., n) of their sets."""
        lead = x.shape[:-1]
        each, bases = [], []
        for face, force in zip(faces, forces, strict=True):
            each.append(column(face.multiplier, x).expand(*lead, len(face.normals)))
            basis = across(face)
            bases.append(basis)
            if basis is not None:
                each.append((basis @ force.unsqueeze(-1)).squeeze(-1))
        return cls(sets, tuple(faces), tuple(bases), x, x, torch.cat(each, -1))

    @property
    def aligned(self) -> bool:
        """Whether all faces are aligned with the axes."""
        return all(basis is None for basis in self.bases)

    @property
    def mask(self) -> Tensor:
        """The coordinates that no set pins."""
        blank = torch.ones_like(self.x, dtype=torch.bool)
        masks = [face.free for face in self.faces if face.free is not None]
        return reduce(torch.logical_and, masks, blank)

    @property
    def free(self) -> Tensor | None:
        """The same, None where a face is not aligned with the axes."""
        return self.mask if self.aligned else None

    def restrict(self, v: Tensor) -> Tensor:
        """v where no set pins it."""
        return v * self.mask

    @property
    def normals(self) -> tuple[Tensor, ...]:
        """Those of all faces, on what is free."""
        found: list[Tensor] = []
        for face, basis in zip(self.faces, self.bases, strict=True):
            found += face.normals
            found += () if basis is None else basis.unbind(-2)
        return tuple(self.restrict(normal) for normal in found)

    @property
    def bends(self) -> bool:
        return any(face.bends for face in self.faces)

    def curvature(self, v: Tensor) -> Tensor:
        """The sum."""
        bent = [face.curvature(v) for face in self.faces if face.bends]
        return sum(bent, torch.zeros_like(v))

    def curvature_diagonal(self) -> Tensor | None:
        """The sum, None where one is none."""
        each = [face.curvature_diagonal() for face in self.faces if face.bends]
        whole = [diagonal for diagonal in each if diagonal is not None]
        return sum(whole, torch.zeros_like(self.x)) if len(whole) == len(each) else None

    def force(self) -> Tensor:
        """The sum."""
        out = torch.zeros_like(self.x)
        for part, face, basis, own in self._each(self.x):
            out = out + face.force()
            if basis is not None:
                held = own[..., len(face.normals) :]
                out = out + (held.unsqueeze(-2) @ basis).squeeze(-2)
                out = out + face.curvature(_drift(part, self.x))
        return out

    def excess(self) -> Tensor:
        """Of all faces, in the order of the normals; what one set pins the others see move."""
        x = torch.where(self.mask, self.x, self.pinned())
        found = []
        for part, face, basis, _ in self._each(x):
            if basis is None:
                found.append(face.excess())
                continue
            if face.normals:
                slopes = torch.stack(face.normals, -2)
                found.append(face.excess() + times(slopes, _drift(part, x)))
            found.append(times(basis, part.inside(x) - face.pinned()))
        return torch.cat(found, -1)

    def pinned(self) -> Tensor:
        """Of the first set that pins a coordinate."""
        out, left = torch.zeros_like(self.x), torch.ones_like(self.x, dtype=torch.bool)
        for part, face, basis, _ in self._each(self.x):
            if basis is None and face.free is not None:
                out = torch.where(left & ~face.free, part.outside(face.pinned()), out)
                left = left & face.free
        return out

    def system(self, objective: Objective) -> FaceSystem | None:
        """By one factorisation."""
        return saddle_system(objective, self, self.mask)

    def _each(self, x: Tensor) -> Any:
        """The faces with another x and the multipliers of this one."""
        counts = [
            len(face.normals) + (0 if basis is None else basis.shape[-2])
            for face, basis in zip(self.faces, self.bases, strict=True)
        ]
        each = torch.split(self.multiplier, counts, -1)
        for part, face, basis, own in zip(self.sets, self.faces, self.bases, each, strict=True):
            known = x is self.origin and part.centre is None
            if basis is None and not known:
                moved: Any = face
                yield part, replace(moved, x=part.inside(x), multiplier=own), basis, own
            else:
                yield part, face, basis, own


def _drift(part: Seen, x: Tensor) -> Tensor:
    """Zero, with the derivative of x − c in x and in the centre c."""
    at = part.inside(x)
    return at - at.detach()
