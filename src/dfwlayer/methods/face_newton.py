"""Newton steps on the face of the iterate, for sets of any kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.linalg.subspaces import Tangent
from dfwlayer.methods.phases import Iterate
from dfwlayer.objectives.model import LARGEST, Model
from dfwlayer.ops.scale import TINY

__all__ = ["bend_of", "dense", "newton_step"]

HUGE = 1e300  # stands for curvature beyond the range of a double


def newton_step(at: Iterate, system: FaceSystem) -> Tensor | None:
    """The minimiser of the model on the face, None where ∇²f is too large to be written down."""
    n = at.x.shape[-1]
    model = at.problem.objective.model(at.x) if at.x.numel() * n <= LARGEST else None
    return None if model is None else _step(model.dense(), system, at)


def _step(model: Model, system: FaceSystem, at: Iterate) -> Tensor:
    """u on the tangent space, by a factorisation in double precision.

    Coordinates are in units of the root of their own curvature: near zero that of an ℓ_p ball for
    p < 2 is beyond all bounds. A multiple of a aᵀ for each normal a makes the matrix definite where
    ∇²f is so on the tangent space only.
    """
    x = at.x
    n, single = x.shape[-1], x.dim() == 1
    matrix = model.matrix + bend_of(system.face, x)
    right = system.tangent(-at.gradient).double().reshape(-1, n, 1)
    normal: Tensor | None = None  # (B, n, 1)
    if isinstance(system.tangent, Tangent):
        free, normal = (v.double().reshape(-1, n, 1) for v in system.tangent)
        matrix = free * matrix * free.mT + torch.diag_embed(1 - free.squeeze(-1))
    else:
        tangent = dense(system.tangent, x)
        size = matrix.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(TINY)[..., None, None]
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
    u = torch.where((info == 0)[..., None, None] & torch.isfinite(u), u, unit * right)
    u = (unit * u).squeeze(-1).to(x.dtype)
    return u[0] if single else u


def bend_of(face: Face, x: Tensor) -> Tensor:
    """C (B, n, n)."""
    if not face.bends:
        return x.new_zeros((), dtype=torch.double)
    diagonal = face.curvature_diagonal()
    if diagonal is not None:
        return torch.diag_embed(diagonal.double().reshape(-1, x.shape[-1]))
    return dense(face.curvature, x)


def dense(apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The matrix (B, n, n) of a linear map of vectors like x (..., n)."""
    n = x.shape[-1]
    columns = [apply(unit.expand_as(x)) for unit in torch.eye(n).to(x)]
    return torch.stack(columns, -1).double().reshape(-1, n, n)
