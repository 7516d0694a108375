"""Whole problems inside of one compiled call: what of a solve it takes, and its gradient."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dfwlayer.engines.base import Arguments, Attempt
from dfwlayer.engines.compiled.answer import asks, carrying
from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.background import NotCompiledError, busy, start, watch
from dfwlayer.engines.compiled.interior import walked
from dfwlayer.engines.compiled.kernels.outcome import SHARED, SOLVED, TIED
from dfwlayer.engines.compiled.layout import Layout, lay_out
from dfwlayer.engines.compiled.working_set import WorkingSets, lay_out_columns
from dfwlayer.linalg.quadratic.homogeneous import offer
from dfwlayer.methods.base import Settings
from dfwlayer.solution import Solution, Status

__all__ = ["attempt"]

SMALLEST = 7.01e-46  # no less than half of the smallest float32
LEAST = 1e-300  # what f is compared with at least


watch()
offer(walked)  # sets that find themselves among tensor operations have compiled steps as well


def attempt(arguments: Arguments, settings: Settings) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing, or not compiled yet."""
    if busy():
        return None
    try:
        return _attempt(arguments, settings)
    except NotCompiledError as missing:
        start(missing)
        return None


def _attempt(arguments: Arguments, settings: Settings) -> Attempt | None:
    problem = arguments.objective, arguments.constraint
    layout = lay_out(*problem) or lay_out_columns(*problem)
    if layout is None:
        return None
    start = _start(layout, arguments.x0)
    found = None if start is None else layout.search(start, settings.tol, settings.max_steps)
    if found is None:
        return None
    codes, left = found.codes, None
    # which multipliers hold x is of no interest, or not to the data of f, which come first
    for code, first in ((SHARED, 0), (TIED, 2)):
        if code in codes[0] and not asks(layout.tensors[first:]):
            codes[0, codes[0] == code] = SOLVED
    if layout.batch is None:
        if codes[0, 0] != SOLVED:
            return None
    elif (lost := codes[0] != SOLVED).any():
        if lost.all():
            return None
        for part in (found.x, found.multipliers, *found.face):
            part[lost] = 0
        left = torch.from_numpy(lost)
    values, ended = found.values, codes[0]
    # where f* is zero the gap may be what rounding makes of f
    floor = values[1] > settings.tol * np.maximum(np.abs(values[0]), LEAST)
    if floor.any():
        ended = np.where(floor & (ended == SOLVED), int(Status.ROUNDING_FLOOR), ended)
    if layout.dtype != torch.float64:  # a bound stays one
        values[1] = values[1] * (1 + layout.eps) + SMALLEST
        values = values.astype(np.float32)
    at = (0, ...) if layout.batch is None else ()
    value, gap, status, steps = (
        torch.from_numpy(row[at]) for row in (values[0], values[1], ended, codes[1])
    )
    carried = carrying(layout, found, value, arguments, settings)
    x, value = (layout.point(found.x), value) if carried is None else carried
    return Attempt(Solution(x, value, gap, steps, status), left)


def _start(layout: Layout | WorkingSets, x0: Tensor | None) -> Array | None:
    """Where to start (1, n) or (B, n), None if the question is for others."""
    n = layout.n
    if x0 is None:
        return np.zeros((1, n))
    if (
        x0.dim() not in (1, 2)
        or x0.shape[-1] != n
        or x0.dtype != layout.dtype
        or x0.device.type != "cpu"
    ):
        return None
    start: Array = x0.detach().to(torch.float64).reshape(-1, n).contiguous().numpy()
    if len(start) not in (1, layout.batch or 1) or (x0.dim() == 2 and layout.batch is None):
        return None
    if len(start) == 1 and not np.isfinite(start[0]).all():
        return None
    return start
