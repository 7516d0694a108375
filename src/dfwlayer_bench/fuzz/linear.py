"""Sets of linear rows: images of polytopes whose vertices are known, and transport plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.base import Design, Excess
from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide
from dfwlayer_bench.fuzz.polyhedra import FlatRow, most

__all__ = ["PolyhedronRow", "TransportRow"]

UNITS = 16  # sizes of rows are this many times their terms: rows may be missed by 64 units of these


def sheared(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """An integer matrix T (n, n) and its inverse, also of integers: a few rows added to others."""
    T, inverse = np.eye(n), np.eye(n)
    for _ in range(min(n, 4) if n > 1 else 0):
        i, j = rng.choice(n, 2, replace=False)
        sign = float(rng.choice([-1, 1]))
        T[i] += sign * T[j]
        inverse[:, j] -= sign * inverse[:, i]
    return T, inverse


@dataclass(frozen=True)
class PolyhedronRow(FlatRow):
    """{x : Tx ∈ S}, T of integers with an integer inverse, S a box or a simplex, as rows.

    For a box l ≤ y ≤ u the rows are Tx ≤ u and −Tx ≤ −l, for a simplex y ≥ 0, Σ y_i = t they are
    −Tx ≤ 0 and 1ᵀTx = t, for a solid simplex the last is an inequality. So the least ⟨g, x⟩ is that
    of ⟨T⁻ᵀg, y⟩ over S. ``extra`` are rows that hold where the others do: copies, sums of two, and
    zeros; ``bounds`` are entries that are bounds on x instead of rows (T is the identity there).
    """

    base: str = "box"  # or "simplex" or "solid"
    extra: int = 0
    bounded: bool = False

    # T is drawn with the parameters, which carry it: the checks need it, the library does not

    def _rows(self, T: Array, scale: Array) -> tuple[Array, Array]:
        """G (B, m, n) and A (B, k, n), each row times its scale (B, m)."""
        ones = T.sum(-2, keepdims=True)
        if self.base == "box":
            G = np.concatenate([T, -T], -2)
        elif self.base == "solid":
            G = np.concatenate([-T, ones], -2)
        else:
            G = -T
        A = ones if self.base == "simplex" else ones[:, :0]
        return G * scale[..., None], A

    def _limits(self, low: Array, high: Array, scale: Array) -> tuple[Array, Array]:
        """h (B, m) and b (B, k) from l and u of a box, or 0 and t (in every entry) of a simplex."""
        if self.base == "box":
            h = np.concatenate([high, -low], -1)
        elif self.base == "solid":
            h = np.concatenate([0 * low, high[:, :1]], -1)
        else:
            h = 0 * low
        b = high[:, :1] if self.base == "simplex" else high[:, :0]
        return h * scale, b

    def _count(self) -> int:
        return {"box": 2 * self.n, "solid": self.n + 1, "simplex": self.n}[self.base]

    def _params(
        self, rng: np.random.Generator, low: Array, high: Array, extra: int
    ) -> tuple[Params, Array, Array]:
        """Parameters, T and its inverse, (B, n, n)."""
        B = len(low)
        drawn = [sheared(rng, self.n) for _ in range(min(B, 4))]
        which = rng.integers(0, len(drawn), B)
        T, inverse = (np.stack([pair[i] for pair in drawn])[which] for i in (0, 1))
        if self.bounded:
            T = inverse = np.broadcast_to(np.eye(self.n), T.shape).copy()
            return (
                self.named(
                    T=Param(T, True, learned=False),
                    inverse=Param(inverse, True, learned=False),
                    lower=Param(low, True, 1),
                    upper=Param(high, True, 1),
                    A=Param(np.ones((B, 1, self.n)), True),
                    b=Param(0.5 * (low + high).sum(-1, keepdims=True), True, 1),
                ),
                T,
                inverse,
            )
        scale = 2.0 ** rng.integers(-2, 3, (B, self._count()))
        G, A = self._rows(T, scale)
        h, b = self._limits(low, high, scale)
        for _ in range(extra):
            kind = rng.integers(4)
            i, j = rng.integers(0, self._count(), 2)
            if kind == 0:  # a copy, in other units
                row, limit = 2.0 * G[:, i], 2.0 * h[:, i]
            elif kind == 1:  # a consequence of two
                row, limit = G[:, i] + G[:, j], h[:, i] + h[:, j]
            elif kind == 2:  # one that is never reached
                row, limit = G[:, i], h[:, i] + np.abs(high).max(-1) + 1.0
            else:
                row, limit = 0 * G[:, i], np.abs(h[:, i])
            G, h = np.concatenate([G, row[:, None]], 1), np.concatenate([h, limit[:, None]], 1)
        params = {"G": Param(G, True), "h": Param(h, True, 1)}
        if self.base == "simplex":
            params |= {"A": Param(A, True), "b": Param(b, True, 1)}
            if extra:  # an equation that repeats the other
                params["A"] = Param(np.concatenate([A, -2 * A], 1), True)
                params["b"] = Param(np.concatenate([b, -2 * b], 1), True, 1)
        params |= {
            "T": Param(T, True, learned=False),
            "inverse": Param(inverse, True, learned=False),
            "low": Param(low, True, 1, learned=False),
            "high": Param(high, True, 1, learned=False),
        }
        return self.named(**params), T, inverse

    def draw(self, draw: Draw) -> Params:
        rng, shape = draw.rng, (draw.rows, self.n)
        middle = draw.around(self.n)
        reach = np.abs(middle).max(-1, keepdims=True)
        reach = np.where(reach > 0, reach, 1.0)
        share = {"inside": 4.0, "barely": 1.0, "radius 0": 0.0}.get(draw.tight, 0.3)
        # eighths of a power of two: sums and differences without rounding
        unit = 2.0 ** np.round(np.log2(reach)) / 8
        width = unit * rng.integers(1, 9, shape) * share
        low, high = -width, unit * rng.integers(1, 9, shape) * share
        if self.base != "box":
            low, high = 0 * low, np.repeat(high[:, :1], self.n, -1)
        return self._params(rng, low, high, self.extra)[0]

    def code(self) -> str:
        name = self.prefix
        if self.bounded:
            parts = [f"{k}={name}{k}" for k in ("A", "b", "lower", "upper")]
        else:
            parts = [f"{k}={name}{k}" for k in ("G", "h")]
            if self.base == "simplex":
                parts += [f"{k}={name}{k}" for k in ("A", "b")]
        return f"dfw.Polyhedron({', '.join(parts)})"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        found = []
        if self.bounded:
            zero = np.zeros(len(x), np.int64)
            over, under = x - self.of(p, "upper"), self.of(p, "lower") - x
            found += [Excess("upper", most(over), zero), Excess("lower", most(under), zero)]
        else:
            G, h = self.of(p, "G"), self.of(p, "h")
            terms = self._terms(G, h, x)
            by = (G * x[:, None, :]).sum(-1) - h
            found += [Excess(f"row {i}", by[:, i], terms[:, i]) for i in range(h.shape[-1])]
        if self.bounded or self.base == "simplex":
            A, b = self.of(p, "A"), self.of(p, "b")
            terms = self._terms(A, b, x)
            by = np.abs((A * x[:, None, :]).sum(-1) - b)
            found += [Excess(f"equation {i}", by[:, i], terms[:, i]) for i in range(b.shape[-1])]
        return found

    def _terms(self, rows: Array, limits: Array, x: Array) -> Array:
        """What the rounding of a row is relative to: entries of x know that of the largest one."""
        largest = np.abs(x).max(-1)[:, None]
        terms: Array = UNITS * (np.abs(rows).sum(-1) * largest + np.abs(limits))
        return terms

    def _ends(self, p: Wide) -> tuple[Array, Array]:
        names = ("lower", "upper") if self.bounded else ("low", "high")
        return self.of(p, names[0]), self.of(p, names[1])

    def inside(self, p: Wide) -> Array:
        low, high = self._ends(p)
        y = 0.5 * low + 0.5 * high
        if self.base != "box":
            y = np.repeat(high[:, :1] / (self.n + 1 if self.base == "solid" else self.n), self.n, 1)
        inside: Array = (self.of(p, "inverse") * y[:, None, :]).sum(-1)
        return inside

    def vertex(self, g: Array, p: Wide) -> Array:
        low, high = self._ends(p)
        if self.bounded:  # Σ x_i is half of what the bounds allow: the best ones at one end
            order = np.argsort(np.argsort(g, -1, kind="stable"), -1, kind="stable")
            return _level(low, high, order, self.of(p, "b")[:, 0])
        inverse = self.of(p, "inverse")
        c = (inverse * g[:, :, None]).sum(-2)  # T⁻ᵀg
        if self.base == "box":
            y = np.where(c > 0, low, high)
        else:
            best = np.arange(self.n) == c.argmin(-1)[:, None]
            if self.base == "solid":
                best = best & (c < 0)
            y = np.where(best, high[:, :1], LONG(0))
        s: Array = (inverse * y[:, None, :]).sum(-1)
        return s

    def blur(self, x: Array, p: Wide) -> Array:
        """Entries of x may be differences of larger ones of Tx."""
        y = (np.abs(self.of(p, "T")) * np.abs(x)[:, None, :]).sum(-1)
        blur: Array = UNITS * (np.abs(self.of(p, "inverse")) * y[:, None, :]).sum(-1)
        return blur

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        if self.bounded or self.base == "box":
            low, high = -rng.uniform(0.5, 1.5, shape), rng.uniform(0.5, 1.5, shape)
            side = rng.choice([-1, 0, 1], shape) if situation == "active" else np.zeros(shape)
            side[:, 0] = 0
            y = low + (high - low) * rng.uniform(0.2, 0.8, shape)
            y = np.where(side < 0, low, np.where(side > 0, high, y))
            force = side * rng.uniform(0.2, 1.0, shape)
            held = np.concatenate([side > 0, side < 0], -1)
        else:
            pinned = rng.random(shape) < (0.5 if situation == "active" else 0.0)
            pinned[:, 0] = False
            y = np.where(pinned, 0.0, rng.uniform(0.2, 1.0, shape))
            full = np.full((draw.rows, 1), situation == "active" or self.base == "simplex")
            low, high = np.zeros(shape), np.repeat(y.sum(-1, keepdims=True), self.n, -1)
            high = np.where(full, high, 2 * high)
            force = -np.where(pinned, rng.uniform(0.2, 1.0, shape), 0.0)
            force = force + np.where(full, rng.uniform(0.2, 1.0, (draw.rows, 1)), 0.0)
            held = np.concatenate([pinned, full], -1) if self.base == "solid" else pinned
        params, T, inverse = self._params(rng, low, high, 0)
        if self.bounded:
            force = force + rng.standard_normal((draw.rows, 1))
            params[self.prefix + "b"] = Param(y.sum(-1, keepdims=True), True, 1)
        x = (inverse * y[:, None, :]).sum(-1)
        return Design(params, x, (T * force[:, :, None]).sum(-2), {"held": held})

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        held = notes["held"]
        if self.bounded:
            rows = torch.cat([x - self.of(p, "upper"), self.of(p, "lower") - x])
        else:
            rows = self.of(p, "G") @ x - self.of(p, "h")
        if self.bounded or self.base == "simplex":
            plane = self.of(p, "A") @ x - self.of(p, "b")
            rows, held = torch.cat([rows, plane]), torch.cat([held, torch.ones_like(held[:1])])
        return rows, held


def _level(low: Array, high: Array, order: Array, total: Array) -> Array:
    """l ≤ x ≤ u with Σ x_i as given, those first in order raised first; (B, n)."""
    x = low.copy()
    left = total - low.sum(-1)
    rows = np.arange(len(low))
    for k in range(low.shape[-1]):
        i = (order == k).argmax(-1)
        more = np.clip(left, 0, (high - low)[rows, i])
        x[rows, i] += more
        left = left - more
    return x


@lru_cache
def orders(count: int) -> Array:
    """All orders of so many things, (count!, count)."""
    return np.array(list(permutations(range(count))))


@dataclass(frozen=True)
class TransportRow(FlatRow):
    """X ≥ 0 with X1 = r, Xᵀ1 = c in whole units, as a vector row by row.

    With ``rows`` and ``columns`` naming to whom each unit belongs, the vertices are the ways to
    match units: that is how the least ⟨g, X⟩ is found, by trying all.
    """

    rows: tuple[int, ...]  # how many units each row sends
    columns: tuple[int, ...]  # how many each column gets

    def draw(self, draw: Draw) -> Params:
        reach = np.abs(draw.around(self.n)).max(-1)
        unit = 2.0 ** np.round(np.log2(np.where(reach > 0, reach, 1.0)))
        unit = unit * {"inside": 4.0, "radius 0": 0.0}.get(draw.tight, 0.5)
        return self._sums(unit)

    def _sums(self, unit: Array) -> Params:
        return self.named(
            row_sums=Param(unit[:, None] * np.array(self.rows), True, 1),
            column_sums=Param(unit[:, None] * np.array(self.columns), True, 1),
        )

    def code(self) -> str:
        return f"dfw.Transport({self.prefix}row_sums, {self.prefix}column_sums)"

    def _matrix(self, x: Array) -> Array:
        return x.reshape(-1, len(self.rows), len(self.columns))

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        X, r, c = self._matrix(x), self.of(p, "row_sums"), self.of(p, "column_sums")
        total = r.sum(-1)
        return [
            Excess("rows", most(np.abs(X.sum(-1) - r)), total),
            Excess("columns", most(np.abs(X.sum(-2) - c)), total),
            Excess("sign", most(-x), 0 * total),
        ]

    def inside(self, p: Wide) -> Array:
        r, c = self.of(p, "row_sums"), self.of(p, "column_sums")
        total = np.where(r.sum(-1) > 0, r.sum(-1), 1)[:, None, None]
        inside: Array = (r[:, :, None] * c[:, None, :] / total).reshape(len(r), -1)
        return inside

    def vertex(self, g: Array, p: Wide) -> Array:
        sent = np.repeat(np.arange(len(self.rows)), self.rows)
        got = np.repeat(np.arange(len(self.columns)), self.columns)
        place = sent[None, :] * len(self.columns) + got[orders(len(got))]  # (ways, units)
        best = place[g[:, place].sum(-1).argmin(-1)]  # (B, units)
        unit = self.of(p, "row_sums").sum(-1) / len(sent)
        s = np.zeros((len(g), self.n), LONG)
        for k in range(best.shape[-1]):
            s[np.arange(len(g)), best[:, k]] += unit
        return s

    def design(self, draw: Draw, situation: str) -> Design:
        rng, B = draw.rng, draw.rows
        m, k = len(self.rows), len(self.columns)
        pinned = rng.random((B, m, k)) < (0.4 if situation == "active" else 0.0)
        pinned[:, :, 0] = pinned[:, 0, :] = False  # what is left connects all rows and columns
        X = np.where(pinned, 0.0, rng.uniform(0.2, 1.0, (B, m, k)))
        force = rng.standard_normal((B, m, 1)) + rng.standard_normal((B, 1, k))
        force = force - np.where(pinned, rng.uniform(0.2, 1.0, (B, m, k)), 0.0)
        # totals have to agree, so sums cannot be moved by themselves
        params = self.named(
            row_sums=Param(X.sum(-1), True, 1, learned=False),
            column_sums=Param(X.sum(-2), True, 1, learned=False),
        )
        flat = (B, m * k)
        return Design(
            params, X.reshape(flat), force.reshape(flat), {"pinned": pinned.reshape(flat)}
        )

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        X = x.reshape(len(self.rows), len(self.columns))
        sums = torch.cat(
            [X.sum(-1) - self.of(p, "row_sums"), (X.sum(-2) - self.of(p, "column_sums"))[:-1]]
        )
        pinned = notes["pinned"]
        every = torch.ones_like(pinned[:1]).expand(len(sums))
        return torch.cat([x, sums]), torch.cat([pinned, every])
