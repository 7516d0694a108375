"""The linear system on the tangent space of a face, for the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.linalg import Krylov, Mask, Scalar, axpy, conjugate_gradient, dot, inner, ratio, root
from dfwlayer.objectives.base import Objective

__all__ = ["FaceSystem"]


@dataclass(frozen=True)
class FaceSystem:
    """H u + νa = v for u in the tangent space {u : u = 0 off the free set, ⟨a, u⟩ = 0}.

    H = ∇²f(x) + λC, with a, λ, C those of the face. Minimising the quadratic model of f on the
    face is this system with v = −∇f(x); the implicit gradient is this system with v the
    gradient in x.
    """

    objective: Objective
    face: Face
    x: Tensor  # (..., n)

    def hessian(self, v: Tensor) -> Tensor:
        """(∇²f + λC) v."""
        product = self.objective.hvp(self.x, v)
        return product + self.face.curvature(v) if self.face.bends else product

    def solve(
        self,
        v: Tensor,
        *,
        tol: float,
        max_steps: int | Tensor,
        stop: Callable[[Tensor], Mask] | None = None,
        ask: int = 8,
        floor: Scalar = 0.0,
    ) -> Krylov:
        """Conjugate gradients on the tangent space; see ``conjugate_gradient``."""
        return conjugate_gradient(
            self.hessian,
            v,
            tol=tol,
            max_steps=max_steps,
            clean=self.tangent,
            precondition=self._preconditioner(v) if self.face.bends else None,
            stop=stop,
            ask=ask,
            floor=0.0 if self.face.bends else floor,
        )

    def tangent(self, v: Tensor) -> Tensor:
        """The part of v in the tangent space."""
        v = v * self._free
        return axpy(v, -inner(self._unit, v), self._unit)

    def multiplier(self, rest: Tensor) -> Tensor:
        """ν with νa ≈ rest = v − H u on the free coordinates."""
        a = self.face.normal
        length = dot(a, a)
        return dot(a, rest) / torch.where(length > 0, length, 1)

    @cached_property
    def _free(self) -> Tensor:
        return self.face.free.to(self.x.dtype)

    @cached_property
    def _unit(self) -> Tensor:
        """a / ‖a‖, zero where nothing is active."""
        a = self.face.normal
        largest = a.abs().amax(-1, keepdim=True)
        a = a / torch.where(largest > 0, largest, 1)  # squares of weights may leave the range
        return axpy(torch.zeros_like(a), ratio(1.0, root(inner(a, a)), 0.0), a)

    def _preconditioner(self, v: Tensor) -> Callable[[Tensor], Tensor]:
        """Inverse of a diagonal that resembles H: f's mean curvature along v, plus λC's own."""
        bend = self.face.curvature_diagonal()
        length = dot(v, v)
        product = dot(v, self.objective.hvp(self.x, v))
        quotient = (product / torch.where(length > 0, length, 1)).clamp_min(0)
        bends = (bend != 0).any(-1)
        diagonal = torch.where(bends, quotient, 1).unsqueeze(-1) + bend
        inverse = torch.where(self.face.free, 1 / torch.where(diagonal > 0, diagonal, 1), 0)
        a = self.face.normal
        steep = inverse * a
        width = dot(a, steep)
        width = torch.where(width > 0, width, 1)

        def precondition(r: Tensor) -> Tensor:
            r = inverse * r
            return r - steep * (dot(a, r) / width).unsqueeze(-1)

        return precondition
