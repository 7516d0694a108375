"""The linear system on the tangent space of a face, for the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.linalg import conjugate_gradient, dot
from dfwlayer.objectives.base import Objective

__all__ = ["FaceSolve", "FaceSystem"]


class FaceSolve(NamedTuple):
    """What solving the system gave."""

    u: Tensor  # (B, n)
    flat: Tensor  # (B,), a direction without curvature was met
    steps: Tensor  # (B,), products with the Hessian


@dataclass(frozen=True)
class FaceSystem:
    """H u + νa = v for u in the tangent space {u : u = 0 off the free set, ⟨a, u⟩ = 0}.

    H = ∇²f(x) + λC, with a, λ, C those of the face. Minimising the quadratic model of f on the
    face is this system with v = −∇f(x); the implicit gradient is this system with v the
    gradient in x.
    """

    objective: Objective
    face: Face
    x: Tensor  # (B, n)

    def hessian(self, v: Tensor) -> Tensor:
        """(∇²f + λC) v."""
        return self.objective.hvp(self.x, v) + self.face.curvature(v)

    def solve(
        self,
        v: Tensor,
        *,
        tol: float,
        max_steps: int | Tensor,
        stop: Callable[[Tensor], Tensor] | None = None,
    ) -> FaceSolve:
        """Conjugate gradients on the tangent space; see ``conjugate_gradient``."""
        inverse = self._inverse(v)
        a = self.face.normal
        steep = inverse * a
        width = dot(a, steep)
        width = torch.where(width > 0, width, 1)

        def precondition(r: Tensor) -> Tensor:
            r = inverse * r
            return r - steep * (dot(a, r) / width).unsqueeze(-1)

        def clean(r: Tensor) -> Tensor:
            r = torch.where(self.face.free, r, 0)
            return r - a * self.multiplier(r).unsqueeze(-1)

        found = conjugate_gradient(
            self.hessian,
            v,
            tol=tol,
            max_steps=max_steps,
            precondition=precondition,
            clean=clean,
            stop=stop,
        )
        return FaceSolve(*found)

    def multiplier(self, rest: Tensor) -> Tensor:
        """ν with νa ≈ rest = v − H u on the free coordinates."""
        a = self.face.normal
        length = dot(a, a)
        return dot(a, rest) / torch.where(length > 0, length, 1)

    def _inverse(self, v: Tensor) -> Tensor:
        """Inverse of a diagonal that resembles H: f's mean curvature along v, plus λC's own."""
        bend = self.face.curvature_diagonal()
        mean = torch.ones_like(v[..., :1])
        if bool(self.bends.any()):
            length = dot(v, v)
            product = dot(v, self.objective.hvp(self.x, v))
            quotient = (product / torch.where(length > 0, length, 1)).clamp_min(0)
            mean = torch.where(self.bends, quotient, 1).unsqueeze(-1)
        diagonal = mean + bend
        return torch.where(self.face.free, 1 / torch.where(diagonal > 0, diagonal, 1), 0)

    @cached_property
    def bends(self) -> Tensor:
        """Mask (B,) of the problems whose face is curved."""
        return (self.face.curvature_diagonal() != 0).any(-1)
