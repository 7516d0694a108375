"""A Triton kernel for CUDA: the face of an ℓ1 ball.

See `dfwlayer.ops.kernels.steps`, whose rules it follows.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.kernels.common import (
    cells,
    entries,
    jit,
    launch,
    quotient_of,
    row_sum,
    row_sums,
    weight_cells,
)
from dfwlayer.ops.scale import Scale

with suppress(ImportError):
    import triton.language as tl

__all__ = ["FaceL1", "face_l1"]


class FaceL1(NamedTuple):
    """What `dfwlayer.constraints.balls.lp_face.lp_face` tells from x and ∇f(x) for p = 1."""

    free: Tensor  # (..., n)
    multiplier: Tensor  # (..., 1)
    normal: Tensor  # (..., n)
    size: Tensor  # (..., 1)


def face_l1(
    weight: Tensor,  # |w|, (1,), (n,), (B, n) or (B, 1), all positive
    radius: Tensor,  # () or (...)
    x: Tensor,  # (..., n)
    g: Tensor,  # (..., n)
    scale: Scale | None,
) -> FaceL1:
    """The face in one launch."""
    x, g, weight, radius = x.contiguous(), g.contiguous(), weight.contiguous(), radius.contiguous()
    curvature, noise = (None, None) if scale is None else scale
    if curvature is not None and noise is not None:
        curvature, noise = curvature.expand_as(x).contiguous(), noise.expand_as(x).contiguous()
    numbers = (weight, radius, x, g, curvature, noise)
    columns = weight.shape[-1]
    weight_stride = columns if weight.numel() > columns else 0
    length_stride = 1 if radius.numel() > 1 else 0
    normal, free = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    multiplier, size = (x.new_empty((*x.shape[:-1], 1)) for _ in range(2))
    finfo = torch.finfo(x.dtype)
    launch(
        _face_l1,
        x,
        (*numbers, free, multiplier, normal, size, weight_stride, length_stride),
        {
            "WEIGHTED": columns > 1,
            "TINY": finfo.tiny,
            "ROOM": 8 * finfo.eps * x.shape[-1] ** 0.5,
        },
    )
    return FaceL1(free, multiplier, normal, size)


@jit
def _face_l1(
    weight: tl.tensor,
    radius: tl.tensor,
    x: tl.tensor,
    g: tl.tensor,
    curvature: tl.tensor,
    noise: tl.tensor,
    free: tl.tensor,
    multiplier: tl.tensor,
    normal: tl.tensor,
    size: tl.tensor,
    weight_stride: tl.tensor,
    length_stride: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    WEIGHTED: tl.constexpr,
    TINY: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, column, here, cell, at = cells(rows, n, ROWS, BLOCK)
    point = entries(x, at, cell)
    slope = entries(g, at, cell)
    weights, weighed = weight_cells(row, column, here, cell, weight_stride, WEIGHTED)
    w = tl.load(weight + weights, mask=weighed, other=1.0)
    t = tl.load(radius + row * length_stride, mask=here, other=1.0)
    weighted = w * tl.abs(point)
    length, along = row_sums(weighted, slope * point)
    force = quotient_of(-along, length)  # g = −λ ∇h
    blur = 0.0
    if noise is None:
        tight = 1 - length / tl.maximum(t, TINY) <= ROOM
    else:  # see `dfwlayer.ops.scale.Scale.felt`
        bend = entries(curvature, at, cell)
        error = entries(noise, at, cell)
        some = cell & (point != 0)
        unit = tl.max(tl.where(some, w, 0.0), axis=1, keep_dims=True)
        unit = tl.where(unit > 0, unit, 1.0)
        square = tl.where(some, (w / unit) * (w / unit), 0.0)
        width, bent = row_sums(square, square * bend)
        blur = row_sum(error * tl.abs(point))
        blur = quotient_of(blur, length)
        width = tl.where(width > 0, width, 1.0)
        slack = tl.maximum(t - length, 0.0) / unit
        tight = (force - blur) * unit > bent / (width * width) * slack
    # threads may round a sum differently; they have to agree all the same
    felt = tl.where(cell, (tight & (force > 0)).to(tl.int32), 1)
    active = tl.min(felt, axis=1, keep_dims=True) > 0
    force = tl.where(active, force, 0.0)
    loose = point != 0
    if noise is not None:
        left = w * force - tl.abs(slope)
        loose = loose & (left <= error + w * blur + bend * tl.abs(point))
    loose = loose | (active == 0)
    loose = loose & ((t > 0) | (w <= 0))
    side = tl.where(point > 0, w, tl.where(point < 0, -w, 0.0))
    tl.store(free + at, loose, mask=cell)
    tl.store(normal + at, tl.where(loose & active, side, 0.0), mask=cell)
    tl.store(multiplier + row, force, mask=here)
    tl.store(size + row, length, mask=here)
