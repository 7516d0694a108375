"""Whole problems inside of one Triton program each: what of a solve that takes."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from dfwlayer.engines.base import Arguments, Attempt
from dfwlayer.engines.compiled.answer import carrying
from dfwlayer.engines.programs.layout import Found, lay_out
from dfwlayer.methods.base import Settings
from dfwlayer.ops.signature import Signature
from dfwlayer.solution import Solution

__all__ = ["attempt"]


def attempt(
    arguments: Arguments, settings: Settings, signature: Signature | None = None
) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing."""
    layout = lay_out(arguments.objective, arguments.constraint, signature)
    found = None if layout is None else layout.search(arguments.x0, settings)
    if layout is None or found is None:
        return None
    single = layout.batch is None
    value = found.values[0, 0] if single else found.values[0]
    # while the GPU is at work
    carried = carrying(layout, found, value, arguments, settings, signature)
    x, value = (layout.fresh(found), value) if carried is None else carried
    count, left = found.left()
    if count == found.batch:
        return None
    return Attempt(Solution.of_parts(x, value, left is None, partial(_rest, found, single)), left)


def _rest(found: Found, single: bool) -> tuple[Tensor, ...]:
    """Gap, steps and status, without a dimension for a single problem."""
    return tuple(part[0] if single else part for part in found.told())
