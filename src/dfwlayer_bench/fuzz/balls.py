"""Balls of vectors: ℓp, groups, ellipsoids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.base import Design, Excess, SetRow, norm, number, pulled, smooth_norm
from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide

__all__ = ["EllipsoidRow", "GroupRow", "LpRow"]


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

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = self.of(p, "radius")
        return [Excess("norm", norm(self.weights(p) * x, self.p) - t, t)]

    def free(self, g: Array, p: Wide) -> Array | None:
        none: Array = self.weights(p) == 0
        return none if none.any() else None

    def vertex(self, g: Array, p: Wide) -> Array:
        w = self.weights(p)
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

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = self.of(p, "radius")
        return [Excess("norm", (self.weights(p) * self._norms(x)).sum(-1) - t, t)]

    def vertex(self, g: Array, p: Wide) -> Array:
        norms = self._norms(g) / self.weights(p)
        best = norms.argmax(-1)
        s = np.zeros_like(g)
        w = np.broadcast_to(self.weights(p), norms.shape)
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

    def blur(self, x: Array, p: Wide) -> Array:
        # rounding of x along a short axis is made up for by scaling all of x − c
        A, c = self.of(p, "axes"), self.of(p, "centre")
        moved = np.linalg.norm((np.abs(A) @ np.abs(x)[..., None])[..., 0].astype(float), axis=-1)
        size = np.linalg.norm((A @ (x - c)[..., None])[..., 0].astype(float), axis=-1)
        share = (moved / np.where(size > 0, size, 1))[:, None]
        blur: Array = np.abs(c) + share * np.abs(x - c)
        return blur

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
