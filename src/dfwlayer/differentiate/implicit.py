"""The gradient of the exact solution, through the conditions that hold there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.differentiate.batches import Batched, check_no_others, level, one_batch, ranks_of
from dfwlayer.differentiate.expansion import expand
from dfwlayer.differentiate.transforms import Pullback, derived, in_transform
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.methods.base import Problem
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.rows import where_rows
from dfwlayer.ops.tensors import filled, tensors_in

__all__ = ["attach", "gradients_nearby"]


def attach(problem: Problem, x: Tensor, face: Face) -> Tensor:
    """The solution x, carrying the gradient of the exact solution.

    With the face at x (free coordinates, normals a, multipliers λ, curvature C), x satisfies

        ∇f(x; θ) + λ ∇h(x; w) = 0 on the free coordinates,   h(x; w) = t,

    and its pinned coordinates are functions of (w, t). A change of the parameters that makes
    the residuals r₁, r₂ of these equations moves x by d with H d + νa = −r₁ and ⟨a, d⟩ = −r₂,
    H = ∇²f + C. In the other direction, a gradient v in x becomes gradients −u and −ν in the
    residuals, where H u + νa = v and ⟨a, u⟩ = 0; autograd takes them on to θ, w and t.
    """
    tensors = tensors_in((problem.objective, problem.constraint))
    flow = _Flow()
    residual = _kept(problem.objective, flow).dependence(x)
    # a function of the user's may also hold tensors that are not among its parameters
    if not (residual.requires_grad or any(tensor.requires_grad for tensor in tensors)):
        return x
    excess = pinned = None
    if any(tensor.requires_grad for tensor in tensors_in((problem.constraint,))):
        residual = residual + face.force()
        excess, pinned = face.excess(), face.pinned()
    system = FaceSystem.of(problem.objective, face, x)
    move: Tensor = _Move.apply(  # type: ignore[no-untyped-call]
        residual, excess, pinned, system, problem, flow, *tensors
    )
    return x + move


@dataclass
class _Flow:
    """What a backward pass has to know of the gradient that it began with."""

    finite: Tensor | None = None  # (), known when it has begun


def _kept(objective: Objective, flow: _Flow) -> Objective:
    """The objective; what float32 cannot hold of a gradient in its tensors is none."""
    if objective.dtype == torch.float64 or not torch.is_grad_enabled():
        return objective
    tensors = tensors_in((objective,), sparse=False)
    if not any(t.requires_grad for t in tensors):
        return objective
    kept: tuple[Objective] = filled((objective,), (_Kept.apply(t, flow) for t in tensors))  # type: ignore[no-untyped-call]
    return kept[0]


class _Kept(torch.autograd.Function):
    """A parameter as it is, whose gradient is finite if that in the solution is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, flow: _Flow) -> Tensor:
        ctx.flow = flow
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:
        # products of u and x, and the sums of those of a batch, may be beyond the dtype's range
        held = torch.nan_to_num(v, 0.0, 0.0, 0.0)
        return (held if ctx.flow.finite is None else torch.where(ctx.flow.finite, held, v)), None


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
        flow: _Flow,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.system, ctx.problem, ctx.flow = system, problem, flow
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
            objective, constraint, _ = ctx.problem
            needed = ctx.needs_input_grad[6:]
            found = gradients_nearby(objective, constraint, system.x, v, ctx.saved_tensors, needed)
            return None, None, None, None, None, None, *found
        # NaN comes from elsewhere and goes on as it does everywhere in torch; but the system is
        # that of a whole batch
        arrived = torch.isfinite(v).all(-1)
        ctx.flow.finite = arrived.all()
        v = where_rows(arrived, v, 0)
        u = system.invert(v)
        if not any(ctx.needs_input_grad[1:3]):  # the radius and the weights ask for nothing
            return where_rows(arrived, -u, torch.nan), None, None, *none
        rest = v - system.hessian(u)
        nu = system.multiplier(rest)
        # beyond the dtype's range there is no gradient to give; the other problems keep theirs
        sound = torch.isfinite(rest.sum(-1) + nu.sum(-1))
        pinned = rest - system.face.restrict(rest)
        parts = (where_rows(sound, part, 0) for part in (-u, -nu, pinned))
        return *(where_rows(arrived, part, torch.nan) for part in parts), *none


def gradients_nearby(
    objective: Objective,
    constraint: Constraint,
    x: Tensor,  # (..., n), the solution
    v: Tensor,  # (..., n)
    tensors: Sequence[Tensor],  # those of objective and set, as `tensors_in` finds them
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients in all the tensors of a bound problem, differentiable in them and in v."""
    ranks = ranks_of(objective, constraint)
    asked = list(zip(tensors, needed, strict=True))
    dense = [(t, need) for t, need in asked if t.layout == torch.strided]
    given = [t for t, _ in dense]
    constant = filled((objective, constraint), (t.detach() for t in given))
    with torch.enable_grad():
        check_no_others(constant[0], constant[1], lambda: constant[0].value(x))
    wanted = tuple(i for i, (_, need) in enumerate(dense, start=1) if need)
    recipe = Pullback(_Nearby(ranks, objective, constraint), 1, wanted)
    found = iter(derived(recipe, v, x, *level(given, ranks)))
    pairs = [(next(found), t.shape) if need else (None, t.shape) for t, need in asked]
    return [g if g is None or ranks is None else g.reshape(shape) for g, shape in pairs]


@dataclass(frozen=True)
class _Nearby(Batched):
    """(the solution, the tensors of a problem) ↦ the solution, differentiably."""

    objective: Objective
    constraint: Constraint

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
            _, _, face = problem.face_at(x)
        return (expand(problem, x, face, order).reshape(*lead, n),)
