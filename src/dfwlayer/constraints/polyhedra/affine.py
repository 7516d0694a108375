"""Half-spaces, planes, affine sets and the non-negative orthant: polyhedra with short formulas."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, measured
from dfwlayer.constraints.parameters import entries, matrix, number
from dfwlayer.constraints.plain import Plain, PlainAffine, PlainFlat, PlainFormula
from dfwlayer.constraints.plain.rows import onto_rows
from dfwlayer.constraints.polyhedra.polyhedron import LinearSet
from dfwlayer.constraints.polyhedra.rows import check_rows, rows_bound
from dfwlayer.constraints.region import Flat, Linear
from dfwlayer.ops.rows import or_one
from dfwlayer.ops.values import Value, first_tensor, tensor_of, total

__all__ = ["AffineSet", "HalfSpace", "Hyperplane", "NonNegative", "plane_form"]


class _ByFormula(LinearSet):
    """One row, with a formula for the projection."""

    @abstractmethod
    def formula(self, z: Tensor) -> Tensor:
        """The projection of z (..., n), but for rounding."""

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """See `formula`."""
        return self.settled(self.formula(z), z)

    def plain(self, *, fixed: bool = True) -> Plain:
        """The formula."""
        return PlainFormula(self.as_bound())


@dataclass(frozen=True)
class HalfSpace(_ByFormula):
    """{x : ⟨a, x⟩ ≤ b}.

    Args:
        normal: a, a number, (*shape) or (B, *shape). Where it is zero the set is everything, or
            empty if b < 0.
        level: b, a number, a 0-d tensor or (B,).

    """

    normal: Value = field(metadata=entries())
    level: Value = field(metadata=number(harmless=1.0, grows=True))

    def rows_of(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One row of G."""
        A, b, _, _ = super().rows_of(like)
        return A, b, *_row(self.normal, self.level)

    def normal_form(self, n: int) -> Sequence[Linear] | None:
        """One row, None where its dtype is not known."""
        given = first_tensor(self.normal, self.level)
        if given is None:
            return None
        a, b = (
            torch.as_tensor(part, dtype=given.dtype, device=given.device)
            for part in (self.normal, self.level)
        )
        row = a.expand(*a.shape[:-1], n).unsqueeze(-2)
        b = torch.where(torch.isfinite(b.detach()), b, torch.nan)  # a row without a limit is none
        return (Linear(n, -math.inf, math.inf, row, total(b), None, 0.0),)

    def formula(self, z: Tensor) -> Tensor:
        """z − a (⟨a, z⟩ − b)₊ / ⟨a, a⟩."""
        return _moved(z, self.normal, self.level, one_sided=True)


@dataclass(frozen=True)
class Hyperplane(_ByFormula):
    """{x : ⟨a, x⟩ = b}.

    Args:
        normal: a, a number, (*shape) or (B, *shape). Where it is zero the set is everything if
            b = 0, and empty otherwise.
        level: b, a number, a 0-d tensor or (B,).

    """

    normal: Value = field(metadata=entries())
    level: Value = field(metadata=number(harmless=0.0, grows=True))

    def rows_of(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One row of A."""
        _, _, G, h = super().rows_of(like)
        return *_row(self.normal, self.level), G, h

    def normal_form(self, n: int) -> Sequence[Flat]:
        """An equation."""
        return plane_form(n, self.normal, self.level)

    def formula(self, z: Tensor) -> Tensor:
        """z − a (⟨a, z⟩ − b) / ⟨a, a⟩."""
        return _moved(z, self.normal, self.level, one_sided=False)


@dataclass(frozen=True)
class AffineSet(LinearSet):
    """{x : A x = b}; rows may depend on each other or be zero.

    Args:
        A: (k, n) or (B, k, n), n the entries of a variable.
        b: A number, (k,) or (B, k).

    """

    A: Tensor = field(metadata=matrix())
    b: Value = field(metadata=entries(harmless=0.0, grows=True, apart=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rows("A", self.A, "b", self.b)

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Rows that have as many entries as the variable."""
        b = rows_bound("A", self.A, self.b, shape, dtype, device)
        return super(AffineSet, self.changed(b=b)).bind(shape, dtype, device)

    def rows_of(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A and b."""
        _, _, G, h = super().rows_of(like)
        return self.A, tensor_of(self.b), G, h

    def plain(self, *, fixed: bool = True) -> Plain:
        """By A⁺."""
        b = tensor_of(self.b).detach()
        return PlainAffine(self.A.detach(), self._inverse, b)

    def is_plain(self, like: Tensor) -> bool:
        """And that rows have as many entries as the variable."""
        return super().is_plain(like) and self.A.shape[-1] == like.shape[-1]

    def normal_form(self, n: int) -> Sequence[Linear]:
        """The equations."""
        return (Linear(n, -math.inf, math.inf, None, 0.0, self.A, self.b),)

    @measured
    def _inverse(self) -> Tensor:
        """A⁺, in double precision."""
        inverse: Tensor = torch.linalg.pinv(self.A.detach().double())
        return inverse

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """z − A⁺(A z − b), refined once."""
        A, b = self.A.detach().double(), tensor_of(self.b).detach().double()
        x = onto_rows(A, self._inverse, b, z.detach().double())
        return self.settled(x.to(z.dtype), z)


@dataclass(frozen=True)
class NonNegative(LinearSet):
    """{x : x ≥ 0}."""

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """0 and ∞."""
        return like.new_zeros(()), like.new_full((), torch.inf)

    def normal_form(self, n: int) -> Sequence[Flat]:
        """The bounds."""
        return (Flat(n, 0.0, math.inf),)

    def scaled(self, factor: Tensor) -> Self:
        """The set itself, which is a cone."""
        return self

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """max(z, 0)."""
        return z.detach().clamp_min(0)

    def plain(self, *, fixed: bool = True) -> Plain:
        """A bound."""
        return PlainFlat(0.0, torch.inf, None, 0.0, ())


def plane_form(n: int, normal: Value, level: Value) -> Sequence[Flat]:
    """The normal form of {x : ⟨a, x⟩ = b}, of which a and b are given as they were."""
    return (Flat(n, -math.inf, math.inf, equations=((normal, total(level)),)),)


def _row(normal: Value, level: Value) -> tuple[Tensor, Tensor]:  # (..., 1, n) and (..., 1)
    """⟨a, x⟩ and b as a matrix of one row."""
    return tensor_of(normal).unsqueeze(-2), tensor_of(level).unsqueeze(-1)


def _moved(z: Tensor, normal: Value, level: Value, one_sided: bool) -> Tensor:
    """z along a, until ⟨a, x⟩ = b; or ≤ b, which it may be already."""
    a, b = tensor_of(normal).detach().double(), tensor_of(level).detach().double().unsqueeze(-1)
    size = or_one(a.abs().amax(-1, keepdim=True))  # in units of it squares stay within range
    a, b = a / size, b / size
    square = or_one((a * a).sum(-1, keepdim=True))
    x = z.detach().double()
    for _ in range(2):  # the second time for what rounding left of the first
        excess = (a * x).sum(-1, keepdim=True) - b
        x = x - a * ((excess.clamp_min(0) if one_sided else excess) / square)
    return x.to(z.dtype)
