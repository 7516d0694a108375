"""Where several sets meet: the minimiser of a quadratic function over their intersection.

Each set has a copy x_i of the variable, and a force y_i that holds it. Steps of alternating
directions (Boyd et al., 2011) bring the copies together,

    x = argmin ½ xᵀPx + qᵀx + Σ ρ/2 ‖x − x_i + y_i/ρ‖²,
    x_i = the projection of x + y_i/ρ onto S_i,   y_i ← y_i + ρ (x − x_i),

until the faces on which the copies lie are those of the solution. Newton's method on all these
faces together then finds x and the multipliers to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.linalg.quadratic import Saddle
from dfwlayer.ops.matrices import times
from dfwlayer.ops.rows import column, or_one
from dfwlayer.ops.scale import Scale

__all__ = ["Meeting", "Seen", "gap_of", "meet"]

STEPS = 5000  # of alternating directions
RELAXED = 1.6
NEWTON = 12  # steps on the faces
CLOSE = 1e-2  # distance of the copies, relative, at which their faces are first tried
APART = 1e-7  # what a proof of emptiness may be off by, relative to what it proves
ROUNDING = 256 * torch.finfo(torch.float64).eps


class Seen(NamedTuple):
    """A bound set {x : x − c ∈ S}, c (n,) or (B, n), asked for points x."""

    inner: Constraint  # S
    centre: Tensor | None  # c

    @classmethod
    def of(cls, part: Constraint) -> Seen:
        """Of a bound set, around its centre if it has one."""
        centre: Tensor | None = None
        while (found := part.centred()) is not None:
            part, own = found
            centre = own if centre is None else centre + own
        return cls(part, centre)

    def inside(self, x: Tensor) -> Tensor:
        """x − c."""
        return x if self.centre is None else x - self.centre

    def outside(self, y: Tensor) -> Tensor:
        """c + y."""
        return y if self.centre is None else y + self.centre

    def project(self, z: Tensor) -> Tensor:
        """The point nearest to z."""
        return self.outside(self.inner.project(self.inside(z)))

    def retract(self, x: Tensor) -> Tensor:
        """A point next to x."""
        return self.outside(self.inner.retract(self.inside(x)))

    def vertex(self, g: Tensor) -> Tensor:
        """The minimiser of ⟨g, s⟩."""
        return self.outside(self.inner.vertex(g))

    def lowest(self, g: Tensor) -> Tensor:
        """min ⟨g, s⟩, −∞ where the set is open in a direction in which that falls."""
        low = self.inner.lowest(g)
        endless = self.inner.open_ended(g)
        if endless is not None:
            low = torch.where((endless & (g != 0)).any(-1), -torch.inf, low)
        return low if self.centre is None else low + (g * self.centre).sum(-1)

    def is_bounded(self, n: int) -> bool:
        """Whether every linear function has a least value on the set."""
        return bool(torch.isfinite(self.inner.diameter(n)).all())

    def violation(self, x: Tensor) -> Tensor:
        """How far x is outside."""
        return self.inner.violation(self.inside(x))

    def face(self, x: Tensor, g: Tensor, scale: Scale | None) -> Face:
        """That of S at x − c."""
        return self.inner.face(self.inside(x), g, scale)


class Meeting(NamedTuple):
    """What was found of B problems; vectors are in double precision."""

    x: Tensor  # (B, n)
    forces: tuple[Tensor, ...]  # y_i (B, n), in the normal cone of S_i at x; −∇f is their sum
    exact: Tensor  # (B,)
    empty: Tensor  # (B,)
    steps: Tensor  # (B,)


def meet(sets: Sequence[Seen], P: Tensor, q: Tensor, most: int) -> Meeting:
    """Minimise ½ xᵀPx + qᵀx, P (·, n, n) and q (B, n), over the intersection of bound sets."""
    count = len(sets)
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    rho = _first(P, q)
    copies = torch.stack([part.project(torch.zeros_like(q)) for part in sets])
    x, y = copies.mean(0), torch.zeros_like(copies)
    best = Meeting(
        x,
        tuple(y),
        torch.zeros_like(q[:, 0], dtype=torch.bool),
        torch.zeros_like(q[:, 0], dtype=torch.bool),
        torch.zeros_like(q[:, 0], dtype=torch.long),
    )
    inverse = torch.linalg.inv(P + count * rho * eye)
    tried = 8
    for step in range(1, min(most, STEPS) + 1):
        x = times(inverse, -q + (rho[:, 0] * copies - y).sum(0))
        mixed = RELAXED * x + (1 - RELAXED) * copies
        before, forces = copies, y
        copies = torch.stack(
            [part.project(mixed[i] + y[i] / rho[:, 0]) for i, part in enumerate(sets)]
        )
        y = y + rho[:, 0] * (mixed - copies)
        done = best.exact | best.empty
        best = best._replace(steps=best.steps + ~done)
        # x may be zero; the way that the forces have held it back is not
        size = copies.abs().amax((0, -1)) + (y / rho[:, 0]).abs().amax((0, -1)) + 1e-300
        primal = (x - copies).abs().amax((0, -1)) / size
        dual = (rho[:, 0] * (copies - before)).sum(0).abs().amax(-1)
        scale = y.abs().amax((0, -1)) + times(P, x).abs().amax(-1) + q.abs().amax(-1) + 1e-300
        dual = dual / scale
        if step == tried or step == min(most, STEPS):
            tried = tried * 3 // 2
            near = ~done & (torch.maximum(primal, dual) < CLOSE)
            best = _newton(sets, P, q, copies, y, near, best)
            best = _proof(sets, y - forces, ~(best.exact | best.empty), best)
            if bool((best.exact | best.empty).all()):
                break
            best = best._replace(
                x=torch.where(best.exact.unsqueeze(-1), best.x, copies.mean(0)),
                forces=tuple(
                    torch.where((best.exact | best.empty).unsqueeze(-1), old, new)
                    for old, new in zip(best.forces, y, strict=True)
                ),
            )
            # forces that lag behind want a larger ρ, copies that do a smaller one
            ratio = (primal / or_one(dual)).clamp(1e-2, 1e2).sqrt()
            ratio = torch.where((ratio > 2) | (ratio < 0.5), ratio, 1)[:, None, None]
            if bool((ratio != 1).any()):
                rho = (rho * ratio).clamp(1e-12, 1e12)
                inverse = torch.linalg.inv(P + count * rho * eye)
    return best


def _first(P: Tensor, q: Tensor) -> Tensor:  # (B, 1, 1)
    """A ρ of the size of the curvature, or, where there is none, of the slope."""
    bend = P.diagonal(dim1=-2, dim2=-1).mean(-1)
    slope = q.abs().amax(-1)
    rho = torch.where(bend > 1e-12 * slope, bend, torch.where(slope > 0, slope, 1))
    return rho[:, None, None]


def _faces(
    sets: Sequence[Seen], P: Tensor, q: Tensor, x: Sequence[Tensor], y: Sequence[Tensor]
) -> list[Face]:
    """The face of each set at its point, given the force with which it holds it."""
    curvature = P.diagonal(dim1=-2, dim2=-1).expand_as(q)
    terms = curvature * x[0].abs() + q.abs()
    scale = Scale(curvature, ROUNDING * terms.amax(-1, keepdim=True).expand_as(q))
    return [part.face(at, -force, scale) for part, at, force in zip(sets, x, y, strict=True)]


def _newton(
    sets: Sequence[Seen],
    P: Tensor,
    q: Tensor,
    copies: Tensor,
    y: Tensor,
    near: Tensor,
    best: Meeting,
) -> Meeting:
    """Newton's method for the conditions of optimality on the faces of the copies."""
    if not bool(near.any()):
        return best
    points, forces = list(copies), list(y)
    x = copies.mean(0)
    for _ in range(NEWTON):
        faces = _faces(sets, P, q, points, forces)
        if any(face.free is None for face in faces):
            return best  # its directions are not coordinates
        free, pinned = _together(sets, faces, x)
        rows = [_normals(face) for face in faces]
        N = torch.cat(rows, -2)
        at = torch.where(free, x, pinned)
        bend = sum((_bend(face) for face in faces), P.expand(len(q), *P.shape[-2:]))
        seen = zip(sets, faces, rows, strict=True)
        excess = [_missed(face, part.inside(at), own) for part, face, own in seen]
        gradient = times(P, at) + q
        # at the multipliers of the faces, which Newton's method would only change
        given = torch.cat([column(face.multiplier, face.x) for face in faces], -1)
        saddle = Saddle.of(bend, N, free)
        u, change = saddle.solve(-gradient - times(N.mT, given), -torch.cat(excess, -1))
        x = at + u
        multipliers = given + change
        sizes = [own.shape[-2] for own in rows]
        along = [
            times(own.mT, part)
            for own, part in zip(rows, torch.split(multipliers, sizes, -1), strict=True)
        ]
        forces = split_of(faces, along, times(P, x) + q)
        points = [part.retract(x) for part in sets]
        moved = u.abs().amax(-1)
        if bool((moved[near] <= ROUNDING * (x.abs().amax(-1)[near] + 1e-300)).all()):
            break
    return _accepted(sets, P, q, x, forces, near, best)


def _accepted(
    sets: Sequence[Seen],
    P: Tensor,
    q: Tensor,
    x: Tensor,
    forces: Sequence[Tensor],
    near: Tensor,
    best: Meeting,
) -> Meeting:
    """Take a point that is in all sets and at which the forces prove that it is optimal."""
    gradient = times(P, x) + q
    gap = gap_of(sets, x, gradient, forces)
    size = times(P.abs(), x.abs()) + q.abs() + sum(force.abs() for force in forces)
    reach = x.abs() + sum(
        (part.vertex(-force) - x).abs() for part, force in zip(sets, forces, strict=True)
    )
    rounding = ROUNDING * (size * reach).sum(-1)
    inside = torch.ones_like(near)
    for part in sets:
        allowed = ROUNDING * (x.abs().amax(-1) + 1e-300)
        inside = inside & (part.violation(x) <= allowed)
    exact = near & inside & (gap <= rounding)
    mask = exact.unsqueeze(-1)
    return best._replace(
        x=torch.where(mask, x, best.x),
        forces=tuple(
            torch.where(mask, new, old) for new, old in zip(forces, best.forces, strict=True)
        ),
        exact=best.exact | exact,
    )


def gap_of(sets: Sequence[Seen], x: Tensor, gradient: Tensor, forces: Sequence[Tensor]) -> Tensor:
    """f(x) − f* ≤ Σ ⟨g_i, x⟩ − min ⟨g_i, s⟩ over S_i, for any g_i that add up to the gradient.

    What the forces leave of it is for a set that is bounded, if there is one.
    """
    rest = gradient + sum(forces)
    gap = torch.zeros_like(x[..., 0])
    bounded = (i for i, part in enumerate(sets) if part.is_bounded(x.shape[-1]))
    carrier = next(bounded, 0)
    for i, (part, force) in enumerate(zip(sets, forces, strict=True)):
        own = rest - force if i == carrier else -force
        gap = gap + ((own * x).sum(-1) - part.lowest(own))
    return gap


def split_of(faces: Sequence[Face], along: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Forces y_i that add up to −∇f on the coordinates that some set holds.

    ``along`` are those of the normals; what is left on a coordinate that is pinned is the force of
    the first set that pins it.
    """
    rest = -(gradient + sum(along))
    forces = []
    for face, part in zip(faces, along, strict=True):
        assert face.free is not None
        own = torch.where(face.free, 0, rest)
        rest = rest - own
        forces.append(part + own)
    return forces


def _together(sets: Sequence[Seen], faces: Sequence[Face], x: Tensor) -> tuple[Tensor, Tensor]:
    """The coordinates that no set pins, and the values of the others."""
    free, pinned = torch.ones_like(x, dtype=torch.bool), torch.zeros_like(x)
    for part, face in zip(sets, faces, strict=True):
        assert face.free is not None
        pinned = torch.where(free & ~face.free, part.outside(face.x), pinned)
        free = free & face.free
    return free, pinned


def _normals(face: Face) -> Tensor:  # (B, m, n)
    """All the normals, with the parts on coordinates that only this set frees."""
    if not face.normals:
        return face.x.new_zeros(len(face.x), 0, face.x.shape[-1])
    return torch.stack(face.normals, -2)


def _missed(face: Face, at: Tensor, normals: Tensor) -> Tensor:  # (B, m)
    """By how much the active constraints are missed at a point next to that of the face."""
    return face.excess().detach() + times(normals, at - face.x)


def _bend(face: Face) -> Tensor:
    """C (B, n, n)."""
    n = face.x.shape[-1]
    if not face.bends:
        return face.x.new_zeros(len(face.x), n, n)
    eye = torch.eye(n, dtype=face.x.dtype, device=face.x.device)
    return torch.stack([face.curvature(unit.expand_as(face.x)) for unit in eye], -1)


def _proof(sets: Sequence[Seen], change: Tensor, open_ended: Tensor, best: Meeting) -> Meeting:
    """Whether the forces that still grow pull the sets apart: Σ d_i = 0 and Σ max ⟨d_i, s⟩ < 0."""
    if not bool(open_ended.any()):
        return best
    d = change - change.mean(0)
    size = d.abs().amax((0, -1)).clamp_min(1e-300)
    d = d / size[:, None]
    most = torch.zeros_like(best.x[:, 0])
    terms = torch.zeros_like(most)
    for part, own in zip(sets, d, strict=True):
        low = part.lowest(-own)
        most, terms = most - low, terms + low.abs()
    empty = open_ended & (most < -APART * terms)
    return best._replace(
        empty=best.empty | empty,
        forces=tuple(
            torch.where(empty.unsqueeze(-1), own, old)
            for own, old in zip(d, best.forces, strict=True)
        ),
    )
