"""The library as a system of a suite: compiled ahead, or with tensor operations alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import dfwlayer
from dfwlayer.engines import compiled
from dfwlayer.engines.compiled.background import mode
from dfwlayer_bench.bench.turns import Passes

__all__ = ["compiled_ahead", "not_compiled"]

Given = TypeVar("Given")  # a problem
Found = TypeVar("Found")


def compiled_ahead(prepare: Callable[[Given], Passes]) -> Callable[[Given], Passes]:
    """The library as it comes; compiled beforehand."""

    def ready(given: Given) -> Passes:
        if not dfwlayer.warm_up():
            raise RuntimeError("there is no compiled code without Numba")
        passes = prepare(given)
        if mode() != "off":  # as it is called by anybody
            return replace(passes, settings=passes.settings | {"compiled": True})
        return _using(passes, compiles=True)

    return ready


def not_compiled(prepare: Callable[[Given], Passes]) -> Callable[[Given], Passes]:
    """The library with tensor operations alone."""
    return lambda given: _using(prepare(given), compiles=False)


def _using(passes: Passes, *, compiles: bool) -> Passes:
    def within(call: Callable[[], Found]) -> Callable[[], Found]:
        def run() -> Found:
            with compiled.using(compiles):
                return call()

        return run

    both = None if passes.both is None else within(passes.both)
    settings = passes.settings | {"compiled": compiles}
    return replace(passes, forward=within(passes.forward), both=both, settings=settings)
