"""Local faces of Schatten balls: matrices of one rank, or with some singular values at a bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer.constraints.balls.singular import Factors, completed, divided_differences, split
from dfwlayer.constraints.face import Face
from dfwlayer.ops.rows import or_one

__all__ = ["SchattenFace", "SpectralFace"]

TIE = 1e-5  # relative difference of singular values below which the mean slope is more exact


@dataclass(frozen=True)
class SchattenFace(Face):
    """h(X) = ‖σ(X)‖_p for 1 ≤ p < ∞, on all matrices or, for p < 2, on those of X's rank.

    With X = U diag(σ) Vᵀ of rank k and φ = (σ/h)^(p−1), ∇h = U diag(φ) Vᵀ. A direction D is
    taken apart into UᵀDV, which C multiplies by the divided differences of φ, and the parts B of
    UᵀD beside V and E of DV beside U, which it multiplies by φ/σ. For p < 2 h has no curvature,
    or an infinite one, in what is beside both; D has no such part, but X + D is of rank k only
    with E diag(1/σ) B there. With W the part of −g beside both, ‖W‖ ≤ λφ_k, that adds
    −2⟨W, E diag(1/σ) B⟩ to the second derivative of the Lagrangian.
    """

    p: float
    radius: Tensor
    x: Tensor  # (..., rc)
    at: Factors  # columns that are not alive are zero, their values one
    alive: Tensor  # (..., k)
    size: Tensor  # (..., 1), h
    multiplier: Tensor  # (..., 1), 0 where the constraint is not active
    outside: Tensor | None  # (..., r, c), W; None for p ≥ 2
    frozen: Tensor  # (..., 1), radius 0

    bends = True  # for every p; p = 1 because matrices of one rank do

    def restrict(self, v: Tensor) -> Tensor:
        """v without the part beside both U and V, for p < 2 and an active constraint."""
        if self.p < 2:
            left, _, right = self.at
            along, across, down = split(self._matrix(v), left, right)
            inside = self._flat(_spanned(left, across + along @ right.mT, down, right))
            v = inside if self._everywhere else torch.where(self._active, inside, v)
        return v if self._moving else torch.where(self.frozen, 0, v)

    @cached_property
    def _everywhere(self) -> bool:
        """Whether the constraint is active in every problem; a look saves large matrices a copy."""
        return bool(self._active.all())

    @cached_property
    def _moving(self) -> bool:
        return not bool(self.frozen.any())

    @cached_property
    def normals(self) -> tuple[Tensor, ...]:
        """∇h where the constraint is active."""
        return (torch.where(self._active, self._flat(self.at.product(self._profile)), 0),)

    def curvature(self, v: Tensor) -> Tensor:
        """λ∇²h v, and what keeping the rank adds."""
        left, values, right = self.at
        along, across, down = split(self._matrix(v), left, right)
        even, odd = self._differences
        rate = self.multiplier * self._profile / values
        core = even * (0.5 * (along + along.mT)) + odd * (0.5 * (along - along.mT))
        core = self.multiplier.unsqueeze(-1) * core
        beside = rate.unsqueeze(-1) * across
        below = down * rate.unsqueeze(-2)
        if self.outside is not None:
            inverse = self.alive / values
            beside = beside - inverse.unsqueeze(-1) * (down.mT @ self.outside)
            below = below - (self.outside @ across.mT) * inverse.unsqueeze(-2)
        out = _spanned(left, core @ right.mT + beside, below, right)
        if self.p == 2:  # the one p with a finite curvature in what is beside both
            matrix = self._matrix(v)
            rest = matrix - left @ (along @ right.mT + across) - down @ right.mT
            out = out + (self.multiplier / self.size).unsqueeze(-1) * rest
        return self._flat(out)

    def bent(self, u: Tensor) -> Tensor:
        """u + E (diag(σ) + UᵀuV)⁻¹ B, of X's rank together with X, for p < 2."""
        if self.p >= 2:
            return u
        left, values, right = self.at
        along, across, down = split(self._matrix(u), left, right)
        return u + self._flat(down @ completed(values, along, across))

    def force(self) -> Tensor:
        """λ∇h, which does not depend on the radius."""
        return self.multiplier * self.normals[0]

    def excess(self) -> Tensor:
        """h − t where the constraint is active, 0 elsewhere."""
        return torch.where(self._active, self.size - self.radius.unsqueeze(-1), 0)

    @property
    def _active(self) -> Tensor:
        return self.multiplier > 0

    @cached_property
    def _profile(self) -> Tensor:
        """φ, 0 for what is not alive."""
        return torch.where(self.alive, (self.at.values / self.size) ** (self.p - 1), 0)

    @cached_property
    def _differences(self) -> tuple[Tensor, Tensor]:
        """Divided differences of φ; along the normal, where C has one more part, D has none."""
        values = self.at.values
        mean = 0.5 * (values.unsqueeze(-1) + values.unsqueeze(-2))
        size = self.size.unsqueeze(-1)
        slope = (self.p - 1) / size * (mean / size) ** (self.p - 2)
        pairs = self.alive.unsqueeze(-1) & self.alive.unsqueeze(-2)
        least = TIE * torch.where(self.alive, values, 0).amax(-1, keepdim=True)
        even, odd = divided_differences(self._profile, values, least, slope)
        return torch.where(pairs, even, 0), torch.where(pairs, odd, 0)

    def _matrix(self, v: Tensor) -> Tensor:
        return v.reshape(*v.shape[:-1], self.at.left.shape[-2], self.at.right.shape[-2])

    def _flat(self, v: Tensor) -> Tensor:
        return v.flatten(-2)


def _spanned(left: Tensor, across: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """U·across + down·Vᵀ, in one pass over the result; the two may be those of many directions."""
    lead = down.shape[:-2]
    left, right = (part.expand(*lead, *part.shape[-2:]) for part in (left, right))
    return torch.cat((left, down), -1) @ torch.cat((across, right.mT), -2)


@dataclass(frozen=True)
class SpectralFace(Face):
    """max σ(X) ≤ t with some singular values at the bound: X = t U₁V₁ᵀ + the rest.

    The symmetric part of U₁ᵀDV₁ is pinned, and no constraint is left beside that. Its multiplier
    is Λ = −U₁ᵀgV₁ ⪰ 0, g = ∇f(X). For the singular values to stay at t in second order, that part
    has to move by −1/2t times

        AᵀA + Σ_j t (t b bᵀ + t e eᵀ + σ_j (b eᵀ + e bᵀ)) / (t² − σ_j²),

    where A is the antisymmetric part of U₁ᵀDV₁, b = U₁ᵀDv_j and e = V₁ᵀDᵀu_j for the other
    singular pairs j. Λ makes the curvature of that.
    """

    radius: Tensor
    x: Tensor  # (..., rc)
    at: Factors  # all of them
    held: Tensor  # (..., k), at the bound
    force_inside: Tensor  # (..., k, k), Λ on the held ones, 0 elsewhere
    frozen: Tensor  # (..., 1), radius 0

    bends = True  # where singular values are held

    def restrict(self, v: Tensor) -> Tensor:
        """v without the symmetric part of U₁ᵀvV₁."""
        left, right = self._held
        along = left.mT @ self._matrix(v) @ right
        pinned = left @ (0.5 * (along + along.mT)) @ right.mT
        return torch.where(self.frozen, 0, v - pinned.flatten(-2))

    def curvature(self, v: Tensor) -> Tensor:
        """See the class."""
        left, values, right = self.at
        along, across, down = split(self._matrix(v), left, right)
        held, other = self.held.to(v.dtype), (~self.held).to(v.dtype)
        t = or_one(self.radius.detach()[..., None, None])
        square = t.squeeze(-1) ** 2
        room = (square - values**2).clamp_min(torch.finfo(v.dtype).eps * square)
        pull, rate = self.force_inside, other / room
        both = held.unsqueeze(-1) * along * held.unsqueeze(-2)
        anti = 0.5 * (both - both.mT)
        inside = (anti @ pull + pull @ anti) / (2 * t)
        beside = held.unsqueeze(-1) * along * other.unsqueeze(-2)  # b_j, a column for each
        below = other.unsqueeze(-1) * along * held.unsqueeze(-2)  # e_j, a row for each
        mixed = t * beside + below.mT * values.unsqueeze(-2)
        mixed_below = t * below + values.unsqueeze(-1) * beside.mT
        core = inside + pull @ mixed * rate.unsqueeze(-2) + rate.unsqueeze(-1) * mixed_below @ pull
        out = left @ (core @ right.mT + pull @ across / t) + (down @ pull / t) @ right.mT
        return out.flatten(-2)

    def pinned(self) -> Tensor:
        """t U₁V₁ᵀ."""
        left, right = self._held
        return self.radius.unsqueeze(-1) * (left @ right.mT).flatten(-2)

    @cached_property
    def _held(self) -> tuple[Tensor, Tensor]:
        """U₁ and V₁, other columns zero."""
        mask = self.held.unsqueeze(-2)
        return self.at.left * mask, self.at.right * mask

    def _matrix(self, v: Tensor) -> Tensor:
        return v.reshape(*v.shape[:-1], self.at.left.shape[-2], self.at.right.shape[-2])
