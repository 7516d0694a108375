"""Rows with a number for each, as they are given: checked, and as tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dfwlayer.constraints.parameters import fault
from dfwlayer.ops.values import Value, shape_of, tensor_of
from dfwlayer.solution import Status

__all__ = ["check_rows", "out_of_reach", "rows_bound"]


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


def out_of_reach(name: str, side: Value | None, wrong: float) -> Tensor | None:
    """Statuses (B,) of the problems with a side that is infinite where no point meets it.

    Such is an upper bound of −∞. Infinity on the other side means that there is none.
    """
    if side is None or (not isinstance(side, Tensor) and side != wrong):
        return None
    below = "below" if wrong > 0 else "above"
    return fault(
        (torch.as_tensor(side).detach() == wrong).any(-1),
        Status.INFEASIBLE,
        lambda: (
            f"{name}: expected numbers {below} {wrong:g}, found {wrong:g}, which no point meets; "
            f"{-wrong:g} is for no limit at all"
        ),
    )
