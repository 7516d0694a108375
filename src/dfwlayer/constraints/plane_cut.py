"""The part of a set that lies in a plane: an affine equality on top of bounds and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints import parameters
from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.box import Box
from dfwlayer.constraints.k_sparse import KSparse
from dfwlayer.constraints.knapsack import Knapsack, clipped, falling_root
from dfwlayer.constraints.l1_box import L1Box
from dfwlayer.constraints.lp_ball import LpBall
from dfwlayer.constraints.parameters import Kind, Kinds, Value, columns, fault, merged, rows
from dfwlayer.constraints.polyhedral_face import Equation, Facets, PolyhedralFace
from dfwlayer.constraints.polyhedral_set import PolyhedralSet
from dfwlayer.constraints.simplex import CappedSimplex, Simplex
from dfwlayer.linalg import any_row, common_shape
from dfwlayer.solution import Status

__all__ = ["PlaneCut"]

MOST = 60  # steps for the vertex; each ends the search on one of finitely many pieces
Base = Box | CappedSimplex | KSparse | L1Box | Simplex


@dataclass(frozen=True)
class PlaneCut(PolyhedralSet):
    """{x ∈ S : ⟨a, x⟩ = b}, such as a budget Σ x_i = 1 on top of a limit ‖x‖₁ ≤ t.

    With a multiplier μ for the equation everything is a question to S: the projection is that of
    z − μa, the vertex a mix of two for g + μa, and μ is found by a search in one dimension.

    Args:
        constraint: S, one of `Box`, `CappedSimplex`, `KSparse`, `L1Box`, `Simplex`, or `LpBall`
            with p = 1, with bounds for every coordinate.
        normal: a, a number, (n,) or (B, n).
        level: b, a number, a 0-d tensor or (B,), which ⟨a, x⟩ has to take somewhere on S.

    """

    constraint: Constraint
    normal: Value = 1.0
    level: Value = 1.0

    kinds: ClassVar[Kinds] = {"normal": Kind.ENTRIES, "level": Kind.NUMBER}
    harmless: ClassVar[Mapping[str, float]] = {"normal": 0.0, "level": 0.0}

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
                f"p = 1, got {found}"
            )
        parameters.check(self, self.kinds)

    @property
    def base(self) -> Base:
        """S."""
        assert isinstance(self.constraint, Base)
        return self.constraint

    def facets(self, like: Tensor) -> Facets:
        """See `PolyhedralSet`."""
        facets = self.base.facets(like)
        normal = rows(self.normal, like)
        normal = normal if normal.dim() else normal.unsqueeze(-1)
        equation = Equation(normal, columns(self.level, like))
        return facets._replace(equations=(*facets.equations, equation))

    def batch_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Of S, of the normal (B, *shape) and of the level (B,)."""
        return self.base.batch_sizes(shape) | super().batch_sizes(shape)

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> PlaneCut:
        """See `Constraint`."""
        bound = replace(self, constraint=self.base.bind(shape, dtype, device))
        return parameters.bind(bound, self.kinds, shape, dtype, device)

    def float32(self) -> PlaneCut:
        """See `Constraint`."""
        return parameters.float32(replace(self, constraint=self.base.float32()), self.kinds)

    def verified(self) -> tuple[PlaneCut, Tensor | None]:
        """Finite parameters, and a plane that meets S."""
        _, bad = self.base.verified()
        bad = merged(bad, parameters.flagged(self, self.kinds))
        sound = self if bad is None else self.replace_rows(bad != 0)
        return self, merged(bad, sound.check_values())

    def replace_rows(self, bad: Tensor) -> PlaneCut:
        """Flagged problems get a plane that is everything."""
        sound = replace(self, constraint=self.base.replace_rows(bad))
        return parameters.replace_rows(sound, self.kinds, bad, self.harmless)

    def check_values(self) -> Tensor | None:
        """Coordinates that are bounded, and a level that ⟨a, x⟩ takes on S."""
        unbounded = self.base.unbounded()
        if unbounded is not None:
            loose = fault(
                unbounded.any(-1),
                Status.INVALID,
                lambda: (
                    "constraint: expected bounds for every coordinate below a PlaneCut, found one "
                    "without; give it large ones"
                ),
            )
            assert loose is not None
            return merged(loose, self.replace_rows(loose != 0).check_values())
        facets = self.facets(torch.as_tensor(self.normal)).detach()
        normal, level = facets.equations[-1]
        shape = common_shape(*(part.shape for part in facets.tensors()))
        low, high = (edge.unsqueeze(-1) for edge in self._range(normal.expand(shape)))
        rounding = 16 * torch.finfo(normal.dtype).eps * torch.maximum(low.abs(), high.abs())
        missed = torch.maximum(low - level, level - high) - rounding  # (1,) or (B, 1)
        return fault(
            (missed > 0).squeeze(-1),
            Status.INFEASIBLE,
            lambda: (
                f"level: expected a number between {float(low):g} and {float(high):g}, the range "
                f"of ⟨normal, x⟩ on the set, found {float(level):g}"
            ),
        )

    def start(self, like: Tensor) -> Tensor:
        """The point next to where S starts."""
        return self.retract(self.project(self.base.start(like)))

    def vertex(self, g: Tensor) -> Tensor:
        """A mix of two vertices of S on either side of the plane, both minimal for a g + μa."""
        equation, at = self._equation(g), g.detach()
        found = self._dual(at)
        low, high = self.base.vertex(found.below), self.base.vertex(found.above)
        return _mixed(low, high, equation)

    def lowest(self, g: Tensor) -> Tensor:
        """max over μ of min ⟨g + μa, s⟩ − μb over S."""
        return self._dual(g.detach()).value.squeeze(-1)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """The soft vertex of S for g + μa, with μ such that it is in the plane."""
        base = self.base
        a, b = self._equation(g)

        def off(mu: Tensor) -> Tensor:
            return (a * base.soft_vertex(g + mu * a, temperature)).sum(-1, keepdim=True) - b

        def evaluate(mu: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                at = mu.detach().requires_grad_()
                value = off(at)
                (slope,) = torch.autograd.grad(value.sum(), at)
            return value.detach(), -slope

        none = torch.zeros_like(g[..., :1]).detach()
        with torch.no_grad():
            mu = falling_root(evaluate, none - torch.inf, none + torch.inf, none, b.abs())
            _, width = evaluate(mu)
        if torch.is_grad_enabled():
            # a Newton step from the solution is zero, but its derivatives are those of the solution
            mu = mu + torch.where(width > 0, off(mu) / torch.where(width > 0, width, 1), 0)
        return base.soft_vertex(g + mu * a, temperature)

    def retract(self, x: Tensor) -> Tensor:
        """x, or its projection where it is outside by more than rounding, moved into the plane."""
        a, b = (part.detach().double() for part in self._equation(x))
        at, eps = x.detach(), torch.finfo(x.dtype).eps
        inner = self.base.retract(at)
        size = (a * inner).abs().sum(-1, keepdim=True) + b.abs()
        missing = b - (a * inner).sum(-1, keepdim=True)
        exact = (missing.abs() <= 0.5 * eps * size) & (inner == at).all(-1, keepdim=True)
        if x.device.type == "cpu" and bool(exact.all()):
            return x
        far = missing.abs() > eps**0.5 * size
        if any_row(far):
            inner = torch.where(far, self.base.retract(self.project(at)), inner)
        missing = b - (a * inner).sum(-1, keepdim=True)
        along = self._along(inner).double()
        reach = (a * along).sum(-1, keepdim=True)
        step = torch.where(reach > 0, missing / torch.where(reach > 0, reach, 1), 0)
        lower, upper, *_ = self.facets(x).detach()
        moved = clipped((inner + step * along).to(x.dtype), lower, upper)
        moved = torch.where(exact, at, self._drawn_in(moved))
        return x + (moved - at) if x.requires_grad else moved

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

            def evaluate(mu: Tensor) -> tuple[Tensor, Tensor]:
                moved = z - mu * a
                x = self.base.project(moved)
                along = self._along(x)
                value = (a * x).sum(-1, keepdim=True) - b
                width = (a * along).sum(-1, keepdim=True)
                # less is rounding
                return value, torch.where(width > 1e3 * eps * square, width, 0)

            eps = torch.finfo(z.dtype).eps
            square = (a * a).expand_as(z).sum(-1, keepdim=True)
            guess = _to_plane(z, a, b)
            if near is not None:  # exact where the result is on the face of this one
                along = self._along(near)
                width = (a * along).sum(-1, keepdim=True)
                sure = width > 1e3 * eps * square
                step = (along * (z - near)).sum(-1, keepdim=True)
                guess = torch.where(sure, step / torch.where(sure, width, 1), guess)
            endless = torch.full_like(guess, torch.inf)
            size = b.abs() + (a * (z - guess * a)).abs().sum(-1, keepdim=True)
            mu = falling_root(evaluate, -endless, endless, guess, size)
            return self.base.project(z - mu * a)

    def face(self, x: Tensor, g: Tensor, scale: Tensor | None = None) -> PolyhedralFace:
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
        mu = self._dual(g).multiplier
        below = self.base.face(x, g + mu * a, scale)
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
        """At most that of S."""
        return self.base.diameter(n)

    def _clip(self, z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The projection for a box."""
        lower, upper, *_ = self.facets(z)
        slope = torch.where(a != 0, a, torch.inf)
        edges = torch.cat(((z - lower) / slope, (z - upper) / slope), -1)
        low, high = edges.amin(-1, keepdim=True), edges.amax(-1, keepdim=True)
        sack = Knapsack(z, a, lower, upper, b)
        return sack.at(sack.multiplier(low, high, clipped(_to_plane(z, a, b), low, high)))

    def _equation(self, like: Tensor) -> Equation:
        return self.facets(like).equations[-1]

    def _range(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest ⟨a, x⟩ on S, (...)."""
        return self.base.lowest(a), -self.base.lowest(-a)

    def _along(self, x: Tensor) -> Tensor:
        """a, as far as it is in the tangent space of the face of S on which x lies."""
        lower, upper, weight, radius, equations = self.base.facets(x).detach()
        margin = 8 * torch.finfo(x.dtype).eps * x.abs().amax(-1, keepdim=True)
        free = (x - lower > margin) & (upper - x > margin)
        normals = [n for n, _ in equations]
        if weight is not None and radius is not None:
            size = (weight * x.abs()).sum(-1, keepdim=True)
            rounding = 8 * torch.finfo(x.dtype).eps * x.shape[-1] ** 0.5
            tight = size >= radius * (1 - rounding)
            free = free & ((x != 0) | (weight == 0) | ~tight)
            normals.append(torch.where(tight, weight * torch.sign(x), 0))
        along = self._equation(x).slope.detach() * free
        for n in normals:  # there is one at most
            own = n * free
            square = (own * own).sum(-1, keepdim=True)
            share = (own * along).sum(-1, keepdim=True) / torch.where(square > 0, square, 1)
            along = along - share * own
        return along

    @torch.no_grad()
    def _dual(self, g: Tensor) -> _Dual:
        """The largest min ⟨g + μa, s⟩ − μb.

        The minimum is concave in μ and piecewise linear, a piece for each vertex s. Two pieces, one
        rising and one falling, meet at the next μ; where no third one is lower, that is the top.
        """
        a, b = self._equation(g)
        below, above = a.expand_as(g), (-a).expand_as(g)
        low, high = self.base.vertex(below), self.base.vertex(above)
        best = torch.full_like(g[..., :1], -torch.inf)
        at = torch.zeros_like(best)
        going = torch.ones_like(best, dtype=torch.bool)
        eps = torch.finfo(g.dtype).eps
        for _ in range(MOST):
            rise, fall = (((a * s).sum(-1, keepdim=True) - b) for s in (high, low))
            width = rise - fall
            cost, other = ((g * s).sum(-1, keepdim=True) for s in (high, low))
            mu = torch.where(width > 0, (other - cost) / torch.where(width > 0, width, 1), 0)
            turned = g + mu * a
            s = self.base.vertex(turned)
            value = (turned * s).sum(-1, keepdim=True) - mu * b
            at = torch.where(value > best, mu, at)
            best = torch.maximum(best, value)
            top = cost + mu * rise
            size = (turned * s).abs().sum(-1, keepdim=True) + (mu * b).abs() + top.abs()
            going = going & (width > 0) & (top - value > 4 * eps * size)
            if not any_row(going):
                break
            side = (a * s).sum(-1, keepdim=True) >= b
            upward, downward = going & side, going & ~side
            high, above = torch.where(upward, s, high), torch.where(upward, turned, above)
            low, below = torch.where(downward, s, low), torch.where(downward, turned, below)
        return _Dual(best, at, below, above)


class _Dual(NamedTuple):
    """A linear function over the set as one over S."""

    value: Tensor  # (..., 1), its minimum
    multiplier: Tensor  # (..., 1), μ
    below: Tensor  # (..., n), a g + μa whose vertex is below the plane, or in it
    above: Tensor  # (..., n), one whose vertex is above


def _chosen(rows: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Rows of one or the other, where there are any."""
    return None if a is None or b is None else torch.where(rows, a, b)


def _to_plane(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The μ for which z − μa is in the plane."""
    square = (a * a).expand_as(z).sum(-1, keepdim=True)
    return ((a * z).sum(-1, keepdim=True) - b) / torch.where(square > 0, square, 1)


def _mixed(low: Tensor, high: Tensor, equation: Equation) -> Tensor:
    """The point between two in which ⟨a, x⟩ = b."""
    a, b = equation
    least, most = ((a * s).sum(-1, keepdim=True) for s in (low, high))
    width = most - least
    share = torch.where(width > 0, (b - least) / torch.where(width > 0, width, 1), 0)
    return low + share.clamp(0, 1) * (high - low)
