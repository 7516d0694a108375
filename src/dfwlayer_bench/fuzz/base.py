"""What a row in the table of sets is, and norms, in numpy and apart from the library.

A row of the table of sets knows
- its parameters and the expression that builds it,
- how far a point is outside, as excess beside a size whose last place is the unit,
- the vertex that minimises ⟨g, s⟩,
and, for `dfwlayer_bench.fuzz.gradients`, a point of its own with a force in its normal cone, and
the equations that hold on the face of that point.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dfwlayer_bench.fuzz.data import LONG, Array, Draw, Param, Params, Wide

__all__ = ["ONE", "Design", "Excess", "SetRow", "norm", "number", "pulled", "smooth_norm"]

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
class SetRow(ABC):
    """What every set of the table has; names of parameters begin with ``prefix``."""

    n: int
    prefix: str = field(default="", kw_only=True)

    def named(self, **params: Param) -> Params:
        """Parameters under their full names."""
        return {self.prefix + name: p for name, p in params.items()}

    def of(self, p: Any, name: str) -> Any:
        """The parameter of that name."""
        return p[self.prefix + name]

    def weights(self, p: Wide) -> Array:
        """|w| of a set that has weights, 1 otherwise."""
        weight = p.get(self.prefix + "weight")
        return ONE if weight is None else np.abs(weight)

    @abstractmethod
    def draw(self, draw: Draw) -> Params:
        """Parameters of a batch."""

    @abstractmethod
    def code(self) -> str:
        """The expression that builds the set from its parameters."""

    @abstractmethod
    def excess(self, x: Array, p: Wide) -> list[Excess]:
        """How far x, (B, n) in long double, is outside."""

    @abstractmethod
    def vertex(self, g: Array, p: Wide) -> Array:
        """The s with the least ⟨g, s⟩, (B, n); zero along coordinates without bounds."""

    def blur(self, x: Array, p: Wide) -> Array:
        """What beside x itself the rounding of a point of the set is relative to, (B, n)."""
        return np.zeros_like(x)

    def lowest(self, g: Array, p: Wide) -> Array:
        """A bound from below on ⟨g, s⟩ over the set, (B,)."""
        lowest: Array = (g * self.vertex(g, p)).sum(-1)
        return lowest

    def exists(self, p: Wide) -> Array | None:
        """Where the rounded parameters leave a point to the last digit, (B,); None: everywhere."""
        return None

    def free(self, g: Array, p: Wide) -> Array | None:
        """Mask of coordinates without a bound on the side of −g, None if there is none."""
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

    @abstractmethod
    def design(self, draw: Draw, situation: str) -> Design:
        """A solution designed backwards."""

    @abstractmethod
    def active(self, x: Tensor, p: dict[str, Tensor], notes: dict[str, Tensor]) -> Any:
        """(equations, mask): what is zero on the face, and which of it counts; one problem."""


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
