"""One quadratic program after the other, for sets that know how to solve these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.minimum import Minimum
from dfwlayer.methods.base import Ability, Outcome, Problem, Settings
from dfwlayer.objectives.model import Model, SparseModel
from dfwlayer.solution import Status

__all__ = ["SequentialQP"]

SHORTEST = 2.0**-40  # step of a line search
FEASIBLE = 1e-11  # what rows may be missed by, relative to their terms, of a solved problem
PATIENCE = 3  # steps in which f does not fall beyond rounding
ENOUGH = 1e-4  # of the decrease that a model promises
FLOOR = int(Status.ROUNDING_FLOOR)


@dataclass(frozen=True)
class SequentialQP:
    """Minimise the quadratic model of f over the set, move towards that point, and again.

    For a quadratic f that is one program. Sets that know how to minimise a quadratic function say
    so (`dfwlayer.constraints.Constraint.minimised`): the solution to rounding, a proof that no
    point is feasible, or that f falls for ever. For an f that is not quadratic these are the steps
    of Newton's method, with a line search. The certificate is that of Lagrangian duality.
    """

    modes: ClassVar[tuple[str, ...]] = ("implicit",)
    abilities: ClassVar[Ability] = Ability.COMPILED | Ability.STARTS_ANYWHERE | Ability.PROVES_EMPTY

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """Solve from x (..., n), which matters for an f that is not quadratic only."""
        if settings.max_steps == 0:
            return _start(problem, x)
        if problem.objective.quadratic:
            return _quadratic(problem, x, settings)
        return _newton(problem, x, settings)


def _model(problem: Problem, x: Tensor) -> Model | SparseModel:
    """The quadratic model of f at x, in double precision."""
    if x.numel() and problem.constraint.takes_sparse(x):
        sparse = problem.objective.sparse_model(x)
        if sparse is not None:
            return sparse
    if x.numel() == 0 or problem.objective.isotropic:
        eye = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
        return Model.at(x, problem.objective.gradient(x), eye)
    model = problem.objective.model(x)
    if model is None:
        raise ValueError(
            f"objective: the method 'sqp' writes ∇²f down, which is too large for n = {x.shape[-1]}"
            " here"
        )
    model = model.dense()
    count = x.numel() // x.shape[-1]
    linear = model.linear.expand(count, x.shape[-1])
    return replace(model.symmetric(), linear=linear)


def _minimum(problem: Problem, model: Model | SparseModel, x: Tensor, most: int) -> Minimum:
    found = problem.constraint.minimised(model.matrix, model.linear, x, most)
    if found is None:
        raise ValueError(
            "method: 'sqp' is for sets that can minimise a quadratic function, such as Polyhedron "
            f"and Intersection, got {type(problem.constraint).__name__}; use 'auto'"
        )
    return found


def _quadratic(problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    model = _model(problem, x)
    count, n = model.linear.shape
    rounding = 8 * max(settings.resolution, torch.finfo(x.dtype).eps) * n**0.5
    bent_down = model.bends_down(rounding).expand(count)
    if bool(bent_down.any()):  # a feasible point is all that can be had
        model = model.straightened(bent_down)
    found = _minimum(problem, model, x, settings.max_steps)
    status = _status(found, settings.max_steps)
    status = torch.where(bent_down & ~found.empty, int(Status.NOT_CONVEX), status)
    return _outcome(problem, model, found, x, status, found.steps, settings)


def _newton(problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    n = x.shape[-1]
    at = problem.constraint.retract(x)
    at = torch.where(torch.isfinite(at).all(-1, keepdim=True), at, x)
    steps = torch.zeros(x.numel() // n, dtype=torch.long, device=x.device)
    walk = _walked(problem, at, steps, settings)
    found = walk.found
    if found is None:  # problems that were done early have been left behind
        found = _minimum(problem, _model(problem, walk.x), walk.x, LONG)
    status = torch.where(walk.stopped, int(Status.STOPPED), _status(found, LONG))
    status = torch.where(walk.going & (status == FLOOR), int(Status.MAX_STEPS), status)
    # the last minimiser, if f is not seen to be higher there; its multipliers are those of a model
    there = found.x.to(x.dtype).reshape(x.shape)
    here, ahead = problem.objective.value(walk.x), problem.objective.value(there)
    last = walk.x.double().reshape(-1, n)
    model = _model(problem, walk.x)
    terms = ((model.terms(last) + model.linear.abs()) * last.abs()).sum(-1).reshape(here.shape)
    blur = 4 * torch.finfo(x.dtype).eps * (here.abs() + terms)
    known = found.exact & ~walk.going
    arrived = known & (ahead <= here + blur).reshape(-1)
    at = torch.where(arrived.reshape(here.shape).unsqueeze(-1), there, walk.x)
    # where no slope leads to a minimiser that rounding has moved, x is one itself
    falls = model.gradient(last) * (found.x - last)
    size = here.abs().reshape(-1) + falls.abs().sum(-1)
    resting = known & (-falls.sum(-1) <= 4 * torch.finfo(x.dtype).eps * size)
    lost = ~arrived & ~resting & (status == FLOOR)
    status = torch.where(lost, int(Status.STALLED), status)
    wide = torch.where(arrived.unsqueeze(-1), found.x, last)
    # f may bend elsewhere than its model did
    model = _model(problem, at)
    out = _outcome(problem, model, found.moved(wide), x, status, walk.steps, settings)
    return out._replace(refinable=True)


class _Walk(NamedTuple):
    """Where the steps of Newton's method have led."""

    x: Tensor  # (..., n)
    steps: Tensor  # (B,)
    going: Tensor  # (B,), not done when the steps were used up
    stopped: Tensor  # (B,), by the callback
    found: Minimum | None  # of the model at x, None where only some of the problems have one


def _walked(problem: Problem, at: Tensor, steps: Tensor, settings: Settings) -> _Walk:
    """Steps from a point of the set; once half of the problems are done, the others go on alone."""
    objective, lead = problem.objective, at.shape[:-1]
    going = torch.ones_like(steps, dtype=torch.bool)
    none, idle = ~going, torch.zeros_like(steps)
    found = _minimum(problem, _model(problem, at), at, LONG)
    for _ in range(int(steps.amax()) if steps.numel() else 0, settings.max_steps):
        value, gradient = objective.value_and_gradient(at)
        if settings.stopped(problem, at, value, gradient, steps.reshape(lead)):
            return _Walk(at, steps, none, going, found)
        there = found.x.to(at.dtype).reshape(at.shape)
        way = there - at
        slope = (gradient * way).sum(-1)
        size = value.abs() + (gradient.abs() * way.abs()).sum(-1)
        rounding = 4 * torch.finfo(at.dtype).eps * size
        sound = ~(found.empty | found.endless)
        going = going & sound & (-slope > rounding).reshape(-1) & (idle < PATIENCE)
        if not bool(going.any()):
            return _Walk(at, steps, none, none, found)
        part = _left(problem, going, settings)
        if part is not None:
            index = going.nonzero().squeeze(-1)
            rest = _walked(part, at[index], steps[index], settings)
            return _Walk(
                at.index_copy(0, index, rest.x),
                steps.index_copy(0, index, rest.steps),
                none.index_copy(0, index, rest.going),
                none,
                None,
            )
        length = torch.ones_like(value)
        short = going.reshape(lead)
        while bool(short.any()):
            trial = objective.value(at + length.unsqueeze(-1) * way)
            fits = trial <= value + ENOUGH * length * slope + rounding
            short = short & ~fits & (length > SHORTEST)
            length = torch.where(short, 0.5 * length, length)
        moved = torch.where(length.unsqueeze(-1) == 1, there, at + length.unsqueeze(-1) * way)
        at = torch.where(going.reshape(lead).unsqueeze(-1), moved, at)
        steps = steps + going
        idle = torch.where((value - trial > rounding).reshape(-1), 0, idle + 1)
        found = _minimum(problem, _model(problem, at), at, LONG)
    return _Walk(at, steps, going, none, found)


def _left(problem: Problem, going: Tensor, settings: Settings) -> Problem | None:
    """The problems that are not done, where these are few and can be told apart."""
    if settings.callback is not None or going.numel() < 2 or 2 * int(going.sum()) > going.numel():
        return None
    return problem.rows(going.nonzero().squeeze(-1))


LONG = 10**6  # steps of a single program, which has its own limits


def _status(found: Minimum, most: int) -> Tensor:
    ended = torch.where(found.steps >= most, int(Status.MAX_STEPS), int(Status.STALLED))
    status = torch.where(found.exact, FLOOR, ended)
    status = torch.where(found.endless, int(Status.UNBOUNDED), status)
    return torch.where(found.empty, int(Status.INFEASIBLE), status)


def _outcome(
    problem: Problem,
    model: Model | SparseModel,
    found: Minimum,
    like: Tensor,
    status: Tensor,  # (B,)
    steps: Tensor,  # (B,)
    settings: Settings,
) -> Outcome:
    """The point in the dtype that was asked for, certified as it is there."""
    lead = like.shape[:-1]
    x = found.x.to(like.dtype).reshape(like.shape)
    at = x.double().reshape(found.x.shape)
    value, gradient = problem.objective.value_and_gradient(x)
    slope = model.gradient(at)
    # multipliers are those of a minimiser that rounding has moved; without a slope none are needed
    gap = torch.where((slope == 0).all(-1), 0, found.gap(at, slope))
    # multipliers of an exact fit are lost in rounding, and f itself bounds it better than they do
    gap = torch.minimum(gap, value.double().reshape(-1) - problem.objective.least)
    gap = torch.where((status == Status.NOT_CONVEX) | found.empty | found.endless, torch.inf, gap)
    least = value.double().reshape(-1).abs().clamp_min(torch.finfo(x.dtype).tiny)
    proven = (gap <= settings.tol * least) & (found.missed <= FEASIBLE)
    open_ended = (status == FLOOR) | (status == Status.STALLED)
    open_ended = open_ended | (status == Status.MAX_STEPS) | (status == Status.STOPPED)
    status = torch.where(open_ended & proven, int(Status.CONVERGED), status)
    # what f's own rounding may be all of: where f* is zero no gap is small beside it
    sums = ((model.terms(at) + model.linear.abs()) * at.abs()).sum(-1)
    blurred = gap <= 4 * torch.finfo(x.dtype).eps * (least + sums)
    unfinished = (status == Status.STALLED) | (status == Status.MAX_STEPS)
    status = torch.where(unfinished & blurred & (found.missed <= FEASIBLE), FLOOR, status)
    terms = slope.abs().amax(-1) + model.terms(at).amax(-1)
    noise = 64 * torch.finfo(x.dtype).eps * terms
    return Outcome(
        x,
        steps.reshape(lead),
        status.reshape(lead),
        value,
        gradient,
        _above(gap, x.dtype).reshape(lead),
        found.face(x, noise),
    )


def _above(gap: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype and not smaller."""
    out = gap.to(dtype)
    return out if dtype == gap.dtype else out * (1 + torch.finfo(dtype).eps)


def _start(problem: Problem, x: Tensor) -> Outcome:
    """The point of the set next to x."""
    n = x.shape[-1]
    target = -x.double().reshape(-1, n)
    if problem.constraint.takes_sparse(x):
        near = _minimum(problem, SparseModel.identity(target), x, LONG)
    else:
        eye = torch.eye(n, dtype=torch.float64, device=x.device)
        near = _minimum(problem, Model(eye, target, factored=False), x, LONG)
    inside = problem.constraint.violation(x) == 0
    at = torch.where(inside.unsqueeze(-1), x, near.x.to(x.dtype).reshape(x.shape))
    none = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    empty = near.empty.reshape(x.shape[:-1])
    return Outcome(at, none, torch.where(empty, int(Status.INFEASIBLE), int(Status.MAX_STEPS)))
