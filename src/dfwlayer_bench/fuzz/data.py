"""Numbers a problem is made of, and how they are drawn.

Everything is drawn in float64, in numpy, from generators that are seeded by (seed, index), and
rounded to the dtype of the problem before anyone sees it: the library, the checks and the
references all work with the same rounded numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

__all__ = ["KINDS", "LONG", "TIGHTNESS", "Array", "Draw", "Param", "Params", "Wide", "wide"]

Array: TypeAlias = np.ndarray[Any, Any]
LONG = np.longdouble  # 64 bits of mantissa on x86; the checks add their own rounding to the bounds

# what the numbers look like
KINDS = ("random", "integer", "duplicates", "zeros", "far")
# where the solution lies: radii are relative to the size of the unconstrained minimiser
TIGHTNESS = ("inside", "barely", "binding", "radius 0", "vertex")


@dataclass(frozen=True)
class Param:
    """A parameter of the objective or of the set.

    Args:
        value: float64, (B, ...) where each problem has its own and (...) where they share it.
        batched: Whether the first dimension is the batch.
        scale: The power of the variable's unit it is measured in: a radius 1, a weight 0.
        learned: Whether it is differentiated.

    """

    value: Array
    batched: bool
    scale: int = 0
    learned: bool = True

    def row(self, i: int) -> Param:
        """That of problem i, without a batch."""
        return replace(self, value=self.value[i], batched=False) if self.batched else self

    def rows(self, index: Sequence[int]) -> Param:
        """Those of some problems."""
        return replace(self, value=self.value[list(index)]) if self.batched else self

    def times(self, factor: float) -> Param:
        """In other units."""
        return self if factor == 1 else replace(self, value=self.value * factor)

    def rounded(self, dtype: str) -> Param:
        """To the numbers that the dtype has."""
        return replace(self, value=self.value.astype(dtype).astype(np.float64))


Params: TypeAlias = dict[str, Param]
Wide: TypeAlias = Mapping[str, Array]  # in long double, with a batch dimension of 1 or B in front


def wide(params: Params) -> dict[str, Array]:
    """The parameters in long double, each with a batch dimension in front."""
    return {
        name: (p.value if p.batched else p.value[None]).astype(LONG) for name, p in params.items()
    }


@dataclass(frozen=True)
class Draw:
    """Draws what one batch of problems needs.

    Args:
        rng: The generator of this batch.
        rows: B.
        kind: One of KINDS.
        tight: One of TIGHTNESS.
        target: (B, n), the unconstrained minimiser, or zeros where there is none.

    """

    rng: np.random.Generator
    rows: int
    kind: str = "random"
    tight: str = "binding"
    target: Array | None = None

    def normal(self, *shape: int) -> Array:
        """Numbers around zero, of this kind."""
        rng = self.rng
        if self.kind == "integer":
            return rng.integers(-3, 4, shape).astype(np.float64)
        x: Array = rng.standard_normal(shape)
        if self.kind == "zeros":
            return np.where(rng.random(shape) < 0.5, 0.0, x)
        if self.kind == "duplicates" and shape[-1] > 1:
            pick = rng.integers(0, (shape[-1] + 1) // 2, shape[-1])
            return x[..., pick]
        return x

    def positive(self, *shape: int) -> Array:
        """Numbers of size one, none of them zero."""
        if self.kind == "integer":
            return self.rng.integers(1, 4, shape).astype(np.float64)
        x: Array = self.rng.uniform(0.5, 1.5, shape)
        if self.kind == "duplicates":
            return np.round(2 * x) / 2
        return x

    def weights(self, *shape: int, zeros: bool) -> Array:
        """Positive and negative numbers, with zeros among them where allowed."""
        w: Array = self.positive(*shape) * self.rng.choice([-1.0, 1.0], shape)
        if zeros:
            w = np.where(self.rng.random(shape) < 0.2, 0.0, w)
        return w

    def radius(self, gauge: Array) -> Array:
        """(B,) as tight as asked for, where ``gauge`` is the size of the minimiser."""
        size = np.where(gauge > 0, gauge, 1.0)
        rng, rows = self.rng, len(size)
        if self.tight == "inside":
            factor: Array = rng.choice([1.5, 3.0, 100.0], rows)
        elif self.tight == "barely":
            factor = 1 + rng.choice([-1e-3, -1e-6, 0.0, 1e-6, 1e-3], rows)
        elif self.tight == "radius 0":
            factor = 1.0 * (rng.random(rows) < 0.5)
        elif self.tight == "vertex":
            factor = 10.0 ** -rng.integers(3, 7, rows)
        else:
            factor = rng.uniform(0.1, 0.9, rows)
            if self.kind == "integer":
                return np.maximum(1.0, np.floor(size * factor))
        radius: Array = size * factor
        return radius

    def around(self, n: int) -> Array:
        """(B, n), the minimiser, or nothing."""
        return np.zeros((self.rows, n)) if self.target is None else self.target
