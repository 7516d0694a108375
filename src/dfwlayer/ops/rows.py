"""Small batched vector helpers shared by objectives, sets and methods; vectors are (..., n)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Mask",
    "Scalar",
    "absolute",
    "all_seen",
    "any_row",
    "as_rows",
    "axpy",
    "by_count",
    "by_recording",
    "capturing",
    "column",
    "common_shape",
    "descend",
    "dot",
    "fill",
    "in_one_batch",
    "in_units",
    "inner",
    "interval",
    "keep",
    "maximum",
    "minimum",
    "norm",
    "number",
    "number_mask",
    "on_host",
    "or_one",
    "passes",
    "quotient",
    "ratio",
    "root",
    "scaled_norm",
    "seen",
    "select",
    "select_mask",
    "spread",
    "where_rows",
]

# A number for each problem, for vectors (..., n) of shape (..., 1). For a single problem on the
# CPU, with vectors (n,), it is a plain float: there a tensor operation costs more than the
# arithmetic, and an inner loop has many of them.
Scalar = Tensor | float
Mask = Tensor | bool
_T = TypeVar("_T")


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
    scale = or_one(largest).unsqueeze(-1)
    # the largest entry adds one; where there is none, the root of zero would have no slope
    return largest * ((size / scale) ** p).sum(-1).clamp_min(1) ** (1 / p)


def where_rows(mask: Tensor, a: Tensor, b: Tensor | float) -> Tensor:  # (...), (..., n) -> (..., n)
    """Rows of a where the mask holds, rows of b elsewhere."""
    return torch.where(mask.unsqueeze(-1), a, b)


def in_units(v: Tensor) -> tuple[Tensor, Tensor]:  # (..., n) -> (..., n), (...)
    """v / max|v|, whose squares neither overflow nor vanish, and max|v| as a constant, 1 for 0."""
    size = or_one(v.detach().abs().amax(-1))
    return v / size.unsqueeze(-1), size


def or_one(a: Tensor) -> Tensor:
    """a where it is positive, 1 elsewhere: a divisor of what is zero there, or left out."""
    return torch.where(a > 0, a, 1)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b where b > 0, 0 elsewhere; autograd does not meet a division by zero."""
    return torch.where(b > 0, a / or_one(b), 0)


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of tensors of these shapes after broadcasting.

    torch.broadcast_shapes loads seconds of symbolic mathematics the first time it is called.
    """
    return np.broadcast_shapes(*shapes)


def in_one_batch(tensor: Tensor, rank: int, lead: tuple[int, ...]) -> Tensor:
    """A tensor (*own, *event) as (B, *event), with the B problems of the dimensions ``lead``.

    ``rank`` is the number of dimensions of the event. What is shared by all problems stays so.
    """
    own, event = tensor.shape[: tensor.dim() - rank], tensor.shape[tensor.dim() - rank :]
    if all(size == 1 for size in own):
        return tensor.reshape(1, *event) if own else tensor
    return tensor.expand(*lead, *event).reshape(math.prod(lead), *event)


def inner(a: Tensor, b: Tensor) -> Scalar:  # (..., n), (..., n) -> number per row
    """⟨a, b⟩ as a number for each problem."""
    if a.dim() == 1 and a.device.type == "cpu":
        product: float = torch.dot(a, b).item()
        return product
    products: Tensor = torch.linalg.vecdot(a, b)
    return products.unsqueeze(-1)


def number(values: Tensor) -> Scalar:  # (...) -> number per row
    """A tensor with one entry for each problem as a number for each problem."""
    if values.dim() == 0 and values.device.type == "cpu":
        value: float = values.item()
        return value
    return values.unsqueeze(-1)


def number_mask(values: Tensor) -> Mask:  # (...) -> mask per row
    """The same of a mask."""
    return number(values)  # type: ignore[return-value]


def by_count(like: Tensor, single: Callable[[], _T], batch: Callable[[], _T]) -> _T:
    """``single()`` for one problem on the CPU, ``batch()`` for several, and on a GPU.

    For calculations that are written down twice: on short vectors NumPy and plain numbers take a
    fraction of the time of tensors.
    """
    return single() if like.dim() == 1 and like.device.type == "cpu" else batch()


def on_host(like: Tensor, find: Callable[[], _T]) -> _T | None:
    """``find()`` where it need not wait for a GPU, None on one."""
    return find() if like.device.type == "cpu" else None


def by_recording(like: Tensor, recorded: _T, otherwise: _T) -> _T:
    """The one while operations on that device are recorded into a CUDA graph, or the other."""
    return recorded if capturing(like) else otherwise


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


def keep(mask: Mask, new: Tensor, old: Tensor) -> Tensor:
    """Rows of new where the mask holds, of old elsewhere."""
    if isinstance(mask, Tensor):
        return torch.where(mask, new, old)
    return new if mask else old


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
    return capturing(mask) or bool(mask.any())


def seen(mask: Mask) -> bool:
    """Whether the mask is seen to hold for some problem; makes a GPU wait.

    While a CUDA graph is recorded nothing is seen, and what is rare is left out.
    """
    if not isinstance(mask, Tensor):
        return mask
    return not capturing(mask) and bool(mask.any())


def all_seen(mask: Tensor) -> bool:
    """Whether the mask is known to hold for all problems; a GPU is not waited for to find out."""
    return mask.device.type == "cpu" and bool(mask.all())


def interval(like: Tensor, there: int) -> int:
    """Steps between two looks at the data: so many on a GPU, which would have to wait."""
    return 1 if like.device.type == "cpu" else there


def passes(like: Tensor, most: int, recorded: int) -> int:
    """Times to repeat something until it is seen to be enough: ``recorded`` where nobody sees."""
    return recorded if capturing(like) else most


def capturing(like: Tensor) -> bool:
    """Whether operations on that device are recorded into a CUDA graph."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def as_rows(each: Scalar | Mask, dtype: torch.dtype) -> Tensor:  # number per row -> (...)
    """A number for each problem as a tensor."""
    if isinstance(each, Tensor):
        return each.squeeze(-1).to(dtype)
    return torch.tensor(each, dtype=dtype)


def column(each: Scalar | Mask, like: Tensor) -> Tensor:  # number per row -> (..., 1)
    """A number for each problem as a tensor that goes with vectors."""
    return each if isinstance(each, Tensor) else like.new_tensor([each])


def spread(each: Scalar, like: Tensor) -> Tensor:  # number per row, (..., 1) -> (..., 1)
    """A number for each problem as a tensor of that shape, with an entry for each."""
    return each.expand_as(like) if isinstance(each, Tensor) else torch.full_like(like, each)


def minimum(a: Scalar, b: Scalar) -> Scalar:
    """The smaller one."""
    return -maximum(-a, -b)
