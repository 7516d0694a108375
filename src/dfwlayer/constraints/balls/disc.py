"""The part of a Euclidean ball that lies in a plane, a ball of one dimension less."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.constraints.parameters import as_column, as_entries, entries, fault, number
from dfwlayer.constraints.plain import Plain, PlainFormula
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.rows import dot, or_one
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.values import Value, tensor_of
from dfwlayer.solution import Status

__all__ = ["Disc"]

ROUNDING = 4  # units in the last place by which the plane or the radius may be missed


@dataclass(frozen=True)
class Disc(Constraint):
    """{x : ‖x‖₂ ≤ t, ⟨a, x⟩ = b}.

    With c = ba/⟨a, a⟩ it is the ball ‖x − c‖ ≤ ρ = √(t² − ‖c‖²) in the plane. It is what
    `PlaneCut` makes of an `LpBall` with p = 2 and without weights.

    Args:
        radius: t ≥ 0, a number, a 0-d tensor or (B,).
        normal: a, a number, (n,) or (B, n).
        level: b, a number, a 0-d tensor or (B,), no further from 0 than t‖a‖.

    """

    radius: Value = field(default=1.0, metadata=number(least=0, grows=True))
    normal: Value = field(default=1.0, metadata=entries(harmless=0.0))
    level: Value = field(default=1.0, metadata=number(harmless=0.0, grows=True))

    def check_values(self) -> Tensor | None:
        """A level that ⟨a, x⟩ takes on the ball."""
        if not self.bound:
            return None
        size = torch.linalg.vector_norm(tensor_of(self.normal).detach().double(), dim=-1)
        most = tensor_of(self.radius).detach().double() * size
        level = tensor_of(self.level).detach().double()
        allowed = most * (1 + ROUNDING * torch.finfo(tensor_of(self.level).dtype).eps)
        return fault(
            level.abs() > allowed,
            Status.INFEASIBLE,
            lambda: (
                f"level: expected a number between {-float(most):g} and {float(most):g}, the range "
                f"of ⟨normal, x⟩ on the set, found {float(level):g}"
            ),
        )

    def start(self, like: Tensor) -> Tensor:
        """The centre of the disc."""
        return self._parts(like, constant=True)[1].to(like.dtype).expand_as(like)

    def vertex(self, g: Tensor) -> Tensor:
        """c − ρ h/‖h‖ for the part h of g in the plane."""
        unit, centre, reach = self._parts(g)
        along = _in_plane(g.double(), unit)
        size = torch.linalg.vector_norm(along.detach(), dim=-1, keepdim=True)
        noise = 8 * torch.finfo(g.dtype).eps * g.detach().abs().amax(-1, keepdim=True)
        some = size > noise
        inside = torch.where(some, along, 1)
        way = inside / torch.linalg.vector_norm(inside, dim=-1, keepdim=True)
        return (centre - torch.where(some, reach * way, 0)).to(g.dtype)

    def lowest(self, g: Tensor) -> Tensor:
        """⟨g, c⟩ − ρ‖h‖."""
        unit, centre, reach = self._parts(g, constant=True)
        wide = g.detach().double()
        size = torch.linalg.vector_norm(_in_plane(wide, unit), dim=-1)
        low: Tensor = dot(wide, centre.expand_as(wide)) - reach.squeeze(-1) * size
        return low.to(g.dtype)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """The vertex, which is smooth."""
        return self.vertex(g)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """See `formula`."""
        return self.formula(z)

    def plain(self, *, fixed: bool = True) -> Plain:
        """The formula."""
        return PlainFormula(self.as_bound())

    def formula(self, z: Tensor) -> Tensor:
        """c + y min(1, ρ/‖y‖) for the part y of z in the plane."""
        unit, centre, reach = self._parts(z, constant=True)
        along = _in_plane(z.detach().double(), unit)
        size = torch.linalg.vector_norm(along, dim=-1, keepdim=True)
        return (centre + along * (reach / or_one(size)).clamp(max=1)).to(z.dtype)

    def retract(self, x: Tensor) -> Tensor:
        """x where it is in the disc to rounding, otherwise the projection."""
        at, eps = x.detach(), torch.finfo(x.dtype).eps
        over, missed, size = self._missed(at)
        outside = (over > 2 * eps * tensor_of(self.radius).detach()) | (missed > 2 * eps * size)
        if not bool(outside.any()):
            return x
        return moved_to(x, torch.where(outside.unsqueeze(-1), self.project(at), at))

    def violation(self, x: Tensor) -> Tensor:
        """The larger of ‖x‖ − t and |⟨a, x⟩ − b|."""
        over, missed, _ = self._missed(x.detach())
        return torch.maximum(over, missed).clamp_min(0).to(x.dtype)

    def diameter(self, n: int) -> Tensor:
        """2ρ."""
        return 2 * self._parts(self.blank(n), constant=True)[2].squeeze(-1)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> DiscFace:
        """Whether the ball holds x in the plane."""
        unit, centre, reach = self._parts(x, constant=True)
        wide, slope = x.detach().double(), g.detach().double()
        away, pull = wide - centre, _in_plane(slope, unit)
        size = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
        force = -dot(pull, away).unsqueeze(-1) / or_one(size)  # along the rim's normal
        normal = _in_plane(away, unit) / or_one(size)
        if scale is None:
            slack = 1 - size / or_one(reach)
            tight = slack <= 8 * torch.finfo(x.dtype).eps * math.sqrt(x.shape[-1])
        else:
            parts = force, reach - size, normal, normal
            tight = scale.felt(*(part.to(x.dtype) for part in parts))
        t = as_column(self.radius, x).detach().double()
        point = (reach <= 0).expand_as(size)
        active = tight & (force > 0) & ~point
        own = torch.where(active, force * t / or_one(reach), 0)  # of ‖x‖, whose slope is x/t
        a, b = as_entries(self.normal, x).detach().double(), as_column(self.level, x).detach()
        square = or_one((a * a).sum(-1, keepdim=True))
        rest = dot(a.expand_as(slope), slope).unsqueeze(-1) + own * b / or_one(t)
        multiplier = torch.cat((own, (-rest / square).expand_as(own)), -1).to(x.dtype)
        free = ~point.expand_as(x)
        return DiscFace(self, x, free, multiplier, active)

    def _parts(self, like: Tensor, constant: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """a/‖a‖, c and ρ in double precision, differentiable unless they are to be constant."""
        a = as_entries(self.normal, like).double().expand(*_lead(self.normal), like.shape[-1])
        t, b = (as_column(v, like).double() for v in (self.radius, self.level))
        if constant:
            a, t, b = a.detach(), t.detach(), b.detach()
        some = (a != 0).any(-1, keepdim=True)
        size = torch.linalg.vector_norm(torch.where(some, a, 1), dim=-1, keepdim=True)
        unit = torch.where(some, a / size, 0)
        height = torch.where(some, b / size, 0)
        square = (t - height) * (t + height)
        inside = square > 0
        reach = torch.where(inside, torch.where(inside, square, 1).sqrt(), 0)
        return unit, height * unit, reach

    def _missed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # each (...)
        """‖x‖ − t, |⟨a, x⟩ − b|, and the size of the terms of that."""
        wide = x.double()
        a = as_entries(self.normal, x).detach().double()
        t, b = (tensor_of(v).detach().double() for v in (self.radius, self.level))
        over = torch.linalg.vector_norm(wide, dim=-1) - t
        return over, ((a * wide).sum(-1) - b).abs(), (a * wide).abs().sum(-1) + b.abs()


@dataclass(frozen=True)
class DiscFace(Face):
    """‖x‖₂ = t where the ball holds x, and ⟨a, x⟩ = b."""

    constraint: Disc
    x: Tensor  # (..., n)
    free: Tensor  # (..., n), none where the disc is a point
    multiplier: Tensor  # (..., 2), of the ball and of the plane
    active: Tensor  # (..., 1), whether the ball holds x

    bends = True

    @cached_property
    def normals(self) -> tuple[Tensor, ...]:
        """x/‖x‖ and a."""
        a = as_entries(self.constraint.normal, self.x).detach()
        return torch.where(self.active, self._outward().detach(), 0), a * self.free

    def curvature(self, v: Tensor) -> Tensor:
        """λ/‖x‖ v; the rest vanishes on the tangent space."""
        return self.curvature_diagonal() * v

    def curvature_diagonal(self) -> Tensor:
        """λ/‖x‖."""
        bend = self.multiplier[..., :1].detach() / self._size().detach()
        return torch.where(self.active, bend, 0).expand_as(self.x)

    def force(self) -> Tensor:
        """λx/‖x‖ + μa."""
        own = torch.where(self.active, self.multiplier[..., :1] * self._outward(), 0)
        return own + self.multiplier[..., 1:] * as_entries(self.constraint.normal, self.x)

    def excess(self) -> Tensor:
        """‖x‖ − t and ⟨a, x⟩ − b."""
        t, b = (as_column(v, self.x) for v in (self.constraint.radius, self.constraint.level))
        over = torch.where(self.active, self._size() - t, 0)
        a = as_entries(self.constraint.normal, self.x)
        return torch.cat((over, (a * self.x).sum(-1, keepdim=True) - b), -1)

    def pinned(self) -> Tensor:
        """c where the disc is a point."""
        if bool(self.free.all()):
            return torch.zeros_like(self.x)
        centre = self.constraint._parts(self.x)[1].to(self.x.dtype)
        return torch.where(self.free, 0, centre)

    def _size(self) -> Tensor:
        """‖x‖, 1 where it is not needed."""
        inside = torch.where(self.active, self.x, 1)
        size: Tensor = torch.linalg.vector_norm(inside, dim=-1, keepdim=True)
        return size

    def _outward(self) -> Tensor:
        return self.x / self._size()


def _lead(value: Value) -> tuple[int, ...]:
    return tuple(tensor_of(value).shape[:-1])


def _in_plane(v: Tensor, unit: Tensor) -> Tensor:
    """v without its part along a unit vector, or zero.

    Taken out twice: what rounding leaves of it the first time may be all that is left of a v that
    is nearly along it, and would point out of the plane.
    """
    for _ in range(2):
        v = v - (v * unit).sum(-1, keepdim=True) * unit
    return v
