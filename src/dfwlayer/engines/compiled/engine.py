"""Whole problems inside of one compiled call: what of a solve it takes, and its gradient."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, from_numpy

from dfwlayer.engines.base import Arguments, Attempt
from dfwlayer.engines.compiled.answer import asks, carrying
from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.background import NotCompiledError, busy, start, watch
from dfwlayer.engines.compiled.interior import walked
from dfwlayer.engines.compiled.kernels.outcome import SHARED, SOLVED, TIED
from dfwlayer.engines.compiled.layout import Layout, lay_out, origin
from dfwlayer.engines.compiled.thin import ThinPrograms, lay_out_thin
from dfwlayer.engines.compiled.working_set import WorkingSets, lay_out_columns
from dfwlayer.linalg.quadratic.homogeneous import offer
from dfwlayer.methods.base import Settings
from dfwlayer.ops.signature import Signature
from dfwlayer.solution import Solution, Status

__all__ = ["attempt"]

SMALLEST = 7.01e-46  # no less than half of the smallest float32
LEAST = 1e-300  # what f is compared with at least

watch()
offer(walked)  # sets that find themselves among tensor operations have compiled steps as well


def attempt(
    arguments: Arguments, settings: Settings, signature: Signature | None = None
) -> Attempt | None:
    """Solve what can be solved beyond doubt, None if that is nothing, or not compiled yet."""
    if busy():
        return None
    try:
        return _attempt(arguments, settings, signature)
    except NotCompiledError as missing:
        start(missing)
        return None


def _attempt(
    arguments: Arguments, settings: Settings, signature: Signature | None
) -> Attempt | None:
    objective, constraint, x0, _ = arguments
    layout = (
        lay_out(objective, constraint, signature)
        or lay_out_columns(objective, constraint)
        or lay_out_thin(objective, constraint)
    )
    if layout is None:
        return None
    tol, single = settings.tol, layout.batch is None
    start = origin(layout.n) if x0 is None else _start(layout, x0)
    found = None if start is None else layout.search(start, tol, settings.max_steps)
    if found is None:
        return None
    left: Tensor | None = None
    values, codes = found.values, found.codes
    ended, sound = codes[0], True
    if codes.item(0) if single else ended.any():  # what is not `SOLVED`
        lost = _lost(layout, ended)
        if lost.all():
            return None
        if lost.any():
            for part in (found.x, found.multipliers, *found.face):
                part[lost] = 0
            left, sound = torch.from_numpy(lost), False
    # plain numbers are compared sooner
    above = values.item(1) > tol * max(abs(values.item(0)), LEAST) if single else True
    if above and (floor := values[1] > tol * np.maximum(np.abs(values[0]), LEAST)).any():
        # f* of a problem is zero, so that the gap may be what rounding makes of f
        ended = np.where(floor & (ended == SOLVED), int(Status.ROUNDING_FLOOR), ended)
        sound = False
    if layout.dtype != torch.float64:  # a bound stays one
        values[1] = values[1] * (1 + layout.eps) + SMALLEST
        values = values.astype(np.float32)
    value = from_numpy(values[0, 0, ...] if single else values[0])
    carried = carrying(layout, found, value, arguments, settings, signature)
    x, value = (layout.point(found.x), value) if carried is None else carried
    rest = partial(_rest, values, codes, ended, single)
    return Attempt(Solution.of_parts(x, value, sound, rest), left)


def _rest(values: Array, codes: Array, ended: Array, single: bool) -> tuple[Tensor, ...]:
    """Gap, steps and status, without a dimension for a single problem."""
    parts = values[1], codes[1], ended  # (B,)
    return tuple(from_numpy(part[0, ...] if single else part) for part in parts)


def _lost(layout: Layout | WorkingSets | ThinPrograms, codes: Array) -> Array:  # (B,) -> (B,)
    """Which problems are for others; those that are solved for what is asked for become so."""
    # which multipliers hold x is of no interest, or not to the data of f, which come first
    for code, first in ((SHARED, 0), (TIED, 2)):
        if code in codes and not asks(layout.tensors[first:]):
            codes[codes == code] = SOLVED
    lost: Array = codes != SOLVED
    return lost


def _start(layout: Layout | WorkingSets | ThinPrograms, x0: Tensor) -> Array | None:
    """Where to start (1, n) or (B, n), None if the question is for others."""
    n = layout.n
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
