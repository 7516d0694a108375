"""The layers that ``dfw export`` writes: a set for n variables, and what is called with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dfwlayer import DFWLayer, SetLayer
from dfwlayer.constraints import (
    Birkhoff,
    Box,
    CappedSimplex,
    Constraint,
    Ellipsoid,
    GroupBall,
    KSparse,
    L1Box,
    LpBall,
    PlaneCut,
    Polyhedron,
    Simplex,
)
from dfwlayer.deploy import Call

__all__ = ["CASES", "Case", "Size"]

Draw = Callable[[int], Call]  # so many random inputs


class Size(NamedTuple):
    """What a set is made from."""

    n: int
    radius: float
    random: torch.Generator
    dtype: torch.dtype

    def normal(self, *sizes: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*sizes, generator=self.random, dtype=self.dtype)

    def uniform(self, *sizes: int) -> Tensor:
        """Numbers between 0 and 1."""
        return torch.rand(*sizes, generator=self.random, dtype=self.dtype)


Case = Callable[[Size], tuple[nn.Module, Draw]]


def _ball(p: float, weighted: bool = False, given: bool = False) -> Case:
    """A `DFWLayer`; a P, weights and radii come with the call."""

    def case(size: Size) -> tuple[nn.Module, Draw]:
        n, radius = size.n, size.radius

        def draw(count: int) -> Call:
            q = 2 * size.normal(count, n)
            if given:
                R = size.normal(count, n, n)
                P = R.mT @ R / n + torch.eye(n, dtype=size.dtype)
                return Call((P, q), {"radius": radius})
            if not weighted:
                return Call((None, q), {"radius": radius})
            weight, spread = size.uniform(count, n) + 0.1, size.uniform(count) + 0.5
            return Call((None, q, weight), {"radius": radius * spread})

        return DFWLayer(p), draw

    return case


def _set(make: Callable[[Size], Constraint]) -> Case:
    """A `SetLayer`, called with q."""

    def case(size: Size) -> tuple[nn.Module, Draw]:
        layer = SetLayer(make(size))
        return layer, lambda count: Call((2 * size.normal(count, size.n),), {})

    return case


def _birkhoff(size: Size) -> Birkhoff:
    side = math.isqrt(size.n)
    if side * side != size.n:
        raise ValueError(
            f"--n: birkhoff has a square number of entries, such as 9 and 16, not {size.n}"
        )
    return Birkhoff(side)


CASES: dict[str, Case] = {
    "l1": _ball(1),
    "l1-weighted": _ball(1, weighted=True),
    "l1-quadratic": _ball(1, given=True),
    "l2": _ball(2),
    "l2-weighted": _ball(2, weighted=True),
    "linf": _ball(math.inf),
    "l3": _ball(3),
    "box": _set(lambda s: Box(-s.radius, s.radius)),
    "simplex": _set(lambda s: Simplex(s.radius)),
    "capped-simplex": _set(lambda s: CappedSimplex(s.radius, 2 * s.radius / s.n)),
    "l1-box": _set(lambda s: L1Box(s.radius, None, -s.radius / 2, s.radius / 2)),
    "k-sparse": _set(lambda s: KSparse(2, s.radius)),
    "budget": _set(lambda s: PlaneCut(Box(0.0, 2 * s.radius / s.n), 1.0, s.radius)),
    "leverage": _set(lambda s: PlaneCut(LpBall(1, 2 * s.radius), 1.0, s.radius)),
    "groups": _set(lambda s: GroupBall([i // 2 for i in range(s.n)], s.radius)),
    "ellipsoid": _set(lambda s: Ellipsoid(s.normal(2 * s.n, s.n), radius=s.radius)),
    "birkhoff": _set(_birkhoff),
    "polyhedron": _set(lambda s: Polyhedron(s.normal(2 * s.n, s.n), 0.5 + s.uniform(2 * s.n))),
}
