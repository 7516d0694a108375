"""Units in which the numbers of a program are of size one."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.program import Program, Units
from dfwlayer.linalg.quadratic.thin import Thin

__all__ = ["in_units"]

FAR = 1e10  # numbers beyond are not of size one, on either side
ROUNDING = 64 * torch.finfo(torch.float64).eps  # of sums, relative to their terms
STEADY = 1.05  # a factor that a pass may change units by where they are final
PASSES = 12  # of the scaling; the entries are within a factor of two of one another long before


def in_units(program: Program | Thin) -> tuple[Program | Thin, Units]:
    """Rows and columns with largest entries near one (Ruiz, 2001), x and ∇f of size one.

    A row without entries, 0·x ≤ h, has no size of its own, and beside an h in other units nothing
    else would count. It is left out if it holds. If not, it is in units of h, which then is beyond
    doubt, or in those of x where h is only what rounding left of zero.
    """
    flat = program.absolute()
    blank, idle = _without_entries(program, flat)
    if bool(blank.any()):
        h = torch.where(blank & (program.h >= 0), torch.inf, program.h)
        program = program.between(h, program.b, program.lower, program.upper)
    units = _common(program, flat)
    for _ in range(PASSES):
        columns, _, *others = flat.extent(units)
        root, rows, equations = (_root(part) for part in (columns, *others))
        units = units._replace(
            x=units.x / root, rows=units.rows * rows, equations=units.equations * equations
        )
        if _settled(root, rows, equations):
            break
    size = _power(_size(program, flat, units))
    x, rows, equations = units.x * size, units.rows * size, units.equations * size
    reach = x.amax(-1, keepdim=True)
    units = units._replace(
        x=x,
        rows=torch.where(blank, _told(program.h, reach), rows),
        equations=torch.where(idle, _told(program.b, reach), equations),
    )
    units = Units(*(_power(part) for part in units))
    bend = flat.extent(units)[1].mean(-1, keepdim=True)
    slope = (flat.q * units.x).amax(-1, keepdim=True)
    cost = torch.maximum(bend, slope)
    units = units._replace(cost=_power(torch.where(cost > 0, cost, 1)))
    return program.measured(units), units


def _without_entries(program: Program | Thin, flat: Program | Thin) -> tuple[Tensor, Tensor]:
    """Which rows of G (B, m) and of A (B, k) are zero."""
    q, h, b = (torch.ones_like(part) for part in (program.q, program.h, program.b))
    _, _, rows, equations = flat.extent(Units(q, h, b, q[:, :1]))
    return rows == 0, equations == 0


def _told(limit: Tensor, reach: Tensor) -> Tensor:  # (B, m), (B, 1) -> (B, m)
    """The size of limits that are more than rounding beside x of this size, else that of x."""
    size = limit.abs()
    return torch.where(torch.isfinite(size) & (size > ROUNDING * reach), size, reach)


def _settled(*roots: Tensor) -> bool:
    """Whether a pass has changed no unit of one program by more than what powers of two round."""
    if len(roots[0]) > 1:  # all programs of a batch take the same passes
        return False
    least, most = torch.aminmax(torch.cat(roots, -1))
    return bool(least >= 1 / STEADY) and bool(most <= STEADY)


def _common(program: Program | Thin, flat: Program | Thin) -> Units:
    """One unit for all of x in which the largest entry of P is one, and rows in units of theirs.

    The scaling ends where it does not see in which units f is only if it starts like this:
    coordinates that P does not bend are measured by rows alone, and would be apart from those that
    it does by the root of the size of f.
    """
    q, h, b = (torch.ones_like(part) for part in (program.q, program.h, program.b))
    units = Units(q, h, b, q[:, :1])
    bend = flat.extent(units)[1].amax(-1, keepdim=True)
    units = units._replace(x=units.x / _root(bend))
    _, _, rows, equations = flat.extent(units)
    rows, equations = (torch.where(part > 0, part, 1) for part in (rows, equations))
    return units._replace(rows=units.rows * rows, equations=units.equations * equations)


def _size(program: Program | Thin, flat: Program | Thin, units: Units) -> Tensor:  # (B, 1)
    """How large x is in these units, as far as f and the limits tell.

    x is about as far out as the minimiser of f alone, q/P, but not within limits that exclude zero,
    and not beyond all of them. So its size does not depend on the unit of f. Of linear programs it
    is as near to one as limits allow, unless half of them are far out: one that is all but zero
    says nothing.
    """
    ends = (
        program.h / units.rows,
        program.b / units.equations,
        program.lower / units.x,
        program.upper / units.x,
    )
    limits = torch.cat(ends, -1).abs()
    h, b, lower, upper = ends
    beyond = torch.cat((-h, b.abs(), lower, -upper), -1)
    told = torch.isfinite(limits) & (limits > 0)
    least = torch.where(told, limits, torch.inf).amin(-1, keepdim=True)
    most = torch.where(told, limits, 0).amax(-1, keepdim=True)
    apart = torch.where(told, beyond, 0).amax(-1, keepdim=True).clamp_min(0)
    some = told.any(-1, keepdim=True)
    bend = flat.extent(units)[1].amax(-1, keepdim=True)
    slope = (flat.q * units.x).amax(-1, keepdim=True)
    far = torch.where(bend > 0, slope / torch.where(bend > 0, bend, 1), 0)
    size = torch.where(some, torch.minimum(torch.maximum(far, apart), most), far)
    near = torch.where(some, torch.ones_like(size).clamp(least, most), 1)
    if limits.shape[-1]:
        middle = torch.where(told, limits, torch.nan).nanmedian(-1, keepdim=True).values
        near = torch.where(middle > near * FAR, middle, near)
    return torch.where((bend > 0) & (size > 0), size, near)


def _root(size: Tensor) -> Tensor:
    """√size, 1 for rows without entries."""
    return torch.where(size > 0, size, 1).sqrt()


def _power(number: Tensor) -> Tensor:
    """The power of two next to a positive number."""
    return torch.exp2(torch.round(torch.log2(number)).clamp(-900, 900))
