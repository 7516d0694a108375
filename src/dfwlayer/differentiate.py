"""How x gets its gradient: through the steps, or through the conditions that hold at x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dfwlayer.constraints.base import Face
from dfwlayer.face_system import FaceSystem
from dfwlayer.linalg import dot, where_rows
from dfwlayer.methods.base import Method, Outcome, Problem, Settings

__all__ = ["MODES", "attach", "implicit", "locate", "unroll"]


def unroll(method: Method, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    """Run the method under autograd: exact for the steps taken, memory O(steps · n)."""
    outcome = method.run(problem, x, settings)
    x = problem.constraint.retract(outcome.x)
    if settings.max_steps == 0 or x.numel() == 0:  # no step was taken; zero is still a gradient
        gradient = problem.objective.gradient(x)
        soft = problem.constraint.soft_vertex(gradient, settings.temperature(0))
        never = torch.zeros_like(gradient, dtype=torch.bool)
        x = x + torch.where(never, gradient + soft, 0)
    return outcome._replace(x=x)


def implicit(method: Method, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    """Run the method without autograd, then attach the gradient of the exact solution.

    With the face at x (free coordinates, normal a, multiplier λ, curvature C), x satisfies

        ∇f(x; θ) + λ ∇h(x; w) = 0 on the free coordinates,   h(x; w) = t,

    and its pinned coordinates are functions of (w, t). A change of the parameters that makes
    the residuals r₁, r₂ of these equations moves x by d with H d + νa = −r₁ and ⟨a, d⟩ = −r₂,
    H = ∇²f + λC. In the other direction, a gradient v in x becomes gradients −u and −ν in the
    residuals, where H u + νa = v and ⟨a, u⟩ = 0; autograd takes them on to θ, w and t.
    """
    outcome, face = locate(method, problem, x, settings)
    if not torch.is_grad_enabled():
        return outcome
    return outcome._replace(x=attach(problem, outcome.x, face))


def locate(method: Method, problem: Problem, x: Tensor, settings: Settings) -> tuple[Outcome, Face]:
    """Solve without autograd: the solution, f and ∇f there, and the face it lies on."""
    with torch.no_grad():
        outcome = method.run(problem, x, settings)
        x = problem.constraint.retract(outcome.x)
        value, gradient = problem.objective.value_and_gradient(x)
        scale = value.abs() + dot(gradient, x).abs()
        face = problem.constraint.face(x, gradient, scale)
    return outcome._replace(x=x, value=value, gradient=gradient), face


def attach(problem: Problem, x: Tensor, face: Face) -> Tensor:
    """The solution x, carrying the gradient of `implicit`."""
    residual = problem.objective.gradient(x) + face.force()
    system = FaceSystem(problem.objective, face, x)
    move: Tensor = _Move.apply(residual, face.excess(), face.pinned(), system)  # type: ignore[no-untyped-call]
    return x + move


MODES = {"unroll": unroll, "implicit": implicit}


class _Move(torch.autograd.Function):
    """Zero, whose derivative is the movement of the solution."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, excess: Tensor, pinned: Tensor, system: FaceSystem
    ) -> Tensor:
        ctx.system = system
        return torch.zeros_like(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        system: FaceSystem = ctx.system
        u = system.invert(v)
        if not any(ctx.needs_input_grad[1:3]):  # the radius and the weights ask for nothing
            return where_rows(torch.isfinite(u.sum(-1)), -u, 0), None, None, None
        rest = v - system.hessian(u)
        nu = system.multiplier(rest)
        # beyond the dtype's range there is no gradient to give; the other problems keep theirs
        sound = torch.isfinite(rest.sum(-1) + nu)
        pinned = torch.where(system.face.free, 0, rest)
        return (
            where_rows(sound, -u, 0),
            torch.where(sound, -nu, 0),
            where_rows(sound, pinned, 0),
            None,
        )
