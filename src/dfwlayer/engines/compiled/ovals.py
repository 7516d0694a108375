"""Polyhedra within ellipsoids, by one quadratic program over rows after the other.

With h_j(x) = ½ (‖W_j (x − c_j)‖² − t_j²) ≤ 0 and multipliers μ_j a solution satisfies, but for the
forces of the rows, P x + q + Σ μ_j M_j (x − c_j) = 0 with M_j = W_jᵀW_j. A step of Newton's method
is the program with P + Σ μ_j M_j in place of P, among whose rows are the planes that touch the
ellipsoids next to x; their multipliers are the next μ_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dfwlayer.constraints.region import Met, Oval
from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import (
    Array,
    Batch,
    array_of,
    gram,
    outer,
    signs,
    stretched,
    summed,
    times,
)
from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, ROUNDING
from dfwlayer.engines.compiled.polyhedra import Polyhedra, polyhedra_of
from dfwlayer.engines.compiled.results import Adjoint, Arrays, Limits, Results
from dfwlayer.ops.values import Value

__all__ = ["Ovals", "ovals_of"]

STEPS = 40  # at most; what has not arrived by then is for tensor operations
PROGRAM: Limits = (DOUBLE, 1.0, 10**6)  # what is asked of one: x is judged at the end
NEAR = 1e-8  # a change of x, relative, after which one more step has all digits
FLATTEST = 1e-10  # M against its largest entry, below which an ellipsoid is none here
LARGEST = 250  # coordinates; beyond, the programs take longer than tensor operations


class _Arrays(NamedTuple):
    """One ellipsoid of each problem; what all share has a first dimension of 1."""

    form: Oval
    matrix: Array | None  # W (·, m, n), None where it is a diagonal
    weight: Array  # that diagonal (·, n)
    square: Array  # M (·, n, n)
    centre: Array  # (·, n)
    radius: Array  # (·, 1)

    def some(self, index: Array) -> _Arrays:
        """Of the problems at these positions."""
        parts = (p if p is None or len(p) == 1 else p[index] for p in self[1:])
        return _Arrays(self.form, *parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Ovals:
    """See the module."""

    base: Polyhedra
    ovals: tuple[_Arrays, ...]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of the rows, then matrix, centre and radius of each ellipsoid."""
        parts = [part for oval in self.ovals for part in oval.form[1:4]]
        own = tuple(part if isinstance(part, Tensor) else None for part in parts)
        return (*self.base.tensors, *own)

    def renewal(self) -> None:
        """Their rows take longer than all that is around them."""

    def search(self, objective: Arrays, start: Array, limits: Limits, batch: int) -> Results:
        n, count = start.shape[1], len(self.ovals)
        P, q = _matrix(objective[0], n), stretched(objective[1], batch, n)
        first = self._rows_below(None, np.arange(batch), n)
        nothing = np.empty((1, 0, n)), np.empty((1, 0))
        out = first.search((P, q, *nothing), start, PROGRAM, batch)
        k, m = self.base.E.shape[1], self.base.G.shape[1]
        tangents = slice(k + m, k + m + count)
        mu = np.zeros((batch, count))
        going = np.flatnonzero(out.codes[0] == outcome.SOLVED)
        x = out.x.copy()
        final = np.zeros(batch, bool)
        for _ in range(STEPS):
            if not len(going):
                break
            planes = self._rows_below(x[going], going, n)
            bent, pull = stretched(_some(P, going), len(going), n, n), q[going]
            for j, oval in enumerate(self.ovals):
                part, own = oval.some(going), mu[going, j, None]
                touch = part.centre + _on(part, x[going])
                bent += own[..., None] * part.square
                pull -= own * times(part.square, touch)
            found = planes.search((bent, pull, *nothing), start, PROGRAM, len(going))
            moved = np.abs(found.x - x[going]).max(-1) <= NEAR * np.abs(found.x).max(-1)
            new = found.multipliers[:, tangents]
            moved &= (np.abs(new - mu[going]) <= NEAR * np.abs(new).max(-1, keepdims=True)).all(-1)
            sound = (found.codes[0] == outcome.SOLVED) & np.isfinite(found.x).all(-1)
            x[going], mu[going] = found.x, new
            out.codes[0, going] = found.codes[0]
            out.codes[1, going] += 1
            out.multipliers[going] = found.multipliers
            over = final[going] & moved
            final[going] = moved
            going = going[sound & ~over]
        out.codes[0, going] = np.where(out.codes[0, going] == 0, outcome.LOST, out.codes[0, going])
        out.x[:] = x
        several = np.isin(out.codes[0], (outcome.SHARED, outcome.TIED))
        out.codes[0, several] = outcome.DOUBTED
        self._judge((P, q, *objective[2:]), out, mu, limits[1])
        return out

    def _rows_below(self, x: Array | None, index: Array, n: int) -> Polyhedra:
        """The rows, and below them planes that touch the ellipsoids next to x; none without x."""
        base, batch = self.base, len(index)
        G = _some(base.G, index)
        h = _some(base.h, index)
        rows = np.empty((batch, G.shape[1] + len(self.ovals), n))
        sides = np.empty(rows.shape[:2])
        rows[:, : G.shape[1]], sides[:, : G.shape[1]] = G, h
        for j, oval in enumerate(self.ovals, G.shape[1]):
            part = oval.some(index)
            if x is None:
                rows[:, j], sides[:, j] = 0.0, 1.0
                continue
            normal = times(part.square, _on(part, x))
            rows[:, j] = normal
            sides[:, j] = (part.radius**2)[:, 0] + (normal * part.centre).sum(-1)
            sides[:, j] = np.where((normal == 0).all(-1), 1.0, sides[:, j])
        own = (_some(part, index) for part in (base.E, base.e, base.lower, base.upper))
        E, e, lower, upper = (np.ascontiguousarray(part) for part in own)
        return replace(base, E=E, e=e, G=rows, h=sides, lower=lower, upper=upper)

    def _judge(self, objective: Arrays, out: Results, mu: Array, tol: float) -> None:
        """Leave what is not clear, with value and gap of the rest."""
        x, base = out.x, self.base
        k, m = base.E.shape[1], base.G.shape[1]
        with np.errstate(all="ignore"):
            out.values[0], rest = _value_and_slope(objective, x)
            P, q = objective[:2]
            size = times(np.abs(P), np.abs(x)) + np.abs(q)
            gap, terms = np.zeros(len(x)), np.zeros(len(x))
            lines, rows = out.multipliers[:, :k], out.multipliers[:, k : k + m]
            ends = out.multipliers[:, k + m + len(self.ovals) :]
            for matrix, side, force in ((base.E, base.e, lines), (base.G, base.h, rows)):
                if not matrix.shape[1]:
                    continue
                pulled = times(np.swapaxes(matrix, -2, -1), force)
                rest = rest + pulled
                size = size + np.abs(pulled)
                room = side - times(matrix, x)
                gap += np.where(force != 0, force * room, 0.0).sum(-1)
                across = np.abs(side) + times(np.abs(matrix), np.abs(x))
                terms += np.where(force != 0, np.abs(force) * across, 0.0).sum(-1)
            bound = np.where(ends > 0, base.upper, base.lower)
            gap += np.where(ends != 0, ends * (bound - x), 0.0).sum(-1)
            rest, clear, reach = rest + ends, np.ones(len(x), bool), np.full(len(x), np.inf)
            for j, oval in enumerate(self.ovals):
                y = x - oval.centre
                normal = times(oval.square, y)
                length = np.sqrt(np.maximum((y * normal).sum(-1), 0.0))
                t, own = oval.radius[:, 0], mu[:, j]
                rest = rest + own[:, None] * normal
                gap += own * length * (t - length)
                terms += own * (t * t + length * t)
                loose = (own == 0) & (length <= t * (1 - NEAR))
                tight = (own > 0) & (np.abs(length - t) <= CLEAR * DOUBLE * t)
                clear &= loose | tight
                reach = np.minimum(reach, length + t)
            # ⟨r, x − s⟩ ≤ ‖M⁻½ r‖ ‖M½ (x − s)‖, for what rounding left of the equations
            square, centre = self.ovals[-1].square, self.ovals[-1]
            inverse = np.linalg.solve(square, rest[..., None])[..., 0]
            last = np.sqrt(np.maximum((rest * inverse).sum(-1), 0.0))
            span = np.sqrt(
                np.maximum(((x - centre.centre) * times(square, x - centre.centre)).sum(-1), 0.0)
            )
            gap += last * (span + centre.radius[:, 0])
            small = (np.abs(rest) <= CLEAR * ROUNDING * DOUBLE * size.max(-1, keepdims=True)).all(
                -1
            )
            out.values[1] = np.maximum(gap, 0.0)
            proven = out.values[1] <= tol * np.maximum(np.abs(out.values[0]), 1e-300)
        solved = out.codes[0] == outcome.SOLVED
        out.codes[0, solved & ~(clear & small)] = outcome.DOUBTED
        out.codes[0, solved & clear & small & ~proven] = outcome.UNPROVEN

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        n, every = v.shape[1], np.arange(len(v))
        planes = self._rows_below(found.x, every, n)
        bent = stretched(_matrix(P, n), len(v), n, n)
        for j, oval in enumerate(self.ovals):
            bent += self._forces(found)[:, j, None, None] * oval.square
        return planes.adjoint(bent, found, v, DOUBLE)

    def _forces(self, found: Results) -> Array:  # (B, J)
        first = self.base.E.shape[1] + self.base.G.shape[1]
        return found.multipliers[:, first : first + len(self.ovals)]

    def envelope(self, found: Results, g: Array) -> Adjoint:
        return self.base.envelope(found, g)

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Of −⟨u, Σ μ_j M_j (x − c_j)⟩ − Σ ν_j h_j, beside what the rows have."""
        first = self.base.E.shape[1] + self.base.G.shape[1]
        own = slice(first, first + len(self.ovals))

        def without(part: Array) -> Array:
            return np.delete(part, own, 1)

        rows = self.base.pullback(
            asked[:6],
            found._replace(multipliers=without(found.multipliers)),
            adjoint._replace(nu=without(adjoint.nu)),
        )
        gradients = list(rows)
        solved = (found.codes[0] == outcome.SOLVED)[:, None]
        for j, oval in enumerate(self.ovals):
            want = asked[6 + 3 * j : 9 + 3 * j]
            mu, nu = found.multipliers[:, own][:, j, None], adjoint.nu[:, own][:, j, None]
            y, u = np.where(solved, found.x - oval.centre, 0.0), adjoint.u
            of_matrix: Tensor | None = None
            if want[0] and oval.matrix is not None:
                assert isinstance(oval.form.weight, Tensor)
                image, moved = times(oval.matrix, y), times(oval.matrix, u)
                of_matrix = outer(oval.form.weight, image, -mu * u - nu * y, -mu * moved, y)
            elif want[0]:
                each = -oval.weight * y * (2 * mu * u + nu * y) * signs(oval.form.weight)
                of_matrix = summed(oval.form.weight, each)
            of_centre: Tensor | None = None
            if want[1]:
                of_centre = summed(oval.form.centre, times(oval.square, mu * u + nu * y))
            of_radius = summed(oval.form.radius, nu * oval.radius) if want[2] else None
            gradients += [of_matrix, of_centre, of_radius]
        return gradients


def ovals_of(form: Met, n: int, batch: Batch) -> Ovals | None:
    """The arrays, None where they are not for compiled code."""
    base = polyhedra_of(form.linear, n, batch) if n <= LARGEST else None
    if base is None:
        return None
    ovals = []
    for oval in form.ovals:
        full = oval.full
        if not batch.fits(oval.weight, 2 if full else 1):
            return None
        if not batch.fits(oval.centre, 1) or not batch.fits(oval.radius, 1):
            return None
        weight = np.abs(_wide(1.0 if full else oval.weight, n))
        matrix = array_of(oval.weight, 2) if full else None
        with np.errstate(all="ignore"):
            diagonal = (weight**2)[:, None, :] * np.eye(n)
            square = diagonal if matrix is None else gram(matrix)
        radius = array_of(oval.radius, 1)
        if not _is_round(square) or not (radius > 0).all():
            return None
        ovals.append(_Arrays(oval, matrix, weight, square, _wide(oval.centre, n), radius))
    return Ovals(base, tuple(ovals))


def _is_round(square: Array) -> bool:
    """Whether all are positive definite by far; NaN, and what is no ellipsoid, is for others."""
    if not np.isfinite(square).all():
        return False
    diagonal = np.diagonal(square, axis1=-2, axis2=-1)
    shift = FLATTEST * diagonal.max(-1)[:, None, None] * np.eye(square.shape[-1])
    try:
        np.linalg.cholesky(square - shift)
    except np.linalg.LinAlgError:
        return False
    return True


def _on(part: _Arrays, x: Array) -> Array:  # (B, n)
    """x − c, brought to the length t that the ellipsoid gives it; 0 at the centre."""
    y = x - part.centre
    length = np.sqrt((y * times(part.square, y)).sum(-1, keepdims=True))
    return np.where(length > 0, y * (part.radius / np.where(length > 0, length, 1.0)), 0.0)


def _matrix(P: Array, n: int) -> Array:
    """P, which may be left out, and its symmetric part."""
    if P.size == 0:
        return np.eye(n)[None]
    return np.ascontiguousarray(0.5 * (P + np.swapaxes(P, -2, -1)))


def _value_and_slope(objective: Arrays, x: Array) -> tuple[Array, Array]:  # (B,), (B, n)
    """f and ∇f: of ½ ‖Ax − b‖² where there are rows of A, otherwise ½ xᵀPx + qᵀx."""
    P, q, A, b = objective
    if b.shape[-1]:
        rest = times(A, x) - b
        return 0.5 * (rest * rest).sum(-1), times(np.swapaxes(A, -2, -1), rest)
    bent = times(P, x)
    return (x * (0.5 * bent + q)).sum(-1), bent + q


def _some(part: Array, index: Array) -> Array:
    return part if len(part) == 1 else part[index]


def _wide(value: Value, n: int) -> Array:
    values = array_of(value, 1)
    return stretched(values, len(values), n)
