"""Sets with flat sides: how they are drawn, and what is true of them, apart from the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.base import ONE, Design, Excess, SetRow
from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide

__all__ = ["BoxRow", "CappedRow", "FlatRow", "KSparseRow", "L1BoxRow", "SimplexRow", "most"]


def most(x: Array) -> Array:
    """The largest entry, (B,)."""
    largest: Array = x.max(-1)
    return largest


@dataclass(frozen=True)
class FlatRow(SetRow):
    """A polytope."""

    @property
    def flat(self) -> bool:
        return True


@dataclass(frozen=True)
class BoxRow(FlatRow):
    """l ≤ x ≤ u; ``form`` is plain, degenerate (l = u), wide (±1e8), infinite or half open."""

    form: str = "plain"

    def draw(self, draw: Draw) -> Params:
        rng, shape = draw.rng, (draw.rows, self.n)
        middle = draw.around(self.n)
        width = np.abs(middle) + draw.positive(*shape)
        if draw.tight == "inside":
            lower, upper = middle - width, middle + width
        elif draw.tight == "barely":
            lower, upper = middle - width, middle + rng.choice([-1e-6, 0.0, 1e-6], shape)
        elif draw.tight == "radius 0":
            lower = upper = draw.normal(*shape)
        else:
            centre = 0.3 * middle if draw.tight == "binding" else 0 * middle
            size = 0.3 * width if draw.tight == "binding" else 1e-4 * width
            lower, upper = centre - size, centre + size * rng.uniform(0.2, 1.0, shape)
        lower, upper = np.minimum(lower, upper), np.maximum(lower, upper)
        chosen = rng.random(shape) < 0.4
        if self.form == "degenerate":
            upper = np.where(chosen, lower, upper)
        elif self.form == "wide":
            lower, upper = np.where(chosen, -1e8, lower), np.where(chosen, 1e8, upper)
        elif self.form == "infinite":
            lower, upper = np.where(chosen, -np.inf, lower), np.where(chosen, np.inf, upper)
        elif self.form == "half open":
            lower = np.where(chosen, -np.inf, lower)
            upper = np.where(rng.random(shape) < 0.4, np.inf, upper)
        return self.named(lower=Param(lower, True, 1), upper=Param(upper, True, 1))

    def code(self) -> str:
        return f"dfw.Box({self.prefix}lower, {self.prefix}upper)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        over, under = x - self.of(p, "upper"), self.of(p, "lower") - x
        zero = np.zeros(len(x), LONG)  # bounds hold exactly
        return [Excess("upper", most(over), zero), Excess("lower", most(under), zero)]

    def free(self, g: Array, p: Wide) -> Array | None:
        down, up = np.isinf(self.of(p, "lower")), np.isinf(self.of(p, "upper"))
        if not (down | up).any():
            return None
        open_ended: Array = (down & up) | (down & (g > 0)) | (up & (g < 0))
        return open_ended

    def inside(self, p: Wide) -> Array:
        lower, upper = self.of(p, "lower"), self.of(p, "upper")
        middle = np.where(self._two(p), 0.5 * lower + 0.5 * upper, np.clip(LONG(0), lower, upper))
        found: Array = middle
        return found

    def _two(self, p: Wide) -> Array:
        """Coordinates with two bounds."""
        found: Array = ~(np.isinf(self.of(p, "lower")) | np.isinf(self.of(p, "upper")))
        return found

    def vertex(self, g: Array, p: Wide) -> Array:
        s = np.where(g > 0, self.of(p, "lower"), self.of(p, "upper"))
        return np.where(np.isinf(s), 0, s)

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        lower = -rng.uniform(0.5, 1.5, shape)
        upper = rng.uniform(0.5, 1.5, shape)
        x = lower + (upper - lower) * rng.uniform(0.2, 0.8, shape)
        side = rng.choice([-1, 0, 1], shape)
        if situation != "active":
            side[:] = 0
        x = np.where(side < 0, lower, np.where(side > 0, upper, x))
        force = side * rng.uniform(0.2, 1.0, shape)
        if situation == "wide":
            lower, upper = np.full(shape, -1e8), np.full(shape, 1e8)
        if self.form == "infinite":
            lower, upper = np.where(side == 0, -np.inf, lower), np.where(side == 0, np.inf, upper)
        elif self.form == "half open":
            lower = np.where((side >= 0) & (rng.random(shape) < 0.5), -np.inf, lower)
            upper = np.where((side <= 0) & (rng.random(shape) < 0.5), np.inf, upper)
        params = self.named(lower=Param(lower, True, 1), upper=Param(upper, True, 1))
        return Design(params, x, force, {"low": side < 0, "high": side > 0})

    @property
    def designs(self) -> tuple[str, ...]:
        return ("active", "inside", "wide")

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        low, high = notes["low"], notes["high"]
        bound = torch.where(high, self.of(p, "upper"), self.of(p, "lower"))
        return x - torch.where(low | high, bound, torch.zeros_like(x)), low | high


@dataclass(frozen=True)
class SimplexRow(FlatRow):
    """x ≥ 0, Σ x_i = t."""

    def draw(self, draw: Draw) -> Params:
        gauge = np.maximum(draw.around(self.n), 0).sum(-1)
        return self.named(radius=Param(draw.radius(gauge), True, 1))

    def code(self) -> str:
        return f"dfw.Simplex({self.prefix}radius)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = self.of(p, "radius")
        zero = np.zeros(len(x), LONG)
        return [Excess("sum", np.abs(x.sum(-1) - t), t), Excess("sign", most(-x), zero)]

    def inside(self, p: Wide) -> Array:
        return np.repeat(self.of(p, "radius")[:, None] / self.n, self.n, -1)

    def vertex(self, g: Array, p: Wide) -> Array:
        best = np.arange(self.n) == g.argmin(-1)[:, None]
        return np.where(best, self.of(p, "radius")[:, None], LONG(0))

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        pinned = rng.random(shape) < (0.0 if situation == "inside" else 0.5)
        pinned[:, 0] = False
        x = np.where(pinned, 0.0, rng.uniform(0.2, 1.0, shape))
        force = rng.standard_normal((draw.rows, 1)) - np.where(
            pinned, rng.uniform(0.2, 1.0, shape), 0
        )
        params = self.named(radius=Param(x.sum(-1), True, 1))
        return Design(params, x, force, {"pinned": pinned})

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        total = (x.sum(-1) - self.of(p, "radius"))[None]
        pinned = notes["pinned"]
        return torch.cat([x, total]), torch.cat([pinned, torch.ones_like(pinned[:1])])


def spent(g: Array, price: Array, most_each: Array, budget: Array) -> Array:
    """How much of each to take where the total price is a budget, best value of g first.

    g ≥ 0 is what a unit of x gains; 0 ≤ x ≤ most_each, Σ price x ≤ budget; (B, n) and (B,).
    """
    shape = g.shape
    price, most_each = np.broadcast_to(price, shape), np.broadcast_to(most_each, shape)
    rate = np.where(price > 0, g / np.where(price > 0, price, 1), np.inf)
    order = np.argsort(-rate, -1, kind="stable")
    left = np.broadcast_to(budget, shape[:1]).astype(LONG).copy()
    x = np.zeros(shape, LONG)
    rows = np.arange(shape[0])
    for k in range(shape[1]):
        i = order[:, k]
        cost, cap = price[rows, i], most_each[rows, i]
        take = np.where(cost > 0, np.minimum(cap, left / np.where(cost > 0, cost, 1)), cap)
        x[rows, i] = take
        left = np.maximum(left - cost * take, 0)
    return x


@dataclass(frozen=True)
class CappedRow(FlatRow):
    """0 ≤ x ≤ c, Σ x_i = t."""

    def draw(self, draw: Draw) -> Params:
        rng, shape = draw.rng, (draw.rows, self.n)
        cap = rng.integers(1, 9, shape) / 8  # sums without rounding
        total = cap.sum(-1)
        share = {"inside": 0.3, "barely": 1.0, "binding": 0.6, "radius 0": 0.0}.get(draw.tight, 0.9)
        return self.named(
            radius=Param(np.where(rng.random(draw.rows) < 0.8, share * total, total), True, 1),
            cap=Param(cap * 1.0, True, 1),
        )

    def code(self) -> str:
        return f"dfw.CappedSimplex({self.prefix}radius, {self.prefix}cap)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = self.of(p, "radius")
        zero = np.zeros(len(x), LONG)
        return [
            Excess("sum", np.abs(x.sum(-1) - t), t),
            Excess("sign", most(-x), zero),
            Excess("cap", most(x - self.of(p, "cap")), zero),
        ]

    def inside(self, p: Wide) -> Array:
        cap = self.of(p, "cap")
        total = cap.sum(-1, keepdims=True)
        y: Array = cap * self.of(p, "radius")[:, None] / np.where(total > 0, total, 1)
        return y

    def vertex(self, g: Array, p: Wide) -> Array:
        gain = most(g)[:, None] - g  # the sum is given, so that a constant changes nothing
        return spent(gain, ONE, self.of(p, "cap"), self.of(p, "radius"))

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        cap = rng.uniform(0.5, 1.5, shape)
        side = rng.choice([-1, 0, 1], shape) if situation == "active" else np.zeros(shape)
        side[:, 0] = 0
        x = np.where(side < 0, 0.0, np.where(side > 0, cap, cap * rng.uniform(0.2, 0.8, shape)))
        force = rng.standard_normal((draw.rows, 1)) + side * rng.uniform(0.2, 1.0, shape)
        params = self.named(radius=Param(x.sum(-1), True, 1), cap=Param(cap, True, 1))
        return Design(params, x, force, {"low": side < 0, "high": side > 0})

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        low, high = notes["low"], notes["high"]
        total = (x.sum(-1) - self.of(p, "radius"))[None]
        bound = torch.where(high, self.of(p, "cap"), torch.zeros_like(x))
        return torch.cat([x - bound, total]), torch.cat([low | high, torch.ones_like(low[:1])])


@dataclass(frozen=True)
class L1BoxRow(FlatRow):
    """Σ w_i |x_i| ≤ t, l ≤ x ≤ u with l ≤ 0 ≤ u."""

    weighted: bool = True
    zeros: bool = False

    def draw(self, draw: Draw) -> Params:
        rng, shape = draw.rng, (draw.rows, self.n)
        weight = draw.weights(*shape, zeros=self.zeros)
        target = np.abs(draw.around(self.n))
        w = np.abs(weight) if self.weighted else np.ones(shape)
        radius = draw.radius((w * target).sum(-1))
        reach = np.where(target.max(-1, keepdims=True) > 0, target.max(-1, keepdims=True), 1.0)
        lower = -reach * rng.choice([0.0, 0.3, 1.0, 2.0], shape)
        upper = reach * rng.choice([0.0, 0.3, 1.0, 2.0], shape)
        params = {
            "radius": Param(radius, True, 1),
            "lower": Param(lower, True, 1),
            "upper": Param(upper, True, 1),
        }
        if self.weighted:
            params["weight"] = Param(weight, True)
        return self.named(**params)

    def code(self) -> str:
        name = self.prefix
        weight = f"{name}weight" if self.weighted else "None"
        return f"dfw.L1Box({name}radius, {weight}, {name}lower, {name}upper)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = self.of(p, "radius")
        zero = np.zeros(len(x), LONG)
        return [
            Excess("norm", (self.weights(p) * np.abs(x)).sum(-1) - t, t),
            Excess("upper", most(x - self.of(p, "upper")), zero),
            Excess("lower", most(self.of(p, "lower") - x), zero),
        ]

    def vertex(self, g: Array, p: Wide) -> Array:
        reach = np.where(g > 0, -self.of(p, "lower"), self.of(p, "upper"))
        return -np.sign(g) * spent(np.abs(g), self.weights(p), reach, self.of(p, "radius"))

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        w = rng.uniform(0.5, 1.5, shape) if self.weighted else np.ones(shape)
        lower, upper = -rng.uniform(0.5, 1.5, shape), rng.uniform(0.5, 1.5, shape)
        sign = rng.choice([-1.0, 1.0], shape)
        reach = np.where(sign > 0, upper, -lower)
        place = rng.choice(3, shape)  # at zero, inside, at the bound
        place[:, 0] = 1
        held = situation == "active"
        price = rng.uniform(0.2, 1.0, (draw.rows, 1)) if held else np.zeros((draw.rows, 1))
        x = np.where(place == 0, 0.0, np.where(place == 1, rng.uniform(0.2, 0.8, shape), 1.0))
        x = x * sign * reach
        force = price * w * np.where(place == 0, rng.uniform(-0.8, 0.8, shape), sign)
        force = force + np.where(place == 2, sign * rng.uniform(0.2, 1.0, shape), 0.0)
        radius = (w * np.abs(x)).sum(-1) * (1.0 if held else 1.5)
        params = {
            "radius": Param(radius, True, 1),
            "lower": Param(lower, True, 1),
            "upper": Param(upper, True, 1),
        }
        if self.weighted:
            params["weight"] = Param(w * rng.choice([-1.0, 1.0], shape), True)
        notes = {
            "zero": (place == 0) & held,
            "bound": place == 2,
            "sign": sign,
            "held": np.full(draw.rows, held),
        }
        return Design(self.named(**params), x, force, notes)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        w = self.of(p, "weight").abs() if self.weighted else torch.ones_like(x)
        sign, zero, bound = notes["sign"], notes["zero"], notes["bound"]
        total = ((w * sign * x).sum(-1) - self.of(p, "radius"))[None]
        at = torch.where(sign > 0, self.of(p, "upper"), self.of(p, "lower"))
        pinned = x - torch.where(bound, at, torch.zeros_like(x))
        return torch.cat([pinned, total]), torch.cat([zero | bound, notes["held"][None]])


@dataclass(frozen=True)
class KSparseRow(FlatRow):
    """‖x‖₁ ≤ k·t, ‖x‖∞ ≤ t."""

    def draw(self, draw: Draw) -> Params:
        rng = draw.rng
        gauge = np.abs(draw.around(self.n)).max(-1)
        k = rng.integers(1, self.n + 1, draw.rows) + rng.choice([0.0, 0.5], draw.rows)
        return self.named(k=Param(k, True), radius=Param(draw.radius(gauge), True, 1))

    def code(self) -> str:
        return f"dfw.KSparse({self.prefix}k, {self.prefix}radius)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t, k = self.of(p, "radius"), self.of(p, "k")
        size = np.abs(x)
        return [
            Excess("norm", size.sum(-1) - k * t, k * t),
            Excess("bound", most(size) - t, np.zeros(len(x), LONG)),
        ]

    def vertex(self, g: Array, p: Wide) -> Array:
        t, k = self.of(p, "radius"), self.of(p, "k")
        return -np.sign(g) * spent(np.abs(g), ONE, t[:, None], k * t)

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        radius = rng.uniform(0.5, 1.5, draw.rows)
        sign = rng.choice([-1.0, 1.0], shape)
        place = rng.choice(3, shape)
        place[:, 0] = 1
        if self.n > 1:
            place[:, 1] = 2  # so that k ≥ 1
        held = situation == "active"
        price = rng.uniform(0.2, 1.0, (draw.rows, 1)) if held else np.zeros((draw.rows, 1))
        part = np.where(place == 0, 0.0, np.where(place == 1, rng.uniform(0.2, 0.8, shape), 1.0))
        x = part * sign * radius[:, None]
        force = price * np.where(place == 0, rng.uniform(-0.8, 0.8, shape), sign)
        force = force + np.where(place == 2, sign * rng.uniform(0.2, 1.0, shape), 0.0)
        k = part.sum(-1) * (1.0 if held else 1.5)
        slack = k < 1
        k = np.maximum(k, 1.0 + slack)
        notes = {
            "zero": (place == 0) & held & ~slack[:, None],
            "bound": place == 2,
            "sign": sign,
            "held": held & ~slack,
        }
        if slack.any():
            force = np.where(slack[:, None], 0.0, force)
        params = self.named(k=Param(k, True), radius=Param(radius, True, 1))
        return Design(params, x, force, notes)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        sign, zero, bound = notes["sign"], notes["zero"], notes["bound"]
        t = self.of(p, "radius")
        total = ((sign * x).sum(-1) - self.of(p, "k") * t)[None]
        pinned = x - torch.where(bound, sign * t, torch.zeros_like(x))
        return torch.cat([pinned, total]), torch.cat([zero | bound, notes["held"][None]])
