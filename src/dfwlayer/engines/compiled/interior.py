"""Interior-point steps of one sparse program in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dfwlayer.engines.compiled.arrays import Array
from dfwlayer.engines.compiled.background import NotCompiledError, busy, mode, start
from dfwlayer.engines.compiled.kernels import barrier
from dfwlayer.linalg.quadratic.homogeneous import Interior
from dfwlayer.linalg.quadratic.thin import Thin

__all__ = ["walked"]


def walked(program: Thin, most: int) -> Interior | None:
    """Where compiled steps end, None if that is not near a solution or there is no code yet."""
    if mode() == "off" or busy():
        return None
    try:
        return _walked(program, most)
    except NotCompiledError as missing:
        start(missing)
        return None


def _walked(program: Thin, most: int) -> Interior | None:
    limits = program.limits[0].numpy()
    held = np.isfinite(limits)
    sizes = program.q.shape[-1], program.b.shape[-1], len(limits), len(limits)
    found = tuple(np.zeros(size) for size in sizes)
    holds = np.zeros(len(limits), np.bool_)
    corner = tuple(np.zeros(size) for size in sizes[:3])
    matrices = (_by_rows(matrix) for matrix in (program.P, program.A, program.G))
    off, steps, settled = barrier.walk(
        *matrices,
        program.q[0].numpy(),
        program.b[0].numpy(),
        np.where(held, limits, 0.0),
        held,
        most,
        *found,
        holds,
        corner,
    )
    if not off < barrier.NEAR:
        return None
    none = torch.zeros(1, dtype=torch.bool)
    x, nu, z, s, rows = (torch.from_numpy(part).unsqueeze(0) for part in (*found, holds))
    ended = torch.tensor([off], dtype=torch.float64), rows, torch.tensor([steps])
    point, prices, forces = (torch.from_numpy(part).unsqueeze(0) for part in corner)
    reached = (point, prices, forces) if settled else None
    return Interior(x, nu, z, s, none, none, *ended, reached)


def _by_rows(matrix: Any) -> tuple[Array, Array, Array]:
    """Where the rows of a CSR matrix begin, the columns of its entries, and these."""
    start, place = (part.astype(np.int64) for part in (matrix.indptr, matrix.indices))
    return start, place, np.ascontiguousarray(matrix.data, dtype=np.float64)
