"""Sets made of others: cut by a plane, around a centre, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.base import Design, Excess, SetRow
from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide, wide

__all__ = ["CentreRow", "CutRow", "ProductRow"]


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
        return s

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
