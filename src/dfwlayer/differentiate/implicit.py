"""The gradient of the exact solution, through the conditions that hold there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.differentiate.batches import (
    Batched,
    check_no_others,
    equal_depths,
    one_batch,
    ranks_of,
)
from dfwlayer.differentiate.expansion import expand, worth
from dfwlayer.differentiate.transforms import Pullback, any_in_transform, derived
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.methods.base import Problem
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.passed import with_gradient
from dfwlayer.ops.rows import column, where_rows
from dfwlayer.ops.tensors import added, filled, tensors_in

__all__ = ["attach", "gradients_nearby"]


def attach(
    problem: Problem, x: Tensor, face: Face, value: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The solution x and f there, if given, carrying the gradients of the exact solution.

    With the face at x (free coordinates, normals a, multipliers λ, curvature C), x satisfies

        ∇f(x; θ) + λ ∇h(x; w) = 0 on the free coordinates,   h(x; w) = t,

    and its pinned coordinates are functions of (w, t). A change of the parameters that makes
    the residuals r₁, r₂ of these equations moves x by d with H d + νa = −r₁ and ⟨a, d⟩ = −r₂,
    H = ∇²f + C. In the other direction, a gradient v in x becomes gradients −u and −ν in the
    residuals, where H u + νa = v and ⟨a, u⟩ = 0; autograd takes them on to θ, w and t.

    The value changes by ∂f/∂θ, λ r₂ and ⟨∇f, d⟩ for the d of the pinned coordinates, whatever the
    others do. So a gradient in the value becomes λ in r₂, and asks for no system.
    """
    tensors = tensors_in((problem.objective, problem.constraint))
    flow = _Flow()
    residual = _kept(problem.objective, flow).dependence(x)
    # a function of the user's may also hold tensors that are not among its parameters
    if not (residual.requires_grad or any(tensor.requires_grad for tensor in tensors)):
        return x, value
    excess = pinned = None
    if any(tensor.requires_grad for tensor in tensors_in((problem.constraint,))):
        residual = residual + face.force()
        excess, pinned = face.excess(), face.pinned()
    known = None if value is None else _kept(problem.objective, flow).tracked_value(x)
    system = FaceSystem.of(problem.objective, face, x)
    move, carried = _Move.apply(  # type: ignore[no-untyped-call]
        residual, excess, pinned, known, value, system, problem, flow, *tensors
    )
    return x + move, carried


@dataclass
class _Flow:
    """What a backward pass has to know of the gradient that it began with."""

    finite: Tensor | None = None  # (), known when it has begun

    def held(self, v: Tensor) -> Tensor:
        """A gradient in a parameter, finite if that in the solution is."""
        # products of u and x, and the sums of those of a batch, may be beyond the dtype's range
        held = torch.nan_to_num(v, 0.0, 0.0, 0.0)
        return held if self.finite is None else torch.where(self.finite, held, v)


def _kept(objective: Objective, flow: _Flow) -> Objective:
    """The objective; what float32 cannot hold of a gradient in its tensors is none."""
    if objective.dtype == torch.float64 or not torch.is_grad_enabled():
        return objective
    tensors = tensors_in((objective,), sparse=False)
    if not any(t.requires_grad for t in tensors):
        return objective
    kept: tuple[Objective] = filled((objective,), (with_gradient(t, flow.held) for t in tensors))
    return kept[0]


class _Move(torch.autograd.Function):
    """Zero, whose derivative is the movement of the solution, and the value of f with its own."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        excess: Tensor | None,  # None if nothing asks for its gradient
        pinned: Tensor | None,
        known: Tensor | None,  # f with its graph, None where it can be made when it is asked for
        value: Tensor | None,
        system: FaceSystem,
        problem: Problem,
        flow: _Flow,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.system, ctx.problem, ctx.flow, ctx.lazy = system, problem, flow, known is None
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return torch.zeros_like(residual), None if value is None else value.clone()

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, w: Tensor | None) -> tuple[Tensor | None, ...]:
        system: FaceSystem = ctx.system
        # the system reads the tensors of the problem as they are now: this lets torch raise if
        # one of them was changed in place since the solve
        tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad
        out: list[Tensor | None] = [None] * len(needed)
        if torch.is_grad_enabled() or any_in_transform(v, w):
            # the gradient is to be differentiated or mapped: past the residuals, which do not
            # know that x depends on the parameters
            objective, constraint, _ = ctx.problem
            given = objective, constraint, system.x
            if v is not None:
                out[8:] = gradients_nearby(*given, v, tensors, needed[8:])
            if w is not None:
                more = gradients_nearby(*given, w, tensors, needed[8:], of_value=True)
                out[8:] = added(out[8:], more)
            return tuple(out)
        if v is not None:
            out[:3] = _through_system(system, ctx.flow, v, any(needed[1:3]))
        if w is not None:
            if any(needed[1:3]):
                out[1:3] = added(out[1:3], _through_envelope(system, w))
            if ctx.lazy:
                own = len(tensors_in((ctx.problem.objective,)))
                asked = list(zip(tensors[:own], needed[8:], strict=False))
                out[8 : 8 + own] = _explicit(ctx.problem.objective, system.x, w, asked)
            else:
                out[3] = w
        return tuple(out)


def _through_system(
    system: FaceSystem, flow: _Flow, v: Tensor, to_set: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients in the residuals and in what is pinned, from one in x."""
    # NaN comes from elsewhere and goes on as it does everywhere in torch; but the system is
    # that of a whole batch
    arrived = torch.isfinite(v).all(-1)
    flow.finite = arrived.all()
    v = where_rows(arrived, v, 0)
    u = system.invert(v)
    if not to_set:  # the radius and the weights ask for nothing
        return where_rows(arrived, -u, torch.nan), None, None
    rest = v - system.hessian(u)
    nu = system.multiplier(rest)
    # beyond the dtype's range there is no gradient to give; the other problems keep theirs
    sound = torch.isfinite(rest.sum(-1) + nu.sum(-1))
    pinned = rest - system.face.restrict(rest)
    parts = (where_rows(sound, part, 0) for part in (-u, -nu, pinned))
    residual, excess, moved = (where_rows(arrived, part, torch.nan) for part in parts)
    return residual, excess, moved


def _through_envelope(system: FaceSystem, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients in the excess, λ, and in what is pinned, ∇f, from one in the value (...)."""
    face, x = system.face, system.x
    g = system.objective.gradient(x)
    parts = column(face.multiplier, x).expand(*x.shape[:-1], -1), g - face.restrict(g)
    excess, pinned = (
        where_rows(torch.isfinite(part).all(-1), w.unsqueeze(-1) * part, 0) for part in parts
    )
    return excess, pinned


def _explicit(
    objective: Objective, x: Tensor, w: Tensor, asked: Sequence[tuple[Tensor, bool]]
) -> list[Tensor | None]:
    """Gradients of f(x; θ) in its tensors, x being constant, from one in the value (...)."""
    wanted: dict[int, Tensor] = {}  # a tensor may be there twice
    places: dict[int, int] = {}
    for i, (tensor, need) in enumerate(asked):
        if need and id(tensor) not in wanted:
            wanted[id(tensor)], places[i] = tensor, len(places)
    out: list[Tensor | None] = [None] * len(asked)
    if not wanted:
        return out
    with torch.enable_grad():
        value = objective.value(x)
    found = torch.autograd.grad(
        value, list(wanted.values()), w, allow_unused=True, retain_graph=True
    )
    holds = objective.dtype == torch.float64
    sound = None if holds else torch.isfinite(w).all()
    for i, place in places.items():
        gradient = found[place]
        if gradient is not None and sound is not None and gradient.layout == torch.strided:
            kept = torch.nan_to_num(gradient, 0.0, 0.0, 0.0)
            gradient = torch.where(sound, kept, gradient)
        out[i] = gradient
    return out


def gradients_nearby(
    objective: Objective,
    constraint: Constraint,
    x: Tensor,  # (..., n), the solution
    v: Tensor,  # (..., n), or (...)
    tensors: Sequence[Tensor],  # those of objective and set, as `tensors_in` finds them
    needed: Sequence[bool],
    of_value: bool = False,
) -> list[Tensor | None]:
    """Gradients in all the tensors of a bound problem, differentiable in them and in v.

    From one in x, or, ``of_value``, from one (...) in the value.
    """
    ranks = ranks_of(objective, constraint)
    asked = list(zip(tensors, needed, strict=True))
    dense = [(t, need) for t, need in asked if t.layout == torch.strided]
    given = [t for t, _ in dense]
    constant = filled((objective, constraint), (t.detach() for t in given))
    with torch.enable_grad():
        check_no_others(constant[0], constant[1], lambda: constant[0].value(x))
    wanted = tuple(i for i, (_, need) in enumerate(dense, start=1) if need)
    recipe = Pullback(_Nearby(ranks, objective, constraint, of_value), 1, wanted)
    found = iter(derived(recipe, v, x, *equal_depths(given, ranks)))
    pairs = [(next(found), t.shape) if need else (None, t.shape) for t, need in asked]
    return [g if g is None or ranks is None else g.reshape(shape) for g, shape in pairs]


@dataclass(frozen=True)
class _Nearby(Batched):
    """(the solution, the tensors of a problem) ↦ the solution, or f there, differentiably."""

    objective: Objective
    constraint: Constraint
    of_value: bool

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
        if self.of_value:
            return (worth(problem, x, face, order).reshape(lead),)
        return (expand(problem, x, face, order).reshape(*lead, n),)
