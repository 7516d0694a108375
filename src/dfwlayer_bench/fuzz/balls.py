"""Balls: how they are drawn, and what is true of them, in numpy and apart from the library.

A row of the table of sets knows
- its parameters and the expression that builds it,
- how far a point is outside, as excess beside a size whose last place is the unit,
- the vertex that minimises ⟨g, s⟩,
and, for `dfwlayer_bench.fuzz.gradients`, a point of its own with a force in its normal cone, and
the equations that hold on the face of that point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide

__all__ = [
    "ONE",
    "Design",
    "EllipsoidRow",
    "Excess",
    "GroupRow",
    "LpRow",
    "SchattenRow",
    "SetRow",
    "number",
    "singular_values",
]


ONE = np.ones((1, 1), np.int64)  # of a type that fractions can be multiplied with


class Excess(NamedTuple):
    """By how much a constraint is broken, and the size whose rounding it is compared with."""

    name: str
    by: Array  # (B,), negative where it holds
    size: Array  # (B,)


class Design(NamedTuple):
    """A point of a set, designed, and why it is a solution."""

    params: Params
    x: Array  # (B, n)
    force: Array  # (B, n), in the normal cone at x, with multipliers away from zero
    notes: dict[str, Array]  # (B, ...), which constraints are active


@dataclass(frozen=True)
class SetRow:
    """What every set of the table has; names of parameters begin with ``prefix``."""

    n: int
    prefix: str = field(default="", kw_only=True)

    def named(self, **params: Param) -> Params:
        """Parameters under their full names."""
        return {self.prefix + name: p for name, p in params.items()}

    def of(self, p: Any, name: str) -> Any:
        """The parameter of that name."""
        return p[self.prefix + name]

    def draw(self, draw: Draw) -> Params:
        """Parameters of a batch."""
        raise NotImplementedError

    def code(self) -> str:
        """The expression that builds the set from its parameters."""
        raise NotImplementedError

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        """How far x, (B, n) in long double, is outside."""
        raise NotImplementedError

    def vertex(self, g: Array, p: Wide) -> Array:
        """The s with the least ⟨g, s⟩, (B, n); zero along coordinates without bounds."""
        raise NotImplementedError

    def lowest(self, g: Array, p: Wide) -> Array:
        """A bound from below on ⟨g, s⟩ over the set, (B,)."""
        lowest: Array = (g * self.vertex(g, p)).sum(-1)
        return lowest

    def free(self, p: Wide) -> Array | None:
        """Mask of coordinates without bounds, None if there is none."""
        return None

    def inside(self, p: Wide) -> Array:
        """A point of the set, (B, n)."""
        return np.zeros((1, self.n), LONG)

    @property
    def flat(self) -> bool:
        """Whether the set is a polytope."""
        return False

    @property
    def designs(self) -> tuple[str, ...]:
        """The situations that ``design`` knows."""
        return ("active", "inside")

    def design(self, draw: Draw, situation: str) -> Design:
        """A solution designed backwards."""
        raise NotImplementedError

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        """(equations, mask): what is zero on the face, and which of it counts; one problem."""
        raise NotImplementedError


def number(p: float) -> str:
    """A number as Python writes it."""
    return "float('inf')" if p == math.inf else repr(p)


DIGITS = Context(prec=60, Emin=-999999, Emax=999999)


def exact_norm(size: Array, p: float) -> Array:
    """‖d‖_p of fractions: exact for p = 1 and ∞, otherwise to 60 digits; (B, n) -> (B,)."""
    norms = np.empty(len(size), object)
    for i, row in enumerate(size):
        top = max(row)
        if p == math.inf or top == 0:
            norms[i] = top
        elif p == 1:
            norms[i] = sum(row)
        else:
            total = Decimal(0)
            for entry in row:
                if entry:
                    ratio = DIGITS.divide(
                        entry.numerator * top.denominator, entry.denominator * top.numerator
                    )
                    total = DIGITS.add(total, DIGITS.power(ratio, Decimal(p)))
            norms[i] = top * Fraction(DIGITS.power(total, DIGITS.divide(1, Decimal(p))))
    return norms


def norm(d: Array, p: float) -> Array:
    """‖d‖_p over the last dimension, by ratios to the largest entry."""
    size = np.abs(d)
    if d.dtype == object:
        return exact_norm(size, p)
    top = size.max(-1, keepdims=True)
    if p == math.inf:
        largest: Array = top[..., 0]
        return largest
    ratio = size / np.where(top > 0, top, 1)
    total: Array = top[..., 0] * (ratio ** LONG(p)).sum(-1) ** (1 / LONG(p))
    return total


def pulled(g: Array, p: float) -> Array:
    """The y of norm one in the p-norm with the largest ⟨g, y⟩."""
    size = np.abs(g)
    top = size.max(-1, keepdims=True)
    if p == 1:
        return np.where(np.arange(g.shape[-1]) == size.argmax(-1)[..., None], np.sign(g), 0)
    if p == math.inf:
        return np.sign(g).astype(g.dtype)
    y = (size / np.where(top > 0, top, 1)) ** (1 / (LONG(p) - 1))
    length = norm(y, p)[..., None]
    unit: Array = np.sign(g) * y / np.where(length > 0, length, 1)
    return unit


def smooth_norm(d: Tensor, p: float) -> Tensor:
    """‖d‖_p of a vector without zeros, twice differentiable."""
    return d.abs().pow(p).sum(-1).pow(1 / p)


@dataclass(frozen=True)
class LpRow(SetRow):
    """‖w ∘ x‖_p ≤ t."""

    p: float
    weighted: bool = False
    zeros: bool = False

    def draw(self, draw: Draw) -> Params:
        weight = draw.weights(draw.rows, self.n, zeros=self.zeros and self.n > 1)
        if self.zeros:
            weight[:, 0] = np.where(weight[:, 0] == 0, 1.0, weight[:, 0])
        w = weight if self.weighted else np.ones_like(weight)
        gauge = norm(w * draw.around(self.n), self.p).astype(np.float64)
        params = {"radius": Param(draw.radius(gauge), True, 1)}
        if self.weighted:
            params["weight"] = Param(weight, True)
        return self.named(**params)

    @property
    def flat(self) -> bool:
        return self.p in (1, math.inf)

    def code(self) -> str:
        weight = f", {self.prefix}weight" if self.weighted else ""
        return f"dfw.LpBall({number(self.p)}, {self.prefix}radius{weight})"

    def _weight(self, p: Wide) -> Array:
        return np.abs(self.of(p, "weight")) if self.weighted else ONE

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = self.of(p, "radius")
        return [Excess("norm", norm(self._weight(p) * x, self.p) - t, t)]

    def free(self, p: Wide) -> Array | None:
        none: Array = self._weight(p) == 0
        return none if none.any() else None

    def vertex(self, g: Array, p: Wide) -> Array:
        w = self._weight(p)
        inverse = np.where(w > 0, 1 / np.where(w > 0, w, 1), 0)
        s: Array = -self.of(p, "radius")[:, None] * inverse * pulled(g * inverse, self.p)
        return s

    @property
    def designs(self) -> tuple[str, ...]:
        return ("active", "inside", "tiny") if 1 < self.p < 1.3 else ("active", "inside")

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape, power = draw.rng, (draw.rows, self.n), self.p
        sign = rng.choice([-1.0, 1.0], shape)
        x = sign * rng.uniform(0.2, 1.2, shape)
        w = np.ones(shape)
        if self.weighted:
            w = rng.uniform(0.5, 1.5, shape) * rng.choice([-1.0, 1.0], shape)
        size = np.abs(w)
        pinned = np.zeros(shape, bool)
        if power == 1:
            pinned = rng.random(shape) < 0.4
            pinned[:, -1] = False
            x = np.where(pinned, 0.0, x)
            radius = (size * np.abs(x)).sum(-1)
            slope = size * np.where(pinned, rng.uniform(-0.7, 0.7, shape), np.sign(x))
        elif power == math.inf:
            pinned = rng.random(shape) < 0.5
            pinned[:, -1] = True
            radius = rng.uniform(1.0, 2.0, draw.rows)
            reach = radius[:, None] / size
            x = np.where(pinned, sign * reach, rng.uniform(-0.8, 0.8, shape) * reach)
            slope = np.where(pinned, sign * rng.uniform(0.2, 1.0, shape), 0.0)
        else:
            if situation == "tiny":  # slopes of size one, entries of many sizes
                x = sign * rng.uniform(0.3, 1.0, shape) ** (1 / (power - 1)) / size
            radius = norm(size * x, power).astype(np.float64)
            slope = np.sign(x) * size * (size * np.abs(x) / radius[:, None]) ** (power - 1)
        force = rng.uniform(0.2, 1.0, (draw.rows, 1)) * slope
        if situation == "inside":
            if rng.random() < 0.3:
                x = np.where(rng.random(shape) < 0.3, 0.0, x)
            radius = np.asarray(norm(size * x, power), np.float64) * rng.choice([1.5, 30.0])
            radius = np.where(radius > 0, radius, 1.0)
            force, pinned = np.zeros(shape), np.zeros(shape, bool)
        params = {"radius": Param(radius, True, 1)}
        if self.weighted:
            params["weight"] = Param(w, True)
        notes = {
            "pinned": pinned,
            "sign": np.sign(x),
            "held": np.full(draw.rows, situation != "inside"),
        }
        return Design(self.named(**params), x, force, notes)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        w = self.of(p, "weight").abs() if self.weighted else torch.ones_like(x)
        t, pinned, sign = self.of(p, "radius"), notes["pinned"], notes["sign"]
        if self.p == math.inf:
            return w * x - sign * t, pinned
        if self.p == 1:
            total = (w * sign * x).sum(-1) - t
            return torch.cat([x, total[None]]), torch.cat([pinned, notes["held"][None]])
        # the entries of a solution inside may be zero, where the norm has no second derivative
        d = torch.where(notes["held"], w * x, torch.ones_like(x))
        return (smooth_norm(d, self.p) - t)[None], notes["held"][None]


@dataclass(frozen=True)
class GroupRow(SetRow):
    """Σ_g w_g ‖x_g‖₂ ≤ t."""

    groups: tuple[tuple[int, ...], ...]
    weighted: bool = False

    def draw(self, draw: Draw) -> Params:
        weight = draw.weights(draw.rows, len(self.groups), zeros=False)
        w = np.abs(weight) if self.weighted else np.ones_like(weight)
        gauge = (w * self._norms(draw.around(self.n))).sum(-1).astype(np.float64)
        params = {"radius": Param(draw.radius(gauge), True, 1)}
        if self.weighted:
            params["weight"] = Param(weight, True)
        return self.named(**params)

    def code(self) -> str:
        weight = f", {self.prefix}weight" if self.weighted else ""
        return f"dfw.GroupBall({[list(g) for g in self.groups]}, {self.prefix}radius{weight})"

    def _norms(self, x: Array) -> Array:
        return np.stack([norm(x[:, list(g)], 2) for g in self.groups], -1)

    def _weight(self, p: Wide) -> Array:
        return np.abs(self.of(p, "weight")) if self.weighted else ONE

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = self.of(p, "radius")
        return [Excess("norm", (self._weight(p) * self._norms(x)).sum(-1) - t, t)]

    def vertex(self, g: Array, p: Wide) -> Array:
        norms = self._norms(g) / self._weight(p)
        best = norms.argmax(-1)
        s = np.zeros_like(g)
        w = np.broadcast_to(self._weight(p), norms.shape)
        t = np.broadcast_to(self.of(p, "radius"), best.shape)
        for k, group in enumerate(self.groups):
            part = g[:, list(group)]
            length = norm(part, 2)
            unit = part / np.where(length > 0, length, 1)[:, None]
            s[:, list(group)] = np.where((best == k)[:, None], -(t / w[:, k])[:, None] * unit, 0)
        return s

    def design(self, draw: Draw, situation: str) -> Design:
        rng, B = draw.rng, draw.rows
        w = rng.uniform(0.5, 1.5, (B, len(self.groups)))
        if not self.weighted:
            w[:] = 1.0
        x = rng.standard_normal((B, self.n))
        out = rng.random(w.shape) < 0.4
        out[:, 0] = False
        if situation == "inside":
            out[:] = False
        force, radius = np.zeros_like(x), np.zeros(B)
        for k, group in enumerate(self.groups):
            at = list(group)
            length = np.linalg.norm(x[:, at], axis=-1, keepdims=True)
            x[:, at] *= rng.uniform(0.3, 1.3, (B, 1)) / length  # no group is small by chance
            length = np.linalg.norm(x[:, at], axis=-1, keepdims=True)
            shrink = np.where(out[:, k : k + 1], rng.uniform(0.0, 0.8, (B, 1)), 1.0)
            force[:, at] = shrink * w[:, k : k + 1] * x[:, at] / length
            x[:, at] = np.where(out[:, k : k + 1], 0.0, x[:, at])
            radius += np.where(out[:, k], 0.0, w[:, k] * length[:, 0])
        force *= rng.uniform(0.2, 1.0, (B, 1))
        if situation == "inside":
            radius, force = 2 * radius, 0 * force
        params = {"radius": Param(radius, True, 1)}
        if self.weighted:
            params["weight"] = Param(w * rng.choice([-1.0, 1.0], w.shape), True)
        notes = {"out": out, "held": np.full(B, situation != "inside")}
        return Design(self.named(**params), x, force, notes)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        w = self.of(p, "weight").abs() if self.weighted else torch.ones(len(self.groups)).to(x)
        total = -self.of(p, "radius")
        mask = []
        for k, group in enumerate(self.groups):
            out = notes["out"][k]
            part = x[list(group)]
            part = torch.where(out, torch.ones_like(part), part)
            total = total + torch.where(out, 0.0, w[k] * part.square().sum().sqrt())
            mask += [(i, out) for i in group]
        pinned = torch.stack([out for _, out in sorted(mask, key=lambda pair: pair[0])])
        return torch.cat([x, total[None]]), torch.cat([pinned, notes["held"][None]])


@dataclass(frozen=True)
class EllipsoidRow(SetRow):
    """‖A(x − c)‖₂ ≤ t, where A is called ``axes``: least squares have an A too."""

    m: int
    shared: bool = False

    def draw(self, draw: Draw) -> Params:
        rng = draw.rng
        # of condition below a hundred, but for the scales of its columns
        noise = rng.standard_normal((draw.rows, self.m, self.n)) / self.m**0.5
        A = np.eye(self.m, self.n) + 0.3 * noise
        A *= 10.0 ** rng.integers(-1, 2, self.n)
        if self.shared:
            A = A[:1]
        centre = rng.choice([0.0, 1.0]) * draw.normal(draw.rows, self.n)
        image = (A @ (draw.around(self.n) - centre)[..., None])[..., 0]
        return self.named(
            axes=Param(A[0] if self.shared else A, not self.shared),
            centre=Param(centre, True, 1),
            radius=Param(draw.radius(np.linalg.norm(image, axis=-1)), True, 1),
        )

    def code(self) -> str:
        return f"dfw.Ellipsoid({self.prefix}axes, {self.prefix}centre, {self.prefix}radius)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        A, c, t = self.of(p, "axes"), self.of(p, "centre"), self.of(p, "radius")
        image = norm((A * (x - c)[:, None, :]).sum(-1), 2)
        # x is rounded in units of itself, of which A makes |A||x|
        size = t + norm((np.abs(A) * np.abs(x)[:, None, :]).sum(-1), 2)
        return [Excess("norm", image - t, size)]

    def inside(self, p: Wide) -> Array:
        centre: Array = self.of(p, "centre")
        return centre

    def vertex(self, g: Array, p: Wide) -> Array:
        A = self.of(p, "axes").astype(np.float64)
        unit = np.abs(g).max(-1, keepdims=True)
        unit = np.where(unit > 0, unit, 1)
        _, R = np.linalg.qr(A)
        y = np.linalg.solve(np.swapaxes(R, -1, -2), (g / unit).astype(np.float64)[..., None])
        step = np.linalg.solve(R, y)[..., 0].astype(LONG)
        length = norm((self.of(p, "axes") * step[:, None, :]).sum(-1), 2)[:, None]
        t = self.of(p, "radius")[:, None]
        s: Array = self.of(p, "centre") - t * step / np.where(length > 0, length, 1)
        return s

    def design(self, draw: Draw, situation: str) -> Design:
        rng, B = draw.rng, draw.rows
        A = np.eye(self.m, self.n) + 0.5 / self.m**0.5 * rng.standard_normal(
            (1 if self.shared else B, self.m, self.n)
        )
        centre = rng.standard_normal((B, self.n))
        y = rng.standard_normal((B, self.n))
        if situation == "centre":
            y[:] = 0
        image = (A @ y[..., None])[..., 0]
        t = np.linalg.norm(image, axis=-1)
        force = (np.swapaxes(A, -1, -2) @ image[..., None])[..., 0] / np.where(t > 0, t, 1)[:, None]
        force *= rng.uniform(0.2, 1.0, (B, 1))
        if situation != "active":
            t, force = 2 * t + (t == 0), 0 * force
        params = self.named(
            axes=Param(A[0] if self.shared else A, not self.shared),
            centre=Param(centre, True, 1),
            radius=Param(t, True, 1),
        )
        held = np.full(B, situation == "active")
        return Design(params, centre + y, force, {"held": held})

    @property
    def designs(self) -> tuple[str, ...]:
        return ("active", "inside", "centre")

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        image = self.of(p, "axes") @ (x - self.of(p, "centre"))
        t = self.of(p, "radius")
        return (0.5 * (image @ image - t * t) / t)[None], notes["held"][None]


def singular_values(X: Array) -> Array:
    """(B, r, c) -> (B, min(r, c)), by one-sided Jacobi rotations in the dtype of X."""
    X = X if X.shape[-2] >= X.shape[-1] else np.swapaxes(X, -1, -2)
    unit = np.abs(X).max((-1, -2), keepdims=True)
    unit = np.where(unit > 0, unit, 1)
    U = X / unit
    count = U.shape[-1]
    for _ in range(12):
        largest = 0.0
        for i in range(count - 1):
            for j in range(i + 1, count):
                a, b = U[..., i], U[..., j]
                aa, bb, ab = (a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1)
                size = np.sqrt(aa * bb)
                rotate = np.abs(ab) > 1e-19 * size
                if not rotate.any():
                    continue
                largest = max(largest, float((np.abs(ab) / np.where(size > 0, size, 1)).max()))
                zeta = (bb - aa) / (2 * np.where(rotate, ab, 1))
                sign = np.where(zeta >= 0, 1.0, -1.0)
                tan = sign / (np.abs(zeta) + np.sqrt(1 + zeta * zeta))
                cos = 1 / np.sqrt(1 + tan * tan)
                cos, sin = np.where(rotate, cos, 1), np.where(rotate, cos * tan, 0)
                U[..., i], U[..., j] = (
                    cos[..., None] * a - sin[..., None] * b,
                    sin[..., None] * a + cos[..., None] * b,
                )
        if largest < 1e-18:
            break
    values: Array = np.sqrt((U * U).sum(-2)) * unit[..., 0]
    return values


@dataclass(frozen=True)
class SchattenRow(SetRow):
    """‖σ(X)‖_p ≤ t, X of the given shape, as a vector of its entries row by row."""

    p: float
    shape: tuple[int, int]
    rank: int = 1  # of a designed solution for p = 1

    def draw(self, draw: Draw) -> Params:
        target = draw.around(self.n).reshape(draw.rows, *self.shape)
        gauge = norm(np.linalg.svd(target, compute_uv=False), self.p).astype(np.float64)
        return self.named(radius=Param(draw.radius(gauge), True, 1))

    def code(self) -> str:
        name = {1.0: "NuclearBall(", math.inf: "SpectralBall("}.get(
            self.p, f"SchattenBall({number(self.p)}, "
        )
        return f"dfw.{name}{self.prefix}radius, shape={self.shape})"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        values = singular_values(x.reshape(-1, *self.shape))
        t = self.of(p, "radius")
        return [Excess("norm", norm(values, self.p) - t, t)]

    def vertex(self, g: Array, p: Wide) -> Array:
        unit = np.abs(g).max(-1, keepdims=True)
        unit = np.where(unit > 0, unit, 1)
        G = (g / unit).astype(np.float64).reshape(-1, *self.shape)
        U, sigma, V = np.linalg.svd(G, full_matrices=False)
        y = pulled(sigma.astype(LONG), self.p)
        S = ((U * y[:, None, :]).astype(LONG)[..., None] * V[:, None, :, :]).sum(-2)
        s: Array = -self.of(p, "radius")[:, None] * S.reshape(len(g), self.n)
        return s

    def design(self, draw: Draw, situation: str) -> Design:
        rng, B = draw.rng, draw.rows
        U, _, V = np.linalg.svd(rng.standard_normal((B, *self.shape)))
        k = min(self.shape)
        # apart from each other: the norms are smooth where singular values are distinct
        values = np.sort(rng.uniform(0.8, 1.2, (B, k)) * (1 + np.arange(k)), -1)[:, ::-1].copy()
        if self.p == 1:
            low = np.arange(k) >= (self.rank if situation == "active" else k)
            slope = np.where(low, rng.uniform(0.0, 0.7, (B, k)), 1.0)
            values = np.where(low, 0.0, values)
        elif self.p == math.inf:
            slope = np.zeros((B, k))
            slope[:, 0] = 1.0
            values[:, 0] *= 1.3
        radius = norm(values, self.p).astype(np.float64)
        if 1 < self.p < math.inf:
            slope = (values / radius[:, None]) ** (self.p - 1)
        if situation == "inside":
            radius, slope = 2 * radius, 0 * slope
        slope = slope * rng.uniform(0.2, 1.0, (B, 1))

        def matrix(diagonal: Array) -> Array:
            product: Array = (U[:, :, :k] * diagonal[:, None, :]) @ V[:, :k, :]
            return product.reshape(B, self.n)

        params = self.named(radius=Param(radius, True, 1))
        notes = {
            "U": U,
            "V": np.swapaxes(V, -1, -2),
            "held": np.full(B, situation != "inside"),
        }
        return Design(params, matrix(values), matrix(slope), notes)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        X, t, held = x.reshape(self.shape), self.of(p, "radius"), notes["held"][None]
        if self.p != 1:
            values = torch.linalg.svdvals(X)
            size = values[0] if self.p == math.inf else smooth_norm(values, self.p)
            return (size - t)[None], held
        # near a matrix of rank r: in its singular bases M = UᵀXV, with M₁₁ (r, r) invertible,
        # the rank stays r where M₂₂ = M₂₁ M₁₁⁻¹ M₁₂, and the nuclear norm is that of R M₁₁ Lᵀ
        # with RᵀR = I + KᵀK for K = M₂₁ M₁₁⁻¹, and LᵀL likewise
        r = self.rank
        M = notes["U"].mT @ X @ notes["V"]
        M11, M12, M21, M22 = M[:r, :r], M[:r, r:], M[r:, :r], M[r:, r:]
        left, right = torch.linalg.solve(M11.mT, M21.mT).mT, torch.linalg.solve(M11, M12)
        eye = torch.eye(r).to(x)
        R = torch.linalg.cholesky(eye + left.mT @ left).mT
        L = torch.linalg.cholesky(eye + right @ right.mT)
        size = torch.linalg.svdvals(R @ M11 @ L).sum()
        rest = (M22 - left @ M12).reshape(-1)
        return torch.cat([rest, (size - t)[None]]), held.expand(len(rest) + 1)
