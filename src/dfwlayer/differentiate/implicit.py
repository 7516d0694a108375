"""How x gets its gradient: through the steps, or through the conditions that hold at x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.differentiate.expansion import Known, expand
from dfwlayer.differentiate.mapped import check_no_others, level, one_batch, ranks_of
from dfwlayer.differentiate.transforms import Pullback, derived, in_transform
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.linalg.rows import where_rows
from dfwlayer.methods.base import Method, Outcome, Problem, Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.tensors import filled, tensors_in

__all__ = ["MODES", "attach", "implicit", "locate", "unroll"]


def unroll(method: Method, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    """Run the method under autograd: exact for the steps taken, memory O(steps · n)."""
    outcome = method.run(problem, x, settings)
    x = problem.constraint.retract(outcome.x)
    if settings.max_steps == 0 or x.numel() == 0:  # no step was taken; zero is still a gradient
        gradient = problem.objective.gradient(x)
        soft = problem.constraint.soft_vertex(gradient, settings.heat(0, x.dtype))
        never = torch.zeros_like(gradient, dtype=torch.bool)
        x = x + torch.where(never, gradient + soft, 0)
    return outcome._replace(x=x)


def implicit(method: Method, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    """Run the method without autograd, then attach the gradient of the exact solution.

    With the face at x (free coordinates, normals a, multipliers λ, curvature C), x satisfies

        ∇f(x; θ) + λ ∇h(x; w) = 0 on the free coordinates,   h(x; w) = t,

    and its pinned coordinates are functions of (w, t). A change of the parameters that makes
    the residuals r₁, r₂ of these equations moves x by d with H d + νa = −r₁ and ⟨a, d⟩ = −r₂,
    H = ∇²f + C. In the other direction, a gradient v in x becomes gradients −u and −ν in the
    residuals, where H u + νa = v and ⟨a, u⟩ = 0; autograd takes them on to θ, w and t.
    """
    outcome, face = locate(method, problem, x, settings)
    if not torch.is_grad_enabled():
        return outcome
    if isinstance(method, Known):
        return outcome._replace(x=expand(problem, outcome.x, face, method.order))
    return outcome._replace(x=attach(problem, outcome.x, face))


def locate(method: Method, problem: Problem, x: Tensor, settings: Settings) -> tuple[Outcome, Face]:
    """Solve without autograd: the solution, f and ∇f there, and the face it lies on."""
    with torch.no_grad():
        outcome = method.run(problem, x, settings)
        if (face := outcome.face) is not None:
            value, gradient = problem.objective.value_and_gradient(outcome.x)
            return outcome._replace(value=value, gradient=gradient), face
        x = problem.constraint.retract(outcome.x)
        value, gradient, face = _face(problem, x)
    return outcome._replace(x=x, value=value, gradient=gradient), face


def _face(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor, Face]:
    """f and ∇f at a solution, and its face."""
    value, gradient = problem.objective.value_and_gradient(x)
    scale = problem.objective.scale(x, gradient)
    return value, gradient, problem.constraint.face(x, gradient, scale)


def attach(problem: Problem, x: Tensor, face: Face) -> Tensor:
    """The solution x, carrying the gradient of `implicit`."""
    tensors = tensors_in((problem.objective, problem.constraint))
    residual = problem.objective.dependence(x)
    # a function of the user's may also hold tensors that are not among its parameters
    if not (residual.requires_grad or any(tensor.requires_grad for tensor in tensors)):
        return x
    excess = pinned = None
    if any(tensor.requires_grad for tensor in tensors_in((problem.constraint,))):
        residual = residual + face.force()
        excess, pinned = face.excess(), face.pinned()
    system = FaceSystem(problem.objective, face, x)
    move: Tensor = _Move.apply(  # type: ignore[no-untyped-call]
        residual, excess, pinned, system, problem, *tensors
    )
    return x + move


MODES = {"unroll": unroll, "implicit": implicit}


class _Move(torch.autograd.Function):
    """Zero, whose derivative is the movement of the solution."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        excess: Tensor | None,  # None if nothing asks for its gradient
        pinned: Tensor | None,
        system: FaceSystem,
        problem: Problem,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.system, ctx.problem = system, problem
        ctx.save_for_backward(*tensors)
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        system: FaceSystem = ctx.system
        # the system reads the tensors of the problem as they are now: this lets torch raise if
        # one of them was changed in place since the solve
        _ = ctx.saved_tensors
        none: tuple[None, ...] = (None,) * (len(ctx.needs_input_grad) - 3)
        if torch.is_grad_enabled() or in_transform(v):
            # the gradient is to be differentiated or mapped: past the residuals, which do not
            # know that x depends on the parameters
            return None, None, None, None, None, *_gradients(ctx, v)
        u = system.invert(v)
        if not any(ctx.needs_input_grad[1:3]):  # the radius and the weights ask for nothing
            return -u, None, None, *none
        rest = v - system.hessian(u)
        nu = system.multiplier(rest)
        # beyond the dtype's range there is no gradient to give; the other problems keep theirs
        sound = torch.isfinite(rest.sum(-1) + nu.sum(-1))
        pinned = rest - system.face.restrict(rest)
        return (
            where_rows(sound, -u, 0),
            where_rows(sound, -nu, 0),
            where_rows(sound, pinned, 0),
            *none,
        )


def _gradients(ctx: Any, v: Tensor) -> list[Tensor | None]:
    """Gradients in all the tensors of the problem, differentiable in them and in v."""
    objective, constraint, _ = ctx.problem
    x: Tensor = ctx.system.x
    ranks = ranks_of(objective, constraint)
    asked = list(zip(ctx.saved_tensors, ctx.needs_input_grad[5:], strict=True))
    dense = [(t, need) for t, need in asked if t.layout == torch.strided]
    tensors = [t for t, _ in dense]
    constant = filled((objective, constraint), (t.detach() for t in tensors))
    with torch.enable_grad():
        check_no_others(constant[0], constant[1], lambda: constant[0].value(x))
    wanted = tuple(i for i, (_, need) in enumerate(dense, start=1) if need)
    recipe = Pullback(_Nearby(objective, constraint, ranks), 1, wanted)
    found = iter(derived(recipe, v, x, *level(tensors, ranks)))
    given = [(next(found), t.shape) if need else (None, t.shape) for t, need in asked]
    return [g if g is None or ranks is None else g.reshape(shape) for g, shape in given]


@dataclass(frozen=True)
class _Nearby:
    """(the solution, the tensors of a problem) ↦ the solution, differentiably."""

    objective: Objective
    constraint: Constraint
    ranks: tuple[int, ...] | None

    @property
    def batches(self) -> bool:
        return self.ranks is not None

    @property
    def own(self) -> frozenset[int]:
        return frozenset()

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, *tensors = inputs
        n = x.shape[-1]
        lead: tuple[int, ...] = x.shape[:-1]
        if self.ranks is not None:
            (x, *tensors), lead = one_batch(inputs, (1, *self.ranks))
            x = x.expand(*lead, n) if len(lead) == 1 else x
        objective, constraint = filled((self.objective, self.constraint), iter(tensors))
        # like solve(): what a set keeps of its parameters has to be measured with autograd
        problem = Problem(objective, constraint, constraint.unbounded())
        with torch.no_grad():
            _, _, face = _face(problem, x)
        return (expand(problem, x, face, order).reshape(*lead, n),)
