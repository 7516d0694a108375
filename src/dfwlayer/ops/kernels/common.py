"""What the Triton kernels share: when they run, how they are launched and laid out, sums of rows.

A program of the grid works on one problem, or on a block of them where they are small. Vectors are
(n,) or (B, n), float32 or float64; numbers and masks for each problem are (1,) or (B, 1). Triton
comes with PyTorch where there is CUDA and is no dependency: without it, ``available()`` is False.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

__all__ = [
    "EPS",
    "LARGEST",
    "SMALLEST",
    "accepts",
    "accepts_narrow",
    "available",
    "cells",
    "each",
    "entries",
    "fits",
    "is_wide",
    "jit",
    "larger",
    "launch",
    "layout_of",
    "least_eta",
    "pull_most",
    "quotient_of",
    "row_sum",
    "row_sums",
    "settled_eta",
    "smaller",
    "weight_cells",
]

LARGEST, SMALLEST = 1e60, 1e-60  # squares and their sums stay within the range of a double
WIDEST = 16384  # entries of a problem that one program holds in registers
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


@cache
def available() -> bool:
    """Whether the kernels can run on this machine's current CUDA device."""
    if triton is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (7, 0)


def fits(n: int) -> bool:
    """Whether the kernels take problems of so many variables."""
    return 0 < n <= WIDEST


def accepts(like: Tensor) -> bool:
    """Whether the kernels take vectors like these."""
    return like.is_cuda and fits(like.shape[-1]) and like.dtype in EPS and available()


def accepts_narrow(like: Tensor) -> bool:
    """Whether those that hold several vectors in registers do."""
    return accepts(like) and not is_wide(like)


class _Layout(NamedTuple):
    """How a kernel is cut into programs."""

    rows: int  # problems of a program
    options: dict[str, int]


@cache
def layout_of(n: int) -> _Layout:
    """For problems of so many variables."""
    block = 1 << (n - 1).bit_length()
    rows = max(1, 256 // block) if block <= 64 else 1
    # More warps share the entries of a row, but wait for each other at every sum of them; 16 and
    # 32 are there for their registers. These were the fastest on an H200.
    warps = 4 if rows > 1 else max(min(8, block // 128), block // 512)
    return _Layout(rows, {"ROWS": rows, "BLOCK": block, "num_warps": warps})


def is_wide(like: Tensor) -> bool:
    """Whether a thread has too few registers for its part of several such vectors."""
    return like.shape[-1] * like.element_size() > 2**14


def launch(
    kernel: Any, like: Tensor, arguments: tuple[object, ...], constants: dict[str, Any]
) -> None:
    """Launch a kernel for vectors of that shape, on their device."""
    n = like.shape[-1]
    rows = like.numel() // n
    if rows == 0:
        return
    layout = layout_of(n)
    grid = (-(-rows // layout.rows),)
    index = like.get_device()  # −1 for the CPU, where Triton's interpreter runs
    if index < 0 or index == torch.cuda.current_device():
        kernel[grid](*arguments, rows, n, **constants, **layout.options)
        return
    with torch.cuda.device(index):
        kernel[grid](*arguments, rows, n, **constants, **layout.options)


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a part of one; without Triton just a function that nobody calls."""
    if triton is None:
        return function
    # other values of these shall not compile the kernel anew
    runtime = ["rows", "step", "blur", "weight_stride", "length_stride"]
    return triton.jit(function, do_not_specialize=runtime)


@jit
def entries(vector: tl.tensor, at: tl.tensor, cell: tl.tensor) -> tl.tensor:
    """Of a vector of each problem, 0 beyond its end."""
    return tl.load(vector + at, mask=cell, other=0.0)


@jit
def each(number: tl.tensor, row: tl.tensor, here: tl.tensor) -> tl.tensor:
    """A number or a mask of each problem, 0 beyond the last one."""
    return tl.load(number + row, mask=here, other=0)


@jit
def weight_cells(
    row: tl.tensor,
    column: tl.tensor,
    here: tl.tensor,
    cell: tl.tensor,
    stride: tl.tensor,
    WEIGHTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the weights lie and which there are: one for each entry, or one for all of a row."""
    if WEIGHTED:
        return row * stride + column, cell
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return row * stride, here


@jit
def row_sum(a: tl.tensor) -> tl.tensor:
    """The sum of each row."""
    return tl.sum(a, axis=1, keep_dims=True)


@jit
def _add(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    return a + c, b + d


@jit
def row_sums(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Both sums of each row, at the price of one where warps have to wait for each other."""
    return tl.reduce((a, b), 1, _add, keep_dims=True)


@jit
def pull_most(
    weight: tl.tensor,
    pull: tl.tensor,
    square: tl.tensor,
    more: tl.tensor,
    other_pull: tl.tensor,
    other_square: tl.tensor,
) -> tl.tensor:
    """The sum of the weights, the largest pull, and the square that goes with it."""
    first = (pull > other_pull) | ((pull == other_pull) & (square > other_square))
    return (
        weight + more,
        tl.where(first, pull, other_pull),
        tl.where(first, square, other_square),
    )


@jit
def quotient_of(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a / b where b > 0, else 0."""
    return tl.where(b > 0, a / tl.where(b > 0, b, 1.0), 0.0)


@jit
def larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def smaller(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """NaN if one of them is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def cells(
    rows: tl.tensor, n: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Row, column, which rows there are, which entries there are, and where they lie."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = row < rows
    return row, column, here, here & (column < n), row * n + column


@jit
def least_eta(
    chosen: tl.tensor, square: tl.tensor, delta: tl.tensor, t: tl.tensor, otherwise: tl.tensor
) -> tl.tensor:
    """The η of a set of entries, (t + Σ ω²δ) / Σ ω²; see ``project_l1``."""
    part = tl.where(chosen, square, 0.0)
    mass, moment = row_sums(part, part * delta)
    return tl.where(mass > 0, (t + moment) / tl.where(mass > 0, mass, 1.0), otherwise)


@jit
def settled_eta(eta: tl.tensor, square: tl.tensor, delta: tl.tensor, t: tl.tensor) -> tl.tensor:
    """Newton's method for the η of a projection onto an ℓ1 ball, from above.

    The η of any set of entries, (t + Σ ω²δ) / Σ ω², is not below the solution's, and that of the
    entries with δ < η is not above η. As long as η falls an entry is left out for good, therefore
    the loop ends. (What it carries is used after it, or Triton before 3.5 fails.)
    """
    following = least_eta(delta < eta, square, delta, t, eta)
    while tl.max((following < eta).to(tl.int32)) > 0:
        eta = tl.minimum(following, eta)
        following = least_eta(delta < eta, square, delta, t, eta)
    return tl.minimum(following, eta)
