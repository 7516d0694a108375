"""Sets made of others: cut by a plane, around a centre, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.base import Design, Excess, SetRow, norm
from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide, wide
from dfwlayer_bench.fuzz.polyhedra import most

__all__ = ["BallBoxRow", "CentreRow", "CutRow", "ProductRow"]


@dataclass(frozen=True)
class CentreRow(SetRow):
    """{x : x − c ∈ S}."""

    base: SetRow
    argument: bool = False  # whether the set takes the centre itself

    def draw(self, draw: Draw) -> Params:
        own = draw.normal(draw.rows, self.n) * 10.0 ** draw.rng.integers(-1, 3)
        return self.base.draw(draw) | self.named(centre=Param(own, True, 1))

    @property
    def flat(self) -> bool:
        return self.base.flat

    def code(self) -> str:
        if self.argument:
            return f"{self.base.code()[:-1]}, centre={self.prefix}centre)"
        return f"dfw.Shifted({self.base.code()}, {self.prefix}centre)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        c = self.of(p, "centre")
        # x is rounded in units of itself, which the set's own slopes, at most one, pass on
        slope = np.abs(self.base_slope(p))
        size = (slope * np.abs(x)).sum(-1)
        return [e._replace(size=e.size + size) for e in self.base.excess(x - c, p)]

    def base_slope(self, p: Wide) -> Array:
        """How much of a change of x the constraint may see."""
        weight = p.get(self.prefix + "weight")
        one = np.ones((1, 1), np.int64)
        return (
            one if weight is None or weight.shape[-1] != self.n else np.maximum(1, np.abs(weight))
        )

    def free(self, g: Array, p: Wide) -> Array | None:
        return self.base.free(g, p)

    def blur(self, x: Array, p: Wide) -> Array:
        centre: Array = np.abs(self.of(p, "centre"))
        return centre + self.base.blur(x - self.of(p, "centre"), p)

    def inside(self, p: Wide) -> Array:
        inside: Array = self.base.inside(p) + self.of(p, "centre")
        return inside

    def vertex(self, g: Array, p: Wide) -> Array:
        s: Array = self.base.vertex(g, p) + self.of(p, "centre")
        return s

    @property
    def designs(self) -> tuple[str, ...]:
        return self.base.designs

    def design(self, draw: Draw, situation: str) -> Design:
        base = self.base.design(draw, situation)
        centre = draw.rng.standard_normal((draw.rows, self.n))
        params = base.params | self.named(centre=Param(centre, True, 1))
        return base._replace(params=params, x=base.x + centre)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        return self.base.active(x - self.of(p, "centre"), p, notes)


@dataclass(frozen=True)
class CutRow(SetRow):
    """{x ∈ S : ⟨a, x⟩ = b}."""

    base: SetRow
    ones: bool = False

    def draw(self, draw: Draw) -> Params:
        # a base that is one point has no level that survives rounding
        params = self.base.draw(draw if draw.tight == "inside" else replace(draw, tight="binding"))
        normal = np.ones((draw.rows, self.n))
        if not self.ones:
            normal = draw.normal(draw.rows, self.n)
            normal[(normal == normal[:, :1]).all(-1), 0] += 1.0
        # a value between that at a point inside and that at a vertex
        p = wide(params)
        vertex = self.base.vertex(draw.rng.standard_normal((draw.rows, self.n)).astype(LONG), p)
        point = 0.5 * vertex + 0.5 * self.base.inside(p)
        level = (normal * point).sum(-1).astype(np.float64)
        return params | self.named(normal=Param(normal, True), level=Param(level, True, 1))

    @property
    def flat(self) -> bool:
        return self.base.flat

    def code(self) -> str:
        return f"dfw.PlaneCut({self.base.code()}, {self.prefix}normal, {self.prefix}level)"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        a, b = self.of(p, "normal"), self.of(p, "level")
        terms = np.abs(a * x).sum(-1) + np.abs(b)
        plane = Excess("plane", np.abs((a * x).sum(-1) - b), terms)
        return [plane, *self.base.excess(x, p)]

    def exists(self, p: Wide) -> Array:
        """A level that was rounded may be out of reach of a set that is a point along a."""
        a, b = self.of(p, "normal"), self.of(p, "level")
        ends = [(a * self.base.vertex(sign * a, p)).sum(-1) for sign in (1, -1)]
        reached: Array = (ends[0] <= b) & (b <= ends[1])
        return reached

    def blur(self, x: Array, p: Wide) -> Array:
        return self.base.blur(x, p)

    def _searched(self, g: Array, p: Wide) -> tuple[Array, Array, Array]:
        """Vertices on both sides of the plane, and the bound from below; see `lowest`."""
        a, b = self.of(p, "normal"), self.of(p, "level")
        slope = np.where(a == 0, np.inf, np.abs(a)).min(-1, keepdims=True)
        # μ is a difference of entries of g over one of entries of a, which may be close
        reach = 1e9 * np.abs(g).max(-1, keepdims=True) / slope + 1e-300
        low, high = -reach * np.ones_like(g[:, :1]), reach * np.ones_like(g[:, :1])
        for _ in range(120):
            mu = 0.5 * (low + high)
            s = self.base.vertex(g + mu * a, p)
            above = ((a * s).sum(-1) > b)[:, None]
            low, high = np.where(above, mu, low), np.where(above, high, mu)
        below, over = self.base.vertex(g + high * a, p), self.base.vertex(g + low * a, p)
        bound = [
            ((g + mu * a) * s).sum(-1) - mu[:, 0] * b for mu, s in ((high, below), (low, over))
        ]
        return below, over, np.maximum(*bound)

    def lowest(self, g: Array, p: Wide) -> Array:
        """max over μ of the least ⟨g + μa, s⟩ over S, − μb: weak duality, any μ is a bound."""
        return self._searched(g, p)[2]

    def vertex(self, g: Array, p: Wide) -> Array:
        a, b = self.of(p, "normal"), self.of(p, "level")
        below, over, _ = self._searched(g, p)
        at, top = (a * below).sum(-1), (a * over).sum(-1)
        apart = np.where(top != at, top - at, 1)
        share = np.clip(np.where(top != at, (b - at) / apart, 0), 0, 1)[:, None]
        s: Array = (1 - share) * below + share * over
        # what two parts that cancel leave is their rounding, and would beat an exact zero
        size = np.abs(below) + np.abs(over)
        return np.where(np.abs(s) <= 4 * np.finfo(LONG).eps * size, 0, s)

    def inside(self, p: Wide) -> Array:
        return self.vertex(np.zeros((len(self.of(p, "level")), self.n), LONG), p)

    @property
    def designs(self) -> tuple[str, ...]:
        return self.base.designs

    def design(self, draw: Draw, situation: str) -> Design:
        base = self.base.design(draw, situation)
        normal = (
            draw.rng.standard_normal((draw.rows, self.n))
            if not self.ones
            else np.ones(base.x.shape)
        )
        level = (normal * base.x).sum(-1)
        force = base.force + draw.rng.standard_normal((draw.rows, 1)) * normal
        params = base.params | self.named(normal=Param(normal, True), level=Param(level, True, 1))
        return Design(params, base.x, force, base.notes)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        equations, mask = self.base.active(x, p, notes)
        plane = ((self.of(p, "normal") * x).sum(-1) - self.of(p, "level"))[None]
        return torch.cat([equations, plane]), torch.cat([mask, torch.ones_like(mask[:1])])


@dataclass(frozen=True)
class ProductRow(SetRow):
    """The first coordinates in one set, the next ones in another."""

    parts: tuple[SetRow, ...]

    def _spans(self) -> list[slice]:
        ends = np.cumsum([part.n for part in self.parts])
        return [
            slice(int(end - part.n), int(end)) for end, part in zip(ends, self.parts, strict=True)
        ]

    def draw(self, draw: Draw) -> Params:
        params: Params = {}
        target = draw.around(self.n)
        for part, span in zip(self.parts, self._spans(), strict=True):
            params |= part.draw(replace(draw, target=target[:, span]))
        return params

    @property
    def flat(self) -> bool:
        return all(part.flat for part in self.parts)

    def code(self) -> str:
        codes = ", ".join(part.code() for part in self.parts)
        return f"dfw.Product([{codes}], {[part.n for part in self.parts]})"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        return [
            e
            for part, span in zip(self.parts, self._spans(), strict=True)
            for e in part.excess(x[:, span], p)
        ]

    def free(self, g: Array, p: Wide) -> Array | None:
        spans = zip(self.parts, self._spans(), strict=True)
        masks = [part.free(g[:, span], p) for part, span in spans]
        if all(mask is None for mask in masks):
            return None
        rows = max(1 if mask is None else len(mask) for mask in masks)
        full = [
            np.zeros((rows, part.n), bool)
            if mask is None
            else np.broadcast_to(mask, (rows, part.n))
            for mask, part in zip(masks, self.parts, strict=True)
        ]
        return np.concatenate(full, -1)

    def _each(self, values: list[Array]) -> Array:
        rows = max(len(value) for value in values)
        return np.concatenate([np.broadcast_to(v, (rows, v.shape[-1])) for v in values], -1)

    def inside(self, p: Wide) -> Array:
        return self._each([part.inside(p) for part in self.parts])

    def vertex(self, g: Array, p: Wide) -> Array:
        spans = zip(self.parts, self._spans(), strict=True)
        return self._each([part.vertex(g[:, span], p) for part, span in spans])

    def lowest(self, g: Array, p: Wide) -> Array:
        total = np.zeros(len(g), LONG)
        for part, span in zip(self.parts, self._spans(), strict=True):
            total = total + part.lowest(g[:, span], p)
        return total

    def design(self, draw: Draw, situation: str) -> Design:
        made = [part.design(draw, situation) for part in self.parts]
        params: Params = {}
        notes: dict[str, Array] = {}
        for i, each in enumerate(made):
            params |= each.params
            notes |= {f"{i}.{name}": note for name, note in each.notes.items()}
        x, force = (np.concatenate([getattr(m, f) for m in made], -1) for f in ("x", "force"))
        return Design(params, x, force, notes)

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        equations, masks = [], []
        for i, (part, span) in enumerate(zip(self.parts, self._spans(), strict=True)):
            own = {name[len(f"{i}.") :]: n for name, n in notes.items() if name.startswith(f"{i}.")}
            e, m = part.active(x[span], p, own)
            equations.append(e)
            masks.append(m)
        return torch.cat(equations), torch.cat(masks)


@dataclass(frozen=True)
class BallBoxRow(SetRow):
    """{x : ‖x‖₂ ≤ t, l ≤ x ≤ u} with l ≤ 0 ≤ u, as an intersection."""

    def draw(self, draw: Draw) -> Params:
        rng, shape = draw.rng, (draw.rows, self.n)
        target = np.abs(draw.around(self.n))
        radius = draw.radius(np.sqrt((target**2).sum(-1)))
        reach = np.where(target.max(-1, keepdims=True) > 0, target.max(-1, keepdims=True), 1.0)
        lower = -reach * rng.choice([0.0, 0.3, 1.0, 2.0], shape)
        upper = reach * rng.choice([0.3, 1.0, 2.0], shape)
        return self.named(
            radius=Param(radius, True, 1),
            lower=Param(lower, True, 1),
            upper=Param(upper, True, 1),
        )

    def code(self) -> str:
        name = self.prefix
        box = f"dfw.Box({name}lower, {name}upper)"
        return f"dfw.Intersection(dfw.LpBall(2, {name}radius), {box})"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t, zero = self.of(p, "radius"), np.zeros(len(x), LONG)
        # a point of two sets is rounded into one of them at a time
        return [
            Excess("norm", norm(x, 2.0) - t, 16 * t),
            Excess("upper", most(x - self.of(p, "upper")), zero),
            Excess("lower", most(self.of(p, "lower") - x), zero),
        ]

    def vertex(self, g: Array, p: Wide) -> Array:
        """clip(−μg, l, u) with the largest μ that the ball allows."""
        t, lower, upper = (self.of(p, name) for name in ("radius", "lower", "upper"))
        size = np.abs(g).max(-1, keepdims=True)
        unit = g / np.where(size > 0, size, 1)
        least = np.where(unit == 0, np.inf, np.abs(unit)).min(-1, keepdims=True)
        reach = np.maximum(np.abs(lower), np.abs(upper)).max(-1, keepdims=True)
        low, high = 0 * size, 2 * reach / np.where(np.isfinite(least), least, 1)
        s = np.where(size > 0, np.where(g > 0, lower, np.where(g < 0, upper, 0)), 0)
        inside = (norm(s, 2.0) <= t)[:, None]
        for _ in range(160):
            mu = 0.5 * (low + high)
            fits = (norm(np.clip(-mu * unit, lower, upper), 2.0) <= t)[:, None]
            low, high = np.where(fits, mu, low), np.where(fits, high, mu)
        held: Array = np.where(inside, s, np.clip(-low * unit, lower, upper))
        return held

    def lowest(self, g: Array, p: Wide) -> Array:
        """Weak duality, with the multiplier that the vertex has: min ⟨g, s⟩ + μ/2 (‖s‖² − t²)."""
        t, s = self.of(p, "radius"), self.vertex(g, p)
        lower, upper = self.of(p, "lower"), self.of(p, "upper")
        free = (s > lower) & (s < upper) & (s != 0)
        ratio = np.where(free, -g / np.where(free, s, 1), 0).max(-1)
        mu = np.maximum(ratio, 0)[:, None]
        at = np.clip(-g / np.where(mu > 0, mu, 1), lower, upper)
        at = np.where(mu > 0, at, np.where(g > 0, lower, np.where(g < 0, upper, 0)))
        bound: Array = (g * at).sum(-1) + 0.5 * mu[:, 0] * ((at * at).sum(-1) - t * t)
        return bound

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        lower, upper = -rng.uniform(0.5, 1.5, shape), rng.uniform(0.5, 1.5, shape)
        side = rng.choice([-1, 0, 1], shape) if situation == "active" else np.zeros(shape)
        side[:, 0] = 0
        x = lower + (upper - lower) * rng.uniform(0.1, 0.9, shape)
        x = np.where(np.abs(x) < 0.1, 0.2, x)
        x = np.where(side < 0, lower, np.where(side > 0, upper, x))
        held = np.full(draw.rows, situation == "active")
        radius = np.sqrt((x**2).sum(-1)) * np.where(held, 1.0, 1.5)
        price = np.where(held, rng.uniform(0.2, 1.0, draw.rows), 0.0)
        force = price[:, None] * x + side * rng.uniform(0.2, 1.0, shape)
        params = self.named(
            radius=Param(radius, True, 1),
            lower=Param(lower, True, 1),
            upper=Param(upper, True, 1),
        )
        return Design(params, x, force, {"low": side < 0, "high": side > 0, "held": held})

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        low, high = notes["low"], notes["high"]
        bound = torch.where(high, self.of(p, "upper"), self.of(p, "lower"))
        pinned = x - torch.where(low | high, bound, torch.zeros_like(x))
        ball = 0.5 * ((x * x).sum(-1) - self.of(p, "radius") ** 2)[None]
        return torch.cat([pinned, ball]), torch.cat([low | high, notes["held"][None]])
