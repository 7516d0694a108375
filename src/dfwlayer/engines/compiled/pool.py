"""Problems with many coordinates of which few are free at the solution: how these are found.

A pool of coordinates is solved for exactly, with the others held where they are, at zero in a
budget or at a bound. The gradient of the whole problem then tells which of the others have a
multiplier of the wrong sign. Those that promise most join the pool, until there are none: the
solution on the pool is that of the problem, and its certificate is that of all coordinates. These
are the vertices of Frank-Wolfe's method, which enter in blocks. The matrix of the pool grows by the
products with its new columns; nothing is formed of the whole matrix but its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.columns import Columns
from dfwlayer.engines.compiled.kernels import outcome, outside, place, table
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.exchange import (
    SETTLED,
    SOLVES,
    STEPS,
    WHAT,
    exchange,
)
from dfwlayer.engines.compiled.threads import spread

__all__ = ["Pooled", "Search", "signs_of"]

# Coordinates that join at once: as many as have products with the pool that cost a quarter of the
# gradient by which they were chosen, within these numbers, and one for so many that are free
BLOCK, LARGE_BLOCK, SHARE = 32, 128, 4
SEVERAL = 2  # times as many if there are that many problems
ROUNDS = 200  # at most; what goes on is for tensor operations
GROUP = 8  # problems of a batch that a thread takes at once, and may borrow starts within
SPECTRAL = 8  # steps to a start, for sets without a vertex that is one
KEPT = 32_000_000  # entries that may be set aside for factors that are kept from round to round
# Products with the whole matrix that may be spent before others should look, for a pool that is
# well conditioned and times the square root of its condition, which is about what these need: the
# first pair where most of the other coordinates are still wrong, so that many will be free
EARLY, LATE = (5.0, 3.0), (50.0, 30.0)
CROWDED = 0.5
LAUNCH = 500_000  # operations that could be done while those of one step are launched
MANY = 0.25  # of the coordinates
WITHIN = 200  # products: no more coordinates may be free than have a factor that costs as much


class Pooled(NamedTuple):
    """What was found of a batch, as `dfwlayer.engines.compiled.layout.Results`, and the pool."""

    x: Array  # (B, n)
    values: Array  # (2, B)
    codes: Array  # (2, B)
    multipliers: Array  # (B, k)
    face: tuple[Array, ...]  # places (B, n)
    columns: Columns
    bodies: Array  # (·, k, p + 2), the sets of the pool
    sides: Array  # (B, p)


def signs_of(x: Array, places: Array) -> Array:
    """Of x in budgets, and those on the way out where a bound holds it at zero."""
    signs = np.sign(x)
    signs[(x == 0) & (places == place.LOW)] = 1.0
    signs[(x == 0) & (places == place.HIGH)] = -1.0
    return signs


@dataclass
class _Members:
    """The problems on the pool, whose coordinates are the last dimension."""

    x: Array  # (B, p)
    rounded: Array  # (B, p)
    places: Array  # (B, p)
    sides: Array  # (B, p)
    bodies: Array  # (·, k, p + 2)
    blocks: Array  # (·, 4)


class Search:
    """One search, of B problems."""

    def __init__(
        self,
        columns: Columns,
        bodies: Array,  # (·, k, n + 2)
        blocks: Array,  # (·, 4)
        batch: int,
        limits: tuple[float, float, int],  # eps of the dtype, the tolerance, the most steps
    ) -> None:
        n, k = bodies.shape[2] - 2, bodies.shape[1]
        self.columns, self.bodies, self.blocks = columns, bodies, blocks
        self.eps, self.tol, self.most = limits
        self.x, self.places = np.zeros((batch, n)), np.zeros((batch, n), np.int8)
        self.rounded = self.x if self.eps == DOUBLE else self.x.copy()
        self.codes, self.values = np.zeros((4, batch), np.int64), np.zeros((2, batch))
        self.codes[SETTLED] = k == table.ROWS  # a start at its bounds is feasible
        self.multipliers, self.g = np.zeros((batch, k)), np.zeros((batch, n))
        self.todo, self.inside = np.ones(batch, np.bool_), np.zeros(n, np.bool_)
        self.limit = min(n, int((3 * WITHIN * columns.entries) ** (1 / 3)) + BLOCK)
        self.factors, self.orders = np.empty((0, 0, 0)), np.empty((batch, 0), np.int64)
        self.counts = np.zeros(batch, np.int64)
        self.others = np.zeros(0, np.int64)  # coordinates that are not zero at the start
        self.promise = np.empty((batch, n))  # of each coordinate, if it joins the pool
        rows = [np.abs(bodies[:, row, :n]).max(-1) for row in range(table.ROWS, k)]
        self.steepest = np.stack(rows, -1) if rows else np.zeros((1, 0))  # (·, k − 2)

    def run(self, start: Array) -> Pooled | None:
        """Solve from a start (·, n); None where this is not the way."""
        if not self._begin(start) or self._crowded():
            return None
        self.others = np.flatnonzero(self.x.any(0))
        free = np.flatnonzero((self.places[self.todo] == place.FREE).any(0))
        if len(free) > self.limit:
            return None
        members = self._with(free, np.zeros((len(self.x), 0)))
        for turn in range(ROUNDS):
            if members.x.shape[1]:
                self._solve(members, borrows=turn == 0)
                self._look(members.x if self.eps > DOUBLE else members.rounded)
            before = self.todo.copy()
            wrong = self._assess()
            self._keep(members, np.flatnonzero(before & ~self.todo))
            if not self.todo.any() or not (more := self._next(wrong)).size:
                break
            members = self._with(more, members.sides)
        self.codes[WHAT, self.todo] = outcome.LOST
        return self._results(members)

    def _keep(self, members: _Members, done: Array) -> None:
        """What problems that are done found, in their dtype; the others go on from where it is."""
        self.rounded[done] = self.x[done]
        self.rounded[np.ix_(done, self.columns.pool.index)] = members.rounded[done]

    def _spread(self, run: Any, *given: Any) -> None:
        batch, n = self.x.shape
        spread(lambda first, end: run(first, end, self.bodies, *given), batch, 20 * n)

    def _begin(self, start: Array) -> bool:
        """Points of the sets to start from; False if there are none."""
        cold = not start.any()
        if cold:  # f at zero tells where to start
            self._look(np.zeros((len(self.x), 0)))
        given = cold and self._vertices()
        self._place(start, given)
        if not self.todo.any():
            return False
        if cold and not given:
            self._descend()
        if self.x.any():
            self.columns.hold(self.x)
            self._look(np.zeros((len(self.x), 0)))
        return True

    def _place(self, z: Array, given: bool) -> None:
        """The points next to z and where they are, or only that."""
        codes = np.zeros(len(self.x), np.int64)
        self._spread(outside.begin, self.blocks, self.g, z, given, self.x, self.places, codes)
        self.todo &= codes != outcome.UNFIT
        self.codes[WHAT, ~self.todo] = outcome.UNFIT
        self.x[~self.todo] = 0.0

    def _crowded(self) -> bool:
        """Whether a gradient step that no coordinate finds too long frees too many of them.

        Only asked where f alone may have one minimiser; otherwise few are free at a solution.
        """
        if self.columns.wide:
            return False
        x, places = np.empty_like(self.x), np.empty_like(self.places)
        z = self.x - self.g / max(self.columns.lengths.max() ** 2, 1e-300)
        codes = np.zeros(len(x), np.int64)
        self._spread(outside.begin, self.blocks, self.g, z, False, x, places, codes)
        return bool((places[self.todo] == place.FREE).mean() > MANY)

    def _vertices(self) -> bool:
        """For budgets zero, for equations the vertex that f likes; False for other sets."""
        body = self.bodies
        for first, end, row, last in self.blocks:
            if last - row != 1:
                return False
            slope, lower = body[:, row, first:end], body[:, table.LOWER, first:end]
            if (body[:, row, table.KIND] == table.BUDGET).all():
                continue
            if not (slope > 0).all() or not np.isfinite(lower).all():
                return False
        for b, x in enumerate(self.x):
            own = body[b if len(body) > 1 else 0]
            for first, end, row, _ in self.blocks:
                if own[row, table.KIND] != table.BUDGET:
                    self._fill(own, row, self.g[b, first:end], x[first:end], slice(first, end))
        return True

    def _fill(self, body: Array, row: int, g: Array, x: Array, at: slice) -> None:
        """From the lower bounds up, the best coordinates first, until an equation holds."""
        slope, low, high = body[row, at], body[table.LOWER, at], body[table.UPPER, at]
        rest = body[row, table.TOTAL] - slope @ low
        room = np.minimum(high - low, max(rest, 0) / slope)
        order = np.argsort((g + 0.5 * self.columns.lengths[at] ** 2 * room) / slope)
        used = np.cumsum((room * slope)[order])
        last = min(int(np.searchsorted(used, rest)), len(order) - 1)
        x[:] = low
        x[order[:last]] = np.where(np.isinf(high), low + room, high)[order[:last]]
        before = used[last - 1] if last else 0.0
        one = order[last]
        x[one] = min(low[one] + (rest - before) / slope[one], high[one])

    def _descend(self) -> None:
        """Some spectral projected gradient steps on the whole problem."""
        columns, none = self.columns, np.zeros((len(self.x), 0))
        alpha = np.full((len(self.x), 1), 1 / max(columns.lengths.max() ** 2, 1e-300))
        at, g = self.x.copy(), self.g
        for turn in range(SPECTRAL):
            columns.hold(at if turn == 0 else self.x)
            self._look(none)
            if turn:
                d, change = self.x - at, self.g - g
                bend = np.einsum("bi,bi->b", d, change)[:, None]
                fall, square = -(d * g).sum(-1, keepdims=True), (d * d).sum(-1, keepdims=True)
                curved = bend > 0
                safe = np.where(curved, bend, 1)
                length = np.where(curved, np.clip(fall / safe, 0, 1), 1)
                alpha = np.where(curved, square / safe, alpha)
                at, g = at + length * d, g + length * change
            else:
                g = self.g
            self._place(at - alpha * g, False)

    def _with(self, new: Array, sides: Array) -> _Members:
        """The problems with more coordinates in the pool."""
        columns, batch = self.columns, len(self.x)
        columns.extend(new, np.ascontiguousarray(self.x[:, new]))
        self.inside[new] = True
        index = columns.pool.index
        p, x = len(index), np.ascontiguousarray(self.x[:, index])
        places = np.ascontiguousarray(self.places[:, index])
        old = sides.shape[1]
        sides = np.concatenate((sides, signs_of(x[:, old:], places[:, old:])), -1)
        blocks = self.blocks.copy()
        blocks[:, 0], blocks[:, 1] = 0, p  # rows are zero elsewhere
        had = self.orders.shape[1]
        if (size := min(self.limit, len(columns.pool.hessian))) > had:
            roomy = min(self.limit, 2 * had)
            size = max(size, roomy) if batch * roomy * roomy <= KEPT else size
            kept = batch if batch * size * size <= KEPT else 0
            factors, orders = np.empty((kept, size, size)), np.empty((batch, size), np.int64)
            if kept and len(self.factors):
                orders[:, :had] = self.orders
                for b, free in enumerate(self.counts):  # the rest of it would only be made real
                    factors[b, :free, :free] = self.factors[b, :free, :free]
            else:
                self.counts[:] = 0
            self.factors, self.orders = factors, orders
        return _Members(x, x.copy(), places, sides, self._sets(), blocks)

    def _held(self) -> Array:
        """Coordinates outside of the pool that are not zero."""
        found: Array = self.others[~self.inside[self.others]]
        return found

    def _sets(self) -> Array:
        """The sets of the pool, less what the coordinates outside of it add to their rows."""
        index, n = self.columns.pool.index, self.x.shape[1]
        bodies = self.bodies[:, :, np.concatenate((index, [n, n + 1]))]
        held = self._held()
        if not len(held):
            return np.ascontiguousarray(bodies)
        bodies = np.repeat(bodies, len(self.x), 0) if len(bodies) < len(self.x) else bodies
        x = self.x[:, held]
        for row in range(table.ROWS, bodies.shape[1]):
            budget = (self.bodies[0, row, table.KIND] == table.BUDGET).all()
            bodies[:, row, table.TOTAL] -= (
                self.bodies[:, row, held] * (abs(x) if budget else x)
            ).sum(-1)
        return np.ascontiguousarray(bodies)

    def _solve(self, members: _Members, *, borrows: bool) -> None:
        """On the pool."""
        q, p = np.ascontiguousarray(self.columns.linear()), members.x.shape[1]
        given = self.columns.pool.hessian, q, members.bodies, members.blocks
        self.codes[STEPS, self.todo] += 1
        results = (
            members.x,
            members.rounded,
            self.codes,
            members.places,
            members.sides,
            self.multipliers,
            self.factors,
            self.orders,
            self.counts,
        )
        limits = self.eps, self.most, GROUP if borrows else 1

        def run(first: int, end: int) -> None:
            first, end = first * GROUP, min(end * GROUP, len(q))
            exchange(first, end, *given, *limits, self.todo, *results)

        spread(run, -(-len(q) // GROUP), GROUP * 100 * p * p)
        self.places[:, self.columns.pool.index] = members.places
        self.todo &= self.codes[WHAT] != outcome.LOST

    def _look(self, x: Array) -> None:
        """f and its gradient for members at x (B, p), for the problems that go on."""
        rows = np.flatnonzero(self.todo)
        if not len(rows):
            return
        self.x[:, self.columns.pool.index] = x
        whole = len(rows) == len(self.todo)
        value, g = self.columns.look(x if whole else np.ascontiguousarray(x[rows]), rows)
        if whole:
            self.values[0], self.g = value, g
        else:
            self.values[0, rows], self.g[rows] = value, g

    def _assess(self) -> Array:
        """What coordinates outside of the pool promise (B, n); problems without any are done."""
        wrong, found = self.promise, np.zeros((2, len(self.x)))
        columns = self.columns
        moved = np.concatenate((columns.pool.index, self._held()))
        sizes = columns.sizes(moved, self.x[:, moved])
        self._spread(
            outside.assess,
            self.g,
            columns.lengths,
            sizes,
            self._noise(sizes),
            columns.own,
            self.inside,
            self.places,
            self.multipliers,
            self.todo,
            wrong,
            found,
        )
        self.wrong, doubtful = found
        done = self.todo & (self.wrong == 0)
        self.codes[WHAT, done & (doubtful > 0)] = outcome.DOUBTED
        if done.any():
            self._certify(done)
        self.todo &= ~done
        return wrong

    def _noise(self, sizes: Array) -> Array:  # (B,) -> (B,)
        """What rounding may make of a multiplier, at most, of any coordinate."""
        pulls, own = np.abs(self.multipliers[:, table.ROWS :]) * self.steepest, self.columns.own
        largest = np.abs(own).max(-1) if own.shape[1] else 0.0
        terms = self.columns.lengths.max() * sizes + largest
        terms = terms + pulls.shape[1] * pulls.max(-1, initial=0.0)
        found: Array = CLEAR * ROUNDING * DOUBLE * terms
        return found

    def _certify(self, rows: Array) -> None:
        """The gap of the problems of a mask."""
        given, gap = (self.blocks, self.g, self.x, self.multipliers), self.values[1]
        self._spread(outside.certify, *given, rows, self.places, self.g[:0], gap)
        endless = rows & np.isinf(gap)
        if endless.any():  # free coordinates lack a bound
            shift, change = self._minimised_out(endless)
            self._spread(outside.certify, *given, endless, self.places, change, gap)
            gap[endless] += shift[endless]

    def _minimised_out(self, rows: Array) -> tuple[Array, Array]:
        """½⟨r, u⟩ (B,) and H u (B, n), with H u = r on the free coordinates.

        r is the slope of the Lagrangian there.
        """
        pool = self.columns.pool
        shift, u = np.zeros(len(self.x)), np.zeros((len(self.x), len(pool.index)))
        for b in np.flatnonzero(rows):
            free = np.flatnonzero(self.places[b, pool.index] == place.FREE)
            at = pool.index[free]
            r, body = self.g[b, at], self.bodies[b if len(self.bodies) > 1 else 0]
            for row in range(table.ROWS, len(body)):
                side = np.sign(self.x[b, at]) if body[row, table.KIND] == table.BUDGET else 1.0
                r = r + self.multipliers[b, row] * body[row, at] * side
            u[b, free] = np.linalg.lstsq(pool.hessian[np.ix_(free, free)], r, rcond=None)[0]
            shift[b] = 0.5 * r @ u[b, free]
        return shift, self.columns.product(u)

    def _next(self, wrong: Array) -> Array:
        """Coordinates to join the pool; none where others should look."""
        rows = np.flatnonzero(self.todo)
        if self._hopeless(rows):
            return np.zeros(0, np.int64)
        wrong = wrong if len(rows) == len(wrong) else wrong[rows]
        best = wrong.max(-1, keepdims=True)
        promise, top = wrong[0], float(best[0, 0])
        if len(wrong) > 1:
            wrong /= np.where(best > 0, best, 1)  # nobody else needs it
            promise, top = wrong.max(0), 1.0
        block = len(promise) // (4 * (len(self.columns.pool) + BLOCK))
        block = min(max(block, BLOCK), LARGE_BLOCK)
        count = block * min(len(rows), SEVERAL) + int(self.counts[rows].max()) // SHARE
        found, least = np.zeros(0, np.int64), 0.5
        while len(found) < count and least > 0:  # few of many, so they need not all be sorted
            found = np.flatnonzero(promise > least * top)
            least = least / 4 if least > 1e-3 else 0.0
        if len(found) < count:
            found = np.flatnonzero(promise > 0)
        if len(found) > count:
            found = found[np.argpartition(-promise[found], count)[:count]]
        return found

    def _hopeless(self, rows: Array) -> bool:
        """Whether this has cost as much as others may need for the whole problem."""
        pool, n = len(self.columns.pool), self.x.shape[1]
        free = self.counts[rows]
        spent = (2 * self.codes[SOLVES, rows] * free**2 + self.codes[STEPS, rows] * pool**2).sum()
        ratio = 1.0
        if len(self.factors):
            for b in rows:
                pivots = self.factors[b].diagonal()[: self.counts[b]]
                if len(pivots):
                    ratio = max(ratio, pivots.max() / pivots.min())
        products = spent / (2 * self.columns.entries * len(rows) + LAUNCH)
        crowded = not self.columns.wide and self.wrong[rows].max() > CROWDED * (n - pool)
        base, rate = EARLY if crowded else LATE
        return bool(products > base + rate * ratio)

    def _results(self, members: _Members) -> Pooled | None:
        """What is beyond doubt, with x in its dtype and feasible."""
        if not (self.codes[WHAT] == outcome.SOLVED).any():
            return None
        solved, what = self.codes[WHAT] == outcome.SOLVED, self.codes[WHAT]
        what[solved & (self.codes[SETTLED] == 0)] = outcome.UNSETTLED
        self.todo = solved = what == outcome.SOLVED
        if self.eps > DOUBLE:
            self.x = self.rounded
            self._look(np.ascontiguousarray(self.x[:, self.columns.pool.index]))
            self._certify(solved)
        value, gap = self.values
        what[solved & ~(gap <= self.tol * np.maximum(np.abs(value), 1e-300))] = outcome.UNPROVEN
        codes = np.ascontiguousarray(self.codes[[WHAT, STEPS]])
        return Pooled(
            self.x,
            self.values,
            codes,
            self.multipliers,
            (self.places,),
            self.columns,
            members.bodies,
            members.sides,
        )
