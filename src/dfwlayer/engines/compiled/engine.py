"""Whole problems inside of one compiled call, on the CPU."""

from __future__ import annotations

from dfwlayer.engines.base import Arguments, Attempt
from dfwlayer.engines.compiled.answer import answer
from dfwlayer.engines.compiled.layout import lay_out
from dfwlayer.methods.base import Settings

__all__ = ["attempt"]


def attempt(arguments: Arguments, settings: Settings) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing."""
    layout = lay_out(arguments.objective, arguments.constraint)
    return None if layout is None else answer(layout, arguments, settings)
