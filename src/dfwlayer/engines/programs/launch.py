"""How problems are cut into Triton programs, and tensors handed to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dfwlayer.ops.values import Value

__all__ = [
    "FITS",
    "Repeat",
    "Strided",
    "launch",
    "left_so_far",
    "options_of",
    "strided",
    "tableau_options",
]

WIDEST = 128  # coordinates with a matrix, which has to fit into registers together with its inverse
LONGEST = 4096  # coordinates without one
FITS = 2**31  # what is below is handed to a program as an integer of 32 bits

# what Triton has compiled can be called with what it was compiled for, constants included
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)

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
    columns, warps = {16: (8, 1), 32: (16, 1), 64: (16, 8), 128: (32, 8)}[lanes]
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
) -> Repeat | None:
    """One program for each problem, on the device of a tensor; what can launch them once more.

    A product that is fused with the sum it goes into is rounded once, and in the sum of two threads
    each would fuse its own: they would go on with different numbers, and a loop would end for one
    and not for the other, which waits for ever. So nothing is fused unless it is said.
    """
    index = like.get_device()  # −1 for the CPU, where Triton's interpreter runs
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, batch, like, tensors, numbers, constants, options)
    values = tuple(constants.values())
    kinds = [None if t is None else t.dtype for t in tensors]
    key = (kernel, index, options["num_warps"], *kinds, *values)
    repeat = _repeats.get(key)
    if repeat is not None and repeat(batch, tensors, numbers):
        return repeat
    compiling = {name: options[name] for name in ("num_warps", "maxnreg") if name in options}
    made = kernel[batch,](*tensors, *numbers, **constants, **compiling, enable_fp_fusion=False)
    if not _DIRECT or index < 0:
        return None
    return _repeats.setdefault(key, Repeat(made, index, values))


class Repeat(NamedTuple):
    """A program that Triton has compiled, and what for."""

    program: Any
    device: int  # its number
    constants: tuple[Any, ...]

    def __call__(
        self, batch: int, tensors: Sequence[Tensor | int | None], numbers: Sequence[float]
    ) -> bool:
        """Launch it for other tensors of the same dtypes, or where these begin in memory.

        False if it does not take such numbers. Triton looks up what a tensor is for each of them,
        and makes a function for the launch and something to show to those who watch launches: that
        takes longer than the launch itself.
        """
        if max(numbers) >= FITS:
            return False
        if torch.cuda.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(batch, tensors, numbers)
        program = self.program
        if _watched():
            program[batch, 1, 1](*tensors, *numbers, *self.constants)
            return True
        places = [t.data_ptr() if isinstance(t, Tensor) else t for t in tensors]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        program.run(
            batch, 1, 1, stream, program.function, program.packed_metadata, None, None, None,
            *places, *numbers, *self.constants,
        )  # fmt: skip
        return True


_repeats: dict[tuple[Any, ...], Repeat] = {}


def _watched() -> bool:
    """Whether something is to be called at each launch, as far as this version of Triton says."""
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    if runtime is None:
        return True
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
