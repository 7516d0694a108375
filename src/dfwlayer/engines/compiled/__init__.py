"""Whole problems inside of one compiled call.

For problems with a dense quadratic objective over a set in normal form (bounds, budgets, equations,
block by block), up to a few hundred coordinates. `attempt` answers those it can solve beyond doubt
and leaves the others to the engines of `dfwlayer.engines`, which answer everything.

On the CPU Numba compiles the code when it is first needed, in the background unless it is to be
waited for (`dfwlayer.engines.compiled.background`), and keeps it on disk for the processes to come.
On a GPU that is Triton's part, see `dfwlayer.engines.programs`. Where one of them is missing, or
does not work, nothing is attempted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dfwlayer.engines.base import Arguments, Attempt
from dfwlayer.engines.compiled.background import busy, mode, using
from dfwlayer.methods.base import Settings
from dfwlayer.ops.signature import Signature

__all__ = ["attempt", "available", "for_one", "using", "with_kinks"]

_Attempt = Callable[[Arguments, Settings, Signature | None], Attempt | None]

# by the device that a problem is on
ENGINES = {"cpu": "dfwlayer.engines.compiled.engine", "cuda": "dfwlayer.engines.programs.engine"}

_loaded: dict[str, _Attempt | None] = {}  # empty until somebody asks


def attempt(
    arguments: Arguments, settings: Settings, signature: Signature | None = None
) -> Attempt | None:
    """Solve what can be solved beyond doubt in compiled code, None if that is nothing.

    With a signature what is found out about the call is kept for those that have the same one.
    """
    wanted = settings.compiles and mode() != "off"
    if signature is not None:  # the processes that share a problem have none
        kind = signature.tensors[0].device.type
        run = (_loaded.get(kind) or _engine(kind)) if wanted else None
        return None if run is None else run(arguments, settings, signature)
    run = _engine(arguments.objective.device.type) if wanted else None
    shards = arguments.objective.shards
    if shards is None:
        return None if run is None else run(arguments, settings, None)
    # processes that share a problem go one way, so they wait for those that have to compile
    with using("wait"):
        ready = shards.all(run is not None and not busy())
        return run(arguments, settings, None) if ready and run is not None else None


def available() -> bool:
    """Whether there is compiled code to be had on the CPU."""
    return _engine("cpu") is not None


def with_kinks(values: Iterable[Tensor] = ()) -> Any:
    """The module that finds the pieces of problems with kinks, None where there is none.

    Neither is there one for tensors whose values may not be looked at, or are not on the CPU.
    """
    seen = not torch._C._are_functorch_transforms_active() and all(v.is_cpu for v in values)
    return import_module("dfwlayer.engines.compiled.pieces") if seen and available() else None


def for_one() -> Any:
    """The module that solves a problem without a batch in arrays, None where there is none."""
    return import_module("dfwlayer.engines.compiled.alone") if available() else None


def _engine(device: str) -> _Attempt | None:
    if device not in _loaded:
        _loaded[device] = _load(device)
    return _loaded[device]


def _load(device: str) -> _Attempt | None:
    if device not in ENGINES:
        return None
    try:
        run: _Attempt = import_module(ENGINES[device]).attempt
    except (ImportError, OSError):  # no Numba or Triton, or none that works on this platform
        return None
    return run
