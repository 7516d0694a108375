"""The weighted ℓp ball ‖w ∘ x‖_p ≤ t, for any p in [1, ∞]."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dfwlayer.arguments import as_number
from dfwlayer.constraints.balls.ball import Ball
from dfwlayer.constraints.balls.l1_nearest import nearest_l1
from dfwlayer.constraints.balls.lp_face import LpFace, lp_face
from dfwlayer.constraints.balls.lp_projection import AxisBounds, project_l1, project_lp
from dfwlayer.constraints.balls.signed_axes import SignedAxes
from dfwlayer.constraints.base import Atoms, Face, measured
from dfwlayer.constraints.parameters import entries, number
from dfwlayer.constraints.plain import Plain, PlainFlat, PlainPower
from dfwlayer.constraints.region import Block, Flat, Power, Region, Round
from dfwlayer.ops import fused
from dfwlayer.ops.rows import Scalar, dot, or_one, scaled_norm
from dfwlayer.ops.scale import Scale, scale_of_terms
from dfwlayer.ops.values import Value, equal, multiplied, on_tensor, tensor_of, total

__all__ = ["LpBall"]


@dataclass(frozen=True)
class LpBall(Ball):
    """{x : ‖w ∘ x‖_p ≤ t}.

    Args:
        p: Any number in [1, ∞] (``math.inf``).
        radius: t ≥ 0, a number, a 0-d tensor or (B,).
        weight: w, (n,) or (B, n), None for ones. Only |w| matters; a zero weight leaves its
            coordinate unconstrained.
        centre: c, (n,) or (B, n); with it the set is ‖w ∘ (x − c)‖_p ≤ t, a `Shifted` ball.

    """

    p: float
    radius: float | Tensor = field(default=1.0, metadata=number(least=0, grows=True))
    weight: Tensor | None = field(default=None, metadata=entries(numbers=False))
    _: KW_ONLY
    centre: InitVar[float | Tensor | None] = None

    ranks: ClassVar[Mapping[str, int]] = {"radius": 0, "weight": 1}

    def __post_init__(self, centre: Value | None) -> None:
        expected = "a number in [1, inf]"
        kind = f"{expected} such as 1, 2 or math.inf"
        p = as_number("p", self.p, expected, kind=kind, least=1, infinite=True)
        object.__setattr__(self, "p", p)
        if not isinstance(self.radius, Tensor):
            expected, kind = "a finite number ≥ 0", "a number or a tensor"
            as_number("radius", self.radius, expected, kind=kind, least=0)
        super().__post_init__()

    def as_recordable(self) -> LpBall | None:
        """Other balls are projected onto by iterations that watch their own convergence."""
        return self if self.p in (1, torch.inf) else None

    def suspect(self) -> Tensor:
        """Whether values are not finite, radii negative, or coordinates not bounded."""
        radius = tensor_of(self.radius).detach()
        total = radius.sum()
        wrong = (radius < 0).any()
        if self.weight is not None:
            size = self.weight.detach().abs()
            total = total + size.sum()
            wrong = wrong | self._too_far(size, radius.unsqueeze(-1)).any()
        return wrong | ~torch.isfinite(total)

    def assume_bounded(self) -> Self:
        """With what `unbounded` would have to find out."""
        copy = self.changed()
        vars(copy)["_unbounded"] = None
        return copy

    def verified(self) -> tuple[Self, Tensor | None]:
        """Finite weights, finite radii that are not negative."""
        return (self.assume_bounded(), None) if self._plain() else super().verified()

    def _plain(self) -> bool:
        """Whether everything is finite and every coordinate bounded, told by the extremes."""
        radius = tensor_of(self.radius).detach()
        if radius.numel() == 0 or (self.weight is not None and self.weight.numel() == 0):
            return False
        low, high = torch.aminmax(radius)  # NaN if there is one
        if not 0 <= low.item() <= high.item() < math.inf:
            return False
        if self.weight is None:
            return True
        least, most = torch.aminmax(self.weight.detach().abs())
        reachable = high.item() / torch.finfo(radius.dtype).max
        return reachable < least.item() <= most.item() < math.inf

    def unbounded(self) -> Tensor | None:
        """Coordinates of zero weight, or whose bound t/w this dtype cannot hold."""
        return self._unbounded

    def bounded(self) -> Tensor | None:
        """Coordinates whose weight is not zero."""
        if self.weight is None or self._unbounded is None:
            return None
        return self.weight.detach() != 0

    def vertex(self, g: Tensor) -> Tensor:
        """The s in the ball with the least ⟨g, s⟩. With 1/p + 1/q = 1 and r = g/w:

        p = 1: s = −(t/w_i) sign(g_i) e_i at the i of the largest |r_i|
        p = ∞: s = −(t/w) ∘ sign(g)
        else:  s_i = −(t/w_i) sign(g_i) |r_i|^(q/p) / ‖r‖_q^(q/p), so that ‖w ∘ s‖_p = t
        """
        reach = self._geometry.reach
        side = -torch.sign(g.detach())
        if self.p == torch.inf:
            return reach * side
        if self.p == 1:
            index = self._pull(g).abs().argmax(-1, keepdim=True)
            at = (reach.expand_as(g) * side).gather(-1, index)
            return torch.zeros_like(g).scatter(-1, index, at)
        pull = self._pull(g).abs()
        # s depends on the direction of r only: the largest entry, as a constant, keeps the powers
        # within range
        largest = pull.detach().amax(-1, keepdim=True)
        ratio = pull / or_one(largest)
        positive = ratio > 0  # at 0 the power's derivative is infinite for p > 2
        power = torch.where(positive, torch.where(positive, ratio, 1) ** (1 / (self.p - 1)), 0)
        total = (power**self.p).sum(-1, keepdim=True)
        size = or_one(total) ** (1 / self.p)
        return reach * side * power / size

    def lowest(self, g: Tensor) -> Tensor:
        """−t ‖g/w‖_q with 1/p + 1/q = 1."""
        if self.p == 1:
            return -(self._geometry.reach * g).abs().amax(-1)
        return dot(g, self.vertex(g))

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """p = 1: −(t/w) ∘ sign(g) ∘ softmax(|(t/w) ∘ g| / τ); for p > 1 the vertex is smooth.

        τ is kept above the rounding of the scores, where soft and hard are the same and the
        derivative 1/τ would overflow.
        """
        if self.p > 1:
            return self.vertex(g)
        reach, unbounded = self._geometry.reach, self._unbounded
        finfo = torch.finfo(g.dtype)
        scores = (reach * g).abs().clamp(max=finfo.max / 4)
        if unbounded is not None:
            scores = torch.where(unbounded, -torch.inf, scores)
        largest = scores.detach().amax(-1, keepdim=True)
        largest = torch.where(torch.isfinite(largest), largest, 0)
        floor = (largest * finfo.eps).clamp_min(finfo.tiny / finfo.eps)
        share = torch.softmax((scores - largest) / floor.clamp_min(temperature), -1)
        if unbounded is not None:
            share = torch.where(unbounded.all(-1, keepdim=True), 0, share)
        return -reach * torch.sign(g.detach()) * share

    def atoms(self) -> Atoms | None:
        """The 2n signed axes for p = 1."""
        if self.p != 1:
            return None
        return SignedAxes(self._geometry.reach)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """See `dfwlayer.constraints.balls.lp_projection`."""
        if self.p == 1:
            return project_l1(self._axis_bounds, z, near)
        weight = self._geometry.size.detach().expand_as(z)
        bounded = None if self._unbounded is None else weight > 0
        radius = tensor_of(self.radius).detach().expand(z.shape[:-1])
        return project_lp(self.p, weight, radius, z, bounded)

    def step(self, x: Tensor, gradient: Tensor, curvature: Scalar) -> Tensor | None:
        """For p = 1."""
        if self.p != 1 or self._unbounded is not None:
            return None
        omega, inverse, _, length, _ = self._axis_bounds
        return fused.step_l1(x, gradient, curvature, omega, inverse, length)

    def diameter(self, n: int) -> Tensor:
        """2 ‖t/w‖_s with s = ∞ for p ≤ 2 and 2p/(p − 2) beyond (2 for p = ∞)."""
        reach, unbounded = self._geometry.reach, self._unbounded
        reach = reach.expand(*reach.shape[:-1], n)
        if self.p <= 2:
            order = torch.inf
        else:
            order = 2.0 if self.p == torch.inf else 2 * self.p / (self.p - 2)
        size = 2 * scaled_norm(reach, order)
        return size if unbounded is None else torch.where(unbounded.any(-1), torch.inf, size)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> LpFace:
        """See `dfwlayer.constraints.balls.lp_face.lp_face`."""
        weight, radius = self._geometry.size, tensor_of(self.radius)
        return lp_face(self.p, weight, radius, x, g, scale, self._unbounded)

    def stretched(self, factor: Tensor) -> LpBall:
        """The ball with weights w/factor."""
        weight = 1 / factor if self.weight is None else self.weight.detach() / factor
        return self.changed(radius=tensor_of(self.radius).detach(), weight=weight)

    def nearest(self, z: Tensor) -> tuple[Tensor, LpFace]:
        """The projection of z and its face, which for p = 1 is plain from it."""
        if self.p == 1:
            weight = None if self.weight is None else self.weight.detach().numpy()
            radius = tensor_of(self.radius).detach()
            found = nearest_l1(z.numpy(), weight, radius.numpy())
            if found is not None:
                x, *parts = map(torch.from_numpy, found)
                return x, self.face_of(x, (*parts, radius.unsqueeze(-1)))
        x = self.retract(self.project(z))
        scale = scale_of_terms(torch.ones_like(z[..., :1]), x, z.abs())
        return x, self.face(x, x - z, scale)

    def region(self, like: Tensor) -> Region | None:
        """For p = 1 and p = ∞; a coordinate of zero weight has no bound."""
        radius = tensor_of(self.radius).detach().unsqueeze(-1).double()
        weight = torch.ones_like(radius) if self.weight is None else self.weight.detach().abs()
        if self.p == 1:
            return Region.of(like, -math.inf, math.inf, budgets=[(weight, radius)])
        if self.p != torch.inf:
            return None
        reach = _quotient(radius, weight)
        return Region.of(like, -reach, reach)

    def normal_form(self, n: int) -> Sequence[Block] | None:
        """Flat for p = 1 and ∞."""
        weight: Value = 1.0 if self.weight is None else self.weight
        radius = total(self.radius)
        if self.p == 2:
            return (Round(n, weight, radius),)
        if self.p == 1:
            return (Flat(n, -math.inf, math.inf, weight, radius),)
        if self.p == torch.inf:
            reach = multiplied(radius, abs(weight), -1)  # type: ignore[arg-type]
            if equal(reach, 0):
                return None
            # a point has a derivative on one side only
            reach = on_tensor(reach, lambda r: torch.where(r.detach() > 0, r, torch.nan))
            return (Flat(n, -reach, reach),)
        return (Power(n, self.p, weight, radius),)

    def form_in_sight(self, n: int) -> Sequence[Block] | None:
        """With bounds t/|w| for p = ∞."""
        return (Flat(n, -self._side, self._side),) if self.p == torch.inf else self.normal_form(n)

    def plain(self, *, fixed: bool = True) -> Plain:
        """A threshold for p = 1, bounds for p = ∞."""
        if self.p == 1:
            weight = 1.0 if self.weight is None else self.weight
            return PlainFlat(-math.inf, math.inf, weight, total(self.radius), ())
        if self.p == torch.inf:
            return PlainFlat(-self._side, self._side, None, 0.0, ())
        return PlainPower(self.p, self.weight, self.radius)

    @property
    def _side(self) -> Value:
        """t/|w|, to which every entry goes for p = ∞."""
        radius = total(self.radius)
        return radius if self.weight is None else _quotient(radius, self.weight.abs())

    def face_parts(self, face: Face) -> tuple[Tensor, ...]:
        assert isinstance(face, LpFace)
        return face.free, torch.as_tensor(face.multiplier), face.normal, torch.as_tensor(face.size)

    def face_of(self, x: Tensor, parts: Sequence[Tensor]) -> LpFace:
        free, multiplier, normal, size = parts
        weight = torch.ones_like(x[..., :1]) if self.weight is None else self.weight
        radius = tensor_of(self.radius)
        return LpFace(self.p, weight, radius, x, free, multiplier, normal, size)

    @measured
    def _unbounded(self) -> Tensor | None:
        if self.weight is None:
            return None
        radius = tensor_of(self.radius).detach().unsqueeze(-1)
        mask = self._too_far(self.weight.detach().abs(), radius)
        return mask if bool(mask.any()) else None

    @measured
    def _geometry(self) -> _Geometry:
        radius, unbounded = tensor_of(self.radius).unsqueeze(-1), self._unbounded
        if self.weight is None:
            return _Geometry(torch.ones_like(radius), radius, None)
        size = self.weight.abs()
        const = size.detach()
        if unbounded is None:
            return _Geometry(size, radius / size, const.amin(-1, keepdim=True) / size)
        reach = torch.where(unbounded, 0, radius / torch.where(unbounded, 1, size))
        least = torch.where(unbounded, torch.inf, const).amin(-1, keepdim=True)
        least = torch.where(torch.isfinite(least), least, 1)
        pull = torch.where(unbounded, 0, least / torch.where(unbounded, 1, size))
        return _Geometry(size, reach, pull)

    @measured
    def _axis_bounds(self) -> AxisBounds:
        radius = tensor_of(self.radius).detach().unsqueeze(-1)
        if self.weight is None:
            one = torch.ones_like(radius)
            return AxisBounds(one, one, one, radius, None)
        size, unbounded = self._geometry.size.detach(), self._unbounded
        unit = size.amax(-1, keepdim=True)
        if unbounded is not None:
            unit = or_one(unit)
        omega = size / unit
        tiny = torch.finfo(size.dtype).tiny
        if unbounded is None:
            return AxisBounds(omega, 1 / omega, (omega**2).clamp_min(tiny), radius / unit, None)
        omega = torch.where(unbounded, 0, omega)
        inverse = torch.where(unbounded, 0, 1 / omega)
        square = torch.where(unbounded, 0, (omega**2).clamp_min(tiny))
        return AxisBounds(omega, inverse, square, radius / unit, unbounded)

    @staticmethod
    def _too_far(size: Tensor, t: Tensor) -> Tensor:
        """Mask of the coordinates whose weight is zero or whose bound t/w cannot be held."""
        # dividing t by the largest number first tells overflow of t/w without meeting it
        return size <= t / torch.finfo(size.dtype).max

    def _pull(self, g: Tensor) -> Tensor:
        """g/w up to a constant per row, within range whatever the scales; 0 where unbounded."""
        pull = self._geometry.pull
        return g if pull is None else g * pull

    def size(self, x: Tensor) -> Tensor:
        """‖w ∘ x‖_p in double precision."""
        weighted = x.double()
        if self.weight is not None:
            weighted = weighted * self.weight.detach()
        # a sum beyond the range is outside of every ball, which is all there is to know
        return weighted.abs().sum(-1) if self.p == 1 else scaled_norm(weighted, self.p)


class _Geometry(NamedTuple):
    """What w and t amount to, coordinate by coordinate."""

    size: Tensor  # |w|, (1,), (n,) or (B, n)
    reach: Tensor  # t/|w|, (1,), (n,) or (B, n), zero where unbounded
    pull: Tensor | None  # 1/|w| times the least |w|, zero where unbounded; None for ones


def _quotient(radius: Value, size: Tensor) -> Tensor:
    """t/|w|, infinite without a weight."""
    heavy = size != 0
    return torch.where(heavy, radius / torch.where(heavy, size, 1), torch.inf)
