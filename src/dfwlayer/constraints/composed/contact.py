"""Newton's method on the faces of all members at once, for the last digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.constraints.composed.members import ROUNDING, Forces, Members, rows_of
from dfwlayer.linalg.bordered import bordered
from dfwlayer.linalg.quadratic import Saddle
from dfwlayer.ops.matrices import times
from dfwlayer.ops.rows import column, norm, or_one
from dfwlayer.ops.scale import Scale

__all__ = ["Contact", "across", "in_contact"]

STEPS = 16  # at most


class Contact(NamedTuple):
    """A point and the forces there."""

    x: Tensor  # (B, n)
    forces: Forces
    exact: Tensor  # (B,), optimal to rounding, which the forces prove


class Held(NamedTuple):
    """What the members hold of a point."""

    free: Tensor  # (B, n), coordinates that none of them pins
    at: Tensor  # (B, n), the point, with pinned coordinates in their places
    above: Tensor  # (B, n), at the upper bound
    below: Tensor  # (B, n), at the lower bound
    rows: Tensor  # (B, m), of G


def in_contact(
    members: Members,
    x: Tensor,  # (B, n)
    points: Tensor,  # (S, B, n)
    forces: Forces,
    size: Tensor,  # (B,)
) -> Contact:
    """Minimise f on the faces that forces tell at the points of the sets next to x.

    ``size`` is how large x may be: what a slack is measured by where f does not bend, as x itself
    may be zero. A force below the rounding of ∇f counts as none, unless without it x ends outside:
    what keeps x in its set is a force, however small f is.
    """
    program = members.program
    curvature = program.P.diagonal(dim1=-2, dim2=-1).expand_as(x)
    firm = curvature.mean(-1, keepdim=True)
    slope = program.q.abs().amax(-1, keepdim=True)
    firm = torch.where(firm > 0, firm, or_one(slope / or_one(size).unsqueeze(-1)))
    nudge = torch.zeros_like(forces.sets)  # (S, B, n), rounding of ∇f towards the outside
    going = torch.ones_like(size, dtype=torch.bool)  # a problem ends where it would alone
    for _ in range(STEPS):
        before, pulled = x, forces
        noise = ROUNDING * (curvature * x.abs() + program.q.abs()).amax(-1, keepdim=True)
        needed = (nudge != 0).any(-1, keepdim=True)
        felt = torch.where(needed, 0, noise).expand_as(nudge)
        faces = [
            part.face(points[i], -(forces.sets[i] + nudge[i]), Scale(curvature, felt[i]))
            for i, part in enumerate(members.sets)
        ]
        held = _held(members, faces, x, forces, firm)
        pinned = [across(face) for face in faces]
        N, given, missed = _equations(members, faces, pinned, points, forces, held)
        right = -(program.gradient(held.at) + times(N.mT, given))
        u, change = _solved(members, faces, N, held.free, right, -missed)
        x, multipliers = held.at + u, given + change
        forces = _split(members, faces, pinned, forces, held, N, multipliers, x)
        x = torch.where(going.unsqueeze(-1), x, before)
        forces = forces.chosen(going, pulled)
        points = torch.stack([part.retract(x) for part in members.sets]) if faces else points
        rounding = ROUNDING * (x.abs().amax(-1) + 1e-300)
        if not faces:
            over = nudge
        else:
            idle = (forces.sets == 0).all(-1)  # (S, B)
            out = torch.stack([part.violation(x) for part in members.sets]) > rounding
            over = torch.where((idle & out).unsqueeze(-1), x - points, 0)
        outside = (over != 0).any(-1).any(0)  # (B,)
        going = going & (outside | (u.abs().amax(-1) > rounding))
        if not bool(going.any()):
            break
        if bool(outside.any()):
            over = torch.where(going.unsqueeze(-1), over, 0)
            forces = forces._replace(sets=forces.sets + firm * over)
            nudge = torch.where(over != 0, noise * over / or_one(norm(over).unsqueeze(-1)), nudge)
    x = members.clipped(x)  # rounding of a zero may be outside by as much as it is
    return Contact(x, forces, _proven(members, x, forces))


def across(face: Face) -> Tensor | None:  # (B, r, n)
    """An orthonormal basis of what a face pins, None if that is coordinates.

    Problems that have fewer have zeros in it.
    """
    if face.free is not None:
        return None
    x = face.x
    n = x.shape[-1]
    eye = torch.eye(n, dtype=x.dtype, device=x.device)
    R = face.restrict(eye.unsqueeze(1).expand(n, *x.shape)).movedim(0, -1)
    values, vectors = torch.linalg.eigh(eye - 0.5 * (R + R.mT))
    inside = values > 0.5
    most = int(inside.sum(-1).amax())
    basis: Tensor = (vectors * inside.unsqueeze(-2)).mT[..., n - most :, :]
    return basis


def _held(members: Members, faces: Sequence[Face], x: Tensor, forces: Forces, firm: Tensor) -> Held:
    """By the signs of forces that have a slack added to them, as in `dfwlayer.ops.scale`."""
    program, y = members.program, forces.bounds
    above, below = y + firm * (x - program.upper) > 0, y + firm * (x - program.lower) < 0
    above = above | (program.lower >= program.upper)
    below = below & ~above
    rows = forces.rows + firm * (times(program.G, x) - program.h) > 0
    at = torch.where(above, program.upper, torch.where(below, program.lower, x))
    free = ~(above | below)
    for part, face in zip(members.sets, faces, strict=True):
        if face.free is not None:
            at = torch.where(free & ~face.free, part.outside(face.x), at)
            free = free & face.free
    return Held(free, at, above, below, rows)


def _equations(
    members: Members,
    faces: Sequence[Face],
    pinned: Sequence[Tensor | None],
    points: Tensor,
    forces: Forces,
    held: Held,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normals (B, k, n) of all that holds x, their multipliers, and by how much they are missed."""
    program, at = members.program, held.at
    normals, given, missed = [], [], []
    for i, (part, face) in enumerate(zip(members.sets, faces, strict=True)):
        own = rows_of(face)
        normals.append(own)
        given.append(column(face.multiplier, face.x).expand(*own.shape[:-1]))
        missed.append(face.excess().detach() + times(own, part.inside(at) - face.x))
        if (basis := pinned[i]) is not None:
            normals.append(basis)
            given.append(times(basis, forces.sets[i]))
            missed.append(times(basis, at - points[i]))
    most = int(held.rows.sum(-1).amax()) if held.rows.numel() else 0
    if most:
        mask = held.rows.to(at)
        normals.append(mask.unsqueeze(-1) * program.G)
        given.append(mask * forces.rows)
        over = times(program.G, at) - program.h
        missed.append(torch.where(held.rows, over, 0))
    else:
        normals.append(program.G.expand(len(at), -1, -1) * 0)
        given.append(forces.rows * 0)
        missed.append(forces.rows * 0)
    normals.append(program.A.expand(len(at), -1, -1))
    given.append(forces.equations)
    missed.append(program.along(at) - program.b)
    return torch.cat(normals, -2), torch.cat(given, -1), torch.cat(missed, -1)


def _solved(
    members: Members, faces: Sequence[Face], N: Tensor, free: Tensor, v: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """(P + C) u + Nᵀν = v on the free coordinates and N u = c."""
    own = members.diagonal
    bends = [face.curvature_diagonal() for face in faces if face.bends]
    known = [bend for bend in bends if bend is not None]
    if own is not None and len(known) == len(bends) and 2 * N.shape[-2] < members.n:
        D = sum(known, own.expand_as(v))
        if bool((D > 0).all()):
            inverse = torch.where(free, 1 / D, 0)
            solve = bordered(
                lambda u: torch.where(free, D * u, 0),
                lambda r: inverse.unsqueeze(-1) * r,
                N * free.unsqueeze(-2),
                N.new_zeros(len(N), N.shape[-2], N.shape[-2]),
            )
            return solve(torch.where(free, v, 0), c)
    H = members.program.P.expand(len(v), -1, -1)
    eye = torch.eye(members.n, dtype=v.dtype, device=v.device)
    for face in faces:
        if face.bends:
            bend = face.curvature_diagonal()
            if bend is None:
                full = face.curvature(eye.unsqueeze(1).expand(members.n, *v.shape))
                H = H + full.movedim(0, -1)
            else:
                H = H + torch.diag_embed(bend)
    return Saddle.of(H, N, free).nearest(v, c)


def _split(
    members: Members,
    faces: Sequence[Face],
    pinned: Sequence[Tensor | None],
    forces: Forces,
    held: Held,
    N: Tensor,
    multipliers: Tensor,
    x: Tensor,
) -> Forces:
    """Forces that add up to −∇f on the coordinates that some member holds.

    The multipliers tell those along the normals. What a coordinate that is pinned needs beside
    them is what it had, and a change in which all members that pin it have an equal part.
    """
    along, first = [], 0
    for face, basis in zip(faces, pinned, strict=True):
        count = len(face.normals) + (0 if basis is None else basis.shape[-2])
        own = slice(first, first + count)
        along.append(times(N[:, own].mT, multipliers[:, own]))
        first += count
    m = members.program.h.shape[-1]
    rows, equations = multipliers[:, first : first + m], multipliers[:, first + m :]
    rest = -(members.program.gradient(x) + times(N[:, first:].mT, multipliers[:, first:]))
    rest = rest - sum(along, torch.zeros_like(x))
    masks = [torch.zeros_like(held.free) if f.free is None else ~f.free for f in faces]
    kept = [torch.where(mask, forces.sets[i] - along[i], 0) for i, mask in enumerate(masks)]
    at_bounds = held.above | held.below
    bounds = torch.where(at_bounds, forces.bounds, 0)
    rest = rest - bounds - sum(kept, torch.zeros_like(x))
    share = rest / (at_bounds.to(x) + sum(mask.to(x) for mask in masks)).clamp_min(1)
    sets = [
        a + k + torch.where(mask, share, 0) for a, k, mask in zip(along, kept, masks, strict=True)
    ]
    bounds = bounds + torch.where(at_bounds, share, 0)
    stacked = torch.stack(sets) if sets else forces.sets
    return Forces(stacked, bounds, rows, equations)


def _proven(members: Members, x: Tensor, forces: Forces) -> Tensor:
    """Whether x is in all members, and the forces prove that it is optimal, to rounding."""
    gap = members.gap(x, members.program.gradient(x), forces)
    terms = members.program.absolute().gradient(x.abs())
    size = x.abs().amax(-1) + 1e-300
    inside = members.missed(x) <= ROUNDING * size
    return inside & (gap <= ROUNDING * members.terms(x, terms, forces))
