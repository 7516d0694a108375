"""The weighted ℓp ball ‖w ∘ x‖_p ≤ t, for any p in [1, ∞]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dfwlayer.arguments import as_number, check_tensor
from dfwlayer.constraints.balls.l1_nearest import nearest_l1
from dfwlayer.constraints.balls.lp_face import LpFace, lp_face
from dfwlayer.constraints.balls.lp_projection import AxisBounds, project_l1, project_lp
from dfwlayer.constraints.balls.signed_axes import SignedAxes
from dfwlayer.constraints.base import Atoms
from dfwlayer.constraints.composed.shifted import Shifted
from dfwlayer.constraints.parameters import check_not_negative, merged
from dfwlayer.linalg.rows import dot, scaled_norm
from dfwlayer.linalg.scale import Scale, scale_of_terms
from dfwlayer.objectives.base import check_tensors, flag_nonfinite
from dfwlayer.ops.kernels import steps as kernels

__all__ = ["LpBall"]


@dataclass(frozen=True)
class LpBall:
    """{x : ‖w ∘ x‖_p ≤ t}.

    Args:
        p: Any number in [1, ∞] (``math.inf``).
        radius: t ≥ 0, a number, a 0-d tensor or (B,).
        weight: w, (n,) or (B, n), None for ones. Only |w| matters; a zero weight leaves its
            coordinate unconstrained.
        centre: c, (n,) or (B, n); with it the set is ‖w ∘ (x − c)‖_p ≤ t, a `Shifted` ball.

    """

    p: float
    radius: float | Tensor = 1.0
    weight: Tensor | None = None
    _: KW_ONLY
    centre: InitVar[float | Tensor | None] = None
    _bound: bool = field(default=False, repr=False, compare=False)
    _bounded: bool = field(default=False, repr=False, compare=False)  # no weight is zero

    def __new__(
        cls,
        p: float,
        radius: float | Tensor = 1.0,
        weight: Tensor | None = None,
        *,
        centre: float | Tensor | None = None,
        **_private: bool,
    ) -> Self:
        """The ball, or one around a centre."""
        if centre is None:
            return super().__new__(cls)
        return Shifted(cls(p, radius, weight, **_private), centre)  # type: ignore[return-value]

    def __getnewargs__(self) -> tuple[float]:
        """For copies."""
        return (self.p,)

    def __post_init__(self, centre: float | Tensor | None) -> None:
        p, radius, weight = self.p, self.radius, self.weight
        expected = "a number in [1, inf]"
        p = as_number("p", p, expected, kind=expected, least=1, infinite=True)
        object.__setattr__(self, "p", p)
        if isinstance(radius, Tensor):
            check_tensor("radius", radius)
            if radius.dim() > 1:
                raise ValueError(
                    "radius: expected a number, a 0-d tensor or shape (B,), got "
                    f"{tuple(radius.shape)}"
                )
        else:
            kind = "a number or a tensor"
            number = as_number("radius", radius, "a finite number ≥ 0", kind=kind, least=0)
            object.__setattr__(self, "radius", number)
        if weight is not None:
            check_tensor("weight", weight, "a tensor or None")
        named = {"weight": weight, "radius": radius}
        tensors = {k: v for k, v in named.items() if isinstance(v, Tensor)}
        if tensors:
            check_tensors(tensors, half_allowed=True)

    def batch_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Of weight (B, *shape) and radius (B,)."""
        sizes = {}
        if self.weight is not None and self.weight.dim() > len(shape):
            sizes["weight"] = self.weight.shape[0]
        if isinstance(self.radius, Tensor) and self.radius.dim():
            sizes["radius"] = self.radius.shape[0]
        return sizes

    def float32(self) -> LpBall:
        """Half-precision parameters in float32."""
        radius, weight = self.radius, self.weight
        if isinstance(radius, Tensor):
            radius = radius.to(torch.promote_types(radius.dtype, torch.float32))
        if weight is not None:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return LpBall(self.p, radius, weight)

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LpBall:
        """Check the parameters against the variable and flatten the weight."""
        n = math.prod(shape)
        weight, radius = self.weight, self.radius
        if weight is not None:
            if weight.dim() not in (len(shape), len(shape) + 1) or (
                tuple(weight.shape[-len(shape) :]) != shape
            ):
                sizes = ", ".join(str(s) for s in shape)
                raise ValueError(
                    f"weight: expected shape ({sizes}{',' if len(shape) == 1 else ''}) or "
                    f"(B, {sizes}), got {tuple(weight.shape)}"
                )
            weight = weight.reshape(*weight.shape[: weight.dim() - len(shape)], n)
        if not isinstance(radius, Tensor):
            radius = torch.tensor(radius, dtype=dtype, device=device)
        own = {"weight": weight, "radius": radius}
        reference = torch.empty(0, dtype=dtype, device=device)
        check_tensors(
            {"the objective": reference} | {k: v for k, v in own.items() if v is not None}
        )
        return LpBall(self.p, radius, weight, _bound=True)

    @property
    def recordable(self) -> bool:
        """Other balls are projected onto by iterations that watch their own convergence."""
        return self.p in (1, torch.inf)

    def suspect(self) -> Tensor:
        """Whether values are not finite, radii negative, or coordinates not bounded."""
        radius = self._radius.detach()
        total = radius.sum()
        wrong = (radius < 0).any()
        if self.weight is not None:
            size = self.weight.detach().abs()
            total = total + size.sum()
            wrong = wrong | self._too_far(size, radius.unsqueeze(-1)).any()
        return wrong | ~torch.isfinite(total)

    def assume_bounded(self) -> LpBall:
        """See `RecordableConstraint`."""
        return replace(self, _bounded=True)

    def verified(self) -> tuple[LpBall, Tensor | None]:
        """Finite weights, finite radii that are not negative."""
        radius = self._radius
        if self._plain():
            return self.assume_bounded(), None
        bad = flag_nonfinite("radius", radius, 0)
        if self.weight is not None:
            bad = merged(bad, flag_nonfinite("weight", self.weight, 1))
        return self, merged(bad, check_not_negative("radius", radius))

    def _plain(self) -> bool:
        """Whether everything is finite and every coordinate bounded, told by the extremes."""
        radius = self._radius.detach()
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

    def replace_rows(self, bad: Tensor) -> LpBall:
        """Flagged problems get weight and radius one."""
        radius = torch.where(bad, 1, self._radius)
        weight = self.weight
        if weight is not None:
            weight = torch.where(bad.unsqueeze(-1), 1, weight)
        return LpBall(self.p, radius, weight, _bound=True)

    def rows(self, index: Tensor) -> LpBall:
        """The sets of the problems at these positions."""
        radius, weight = self._radius, self.weight
        if radius.dim() == 1 and len(radius) > 1:
            radius = radius[index]
        if weight is not None and weight.dim() == 2 and len(weight) > 1:
            weight = weight[index]
        return replace(self, radius=radius, weight=weight)

    def scaled(self, factor: Tensor) -> LpBall:
        """The ball with another radius."""
        return LpBall(self.p, self._radius * factor, self.weight, _bound=True)

    def start(self, like: Tensor) -> Tensor:
        """The centre."""
        return torch.zeros_like(like)

    def unbounded(self) -> Tensor | None:
        """Coordinates of zero weight, or whose bound t/w this dtype cannot hold."""
        return None if self._bounded else self._geometry.unbounded

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
        ratio = pull / torch.where(largest > 0, largest, 1)
        positive = ratio > 0  # at 0 the power's derivative is infinite for p > 2
        power = torch.where(positive, torch.where(positive, ratio, 1) ** (1 / (self.p - 1)), 0)
        total = (power**self.p).sum(-1, keepdim=True)
        size = torch.where(total > 0, total, 1) ** (1 / self.p)
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
        _, reach, unbounded, _ = self._geometry
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

    def violation(self, x: Tensor) -> Tensor:
        """max(0, ‖w ∘ x‖_p − t)."""
        return (self._size(x) - self._radius.double()).clamp_min(0).to(x.dtype)

    def retract(self, x: Tensor) -> Tensor:
        """x, scaled back onto the ball where it is outside; rounding included."""
        finfo = torch.finfo(x.dtype)
        at = x.detach()
        radius, size = self._radius.detach().double(), self._size(at)
        outside = size > radius
        if outside.device.type == "cpu" and not bool(outside.any()):
            return x
        # twice eps makes room for the rounding of the product, but not for that of numbers below
        # the normal range, which had better vanish
        shrink = (radius / torch.where(outside, size, 1) * (1 - 2 * finfo.eps)).unsqueeze(-1)
        inner = torch.where(at.abs() < finfo.tiny / finfo.eps, 0, (at * shrink).to(x.dtype))
        moved = outside.unsqueeze(-1)
        if self.weight is not None and not self._bounded:
            moved = moved & (self.weight.detach() != 0)
        inner = torch.where(moved, inner, at)
        return x + (inner - at) if x.requires_grad else inner

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """See `dfwlayer.constraints.balls.lp_projection`."""
        if self.p == 1:
            return project_l1(self._axis_bounds if self._bound else self._measure_axes(), z, near)
        weight = self._sizes.detach().expand_as(z)
        bounded = None if self.unbounded() is None else weight > 0
        return project_lp(self.p, weight, self._radius.detach().expand(z.shape[:-1]), z, bounded)

    def step(self, x: Tensor, gradient: Tensor, curvature: Tensor) -> Tensor | None:
        """See `SteppingConstraint`; for p = 1."""
        if self.p != 1 or not self._bound or not kernels.take(x) or self.unbounded() is not None:
            return None
        omega, inverse, _, length, _ = self._axis_bounds
        return kernels.step_l1(x, gradient, curvature, omega, inverse, length)

    def diameter(self, n: int) -> Tensor:
        """2 ‖t/w‖_s with s = ∞ for p ≤ 2 and 2p/(p − 2) beyond (2 for p = ∞)."""
        _, reach, unbounded, _ = self._geometry
        reach = reach.expand(*reach.shape[:-1], n)
        if self.p <= 2:
            order = torch.inf
        else:
            order = 2.0 if self.p == torch.inf else 2 * self.p / (self.p - 2)
        size = 2 * scaled_norm(reach, order)
        return size if unbounded is None else torch.where(unbounded.any(-1), torch.inf, size)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> LpFace:
        """See `dfwlayer.constraints.balls.lp_face.lp_face`."""
        return lp_face(self.p, self._sizes, self._radius, x, g, scale, self.unbounded())

    def stretched(self, factor: Tensor) -> LpBall:
        """The ball with weights w/factor."""
        weight = 1 / factor if self.weight is None else self.weight.detach() / factor
        return LpBall(self.p, self._radius.detach(), weight, _bound=True)

    def nearest(self, z: Tensor) -> tuple[Tensor, LpFace]:
        """The projection of z and its face, which for p = 1 is plain from it."""
        if self.p == 1:
            weight = None if self.weight is None else self.weight.detach().numpy()
            found = nearest_l1(z.numpy(), weight, self._radius.detach().numpy())
            if found is not None:
                size = self._radius.detach().unsqueeze(-1)
                x, *parts = map(torch.from_numpy, found)
                return x, self.face_of(x, (*parts, size))
        x = self.retract(self.project(z))
        scale = scale_of_terms(torch.ones_like(z[..., :1]), x, z.abs())
        return x, self.face(x, x - z, scale)

    def face_of(self, x: Tensor, parts: Sequence[Tensor]) -> LpFace:
        """See `RecordableConstraint`."""
        free, multiplier, normal, size = parts
        weight = torch.ones_like(x[..., :1]) if self.weight is None else self.weight
        return LpFace(self.p, weight, self._radius, x, free, multiplier, normal, size)

    @property
    def _sizes(self) -> Tensor:
        """|w|, (1,), (n,) or (B, n)."""
        return self._geometry.size

    @property
    def _radius(self) -> Tensor:
        radius = self.radius
        return radius if isinstance(radius, Tensor) else torch.tensor(radius)

    @property
    def _geometry(self) -> _Geometry:
        """Found once per solve; a set of the user's is measured anew, as its graph may be gone."""
        return self._bound_geometry if self._bound else self._measure()

    @cached_property
    def _bound_geometry(self) -> _Geometry:
        with torch.enable_grad():  # a method may be the first to ask, and it runs without
            return self._measure()

    def _measure(self) -> _Geometry:
        radius = self._radius.unsqueeze(-1)
        if self.weight is None:
            return _Geometry(torch.ones_like(radius), radius, None, None)
        size = self.weight.abs()
        const, t = size.detach(), radius.detach()
        unbounded = None if self._bounded else self._too_far(const, t)
        if unbounded is None or not bool(unbounded.any()):
            return _Geometry(size, radius / size, None, const.amin(-1, keepdim=True) / size)
        reach = torch.where(unbounded, 0, radius / torch.where(unbounded, 1, size))
        least = torch.where(unbounded, torch.inf, const).amin(-1, keepdim=True)
        least = torch.where(torch.isfinite(least), least, 1)
        pull = torch.where(unbounded, 0, least / torch.where(unbounded, 1, size))
        return _Geometry(size, reach, unbounded, pull)

    @cached_property
    def _axis_bounds(self) -> AxisBounds:
        return self._measure_axes()

    def _measure_axes(self) -> AxisBounds:
        radius = self._radius.detach().unsqueeze(-1)
        if self.weight is None:
            one = torch.ones_like(radius)
            return AxisBounds(one, one, one, radius, None)
        size, unbounded = self._sizes.detach(), self.unbounded()
        unit = size.amax(-1, keepdim=True)
        if unbounded is not None:
            unit = torch.where(unit > 0, unit, 1)
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

    def _size(self, x: Tensor) -> Tensor:
        """‖w ∘ x‖_p in double precision, so that measuring does not add rounding in float32."""
        weighted = x.double()
        if self.weight is not None:
            weighted = weighted * self.weight.detach()
        # a sum beyond the range is outside of every ball, which is all there is to know
        return weighted.abs().sum(-1) if self.p == 1 else scaled_norm(weighted, self.p)


class _Geometry(NamedTuple):
    """What w and t amount to, coordinate by coordinate."""

    size: Tensor  # |w|, (1,), (n,) or (B, n)
    reach: Tensor  # t/|w|, (1,), (n,) or (B, n), zero where unbounded
    unbounded: Tensor | None  # mask, None if every coordinate is bounded
    pull: Tensor | None  # 1/|w| times the least |w|, zero where unbounded; None for ones
