"""Interior-point steps to the face, then the solution on it: for sets of linear constraints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic import Answer, Program, Thin, duality_gap, minimise, thinned
from dfwlayer.methods.base import Outcome, Problem, Settings
from dfwlayer.objectives.model import Model
from dfwlayer.solution import Status

__all__ = ["InteriorPoint"]

SHORTEST = 2.0**-40  # step of a line search
FEASIBLE = 1e-11  # what rows may be missed by, relative to their terms, of a problem that is solved
ENOUGH = 1e-4  # of the decrease that a model promises


@dataclass(frozen=True)
class InteriorPoint:
    """Minimise a quadratic function, or one quadratic model after the other, over linear rows.

    Each quadratic program is solved by steps that end in a solution, in a proof that no point is
    feasible, or in a direction in which f falls for ever (`dfwlayer.linalg.quadratic`); a solution
    is then found once more on its face, to rounding. For an f that is not quadratic these are the
    steps of Newton's method, with a line search. The certificate is that of Lagrangian duality.
    """

    modes: ClassVar[tuple[str, ...]] = ("implicit",)
    compiles: ClassVar[bool] = True
    starts_anywhere: ClassVar[bool] = True
    proves_empty: ClassVar[bool] = True

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """Solve from x (..., n), which matters for an f that is not quadratic only."""
        rows = problem.constraint.linear(x)
        if rows is None:
            raise ValueError(
                "method: 'interior-point' is for sets of linear constraints, such as Polyhedron, "
                f"got {type(problem.constraint).__name__}; use 'auto'"
            )
        if x.numel() == 0:
            return _empty(problem, x)
        if problem.objective.quadratic:
            return _quadratic(problem, rows, x, settings)
        return _newton(problem, rows, x, settings)


def _model(problem: Problem, x: Tensor) -> Model:
    model = problem.objective.model(x)
    if model is None:
        raise ValueError(
            "objective: the method 'interior-point' writes ∇²f down, which is too large for n = "
            f"{x.shape[-1]} here"
        )
    return model.dense()


def _program(rows: Program, model: Model) -> Program:
    """The model over the rows."""
    n = rows.q.shape[-1]
    matrix = 0.5 * (model.matrix + model.matrix.mT)
    return rows._replace(P=matrix.reshape(-1, n, n), q=model.linear.expand_as(rows.q))


def _quadratic(problem: Problem, rows: Program, x: Tensor, settings: Settings) -> Outcome:
    model = _model(problem, x)
    dense = _program(rows, model)
    program = thinned(dense)
    rounding = 8 * max(settings.resolution, torch.finfo(x.dtype).eps) * x.shape[-1] ** 0.5
    bent_down = program.bends_down(rounding).expand(len(program.q))
    if bool(bent_down.any()):  # a feasible point is all that can be had
        eye = torch.eye(x.shape[-1], dtype=dense.q.dtype, device=x.device)
        program = thinned(dense._replace(P=torch.where(bent_down[:, None, None], eye, dense.P)))
    found = minimise(program)
    status = _status(found)
    status = torch.where(bent_down & ~found.empty, int(Status.NOT_CONVEX), status)
    return _outcome(problem, program, model, found, x, status, found.steps, settings)


def _newton(problem: Problem, rows: Program, x: Tensor, settings: Settings) -> Outcome:
    """Minimise the quadratic model at x over the rows, move towards that, and again."""
    objective, n = problem.objective, x.shape[-1]
    lead = x.shape[:-1]
    at = problem.constraint.retract(x)
    usable = torch.isfinite(at).all(-1, keepdim=True)
    at = torch.where(usable, at, x)
    steps = torch.zeros(len(rows.q), dtype=torch.long, device=x.device)
    going = torch.ones_like(steps, dtype=torch.bool)
    model = _model(problem, at)
    program = _program(rows, model)
    found = minimise(program)
    status = _status(found)
    for _ in range(settings.max_steps):
        value, gradient = objective.value_and_gradient(at)
        if settings.stopped(problem, at, value, gradient, steps.reshape(lead)):
            status = torch.where(going, int(Status.STOPPED), status)
            break
        there = found.x.to(x.dtype).reshape(at.shape)
        way = there - at
        slope = (gradient * way).sum(-1)
        promise = -slope.double().reshape(-1)
        size = (gradient.abs() * way.abs()).sum(-1).double().reshape(-1)
        rounding = 4 * torch.finfo(x.dtype).eps * (value.abs().double().reshape(-1) + size)
        sound = ~(found.empty | found.endless)
        going = going & sound & (promise > rounding)
        if not bool(going.any()):
            break
        length = torch.ones_like(value)
        short = going.reshape(lead)
        while bool(short.any()):
            trial = objective.value(at + length.unsqueeze(-1) * way)
            fits = trial <= value + ENOUGH * length * slope + rounding.to(x.dtype).reshape(lead)
            short = short & ~fits & (length > SHORTEST)
            length = torch.where(short, 0.5 * length, length)
        moved = torch.where(length.unsqueeze(-1) == 1, there, at + length.unsqueeze(-1) * way)
        at = torch.where(going.reshape(lead).unsqueeze(-1), moved, at)
        steps = steps + going
        model = _model(problem, at)
        program = _program(rows, model)
        found = minimise(program)
        status = _status(found)
    else:
        ended = (going & (status == Status.ROUNDING_FLOOR)).logical_and(~found.empty)
        status = torch.where(ended, int(Status.MAX_STEPS), status)
    # the multipliers are those of the last model, whose minimiser x is to rounding
    near = found._replace(
        x=torch.where(
            found.exact.unsqueeze(-1) & ~going.unsqueeze(-1), found.x, at.double().reshape(-1, n)
        )
    )
    return _outcome(problem, program, model, near, x, status, steps, settings)


def _status(found: Answer) -> Tensor:
    status = torch.where(found.exact, int(Status.ROUNDING_FLOOR), int(Status.STALLED))
    status = torch.where(found.endless, int(Status.UNBOUNDED), status)
    return torch.where(found.empty, int(Status.INFEASIBLE), status)


def _outcome(
    problem: Problem,
    program: Program | Thin,
    model: Model,
    found: Answer,
    like: Tensor,
    status: Tensor,  # (B,)
    steps: Tensor,  # (B,)
    settings: Settings,
) -> Outcome:
    """The point in the dtype that was asked for, certified as it is there."""
    lead = like.shape[:-1]
    x = found.x.to(like.dtype).reshape(like.shape)
    at = x.double().reshape(program.q.shape)
    value, gradient = problem.objective.value_and_gradient(x)
    slope = model.gradient(at)
    gap = duality_gap(program, found, at, slope)
    gap = torch.where(status == Status.NOT_CONVEX, torch.inf, gap)
    none = found.empty | found.endless
    gap = torch.where(none, torch.inf, gap)
    proven = gap <= settings.tol * value.double().reshape(-1).abs().clamp_min(
        torch.finfo(x.dtype).tiny
    )
    open_ended = (status == Status.ROUNDING_FLOOR) | (status == Status.STALLED)
    open_ended = open_ended | (status == Status.MAX_STEPS) | (status == Status.STOPPED)
    proven = proven & (found.missed <= FEASIBLE)
    status = torch.where(open_ended & proven, int(Status.CONVERGED), status)
    terms = slope.abs().amax(-1) + program.absolute().bent(at.abs()).amax(-1)
    noise = 64 * torch.finfo(x.dtype).eps * terms
    face = problem.constraint.face_of_program(found, x, noise)
    return Outcome(
        x,
        steps.reshape(lead),
        status.reshape(lead),
        value,
        gradient,
        _above(gap, x.dtype).reshape(lead),
        face,
    )


def _above(gap: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype and not smaller."""
    out = gap.to(dtype)
    return out if dtype == gap.dtype else out * (1 + torch.finfo(dtype).eps)


def _empty(problem: Problem, x: Tensor) -> Outcome:
    value, gradient = problem.objective.value_and_gradient(x)
    none = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
    return Outcome(x, none, none, value, gradient, torch.zeros_like(value))
