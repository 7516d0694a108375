"""Sets with or without a centre, asked for points as they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.tensors import filled, tensors_in

__all__ = ["Seen"]

# units of rounding that an entry of x − c is zero to: of those of x and c, and of the largest one
OWN, LARGEST = 1024.0, 4.0


class Seen(NamedTuple):
    """A bound set {x : x − c ∈ S}, c (n,) or (B, n), asked for points x."""

    inner: Constraint  # S
    centre: Tensor | None  # c

    @classmethod
    def of(cls, part: Constraint) -> Seen:
        """Of a bound set, around its centre if it has one."""
        centre: Tensor | None = None
        while (found := part.centred()) is not None:
            part, own = found
            centre = own if centre is None else centre + own
        return cls(part, centre)

    @classmethod
    def wide(cls, part: Constraint) -> Seen:
        """Of a bound set with tensors in double precision, as constants."""
        tensors = tensors_in(part, sparse=False)
        wide = (t.detach().double() if t.is_floating_point() else t for t in tensors)
        return cls.of(filled(part, wide))

    def some(self, index: Tensor) -> Seen | None:
        """The sets of the problems at these positions, None where that cannot be."""
        inner = self.inner.rows(index)
        shared = self.centre is None or self.centre.dim() < 2 or len(self.centre) == 1
        centre = self.centre if shared or self.centre is None else self.centre[index]
        return None if inner is None else Seen(inner, centre)

    def inside(self, x: Tensor) -> Tensor:
        """x − c."""
        return x if self.centre is None else x - self.centre

    def outside(self, y: Tensor) -> Tensor:
        """c + y."""
        return y if self.centre is None else y + self.centre

    def project(self, z: Tensor) -> Tensor:
        """The point nearest to z."""
        return self.outside(self.inner.project(self.inside(z)))

    def retract(self, x: Tensor) -> Tensor:
        """A point next to x."""
        return self.outside(self.inner.retract(self.inside(x)))

    def vertex(self, g: Tensor) -> Tensor:
        """The minimiser of ⟨g, s⟩."""
        return self.outside(self.inner.vertex(g))

    def lowest(self, g: Tensor) -> Tensor:
        """min ⟨g, s⟩, −∞ where the set is open in a direction in which that falls."""
        low = self.inner.lowest(g)
        endless = self.inner.open_ended(g)
        if endless is not None:
            low = torch.where((endless & (g != 0)).any(-1), -torch.inf, low)
        return low if self.centre is None else low + (g * self.centre).sum(-1)

    def is_bounded(self, n: int) -> bool:
        """Whether every linear function has a least value on the set."""
        return bool(torch.isfinite(self.inner.diameter(n)).all())

    def violation(self, x: Tensor) -> Tensor:
        """How far x is outside."""
        return self.inner.violation(self.inside(x))

    def face(self, x: Tensor, g: Tensor, scale: Scale | None) -> Face:
        """That of S at x − c; what rounding has left of a zero there is one: faces depend on it."""
        at = self.inside(x)
        if self.centre is not None:
            size = torch.finfo(x.dtype).eps * torch.maximum(x.abs(), self.centre.abs())
            blur = torch.minimum(OWN * size, LARGEST * size.amax(-1, keepdim=True))
            at = torch.where(at.abs() <= blur, 0, at)
        return self.inner.face(at, g, scale)
