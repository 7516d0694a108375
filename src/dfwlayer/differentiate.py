"""How x gets its gradient: through the steps, or through the conditions that hold at x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dfwlayer.constraints.base import Face
from dfwlayer.linalg import conjugate_gradient, dot
from dfwlayer.methods.base import Method, Outcome, Problem, Settings

__all__ = ["MODES", "implicit", "unroll"]


def unroll(method: Method, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    """Run the method under autograd: exact for the steps taken, memory O(steps · n)."""
    return method.run(problem, x, settings)


def implicit(method: Method, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    """Run the method without autograd, then attach the gradient of the exact solution.

    With the face at x (free coordinates, normal a, multiplier λ, curvature C), x satisfies

        ∇f(x; θ) + λ ∇h(x; w) = 0 on the free coordinates,   h(x; w) = t,

    and its pinned coordinates are functions of (w, t). A change of the parameters that makes
    the residuals r₁, r₂ of these equations moves x by d with H d + νa = −r₁ and ⟨a, d⟩ = −r₂,
    H = ∇²f + λC. In the other direction, a gradient v in x becomes gradients −u and −ν in the
    residuals, where H u + νa = v and ⟨a, u⟩ = 0; autograd takes them on to θ, w and t.
    """
    with torch.no_grad():
        outcome = method.run(problem, x, settings)
    if not torch.is_grad_enabled():
        return outcome
    x = problem.constraint.retract(outcome.x)
    with torch.no_grad():
        value, gradient = problem.objective.value_and_gradient(x)
    scale = value.abs() + dot(gradient, x).abs()
    face = problem.constraint.face(x, gradient, scale)
    residual = problem.objective.gradient(x) + face.force()
    system = _System(problem, face, x)
    move: Tensor = _Move.apply(residual, face.excess(), face.pinned(), system)  # type: ignore[no-untyped-call]
    return outcome._replace(x=x + move)


MODES = {"unroll": unroll, "implicit": implicit}


@dataclass(frozen=True)
class _System:
    """The linear system at a solution, on the tangent space of its face."""

    problem: Problem
    face: Face
    x: Tensor

    def hessian(self, v: Tensor) -> Tensor:
        """(∇²f + λC) v."""
        return self.problem.objective.hvp(self.x, v) + self.face.curvature(v)

    def solve(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u, ν and H u with H u + νa = v on the free coordinates and ⟨a, u⟩ = 0."""
        face, a = self.face, self.face.normal
        v = torch.where(face.free, v, 0)
        length = dot(v, v)
        mean = dot(v, self.problem.objective.hvp(self.x, v)) / torch.where(length > 0, length, 1)
        bend = face.curvature_diagonal()
        diagonal = mean.unsqueeze(-1).clamp_min(0) + bend
        inverse = torch.where(face.free, 1 / torch.where(diagonal > 0, diagonal, 1), 0)
        steep = inverse * a
        width = dot(a, steep)
        width = torch.where(width > 0, width, 1)

        def precondition(r: Tensor) -> Tensor:
            r = inverse * r
            return r - steep * (dot(a, r) / width).unsqueeze(-1)

        n = v.shape[-1]
        u, _ = conjugate_gradient(
            self.hessian,
            v,
            tol=torch.finfo(v.dtype).eps,
            max_steps=2 * n + 20,
            precondition=precondition,
        )
        product = self.hessian(u)
        nu = dot(steep, v - product) / width
        return u, nu, product


class _Move(torch.autograd.Function):
    """Zero, whose derivative is the movement of the solution."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, excess: Tensor, pinned: Tensor, system: _System
    ) -> Tensor:
        ctx.system = system
        return torch.zeros_like(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        u, nu, product = ctx.system.solve(v)
        return -u, -nu, torch.where(ctx.system.face.free, 0, v - product), None
