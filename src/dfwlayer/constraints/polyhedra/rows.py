"""Rows with a number for each, as they are given: checked, and as tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dfwlayer.ops.values import Value, shape_of, tensor_of

__all__ = ["check_rows", "rows_bound"]


def check_rows(left: str, rows: Tensor, right: str, total: Value) -> None:
    """Raise unless a parameter holds rows, and another one as many numbers."""
    if rows.dim() < 2:
        raise ValueError(
            f"{left}: expected shape (m, n) or (*batch, m, n), got {tuple(rows.shape)}"
        )
    counts = shape_of(total)[-1:]  # of a number () too
    if counts not in ((), (rows.shape[-2],)):
        raise ValueError(
            f"{right}: expected shape ({rows.shape[-2]},) or (B, {rows.shape[-2]}), one "
            f"for each row of {left}, got {shape_of(total)}"
        )


def rows_bound(
    left: str,
    rows: Tensor,
    total: Value,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The right-hand side of rows over variables of that shape, a number for each of them."""
    n = math.prod(shape)
    if rows.shape[-1] != n:
        raise ValueError(
            f"{left}: expected rows of {n} entries, as many as the variable has, got "
            f"{tuple(rows.shape)}"
        )
    total = tensor_of(total, torch.empty(0, dtype=dtype, device=device))
    return total.expand(rows.shape[-2]) if total.dim() == 0 else total
