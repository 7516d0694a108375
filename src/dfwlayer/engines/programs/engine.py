"""Whole problems inside of one Triton program each: what of a solve that takes."""

from __future__ import annotations

from dfwlayer.engines.base import Arguments, Attempt
from dfwlayer.engines.compiled.answer import carrying
from dfwlayer.engines.programs.layout import lay_out
from dfwlayer.methods.base import Settings
from dfwlayer.ops.signature import Signature
from dfwlayer.solution import Solution

__all__ = ["attempt"]


def attempt(
    arguments: Arguments, settings: Settings, signature: Signature | None = None
) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing."""
    layout = lay_out(arguments.objective, arguments.constraint)
    found = None if layout is None else layout.search(arguments.x0, settings)
    if layout is None or found is None:
        return None
    parts = found.value, found.gap, found.steps, found.status
    value, gap, steps, status = parts if layout.batch is not None else (part[0] for part in parts)
    # while the GPU is at work
    carried = carrying(layout, found, value, arguments, settings, signature)
    x, value = (layout.fresh(found), value) if carried is None else carried
    count, left = found.left()
    if count == len(found.x):
        return None
    return Attempt(Solution(x, value, gap, steps, status), left)
