"""The ellipsoid ‖A(x − c)‖₂ ≤ t."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dfwlayer.arguments import check_tensor
from dfwlayer.constraints.balls.ball import Ball
from dfwlayer.constraints.balls.lp_projection import project_lp
from dfwlayer.constraints.base import Constraint, Face, measured
from dfwlayer.constraints.parameters import as_column, fault, matrix, number
from dfwlayer.constraints.plain import Plain, PlainEllipsoid
from dfwlayer.constraints.region import Oval
from dfwlayer.constraints.retraction import scaled_into
from dfwlayer.ops.matrices import times
from dfwlayer.ops.rows import dot, norm, or_one
from dfwlayer.ops.scale import TINY, Scale
from dfwlayer.ops.values import Value, tensor_of, total
from dfwlayer.solution import Status

__all__ = ["Ellipsoid"]

SECULAR = 60  # Newton steps for a multiplier, each twice as exact at the end


@dataclass(frozen=True)
class Ellipsoid(Ball):
    """{x : ‖A(x − c)‖₂ ≤ t}.

    For a confidence region with covariance Σ = LLᵀ take A = L⁻¹ (or any A with AᵀA = Σ⁻¹).

    Args:
        A: (m, n) with m ≥ n and full column rank, shared, or (B, m, n), one per problem. For a
            variable of another shape n counts its entries, row by row.
        centre: c, of the variable's shape, with or without a batch, a number, or None for zero.
            With it the set is a `Shifted` ellipsoid.
        radius: t ≥ 0, a number, a 0-d tensor or (B,).

    """

    A: Tensor = field(metadata=matrix())
    centre: InitVar[float | Tensor | None] = None
    radius: float | Tensor = field(default=1.0, metadata=number(least=0, grows=True))

    def __new__(
        cls,
        A: Any = None,  # copies are made without arguments
        centre: Value | None = None,
        radius: Value = 1.0,
    ) -> Self:
        """The ellipsoid, or one around a centre."""
        return super().__new__(cls, A, radius=radius, centre=centre)

    def __post_init__(self, centre: Value | None) -> None:
        A = self.A
        check_tensor("A", A)
        if A.dim() < 2 or not A.shape[-2] >= A.shape[-1] >= 1:
            raise ValueError(
                f"A: expected shape (m, n) or (*batch, m, n) with m ≥ n ≥ 1, got {tuple(A.shape)}"
            )
        super().__post_init__()

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Check A against the variable."""
        n = math.prod(shape)
        if self.A.shape[-1] != n:
            raise ValueError(
                f"A: expected {n} columns, as the variable has shape {shape}, got shape "
                f"{tuple(self.A.shape)}"
            )
        return super().bind(shape, dtype, device)

    def is_plain(self, like: Tensor) -> bool:
        """And that A has as many columns as the variable has entries."""
        return super().is_plain(like) and self.A.shape[-1] == like.shape[-1]

    def normal_form(self, n: int) -> Sequence[Oval]:
        """The same as it was given."""
        return (Oval(n, self.A, 0.0, total(self.radius), full=True),)

    def check_values(self) -> Tensor | None:
        """An A of full rank."""
        scale = self._axes.scale
        limit = 8 * scale.shape[-1] * torch.finfo(scale.dtype).eps
        ratio = scale[..., -1] / scale[..., 0]
        return fault(
            ~(ratio > limit),
            Status.INVALID,
            lambda: (
                "A: expected full column rank, so that the set is bounded, found a smallest "
                f"singular value of {float(ratio):.1g} times the largest; leave out the directions "
                "that A does not see, or add rows that bound them"
            ),
        )

    def vertex(self, g: Tensor) -> Tensor:
        """−t (AᵀA)⁻¹g / ‖A⁻ᵀg‖, by the triangular factor of A."""
        triangle = self._axes.triangle
        y = _solve(triangle.mT, g, upper=False)
        size = norm(y).unsqueeze(-1)
        some = size > 0
        unit = torch.where(some, y / torch.where(some, size, 1), 0)
        return -as_column(self.radius, g) * _solve(triangle, unit, upper=True)

    def lowest(self, g: Tensor) -> Tensor:
        """−t ‖A⁻ᵀg‖₂."""
        return -tensor_of(self.radius) * norm(_solve(self._axes.triangle.mT, g, upper=False))

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """The vertex, which is smooth in g by itself."""
        return self.vertex(g)

    def retract(self, x: Tensor) -> Tensor:
        """x, scaled back where it is outside."""
        # an x rounded along a short axis may be outside again; the last room is enough for that
        size, radius = self.size(x.detach()), tensor_of(self.radius)
        loss = norm(times(self.A.detach().double().abs(), x.detach().double().abs()))
        worst = 4 + 2 * loss / or_one(size)
        x = scaled_into(x, size, radius)
        for units in (8.0, worst):
            x = scaled_into(x, self.size(x.detach()), radius, units=units)
        return x

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """By the secular equation along the principal axes."""
        axes = self._axes
        y = (z.unsqueeze(-2) @ axes.right).squeeze(-2)
        radius = tensor_of(self.radius).detach().expand(z.shape[:-1])
        moved = project_lp(2.0, axes.scale.expand_as(y), radius, y)
        x = (moved.unsqueeze(-2) @ axes.right.mT).squeeze(-2)
        return torch.where((moved == y).all(-1, keepdim=True), z, x)

    def diameter(self, n: int) -> Tensor:
        """2t over the least singular value."""
        return 2 * tensor_of(self.radius) / self._axes.scale[..., -1]

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> EllipsoidFace:
        """All directions but the normal, where ‖Ax‖ = t and x is pushed outwards.

        See `dfwlayer.ops.scale`.
        """
        finfo = torch.finfo(x.dtype)
        A, radius = self.A.detach(), tensor_of(self.radius).detach()
        image = times(A, x)
        size = norm(image)
        some = size > 0
        length = torch.where(some, size, 1)
        multiplier = -dot(g, x) / length
        if scale is None:
            # what rounding of x does to ‖Ax‖
            loss = self._axes.scale[..., 0] * norm(x)
            tight = radius - size <= 8 * finfo.eps * (x.shape[-1] ** 0.5 * radius + loss)
        else:
            normal = times(A.mT, image / length.unsqueeze(-1))
            gauge = x / length.unsqueeze(-1)
            slack = (radius - size).unsqueeze(-1)
            tight = scale.felt(multiplier.unsqueeze(-1), slack, normal, gauge).squeeze(-1)
        active = tight & (multiplier > 0) & some
        free = (radius > 0).unsqueeze(-1).expand_as(x)
        multiplier = torch.where(active & (radius > 0), multiplier, 0)
        return EllipsoidFace(self.A, tensor_of(self.radius), x, free, multiplier.unsqueeze(-1))

    def minimiser(self) -> Callable[[Tensor, Tensor], Tensor]:
        """By the secular equation."""
        return self._least

    def _least(self, H: Tensor, q: Tensor) -> Tensor:
        """The minimiser of ½⟨x, Hx⟩ + ⟨q, x⟩ with ‖Ax‖ ≤ t, in double precision.

        With A = QR, y = Rx and R⁻ᵀHR⁻¹ = V diag(h) Vᵀ it is Vᵀy = −p/(h + μ), p = VᵀR⁻ᵀq. μ is 0,
        or where ‖y‖ would be more than t then, the one with ‖y‖ = t: Newton's method for
        1/‖y‖ = 1/t comes to it from below, without ever passing it.
        """
        triangle = torch.linalg.qr(self.A.detach().double(), mode="r").R
        radius = tensor_of(self.radius).detach().double().reshape(-1, 1).to(triangle.device)
        bound = radius.clamp_min(TINY)

        def divided(v: Tensor) -> Tensor:
            """R⁻ᵀ v."""
            out: Tensor = torch.linalg.solve_triangular(triangle.mT, v, upper=False)
            return out

        h, V = torch.linalg.eigh(_even(divided(divided(H).mT)))
        h = h.clamp_min(0)
        p = (V.mT @ divided(q.unsqueeze(-1))).squeeze(-1)
        mu = (p.abs() / bound - h).amax(-1, keepdim=True).clamp_min(0)
        for _ in range(SECULAR):
            y = p / (h + mu).clamp_min(TINY)
            square = (y * y).sum(-1, keepdim=True)
            slope = (y * y / (h + mu).clamp_min(TINY)).sum(-1, keepdim=True)
            change = (square.sqrt() - bound) / bound * square / slope.clamp_min(TINY)
            mu = mu + torch.nan_to_num(change, posinf=0.0).clamp_min(0)
        y = V @ (-p / (h + mu).clamp_min(TINY)).unsqueeze(-1)
        x = torch.linalg.solve_triangular(triangle, y, upper=True).squeeze(-1)
        return torch.where((radius > 0) & torch.isfinite(x), x, 0)

    @measured
    def _axes(self) -> _Axes:
        return _Axes.of(self.A)

    def plain(self, *, fixed: bool = True) -> Plain:
        """By the principal axes."""
        A = self.A.detach()
        _, scale, right = _Axes.of(A.double())
        return PlainEllipsoid(A, scale, right, self.radius)

    def size(self, x: Tensor) -> Tensor:
        """‖Ax‖ in double precision."""
        return norm(times(self.A.detach().double(), x.double()))


class _Axes(NamedTuple):
    """A = QR, and the singular values and right singular vectors of R, which are those of A."""

    triangle: Tensor  # (..., n, n), with the gradient of A
    scale: Tensor  # (..., n), descending
    right: Tensor  # (..., n, n), a column for each

    @staticmethod
    def of(A: Tensor) -> _Axes:
        """From A (..., m, n)."""
        triangle = torch.linalg.qr(A)[1]
        _, scale, right = torch.linalg.svd(triangle.detach())
        return _Axes(triangle, scale, right.mT)


@dataclass(frozen=True)
class EllipsoidFace(Face):
    """h(x; A) = ‖Ax‖₂ with ∇h = AᵀAx/h and ∇²h = (AᵀA − ∇h ∇hᵀ)/h."""

    A: Tensor
    radius: Tensor
    x: Tensor
    free: Tensor  # False for problems of radius 0
    multiplier: Tensor  # (..., 1)

    bends = True

    @cached_property
    def normals(self) -> tuple[Tensor, ...]:
        """∇h where the constraint is active."""
        return (torch.where(self.multiplier > 0, self._slope(self.A.detach()), 0),)

    def curvature(self, v: Tensor) -> Tensor:
        """λ AᵀAv/h; the rest of C vanishes on the tangent space."""
        A = self.A.detach()
        return self._bend * times(A.mT, times(A, v))

    @cached_property
    def _bend(self) -> Tensor:
        """λ/h."""
        size = norm(times(self.A.detach(), self.x)).unsqueeze(-1)
        return torch.where(self.multiplier > 0, self.multiplier / size, 0)

    def force(self) -> Tensor:
        """λ AᵀAx/‖Ax‖."""
        return self.multiplier * self._slope(self.A)

    def excess(self) -> Tensor:
        """‖Ax‖ − t where the constraint is active, 0 elsewhere."""
        size = norm(times(self.A, self.x)) - self.radius
        return torch.where(self.multiplier > 0, size.unsqueeze(-1), 0)

    def _slope(self, A: Tensor) -> Tensor:
        """AᵀAx/‖Ax‖, 0 at the centre."""
        y = times(A, self.x)
        active = self.multiplier > 0
        size = norm(torch.where(active, y, 1)).unsqueeze(-1)
        return torch.where(active, times(A.mT, y / size), 0)


def _solve(triangle: Tensor, y: Tensor, *, upper: bool) -> Tensor:  # (..., n, n), (..., n)
    """The x with triangle x = y."""
    shared = triangle.dim() == 2 and y.dim() == 2
    columns = y.mT if shared else y.unsqueeze(-1)
    x: Tensor = torch.linalg.solve_triangular(triangle, columns, upper=upper)
    return x.mT if shared else x.squeeze(-1)


def _even(matrix: Tensor) -> Tensor:
    """The symmetric part; what is not finite is left out, as eigh would refuse the whole batch."""
    return torch.nan_to_num(0.5 * (matrix + matrix.mT), nan=0.0, posinf=0.0, neginf=0.0)
