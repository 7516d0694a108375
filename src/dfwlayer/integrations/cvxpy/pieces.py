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
from dfwlayer.engines.compiled.arrays import times
from dfwlayer.integrations.cvxpy.sets import Region, Values
from dfwlayer.objectives import Quadratic
from dfwlayer.objectives.base import Objective

__all__ = ["Pieces", "Posed", "Where"]

Numbers = NDArray[Any]
WITHIN = 1e-7  # of the terms of a slope or of a row, what may be rounding


class Posed(NamedTuple):
    """A problem on some pieces."""

    objective: Objective
    at: Values  # with its rows there, and bounds on all coordinates
    hold: Callable[[Tensor], bool]  # whether the solution there is that of the whole problem


class Where(NamedTuple):
    """The pieces that hold the solutions of a batch."""

    passed: Numbers  # (B, n, K), 1 for the kinks that are below the coordinate, otherwise 0
    ends: Numbers  # (B, 2n), the lower and the upper ends: places of kinks, then the two bounds
    hold: Callable[[Numbers], bool]  # whether points (B, n), optimal there, are so beyond, too


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
        if not isinstance(objective, Quadratic) or compiled.with_kinks(at.values()) is None:
            return None
        n, depth = self.present.shape
        place, cost, jump = at["kink.place"], at["kink.cost"], at.get("kink.jump")
        cost = cost if scale == 1 else cost / scale
        lower, upper = self.region.bounds(at)
        P, q, G, h = objective.P, objective.q, at.get("G"), at.get("h")
        found = self.located(P, q, at, (lower, upper), cost)
        if found is None:
            return None
        parts = [P, q, G, h, at.get("A"), at.get("b"), lower, upper, place, cost, jump]
        ranks = 2, 1, 2, 1, 2, 1, 1, 1, 2, 2, 3
        single = all(t is None or t.dim() == k for t, k in zip(parts, ranks, strict=True))
        passed = torch.from_numpy(found.passed[0] if single else found.passed)
        now = dict(at)
        if jump is not None:
            assert G is not None
            assert h is not None
            now["G"], now["h"] = _turned(G, h, jump, place, passed)
        index = torch.from_numpy(found.ends)
        pool = self._pool(place, lower, upper, () if single else (len(found.passed),))
        ends = pool.gather(-1, index[0] if single else index)
        now["lower"], now["upper"] = ends[..., :n], ends[..., n:]
        slopes = (cost * passed).sum(-1) if depth > 1 else (cost * passed)[..., 0]
        shifted = Quadratic(P, q + slopes)
        return Posed(shifted, now, lambda x: found.hold(x.detach().numpy().reshape(-1, n)))

    def located(
        self,
        P: Tensor | None,
        q: Tensor,
        at: Values,
        bounds: tuple[Tensor | None, Tensor | None],
        cost: Tensor,
    ) -> Where | None:
        """The pieces that hold the solution, for the slopes q below all kinks and these costs."""
        engine = compiled.with_kinks()
        if engine is None:
            return None
        n, depth = self.present.shape
        jump = at.get("kink.jump")
        places = np.where(self.present, _array(at["kink.place"], (n, depth)), np.inf)
        costs, jumps = _array(cost, (n, depth)), _array(jump, (0, n, depth))
        order = np.argsort(places, -1, kind="stable")
        if (order[..., 1:] < order[..., :-1]).any():
            places, costs, jumps = (_taken(part, order) for part in (places, costs, jumps))
        lower, upper = bounds
        found = engine.located(
            engine.Bent(
                _array(P, (0, 0)),
                _array(q, (n,)),
                _array(at.get("A"), (0, n)),
                _array(at.get("b"), (0,)),
                _array(at.get("G"), (0, n)),
                _array(at.get("h"), (0,)),
                np.full((1, n), -np.inf) if lower is None else _array(lower, (n,)),
                np.full((1, n), np.inf) if upper is None else _array(upper, (n,)),
                places,
                costs,
                jumps,
            )
        )
        if found is None:
            return None
        passed = (np.argsort(order, -1) < found.below[..., None]).astype(np.float64)
        ends, between = self._ends(found.given, order, found.below)
        return Where(passed, ends, lambda x: _is_optimal(found, between, x) and found.hold(x))

    def _ends(self, given: Any, order: Numbers, below: Numbers) -> tuple[Numbers, Numbers]:
        """Where the lower and the upper end of each piece are in the pool, (B, 2n), and they."""
        n, depth = self.present.shape
        # the places of each coordinate between two ends that no bound is beyond, and their numbers
        places = np.empty((len(given.places), n, depth + 2))
        places[..., 0], places[..., 1:-1], places[..., -1] = -np.inf, given.places, np.inf
        kinks = np.zeros((len(order), n, depth + 2), np.int64)
        kinks[..., 1:-1] = order + np.arange(0, n * depth, depth)[:, None]
        found, own = np.empty((len(below), 2 * n), np.int64), np.arange(n * depth, (depth + 2) * n)
        between = np.empty(found.shape)
        for at, number, bound, sign in (
            (slice(0, n), below, given.lower, 1),
            (slice(n, 2 * n), below + 1, given.upper, -1),
        ):
            kink = _picked(places, number)
            within = sign * kink > sign * bound
            found[:, at] = np.where(within, _picked(kinks, number), own[at])
            between[:, at] = np.where(within, kink, bound)
        return found, between

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


def _is_optimal(found: Any, between: Numbers, x: Numbers) -> bool:  # (B, 2n), (B, n)
    """Whether the prices of the rows are those of points x on their pieces, up to rounding.

    What holds x at a kink is told by prices. They are found by steps that lose digits where f is
    nearly linear. They prove x if it has no slope but at an end of its piece, with the sign that
    holds it there, and if rows with a price are met. A slope is within rounding if it is at most
    1e-7 of the largest of its terms.
    """
    if not found.prices.shape[1]:
        return True  # without rows there are none
    given, below = found.given, found.below
    k = given.E.shape[1]
    with np.errstate(all="ignore"):
        curved = times(given.P, x) if given.P.shape[1] else x
        passed = np.arange(given.places.shape[-1]) < below[..., None]
        costs = np.where(passed, given.costs, 0.0).sum(-1)
        g = curved + given.q + costs
        size = np.abs(curved) + np.abs(given.q) + np.abs(costs)
        parts = [(given.E, found.prices[:, :k])] if k else []
        price, room, steepest = found.prices[:, k:], 0.0, 0.0
        if price.shape[1]:
            G, h = given.G, given.h
            if count := given.jumps.shape[1]:
                rises = np.where(passed[:, None], given.jumps, 0.0)
                place = np.where(passed, given.places, 0.0)[:, None]
                lead = np.broadcast_shapes(G.shape[:1], rises.shape[:1], h.shape[:1])
                G, h = (np.broadcast_to(t, (*lead, *t.shape[1:])).copy() for t in (G, h))
                G[:, :count] += rises.sum(-1)
                h[:, :count] += (rises * place).sum((-2, -1))
            parts.append((G, price))
            room = h - times(G, x) - WITHIN * (np.abs(h) + times(np.abs(G), np.abs(x)))
            steepest = np.abs(G).max(-1)
        for rows, own in parts:
            moved = times(np.swapaxes(rows, -2, -1), own)
            g, size = g + moved, size + np.abs(moved)
        most = WITHIN * size.max(-1, keepdims=True)
        low, high = np.split(between, 2, -1)
        wrong = ((g > most) & (x > low)) | ((g < -most) & (x < high))
        if price.shape[1]:
            push = price * steepest
            loose = (push < -most) | ((push > most) & (room > 0))
            return not (wrong.any() or loose.any())
    return not wrong.any()


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


def _picked(values: Numbers, number: Numbers) -> Numbers:
    """Those (B, n) with these numbers in the last dimension of (·, n, K)."""
    count, n, depth = values.shape
    at = number + np.arange(0, n * depth, depth)
    if count > 1:
        at += np.arange(0, count * n * depth, n * depth)[:, None]
    found: Numbers = values.reshape(-1).take(at)
    return found
