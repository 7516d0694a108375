"""Sets given by their vertices: doubly stochastic matrices, and hulls of known polytopes."""

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

__all__ = ["BirkhoffRow", "CustomRow"]


@lru_cache
def permutation_matrices(order: int) -> Array:
    """(order!, order²)."""
    return np.array([np.eye(order)[list(each)].ravel() for each in permutations(range(order))])


@dataclass(frozen=True)
class BirkhoffRow(FlatRow):
    """Doubly stochastic matrices of ``order`` rows, as vectors row by row."""

    order: int

    def draw(self, draw: Draw) -> Params:
        return {}

    def code(self) -> str:
        return f"dfw.Birkhoff({self.order})"

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        X = x.reshape(-1, self.order, self.order)
        one = np.ones(len(x), LONG)
        return [
            Excess("rows", most(np.abs(X.sum(-1) - 1)), one),
            Excess("columns", most(np.abs(X.sum(-2) - 1)), one),
            Excess("sign", most(-x), 0 * one),
        ]

    def inside(self, p: Wide) -> Array:
        return np.full((1, self.n), 1 / LONG(self.order))

    def vertex(self, g: Array, p: Wide) -> Array:
        corners = permutation_matrices(self.order).astype(LONG)
        costs = (g[:, None, :] * corners).sum(-1)
        best: Array = corners[costs.argmin(-1)]
        return best

    def design(self, draw: Draw, situation: str) -> Design:
        rng, B, order = draw.rng, draw.rows, self.order
        corners = permutation_matrices(order)
        pick = rng.integers(0, len(corners), (B, 1 if situation == "vertex" else 3))
        share = rng.uniform(0.3, 1.0, pick.shape)
        share /= share.sum(-1, keepdims=True)
        x = (share[..., None] * corners[pick]).sum(1)
        if situation == "inside":
            x = 0.5 * x + 0.5 / order
        pinned = x == 0
        sums = rng.standard_normal((B, order, 1)) + rng.standard_normal((B, 1, order))
        force = sums.reshape(B, -1) - np.where(pinned, rng.uniform(0.2, 1.0, x.shape), 0.0)
        return Design({}, x, force, {"pinned": pinned})

    @property
    def designs(self) -> tuple[str, ...]:
        return ("active", "inside", "vertex")

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        X = x.reshape(self.order, self.order)
        sums = torch.cat([X.sum(-1) - 1, X.sum(-2)[:-1] - 1])
        pinned = notes["pinned"]
        return torch.cat([x, sums]), torch.cat([pinned, torch.ones_like(pinned[: len(sums)])])


@dataclass(frozen=True)
class CustomRow(FlatRow):
    """The hull of the corners of a known polytope: "simplex", "cross" or "cube"."""

    polytope: str = "simplex"
    batched: bool = False

    def _corners(self) -> Array:
        if self.polytope == "cube":
            signs = np.stack(np.meshgrid(*[[-1.0, 1.0]] * self.n, indexing="ij"), -1)
            return signs.reshape(-1, self.n)
        eye = np.eye(self.n)
        return eye if self.polytope == "simplex" else np.concatenate([eye, -eye])

    def draw(self, draw: Draw) -> Params:
        return self.named(corners=Param(self._corners(), False, 1, learned=False))

    def code(self) -> str:
        corners = f"{self.prefix}corners"
        if self.batched:
            return (
                f"dfw.CustomSet(lambda c: {corners}[(c @ {corners}.mT).argmin(-1)], batched=True)"
            )
        return f"dfw.CustomSet(lambda c: {corners}[({corners} @ c).argmin()])"

    def _unit(self, p: Wide) -> Array:
        unit: Array = np.abs(self.of(p, "corners")).max((-1, -2))
        return unit

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        t = np.broadcast_to(self._unit(p), len(x))
        if self.polytope == "cube":
            return [Excess("bound", most(np.abs(x)) - t, t)]
        if self.polytope == "cross":
            return [Excess("norm", np.abs(x).sum(-1) - t, t)]
        return [Excess("sum", np.abs(x.sum(-1) - t), t), Excess("sign", most(-x), 0 * t)]

    def inside(self, p: Wide) -> Array:
        inside: Array = self.of(p, "corners").mean(-2)
        return inside

    def vertex(self, g: Array, p: Wide) -> Array:
        corners = self.of(p, "corners")[0]
        best: Array = corners[(g[:, None, :] * corners).sum(-1).argmin(-1)]
        return best

    @property
    def designs(self) -> tuple[str, ...]:
        return ("active", "inside")

    def design(self, draw: Draw, situation: str) -> Design:
        rng, shape = draw.rng, (draw.rows, self.n)
        params = self.draw(draw)
        sign = rng.choice([-1.0, 1.0], shape)
        pinned = rng.random(shape) < (0.4 if situation == "active" else 0.0)
        held = np.full(draw.rows, situation == "active")
        if self.polytope == "cube":
            x = sign * np.where(pinned, 1.0, rng.uniform(0.1, 0.8, shape))
            force = np.where(pinned, sign * rng.uniform(0.2, 1.0, shape), 0.0)
        else:
            pinned[:, 0] = False
            x = np.where(pinned, 0.0, rng.uniform(0.2, 1.0, shape))
            x /= x.sum(-1, keepdims=True)
            price = rng.uniform(0.2, 1.0, (draw.rows, 1))
            force = price * np.where(pinned, rng.uniform(-0.7, 0.7, shape), 1.0)
            if self.polytope == "cross":
                x, force = sign * x, np.where(pinned, force, sign * force)
                if situation == "inside":
                    x, force = 0.5 * x, 0 * force
            else:
                sign[:], held[:] = 1.0, True
        return Design(params, x, force, {"pinned": pinned, "sign": sign, "held": held})

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        pinned, sign = notes["pinned"], notes["sign"]
        if self.polytope == "cube":
            return x - sign, pinned
        total = ((sign * x).sum(-1) - 1)[None]
        return torch.cat([x, total]), torch.cat([pinned, notes["held"][None]])
