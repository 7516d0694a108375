"""Problems beyond the reach of their dtype: solved in units of their own, in double precision.

Numbers of any size are numbers, but their squares and products leave the range of a dtype, and a
float32 problem may need more digits on the way than its solution has. Such problems, and no
others, are solved again in float64, with x = u·y and f = e·F, where the powers of two u and e give
y, ∇F and ∇²F a size near one. The result is rounded to the problem's own dtype, made feasible
there, and certified as it is then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfwlayer.certificate import certify
from dfwlayer.constraints.base import Constraint
from dfwlayer.engines.base import (
    Located,
    Task,
    centred,
    merged_outcome,
    part_of,
    spread_out,
)
from dfwlayer.engines.compiled.kernels.constants import LARGEST
from dfwlayer.methods.base import Ability, Outcome
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.scale import ROUNDING
from dfwlayer.ops.tensors import fields_of, filled, tensors_in
from dfwlayer.ops.values import narrowed
from dfwlayer.solution import Status

__all__ = ["in_range", "out_of_range", "takes_care", "with_care"]

Run = Callable[[Task], Outcome]

MISSED = 100.0  # times tol: beyond it a float32 problem at its rounding floor is solved in float64

# Exponents of two between which slopes, curvatures and lengths have to be, so that products of
# three of them, and the rounding of these, stay within the normal range of the dtype. In float64
# also those for which compiled code has room.
ROOM = int(math.log2(LARGEST))
COMFORT = {torch.float32: (-30, 40), torch.float64: (-ROOM, ROOM)}


class Sizes(NamedTuple):
    """How large the parts of a problem are, each () or (B,), in float64."""

    slope: Tensor  # of the terms of ∇f at the start
    curvature: Tensor  # of f
    length: Tensor  # of the set, infinite where it is not bounded or not known


def sizes_of(objective: Objective, constraint: Constraint, start: Tensor) -> Sizes:
    """Measure a problem; what overflows on the way is infinite."""
    with torch.no_grad():
        slope = start if objective.quadratic else objective.gradient(start)
        curvature, noise = objective.scale(start, slope)
        lead = start.shape[:-1]
        terms = noise.double().amax(-1) / (ROUNDING * torch.finfo(start.dtype).eps)
        length = constraint.diameter(start.shape[-1]).to(start.device)
    parts = (terms, curvature.double().amax(-1), length.double())
    return Sizes(*(part.expand(lead) for part in parts))


def out_of_range(objective: Objective, constraint: Constraint, start: Tensor) -> Tensor:
    """Mask () or (B,) of the problems whose numbers leave too little room for their squares."""
    low, high = (2.0**e for e in COMFORT[start.dtype])
    slope, curvature, length = sizes_of(objective, constraint, start)
    # what is exactly zero (no curvature, a set of one point) has no size that could be wrong
    far = ~(slope < high) | ~(curvature < high) | ((slope < low) & (slope > 0))
    far = far | ((curvature < low) & (curvature > 0))
    known = torch.isfinite(length) & (length > 0)
    return far | (known & ((length > high) | (length < low)))


def takes_care(task: Task) -> bool:
    """Whether a task may be solved in other units, and is not already."""
    settings = task.settings
    exact = settings.mode == "implicit" and settings.can(Ability.ANY_UNITS)
    plain = settings.step_size is None and not task.in_units
    return exact and plain and task.point.numel() > 0


def with_care(run: Run, run_anew: Run, found: Located, outcome: Outcome) -> Outcome:
    """The outcome, with what the dtype did not suffice for solved in units and in float64.

    ``run`` goes on with what it has begun. ``run_anew`` asks every engine, as some that refuse
    numbers of any size take them in units.
    """
    outcome = _refined(run, found, outcome)
    beyond = found.beyond
    return outcome if beyond is None else _again(run_anew, found.task, outcome, beyond)


def _refined(run: Run, found: Located, outcome: Outcome) -> Outcome:
    """The outcome, with what the digits of float32 did not suffice for found in float64.

    Each problem goes on with the steps it has left.
    """
    if outcome.x.dtype != torch.float32 or not outcome.refinable:
        return outcome
    task, settings = found.task, found.task.settings
    if settings.step_size is not None or task.in_units:
        return outcome
    assert outcome.gap is not None and outcome.value is not None  # noqa: PT018
    # a gap that misses tol by a little is rounding, and x has the digits of its dtype
    wide = ~(outcome.gap <= MISSED * settings.tol * outcome.value.abs())
    short = (outcome.status == Status.ROUNDING_FLOOR) & wide
    short = short | (outcome.status == Status.STALLED)
    again = short & (outcome.num_steps < settings.max_steps)
    if found.beyond is not None:  # others stand in for these
        again = again & ~found.beyond
    if not bool(again.any()):
        return outcome
    more = replace(settings, warm=True, spent=outcome.num_steps)
    task = replace(task, start=outcome.x.detach(), settings=more, looked_at=True)
    return _again(run, task, outcome, again, needed=False)


def _again(run: Run, task: Task, outcome: Outcome, again: Tensor, needed: bool = True) -> Outcome:
    """The outcome with the problems of the mask (...) solved anew.

    Where that cannot be in units they are solved as they are, or if this is not needed left alone.
    """
    part = None if bool(again.all()) else part_of(task, again)
    if part is None:
        found = _in_units(run, task)
    else:
        found = _in_units(run, part)
        index = again.nonzero().squeeze(-1)
        found = None if found is None else spread_out(found, index, len(again))
    if found is None:
        if not needed:
            return outcome
        found = run(replace(task, in_units=True))
    return merged_outcome(outcome, found, again)


def _in_units(run: Run, task: Task) -> Outcome | None:
    """Solve in units and in double precision, None where objective or set cannot be put so."""
    objective, constraint, start, settings = (
        task.objective,
        task.constraint,
        task.point,
        task.settings,
    )
    wide = _in_double(objective, constraint)
    if wide is None:
        return None
    objective_there, constraint_there = wide
    try:
        sizes = sizes_of(objective_there, constraint_there, start.double())
    except RuntimeError:  # a function of the user's that holds tensors of another dtype
        return None
    unit, factor = _units(sizes)
    scaled = constraint_there.scaled(1 / unit)
    if scaled is None:
        unit = torch.ones_like(unit)
        scaled = constraint_there
    rescaled = objective_there.rescaled(unit, factor)
    if rescaled is None:
        return None
    column = unit.unsqueeze(-1)
    there = replace(
        task,
        objective=rescaled,
        constraint=scaled,
        start=scaled.retract(start.double() / column),
        settings=replace(settings, resolution=torch.finfo(start.dtype).eps),
        in_units=True,
    )
    found = run(there)
    # as it will be returned, it is certified
    moved = (found.x * column).to(start.dtype)
    x = constraint.retract(moved)
    at = x.detach().double() / column
    with torch.no_grad():
        value, gradient = rescaled.value_and_gradient(at)
    status = torch.where(found.status == Status.CONVERGED, int(Status.ROUNDING_FLOOR), found.status)
    with torch.no_grad():
        rounding = 4 * torch.finfo(start.dtype).eps * at.abs()
        problem, at, _ = centred(rescaled, scaled, at)
        gap, status = certify(problem, at, value, gradient, status, settings.tol, rounding)
        # what rounding of x to its dtype makes of the gap
        way = at - problem.constraint.vertex(gradient)
        blur = problem.objective.scale(at, gradient).blur(way).squeeze(-1)
        blur = blur * torch.finfo(start.dtype).eps / torch.finfo(torch.float64).eps
    unfinished = (status == Status.MAX_STEPS) | (status == Status.STALLED)
    status = torch.where(unfinished & (gap <= blur), int(Status.ROUNDING_FLOOR), status)
    size = unit**2 / factor
    value, gap = value * size, _rounded_up(gap * size, start.dtype)
    value = value.to(start.dtype)
    if found.value is not None and found.value.requires_grad:
        moved = (found.value - found.value.detach()) * size
        value = value + torch.where(torch.isfinite(found.value), moved, 0).to(start.dtype)
    lost = ~torch.isfinite(value) | ~torch.isfinite(gap)
    open_ended = status != Status.UNBOUNDED
    status = torch.where(lost & open_ended, int(Status.OUT_OF_RANGE), status)
    return Outcome(x, found.num_steps, status, value, gap=gap)


def in_range(task: Task) -> tuple[Task, Tensor]:
    """A task in units whose numbers leave room for their squares, and the price of a unit there.

    The units are powers of two, so that no digit is lost. Prices −∂f/∂t become u/k as large, as
    t = u·τ and f = F u²/k. A task that leaves room, or cannot be put into units, is itself.
    """
    objective, constraint, start = task.objective, task.constraint, task.point
    one = torch.ones(task.lead, dtype=torch.float64, device=start.device)
    if start.numel() == 0 or not bool(out_of_range(objective, constraint, start).any()):
        return task, one
    unit, factor = _units(sizes_of(objective, constraint, start))
    narrow, widest = (part.to(start.dtype) for part in (unit, factor))
    scaled, rescaled = constraint.scaled(1 / narrow), objective.rescaled(narrow, widest)
    if scaled is None or rescaled is None:
        return task, one
    start = start / narrow.unsqueeze(-1)
    return replace(task, objective=rescaled, constraint=scaled, start=start), unit / factor


def _widened(t: Tensor) -> Tensor:
    """In float64; a gradient that the dtype of t cannot hold is none, as everywhere here."""
    if not (t.requires_grad and t.dtype != torch.float64):
        return t.double()
    out: Tensor = _Widened.apply(t)  # type: ignore[no-untyped-call]
    return out


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.dtype = t.dtype
        return t.double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return narrowed(grad, ctx.dtype)


def _in_double(objective: Objective, constraint: Constraint) -> tuple[Objective, Constraint] | None:
    """Both with float64 data; None for an objective that cannot be put into units."""
    if not is_dataclass(objective) or not is_dataclass(constraint):
        return None
    tensors = tensors_in((objective, constraint), sparse=False)
    wide = (_widened(t) if t.is_floating_point() else t for t in tensors)
    both: tuple[Objective, Constraint] = filled((objective, constraint), wide)
    for given, copy in zip((objective, constraint), both, strict=True):
        for name in fields_of(given):
            value = getattr(given, name)
            if isinstance(value, Tensor) and value.layout != torch.strided:
                object.__setattr__(copy, name, value.double())
    return both


def _units(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """u, and the factor k with which ∇²f becomes of size one, so that F = f k/u²; powers of two.

    u is the length of the set, or that of the step from the start to the minimiser of a function
    with that slope and curvature where this is less. k is one for all problems that share a
    Hessian, and a power of four, as `LeastSquares` multiplies A with its root.
    """
    slope, curvature, length = sizes
    step = torch.where(curvature > 0, slope / curvature, torch.inf)
    step = torch.where(step > 0, step, torch.inf)
    reach = torch.where(length > 0, length, torch.inf)
    unit = torch.minimum(step, reach)
    unit = _power_of(torch.where(torch.isfinite(unit), unit, 1), 1)
    steep = torch.where(curvature > 0, curvature, slope / unit)
    steep = torch.where((steep > 0) & torch.isfinite(steep), steep, 1)
    return unit, _power_of(1 / steep, 2)


def _power_of(number: Tensor, base_exponent: int) -> Tensor:
    """The power of 2^base_exponent next to a positive number."""
    exponent = torch.round(torch.log2(number) / base_exponent) * base_exponent
    return torch.exp2(exponent.clamp(-1000, 1000))


def _rounded_up(gap: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype and not smaller, so that a bound stays one."""
    out = gap.to(dtype)
    above: Any = torch.nextafter(out, torch.full_like(out, torch.inf))
    return torch.where(out.double() < gap, above, out)
