"""Tensors as the arrays that compiled code reads, and its results as gradients in the tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from dfwlayer.engines.compiled.answer import Gradients, spoiled
from dfwlayer.engines.compiled.background import NotCompiledError, busy
from dfwlayer.ops.values import Value, narrowed

__all__ = [
    "EPS",
    "Array",
    "Batch",
    "Laid",
    "array_of",
    "gram",
    "outer",
    "signs",
    "stretched",
    "summed",
    "times",
]

Array = np.ndarray[Any, np.dtype[Any]]
DOUBLE = np.dtype(np.float64)
FEW = 32  # numbers up to which Python adds at least as fast as NumPy is called
# Products of numbers from which one of matrices is left to PyTorch. NumPy's own BLAS would spread
# it over all cores, whatever PyTorch was told to use, and wait for each of them: where others are
# at work there that takes milliseconds. Below this it keeps to one thread, and is called sooner.
LARGE = 20_000
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


class Laid(ABC):
    """A batch of problems in arrays, whose results are arrays."""

    n: int
    batch: int | None
    dtype: torch.dtype

    @property
    def eps(self) -> float:
        """Of the dtype."""
        return EPS[self.dtype]

    def local(self, y: Array) -> Tensor:
        """What was found (B, n), seen from the centres."""
        found = torch.from_numpy(y[0] if self.batch is None else y)
        return found if self.dtype == torch.float64 else found.to(self.dtype)

    def point(self, y: Array) -> Tensor:
        """The same as it is returned."""
        return self.local(y)

    def fresh(self, found: Any) -> Tensor:
        """In memory of its own, as the gradient needs what was found."""
        # in another dtype it is a copy already
        return self.point(found.x.copy() if self.dtype == torch.float64 else found.x)

    def seen(self, found: Any) -> Tensor:
        """From the centres."""
        return self.local(found.x)

    def gradients(self, asked: Sequence[bool], found: Any, v: Tensor) -> Gradients:
        """Those of `pullback`; NaN comes from elsewhere and goes on as everywhere in torch."""
        if busy():
            raise NotCompiledError
        arriving = array_of(v, 1)
        if _sums_up(arriving):  # nearly always; beyond the range of a sum the next line tells
            return self.pullback(asked, found, arriving)
        lost: Array = np.logical_not(np.isfinite(arriving).all(-1))
        gradients = self.pullback(asked, found, np.where(lost[:, None], 0.0, arriving))
        return spoiled(gradients, torch.from_numpy(lost))

    def gradients_of_value(self, asked: Sequence[bool], found: Any, w: Tensor) -> Gradients | None:
        """Those of `envelope`; NaN goes on likewise."""
        arriving = np.ascontiguousarray(w.numpy(), np.float64).reshape(-1, 1)
        lost: Array = np.logical_not(np.isfinite(arriving))
        if not lost.any():
            return self.envelope(asked, found, arriving)
        gradients = self.envelope(asked, found, np.where(lost, 0.0, arriving))
        return None if gradients is None else spoiled(gradients, torch.from_numpy(lost[:, 0]))

    def envelope(self, asked: Sequence[bool], found: Any, w: Array) -> Gradients | None:
        """Gradients in the tensors from one in each value (B, 1), None where others know them."""
        return None

    @abstractmethod
    def pullback(self, asked: Sequence[bool], found: Any, v: Array) -> Gradients:
        """Gradients in the tensors from one in x (B, n)."""


class Batch:
    """The batch size that tensors have in common, as `dfwlayer.arguments.common_batch` tells it.

    They are on one device, the CPU unless another is named.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | None = None, size: int | None = None
    ) -> None:
        self.dtype, self.device, self.size = dtype, device, size

    def plain(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that arrays can be made of, but for its layout."""
        return (
            type(tensor) in (Tensor, Parameter)
            and tensor.dtype == self.dtype
            and (tensor.is_cpu if self.device is None else tensor.device == self.device)
            and not tensor.is_neg()
        )

    def fits(self, tensor: Value | None, rank: int) -> bool:
        """Whether a tensor is plain and goes with those before it; numbers always do."""
        if not isinstance(tensor, Tensor):
            return True
        if not self.plain(tensor) or tensor.layout != torch.strided:
            return False
        lead = tensor.dim() - rank
        if lead < 1:
            return lead == 0 or rank == 1
        size = tensor.shape[0]
        if lead > 1 or size == 0:
            return False
        if self.size is None or self.size == 1:
            self.size = size
        return size in (1, self.size)


def array_of(value: Value, rank: int) -> Array:
    """In float64, with one dimension more than one problem's."""
    if not isinstance(value, Tensor):
        return np.full((1,) * (rank + 1), float(value))
    found: Array = (value.detach() if value.requires_grad else value).numpy()
    if found.ndim <= rank:
        found = found[None] if found.ndim == rank else found.reshape(1, 1)
    if found.dtype is DOUBLE and found.flags.c_contiguous:  # sooner told than copied to none
        return found
    return np.ascontiguousarray(found, np.float64)


def _sums_up(values: Array) -> bool:
    """Whether the sum of all entries is a number, and so each of them."""
    if values.size <= FEW:
        return math.isfinite(sum(values.ravel().tolist()))
    with np.errstate(all="ignore"):
        return math.isfinite(np.add.reduce(values, axis=None))


def times(A: Array, x: Array) -> Array:  # (·, m, n), (·, n) -> (·, m)
    """A x for each problem, either of them shared or not."""
    if len(A) == 1 < len(x) and A.size * len(x) > LARGE:
        return _torch_product(x, A[0].T)
    found: Array = np.matmul(A, x[..., None])[..., 0]
    return found


def gram(A: Array) -> Array:  # (·, m, n) -> (·, n, n)
    """AᵀA."""
    if len(A) == 1 and A.size * A.shape[2] > LARGE:
        return _torch_product(A[0].T, A[0])[None]
    found: Array = np.matmul(np.swapaxes(A, -2, -1), A)
    return found


def _torch_product(a: Array, b: Array) -> Array:
    """A product of two matrices, by the threads that PyTorch may use."""
    found: Array = torch.mm(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    return found


def stretched(values: Array, *shape: int) -> Array:
    """The same numbers in that shape, in memory of their own.

    What broadcasting gives may not be written to, where it is that shape already, which is another
    type to Numba: everything would be compiled once more for it.
    """
    out = np.empty(shape)
    out[...] = values
    return out


def signs(weight: Value) -> Array:
    """Of weights, of which only the size counts; none of NaN."""
    values = array_of(weight, 1)
    return (values > 0) * 1.0 - (values < 0)


def outer(like: Tensor, a: Array, b: Array, c: Array, d: Array) -> Tensor:
    """Σ abᵀ + cdᵀ over the problems that share a matrix."""
    if like.dim() == 2 or len(like) == 1:
        left, right = np.concatenate((a, c)), np.concatenate((b, d))
        large = left.size * right.shape[1] > LARGE
        total = _torch_product(left.T, right) if large else left.T @ right
    else:
        # a product of matrices writes each entry once
        total = np.matmul(np.stack((a, c), -1), np.stack((b, d), -2))
    return narrowed(torch.from_numpy(total), like.dtype).reshape(like.shape)


def summed(like: Value, each: Array) -> Tensor:  # each (B, ·)
    """One gradient for each problem, summed over what shares the tensor."""
    assert isinstance(like, Tensor)
    if like.dim() < 2:
        each = each.sum(0) if len(each) > 1 else each[0]
    gradient = torch.from_numpy(each if each.flags.c_contiguous else each.copy())
    if gradient.shape != like.shape:
        gradient = gradient.sum_to_size(like.shape)
    return gradient if like.dtype is torch.float64 else narrowed(gradient, like.dtype)
