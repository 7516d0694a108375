"""Whole problems inside of one compiled call, on the CPU.

For problems with a dense quadratic objective over a set in normal form (bounds, budgets, equations,
block by block), up to a few hundred coordinates. `attempt` answers those it can solve beyond doubt
and leaves the others to the engines of `dfwlayer.engines`, which answer everything.

Numba compiles the code when it is first needed, which takes some seconds, and keeps it on disk for
the processes to come. Without Numba, or where it does not work, nothing is attempted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dfwlayer.engines.base import Arguments, Attempt
from dfwlayer.methods.base import Settings

__all__ = ["attempt", "available", "using"]

_Attempt = Callable[[Arguments, Settings], Attempt | None]

_wanted: ContextVar[bool] = ContextVar(
    "dfwlayer_compiled", default=os.environ.get("DFWLAYER_COMPILED", "1") != "0"
)
_loaded: list[_Attempt | None] = []  # empty until somebody asks


def attempt(arguments: Arguments, settings: Settings) -> Attempt | None:
    """Solve what can be solved beyond doubt in compiled code, None if that is nothing."""
    if not _wanted.get() or not settings.compiles:
        return None
    run = _loaded[0] if _loaded else _load()
    return None if run is None else run(arguments, settings)


@contextmanager
def using(compiled: bool) -> Iterator[None]:
    """Solve with compiled code, or without it, in this context."""
    before = _wanted.set(compiled)
    try:
        yield
    finally:
        _wanted.reset(before)


def available() -> bool:
    """Whether there is compiled code to be had, once it was asked for."""
    return (_loaded[0] if _loaded else _load()) is not None


def _load() -> _Attempt | None:
    try:
        from dfwlayer.engines.compiled import engine
    except (ImportError, OSError):  # no Numba, or none that works on this platform
        _loaded.append(None)
    else:
        _loaded.append(engine.attempt)
    return _loaded[0]
