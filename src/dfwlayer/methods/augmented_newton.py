"""Newton's method for the augmented Lagrangian, for any set that can be projected on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.linalg.subspaces import Tangent
from dfwlayer.methods.face_newton import bend_of, dense
from dfwlayer.methods.phases import Iterate
from dfwlayer.objectives.model import LARGEST, Model
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    absolute,
    any_row,
    axpy,
    fill,
    inner,
    keep,
    maximum,
    number,
    ratio,
    root,
    select,
    select_mask,
)

__all__ = ["augmented_newton"]

ITERATIONS = 100  # at most
PATIENCE = 15  # iterations in which neither φ, the gap nor what misses optimality falls
LITTLE = 1e-4  # of φ, by which it has to fall in an iteration to be told from standing still
REFUSED = 3  # such iterations that a step counts for which does not lower φ at any length
CLOSE = 1e-9  # gap relative to f from where on a step on the face has the rest
SETTLED = 0.1  # ‖∇φ‖ relative to σ‖x − z‖ at which the multiplier is renewed
QUARTER = 0.25  # of ‖x − z‖ that may be left after that, or σ grows,
STIFFER = 10.0  # by this factor
LENGTHS = 12  # of a step that are tried, each a quarter of the last until one is good
STEEP = 0.5  # of the slope at the start of a step, from which on it should have been longer
ARMIJO = 1e-4  # of the decrease that the slope promises
NEARLY = 0.8  # of the slope at the start of a step, at its end, with which φ is sure to have fallen
RIDGE = 1e-13  # least damping, relative to the curvature of f; more after a shorter step
SHARPER, BLUNTER, BLUNT = 0.1, 10.0, 1e-6
TINY, HUGE = 1e-300, 1e300


@dataclass
class _Point:
    """x, which need not be in the set, and f there."""

    x: Tensor  # (..., n)
    value: Scalar
    gradient: Tensor  # (..., n)

    def move(self, rows: Mask, other: _Point) -> None:
        """Take another point for some problems."""
        self.x, self.gradient = (
            keep(rows, other.x, self.x),
            keep(rows, other.gradient, self.gradient),
        )
        self.value = select(rows, other.value, self.value)


def augmented_newton(at: Iterate, rows: Mask) -> None:
    """Minimise φ(x) = f(x) + σ/2 dist²(x + u, S) by Newton's method, and renew u and σ.

    x need not be in S, but z = proj(x + u) is; with the right u, the multiplier of x = z in units
    of σ, both are the solution. A step takes up and lets go of as many constraints as the
    projection does, and as ∇²f is factorised, its conditioning does not matter. (The semismooth
    Newton method for the augmented Lagrangian of Li, Sun and Toh, 2018.) The iterate becomes the z
    with the least gap.
    """
    objective, constraint = at.problem.objective, at.problem.constraint
    model = _model(at, at.x)
    if model is None:
        return
    finfo = torch.finfo(at.x.dtype)
    here = _Point(at.x, at.value, at.gradient)
    scale = _scale(at, model)
    sigma, damping = scale, RIDGE * scale
    u = _times(here.gradient, ratio(-1.0, sigma, 0.0))
    least = at.gap(at.x, at.gradient)
    apart_before = missed = fill(torch.inf, at.value)
    idle = fill(0.0, at.value)
    for k in range(ITERATIONS):
        rows = rows & (at.steps_left > 3) & (idle < PATIENCE)
        if not any_row(rows):
            return
        z = constraint.project(here.x + u, near=at.x)
        off = here.x - z
        slope = axpy(here.gradient, sigma, u + off)
        apart, steep = root(inner(off, off)), root(inner(slope, slope))
        renewed = rows & (steep <= SETTLED * sigma * apart)
        if any_row(renewed):
            u = keep(renewed, u + off, u)
            stiffer = renewed & (apart > QUARTER * apart_before)
            apart_before = select(renewed, apart, apart_before)
            before, sigma = sigma, select(stiffer, STIFFER * sigma, sigma)
            u = _times(u, ratio(before, sigma, 1.0))
            z = constraint.project(here.x + u, near=z)
            slope = axpy(here.gradient, sigma, u + (here.x - z))
        tensor, gradient = objective.value_and_gradient(z)
        value, gap = number(tensor), at.gap(z, gradient)
        better = rows & (gap < least) & (absolute(value) < torch.inf)
        at.move(better, z, value, gradient)
        total = steep + sigma * apart
        advanced = (gap < 0.9 * least) | (total < 0.9 * missed)
        idle = select(rows, select(advanced, 0.0, idle + 1), idle)
        least, missed = select(better, gap, least), select(advanced, total, missed)
        rows = rows & (least > max(CLOSE, 16 * finfo.eps) * absolute(at.value))
        if k and not objective.quadratic and (model := _model(at, here.x)) is None:
            return
        system = FaceSystem(objective, constraint.face(z, z - here.x - u), z)
        step = _step(model, system, slope, sigma, damping)
        length, fell, spent = _search(at, rows, here, u, sigma, step)
        at.steps_left = select(rows, at.steps_left - spent - 2, at.steps_left)
        idle = select(fell > 0, 0.0, select(length > 0, idle, idle + REFUSED))
        blunter = maximum(BLUNTER * damping, BLUNT * scale)
        damping = select(length >= 1, maximum(SHARPER * damping, RIDGE * scale), blunter)


def _model(at: Iterate, x: Tensor) -> Model | None:
    """f's at x with its Hessian written down, None where that is too large."""
    model = at.problem.objective.model(x) if x.numel() * x.shape[-1] <= LARGEST else None
    return None if model is None else model.dense()


def _scale(at: Iterate, model: Model) -> Scalar:
    """The mean curvature of f, or where there is too little, that with which a step ends near S."""
    mean = number(model.diagonal().mean(-1).expand(at.x.shape[:-1]).to(at.x.dtype))
    d = at.x - at.problem.constraint.vertex(at.gradient)
    steep = ratio(root(inner(at.gradient, at.gradient)), root(inner(d, d)), 1.0)
    return maximum(maximum(mean, steep), torch.finfo(at.x.dtype).tiny)


def _times(v: Tensor, factor: Scalar) -> Tensor:
    """The factor times v."""
    return axpy(torch.zeros_like(v), factor, v)


def _search(
    at: Iterate, rows: Mask, here: _Point, u: Tensor, sigma: Scalar, step: Tensor
) -> tuple[Scalar, Scalar, Scalar]:
    """Go along a step as far as φ falls.

    Returned are the part of the way, by how much φ has fallen, if that is not next to nothing, and
    the gradients that it took.
    """
    objective, constraint = at.problem.objective, at.problem.constraint

    def penalised(point: _Point) -> tuple[Scalar, Tensor]:
        """φ and its gradient."""
        y = point.x + u
        away = y - constraint.project(y, near=at.x)
        return point.value + 0.5 * sigma * inner(away, away), axpy(point.gradient, sigma, away)

    start, gradient = penalised(here)
    promised = inner(gradient, step)
    origin, rounding_of_f = here.x, 8 * torch.finfo(step.dtype).eps * (absolute(here.value) + start)
    length, reached = fill(1.0, start), fill(0.0, start)
    high = 2 * length
    waiting, spent, fell = rows, reached, reached
    for _ in range(LENGTHS):
        x = axpy(origin, length, step)
        tensor, gradient = objective.value_and_gradient(x)
        there = _Point(x, number(tensor), gradient)
        value, gradient = penalised(there)
        slope = inner(gradient, step)
        lower = value <= start + ARMIJO * length * promised
        # slopes see changes that are lost in the rounding of φ
        flat = (absolute(slope) <= -NEARLY * promised) & (value <= start + rounding_of_f)
        taken = waiting & (lower | flat)
        here.move(taken, there)
        reached = select(taken, length, reached)
        fell = select(taken & (start - value > LITTLE * absolute(start)), start - value, fell)
        spent = select(waiting, spent + 1, spent)
        # as steep as at the start: where φ hardly bends, the minimiser is far beyond
        further = taken & (length < 1) & (slope < STEEP * promised)
        high = select(lower | flat, high, length)
        waiting = select_mask(taken, further, waiting)
        if not any_row(waiting):
            break
        # between the longest that is good and the shortest that is not, by their exponents
        middle = root(reached * high)
        length = select(reached > 0, middle, 0.25 * length)
    return reached, fell, spent


def _step(
    model: Model, system: FaceSystem, slope: Tensor, sigma: Scalar, damping: Scalar
) -> Tensor:
    """−(∇²f + σ(1 − J) + ρ)⁻¹∇φ, J the derivative of the projection, in double precision."""
    n = slope.shape[-1]
    stiff, more = (
        torch.as_tensor(v, dtype=torch.double, device=slope.device).reshape(-1, 1, 1)
        for v in (sigma, damping)
    )
    eye = torch.eye(n, dtype=torch.double, device=slope.device)
    matrix = model.matrix + more * eye + stiff * (eye - _derivative(system))
    unit = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).rsqrt().unsqueeze(-1)
    factor, info = torch.linalg.cholesky_ex(unit * (0.5 * (matrix + matrix.mT)) * unit.mT)
    right = -slope.double().reshape(-1, n, 1)
    step = unit * torch.cholesky_solve(unit * right, factor)
    sound = (info == 0)[:, None, None] & torch.isfinite(step)
    step = torch.where(sound, step, unit * unit * right)
    return step.to(slope.dtype).reshape(slope.shape)


def _derivative(system: FaceSystem) -> Tensor:  # (B, n, n)
    """J, the derivative of the projection whose result is on this face: (1 + C)⁻¹ along it."""
    face, x = system.face, system.x
    n = x.shape[-1]
    bend = face.curvature_diagonal() if face.bends else torch.zeros_like(x)
    if isinstance(system.tangent, Tangent) and bend is not None:
        free, normal = (v.double().reshape(-1, n) for v in system.tangent)
        give = free / (1 + bend.double().reshape(-1, n).clamp(0, HUGE))
        width = (give * normal.square()).sum(-1, keepdim=True)
        across = give * normal / torch.where(width > 0, width, 1).sqrt()
        return torch.diag_embed(give) - across.unsqueeze(-1) * across.unsqueeze(-2)
    tangent = dense(lambda v: system.tangent(v), x)
    if not face.bends:
        return tangent
    eye = torch.eye(n).to(tangent)
    matrix = eye + tangent.mT @ bend_of(face, x) @ tangent
    factor, info = torch.linalg.cholesky_ex(0.5 * (matrix + matrix.mT))
    inverse = torch.cholesky_inverse(torch.where((info == 0)[:, None, None], factor, eye))
    return tangent.mT @ inverse @ tangent
