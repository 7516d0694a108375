"""Damped Newton steps on the face of the iterate, for sets of any kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.linalg.subspaces import Tangent
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

__all__ = ["damped_newton", "newton_step"]

ITERATIONS = 100
FEWER = 25  # where alternating directions follow, which are better at finding a face
TINY, HUGE = 1e-300, 1e300
SHARPER, BLUNTER = 0.1, 8.0  # what the damping is multiplied with after a step, and after a refusal


def damped_newton(at: Iterate, rows: Mask) -> None:
    """Minimise ⟨g, u⟩ + ½⟨u, (∇²f + C + ρ)u⟩ on the face of x and go to the projection of x + u.

    ρ falls where f does and rises where it does not, so that each problem ends with Newton steps
    (Levenberg's and Marquardt's method). The face is that of x, so that a step can take up
    constraints, and let go of one whose multiplier has the wrong sign.
    """
    objective, constraint = at.problem.objective, at.problem.constraint
    n = at.x.shape[-1]
    model = objective.model(at.x) if at.x.numel() * n <= LARGEST else None
    if model is None:
        return
    model = model.dense()
    eps = torch.finfo(at.x.dtype).eps
    scale = number(model.diagonal().mean(-1).expand(at.x.shape[:-1]).to(at.x.dtype))
    # without curvature a step should still end near the set: ρ‖x − vertex‖ ~ ‖g‖
    d = at.x - constraint.vertex(at.gradient)
    length = root(inner(d, d))
    steep = ratio(root(inner(at.gradient, at.gradient)), length, 1.0)
    damping = 1e-3 * maximum(scale, maximum(steep, torch.finfo(at.x.dtype).tiny))
    idle = fill(0.0, at.value)
    for k in range(FEWER if objective.quadratic else ITERATIONS):
        rows = rows & (at.left > 1) & (idle < 12)
        if not any_row(rows):
            return
        if k and not objective.quadratic:
            found = objective.model(at.x)
            if found is None:
                return
            model = found.dense()
        face = constraint.face(at.x, at.gradient)
        u = _step(model, FaceSystem(objective, face, at.x), at, damping)
        x, value, gradient = _landed(at, at.x + u)
        promised = -inner(at.gradient, u)
        lower = value < at.value - 1e-4 * maximum(promised, 0.0)
        small = promised <= 16 * eps * absolute(at.value)
        damping = damping * select(lower, SHARPER, BLUNTER)
        taken = rows & (lower | (small & (value <= at.value)))
        before = at.value
        if any_row(refused := select_mask(lower, False, rows)):
            # a projection may raise f by far more than u lowers it; up to the boundary f falls
            straight = _within(constraint, at.x, u)
            tensor, slope = objective.value_and_gradient(straight)
            at.move(refused & (number(tensor) < at.value), straight, number(tensor), slope)
        at.move(taken, x, value, gradient)
        at.left = select(rows, at.left - 2, at.left)
        fell = before - at.value > 8 * eps * absolute(before)
        idle = select(rows, select(fell, 0.0, idle + 1), idle)


def newton_step(at: Iterate, system: FaceSystem) -> Tensor | None:
    """The minimiser of the model on the face, None where ∇²f is too large to be written down."""
    n = at.x.shape[-1]
    model = at.problem.objective.model(at.x) if at.x.numel() * n <= LARGEST else None
    return None if model is None else _step(model.dense(), system, at, 0.0)


def _landed(at: Iterate, x: Tensor) -> tuple[Tensor, Scalar, Tensor]:
    """The point of the set nearest to x, or x scaled into it, whichever f is lower at."""
    objective, constraint = at.problem.objective, at.problem.constraint
    nearest, scaled = constraint.project(x, near=at.x), constraint.retract(x)
    tensor, gradient = objective.value_and_gradient(nearest)
    other, slope = objective.value_and_gradient(scaled)
    value = number(tensor)
    better = number(other) < value
    return (
        keep(better, scaled, nearest),
        select(better, number(other), value),
        keep(better, slope, gradient),
    )


def _within(constraint: Constraint, x: Tensor, u: Tensor) -> Tensor:
    """x + γu with the largest γ ≤ 1 that stays in the set, to a thousandth of it or so."""
    low = number(torch.zeros_like(x[..., 0]))
    high = fill(1.0, low)
    start = constraint.violation(x)
    for _ in range(12):
        middle = 0.5 * (low + high)
        outside = number(constraint.violation(axpy(x, middle, u)) > start) != 0
        low, high = select(outside, low, middle), select(outside, middle, high)
    return axpy(x, low, u)


def _step(model: Model, system: FaceSystem, at: Iterate, damping: Scalar) -> Tensor:
    """u on the tangent space, by a factorisation in double precision.

    Coordinates are in units of the root of their own curvature: near zero that of an ℓ_p ball for
    p < 2 is beyond all bounds. A multiple of a aᵀ for each normal a makes the matrix definite where
    ∇²f is so on the tangent space only.
    """
    x = at.x
    n, single = x.shape[-1], x.dim() == 1
    matrix = model.matrix + _bend(system.face, x)
    rho = torch.as_tensor(damping, dtype=torch.double, device=x.device).reshape(-1, 1, 1)
    matrix = matrix + rho * torch.eye(n, dtype=torch.double, device=x.device)
    right = system.tangent(-at.gradient).double().reshape(-1, n, 1)
    normal: Tensor | None = None  # (B, n, 1)
    if isinstance(system.tangent, Tangent):
        free, normal = (v.double().reshape(-1, n, 1) for v in system.tangent)
        matrix = free * matrix * free.mT + torch.diag_embed(1 - free.squeeze(-1))
    else:
        tangent = _dense(system.tangent, x)
        size = matrix.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(TINY)[:, None, None]
        matrix = tangent.mT @ matrix @ tangent + size * (torch.eye(n).to(tangent) - tangent)
    own = matrix.diagonal(dim1=-2, dim2=-1).clamp(TINY, HUGE).unsqueeze(-1)
    unit = own.rsqrt()
    matrix = unit * (0.5 * (matrix + matrix.mT)) * unit.mT
    if normal is not None:
        normal = unit * normal
        length = normal.square().sum(-2, keepdim=True).sqrt()
        normal = normal / torch.where(length > 0, length, 1)
        matrix = matrix + normal * normal.mT
    factor, info = torch.linalg.cholesky_ex(matrix)
    u = torch.cholesky_solve(unit * right, factor)
    if normal is not None:
        steep = torch.cholesky_solve(normal, factor)
        width = (normal * steep).sum(-2, keepdim=True)
        u = u - steep * ((normal * u).sum(-2, keepdim=True) / torch.where(width > 0, width, 1))
    u = torch.where((info == 0)[:, None, None] & torch.isfinite(u), u, unit * right)
    u = (unit * u).squeeze(-1).to(x.dtype)
    return u[0] if single else u


def _bend(face: Face, x: Tensor) -> Tensor:
    """C (B, n, n)."""
    if not face.bends:
        return x.new_zeros((), dtype=torch.double)
    diagonal = face.curvature_diagonal()
    if diagonal is not None:
        return torch.diag_embed(diagonal.double().reshape(-1, x.shape[-1]))
    return _dense(face.curvature, x)


def _dense(apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The matrix (B, n, n) of a linear map of vectors like x (..., n)."""
    n = x.shape[-1]
    columns = [apply(unit.expand_as(x)) for unit in torch.eye(n).to(x)]
    return torch.stack(columns, -1).double().reshape(-1, n, n)
