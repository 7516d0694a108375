"""How problems are cut into Triton programs, and tensors handed to them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dfwlayer.ops.values import Value

__all__ = ["FITS", "Strided", "launch", "left_so_far", "options_of", "strided", "tableau_options"]

WIDEST = 128  # coordinates with a matrix, which has to fit into registers together with its inverse
LONGEST = 4096  # coordinates without one
FITS = 2**31  # what is below is handed to a program as an integer of 32 bits

# what Triton has compiled can be called with what it was compiled for, constants included
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)

_programs: dict[tuple[Any, ...], Any] = {}
_counters: dict[torch.device, Tensor] = {}


class Strided(NamedTuple):
    """A tensor whose entries for problem b begin at b times the first stride."""

    tensor: Tensor
    strides: tuple[int, ...]  # to the next problem, row or column; 0 for what is shared


def strided(value: Value, rank: int, like: Tensor) -> Strided:
    """A number, or a tensor of one problem (rank dimensions) or a batch, or with one entry."""
    if not isinstance(value, Tensor):
        return Strided(_constant(value, like.device), (0,) * (rank + 1))
    lead = value.dim() - rank
    if lead < 0:  # one number for all entries
        return Strided(value, (0,) * (rank + 1))
    own = value.stride()
    if 1 in value.shape:
        own = tuple(0 if size == 1 else step for size, step in zip(value.shape, own, strict=True))
    return Strided(value, own if lead else (0, *own))


@lru_cache(maxsize=256)
def _constant(value: float, device: torch.device) -> Tensor:
    """A number where a program can read it, to the last digit."""
    return torch.tensor([value], dtype=torch.float64, device=device)


@lru_cache(maxsize=256)
def options_of(n: int, dense: bool) -> Mapping[str, int] | None:
    """Lanes, columns that neighbouring threads share, and warps; None for what is too large.

    The number of warps is what was fastest on an H200.
    """
    if n > (WIDEST if dense else LONGEST):
        return None
    lanes = max(16, 1 << (n - 1).bit_length())
    if not dense:
        return {"N": lanes, "C": 4, "num_warps": max(1, lanes // 256)}
    columns, warps = {16: (4, 1), 32: (8, 2), 64: (4, 8), 128: (8, 16)}[lanes]
    return {"N": lanes, "C": columns, "num_warps": warps}


@lru_cache(maxsize=256)
def tableau_options(lanes: int) -> Mapping[str, int] | None:
    """The same for a tableau, with all the registers that so many threads can have."""
    if lanes > WIDEST:
        return None
    width = max(16, 1 << (lanes - 1).bit_length())
    columns, warps = {16: (8, 1), 32: (16, 2), 64: (16, 4), 128: (16, 8)}[width]
    return {"N": width, "C": columns, "num_warps": warps, "maxnreg": 255}


def left_so_far(device: torch.device) -> Tensor:
    """A count (1,) that programs add to for each problem that they leave."""
    if device not in _counters:
        _counters[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[device]


def launch(
    kernel: Any,
    batch: int,
    like: Tensor,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, int],
) -> None:
    """One program for each problem, on the device of a tensor.

    A product that is fused with the sum it goes into is rounded once, and in the sum of two threads
    each would fuse its own: they would go on with different numbers, and a loop would end for one
    and not for the other, which waits for ever. So nothing is fused unless it is said.
    """
    index = like.get_device()  # −1 for the CPU, where Triton's interpreter runs
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, batch, like, tensors, numbers, constants, options)
        return
    values = constants.values()
    kinds = [None if t is None else t.dtype for t in tensors]
    key = (kernel, index, options["num_warps"], *kinds, *values)
    program = _programs.get(key)
    if program is not None and max(numbers) < FITS:
        program[batch, 1, 1](*tensors, *numbers, *values)
        return
    compiling = {name: options[name] for name in ("num_warps", "maxnreg") if name in options}
    made = kernel[batch,](*tensors, *numbers, **constants, **compiling, enable_fp_fusion=False)
    if _DIRECT and index >= 0 and max(numbers) < FITS:
        _programs[key] = made
