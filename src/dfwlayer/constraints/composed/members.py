"""The members of an intersection as a penalty: how far a point is from each, and how that bends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.constraints.composed.seen import Seen
from dfwlayer.linalg.quadratic import Program, unopened
from dfwlayer.ops.matrices import lu_inverse, lu_solved, times
from dfwlayer.ops.rows import or_one
from dfwlayer.ops.scale import Scale

__all__ = ["ROUNDING", "Bend", "Forces", "Look", "Members", "bend_of", "rows_of"]

ROUNDING = 256 * torch.finfo(torch.float64).eps


class Forces(NamedTuple):
    """With what the members hold x; −∇f is their sum at a solution."""

    sets: Tensor  # (S, B, n), in the normal cones of the sets
    bounds: Tensor  # (B, n), ≥ 0 at upper bounds and ≤ 0 at lower ones
    rows: Tensor  # (B, m), multipliers ≥ 0 of G x ≤ h
    equations: Tensor  # (B, k), multipliers of A x = b

    def some(self, index: Tensor) -> Forces:
        """Of the problems at these positions."""
        return Forces(self.sets[:, index], *(part[index] for part in self[1:]))

    def put(self, index: Tensor, other: Forces) -> Forces:
        """With those of others at these positions."""
        own = (a.index_copy(0, index, b) for a, b in zip(self[1:], other[1:], strict=True))
        return Forces(self.sets.index_copy(1, index, other.sets), *own)

    def chosen(self, mask: Tensor, other: Forces) -> Forces:
        """These where the mask (B,) holds, the others elsewhere."""
        rows = mask.unsqueeze(-1)
        return Forces(*(torch.where(rows, a, b) for a, b in zip(self, other, strict=True)))

    def minus(self, other: Forces) -> Forces:
        """The difference."""
        return Forces(*(a - b for a, b in zip(self, other, strict=True)))

    def times(self, factor: Tensor) -> Forces:  # (B, 1)
        """All of them multiplied."""
        return Forces(*(part * factor for part in self))

    def squares(self) -> Tensor:  # (B,)
        """Their sum."""
        return self.sets.square().sum((0, -1)) + sum(p.square().sum(-1) for p in self[1:])

    def largest(self) -> Tensor:  # (B,)
        """The largest entry."""
        sizes = [part.abs().amax(-1) for part in (*self.sets, *self[1:]) if part.shape[-1]]
        return torch.stack(sizes).amax(0)


class Look(NamedTuple):
    """What x looks like from the members, with forces y and a penalty ρ."""

    points: Tensor  # (S, B, n), the projections of x + y/ρ
    forces: Forces  # ρ (x + y/ρ − these)
    value: Tensor  # (B,), f + ‖forces‖²/2ρ
    slope: Tensor  # (B, n), its gradient
    missed: Tensor  # (B,), the largest distance of x to a point


class Bend(NamedTuple):
    """The matrix D + V Vᵀ + M of B problems."""

    diagonal: Tensor  # (B, n)
    wide: Tensor  # V (B, n, r)
    dense: Tensor | None  # M (B, n, n)


@dataclass(frozen=True)
class Members:
    """Sets with projections of their own, and a program: f, rows of length one, bounds."""

    sets: tuple[Seen, ...]
    program: Program

    @property
    def n(self) -> int:
        return self.program.q.shape[-1]

    def some(self, index: Tensor) -> Members:
        """Of the problems at these positions."""
        sets = tuple(part.some(index) for part in self.sets)
        assert all(part is not None for part in sets)
        return Members(sets, self.program.some(index))  # type: ignore[arg-type]

    @cached_property
    def diagonal(self) -> Tensor | None:
        """P where it is a diagonal for all problems, (·, n)."""
        P = self.program.P
        own = P.diagonal(dim1=-2, dim2=-1)
        return own if len(P) == 1 and torch.count_nonzero(P) == torch.count_nonzero(own) else None

    def none(self) -> Forces:
        """No forces."""
        q = self.program.q
        blank = q.new_zeros(len(self.sets), *q.shape)
        return Forces(blank, torch.zeros_like(q), *map(torch.zeros_like, self._sides))

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:
        return self.program.h, self.program.b

    def clipped(self, x: Tensor) -> Tensor:
        """x within the bounds."""
        return torch.minimum(torch.maximum(x, self.program.lower), self.program.upper)

    def pulled(self, forces: Forces) -> Tensor:  # (B, n)
        """Their sum."""
        program = self.program
        along = times(program.G.mT, forces.rows) + program.pulled(forces.equations)
        return forces.sets.sum(0) + forces.bounds + along

    def look(self, x: Tensor, forces: Forces, rho: Tensor) -> Look:  # (B, n), (B, 1)
        """From a point x."""
        program = self.program
        aim = x + forces.sets / rho
        points = (
            torch.stack([part.project(aim[i]) for i, part in enumerate(self.sets)])
            if self.sets
            else aim
        )
        box = x + forces.bounds / rho
        new = Forces(
            rho * (aim - points),
            rho * (box - self.clipped(box)),
            (forces.rows + rho * (times(program.G, x) - program.h)).clamp_min(0),
            forces.equations + rho * (program.along(x) - program.b),
        )
        bent = program.bent(x)
        value = (x * (0.5 * bent + program.q)).sum(-1) + new.squares() / (2 * rho.squeeze(-1))
        missed = new.minus(forces).largest() / rho.squeeze(-1)
        return Look(points, new, value, bent + program.q + self.pulled(new), missed)

    def faces(self, look: Look, rho: Tensor) -> list[Face]:
        """Those of the sets at their points, as faces of projections."""
        push = look.forces.sets / rho
        noise = ROUNDING * (look.points.abs() + push.abs()).amax((0, -1), keepdim=False)
        scale = Scale(torch.ones_like(noise)[:, None], noise[:, None])
        return [part.face(look.points[i], -push[i], scale) for i, part in enumerate(self.sets)]

    def bend(self, look: Look, rho: Tensor) -> Bend:
        """The second derivative of the penalty at a point."""
        program = self.program
        held = look.forces.bounds != 0
        diagonal, wide, dense = held.to(rho), [], None
        root = rho.sqrt().unsqueeze(-1)
        if program.h.shape[-1]:
            active = (look.forces.rows > 0).to(rho).unsqueeze(-1)
            wide.append((active * program.G).mT)
        if program.b.shape[-1]:
            wide.append(program.A.mT.expand(len(rho), -1, -1))
        for face in self.faces(look, rho):
            part = bend_of(face)
            diagonal = diagonal + part.diagonal
            wide.append(part.wide)
            if part.dense is not None:
                dense = part.dense if dense is None else dense + part.dense
        V = root * torch.cat(wide, -1) if wide else diagonal[..., None][..., :0]
        return Bend(rho * diagonal, V, None if dense is None else rho.unsqueeze(-1) * dense)

    def newton(self, bend: Bend, slope: Tensor, ridge: Tensor) -> Tensor:  # (B, n), (B, 1)
        """−(P + bend + ridge)⁻¹ slope."""
        own, (diagonal, V, dense) = self.diagonal, bend
        if own is not None and dense is None and 2 * V.shape[-1] < self.n:
            inverse = 1 / (own + diagonal + ridge)
            leaned = inverse.unsqueeze(-1) * V
            eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
            first = inverse * slope
            share = lu_solved(eye + V.mT @ leaned, times(V.mT, first).unsqueeze(-1))
            found: Tensor = (leaned @ share).squeeze(-1) - first
            return found
        H = torch.baddbmm(self.program.P.expand(len(slope), -1, -1), V, V.mT)
        if dense is not None:
            H = H + dense
        H.diagonal(dim1=-2, dim2=-1).add_(diagonal + ridge)
        factor, bad = torch.linalg.cholesky_ex(H)
        if bool(bad.any()):
            size = H.diagonal(dim1=-2, dim2=-1).amax(-1)
            more = torch.diag_embed((1e-8 * (bad > 0) * size).unsqueeze(-1).expand_as(slope))
            factor = torch.linalg.cholesky_ex(H + more)[0]
        step: Tensor = torch.cholesky_solve(-slope.unsqueeze(-1), factor).squeeze(-1)
        return step

    def gap(self, x: Tensor, gradient: Tensor, forces: Forces) -> Tensor:  # (B,)
        """f(x) − f* ≤ Σ ⟨g_i, x⟩ − min ⟨g_i, s⟩ over members, for any g_i with sum ∇f.

        Rows prove ⟨λ, h − G x⟩ for λ ≥ 0. What the forces leave of ∇f is for a set that is bounded,
        or for bounds; where there are none, for the curvature of f, as for polyhedra.
        """
        program, rows = self.program, forces.rows.clamp_min(0)
        finite = torch.isfinite(program.h)
        room = torch.where(finite, program.h, 0) - times(program.G, x)
        gap = torch.where(finite, rows * room, torch.where(rows > 0, torch.inf, 0)).sum(-1)
        gap = gap + (forces.equations * (program.b - program.along(x))).sum(-1)
        rest = gradient + self.pulled(forces._replace(rows=rows))
        carrier = self._carrier
        for i, (part, force) in enumerate(zip(self.sets, forces.sets, strict=True)):
            own = rest - force if i == carrier else -force
            gap = gap + ((own * x).sum(-1) - part.lowest(own))
        force = forces.bounds
        if carrier is None:
            largest = x.abs().amax(-1, keepdim=True)
            slopes = gradient.abs() + program.absolute().bent(largest.expand_as(x))
            left = unopened(program, rest - force, self._sizes(slopes, forces), largest)
            gap, force = gap + left.fall + left.blur, -left.slope
            gap = torch.where(left.flat, torch.inf, gap)
        end = torch.where(force > 0, program.upper, torch.where(force < 0, program.lower, x))
        return gap + torch.where(force == 0, 0, force * (end - x)).sum(-1)

    def without_f(self) -> Members:
        """With f = 0, of which forces alone prove that members have no point in common."""
        program = self.program
        return Members(self.sets, program._replace(P=0 * program.P, q=0 * program.q))

    def middle(self) -> Tensor:  # (B, n)
        """Of the first set that is bounded; zero where none is."""
        zero = torch.zeros_like(self.program.q)
        return zero if self._carrier is None else self.sets[self._carrier].outside(zero)

    @property
    def _carrier(self) -> int | None:
        """The first set that is bounded."""
        return next((i for i, part in enumerate(self.sets) if part.is_bounded(self.n)), None)

    def terms(self, x: Tensor, slope: Tensor, forces: Forces) -> Tensor:  # (B,)
        """The size of what the gap is a sum of, slope (B, n) that of the terms of ∇f."""
        program = self.program
        flat = program.absolute()
        reach = x.abs()
        for i, (part, force) in enumerate(zip(self.sets, forces.sets, strict=True)):
            reach = reach + (part.vertex(-force) - x).abs()
            if i == self._carrier:  # of the rounding of ∇f too, whichever way that points
                reach = reach + part.inner.diameter(self.n).unsqueeze(-1)
        rows = forces.rows.abs() * (times(flat.G, x.abs()) + _finite(program.h))
        lines = forces.equations.abs() * (flat.along(x.abs()) + program.b.abs())
        return (self._sizes(slope, forces) * reach).sum(-1) + rows.sum(-1) + lines.sum(-1)

    def _sizes(self, slope: Tensor, forces: Forces) -> Tensor:  # (B, n)
        """Of what ∇f and forces are the sum of, for terms of ∇f of this size."""
        flat = self.program.absolute()
        held = forces.sets.abs().sum(0) + forces.bounds.abs()
        along = times(flat.G.mT, forces.rows.abs()) + flat.pulled(forces.equations.abs())
        return slope + held + along

    def missed(self, x: Tensor) -> Tensor:  # (B,)
        """How far x is outside of the member it misses most."""
        program = self.program
        parts = [part.violation(x) for part in self.sets]
        parts.append((x - self.clipped(x)).abs().amax(-1))
        if program.h.shape[-1]:
            over = times(program.G, x) - program.h
            parts.append(over.amax(-1).clamp_min(0))
        if program.b.shape[-1]:
            parts.append((program.along(x) - program.b).abs().amax(-1))
        return torch.stack(parts).amax(0)


def bend_of(face: Face) -> Bend:
    """1 − the derivative of a projection, told from the face it ends on.

    With R the directions of the face, N its normals and C its curvature the derivative is
    K − K Nᵀ (N K Nᵀ)⁻¹ N K, where K is the inverse of 1 + C on R.
    """
    x = face.x
    N = rows_of(face)
    bend = face.curvature_diagonal() if face.bends else torch.zeros_like(x)
    if face.free is not None and bend is not None:
        K = face.free / (1 + bend)
        across = K.unsqueeze(-2) * N
        return Bend(1 - K, _halved(across, N).mT, None)
    n = x.shape[-1]
    eye = torch.eye(n, dtype=x.dtype, device=x.device).unsqueeze(1).expand(n, *x.shape)
    R = face.restrict(eye).movedim(0, -1)
    C = face.curvature(eye).movedim(0, -1) if face.bends else torch.zeros_like(R)
    full = R @ (0.5 * (C + C.mT)) @ R + torch.eye(n, dtype=x.dtype, device=x.device)
    K = R @ lu_inverse(full) @ R
    return Bend(torch.ones_like(x), _halved(N @ K, N).mT, -K)


def _halved(across: Tensor, N: Tensor) -> Tensor:  # (B, k, n)
    """W with WᵀW = (N K)ᵀ (N K Nᵀ)⁻¹ N K, for N K."""
    inner = across @ N.mT
    if N.shape[-2] == 1:
        return torch.where(inner > 0, across * or_one(inner).rsqrt(), 0)
    values, vectors = torch.linalg.eigh(0.5 * (inner + inner.mT))
    usable = values > 1e-12 * values.amax(-1, keepdim=True) if values.shape[-1] else values > 0
    share = torch.where(usable, or_one(values).rsqrt(), 0)
    halved: Tensor = share.unsqueeze(-1) * (vectors.mT @ across)
    return halved


def rows_of(face: Face) -> Tensor:  # (B, m, n)
    """The normals of a face."""
    if not face.normals:
        return face.x.unsqueeze(-2)[..., :0, :]
    return torch.stack(face.normals, -2)


def _finite(v: Tensor) -> Tensor:
    return torch.where(torch.isfinite(v), v, 0).abs()
