"""The point of a weighted ℓ1 ball nearest to another, and its face, for batches on the CPU.

Projection layers solve many small problems in one call. There a tensor operation costs several
times what the same costs in NumPy, and a projection is some thirty of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Nearest", "nearest_l1"]

LARGEST, SMALLEST = 1e60, 1e-60  # squares and their sums stay within the range of a double


class Nearest(NamedTuple):
    """The projection and what its face consists of."""

    x: Tensor  # (..., n)
    free: Tensor  # (..., n)
    multiplier: Tensor  # (..., 1)
    normal: Tensor  # (..., n)


def nearest_l1(
    z: Tensor, weight: Tensor | None, radius: Tensor, unbounded: Tensor | None
) -> Nearest | None:
    """Project z (..., n) onto Σ w|x| ≤ t, in double precision; unbounded coordinates stay.

    With δ = max(|z|/w) − |z|/w the result is sign(z) w (η − δ)₊, Σ w²(η − δ)₊ = t, as in
    `dfwlayer.constraints.lp_projection`. None where that could leave the range of a double.
    """
    given = z.numpy()
    wide = given.astype(np.float64)
    t = radius.detach().numpy().astype(np.float64).reshape(*radius.shape, 1)
    w = np.ones(1) if weight is None else np.abs(weight.detach().numpy().astype(np.float64))
    loose = None if unbounded is None else np.broadcast_to(unbounded.numpy(), wide.shape)
    if loose is not None:
        w, wide = np.where(loose, 1, w), np.where(loose, 0, wide)
    size = np.abs(wide)
    if size.size == 0 or not (
        size.max() < LARGEST and w.min() > SMALLEST and w.max() < LARGEST and t.max() < LARGEST
    ):
        return None
    active = (w * size).sum(-1, keepdims=True) > t
    pull = size / w
    largest = pull.max(-1, keepdims=True)
    delta = largest - pull
    flat = delta.reshape(-1, delta.shape[-1])
    order = flat.argsort(-1)
    rows = np.arange(len(flat))[:, None]
    square = (
        np.broadcast_to(w * w, delta.shape).reshape(flat.shape)[rows, order].reshape(wide.shape)
    )
    ordered = flat[rows, order].reshape(wide.shape)
    total = (square * ordered).cumsum(-1) + t
    eta = (total / square.cumsum(-1)).min(-1, keepdims=True)
    reach = np.maximum(eta - delta, 0)
    x = np.where(active, np.copysign(reach * w, wide), wide)
    rounded = _inside(x.astype(given.dtype), w, t)
    # |z| − x = θw on the support; θ is the multiplier
    multiplier = np.where(active, largest - eta, 0)
    free = np.where(active, rounded != 0, np.broadcast_to(t > 0, x.shape))
    normal = np.where(active, np.sign(x) * w, 0)
    if loose is not None:
        rounded, free = np.where(loose, given, rounded), free | loose
        normal = np.where(loose, 0, normal)
    multiplier, normal = multiplier.astype(rounded.dtype), normal.astype(rounded.dtype)
    return Nearest(*map(torch.from_numpy, (rounded, free, multiplier, normal)))


def _inside(
    x: npt.NDArray[np.floating], w: npt.NDArray[np.float64], t: npt.NDArray[np.float64]
) -> npt.NDArray[np.floating]:
    """x, scaled back where rounding has carried it outside."""
    size = (w * np.abs(x)).sum(-1, keepdims=True, dtype=np.float64)
    outside = size > t
    if not outside.any():
        return x
    finfo = np.finfo(x.dtype)
    shrink = np.where(outside, t / np.where(outside, size, 1) * (1 - 2 * finfo.eps), 1)
    # twice eps makes room for the rounding of the product, but not below the normal range
    vanishing = outside & (np.abs(x) < finfo.tiny / finfo.eps)
    return np.where(vanishing, 0, x * shrink).astype(x.dtype)
