"""A set around another centre: {x : x − c ∈ S}."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dfwlayer.constraints.base import Around, Constraint, Face
from dfwlayer.constraints.composed.built import Built
from dfwlayer.constraints.parameters import as_entries, entries
from dfwlayer.constraints.plain import Plain, PlainShifted
from dfwlayer.constraints.region import Block, form_around
from dfwlayer.ops.rows import dot
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.values import tensor_of

__all__ = ["Shifted", "round_towards"]


@dataclass(frozen=True)
class Shifted(Built):
    """{x : x − c ∈ S} for a set S and a centre c; ``LpBall(..., centre=c)`` makes one too.

    `solve` works with y = x − c and S, where nothing is lost to the size of c, and the result
    x = c + y carries the gradient in c.

    Args:
        constraint: S.
        centre: c, of the variable's shape, with or without a batch in front, or one number.

    """

    constraint: Constraint
    centre: float | Tensor = field(metadata=entries(harmless=0.0, grows=True))

    def __post_init__(self) -> None:
        if not isinstance(self.constraint, Constraint):
            raise ValueError(
                f"constraint: expected a set such as LpBall, got {type(self.constraint).__name__}"
            )
        super().__post_init__()

    def priced(self, shape: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...] | None]]:
        """Those of S: a centre is no limit."""
        return self.constraint.priced(shape)

    def centred(self) -> tuple[Constraint, Tensor]:
        """S and c, of a set that is bound."""
        return self.constraint, tensor_of(self.centre)

    def around(self, like: Tensor) -> Around:
        """S and c, or where S has a centre, too, what is within and both together."""
        within = self.constraint.around(like)
        if within is None:
            return Around(self.constraint, self.centre, self.placed)
        centre = as_entries(self.centre, like) + as_entries(within.centre, like)
        return Around(within.inner, centre, lambda y: self.placed(within.placed(y)))

    def normal_form(self, n: int) -> Sequence[Block] | None:
        """Of a ball, for an `Intersection`; what is asked on its own is asked for y."""
        return form_around(self.constraint.normal_form(n), self.centre)

    def placed(self, y: Tensor) -> Tensor:
        """The x of the set for a y of S: c + y, as far as the dtype can hold it."""
        c = self._centre(y)
        x = c + y
        at, origin = x.detach(), c.detach()
        # where c is large the sum is rounded by far more than y, and may end up outside
        inner = round_towards(at, origin, y.detach())
        moved = self.constraint.violation(inner - origin) < self.constraint.violation(at - origin)
        return x + torch.where(moved.unsqueeze(-1), inner - at, 0)

    def start(self, like: Tensor) -> Tensor:
        """Where S starts."""
        return self._centre(like) + self.constraint.start(like)

    def unbounded(self) -> Tensor | None:
        """Those of S."""
        return self.constraint.unbounded()

    def open_ended(self, g: Tensor) -> Tensor | None:
        """Those of S."""
        return self.constraint.open_ended(g)

    def vertex(self, g: Tensor) -> Tensor:
        """c + the vertex of S, zero along open-ended coordinates."""
        return self.constraint.vertex(g) + self._bounded_centre(g)

    def lowest(self, g: Tensor) -> Tensor:
        """⟨g, c⟩ + the minimum over S."""
        return self.constraint.lowest(g) + dot(g, self._bounded_centre(g))

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """c + the soft vertex of S."""
        return self.constraint.soft_vertex(g, temperature) + self._bounded_centre(g)

    def violation(self, x: Tensor) -> Tensor:
        """How far x − c is outside of S."""
        return self.constraint.violation(x - self._centre(x))

    def retract(self, x: Tensor) -> Tensor:
        """x, or where x − c is outside of S the point for what S makes of it."""
        y = x - self._centre(x)
        inner = self.constraint.retract(y)
        outside = (inner != y).any(-1, keepdim=True)
        return torch.where(outside, self.placed(inner), x)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """c + the projection of z − c onto S."""
        c = self._centre(z).detach()
        return c + self.constraint.project(z - c, None if near is None else near - c)

    def diameter(self, n: int) -> Tensor:
        """That of S."""
        return self.constraint.diameter(n)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> Face:
        """The face of S at x − c, with the same directions, normals and curvature."""
        return self.constraint.face(x - self._centre(x).detach(), g, scale)

    def plain(self, *, fixed: bool = True) -> Plain | None:
        """That of S, moved."""
        inner = self.constraint.plain(fixed=fixed)
        return None if inner is None else PlainShifted(inner, self.centre)

    def _centre(self, like: Tensor) -> Tensor:
        return as_entries(self.centre, like)

    def _bounded_centre(self, g: Tensor) -> Tensor:
        """c, zero along open-ended coordinates."""
        endless, c = self.constraint.open_ended(g), self._centre(g)
        return c if endless is None else torch.where(endless, 0, c)


def round_towards(x: Tensor, c: Tensor, y: Tensor) -> Tensor:
    """x = c + y, rounded such that |x − c| ≤ |y| in each entry."""
    far = (x.double() - c.double()).abs() > y.double().abs()
    return torch.where(far, torch.nextafter(x, c.expand_as(x)), x)
