"""Problems beyond the reach of their dtype: solved in units of their own, in double precision.

Numbers of any size are numbers, but their squares and products leave the range of a dtype, and a
float32 problem may need more digits on the way than its solution has. Such problems, and no
others, are solved again in float64, with x = u·y and f = e·F, where the powers of two u and e give
y, ∇F and ∇²F a size near one. The result is rounded to the problem's own dtype, made feasible
there, and certified as it is then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfwlayer.certificate import certify
from dfwlayer.constraints.base import Constraint
from dfwlayer.differentiate.transforms import filled, tensors_in
from dfwlayer.linalg.scale import ROUNDING
from dfwlayer.methods.base import Outcome, Problem, Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.objectives.translated import Translated
from dfwlayer.solution import Status

__all__ = ["Solver", "out_of_range", "solve_again"]

Solver = Callable[[Objective, Constraint, Tensor, Settings], Outcome]

# Exponents of two between which slopes, curvatures and lengths have to be, so that products of
# three of them, and the rounding of these, stay within the normal range of the dtype.
COMFORT = {torch.float32: (-30, 40), torch.float64: (-300, 330)}


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


def solve_again(
    solver: Solver,
    objective: Objective,
    constraint: Constraint,
    start: Tensor,  # (..., n)
    settings: Settings,
    outcome: Outcome | None,
    again: Tensor,  # (...)
) -> Outcome:
    """The outcome with the problems of the mask solved anew; it is None if those are all."""
    part = None if outcome is None else _part(objective, constraint, again)
    if part is None:
        found = _solved(solver, objective, constraint, start, settings)
    else:
        index, rows, sets = part
        spent = None if settings.spent is None else settings.spent[index]
        found = _solved(solver, rows, sets, start[index], replace(settings, spent=spent))
        found = None if found is None else _spread(found, index, len(again))
    if found is None:
        return solver(objective, constraint, start, settings) if outcome is None else outcome
    return found if outcome is None else _merged(outcome, found, again)


def _part(
    objective: Objective, constraint: Constraint, again: Tensor
) -> tuple[Tensor, Objective, Constraint] | None:
    """The positions and problems of a mask, None where a batch cannot be taken apart."""
    if again.dim() == 0 or not hasattr(objective, "rows"):
        return None
    index = again.nonzero().squeeze(-1)
    sets = constraint.rows(index)
    return None if sets is None else (index, objective.rows(index), sets)


def _spread(found: Outcome, index: Tensor, count: int) -> Outcome:
    """The outcome of some problems at their positions in a batch, zero elsewhere."""

    def spread(rows: Tensor) -> Tensor:
        return rows.new_zeros((count, *rows.shape[1:])).index_copy(0, index, rows)

    x, steps, status, value, gap = found.x, found.num_steps, found.status, found.value, found.gap
    assert value is not None and gap is not None  # noqa: PT018
    return Outcome(spread(x), spread(steps), spread(status), spread(value), gap=spread(gap))


def _merged(old: Outcome, new: Outcome, again: Tensor) -> Outcome:
    """The new outcome where the mask holds, the old one elsewhere."""
    assert old.value is not None and new.value is not None  # noqa: PT018
    assert old.gap is not None and new.gap is not None  # noqa: PT018
    return Outcome(
        torch.where(again.unsqueeze(-1), new.x, old.x),
        torch.where(again, new.num_steps, old.num_steps),
        torch.where(again, new.status, old.status),
        torch.where(again, new.value, old.value),
        gap=torch.where(again, new.gap, old.gap),
    )


def _solved(
    solver: Solver, objective: Objective, constraint: Constraint, start: Tensor, settings: Settings
) -> Outcome | None:
    """Solve in units and in double precision, None where objective or set cannot be put so."""
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
    column = unit.unsqueeze(-1)
    how = replace(settings, resolution=torch.finfo(start.dtype).eps)
    found = solver(rescaled, scaled, scaled.retract(start.double() / column), how)
    # as it will be returned, it is certified
    moved = (found.x * column).to(start.dtype)
    x = constraint.retract(moved)
    at = x.detach().double() / column
    with torch.no_grad():
        value, gradient = rescaled.value_and_gradient(at)
    status = torch.where(found.status == Status.CONVERGED, int(Status.ROUNDING_FLOOR), found.status)
    seen: Objective = rescaled
    while (inner := scaled.centred()) is not None:
        scaled, centre = inner
        seen, at = Translated(seen, centre.detach()), at - centre.detach()
    problem = Problem(seen, scaled, scaled.unbounded())
    gap, status = certify(problem, at, value, gradient, status, settings.tol)
    with torch.no_grad():  # what rounding of x to its dtype makes of the gap
        way = at - scaled.vertex(gradient)
        blur = seen.scale(at, gradient).blur(way).squeeze(-1)
        blur = blur * torch.finfo(start.dtype).eps / torch.finfo(torch.float64).eps
    unfinished = (status == Status.MAX_STEPS) | (status == Status.STALLED)
    status = torch.where(unfinished & (gap <= blur), int(Status.ROUNDING_FLOOR), status)
    size = unit**2 / factor
    value, gap = value * size, _rounded_up(gap * size, start.dtype)
    value = value.to(start.dtype)
    lost = ~torch.isfinite(value) | ~torch.isfinite(gap)
    open_ended = status != Status.UNBOUNDED
    status = torch.where(lost & open_ended, int(Status.OUT_OF_RANGE), status)
    return Outcome(x, found.num_steps, status, value, gap=gap)


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
        narrow = grad.to(ctx.dtype)
        lost = torch.isfinite(grad) & ~torch.isfinite(narrow)
        return torch.where(lost, 0, narrow)


def _in_double(objective: Objective, constraint: Constraint) -> tuple[Objective, Constraint] | None:
    """Both with float64 data; None for an objective that cannot be put into units."""
    if not hasattr(objective, "rescaled") or not is_dataclass(constraint):
        return None
    tensors = tensors_in((objective, constraint), sparse=False)
    wide = (_widened(t) if t.is_floating_point() else t for t in tensors)
    both: tuple[Objective, Constraint] = filled((objective, constraint), wide)
    for name in objective.__dataclass_fields__:
        value = getattr(objective, name)
        if isinstance(value, Tensor) and value.layout != torch.strided:
            object.__setattr__(both[0], name, value.double())
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
