"""Units in which the numbers of a program are of size one."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.program import Program, Units
from dfwlayer.linalg.quadratic.thin import Thin

__all__ = ["in_units"]

PASSES = 12  # of the scaling; the entries are within a factor of two of one another long before


def in_units(program: Program | Thin) -> tuple[Program | Thin, Units]:
    """Rows and columns with largest entries near one (Ruiz, 2001), and f with a slope near one."""
    q, h, b = (torch.ones_like(part) for part in (program.q, program.h, program.b))
    units = Units(q, h, b, q[:, :1])
    flat = program.absolute()
    for _ in range(PASSES):
        columns, _, rows, equations = flat.extent(units)
        units = units._replace(
            x=units.x / _root(columns),
            rows=units.rows * _root(rows),
            equations=units.equations * _root(equations),
        )
    units = Units(*(_power(part) for part in units))
    bend = flat.extent(units)[1].mean(-1, keepdim=True)
    slope = (flat.q * units.x).amax(-1, keepdim=True)
    cost = torch.maximum(bend, slope)
    units = units._replace(cost=_power(torch.where(cost > 0, cost, 1)))
    return program.measured(units), units


def _root(size: Tensor) -> Tensor:
    """√size, 1 for rows without entries."""
    return torch.where(size > 0, size, 1).sqrt()


def _power(number: Tensor) -> Tensor:
    """The power of two next to a positive number."""
    return torch.exp2(torch.round(torch.log2(number)).clamp(-900, 900))
