"""How problems are cut into Triton programs, and tensors handed to them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.parameters import Value

__all__ = ["Strided", "launch", "options_of", "strided"]

WIDEST = 128  # coordinates with a matrix, two of which have to fit into registers
LONGEST = 4096  # coordinates without one


class Strided(NamedTuple):
    """A tensor whose entries for problem b begin at b times the first stride."""

    tensor: Tensor
    strides: tuple[int, ...]  # to the next problem, row or column; 0 for what is shared


def strided(value: Value, rank: int, like: Tensor) -> Strided:
    """A number, or a tensor of one problem (rank dimensions) or a batch, or with one entry."""
    tensor = value.detach() if isinstance(value, Tensor) else _constant(value, like.device)
    lead = tensor.dim() - rank
    strides = tensor.stride()
    if lead < 0:  # one number for all entries
        return Strided(tensor, (0,) * (rank + 1))
    own = tuple(0 if size == 1 else step for size, step in zip(tensor.shape, strides, strict=True))
    return Strided(tensor, own if lead else (0, *own))


@lru_cache(maxsize=256)
def _constant(value: float, device: torch.device) -> Tensor:
    """A number where a program can read it, to the last digit."""
    return torch.tensor([value], dtype=torch.float64, device=device)


@lru_cache(maxsize=256)
def options_of(n: int, dense: bool) -> dict[str, int] | None:
    """Lanes, columns that neighbouring threads share, and warps; None for what is too large."""
    if n > (WIDEST if dense else LONGEST):
        return None
    lanes = max(16, 1 << (n - 1).bit_length())
    if not dense:
        return {"N": lanes, "C": 4, "KEEP": False, "num_warps": max(1, lanes // 256)}
    warps = {16: 1, 32: 1, 64: 4, 128: 8}[lanes]
    keep = lanes <= 64  # P in registers, beside its inverse
    return {"N": lanes, "C": 8 if lanes > 64 else 4, "KEEP": keep, "num_warps": warps}


def launch(
    kernel: Any, batch: int, like: Tensor, arguments: tuple[Any, ...], **constants: Any
) -> None:
    """One program for each problem, on the device of a tensor."""
    index = like.get_device()  # −1 for the CPU, where Triton's interpreter runs
    if index < 0 or index == torch.cuda.current_device():
        kernel[(batch,)](*arguments, **constants)
        return
    with torch.cuda.device(index):
        kernel[(batch,)](*arguments, **constants)
