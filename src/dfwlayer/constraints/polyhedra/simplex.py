"""Simplices, with and without a cap on their entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dfwlayer.constraints.base import Atoms
from dfwlayer.constraints.parameters import as_column, as_entries, entries, fault, number
from dfwlayer.constraints.polyhedra.box import Box
from dfwlayer.constraints.polyhedra.knapsack import Knapsack, clipped, rest_of, spend
from dfwlayer.constraints.polyhedra.polyhedral_face import Equation, Facets, PolyhedralFace
from dfwlayer.constraints.polyhedra.polyhedral_set import PolyhedralSet, soften
from dfwlayer.constraints.region import Flat
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.rows import all_seen, any_row, interval, or_one, quotient
from dfwlayer.ops.values import Value, first_tensor, tensor_of, total
from dfwlayer.solution import Status

if TYPE_CHECKING:
    from dfwlayer.constraints.composed.plane_cut import PlaneCut

__all__ = ["CappedSimplex", "Simplex"]

MOST = 60  # steps for the threshold of a projection; about 5 are needed


@dataclass(frozen=True)
class CappedSimplex(PolyhedralSet):
    """{x : 0 ≤ x ≤ c, Σ x_i = t}.

    Args:
        radius: t ≥ 0, a number, a 0-d tensor or (B,).
        cap: c ≥ 0, a number, (n,) or (B, n), may be infinite; together the caps have to reach t.
            Where rounding leaves their sum below t, by less than two units in the last place of
            t, the set is the point where all entries are at their caps.

    """

    radius: Value = field(default=1.0, metadata=number(least=0, grows=True))
    cap: Value = field(default=1.0, metadata=entries(least=0, infinite=True, grows=True))

    def facets(self, like: Tensor) -> Facets:
        radius = as_column(self.radius, like)
        equation = Equation(torch.ones_like(radius), radius)
        return Facets(torch.zeros_like(radius), as_entries(self.cap, like), equations=(equation,))

    def normal_form(self, n: int) -> Sequence[Flat]:
        """Bounds, and Σ x = t."""
        return (Flat(n, 0.0, self.cap, equations=((1.0, total(self.radius)),)),)

    def check_values(self) -> Tensor | None:
        """Caps that reach the radius."""
        cap = first_tensor(self.cap)
        if cap is None or cap.dim() == 0:
            return None  # for how many entries is not known yet
        most = cap.detach().double().sum(-1)
        radius = torch.as_tensor(self.radius).detach().double()
        missing = (radius - most) / radius.clamp_min(torch.finfo(cap.dtype).tiny)
        return fault(
            missing > 2 * torch.finfo(cap.dtype).eps,
            Status.INFEASIBLE,
            lambda: (
                f"cap: expected caps whose sum reaches the radius {float(radius):g}, found a sum "
                f"of {float(most):g}; raise the caps or lower the radius"
            ),
        )

    def vertex(self, g: Tensor) -> Tensor:
        """As much as the caps allow on the smallest entries of g."""
        radius = as_column(self.radius, g)
        cap = torch.minimum(as_entries(self.cap, g), radius).expand_as(g)
        return spend(radius, cap, g.detach().argsort(-1))

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """argmin ⟨g, s⟩ + τ/2 ‖s/t‖² over the set, which is a projection."""
        far = soften(g, temperature, as_column(self.radius, g))
        radius, cap = as_column(self.radius, far), as_entries(self.cap, far)
        return _project(far, cap, radius).to(g.dtype)

    def retract(self, x: Tensor) -> Tensor:
        """x, or its projection where it is outside by more than rounding, with the right sum."""
        return _retract(self, x)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """clip(z − θ, 0, c) with θ such that the sum is t."""
        radius, cap = as_column(self.radius, z).detach(), as_entries(self.cap, z).detach()
        return _project(z, cap, radius)

    def diameter(self, n: int) -> Tensor:
        """At most: from ‖c‖ and from the simplex, 2^½ t."""
        radius, cap = tensor_of(self.radius).detach(), tensor_of(self.cap).detach()
        return torch.minimum(torch.linalg.vector_norm(cap, dim=-1), 2**0.5 * radius)


@dataclass(frozen=True)
class Simplex(PolyhedralSet):
    """{x : x ≥ 0, Σ x_i = t}.

    Args:
        radius: t ≥ 0, a number, a 0-d tensor or (B,).

    """

    radius: Value = field(default=1.0, metadata=number(least=0, grows=True))

    def facets(self, like: Tensor) -> Facets:
        radius = as_column(self.radius, like)
        equation = Equation(torch.ones_like(radius), radius)
        none = torch.full_like(radius, torch.inf)
        return Facets(torch.zeros_like(radius), none, equations=(equation,))

    def normal_form(self, n: int) -> Sequence[Flat]:
        """x ≥ 0, and Σ x = t."""
        return (Flat(n, 0.0, torch.inf, equations=((1.0, total(self.radius)),)),)

    def start(self, like: Tensor) -> Tensor:
        """The centre."""
        return (as_column(self.radius, like).detach() / like.shape[-1]).expand_as(like)

    def vertex(self, g: Tensor) -> Tensor:
        """All on the smallest entry of g."""
        radius = as_column(self.radius, g).expand_as(g[..., :1])
        return torch.zeros_like(g).scatter(-1, g.detach().argmin(-1, keepdim=True), radius)

    def lowest(self, g: Tensor) -> Tensor:
        """t · min g."""
        return as_column(self.radius, g).squeeze(-1) * g.amin(-1)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """t · softmax(−t g / τ)."""
        radius = as_column(self.radius, g)
        finfo = torch.finfo(g.dtype)
        scores = radius * (g - g.detach().amin(-1, keepdim=True))
        # below the rounding of the scores soft and hard are the same
        floor = (scores.detach().amax(-1, keepdim=True) * finfo.eps).clamp_min(finfo.tiny)
        return radius * torch.softmax(-scores / floor.clamp_min(temperature), -1)

    def atoms(self) -> Atoms:
        """The n corners."""
        return Corners(self.radius)

    def retract(self, x: Tensor) -> Tensor:
        """x, or its projection where it is outside by more than rounding, with the right sum."""
        return _retract(self, x)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """(z − θ)₊ with θ such that the sum is t."""
        radius = as_column(self.radius, z).detach()
        return _shares(z, radius)[0].mul_(radius)

    def nearest(self, z: Tensor) -> tuple[Tensor, PolyhedralFace]:
        """The projection, whose face is plain from it."""
        radius = as_column(self.radius, z).detach()
        x, eta = _shares(z, radius)
        x.mul_(radius / x.sum(-1, keepdim=True))  # what rounding left
        theta = z.amax(-1, keepdim=True) + radius * eta
        return x, PolyhedralFace(self.facets, x, x > 0, theta, (x.sign(),), None, None)

    def stretched(self, factor: Tensor) -> PlaneCut:
        """{y ≥ 0 : Σ y_i / factor_i = t}."""
        from dfwlayer.constraints.composed.plane_cut import PlaneCut  # which builds on this module

        upper = factor * as_column(self.radius, factor)
        return PlaneCut(Box(torch.zeros_like(upper), upper), 1 / factor, self.radius)

    def diameter(self, n: int) -> Tensor:
        """2^½ t, 0 for n = 1."""
        return (2**0.5 if n > 1 else 0.0) * tensor_of(self.radius).detach()


@dataclass(frozen=True)
class Corners:
    """The vertices t·e_i of a simplex."""

    radius: Value

    def scores(self, g: Tensor) -> Tensor:
        """t g_i."""
        return as_column(self.radius, g) * g

    def combine(self, weights: Tensor) -> Tensor:
        """t · weights."""
        return as_column(self.radius, weights) * weights

    def weights(self, x: Tensor, g: Tensor) -> Tensor:
        """x, relative to its sum."""
        total = x.sum(-1, keepdim=True)
        return torch.where(total > 0, x / or_one(total), 1 / x.shape[-1])


@torch.no_grad()
def _shares(z: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """x/t and (θ − max z)/t, with x = (z − θ)₊ and Σ x = t.

    Only differences to the largest entry matter, and those up to t: with y = (z − max z)/t, no
    less than −1, it is η with Σ (y − η)₊ = 1 that is asked for, however far out z is. The left
    side is convex in η, so that Newton steps climb to the root from any η below it, such as where
    the largest entry alone, or all together, would be 1.
    """
    finfo = torch.finfo(z.dtype)
    y = torch.sub(z, z.amax(-1, keepdim=True)).div_(radius.clamp_min(finfo.tiny)).clamp_min_(-1)
    eta = ((y.sum(-1, keepdim=True) - 1) / z.shape[-1]).clamp_min_(-1)
    every = interval(z, 4)
    rest = torch.empty_like(z)  # one for all steps: new memory would take longer than the sums
    for step in range(MOST):
        torch.sub(y, eta, out=rest).clamp_min_(0)
        excess = rest.sum(-1, keepdim=True) - 1
        change = excess / rest.sign_().sum(-1, keepdim=True)
        eta = eta + change
        if step % every == 0 and not any_row(change > finfo.eps):
            break
    return torch.sub(y, eta).clamp_min_(0), eta


def _project(z: Tensor, cap: Tensor, radius: Tensor) -> Tensor:
    """Onto a capped simplex."""
    upper = torch.where(cap < radius, cap, radius)
    return Knapsack(z, torch.ones_like(radius), torch.zeros_like(radius), upper, radius).nearest()


def _retract(constraint: CappedSimplex | Simplex, x: Tensor) -> Tensor:
    """Within the bounds, and with the right sum to the last digits.

    What the sum is off is taken from the entries that are neither at 0 nor at their cap, each by
    its share x(c − x), so that no bound is met or left. Where they cannot take it, those with room
    towards the other bound do, in proportion to it.
    """
    lower, upper, _, _, ((_, radius),) = constraint.facets(x).each(lambda v: v.detach().double())
    at = x.detach()
    eps = torch.finfo(x.dtype).eps
    # a cap beyond the radius is none
    cap, roomy = torch.minimum(upper, radius), torch.where(upper > radius, 2 * radius, upper)
    inner = clipped(at.double(), lower, cap)
    missing = rest_of(radius, inner)
    exact = (missing.abs() <= eps * radius) & (inner == at).all(-1, keepdim=True)
    if all_seen(exact):
        return x
    far = missing.abs() > eps**0.5 * radius
    if any_row(far):
        inner = torch.where(far, clipped(constraint.project(at).double(), lower, cap), inner)
        missing = rest_of(radius, inner)
    share = inner * ((roomy - inner) / or_one(radius))
    inner = clipped(_given(inner, missing, share), lower, cap)
    missing = rest_of(radius, inner)
    if any_row((missing.abs() > 0.25 * eps * radius) & ~exact):
        inner = clipped(
            _given(inner, missing, torch.where(missing > 0, cap - inner, inner)), lower, cap
        )
    inner = _settled(inner.to(x.dtype), cap.to(x.dtype), radius)
    inner = torch.where(exact, at, inner)
    return moved_to(x, inner)


def _settled(x: Tensor, cap: Tensor, radius: Tensor) -> Tensor:
    """x, and what the rounding of n entries leaves of the sum on the entry with the most room."""
    room, index = torch.minimum(x, cap - x).max(-1, keepdim=True)
    missing = rest_of(radius, x)
    fits = missing.abs() <= room
    return x.scatter_add(-1, index, torch.where(fits, missing, 0).to(x.dtype))


def _given(x: Tensor, amount: Tensor, share: Tensor) -> Tensor:
    """x, and an amount (..., 1) divided in proportion to the shares; not where there are none."""
    total = share.sum(-1, keepdim=True)
    return x + quotient(amount, total) * share
