"""Problems with kinks, on the pieces that hold their solution.

Between its kinks a problem is one over rows and bounds. Compiled code finds the pieces
(`dfwlayer.engines.compiled.pieces`). The problem on them is solved and differentiated like any
other one, and its solution is that of the whole problem if no force at a kink is more than what
the slopes jump by there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dfwlayer.engines import compiled
from dfwlayer.integrations.cvxpy.sets import Region, Values
from dfwlayer.objectives import Quadratic
from dfwlayer.objectives.base import Objective

__all__ = ["Pieces", "Posed"]

Numbers = NDArray[Any]


class Posed(NamedTuple):
    """A problem on some pieces."""

    objective: Objective
    at: Values  # with its rows there, and bounds on all coordinates
    hold: Callable[[Tensor], bool]  # whether the solution there is that of the whole problem


@dataclass(frozen=True)
class Pieces:
    """How a problem with kinks (z_i − o_ik)₊ is posed; arrays as `Kinks.arrays` makes them."""

    region: Region  # without the kinks
    present: NDArray[np.bool_]  # which of the kinks (n, K) there are

    @property
    def count(self) -> int:
        return int(self.present.sum())

    def posed(self, at: Values, objective: Objective, scale: float) -> Posed | None:
        """On the pieces that hold the solution, None where these are not found.

        The objective is that of the slopes below all kinks, divided by ``scale``.
        """
        engine = compiled.with_kinks(at.values())
        if engine is None or not isinstance(objective, Quadratic):
            return None
        n, depth = self.present.shape
        place, cost, jump = at["kink.place"], at["kink.cost"], at.get("kink.jump")
        cost = cost if scale == 1 else cost / scale
        lower, upper = self.region.bounds(at)
        P, q, G, h = objective.P, objective.q, at.get("G"), at.get("h")
        places = np.where(self.present, _array(place, (n, depth)), np.inf)
        costs, jumps = _array(cost, (n, depth)), _array(jump, (0, n, depth))
        order = np.argsort(places, -1, kind="stable")
        if depth > 1:
            places, costs, jumps = (_taken(part, order) for part in (places, costs, jumps))
        given = engine.Bent(
            _array(P, (0, 0)),
            _array(q, (n,)),
            _array(at.get("A"), (0, n)),
            _array(at.get("b"), (0,)),
            _array(G, (0, n)),
            _array(h, (0,)),
            np.full((1, n), -np.inf) if lower is None else _array(lower, (n,)),
            np.full((1, n), np.inf) if upper is None else _array(upper, (n,)),
            places,
            costs,
            jumps,
        )
        found = engine.located(given)
        if found is None:
            return None
        parts = [P, q, G, h, at.get("A"), at.get("b"), lower, upper, place, cost, jump]
        ranks = 2, 1, 2, 1, 2, 1, 1, 1, 2, 2, 3
        single = all(t is None or t.dim() == k for t, k in zip(parts, ranks, strict=True))
        mask = (np.argsort(order, -1) < found.below[..., None]).astype(np.float64)
        passed = torch.from_numpy(mask[0] if single else mask)
        now = dict(at)
        if jump is not None:
            assert G is not None
            assert h is not None
            now["G"], now["h"] = _turned(G, h, jump, place, passed)
        index = torch.from_numpy(self._ends(found.given, order, found.below))
        pool = self._pool(place, lower, upper, () if single else (len(mask),))
        ends = pool.gather(-1, index[0] if single else index)
        now["lower"], now["upper"] = ends[..., :n], ends[..., n:]
        slopes = (cost * passed).sum(-1) if depth > 1 else (cost * passed)[..., 0]
        shifted = Quadratic(P, q + slopes)
        return Posed(shifted, now, lambda x: found.hold(x.detach().numpy().reshape(-1, n)))

    def _ends(self, given: Any, order: Numbers, below: Numbers) -> Numbers:
        """Where the lower and the upper end of each piece are in the pool, (B, 2n)."""
        n, depth = self.present.shape
        line, i = np.arange(len(below))[:, None], np.arange(n)
        found, first = [], n * depth
        for number, own, sign in ((below - 1, given.lower, 1), (below, given.upper, -1)):
            there = (number >= 0) & (number < depth)
            slot = number.clip(0, depth - 1)
            place = given.places[line if len(given.places) > 1 else 0, i, slot]
            kink = i * depth + order[line if len(order) > 1 else 0, i, slot]
            found.append(np.where(there & (sign * place > sign * own), kink, first + i))
            first += n
        return np.concatenate(found, -1)

    def _pool(
        self, place: Tensor, lower: Tensor | None, upper: Tensor | None, lead: tuple[int, ...]
    ) -> Tensor:
        """The places of kinks, and the bounds: what ends of pieces are taken from."""
        n = len(self.present)
        parts = [place.flatten(-2)]
        for own, none in ((lower, -math.inf), (upper, math.inf)):
            parts.append(place.new_full((n,), none) if own is None else own)
        return torch.cat([part.expand(*lead, part.shape[-1]) for part in parts], -1)


def _turned(
    G: Tensor, h: Tensor, jump: Tensor, place: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows and their sides beyond the kinks that were passed; the first of them have kinks."""
    rises = jump * passed.unsqueeze(-3)
    steeper, further = rises.sum(-1), (rises * place.unsqueeze(-3)).sum((-2, -1))
    count, rows = jump.shape[-3], G.shape[-2]
    if count == rows:
        return G + steeper, h + further
    lead = steeper.shape[:-2]
    flat = G[..., count:, :].expand(*lead, -1, -1), h[..., count:].expand(*lead, -1)
    return (
        torch.cat((G[..., :count, :] + steeper, flat[0]), -2),
        torch.cat((h[..., :count] + further, flat[1]), -1),
    )


def _array(value: Tensor | None, shape: tuple[int, ...]) -> Numbers:
    """As numbers with one dimension more than one problem's, of that shape where there are none."""
    if value is None:
        return np.empty((1, *shape))
    found: Numbers = value.detach().numpy()
    return found[None] if found.ndim == len(shape) else found


def _taken(values: Numbers, order: Numbers) -> Numbers:
    """The last dimension in an order (·, n, K)."""
    if len(order) == 1:
        return values[..., np.arange(order.shape[1])[:, None], order[0]]
    order = order.reshape(len(order), *[1] * (values.ndim - 3), *order.shape[1:])
    lead = np.broadcast_shapes(values.shape[:-1], order.shape[:-1])
    wide, places = (np.broadcast_to(p, (*lead, p.shape[-1])) for p in (values, order))
    return np.take_along_axis(wide, places, -1)
