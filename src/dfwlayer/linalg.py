"""Small batched vector helpers shared by objectives, sets and methods; vectors are (..., n)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer import kernels

__all__ = [
    "Mask",
    "Normals",
    "Orthogonal",
    "Scalar",
    "Tangent",
    "absolute",
    "any_row",
    "as_rows",
    "axpy",
    "column",
    "common_shape",
    "conjugate_gradient",
    "descend",
    "dot",
    "fill",
    "inner",
    "maximum",
    "minimum",
    "norm",
    "number",
    "ratio",
    "recording",
    "root",
    "scaled_norm",
    "select",
    "select_mask",
    "where_rows",
]

# A number for each problem, for vectors (..., n) of shape (..., 1). For a single problem on the
# CPU, with vectors (n,), it is a plain float: there a tensor operation costs more than the
# arithmetic, and an inner loop has many of them.
Scalar = Tensor | float
Mask = Tensor | bool


def dot(a: Tensor, b: Tensor) -> Tensor:  # (..., n), (..., n) -> (...)
    """⟨a, b⟩ of each pair of rows."""
    return (a * b).sum(-1)


def norm(a: Tensor) -> Tensor:  # (..., n) -> (...)
    """Euclidean norm of each row, free of overflow and underflow."""
    return scaled_norm(a, 2.0)


def scaled_norm(a: Tensor, p: float) -> Tensor:  # (..., n) -> (...)
    """‖a‖_p of each row, free of overflow and underflow: m · ‖a/m‖_p with m = max |a|.

    For autograd the gradient at zero, where the norm has a kink, is zero.
    """
    size = a.abs()
    largest = size.amax(-1)
    if p == torch.inf:
        return largest
    if p == 1:
        return size.sum(-1)
    scale = torch.where(largest > 0, largest, 1).unsqueeze(-1)
    # the largest entry adds one; where there is none, the root of zero would have no slope
    return largest * ((size / scale) ** p).sum(-1).clamp_min(1) ** (1 / p)


def where_rows(mask: Tensor, a: Tensor, b: Tensor | float) -> Tensor:  # (...), (..., n) -> (..., n)
    """Rows of a where the mask holds, rows of b elsewhere."""
    return torch.where(mask.unsqueeze(-1), a, b)


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of tensors of these shapes after broadcasting.

    torch.broadcast_shapes loads seconds of symbolic mathematics the first time it is called.
    """
    return np.broadcast_shapes(*shapes)


def inner(a: Tensor, b: Tensor) -> Scalar:  # (..., n), (..., n) -> number per row
    """⟨a, b⟩ as a number for each problem."""
    if a.dim() == 1 and a.device.type == "cpu":
        product: float = torch.dot(a, b).item()
        return product
    products: Tensor = torch.linalg.vecdot(a, b)
    return products.unsqueeze(-1)


def number(rows: Tensor) -> Scalar:  # (...) -> number per row
    """A tensor with one entry for each problem as a number for each problem."""
    if rows.dim() == 0 and rows.device.type == "cpu":
        value: float = rows.item()
        return value
    return rows.unsqueeze(-1)


def fill(value: float, like: Scalar) -> Scalar:
    """The same number for each problem."""
    return torch.full_like(like, value) if isinstance(like, Tensor) else value


def descend(x: Tensor, gradient: Tensor, curvature: Scalar) -> Tensor:
    """x − gradient / curvature, or x where there is none."""
    if isinstance(curvature, Tensor):
        return torch.addcdiv(x, gradient, curvature, value=-1)
    return axpy(x, -1 / curvature, gradient) if curvature > 0 else x


def axpy(x: Tensor, factor: Scalar, d: Tensor) -> Tensor:
    """x + factor · d."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x, factor, d)
    try:
        return torch.add(x, d, alpha=factor)
    except RuntimeError:  # beyond the range of the dtype
        return x + d * factor


def ratio(a: Scalar, b: Scalar, otherwise: Scalar) -> Scalar:
    """a / b where b > 0."""
    if isinstance(b, Tensor):
        return torch.where(b > 0, a / b, otherwise)
    return a / b if b > 0 else otherwise


def absolute(a: Scalar) -> Scalar:
    """|a|."""
    return a.abs() if isinstance(a, Tensor) else abs(a)


def root(square: Scalar) -> Scalar:
    """The square root; of rounding below zero, zero."""
    if isinstance(square, Tensor):
        return square.clamp_min(0).sqrt()
    return math.sqrt(square) if square > 0 else 0.0


def select(mask: Mask, a: Scalar, b: Scalar) -> Scalar:
    """a where the mask holds, b elsewhere."""
    if isinstance(mask, Tensor):
        return torch.where(mask, a, b)
    return a if mask else b


def select_mask(mask: Mask, a: Mask, b: Mask) -> Mask:
    """The same of masks."""
    return select(mask, a, b)  # type: ignore[return-value]


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """The larger one."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp_min(b)
    return b.clamp_min(a) if isinstance(b, Tensor) else max(a, b)


def any_row(mask: Mask) -> bool:
    """Whether the mask holds for some problem; makes a GPU wait.

    While a CUDA graph is recorded nobody can tell, and what may be needed is done.
    """
    if not isinstance(mask, Tensor):
        return mask
    return recording(mask) or bool(mask.any())


def recording(like: Tensor) -> bool:
    """Whether operations on that device are recorded into a CUDA graph."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def as_rows(each: Scalar | Mask, dtype: torch.dtype) -> Tensor:  # number per row -> (...)
    """A number for each problem as a tensor."""
    if isinstance(each, Tensor):
        return each.squeeze(-1).to(dtype)
    return torch.tensor(each, dtype=dtype)


def column(each: Scalar, like: Tensor) -> Tensor:  # number per row -> (..., 1)
    """A number for each problem as a tensor that goes with vectors."""
    return each if isinstance(each, Tensor) else like.new_tensor([each])


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """The smaller one."""
    return -maximum(-a, -b)


class Tangent(NamedTuple):
    """The subspace {v : v = 0 off the free set, ⟨unit, v⟩ = 0}; called, the projection onto it."""

    free: Tensor  # (..., n), 1 or 0
    unit: Tensor  # (..., n), of length one on the free set, or zero

    def __call__(self, v: Tensor) -> Tensor:
        v = v * self.free
        return axpy(v, -inner(self.unit, v), self.unit)


class Normals(NamedTuple):
    """Several vectors a_1 … a_m per problem, not necessarily independent, and their span."""

    rows: Tensor  # (..., m, n)
    inverse: Tensor  # (..., m, m), pseudo-inverse of the inner products ⟨a_i, a_j⟩

    @classmethod
    def of(cls, vectors: Sequence[Tensor]) -> Normals:
        """In double precision, for what is dependent should be seen to be."""
        rows = torch.stack(tuple(vectors), -2)
        size = rows.abs().amax(-1, keepdim=True).double()
        scale = torch.where(size > 0, 1 / torch.where(size > 0, size, 1), 1)
        scaled = rows.double() * scale
        inverse = torch.linalg.pinv(scaled @ scaled.mT, rtol=1e-12, hermitian=True)
        return cls(rows, (scale * inverse * scale.mT).to(rows.dtype))

    def coefficients(self, v: Tensor) -> Tensor:  # (..., n) -> (..., m)
        """c with the least ‖v − Σ c_j a_j‖, and among those of the least norm."""
        along = self.rows @ v.unsqueeze(-1)
        return (self.inverse @ along).squeeze(-1)

    def combine(self, c: Tensor) -> Tensor:  # (..., m) -> (..., n)
        """Σ c_j a_j."""
        return (c.unsqueeze(-2) @ self.rows).squeeze(-2)


@dataclass(frozen=True)
class Orthogonal:
    """The subspace {v : v = restrict(v), ⟨a_j, v⟩ = 0}; called, the projection onto it."""

    restrict: Callable[[Tensor], Tensor]
    normals: Normals | None

    def __call__(self, v: Tensor) -> Tensor:
        v = self.restrict(v)
        if self.normals is None:
            return v
        for _ in range(2):  # once more for what rounding left
            v = v - self.normals.combine(self.normals.coefficients(v))
        return v


class Krylov(NamedTuple):
    """What conjugate gradients found."""

    u: Tensor  # (..., n)
    flat: Mask  # a descent direction without curvature was met: the model has no minimum
    steps: Scalar  # products each row took
    steepest: Scalar  # largest and
    flattest: Scalar  # least Rayleigh quotient met, in the preconditioner's norm
    unfinished: Mask  # the steps were not enough


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor],
    rhs: Tensor,  # (..., n)
    *,
    tol: float,
    max_steps: int,
    cap: Scalar | None = None,
    subspace: Tangent | Orthogonal | None = None,
    precondition: Callable[[Tensor], Tensor] | None = None,
    stop: Callable[[Tensor], Mask] | None = None,
    ask: int = 8,
    floor: Scalar = 0.0,
) -> Krylov:
    """Solve the positive semi-definite systems matvec(u) = rhs to ‖residual‖ ≤ tol · ‖rhs‖.

    A residual below ``floor`` is rounding and will do as well. The system may be restricted to a
    subspace, which ``precondition`` maps to itself; the norm is the preconditioner's. Each row
    stops on its own, also where it meets a direction without curvature, so that a singular
    system gives the finite solution found in its range, and where ``stop``, asked after ``ask``
    steps and ever more rarely then, tells from u that it has gone far enough. ``cap`` is a
    limit for each row beside ``max_steps``.
    """
    eps = torch.finfo(rhs.dtype).eps
    residual = rhs if subspace is None else subspace(rhs)
    direction = residual if precondition is None else precondition(residual)
    rho = inner(residual, direction)
    target = maximum(tol * tol * rho, floor * floor)
    going: Mask = rho > 0
    flat: Mask = rho < 0
    u = torch.zeros_like(rhs)
    length = rho  # ⟨direction, direction⟩ in the preconditioner's norm
    steepest = steps = fill(0.0, rho)  # the steepest is the scale of "flat"
    flattest = fill(torch.inf, rho)
    if isinstance(subspace, Tangent) and precondition is None and kernels.take(rhs):
        return _fused(matvec, residual, subspace, target, max_steps, cap, stop, ask)
    every = 1 if rhs.device.type == "cpu" else 8
    for step in range(max_steps):
        going = going & (rho > target)
        if cap is not None:
            going = going & (cap > step)
        if stop is not None and step == ask:
            ask *= 2
            going = select_mask(stop(u), False, going)
        if step % every == 0 and not any_row(going):
            break
        product = matvec(direction)
        curvature = inner(direction, product)
        quotient = ratio(curvature, length, 0.0)
        steepest = maximum(steepest, absolute(quotient))
        least = eps * steepest * length
        flattest = select(going, minimum(flattest, quotient), flattest)
        steps = steps + going
        flat = flat | (going & (curvature <= least))
        going = going & (curvature > least)
        alpha = select(going, ratio(rho, curvature, 0.0), 0.0)
        u = axpy(u, alpha, direction)
        residual = axpy(residual, -alpha, product)
        if subspace is not None:  # what is left beside it would swamp a small residual
            residual = subspace(residual)
        conditioned = residual if precondition is None else precondition(residual)
        following = inner(residual, conditioned)
        beta = ratio(following, rho, 0.0)
        direction = axpy(conditioned, beta, direction)
        length = following + beta * beta * length
        rho = following
    return Krylov(u, flat, steps, steepest, flattest, going & (rho > target))


def _fused(
    matvec: Callable[[Tensor], Tensor],
    residual: Tensor,
    subspace: Tangent,
    target: Scalar,
    max_steps: int,
    cap: Scalar | None,
    stop: Callable[[Tensor], Mask] | None,
    ask: int,
) -> Krylov:
    """The same on a GPU, where one launch does all that follows a product."""

    def each(value: Scalar) -> Tensor:  # in memory of its own, as it changes in place
        if isinstance(value, Tensor):
            return value.expand_as(rho).clone()
        return torch.full_like(rho, value)

    rho = torch.linalg.vecdot(residual, residual).unsqueeze(-1)
    # row after row, whatever the strides of the gradient they come from
    residual = residual.clone(memory_format=torch.contiguous_format)
    direction, u = residual.clone(), torch.zeros_like(residual)
    free, unit = subspace.free.contiguous(), subspace.unit.contiguous()
    length, enough, limit = (
        rho.clone(),
        each(target),
        each(float(max_steps) if cap is None else cap),
    )
    going, flat = rho > 0, rho < 0
    steepest, steps, flattest = each(0.0), each(0.0), each(torch.inf)
    for step in range(max_steps):
        if stop is not None and step == ask:
            ask *= 2
            going.logical_and_(torch.as_tensor(stop(u)).logical_not())
        if step % 8 == 0 and not recording(rho) and not any_row(going & (rho > enough)):
            break
        product = matvec(direction).contiguous()
        vectors = (product, direction, residual, u, free, unit)
        numbers = (rho, enough, length, going, steepest, flattest, flat, steps, limit)
        kernels.cg_update(*vectors, *numbers, step=step)
    return Krylov(u, flat, steps, steepest, flattest, going & (rho > enough))
