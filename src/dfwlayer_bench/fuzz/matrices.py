"""Balls of matrices: the nuclear, the spectral and the other Schatten norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.fuzz.base import Design, Excess, SetRow, norm, number, pulled, smooth_norm
from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide

__all__ = ["SchattenRow", "SpectraplexRow", "singular_values"]


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


@dataclass(frozen=True)
class SpectraplexRow(SetRow):
    """X positive semidefinite with trace t, as a vector of its entries row by row."""

    order: int
    rank: int = 1  # of a designed solution

    def draw(self, draw: Draw) -> Params:
        target = draw.around(self.n).reshape(draw.rows, self.order, self.order)
        values = np.linalg.eigvalsh(0.5 * (target + np.swapaxes(target, -1, -2)))
        return self.named(trace=Param(draw.radius(np.maximum(values, 0).sum(-1)), True, 1))

    def code(self) -> str:
        return f"dfw.Spectraplex({self.prefix}trace)"

    def _square(self, x: Array) -> Array:
        return x.reshape(-1, self.order, self.order)

    def excess(self, x: Array, p: Wide) -> list[Excess]:
        X, t = self._square(x), self.of(p, "trace")
        found = [
            Excess("trace", np.abs(np.trace(X, axis1=-2, axis2=-1) - t), t),
            Excess("symmetry", np.abs(X - np.swapaxes(X, -1, -2)).max((-1, -2)), 0 * t),
        ]
        if x.dtype != object:  # eigenvalues have no fractions
            unit = np.where(t > 0, t, 1)[:, None, None]
            values = np.linalg.eigvalsh((X / unit).astype(np.float64)).min(-1)
            # those of a rounded matrix are off by its size times its order
            found.append(Excess("eigenvalue", -values * unit[:, 0, 0], 8 * self.order * t))
        return found

    def inside(self, p: Wide) -> Array:
        eye = np.eye(self.order, dtype=LONG).reshape(1, -1)
        inside: Array = self.of(p, "trace")[:, None] * eye / self.order
        return inside

    def vertex(self, g: Array, p: Wide) -> Array:
        unit = np.abs(g).max(-1, keepdims=True)
        G = self._square((g / np.where(unit > 0, unit, 1)).astype(np.float64))
        v = np.linalg.eigh(0.5 * (G + np.swapaxes(G, -1, -2)))[1][..., 0].astype(LONG)
        v = v / np.sqrt((v * v).sum(-1, keepdims=True))
        s: Array = self.of(p, "trace")[:, None] * (v[:, :, None] * v[:, None, :]).reshape(
            len(g), -1
        )
        return s

    def design(self, draw: Draw, situation: str) -> Design:
        rng, B, k = draw.rng, draw.rows, self.order
        U = np.linalg.qr(rng.standard_normal((B, k, k)))[0]
        low = np.arange(k) >= (self.rank if situation == "active" else k)
        values = np.where(low, 0.0, rng.uniform(0.5, 1.5, (B, k)))
        force = np.where(low, -rng.uniform(0.2, 1.0, (B, k)), 0.0) + rng.standard_normal((B, 1))

        def matrix(diagonal: Array) -> Array:
            product: Array = (U * diagonal[:, None, :]) @ np.swapaxes(U, -1, -2)
            return product.reshape(B, -1)

        params = self.named(trace=Param(values.sum(-1), True, 1))
        rank = np.full(B, self.rank if situation == "active" else k)
        return Design(params, matrix(values), matrix(force), {"U": U, "rank": rank})

    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        X = x.reshape(self.order, self.order)
        M = notes["U"].mT @ X @ notes["U"]
        level = (torch.trace(X) - self.of(p, "trace"))[None]
        skew = (X - X.mT)[*torch.triu_indices(self.order, self.order, 1)]
        r = self.rank
        # near a matrix of rank r the rank stays r where M₂₂ = M₂₁ M₁₁⁻¹ M₁₂
        rest = M[r:, r:] - M[r:, :r] @ torch.linalg.solve(M[:r, :r], M[:r, r:])
        rest = rest[*torch.triu_indices(*rest.shape)]
        low = (notes["rank"] < self.order).expand(len(rest))
        every = torch.ones_like(notes["rank"], dtype=torch.bool)[None]
        return (
            torch.cat([level, skew, rest]),
            torch.cat([every, every.expand(len(skew)), low]),
        )
