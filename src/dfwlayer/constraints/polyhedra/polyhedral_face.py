"""The local face of a set with bounds and a few linear constraints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dfwlayer.constraints.face import Face
from dfwlayer.ops.rows import all_seen, dot, or_one
from dfwlayer.ops.scale import ROUNDING, Scale

__all__ = ["Equation", "Facets", "PolyhedralFace", "polyhedral_face"]


class Equation(NamedTuple):
    """⟨a, x⟩ = b."""

    slope: Tensor  # a, (1,), (n,) or (B, n)
    total: Tensor  # b, (1,) or (B, 1)


class Facets(NamedTuple):
    """{x : l ≤ x ≤ u, Σ w_i |x_i| ≤ t, ⟨a, x⟩ = b, …}, differentiable in all of it."""

    lower: Tensor  # l, (1,), (n,) or (B, n), may be −∞
    upper: Tensor  # u, likewise, may be ∞
    weight: Tensor | None = None  # w ≥ 0, likewise; None without that constraint
    radius: Tensor | None = None  # t, (1,) or (B, 1)
    equations: tuple[Equation, ...] = ()

    def each(self, change: Callable[[Tensor], Tensor]) -> Facets:
        """The facets with every tensor changed."""
        return Facets(
            change(self.lower),
            change(self.upper),
            None if self.weight is None else change(self.weight),
            None if self.radius is None else change(self.radius),
            tuple(Equation(change(a), change(b)) for a, b in self.equations),
        )

    def tensors(self) -> list[Tensor]:
        """All of them."""
        parts = (self.lower, self.upper, self.weight, self.radius)
        return [part for part in parts if part is not None] + [v for e in self.equations for v in e]

    def detach(self) -> Facets:
        """As constants."""
        return self.each(Tensor.detach)


@dataclass(frozen=True)
class PolyhedralFace(Face):
    """A flat face with h_j(x) = ⟨a_j, x⟩; see `dfwlayer.constraints.Face`."""

    facets: Callable[[Tensor], Facets]  # of the set, called where its gradient is asked for
    x: Tensor  # (..., n)
    free: Tensor  # (..., n)
    multiplier: Tensor  # (..., m)
    normals: tuple[Tensor, ...]  # a_j (..., n), zero where not free or not active
    side: Tensor | None  # (..., n), signs s with a_1 = w ∘ s, zero in rows where it is not active
    # (..., n), 1 for a coordinate held by the upper bound, −1 for the lower one; None where there
    # are only lower ones, which hold whatever is not free
    bound: Tensor | None

    def force(self) -> Tensor:
        """Σ λ_j a_j."""
        return _reduced(torch.zeros_like(self.x), self._slopes(), self.multiplier)

    def excess(self) -> Tensor:
        """⟨a_j, x⟩ − b_j, in which the coordinates that are held move with the parameters."""
        facets = self.facets(self.x)
        x = torch.where(self.free, self.x, self.pinned())
        totals = [b for _, b in facets.equations]
        if self.side is not None and facets.radius is not None:
            active = (self.side != 0).any(-1, keepdim=True)
            totals.insert(0, torch.where(active, facets.radius, 0))
        slopes = self._slopes()
        parts = [dot(a, x).unsqueeze(-1) - b for a, b in zip(slopes, totals, strict=True)]
        return torch.cat(parts, -1) if parts else self.x[..., :0]

    def pinned(self) -> Tensor:
        """The bound that holds a coordinate, or 0."""
        facets = self.facets(self.x)
        if self.bound is None:
            return torch.where(self.free, 0, facets.lower)
        # an infinite bound holds nothing, and has no gradient
        high = torch.where(self.bound > 0, facets.upper, 0)
        return torch.where(self.bound < 0, facets.lower, high)

    def _slopes(self) -> list[Tensor]:
        """a_j (..., n), differentiable in the parameters."""
        facets = self.facets(self.x)
        slopes = [a.expand_as(self.x) for a, _ in facets.equations]
        if self.side is not None and facets.weight is not None:
            slopes.insert(0, facets.weight * self.side)
        return slopes


def polyhedral_face(
    facets: Callable[[Tensor], Facets],
    x: Tensor,  # (..., n)
    g: Tensor,  # (..., n), ∇f(x)
    scale: Scale | None,
) -> PolyhedralFace:
    """Tell the face from x and g.

    Without a scale it is the face x lies on, to rounding, but for bounds, and the constraint
    Σ w|x| ≤ t, whose multiplier says that x wants to leave. With one it is the face of the
    solution next to x, as `dfwlayer.ops.scale` tells it.
    """
    constant = facets(x).detach()
    near = _Nearest.of(constant, x)
    slopes = [a.expand_as(x) for a, _ in constant.equations]
    side: Tensor | None = None
    if constant.weight is None:
        multiplier = _multipliers(slopes, g, near, near.slack)
        at_bound = near.holds(_reduced(g, slopes, multiplier), _noisier(scale, slopes, multiplier))
        free = ~at_bound
    else:
        norm = _weighted_norm(constant, x, g, near, slopes, scale)
        multiplier, at_bound = norm.multiplier, norm.at_bound
        free = ~(at_bound | norm.at_zero)
        side = torch.where(norm.active & ~norm.at_zero, near.side(x), 0)
        slopes.insert(0, constant.weight * side)
    reduced = _reduced(g, slopes, multiplier)
    bound = torch.where(at_bound, near.pushed(reduced), 0)
    normals = tuple(a * free for a in slopes)
    return PolyhedralFace(facets, x, free, multiplier, normals, side, bound)


_MaybeScale = TypeVar("_MaybeScale", Scale, Scale | None)


def _noisier(scale: _MaybeScale, slopes: list[Tensor], multiplier: Tensor) -> _MaybeScale:
    """The scale of g + Σ λ_j a_j, where what is added has rounding of its own."""
    if scale is None or not slopes:
        return scale
    terms = [(multiplier[..., j : j + 1] * a).abs() for j, a in enumerate(slopes)]
    rounding = ROUNDING * torch.finfo(multiplier.dtype).eps
    return scale.noisier(rounding * torch.stack(terms).sum(0))


class _Nearest(NamedTuple):
    """The nearer bound of each coordinate."""

    above: Tensor  # (..., n), whether it is the upper one
    slack: Tensor  # (..., n), the distance to it
    size: Tensor  # (..., n), the numbers it is the difference of
    shut: Tensor  # (..., n), there is no room at all
    largest: Tensor  # (..., 1), |x|

    @classmethod
    def of(cls, facets: Facets, x: Tensor) -> _Nearest:
        below, beyond = x - facets.lower, facets.upper - x
        above = beyond < below
        bound = torch.where(above, facets.upper, facets.lower).abs()
        size = torch.maximum(x.abs(), torch.where(torch.isfinite(bound), bound, 0))
        shut = (facets.lower >= facets.upper).expand_as(x)
        slack = torch.minimum(below, beyond).clamp_min(0)
        return cls(above, slack, size, shut, x.abs().amax(-1, keepdim=True))

    @property
    def outward(self) -> Tensor:
        """The direction of the bound, ±1."""
        return torch.where(self.above, 1.0, -1.0).to(self.slack.dtype)

    def pushed(self, reduced: Tensor) -> Tensor:
        """The same; of two bounds that are one it is that which −reduced pushes against."""
        force = torch.where(reduced < 0, 1.0, -1.0).to(self.slack.dtype)
        return torch.where(self.shut, force, self.outward)

    def side(self, x: Tensor) -> Tensor:
        """sign(x), also for an x that is held at a bound that is zero."""
        return torch.where(x != 0, torch.sign(x), torch.where(self.slack > 0, 0, self.outward))

    def holds(self, reduced: Tensor, scale: Scale | None) -> Tensor:
        """Mask of the coordinates held by the bound; ``reduced`` is minus the bound's force."""
        pressed = -self.outward * reduced
        if scale is None:
            rounding = 8 * torch.finfo(reduced.dtype).eps
            held = (self.slack <= rounding * self.size) & (pressed > 0)
        else:
            held = scale.holds(pressed, self.slack)
        return held | self.shut


class _WeightedNorm(NamedTuple):
    """What Σ w|x| ≤ t does at x."""

    active: Tensor  # (..., 1)
    multiplier: Tensor  # (..., m), its own first
    at_bound: Tensor  # (..., n), coordinates held by a bound
    at_zero: Tensor  # (..., n), coordinates held at the kink of |x|


def _weighted_norm(
    facets: Facets,
    x: Tensor,
    g: Tensor,
    near: _Nearest,
    equations: list[Tensor],
    scale: Scale | None,
) -> _WeightedNorm:
    """Whether it is active, and the coordinates that are held then."""
    weight, radius = facets.weight, facets.radius
    assert weight is not None
    assert radius is not None
    finfo = torch.finfo(x.dtype)
    size = (weight * x.abs()).sum(-1, keepdim=True)
    at_kink = x.abs() <= 4 * finfo.eps * near.largest
    slope = weight * torch.where(at_kink & (near.slack > 0), 0, near.side(x))
    slopes = [slope, *equations]
    room = torch.where(weight > 0, torch.minimum(near.slack, x.abs()), near.slack)
    kink = torch.where(at_kink, weight, 0)
    multiplier = _multipliers(slopes, g, near, room, kink)
    first = multiplier[..., :1]
    missing = radius - size
    others = _multipliers(equations, g, near, near.slack)
    if scale is None:
        tight = missing <= 8 * finfo.eps * x.shape[-1] ** 0.5 * radius
    else:
        scale = _noisier(scale, equations, multiplier[..., 1:])
        # where λ is not determined, at a vertex or beside equations, what cannot be explained
        # by less tells
        own = _beside(slope, equations, room)
        rest = _reduced(g, equations, others)
        least = _multipliers([own], rest, near, room, kink, least=True)
        tight = scale.felt(least, missing, own, _gauge(own, room))
    point = radius == 0
    active = (tight & (first > 0)) | point
    inactive = torch.cat((torch.zeros_like(first), others), -1)
    multiplier = torch.where(active, multiplier, inactive)
    first = multiplier[..., :1].clamp_min(0)
    # where zero is nearer than the bound, it is zero that may hold
    kinked = active & (weight > 0)
    at_bound = near.holds(_reduced(g, slopes, multiplier), _noisier(scale, slopes[:1], first))
    at_bound = at_bound & ~(kinked & (x.abs() < near.slack))
    at_zero = x == 0
    if scale is not None:
        # the kink of |x_i| holds a coordinate with what λw_i has left beyond the pull on it
        pull = _reduced(g, equations, multiplier[..., 1:]).abs()
        blur = weight * scale.blur(_gauge(slope, room))
        at_zero = at_zero | scale.holds(weight * first - pull, x.abs(), blur)
    at_zero = kinked & ((at_zero & ~at_bound) | point)
    return _WeightedNorm(active, multiplier, at_bound & ~(point & (weight > 0)), at_zero)


def _beside(slope: Tensor, equations: list[Tensor], room: Tensor) -> Tensor:
    """The part of a slope that is no combination of the equations' where coordinates have room."""
    if not equations:
        return slope
    share = _share(room)
    a = torch.stack(equations, -2)
    spread = a * share.unsqueeze(-2)
    inverse = torch.linalg.pinv(spread @ a.mT, hermitian=True)
    along = (inverse @ (spread @ slope.unsqueeze(-1))).squeeze(-1)
    own = slope - (along.unsqueeze(-2) @ a).squeeze(-2)
    # less than that is what rounding leaves of a slope that is parallel to an equation
    least = 0.1 * torch.finfo(slope.dtype).eps ** 0.5 * slope.abs().amax(-1, keepdim=True)
    return torch.where(own.abs() > least, own, 0)


def _share(room: Tensor) -> Tensor:
    """Room relative to the most, 1 where there is no end of it."""
    endless = torch.isinf(room)
    most = torch.where(endless, 0, room).amax(-1, keepdim=True)
    return torch.where(endless, 1, room / most.clamp_min(torch.finfo(room.dtype).tiny))


def _gauge(slope: Tensor, room: Tensor) -> Tensor:
    """The vector v along which λ = −⟨g, v⟩ is found where coordinates have room: ⟨slope, v⟩ = 1."""
    share = _share(room)
    unit = or_one(slope.abs().amax(-1, keepdim=True))
    along = slope / unit
    width = (share * along * along).sum(-1, keepdim=True)
    return share * along / (or_one(width) * unit)


def _reduced(g: Tensor, slopes: list[Tensor], multiplier: Tensor) -> Tensor:
    """g + Σ λ_j a_j."""
    for j, a in enumerate(slopes):
        g = g + multiplier[..., j : j + 1] * a
    return g


def _multipliers(
    slopes: list[Tensor],
    g: Tensor,
    near: _Nearest,
    room: Tensor,  # (..., n), how far coordinates are from where they would be held
    kink: Tensor | None = None,  # (..., n), weights w of coordinates that are at zero, else 0
    least: bool = False,
) -> Tensor:  # (..., m)
    """λ with g + Σ λ_j a_j ≈ 0, mostly where coordinates have room to move.

    At a vertex, where none has, λ of a single constraint is in the middle of what the signs of
    the other multipliers allow, or the least of that, or, where they contradict each other,
    between those.
    """
    if not slopes:
        return g[..., :0]
    # a coordinate that is about to be held says little of λ, and nothing if all but rounding is
    room = torch.where(room > 64 * torch.finfo(g.dtype).eps * near.largest, room, 0)
    share = _share(room)
    if len(slopes) > 1:
        a = torch.stack(slopes, -2)
        spread = a * share.unsqueeze(-2)
        inverse = torch.linalg.pinv(spread @ a.mT, hermitian=True)
        found: Tensor = -(inverse @ (spread @ g.unsqueeze(-1))).squeeze(-1)
        return found
    (a,) = slopes
    width = (share * a * a).sum(-1, keepdim=True)
    inside = width > 0
    least_squares = -(share * a * g).sum(-1, keepdim=True) / torch.where(inside, width, 1)
    if all_seen(inside):
        return least_squares
    return torch.where(inside, least_squares, _between(a, g, near, kink, least))


def _between(a: Tensor, g: Tensor, near: _Nearest, kink: Tensor | None, least: bool) -> Tensor:
    """The middle of the λ for which g + λa points out of every bound, and |g| ≤ λw at zeros.

    Or the least of them.
    """
    some = a != 0
    balance = torch.where(some, -g / torch.where(some, a, 1), 0)
    outward = near.outward * a
    low = torch.where(outward < 0, balance, -torch.inf)
    high = torch.where(outward > 0, balance, torch.inf)
    if kink is not None:
        zero = kink > 0
        # on one side of a bound that is zero, the bound holds as well
        pull = torch.where(near.slack > 0, g.abs(), near.outward * g)
        low = torch.where(zero, pull / torch.where(zero, kink, 1), low).clamp_min(0)
        high = torch.where(zero, torch.inf, high)
    low, high = low.amax(-1, keepdim=True), high.amin(-1, keepdim=True)
    middle = low if least else torch.where(torch.isfinite(high), 0.5 * (low + high), low)
    return torch.where(torch.isfinite(low), middle, torch.where(torch.isfinite(high), high, 0))
