"""From the end of interior-point steps to the solution on its face, to the last digits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.homogeneous import Interior
from dfwlayer.linalg.quadratic.program import Program, times
from dfwlayer.linalg.quadratic.saddle import Saddle

__all__ = ["Corner", "gathered_rows", "on_face"]

ROUNDS = 20  # in which rows are let go and taken in
ROUNDING = 64 * torch.finfo(torch.float64).eps  # of sums, relative to their terms


class Corner(NamedTuple):
    """A point and the multipliers of the rows that hold it."""

    x: Tensor  # (B, n)
    nu: Tensor  # of the equations (B, k)
    z: Tensor  # of the inequalities (B, m + 2n), zero for those that do not hold x
    active: Tensor  # (B, m + 2n)
    exact: Tensor  # (B,), whether all conditions of optimality hold to rounding


def on_face(program: Program, found: Interior) -> Corner:
    """Solve on the face that interior-point steps point to, correct the face, and again.

    A row holds x if its multiplier is larger than its slack. Then rows with multipliers of the
    wrong sign are let go and rows that are missed are taken in, until nothing is left to do.
    Problems for which that does not end keep what the interior-point steps have found.
    """
    held = torch.isfinite(program.limits)
    active = held & (found.z > found.s)
    exact = torch.zeros_like(found.empty)
    best = Corner(found.x, found.nu, torch.where(active, found.z, 0), active, exact)
    going = (torch.isfinite(found.off) & ~(found.empty | found.endless)).nonzero().squeeze(-1)
    for _ in range(ROUNDS):
        if not len(going):
            break
        part = program.some(going)
        at = _solved(part, active[going], held[going])
        exact, wanted = _judged(part, at, held[going])
        sure, open_ended = going[exact], ~exact & (wanted != active[going]).any(-1)
        at = at._replace(exact=exact)
        best = Corner(
            *(old.index_copy(0, sure, new[exact]) for new, old in zip(at, best, strict=True))
        )
        active = active.index_copy(0, going, wanted)
        going = going[open_ended]
    return best


def gathered_rows(program: Program, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The active rows of G, as many as the most that a problem has: positions, rows and limits.

    (B, a), (B, a, n) and (B, a); rows beyond those of a problem are zero.
    """
    m, n = program.G.shape[-2:]
    rows = active[:, :m]
    most = int(rows.sum(-1).amax()) if rows.numel() else 0
    position = torch.argsort(rows.to(torch.int8), dim=-1, descending=True, stable=True)[:, :most]
    chosen = torch.gather(rows, 1, position)
    G = program.G.expand(len(active), m, n)
    picked = torch.gather(G, 1, position.unsqueeze(-1).expand(-1, -1, n))
    limits = torch.gather(program.h, 1, position)
    return position, torch.where(chosen.unsqueeze(-1), picked, 0), torch.where(chosen, limits, 0)


def _solved(program: Program, active: Tensor, held: Tensor) -> Corner:
    """The minimiser with the active rows as equations."""
    m, n = program.G.shape[-2:]
    above, below = active[:, m : m + n], active[:, m + n :]
    pinned = torch.where(above, program.upper, torch.where(below, program.lower, 0))
    free = ~(above | below)
    position, rows, limits = gathered_rows(program, active)
    N = torch.cat((program.A.expand(len(active), *program.A.shape[-2:]), rows), -2)
    total = torch.cat((program.b, limits), -1)
    saddle = Saddle.of(program.P, N, free)
    u, nu = saddle.solve(-program.gradient(pinned), total - times(N, pinned))
    x = pinned + u
    k = program.A.shape[-2]
    reduced = program.gradient(x) + times(N.mT, nu)  # what the bounds have to hold
    z = torch.zeros_like(held, dtype=x.dtype)
    if position.shape[-1]:
        z[:, :m] = z[:, :m].scatter(1, position, torch.where((rows != 0).any(-1), nu[:, k:], 0))
    z[:, m : m + n] = torch.where(above, -reduced, 0)
    z[:, m + n :] = torch.where(below, reduced, 0)
    return Corner(x, nu[:, :k], z, active, torch.zeros_like(active[:, 0]))


def _judged(program: Program, at: Corner, held: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a point is the solution to rounding, and which rows should be active."""
    x, nu, z, active, _ = at
    terms = times(program.P.abs(), x.abs()) + program.q.abs() + times(program.A.abs().mT, nu.abs())
    absolute = program._replace(G=program.G.abs())
    m, n = program.G.shape[-2:]
    size = z.abs()
    terms = terms + times(absolute.G.mT, size[:, :m]) + size[:, m : m + n] + size[:, m + n :]
    off = program.gradient(x) + times(program.A.mT, nu) + program.gathered(z)
    steady = (off.abs() <= ROUNDING * 16 * terms.amax(-1, keepdim=True)).all(-1)
    missed = times(program.A, x) - program.b
    size = times(program.A.abs(), x.abs()) + program.b.abs()
    met = (missed.abs() <= ROUNDING * size.clamp_min(1e-300)).all(-1)
    limits = torch.where(held, program.limits, 0)
    over = torch.where(held, program.across(x) - limits, -torch.inf)
    reach = torch.cat((times(absolute.G, x.abs()), x.abs(), x.abs()), -1) + limits.abs()
    outside = over > ROUNDING * reach
    # a multiplier is of the size of what it holds against, divided by its row
    noise = ROUNDING * 16 * terms.amax(-1, keepdim=True)
    wrong = active & (z < -noise)
    sound = torch.isfinite(x).all(-1)
    wanted = (active & ~wrong) | outside
    # of the two bounds of a coordinate one is enough
    both = wanted[:, m : m + n] & wanted[:, m + n :]
    shut = program.lower >= program.upper
    wanted = wanted.clone()
    wanted[:, m : m + n] &= ~(both & ~shut) | (z[:, m : m + n] > z[:, m + n :])
    wanted[:, m + n :] &= ~both
    return steady & met & sound & ~(outside | wrong).any(-1), wanted
