"""The part of a set that lies in a plane: an affine equality on top of bounds and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from dfwlayer.constraints.balls.disc import Disc
from dfwlayer.constraints.balls.lp_ball import LpBall
from dfwlayer.constraints.base import Constraint, measured
from dfwlayer.constraints.composed.built import Built
from dfwlayer.constraints.composed.joined import common_form
from dfwlayer.constraints.composed.plane_dual import mixed, plane_dual
from dfwlayer.constraints.composed.plane_limits import level_fault, vertex_limits, within_reach
from dfwlayer.constraints.parameters import as_column, as_entries, entries, number
from dfwlayer.constraints.polyhedra.affine import plane_form
from dfwlayer.constraints.polyhedra.box import Box
from dfwlayer.constraints.polyhedra.k_sparse import KSparse
from dfwlayer.constraints.polyhedra.knapsack import (
    Knapsack,
    clipped,
    falling_root,
    power_of_two,
    reduced,
)
from dfwlayer.constraints.polyhedra.l1_box import L1Box
from dfwlayer.constraints.polyhedra.polyhedral_face import Equation, Facets, PolyhedralFace
from dfwlayer.constraints.polyhedra.polyhedral_set import PolyhedralSet
from dfwlayer.constraints.polyhedra.simplex import CappedSimplex, Simplex
from dfwlayer.constraints.region import Block
from dfwlayer.constraints.relaxation import Relaxation
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.rows import all_seen, any_row, or_one, quotient
from dfwlayer.ops.scale import ROUNDING, Scale
from dfwlayer.ops.values import Value, tensor_of

__all__ = ["PlaneCut"]

ENDLESS = 2.0**100  # times the size of a problem's numbers, beyond which μ is none
PASSES = 8  # most times a projection moves its origin; one is enough unless z is far out
Base = Box | CappedSimplex | KSparse | L1Box | Simplex


@dataclass(frozen=True)
class PlaneCut(Built, PolyhedralSet):
    """{x ∈ S : ⟨a, x⟩ = b}, such as a budget Σ x_i = 1 on top of a limit ‖x‖₁ ≤ t.

    It is `Intersection(S, Hyperplane(a, b))` with a projection by a formula, for large problems.

    With a multiplier μ for the equation everything is a question to S: the projection is that of
    z − μa, the vertex a mix of two for g + μa, and μ is found by a search in one dimension.

    Args:
        constraint: S, one of `Box`, `CappedSimplex`, `KSparse`, `L1Box`, `Simplex`, or `LpBall`
            with p = 1, or p = 2 and no weights; coordinates may have no bounds, or one.
        normal: a, a number, (n,) or (B, n).
        level: b, a number, a 0-d tensor or (B,), which ⟨a, x⟩ has to take somewhere on S.

    """

    constraint: Constraint
    normal: Value = field(default=1.0, metadata=entries(harmless=0.0))
    level: Value = field(default=1.0, metadata=number(harmless=0.0, grows=True))

    def __new__(  # a Euclidean ball in a plane is one of a dimension less
        cls, constraint: Constraint | None = None, normal: Value = 1.0, level: Value = 1.0
    ) -> Self:
        """The set, or the `Disc` that it is."""
        if isinstance(constraint, LpBall) and constraint.p == 2 and constraint.weight is None:
            return Disc(constraint.radius, normal, level)  # type: ignore[return-value]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        base = self.constraint
        if isinstance(base, LpBall) and base.p == 1:
            base = L1Box(base.radius, base.weight, -torch.inf, torch.inf)
            object.__setattr__(self, "constraint", base)
        if not isinstance(base, Base):
            found = (
                f"LpBall with p = {base.p:g}" if isinstance(base, LpBall) else type(base).__name__
            )
            raise ValueError(
                "constraint: expected Box, CappedSimplex, KSparse, L1Box, Simplex or LpBall with "
                f"p = 1, or p = 2 and no weights, got {found}"
            )
        super().__post_init__()

    @property
    def base(self) -> Base:
        """S."""
        assert isinstance(self.constraint, Base)
        return self.constraint

    def facets(self, like: Tensor) -> Facets:
        facets = self.base.facets(like)
        equation = Equation(as_entries(self.normal, like), as_column(self.level, like))
        return facets._replace(equations=(*facets.equations, equation))

    def normal_form(self, n: int) -> Sequence[Block] | None:
        """That of the `Intersection` of S and a `Hyperplane`."""
        return common_form([self.base.normal_form(n), plane_form(n, self.normal, self.level)], n)

    def check_values(self) -> Tensor | None:
        """A level that ⟨a, x⟩ takes on S."""
        if not self.bound:
            return None
        facets = self.facets(tensor_of(self.normal)).detach()
        return level_fault(facets, self._limited.vertex, self.base.unbounded())

    def start(self, like: Tensor) -> Tensor:
        """The point next to where S starts."""
        return self.retract(self.project(self.base.start(like)))

    @measured
    def _limits(self) -> tuple[Base, Tensor | None]:
        """S with bounds on every side, and the problems (...) the plane does not bound, or None."""
        if (unbounded := self.base.unbounded()) is None:
            return self.base, None
        facets = self.facets(tensor_of(self.normal))
        lower, upper, loose = vertex_limits(facets, unbounded)
        return self.base.changed(lower=lower, upper=upper), loose if bool(loose.any()) else None

    @property
    def _limited(self) -> Base:
        return self._limits[0]

    def unbounded(self) -> Tensor | None:
        """Those of S, unless the plane bounds them."""
        mask, loose = self.base.unbounded(), self._limits[1]
        return None if mask is None or loose is None else mask & loose.unsqueeze(-1)

    def open_ended(self, g: Tensor) -> Tensor | None:
        """None, as no coordinate moves alone; see `relaxation`."""
        return None

    def relaxation(self, x: Tensor, g: Tensor) -> Relaxation | None:
        """S, limited where the plane limits it, and the plane with the multiplier of the face."""
        limited, loose = self._limits
        if loose is None:
            return None
        equation, rows = self._equation(x), loose.unsqueeze(-1)
        own, inner = self.base.facets(x), limited.facets(x)
        base = self.base.changed(
            lower=torch.where(rows, own.lower, inner.lower),
            upper=torch.where(rows, own.upper, inner.upper),
        )
        known = plane_dual(limited.vertex, equation, g).multiplier
        multiplier = torch.where(rows, self.face(x, g).multiplier[..., -1:], known)
        a, b = (part.detach() for part in equation)
        excess = (a * x).sum(-1, keepdim=True) - b
        return Relaxation(base, (a,), multiplier, excess)

    def vertex(self, g: Tensor) -> Tensor:
        """A mix of two vertices of S on either side of the plane, both minimal for a g + μa."""
        equation, at = self._equation(g), g.detach()
        found = plane_dual(self._limited.vertex, equation, at)
        low, high = self._limited.vertex(found.below), self._limited.vertex(found.above)
        return mixed(low, high, equation)

    def lowest(self, g: Tensor) -> Tensor:
        """max over μ of min ⟨g + μa, s⟩ − μb over S."""
        return plane_dual(self._limited.vertex, self._equation(g), g.detach()).value.squeeze(-1)

    def lowest_terms(self, g: Tensor) -> Tensor:
        """Σ (|g| + |μa|) |s| for the two vertices of S, which may be far larger than their mix."""
        equation = self._equation(g)
        found, a = plane_dual(self._limited.vertex, equation, g.detach()), equation.slope.detach()
        low, high = self._limited.vertex(found.below), self._limited.vertex(found.above)
        size = g.detach().abs() + (found.multiplier * a).abs()
        return (size * torch.maximum(low.abs(), high.abs())).sum(-1)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """The soft vertex of S for g + μa, with μ such that it is in the plane."""
        base = self._limited
        a, b = self._equation(g)

        def off(mu: Tensor) -> Tensor:
            return (a * base.soft_vertex(g + mu * a, temperature)).sum(-1, keepdim=True) - b

        def evaluate(mu: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                at = mu.detach().requires_grad_()
                value = off(at)
                (slope,) = torch.autograd.grad(value.sum(), at)
            return value.detach(), -slope

        with torch.no_grad():
            found = plane_dual(base.vertex, Equation(a, b), g.detach())
            guess = found.multiplier  # where the temperature is nothing beside g
            # a change of g by as much as the temperature times x changes the soft vertex
            size = torch.maximum(base.vertex(found.below).abs(), base.vertex(found.above).abs())
            unit = temperature * quotient(size.amax(-1, True), a.abs().amax(-1, True))
            low, high = guess - torch.inf, guess + torch.inf
            mu = falling_root(evaluate, low, high, guess, b.abs(), unit=unit)
            _, width = evaluate(mu)
        if torch.is_grad_enabled():
            # a Newton step from the solution is zero, but its derivatives are those of the solution
            mu = mu + quotient(off(mu), width)
        return base.soft_vertex(g + mu * a, temperature)

    def retract(self, x: Tensor) -> Tensor:
        """x, or its projection where it is outside by more than rounding, moved into the plane."""
        a, b = (part.detach().double() for part in self._equation(x))
        at, eps = x.detach(), torch.finfo(x.dtype).eps
        inner = self.base.retract(at)
        size = (a * inner).abs().sum(-1, keepdim=True) + b.abs()
        missing = b - (a * inner).sum(-1, keepdim=True)
        exact = (missing.abs() <= 0.5 * eps * size) & (inner == at).all(-1, keepdim=True)
        if all_seen(exact):
            return x
        far = missing.abs() > eps**0.5 * size
        if any_row(far):
            inner = torch.where(far, self.base.retract(self.project(at)), inner)
        missing = b - (a * inner).sum(-1, keepdim=True)
        along = self._along(inner).double()
        reach = (a * along).sum(-1, keepdim=True)
        step = quotient(missing, reach)
        lower, upper, *_ = self.facets(x).detach()
        moved = clipped((inner + step * along).to(x.dtype), lower, upper)
        moved = self._between(self._drawn_in(moved))
        moved = torch.where(exact, at, moved)
        return moved_to(x, moved)

    def _between(self, x: Tensor) -> Tensor:
        """x in S, and where it is off the plane, the point between it and one on the other side.

        That is for an x whose face of S has no direction out of the plane. The vertices of S with
        the least and the largest ⟨a, s⟩ lie on either side.
        """
        a, b = (part.detach().double() for part in self._equation(x))
        wide = x.double()
        missing = b - (a * wide).sum(-1, keepdim=True)
        size = (a * wide).abs().sum(-1, keepdim=True) + b.abs()
        off = missing.abs() > 4 * torch.finfo(x.dtype).eps * size
        if not any_row(off):
            return x
        end = self._limited.vertex((-torch.sign(missing) * a).expand_as(wide)).detach()
        way = (a * (end - wide)).sum(-1, keepdim=True)
        share = torch.where(way != 0, missing / torch.where(way != 0, way, 1), 0).clamp(0, 1)
        return torch.where(off, (wide + share * (end - wide)).to(x.dtype), x)

    def _drawn_in(self, x: Tensor) -> Tensor:
        """x, and where moving it into the plane has carried it out of S, a little further in."""
        eps = torch.finfo(x.dtype).eps
        outside = self.base.violation(x) > 2 * eps * x.abs().amax(-1)
        if not any_row(outside):
            return x
        middle = self.project(torch.zeros_like(x))
        for share in (4 * eps, 16 * eps, 64 * eps):
            closer = x + share * (middle - x)
            inside = outside & (self.base.violation(closer) == 0)
            x = torch.where(inside.unsqueeze(-1), closer, x)
            outside = outside & ~inside
            if not any_row(outside):
                break
        return x

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """The projection of z − μa onto S, with μ such that it is in the plane."""
        with torch.no_grad():
            a, b = self._equation(z)
            if isinstance(self.base, Box):
                return self._clip(z, a, b)
            unit = power_of_two(a).double()
            a, b = a.double() / unit, b.double() / unit
            x = at = z.double()
            guess = self._first(at, a, b, near)
            off = going = torch.ones_like(guess, dtype=torch.bool)
            least = torch.full_like(guess, torch.inf)
            for _ in range(PASSES):
                mu = self._multiplier(at, a, b, guess)
                moved = reduced(at, mu, a.expand_as(at))
                extent = at.abs().amax(-1, keepdim=True) + b.abs()
                at = torch.where(torch.isfinite(moved).all(-1, keepdim=True), moved, at)
                x = torch.where(going, self.base.project(at), x)
                excess = (a * x).sum(-1, keepdim=True) - b
                size = (a * x).abs().sum(-1, keepdim=True) + b.abs()
                off = excess.abs() > 16 * torch.finfo(x.dtype).eps * size
                # where ⟨a, x⟩ takes one value on S, or b is beyond all of them by its own rounding,
                # there is no μ, however far out: x is the point of S next to the plane
                extent = extent + x.abs().amax(-1, keepdim=True)
                going = going & off & (mu.abs() <= ENDLESS * extent)
                # nor is there one to be found where ⟨a, x⟩ jumps over b, as it does again
                going = going & (excess.abs() < 0.5 * least)
                if not any_row(going):
                    break
                least = torch.minimum(least, excess.abs())
                # so far out that μ, or what S takes away, hides what is left
                at, guess = self._nearer(at, x), torch.zeros_like(mu)
            x = self._between(x)
            if any_row(off):  # where z is further out still, the projection is a vertex
                wide = z.double()
                far = self.vertex(-wide)
                gain = (wide * (far - x)).sum(-1, keepdim=True)
                cost = 0.5 * ((far - x) * (far + x)).sum(-1, keepdim=True)
                x = torch.where(off & (gain > cost), far, x)
            return self._snapped(x, z.dtype)

    def _snapped(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in a dtype, with entries that are zero, or at a bound, up to rounding, there."""
        lower, upper, *_ = self.base.facets(x).detach()
        rounding = max(16 * torch.finfo(x.dtype).eps, torch.finfo(dtype).eps)
        margin = rounding * x.abs().amax(-1, keepdim=True)
        x = torch.where(x.abs() <= margin, 0, x)
        x = torch.where(x - lower <= margin, lower, torch.where(upper - x <= margin, upper, x))
        return x.to(dtype)

    def _first(self, z: Tensor, a: Tensor, b: Tensor, near: Tensor | None) -> Tensor:
        """A μ to begin with."""
        guess = _to_plane(z, a, b)
        if near is None:
            return guess
        # exact where the result is on the face of this one
        along = self._along(near.double()) / power_of_two(self._equation(z).slope)
        width = (a * along).sum(-1, keepdim=True)
        sure = width > self._vanishing(a, z)
        step = (along * (z - near)).sum(-1, keepdim=True)
        return torch.where(sure, step / torch.where(sure, width, 1), guess)

    def _multiplier(self, z: Tensor, a: Tensor, b: Tensor, guess: Tensor) -> Tensor:
        """μ, up to the rounding of numbers of the size of z; a of size one."""
        unit, least = power_of_two(self._equation(z).slope), self._vanishing(a, z)

        def evaluate(mu: Tensor) -> tuple[Tensor, Tensor]:
            x = self.base.project(z - mu * a)
            along = self._along(x) / unit
            width = (a * along).sum(-1, keepdim=True)
            return (a * x).sum(-1, keepdim=True) - b, torch.where(width > least, width, 0)

        endless = torch.full_like(guess, torch.inf)
        size = b.abs() + (a * self.base.project(z - guess * a)).abs().sum(-1, keepdim=True)
        scale = z.abs().amax(-1, keepdim=True) + b.abs()
        return falling_root(evaluate, -endless, endless, guess, size, unit=scale)

    @staticmethod
    def _vanishing(a: Tensor, like: Tensor) -> Tensor:
        """Less than this of ‖a‖² along a face is rounding."""
        square = (a * a).expand_as(like).sum(-1, keepdim=True)
        return 1e3 * torch.finfo(like.dtype).eps * square

    def _nearer(self, z: Tensor, x: Tensor) -> Tensor:
        """z without a multiple of the normal of S at its projection x, which is that of both.

        The multiple is told from a coordinate between its bounds. Of an inequality Σ w|x| ≤ t a
        little less is taken, so that it stays active.
        """
        lower, upper, weight, radius, _ = self.base.facets(x).detach()
        size = x.abs()
        room = torch.minimum(size, torch.where(x < 0, -lower, upper) - size)
        # where no coordinate is between its bounds, the multiple is told from the smallest of those
        # that are not zero, which would be the first to leave its bound
        last = torch.where(size > 0, -(z if weight is None else z.abs()), -torch.inf)
        rank = torch.where((room > 0).any(-1, keepdim=True), room, last)
        k = rank.argmax(-1, keepdim=True)
        if weight is None:
            return z - (z - x).gather(-1, k)
        assert radius is not None
        each = weight.expand_as(z)
        theta = (z - x).abs().gather(-1, k) / each.gather(-1, k)
        rounding = 64 * torch.finfo(z.dtype).eps * (z.abs().amax(-1, keepdim=True) + theta)
        theta = (theta - rounding / each.amin(-1, keepdim=True)).clamp_min(0)
        outside = (weight * clipped(z, lower, upper).abs()).sum(-1, keepdim=True) > radius
        rest = reduced(z.abs(), theta, each).clamp_min(0)
        usable = outside & torch.isfinite(theta)
        return torch.where(usable, torch.copysign(rest, z), z)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> PolyhedralFace:
        """The face of S, with one more normal.

        Where x is at a vertex of S, as far as a is concerned, the coordinates do not tell μ. But
        x minimises ⟨g, s⟩, and that does.
        """
        face = super().face(x, g, scale)
        if scale is None or isinstance(self.base, Box):
            return face
        a = self._equation(x).slope.detach()
        width = (a * self._along(x)).sum(-1, keepdim=True)
        stuck = width <= torch.finfo(x.dtype).eps ** 0.5 * (a * a).expand_as(x).sum(
            -1, keepdim=True
        )
        if not any_row(stuck):
            return face
        mu = plane_dual(self._limited.vertex, self._equation(x), g).multiplier
        rounding = ROUNDING * torch.finfo(x.dtype).eps
        below = self.base.face(x, g + mu * a, scale.noisier(rounding * (mu * a).abs()))
        normals = (*below.normals, a * below.free)
        return replace(
            face,
            free=torch.where(stuck, below.free, face.free),
            multiplier=torch.where(stuck, torch.cat((below.multiplier, mu), -1), face.multiplier),
            normals=tuple(
                torch.where(stuck, n, m) for n, m in zip(normals, face.normals, strict=True)
            ),
            side=_chosen(stuck, below.side, face.side),
            bound=_chosen(stuck, below.bound, face.bound),
        )

    def diameter(self, n: int) -> Tensor:
        """At most that of S, as far as the plane bounds it."""
        size, unbounded = self._limited.diameter(n), self.unbounded()
        return size if unbounded is None else torch.where(unbounded.any(-1), torch.inf, size)

    def _clip(self, z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The projection for a box."""
        lower, upper, *_ = self.facets(z)
        if self.base.unbounded() is not None:
            lower, upper = within_reach(z, a, b, lower, upper)
        return Knapsack(z, a, lower, upper, b).nearest()

    def _equation(self, like: Tensor) -> Equation:
        return self.facets(like).equations[-1]

    def _along(self, x: Tensor) -> Tensor:
        """a, as far as it is in the tangent space of the face of S on which x lies."""
        wide = x.double()  # in which the squares of weights stay within range
        lower, upper, weight, radius, equations = self.base.facets(wide).detach()
        eps = torch.finfo(x.dtype).eps
        margin = 8 * eps * wide.abs().amax(-1, keepdim=True)
        free = (wide - lower > margin) & (upper - wide > margin)
        normals = [n for n, _ in equations]
        if weight is not None and radius is not None:
            size = (weight * wide.abs()).sum(-1, keepdim=True)
            tight = size >= radius * (1 - 8 * eps * x.shape[-1] ** 0.5)
            free = free & ((wide.abs() > margin) | (weight == 0) | ~tight)
            normals.append(torch.where(tight, weight * torch.sign(wide), 0))
        along = self._equation(wide).slope.detach() * free
        for n in normals:  # there is one at most
            own = n / power_of_two(n) * free
            square = (own * own).sum(-1, keepdim=True)
            share = (own * along).sum(-1, keepdim=True) / or_one(square)
            along = along - share * own
        return along.to(x.dtype)


def _chosen(mask: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Rows of one or the other, where there are any."""
    return None if a is None or b is None else torch.where(mask, a, b)


def _to_plane(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The μ for which z − μa is in the plane."""
    square = (a * a).expand_as(z).sum(-1, keepdim=True)
    return ((a * z).sum(-1, keepdim=True) - b) / or_one(square)
