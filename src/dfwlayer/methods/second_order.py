"""The phase for problems that first-order steps do not solve: quadratic models, minimised."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.balls.ellipsoid import Ellipsoid
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
from dfwlayer.ops.scale import TINY

__all__ = ["minimise_models"]

MODELS = 400  # of an f that is not quadratic; one that is nearly piecewise linear has many pieces
SECULAR = 60  # Newton steps for the multiplier of an ellipsoid, each twice as exact at the end
CLOSE = 1e-11  # gap relative to f at which another model has little to add


def minimise_models(at: Iterate, rows: Mask) -> bool:
    """Bring these problems to the solution, as far as the steps that are left reach.

    Returned is whether set and objective are of a form for which that can be done. On an ellipsoid
    it can, but as exact as its conditioning allows, so that it is for other steps to go on.

    The quadratic model of f is minimised over the set by an interior point method. A quadratic f
    is its own model. For another one the next model is made where f is least on the way to the
    minimiser of the last; an f that is infinite or NaN counts as higher. A model is a step, and so
    is an iteration of the interior point method where f itself is the model.
    """
    constraint = at.problem.constraint
    region = constraint.region(_rows(at.x))
    if region is None and not isinstance(constraint, Ellipsoid):
        return False
    quadratic = at.problem.objective.quadratic
    for _ in range(1 if quadratic else MODELS):
        going = _mask(rows & (at.left > 1), at)
        if not bool(going.any()):
            break
        model = at.problem.objective.model(at.x)
        if model is None:
            return False
        if region is not None:
            points = _minimisers(at, model, region, going)
        else:
            assert isinstance(constraint, Ellipsoid)
            at.left = select(rows, maximum(at.left - 2, 0.0), at.left)
            x = _in_ellipsoid(model.dense(), constraint).to(at.x.dtype).reshape(at.x.shape)
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
    limit = as_rows(at.left, torch.long).reshape(-1).to(x.device).expand(len(x))[index] - 1
    if not at.problem.objective.quadratic:
        limit = torch.full_like(limit, ITERATIONS)
    pair, steps = interior_point(model, region, x[index], limit)
    exact, settled = on_face(model, region, pair)
    exact = torch.where(settled.unsqueeze(-1), exact, pair.x)
    spent = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    spent[index] = (steps + 1).to(x.dtype) if at.problem.objective.quadratic else 1.0
    at.left = maximum(at.left - number(spent.reshape(at.x.shape[:-1])), 0.0)
    wide = [x.double().index_copy(0, index, part) for part in (pair.x, exact)]
    project = at.problem.constraint.project
    return [project(part.to(x.dtype).reshape(at.x.shape), near=at.x) for part in wide]


def _in_ellipsoid(model: Model, ellipsoid: Ellipsoid) -> Tensor:  # (B, n)
    """The minimiser of ½⟨x, Hx⟩ + ⟨q, x⟩ with ‖Ax‖ ≤ t, in double precision.

    With A = QR, y = Rx and R⁻ᵀHR⁻¹ = V diag(h) Vᵀ it is Vᵀy = −p/(h + μ), p = VᵀR⁻ᵀq. μ is 0, or
    where ‖y‖ would be more than t then, the one with ‖y‖ = t: Newton's method for 1/‖y‖ = 1/t
    comes to it from below, without ever passing it.
    """
    triangle = torch.linalg.qr(ellipsoid.A.detach().double(), mode="r").R
    radius = torch.as_tensor(ellipsoid.radius).detach().double().reshape(-1, 1).to(triangle.device)
    bound = radius.clamp_min(TINY)

    def divided(v: Tensor) -> Tensor:
        """R⁻ᵀ v."""
        out: Tensor = torch.linalg.solve_triangular(triangle.mT, v, upper=False)
        return out

    h, V = torch.linalg.eigh(_even(divided(divided(model.matrix).mT)))
    h = h.clamp_min(0)
    p = (V.mT @ divided(model.slope.unsqueeze(-1))).squeeze(-1)
    mu = (p.abs() / bound - h).amax(-1, keepdim=True).clamp_min(0)
    for _ in range(SECULAR):
        y = p / (h + mu).clamp_min(TINY)
        square = (y * y).sum(-1, keepdim=True)
        slope = (y * y / (h + mu).clamp_min(TINY)).sum(-1, keepdim=True)
        change = (square.sqrt() - bound) / bound * square / slope.clamp_min(TINY)
        mu = mu + torch.nan_to_num(change, posinf=0.0).clamp_min(0)
    y = V @ (-p / (h + mu).clamp_min(TINY)).unsqueeze(-1)
    x = torch.linalg.solve_triangular(triangle, y, upper=True).squeeze(-1)
    return torch.where((radius > 0) & torch.isfinite(x), x, 0)


def _even(matrix: Tensor) -> Tensor:
    """The symmetric part; what is not finite is left out, as eigh would refuse the whole batch."""
    return torch.nan_to_num(0.5 * (matrix + matrix.mT), nan=0.0, posinf=0.0, neginf=0.0)


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
    level = 4 * eps * absolute(at.value)
    moved, x, value, gradient = least_along(at, rows & (slope < 0), d, slope)
    fell = at.value - value > level
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
