"""Sets around another centre, and products."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from dfwlayer.constraints.plain.base import Plain, wide
from dfwlayer.ops.values import Value

__all__ = ["PlainProduct", "PlainShifted"]


@dataclass(frozen=True)
class PlainShifted(Plain):
    """{x : x − c ∈ S}."""

    inner: Plain
    centre: Value

    exact = property(attrgetter("inner.exact"))
    short = property(attrgetter("inner.short"))

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """c + the projection of z − c onto S."""
        c = wide(self.centre, z)
        return c + self.inner.nearest(z - c, steps)

    def inside(self, x: Tensor) -> Tensor:
        """c + y for a y of S, rounded such that it is no further from c than y in any entry."""
        c = wide(self.centre, x)
        y = self.inner.inside((x.double() - c).to(x.dtype)).double()
        near = (c + y).to(x.dtype)
        far = (near.double() - c).abs() > y.abs()
        back = near.double() - torch.sign(y) * near.double().abs() * torch.finfo(x.dtype).eps
        return torch.where(far, back.to(x.dtype), near)


@dataclass(frozen=True)
class PlainProduct(Plain):
    """Sets beside each other, each over its own block of coordinates."""

    parts: tuple[Plain, ...]
    counts: tuple[int, ...]

    @property
    def exact(self) -> bool:
        """Where all of them are."""
        return all(part.exact for part in self.parts)

    @property
    def short(self) -> bool:
        """Where all of them are."""
        return all(part.short for part in self.parts)

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """Block by block."""
        blocks = zip(self.parts, torch.split(z, [*self.counts], -1), strict=True)
        return torch.cat([part.nearest(block, steps) for part, block in blocks], -1)

    def inside(self, x: Tensor) -> Tensor:
        """Block by block."""
        blocks = zip(self.parts, torch.split(x, [*self.counts], -1), strict=True)
        return torch.cat([part.inside(block) for part, block in blocks], -1)
