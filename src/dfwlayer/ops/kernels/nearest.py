"""Triton kernels for projection layers on CUDA: one launch forwards, one backwards.

They compute in double precision what `dfwlayer.constraints.balls.l1_nearest` computes on the CPU;
see `dfwlayer.ops.kernels.steps` for the rest.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.kernels.common import (
    LARGEST,
    SMALLEST,
    cells,
    each,
    entries,
    jit,
    launch,
    layout_of,
    pull_most,
    quotient_of,
    row_sum,
    row_sums,
    settled_eta,
)

with suppress(ImportError):
    import triton.language as tl

__all__ = ["NearestL1", "nearest_l1", "pull_back_l1"]


class NearestL1(NamedTuple):
    """A projection, and what its gradient needs."""

    x: Tensor  # (..., n)
    own: Tensor  # (..., n), x once more: the other one may be changed in place
    multiplier: Tensor  # (...), double
    suspect: Tensor  # masks of blocks of problems: values are not finite, or radii negative


def nearest_l1(
    q: Tensor,  # (..., n)
    weight: Tensor | None,  # (n,) or (..., n)
    radius: Tensor,  # () or (...)
) -> NearestL1:
    """The point of Σ |w x| ≤ t nearest to −q."""
    q, (weight, weight_stride, radius, radius_stride) = q.contiguous(), _laid_out(weight, radius)
    x, own = torch.empty_like(q), torch.empty_like(q)
    rows = q.numel() // q.shape[-1]
    multiplier = q.new_empty(q.shape[:-1], dtype=torch.float64)
    blocks = -(-rows // layout_of(q.shape[-1]).rows)
    suspect = q.new_empty(blocks, dtype=torch.bool)
    given = (q, weight, radius, x, own, multiplier, suspect, weight_stride, radius_stride)
    finfo = torch.finfo(q.dtype)
    constants = {"MAX": finfo.max, "EPS": finfo.eps, "VANISHING": finfo.tiny}
    limits = {"LARGEST": LARGEST, "SMALLEST": SMALLEST}
    launch(_nearest_l1, q, given, constants | limits)
    return NearestL1(x, own, multiplier, suspect)


def pull_back_l1(
    at: NearestL1,
    v: Tensor,  # (..., n)
    weight: Tensor | None,
    radius: Tensor,
    to_weight: bool,
    to_radius: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients in q (..., n), in each problem's weight (..., n) and in its radius (...)."""
    x = at.own
    weight, weight_stride, radius, radius_stride = _laid_out(weight, radius)
    to_q = torch.empty_like(x)
    force = torch.empty_like(x) if to_weight and weight is not None else None
    slope = x.new_empty(x.shape[:-1]) if to_radius else None
    given = (v.contiguous(), x, weight, radius, at.multiplier, to_q, force, slope)
    constants = {"MAX": torch.finfo(x.dtype).max}
    launch(_pull_back_l1, x, (*given, weight_stride, radius_stride), constants)
    return to_q, force, slope


def _laid_out(weight: Tensor | None, radius: Tensor) -> tuple[Tensor | None, int, Tensor, int]:
    """Both row after row, with the distance from one problem to the next."""
    stride = 0
    if weight is not None:
        weight = weight.contiguous()
        stride = weight.shape[-1] if weight.dim() > 1 else 0
    return weight, stride, radius.contiguous(), 1 if radius.dim() > 0 else 0


@jit
def _nearest_l1(
    q: tl.tensor,
    weight: tl.tensor,
    radius: tl.tensor,
    x: tl.tensor,
    own: tl.tensor,
    multiplier: tl.tensor,
    suspect: tl.tensor,
    weight_stride: tl.tensor,
    length_stride: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    MAX: tl.constexpr,
    EPS: tl.constexpr,
    VANISHING: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, column, here, cell, at = cells(rows, n, ROWS, BLOCK)
    z = -entries(q, at, cell)
    t = tl.load(radius + row * length_stride, mask=here, other=1.0).to(tl.float64)
    if weight is not None:
        w = tl.load(weight + row * weight_stride + column, mask=cell, other=1.0)
        w = tl.abs(w).to(tl.float64)
        loose = cell & (w <= t / MAX)
    else:
        w = tl.full((ROWS, BLOCK), 1.0, tl.float64)
        loose = cell & (w <= 0.0)
    size = tl.abs(z).to(tl.float64)
    sound = (size < LARGEST) & (w < LARGEST) & ((w > SMALLEST) | loose) & (t >= 0) & (t < LARGEST)
    odd = (cell & (sound == 0)).to(tl.int32)
    tl.store(suspect + tl.program_id(0), tl.max(odd) > 0)

    w = tl.where(loose, 1.0, w)
    size = tl.where(loose, 0.0, size)
    square = tl.where(cell & (loose == 0), w * w, 0.0)
    pull = size / w
    length, largest, lead = tl.reduce((w * size, pull, square), 1, pull_most, keep_dims=True)
    # threads may round a sum differently; on the boundary they have to agree all the same
    inside = tl.max(tl.where(cell, (length > t).to(tl.int32), 0), axis=1, keep_dims=True) == 0
    delta = largest - pull
    # as in ``kernels``: Newton's method, which leaves out entries for good
    eta = tl.where(inside, 0.0, quotient_of(t, lead))
    eta = settled_eta(eta, square, delta, t)

    moved = tl.maximum(eta - delta, 0.0) * w
    moved = tl.where(z < 0, -moved, moved).to(z.dtype)
    moved = tl.where(inside | loose, z, moved)
    # what rounding has carried outside is scaled back
    length = row_sum(tl.where(cell & (loose == 0), w * tl.abs(moved).to(tl.float64), 0.0))
    out = tl.max(tl.where(cell, (length > t).to(tl.int32), 0), axis=1, keep_dims=True) > 0
    shrink = t / tl.where(length > 0, length, 1.0) * (1.0 - 2.0 * EPS)
    back = (moved.to(tl.float64) * shrink).to(z.dtype)
    back = tl.where(tl.abs(back) < VANISHING, 0.0, back)
    moved = tl.where(out & (loose == 0), back, moved)
    tl.store(x + at, moved, mask=cell)
    tl.store(own + at, moved, mask=cell)
    tl.store(multiplier + row, tl.where(inside, 0.0, largest - eta), mask=here)


@jit
def _pull_back_l1(
    v: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    radius: tl.tensor,
    multiplier: tl.tensor,
    to_q: tl.tensor,
    to_weight: tl.tensor,
    to_radius: tl.tensor,
    weight_stride: tl.tensor,
    length_stride: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    MAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, column, here, cell, at = cells(rows, n, ROWS, BLOCK)
    point = entries(x, at, cell)
    push = entries(v, at, cell).to(tl.float64)
    t = tl.load(radius + row * length_stride, mask=here, other=1.0).to(tl.float64)
    force = each(multiplier, row, here)
    side = tl.where(point > 0, 1.0, tl.where(point < 0, -1.0, 0.0)).to(tl.float64)
    if weight is not None:
        signed = tl.load(weight + row * weight_stride + column, mask=cell, other=1.0)
        w = tl.abs(signed).to(tl.float64)
        loose = w <= t / MAX
    else:
        w = tl.full((ROWS, BLOCK), 1.0, tl.float64)
        loose = w <= 0.0
    active = force > 0
    free = loose | tl.where(active, point != 0, t > 0)
    arrived = row_sum(push - push) == 0  # whether all of it is finite
    push = push * tl.where(free, 1.0, 0.0)  # what is not finite stays so
    a = tl.where(active & (loose == 0), side * w, 0.0)
    width, along = row_sums(a * a, a * push)
    nu = quotient_of(along, width)
    u = push - a * nu
    total = row_sum(u)
    sound = (total - total) == 0
    instead = tl.where(arrived, 0.0, float("nan")).to(tl.float64)
    u = tl.where(sound, u, instead)
    nu = tl.where(sound, nu, instead)
    tl.store(to_q + at, (-u).to(point.dtype), mask=cell)
    if to_weight is not None:
        pulled = force * side * u + nu * tl.abs(point).to(tl.float64)
        turn = tl.where(signed > 0, -1.0, tl.where(signed < 0, 1.0, 0.0)).to(tl.float64)
        tl.store(to_weight + at, (turn * pulled).to(point.dtype), mask=cell)
    if to_radius is not None:
        tl.store(to_radius + row, nu.to(point.dtype), mask=here)
