"""The phase for problems that first-order steps do not solve: quadratic models, minimised."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.region import Region
from dfwlayer.methods.interior_point import ITERATIONS, interior_point
from dfwlayer.methods.phases import Iterate, least_along
from dfwlayer.methods.region_face import on_face
from dfwlayer.objectives.model import Model
from dfwlayer.ops.rows import (
    Mask,
    absolute,
    as_rows,
    inner,
    maximum,
    number,
    select,
)

__all__ = ["minimise_models"]

MODELS = 400  # of an f that is not quadratic; one that is nearly piecewise linear has many pieces
CLOSE = 1e-11  # gap relative to f at which another model has little to add


def minimise_models(at: Iterate, rows: Mask) -> bool:
    """Bring these problems to the solution, as far as the steps that are left reach.

    Returned is whether set and objective are of a form for which that can be done. A set that has
    an equation for the minimiser has it as exact as its conditioning allows, so that it is for
    other steps to go on.

    The quadratic model of f is minimised over the set by an interior point method. A quadratic f
    is its own model. For another one the next model is made where f is least on the way to the
    minimiser of the last; an f that is infinite or NaN counts as higher. A model is a step, and so
    is an iteration of the interior point method where f itself is the model.
    """
    constraint = at.problem.constraint
    region = constraint.region(_rows(at.x))
    equation = constraint.minimiser() if region is None else None
    if region is None and equation is None:
        return False
    quadratic = at.problem.objective.quadratic
    for _ in range(1 if quadratic else MODELS):
        going = _mask(rows & (at.steps_left > 1), at)
        if not bool(going.any()):
            break
        model = at.problem.objective.model(at.x)
        if model is None:
            return False
        if region is not None:
            points = _minimisers(at, model, region, going)
        else:
            assert equation is not None
            at.steps_left = select(rows, maximum(at.steps_left - 2, 0.0), at.steps_left)
            full = model.dense()
            x = equation(full.matrix, full.slope).to(at.x.dtype).reshape(at.x.shape)
            points = [constraint.project(x, near=at.x)]
        if quadratic:
            _take(at, rows, points)
        else:
            rows = _descend(at, rows, points[-1])
    return region is not None


def _minimisers(at: Iterate, model: Model, region: Region, going: Tensor) -> list[Tensor]:
    """The minimisers of the model: from inside, and where that is known, on the face."""
    index = going.nonzero().squeeze(-1)
    x = _rows(at.x)
    model, region = model.rows(index), region.rows(index)
    limit = as_rows(at.steps_left, torch.long).reshape(-1).to(x.device).expand(len(x))[index] - 1
    if not at.problem.objective.quadratic:
        limit = torch.full_like(limit, ITERATIONS)
    pair, steps = interior_point(model, region, x[index], limit)
    exact, settled = on_face(model, region, pair)
    exact = torch.where(settled.unsqueeze(-1), exact, pair.x)
    spent = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    spent[index] = (steps + 1).to(x.dtype) if at.problem.objective.quadratic else 1.0
    at.steps_left = maximum(at.steps_left - number(spent.reshape(at.x.shape[:-1])), 0.0)
    wide = [x.double().index_copy(0, index, part) for part in (pair.x, exact)]
    project = at.problem.constraint.project
    return [project(part.to(x.dtype).reshape(at.x.shape), near=at.x) for part in wide]


def _take(at: Iterate, rows: Mask, points: list[Tensor]) -> None:
    """Move to a point where its gap is less."""
    gap = at.gap(at.x, at.gradient)
    for x in points:
        tensor, gradient = at.problem.objective.value_and_gradient(x)
        own = at.gap(x, gradient)
        less = rows & (own <= gap)
        at.move(less, x, number(tensor), gradient)
        gap = select(less, own, gap)


def _descend(at: Iterate, rows: Mask, target: Tensor) -> Mask:
    """Go towards the minimiser of a model; the problems in which another one may do better."""
    eps = torch.finfo(at.x.dtype).eps
    before = at.gap(at.x, at.gradient)
    d = target - at.x
    slope = inner(at.gradient, d)
    rounding_of_f = 4 * eps * absolute(at.value)
    moved, x, value, gradient = least_along(at, rows & (slope < 0), d, slope)
    fell = at.value - value > rounding_of_f
    at.move(moved, x, value, gradient)
    after = at.gap(at.x, at.gradient)
    apart = after > max(CLOSE, 16 * eps) * absolute(at.value)
    return moved & ((apart & fell) | (after < 0.5 * before))


def _rows(x: Tensor) -> Tensor:
    """A single problem as a batch of one."""
    return x if x.dim() == 2 else x.unsqueeze(0)


def _mask(rows: Mask, at: Iterate) -> Tensor:  # (B,)
    """A mask as a tensor on the device of the problems."""
    x = _rows(at.x)
    return as_rows(rows, torch.bool).reshape(-1).to(x.device).expand(len(x))
