"""Quadratic programs: their data, and the same in units in which numbers are of size one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Program", "Units", "in_units"]

PASSES = 12  # of the scaling; the entries are within a factor of two of one another long before


class Program(NamedTuple):
    """min ½ xᵀPx + qᵀx over {x : l ≤ x ≤ u, G x ≤ h, A x = b}, for B problems in double precision.

    The inequalities are also seen as one list of m + 2n rows, first those of G, then the upper
    bounds, then the lower ones: R x ≤ r. A row whose r is infinite does not count.
    """

    P: Tensor  # (B, n, n) or (1, n, n)
    q: Tensor  # (B, n)
    G: Tensor  # (B, m, n) or (1, m, n)
    h: Tensor  # (B, m)
    A: Tensor  # (B, k, n) or (1, k, n)
    b: Tensor  # (B, k)
    lower: Tensor  # (B, n)
    upper: Tensor  # (B, n)

    def some(self, index: Tensor) -> Program:
        """The problems at these positions."""
        return Program(*(part if len(part) == 1 else part[index] for part in self))

    @property
    def limits(self) -> Tensor:  # (B, m + 2n)
        """r."""
        return torch.cat((self.h, self.upper, -self.lower), -1)

    def across(self, x: Tensor) -> Tensor:  # (B, n) -> (B, m + 2n)
        """R x."""
        return torch.cat((times(self.G, x), x, -x), -1)

    def gathered(self, z: Tensor) -> Tensor:  # (B, m + 2n) -> (B, n)
        """Rᵀz."""
        m, n = self.G.shape[-2:]
        return times(self.G.mT, z[..., :m]) + z[..., m : m + n] - z[..., m + n :]

    def gradient(self, x: Tensor) -> Tensor:  # (B, n) -> (B, n)
        """P x + q."""
        return times(self.P, x) + self.q

    def value(self, x: Tensor) -> Tensor:  # (B, n) -> (B,)
        """½ xᵀPx + qᵀx."""
        return (x * (0.5 * times(self.P, x) + self.q)).sum(-1)


def times(matrix: Tensor, v: Tensor) -> Tensor:  # (·, m, n), (B, n) -> (B, m)
    """M v for each problem; one matrix may be that of all."""
    if len(matrix) == 1 and len(v) > 1:
        return v @ matrix[0].mT
    return (matrix @ v.unsqueeze(-1)).squeeze(-1)


class Units(NamedTuple):
    """x = d ∘ x̂; rows of G and A are divided by theirs, f by ``cost``; all are powers of two."""

    x: Tensor  # d (B, n)
    rows: Tensor  # of G (B, m)
    equations: Tensor  # of A (B, k)
    cost: Tensor  # (B, 1)

    def limits(self) -> Tensor:  # (B, m + 2n)
        """What a multiplier of a row is to be multiplied with, divided by ``cost``."""
        return torch.cat((self.rows, self.x, self.x), -1)


def in_units(program: Program) -> tuple[Program, Units]:
    """Rows and columns with largest entries near one (Ruiz, 2001), and f with a slope near one."""
    P, q, G, h, A, b, lower, upper = program
    d = torch.ones_like(q)
    of_rows, of_equations = torch.ones_like(h), torch.ones_like(b)
    sizes = P.abs(), G.abs(), A.abs()
    for _ in range(PASSES):
        p, g, a = (
            size * left.unsqueeze(-1) * d.unsqueeze(-2)
            for size, left in zip(sizes, (d, 1 / of_rows, 1 / of_equations), strict=True)
        )
        largest = p.amax(-2)
        for part in (g, a):
            if part.shape[-2]:
                largest = torch.maximum(largest, part.amax(-2))
        d = d / _root(largest)
        of_rows = of_rows * _root(g.amax(-1)) if g.shape[-2] else of_rows
        of_equations = of_equations * _root(a.amax(-1)) if a.shape[-2] else of_equations
    d, of_rows, of_equations = (_power(part) for part in (d, of_rows, of_equations))
    bend = (P.abs() * d.unsqueeze(-1) * d.unsqueeze(-2)).amax(-1).mean(-1, keepdim=True)
    slope = (q * d).abs().amax(-1, keepdim=True)
    cost = torch.maximum(bend, slope)
    cost = _power(torch.where(cost > 0, cost, 1))
    scaled = Program(
        P * d.unsqueeze(-1) * d.unsqueeze(-2) / cost.unsqueeze(-1),
        q * d / cost,
        G * d.unsqueeze(-2) / of_rows.unsqueeze(-1),
        h / of_rows,
        A * d.unsqueeze(-2) / of_equations.unsqueeze(-1),
        b / of_equations,
        lower / d,
        upper / d,
    )
    return scaled, Units(d, of_rows, of_equations, cost)


def _root(size: Tensor) -> Tensor:
    """√size, 1 for rows without entries."""
    return torch.where(size > 0, size, 1).sqrt()


def _power(number: Tensor) -> Tensor:
    """The power of two next to a positive number."""
    return torch.exp2(torch.round(torch.log2(number)).clamp(-900, 900))
