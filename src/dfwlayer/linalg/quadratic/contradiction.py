"""Rows that no point meets together, by a point that misses them least."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.homogeneous import PROVEN
from dfwlayer.linalg.quadratic.program import Program
from dfwlayer.linalg.quadratic.thin import Thin

__all__ = ["MET", "NOISE", "Contradiction", "contradiction"]

NOISE = 256 * torch.finfo(torch.float64).eps  # of sums, relative to their terms
MET = 1e-9  # what rows may be missed by, relative to their terms, of a solution
LEAST = 1e-11  # misses that are no rounding, in units of the program
ROUNDED = 1e-5  # as `PROVEN`, where what is left of the multipliers is rounding of their terms
NEAR = 1e-6  # what steps cost beside misses, without which some have no end
CENTRES = 4  # points from which those that miss rows least are looked for, each from the last
REFUTED = 1e-2  # of a proof: what is left of its multipliers may take that much along a known point

Solve = Callable[[Program | Thin], tuple[Tensor, Tensor, Tensor]]


class Contradiction(NamedTuple):
    """Multipliers that prove that rows contradict each other."""

    nu: Tensor  # (B, k)
    z: Tensor  # (B, m + 2n)
    found: Tensor  # (B,)


def contradiction(
    program: Program | Thin,
    x: Tensor,  # (B, n), next to all rows
    asked: Tensor,  # (B,)
    solve: Solve,
) -> Contradiction:
    """A proof for those problems that have no point, and of which it is asked.

    Where rows are missed least, in the sense of least squares, ν = A x − b and z = (G x − h)₊ have
    Aᵀν + Gᵀz = 0 but for what bounds hold, while ⟨ν, A x − b⟩ + ⟨z, G x − h⟩ is positive. That
    point is looked for in steps from one that is almost there: these are in units of the misses,
    which may be a millionth of x, and a proof takes all of their digits. Where there is no point,
    x may have gone so far out on a way without end that no digits of the misses are left beside
    it. So zero, or the bounds next to it, is where they are looked for first.
    """
    nu, z = torch.zeros_like(program.b), torch.zeros_like(program.limits)
    proven = torch.zeros_like(asked)
    for start in (_within(program, torch.zeros_like(x)), x):
        index = (asked & ~proven).nonzero().squeeze(-1)
        at = start[index]
        for _ in range(CENTRES):
            if not len(index):
                break
            part = program.some(index)
            step, *forces = solve(part.elastic(at, NEAR))
            own = _judged(part, at, x[index], *forces)
            now = index[own.found]
            nu = nu.index_copy(0, now, own.nu[own.found])
            z = z.index_copy(0, now, own.z[own.found])
            proven[now] = True
            at = _within(part, at + step[:, : at.shape[-1]])[~own.found]
            index = index[~own.found]
    return Contradiction(nu, z, proven)


def _within(program: Program | Thin, x: Tensor) -> Tensor:
    """x, or the bounds next to it."""
    return torch.minimum(torch.maximum(x, program.lower), program.upper)


def _judged(
    program: Program | Thin, at: Tensor, known: Tensor, nu: Tensor, z: Tensor
) -> Contradiction:
    """Whether ν and the z of an elastic program prove that the rows contradict each other.

    c = Aᵀν + Gᵀz has ⟨c, y⟩ ≤ ⟨ν, b⟩ + ⟨z, h⟩ at feasible y; if the least ⟨c, y⟩ over the bounds is
    larger, there is none. Seen from a point next to the rows, sums do not cancel. What is left of c
    without a bound must not matter at points as large as ``known`` (B, n), which may be feasible.
    """
    m, n = program.h.shape[-1], at.shape[-1]
    limited = torch.isfinite(program.h)
    z = torch.where(limited, z[:, :m].clamp_min(0), 0)
    slope = program.pulled(nu) + program.gathered(torch.cat((z, z.new_zeros(len(z), 2 * n)), -1))
    end = torch.where(slope > 0, program.lower, program.upper)
    bounded = torch.isfinite(end)
    over = torch.where(limited, program.across(at)[:, :m] - program.h, 0)
    beside = program.along(at) - program.b
    way = torch.where(bounded, end - at, 0)
    terms = torch.cat((slope * way, nu * beside, z * over), -1)
    reach = terms.sum(-1)
    size = 1 + at.abs().amax(-1)
    rest = torch.where(bounded, 0, slope).abs()
    left = rest.amax(-1)
    away = rest.sum(-1) * (known - at).abs().amax(-1)
    flat = program.absolute()
    pulls = flat.pulled(nu.abs()) + flat.gathered(torch.cat((z, z.new_zeros(len(z), 2 * n)), -1))
    most = torch.where(left <= NOISE * pulls.amax(-1), ROUNDED, PROVEN)
    proven = (reach > NOISE * terms.abs().sum(-1)) & (left * size <= most * reach)
    proven = proven & (away <= REFUTED * reach)
    proven = proven & (torch.cat((nu.abs(), z), -1).amax(-1) > LEAST * size)
    held = torch.where(bounded, slope, 0)
    return Contradiction(nu, torch.cat((z, (-held).clamp_min(0), held.clamp_min(0)), -1), proven)
