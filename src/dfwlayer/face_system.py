"""The linear system on the tangent space of a face, for the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.graphs import may_record, rebuilt, replay, static_of, tensors_of
from dfwlayer.linalg import (
    Krylov,
    Mask,
    Scalar,
    Tangent,
    any_row,
    axpy,
    conjugate_gradient,
    dot,
    inner,
    ratio,
    root,
    where_rows,
)
from dfwlayer.objectives.base import Objective, objective_records

__all__ = ["FaceSystem"]

PATIENCE = 200  # steps of conjugate gradients before a factorisation is tried


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
        max_steps: int,
        cap: Scalar | None = None,
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
            cap=cap,
            subspace=self.tangent,
            precondition=self._preconditioner(v) if self.face.bends else None,
            stop=stop,
            ask=ask,
            floor=0.0 if self.face.bends else floor,
        )

    def direct(self, v: Tensor) -> Tensor | None:
        """u by a factorisation, for systems too ill conditioned for conjugate gradients."""
        a, bend = self.face.normal, self.face.curvature_diagonal() if self.face.bends else None
        inverse = self.objective.reduced(self.face.free, bend)
        if inverse is None:
            return None
        steep = inverse(a)
        width = inner(a, steep)
        u = torch.zeros_like(v)
        for _ in range(2):  # the second time for what rounding left
            part = inverse(self.tangent(v - self.hessian(u)))
            u = u + axpy(part, -ratio(inner(a, part), width, 0.0), steep)
        return u

    def invert(self, v: Tensor) -> Tensor:
        """u to the rounding of the dtype, and zero for problems that leave its range."""
        tol, most = torch.finfo(v.dtype).eps, 2 * v.shape[-1] + 20
        found = self._recorded(v, tol)
        if found is not None:
            u, unfinished = found
            if self.objective.isotropic or not bool(unfinished):
                return u
            return sound(u + self.solve(v - self.hessian(u), tol=tol, max_steps=most).u)
        if self.objective.isotropic and not self.face.bends:
            return sound(self.tangent(v))
        first = self.solve(v, tol=tol, max_steps=min(PATIENCE, most))
        if not any_row(first.unfinished):
            return sound(first.u)
        direct = self.direct(v)
        return sound(self.solve(v, tol=tol, max_steps=most).u if direct is None else direct)

    def _recorded(self, v: Tensor, tol: float) -> tuple[Tensor, Tensor] | None:
        """The first steps from a CUDA graph, and whether they were not enough."""
        objective = self.objective
        if self.face.bends or not objective.quadratic or not objective_records(objective):
            return None
        tensors = (*tensors_of(objective), v, self.face.free, self.face.normal)
        if not may_record(tensors):
            return None
        most = 16 if v.dtype == torch.float32 else 32

        def calculate(copies: Sequence[Tensor]) -> tuple[Tensor, ...]:
            own, (v, free, normal) = rebuilt(objective, copies)
            space = tangent_space(free, normal)
            if own.isotropic:
                return sound(space(v)), torch.zeros_like(free[..., 0]).any()
            found = conjugate_gradient(
                lambda d: own.hvp(d, d), v, tol=tol, max_steps=most, subspace=space
            )
            return sound(found.u), torch.as_tensor(found.unfinished).any()

        with torch.no_grad():
            found = replay(("invert", *static_of(objective), tol), calculate, tensors)
        return None if found is None else (found[0], found[1])

    def multiplier(self, rest: Tensor) -> Tensor:
        """ν with νa ≈ rest = v − H u on the free coordinates."""
        a = self.face.normal
        length = dot(a, a)
        return dot(a, rest) / torch.where(length > 0, length, 1)

    @cached_property
    def tangent(self) -> Tangent:
        """The tangent space."""
        return tangent_space(self.face.free, self.face.normal)

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


def tangent_space(free: Tensor, normal: Tensor) -> Tangent:
    """{u : u = 0 off the free set, ⟨a, u⟩ = 0} for a mask (..., n) and a normal a (..., n)."""
    largest = normal.abs().amax(-1, keepdim=True)
    a = normal / torch.where(largest > 0, largest, 1)  # squares of weights may leave the range
    return Tangent(free.to(normal.dtype), a * ratio(1.0, root(inner(a, a)), 0.0))


def sound(u: Tensor) -> Tensor:
    """u, and zero for the problems where it is not finite."""
    return where_rows(torch.isfinite(u.sum(-1)), u, 0)
