"""From the end of interior-point steps to the solution on its face, to the last digits."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.homogeneous import Interior
from dfwlayer.linalg.quadratic.program import Program
from dfwlayer.linalg.quadratic.saddle import Saddle
from dfwlayer.linalg.quadratic.thin import Thin
from dfwlayer.linalg.quadratic.thin_face import ThinFace

__all__ = ["FEW", "ROUNDS", "Corner", "given", "held_by", "on_face"]

ROUNDS = 20  # in which rows are let go and taken in
FEW = 3  # the same where there is a solution already
NEAR = 1e-2  # of a solution: residuals and gap of interior-point steps, relative
ARRIVED = 1e-12  # the same at a solution that needs no face
CORRECTIONS = 3  # each with what the one before has left
LEAST = 1e-300  # what is divided by
STEEP = 16.0  # times rounding: what slopes, and the signs of forces, may be off by
DOUBT = 1e-8  # of f, beyond which rows that hold x have slack
ROUNDING = 64 * torch.finfo(torch.float64).eps  # of sums, relative to their terms


class Corner(NamedTuple):
    """A point and the multipliers of the rows that hold it."""

    x: Tensor  # (B, n)
    nu: Tensor  # of the equations (B, k)
    z: Tensor  # of the inequalities (B, m + 2n), zero for those that do not hold x
    active: Tensor  # (B, m + 2n)
    exact: Tensor  # (B,), whether all conditions of optimality hold to rounding


def on_face(program: Program | Thin, found: Interior, rounds: int = ROUNDS) -> Corner:
    """Move from the end of interior-point steps onto their face, correct the face, and again.

    Rows with multipliers of the wrong sign are let go and rows that are missed are taken in, until
    nothing is left to do, in so many rounds at most.
    Problems for which that does not end keep what satisfies the conditions of optimality best.
    """
    held = torch.isfinite(program.limits)
    active = found.holds & ~_doubled(program, found.holds, found.z)
    none = torch.zeros_like(found.empty)
    start = Corner(found.x, found.nu, torch.where(held, found.z, 0), active, none)
    first = _judged(program, start, held)
    near = (found.off <= NEAR) & ~(found.empty | found.endless)  # others have no face yet
    # where many faces meet none may be found, but what the steps have found may be a solution
    arrived = first.exact & near & (found.off <= ARRIVED)
    best, least = start._replace(exact=arrived), first.off
    going = near.nonzero().squeeze(-1)
    for turn in range(rounds):
        if turn == FEW:
            going = going[~arrived[going]]
        if not len(going):
            break
        part = program.some(going)
        at = _moved(part, Corner(*(one[going] for one in start)), active[going])
        verdict = _judged(part, at, held[going])
        # relative to a point far out everything would be small
        size = start.x[going].abs().amax(-1) + 1
        beside = (at.x - start.x[going]).abs().amax(-1) <= size
        at = at._replace(exact=verdict.exact & beside)
        better = beside & (verdict.exact | (~arrived[going] & (verdict.off < least[going])))
        index = going[better]
        best = Corner(
            *(old.index_copy(0, index, new[better]) for new, old in zip(at, best, strict=True))
        )
        least = least.index_copy(0, index, verdict.off[better])
        open_ended = ~at.exact & (verdict.wanted != active[going]).any(-1)
        active = active.index_copy(0, going, verdict.wanted)
        going = going[open_ended]
    return best


def given(program: Program | Thin, found: Interior) -> Corner | None:
    """The minimiser on the face that came with the end of the steps, if that is a solution."""
    if found.corner is None:
        return None
    held = torch.isfinite(program.limits)
    x, nu, z = found.corner
    size = x.abs().amax(-1)
    if not bool(((size > ROUNDING) & torch.isfinite(size)).all()) or bool(_idle(program, x).any()):
        return None  # zero may be meant
    none = torch.zeros_like(found.empty)
    at = Corner(x, nu, torch.where(held, z, 0), found.holds, none)
    verdict = _judged(program, at, held)
    if not bool(verdict.exact.all()) and torch.equal(verdict.wanted, at.active):
        at = _moved(program, at, at.active)  # the face is right, and pivots give more digits
        verdict = _judged(program, at, held)
    beside = (at.x - found.x).abs().amax(-1) <= found.x.abs().amax(-1) + 1
    exact = verdict.exact & beside & (found.off <= NEAR)
    return at._replace(exact=exact) if bool(exact.all()) else None


def held_by(program: Program | Thin, at: Tensor, active: Tensor) -> Corner:
    """The minimiser next to a point (B, n) with these rows as equations, of least multipliers.

    Where it is exact, it is that of the program.
    """
    nu, z = torch.zeros_like(program.b), torch.zeros_like(program.limits)
    active = active & ~_doubled(program, active, z)
    none = torch.zeros_like(at[:, 0], dtype=torch.bool)
    corner = _moved(program, Corner(at, nu, z, active, none), active)
    exact = _judged(program, corner, torch.isfinite(program.limits)).exact
    return corner._replace(exact=exact)


class Face(Protocol):
    """The saddle-point system of active rows."""

    def nearest(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """u (B, n) and changes of the multipliers (B, k + m) for what is missing of both kinds."""


class _DenseFace:
    """Of B problems, with as many rows of G as the most that one of them has."""

    def __init__(self, program: Program, active: Tensor, free: Tensor) -> None:
        m, n = program.G.shape[-2:]
        self.k = program.A.shape[-2]
        rows = active[:, :m]
        most = int(rows.sum(-1).amax()) if rows.numel() else 0
        order = torch.argsort(rows.to(torch.int8), dim=-1, descending=True, stable=True)
        self.position = order[:, :most]
        self.counts = torch.gather(rows, 1, self.position)
        G = program.G.expand(len(active), m, n)
        picked = torch.gather(G, 1, self.position.unsqueeze(-1).expand(-1, -1, n))
        picked = torch.where(self.counts.unsqueeze(-1), picked, 0)
        N = torch.cat((program.A.expand(len(active), self.k, n), picked), -2)
        self.saddle = Saddle.of(program.P, N, free)

    def nearest(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        above, below = c[:, : self.k], c[:, self.k :]
        missing = torch.where(self.counts, torch.gather(below, 1, self.position), 0)
        u, nu = self.saddle.nearest(v, torch.cat((above, missing), -1))
        more = torch.where(self.counts, nu[:, self.k :], 0)
        return u, torch.cat(
            (nu[:, : self.k], torch.zeros_like(below).scatter(1, self.position, more)), -1
        )


def _face(program: Program | Thin, active: Tensor, free: Tensor) -> Face:
    kind = ThinFace if isinstance(program, Thin) else _DenseFace
    return kind(program, active, free)  # type: ignore[arg-type]


def _moved(program: Program | Thin, start: Corner, active: Tensor) -> Corner:
    """The minimiser next to a point and its multipliers, with the active rows as equations.

    Where rows depend on each other, or f is flat along the face, this is one of many; the change
    of least size keeps multipliers positive that are so at the start.
    """
    n, k, m = start.x.shape[-1], program.b.shape[-1], program.h.shape[-1]
    rows, above, below = active[:, :m], active[:, m : m + n], active[:, m + n :]
    x = torch.where(above, program.upper, torch.where(below, program.lower, start.x))
    bounds = torch.zeros_like(start.z[:, m:])
    nu = torch.cat((start.nu, torch.where(rows, start.z[:, :m], 0)), -1)
    face = _face(program, active, ~(above | below))

    def slope() -> Tensor:
        leaned = program.gathered(torch.cat((nu[:, k:], bounds), -1))
        return program.gradient(x) + program.pulled(nu[:, :k]) + leaned

    for _ in range(CORRECTIONS):
        missing = torch.where(rows, program.h - program.across(x)[:, :m], 0)
        u, more = face.nearest(-slope(), torch.cat((program.b - program.along(x), missing), -1))
        x, nu = x + u, nu + more
    # what corrections leave of a zero is smaller than rounding by far, and held by nothing
    least = ROUNDING**2 * x.abs().amax(-1, keepdim=True)
    x = torch.where((x.abs() <= least) & ~(above | below), 0, x)
    x = torch.where(_origin(program, x).unsqueeze(-1), 0, x)
    reduced = slope()  # what the bounds have to hold
    z = torch.cat((nu[:, k:], torch.where(above, -reduced, 0), torch.where(below, reduced, 0)), -1)
    idle = _idle(program, x)
    nu, z = torch.where(idle, 0, nu), torch.where(idle, 0, z)
    return Corner(x, nu[:, :k], z, active & ~idle, start.exact)


def _idle(program: Program | Thin, x: Tensor) -> Tensor:  # (B, n) -> (B, 1)
    """Where f is zero, and nothing holds x against it."""
    return (program.absolute().gradient(torch.ones_like(x)) == 0).all(-1, keepdim=True)


def _origin(program: Program | Thin, x: Tensor) -> Tensor:  # (B, n) -> (B,)
    """Where x, of size one in its units, is zero but for rounding, and zero is feasible."""
    there = (program.limits >= 0).all(-1) & (program.b == 0).all(-1)
    return there & (x.abs().amax(-1) <= ROUNDING)


class _Verdict(NamedTuple):
    exact: Tensor  # (B,), a solution to rounding
    off: Tensor  # (B,), the largest amount by which a condition is missed, relative to its terms
    wanted: Tensor  # (B, m + 2n), rows that should be active


def _judged(program: Program | Thin, at: Corner, held: Tensor) -> _Verdict:
    """How far a point is from the solution, and what to change."""
    x, nu, z, active, _ = at
    m, n = program.h.shape[-1], x.shape[-1]
    flat = program.absolute()
    size = z.abs()
    terms = flat.gradient(x.abs()) + flat.pulled(nu.abs())
    terms = terms + flat.gathered(torch.cat((size[:, : m + n], -size[:, m + n :]), -1))
    largest = x.abs().amax(-1, keepdim=True)  # whose rounding all entries have
    terms = (terms + flat.bent(largest.expand_as(x))).amax(-1, keepdim=True).clamp_min(LEAST)
    largest = largest.clamp_min(LEAST)
    slope = program.gradient(x) + program.pulled(nu) + program.gathered(z)
    missed = (program.along(x) - program.b).abs()
    about = flat.along(x.abs()) + program.b.abs() + largest
    limits = torch.where(held, program.limits, 0)
    over = torch.where(held, program.across(x) - limits, 0)
    reach = flat.across(x.abs()).abs() + limits.abs() + largest
    # a multiplier is of the size of what it holds against, divided by its row
    steep, wrong = slope.abs() / terms, -z / terms
    beside, outside = missed / about, over / reach
    idle = (z * over).abs().sum(-1) / (1 + program.value(x).abs())
    exact = (_most(steep) <= STEEP * ROUNDING) & (_most(beside) <= ROUNDING)
    exact = exact & (_most(outside) <= ROUNDING) & (_most(wrong) <= STEEP * ROUNDING)
    exact = exact & torch.isfinite(x).all(-1) & (idle <= DOUBT)
    off = torch.stack([_most(part) for part in (steep, wrong, beside, outside)] + [idle])
    wanted = (active & (wrong <= STEEP * ROUNDING)) | (outside > ROUNDING)
    wanted = wanted & ~_doubled(program, wanted, z)
    return _Verdict(exact, off.amax(0).nan_to_num(torch.inf, torch.inf), wanted)


def _doubled(program: Program | Thin, active: Tensor, z: Tensor) -> Tensor:
    """Of two bounds of a coordinate that are both active, the one with the smaller multiplier."""
    m, n = program.h.shape[-1], program.q.shape[-1]
    both = active[:, m : m + n] & active[:, m + n :]
    upper = z[:, m : m + n] > z[:, m + n :]
    return torch.cat((torch.zeros_like(active[:, :m]), both & ~upper, both & upper), -1)


def _most(part: Tensor) -> Tensor:
    return part.amax(-1) if part.shape[-1] else part.new_zeros(len(part))
