"""Polyhedra with a budget around a centre, Σ w_i |x_i − c_i| ≤ t, as programs over rows.

Where the solution without the budget is within it, that is the solution. Elsewhere every
coordinate is held on the side of c_i on which that solution has it: there the budget is a row
⟨w ∘ s, x − c⟩ ≤ t with signs s. A coordinate that stays at c_i is held there by a force μ_i ≥ 0 and
by the price λ of the budget. It would move to the other side if μ_i > 2λ w_i, and then its sign is
turned. As x is in the next program as well, f falls with each of them, and few are needed.

What that does not solve, as no point is on those sides of c for instance, is a program over rows of
2n coordinates, x = c + u − v with u, v ≥ 0 and Σ w_i (u_i + v_i) ≤ t. Of the u_i and v_i one is
zero where the budget is a force, and both are where x_i stays at c_i. On the face of the solution
the budget is a row w ∘ sign(x − c), and so it is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dfwlayer.constraints.region import Spent
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import (
    Array,
    Batch,
    array_of,
    signs,
    stretched,
    summed,
    times,
)
from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import CLOSE, DOUBLE, ROUNDING, SINGLE
from dfwlayer.engines.compiled.polyhedra import LARGEST, Polyhedra, polyhedra_of
from dfwlayer.engines.compiled.results import Adjoint, Arrays, Limits, Results

__all__ = ["Budgets", "budgets_of"]

WITHIN = 1e-9  # of a budget that is left, below which it may be a force
TURNS = 8  # in which signs are changed; one to three are needed
AWAY = 1e-10  # of the price: forces that are nearer to those at which a sign changes are in doubt
ENOUGH = 1.0  # the gap of a program against its f, which is not the f that is asked for


@dataclass(frozen=True)
class Budgets:
    """See the module; what all problems share has a first dimension of 1."""

    base: Polyhedra
    form: Spent
    weight: Array  # |w| (·, n)
    centre: Array  # c (·, n)
    radius: Array  # t (·, 1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of the rows, then weight, centre and radius."""
        parts = self.form.weight, self.form.centre, self.form.radius
        return (*self.base.tensors, *(p if isinstance(p, Tensor) else None for p in parts))

    @property
    def _place(self) -> int:
        """Where the multiplier of the budget stands, below those of G."""
        return int(self.base.E.shape[1] + self.base.G.shape[1])

    def renewal(self) -> None:
        """Their rows take longer than all that is around them."""

    def search(self, objective: Arrays, start: Array, limits: Limits, batch: int) -> Results:
        """Without the budget, and with it where it is not kept."""
        n = start.shape[1]
        free = self.base.search(objective, start, limits, batch)
        found = Results.blank(batch, n, free.multipliers.shape[1] + 1, np.float64)
        found.x[:], found.values[:], found.codes[:] = free.x, free.values, free.codes
        k = self._place
        found.multipliers[:, :k], found.multipliers[:, k + 1 :] = (
            free.multipliers[:, :k],
            free.multipliers[:, k:],
        )
        found.face[0][:] = 0.0
        with np.errstate(all="ignore"):
            used = (self.weight * np.abs(free.x - self.centre)).sum(-1)
            within = used <= (1 - WITHIN) * self.radius[:, 0]
        going = np.flatnonzero(~(within & (free.codes[0] == outcome.SOLVED)))
        known = _known(free.codes[0, going])
        left = self._on_sides(objective, found, going[known], limits)
        going = np.concatenate((going[~known], left))
        if len(going):
            self._split(objective, found, np.sort(going), limits)
        return found

    def _on_sides(self, objective: Arrays, found: Results, going: Array, limits: Limits) -> Array:
        """Solve these problems on one side of every c_i, beginning with that of ``found``.

        Returns those that are left.
        """
        left: list[Array] = []
        side = np.where(found.x[going] < _some(self.centre, going), -1.0, 1.0)
        for _ in range(TURNS):
            if not len(going):
                break
            some, parts = self._some(going), [_some(part, going) for part in objective]
            low, high, c = some.base.lower, some.base.upper, some.centre
            side = np.where(c <= low, 1.0, np.where(c >= high, -1.0, side))
            start = np.zeros((1, c.shape[1]))
            own = some._sided(side).search((*parts,), start, limits, len(going))  # type: ignore[arg-type]
            k = self._place
            price, ends = own.multipliers[:, k, None], own.multipliers[:, k + 1 :]
            still = own.x == c
            held, most = -side * ends, 2 * price * some.weight
            turns = still & (low < c) & (c < high)  # it can be on both sides
            solved = own.codes[0] == outcome.SOLVED
            wrong = turns & (held > most)
            done = solved & ~wrong.any(-1)
            weak = turns & ~((held > 0) & (held < (1 - AWAY) * most))
            clear = (price[:, 0] > 0) & ~weak.any(-1)
            codes = np.where(clear, outcome.SOLVED, outcome.DOUBTED)
            codes[clear & ~some._settled(own.x, limits[0])] = outcome.UNSETTLED
            ends = np.where(still, 0.0, ends)
            at = going[done]
            found.codes[0, at], found.x[at], found.values[:, at] = (
                codes[done],
                own.x[done],
                own.values[:, done],
            )
            found.codes[1, going] += own.codes[1]
            forces = own.multipliers[done, :k]
            found.multipliers[at] = np.concatenate((forces, price[done], ends[done]), -1)
            found.face[0][at] = np.where(still, 0.0, side)[done]
            left.append(going[~solved])
            again = solved & ~done
            side = np.where(wrong, -side, side)[again]
            going = going[again]
        return np.concatenate([*left, going])

    def _sided(self, side: Array) -> Polyhedra:  # (B, n)
        """The rows and bounds on these sides of c, and below those of G the budget."""
        base, c, count = self.base, self.centre, len(side)
        row = self.weight * side
        G = np.broadcast_to(base.G, (count, *base.G.shape[1:]))
        h = np.broadcast_to(base.h, (count, base.h.shape[1]))
        total = self.radius + (row * c).sum(-1, keepdims=True)
        rows = np.concatenate((G, row[:, None]), 1), np.concatenate((h, total), -1)
        lower = np.where(side > 0, np.maximum(base.lower, c), base.lower)
        upper = np.where(side < 0, np.minimum(base.upper, c), base.upper)
        G, h, lower, upper = map(np.ascontiguousarray, (*rows, lower, upper))
        return replace(base, G=G, h=h, lower=lower, upper=upper)

    def _split(self, objective: Arrays, found: Results, going: Array, limits: Limits) -> None:
        """Solve these problems for u and v."""
        eps, tol, most = limits
        some, n, count = self._some(going), found.x.shape[1], len(going)
        P, q, A, b = (_some(part, going) for part in objective)
        P = P if P.shape[1] else np.eye(n)[None]
        with np.errstate(all="ignore"):
            slope, beside = q + times(P, some.centre), b - times(A, some.centre)
            both = np.concatenate((P, -P), -1)
            parts = np.concatenate((both, -both), -2), np.concatenate((slope, -slope), -1)
            bent, pull = map(np.ascontiguousarray, parts)
            split = bent, pull, np.ascontiguousarray(_mirrored(A)), np.ascontiguousarray(beside)
            inner = some._mirror(count)
            own = inner.search(split, np.zeros((1, 2 * n)), (DOUBLE, ENOUGH, most), count)
            up, down = own.x[:, :n], own.x[:, n:]
            k = self._place
            forces, price = own.multipliers[:, :k], own.multipliers[:, k, None]
            above, below = own.multipliers[:, k + 1 : k + 1 + n], own.multipliers[:, k + 1 + n :]
            still = (up == 0) & (down == 0)
            x = some.centre + (up - down)
            base = some.base
            # what is at a bound of its own is at a bound of x
            x = np.where((up > 0) & (above > 0) | (down > 0) & (below < 0), base.upper, x)
            x = np.where((up > 0) & (above < 0) | (down > 0) & (below > 0), base.lower, x)
            x = x if eps == DOUBLE else x.astype(np.float32).astype(np.float64)
            x = np.minimum(np.maximum(x, base.lower), base.upper)
            ends = np.where(up > 0, above, np.where(down > 0, -below, 0.0))
            clear = (price > 0)[:, 0] & ((up == 0) | (down == 0)).all(-1)
            fixed = inner.lower == inner.upper
            weak = still & ~((above < 0) | fixed[:, :n]) | still & ~((below < 0) | fixed[:, n:])
            solved = (own.codes[0] == outcome.SOLVED) & clear & ~weak.any(-1)
            value, there = (_value(P, q, A, b, y) for y in (x, some.centre + (up - down)))
            terms = (np.abs(x) * (times(np.abs(P), np.abs(x)) + np.abs(q))).sum(-1)
            gap = np.maximum(own.values[1] + value - there, 0.0) + ROUNDING * DOUBLE * terms
            settled = some._settled(x, eps)
            proven = gap <= tol * np.maximum(np.abs(value), 1e-300)
        codes = np.where(_known(own.codes[0]), outcome.DOUBTED, own.codes[0])
        codes[solved & ~settled] = outcome.UNSETTLED
        codes[solved & settled] = np.where(proven, outcome.SOLVED, outcome.UNPROVEN)[
            solved & settled
        ]
        found.codes[0, going] = codes
        found.codes[1, going] += own.codes[1]
        found.x[going], found.values[0, going], found.values[1, going] = x, value, gap
        found.multipliers[going] = np.concatenate((forces, price, ends), -1)
        found.face[0][going] = np.sign(up - down)

    def _mirror(self, count: int) -> Polyhedra:
        """The rows and bounds of u and v, and below those of G the budget."""
        base, c = self.base, self.centre
        n = c.shape[1]
        budget = np.broadcast_to(np.concatenate((self.weight, self.weight), -1), (count, 2 * n))
        G = np.broadcast_to(_mirrored(base.G), (count, base.G.shape[1], 2 * n))
        h = np.broadcast_to(base.h - times(base.G, c), (count, base.G.shape[1]))
        radius = np.broadcast_to(self.radius, (count, 1))
        up, down = (base.lower - c, base.upper - c), (c - base.upper, c - base.lower)
        sides = zip(up, down, strict=True)
        lower, upper = (np.maximum(np.concatenate(side, -1), 0.0) for side in sides)
        parts = _mirrored(base.E), base.e - times(base.E, c)
        rows = np.concatenate((G, budget[:, None]), 1), np.concatenate((h, radius), -1)
        E, e, G, h, lower, upper = map(np.ascontiguousarray, (*parts, *rows, lower, upper))
        return replace(base, E=E, e=e, G=G, h=h, lower=lower, upper=upper)

    def _settled(self, x: Array, eps: float) -> Array:  # (B, n) -> (B,)
        """Whether rows and budget are off by no more than rounding, as the largest entry has it."""
        base, most = self.base, (CLOSE if eps == SINGLE else 2 * CLOSE) * eps
        farthest = np.abs(x).max(-1, keepdims=True)
        fine = np.ones(len(x), bool)
        for matrix, side, least in ((base.E, base.e, -np.inf), (base.G, base.h, 0.0)):
            if matrix.shape[1]:
                allowed = most * (np.abs(matrix).max(-1) * farthest + np.abs(side))
                over = times(matrix, x) - side
                fine &= (over <= allowed).all(-1) & ((over >= -allowed) | (least == 0)).all(-1)
        used = (self.weight * np.abs(x - self.centre)).sum(-1, keepdims=True)
        allowed = most * (self.weight.max(-1, keepdims=True) * farthest + self.radius)
        fine &= (used <= self.radius + allowed)[:, 0]
        return fine

    def _some(self, index: Array) -> Budgets:
        """The problems at these positions."""
        base = self.base
        rows = replace(
            base,
            E=_some(base.E, index),
            e=_some(base.e, index),
            G=_some(base.G, index),
            h=_some(base.h, index),
            lower=_some(base.lower, index),
            upper=_some(base.upper, index),
        )
        own = (_some(part, index) for part in (self.weight, self.centre, self.radius))
        return Budgets(rows, self.form, *own)

    def _still(self, found: Results) -> Array:  # (B, n)
        """Which coordinates stay at the centre, held by the budget."""
        still: Array = (found.face[0] == 0) & (found.multipliers[:, self._place, None] > 0)
        return still

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        """With the budget as a row, and what stays at the centre held there."""
        base, (batch, n) = self.base, v.shape
        still = self._still(found)
        row = (self.weight * found.face[0])[:, None]
        G = np.broadcast_to(base.G, (batch, base.G.shape[1], n))
        G = np.ascontiguousarray(np.concatenate((G, row), 1))
        centre = np.broadcast_to(self.centre, (batch, n))
        lower, upper = (
            np.ascontiguousarray(np.where(still, centre, b)) for b in (base.lower, base.upper)
        )
        return replace(base, G=G, lower=lower, upper=upper).adjoint(P, found, v, eps)

    def envelope(self, found: Results, g: Array) -> Adjoint:
        """What stays at the centre is held there with what the rows leave of ∇f."""
        base, k = self.base, self.base.E.shape[1]
        nu = -found.multipliers
        rest = g.copy()
        for matrix, force in (
            (base.E, found.multipliers[:, :k]),
            (base.G, found.multipliers[:, k : self._place]),
        ):
            rest += times(np.swapaxes(matrix, -2, -1), force)
        ends = nu[:, self._place + 1 :]
        ends[:] = np.where(self._still(found), rest, ends)
        return Adjoint(np.zeros_like(found.x), nu, None)

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Of −⟨u, λ w ∘ s⟩ − ν (Σ w_i |x_i − c_i| − t), and x_i moves with c_i where it stays."""
        place, still = self._place, self._still(found)
        price, nu = found.multipliers[:, place, None], adjoint.nu[:, place, None]
        ends = adjoint.nu[:, place + 1 :]
        own = np.delete(adjoint.nu, place, 1)
        own[:, place:] = np.where(still, 0.0, ends)
        gradients = self.base.pullback(
            asked[:6],
            found._replace(multipliers=np.delete(found.multipliers, place, 1)),
            adjoint._replace(nu=own),
        )
        side = found.face[0]
        of_weight: Tensor | None = None
        if asked[6]:
            away = np.where(price > 0, np.abs(found.x - self.centre), 0.0)
            each = -(price * adjoint.u * side + nu * away) * signs(self.form.weight)
            of_weight = summed(self.form.weight, each)
        of_centre: Tensor | None = None
        if asked[7]:
            pulled = np.where(still, ends, nu * self.weight * side)
            of_centre = summed(self.form.centre, pulled)
        return [
            *gradients,
            of_weight,
            of_centre,
            summed(self.form.radius, nu) if asked[8] else None,
        ]


def budgets_of(form: Spent, n: int, batch: Batch) -> Budgets | None:
    """The arrays, None where they are not for compiled code."""
    base = polyhedra_of(form.linear, n, batch) if 2 * n <= LARGEST else None
    parts = form.weight, form.centre, form.radius
    if base is None or not all(batch.fits(part, 1) for part in parts):
        return None
    weight, centre, radius = (array_of(part, 1) for part in parts)
    weight, centre = (stretched(part, len(part), n) for part in (np.abs(weight), centre))
    # a budget of zero, and one that is free of charge, are for others
    if not (np.isfinite(centre).all() and (weight > 0).all() and (radius > 0).all()):
        return None
    return Budgets(base, form, weight, centre, radius)


def _known(codes: Array) -> Array:
    """Whether x was found, whatever may be said of its multipliers."""
    # numpy.isin sorts
    known: Array = (codes == outcome.SOLVED) | (codes == outcome.SHARED) | (codes == outcome.TIED)
    return known


def _mirrored(rows: Array) -> Array:
    """Of u and v for those of x."""
    return np.concatenate((rows, -rows), -1)


def _some(part: Array, index: Array) -> Array:
    return part if len(part) == 1 else part[index]


def _value(P: Array, q: Array, A: Array, b: Array, x: Array) -> Array:  # (B,)
    """f."""
    residual = times(A, x) - b
    value: Array = 0.5 * (residual**2).sum(-1) if b.shape[1] else x * (0.5 * times(P, x) + q)
    return value if b.shape[1] else value.sum(-1)
