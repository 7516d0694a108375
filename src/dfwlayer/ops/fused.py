"""What a single kernel does in place of dozens of operations, where there is one.

Each function answers None, or False, for tensors that no kernel takes; whoever asks then goes by
the formulas the kernel stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dfwlayer.ops.kernels import faces, steps
from dfwlayer.ops.kernels.common import accepts, accepts_narrow
from dfwlayer.ops.rows import Mask, Scalar, any_row, column, spread
from dfwlayer.ops.scale import Scale

__all__ = ["conjugate_gradient", "face_l1", "observe", "own", "project_l1", "step_l1"]


def project_l1(z: Tensor, omega: Tensor, inverse: Tensor, length: Tensor) -> Tensor | None:
    """See `dfwlayer.ops.kernels.steps.project_l1`."""
    return steps.project_l1(z, omega, inverse, length) if accepts(z) else None


def step_l1(
    x: Tensor, gradient: Tensor, curvature: Scalar, omega: Tensor, inverse: Tensor, length: Tensor
) -> Tensor | None:
    """See `dfwlayer.ops.kernels.steps.step_l1`."""
    if not accepts(x):
        return None
    return steps.step_l1(x, gradient, column(curvature, x), omega, inverse, length)


def face_l1(
    weight: Tensor, radius: Tensor, x: Tensor, g: Tensor, scale: Scale | None
) -> faces.FaceL1 | None:
    """See `dfwlayer.ops.kernels.faces.face_l1`."""
    return faces.face_l1(weight, radius, x, g, scale) if accepts_narrow(x) else None


def own(like: Tensor, *numbers: Any) -> tuple[Any, ...]:
    """Numbers or masks as they are, or in memory of their own where a kernel will change them."""
    return tuple(column(each, like).clone() for each in numbers) if accepts(like) else numbers


def observe(
    x: Tensor,
    gradient: Tensor,
    trial: Tensor,
    slope: Tensor,
    alpha: Scalar,
    steepest: Scalar,
    flattest: Scalar,
    bent_down: Mask,
    rounding: Scalar,
    blur: float,
) -> bool:
    """Whether the numbers that `own` gave were brought up to date in place.

    See `dfwlayer.ops.kernels.steps.observe`.
    """
    if not accepts(x):
        return False
    numbers = (column(each, x) for each in (alpha, steepest, flattest, bent_down, rounding))
    steps.observe(x, gradient, trial, slope, *numbers, blur=blur)
    return True


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor],
    residual: Tensor,  # (..., n), in the subspace
    free: Tensor,  # (..., n), 1 for a coordinate that moves, 0 for another
    unit: Tensor,  # (..., n), the unit normal of the subspace, 0 if it has none
    target: Scalar,  # the ⟨residual, residual⟩ that will do
    max_steps: int,
    cap: Scalar | None,
    stop: Callable[[Tensor], Mask] | None,
    ask: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """The fields of `dfwlayer.linalg.krylov.Krylov`; one launch does all that follows a product."""
    if not accepts(residual):
        return None
    rho = torch.linalg.vecdot(residual, residual).unsqueeze(-1)
    # row after row, whatever the strides of the gradient they come from
    residual = residual.clone(memory_format=torch.contiguous_format)
    direction, u = residual.clone(), torch.zeros_like(residual)
    free, unit = free.contiguous(), unit.contiguous()
    most = float(max_steps) if cap is None else cap
    # in memory of their own, as they change in place
    length, enough, limit = rho.clone(), spread(target, rho).clone(), spread(most, rho).clone()
    going, flat = rho > 0, rho < 0
    steepest, steps_taken = torch.zeros_like(rho), torch.zeros_like(rho)
    flattest = torch.full_like(rho, torch.inf)
    for step in range(max_steps):
        if stop is not None and step == ask:
            ask *= 2
            going.logical_and_(torch.as_tensor(stop(u)).logical_not())
        if step % 8 == 0 and not any_row(going & (rho > enough)):
            break
        product = matvec(direction).contiguous()
        vectors = (product, direction, residual, u, free, unit)
        numbers = (rho, enough, length, going, steepest, flattest, flat, steps_taken, limit)
        steps.cg_update(*vectors, *numbers, step=step)
    return u, flat, steps_taken, steepest, flattest, going & (rho > enough)
