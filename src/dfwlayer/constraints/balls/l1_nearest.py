"""The point of a weighted ℓ1 ball nearest to another, its face and its gradient, on the CPU.

Projection layers solve many small problems in one call. There a tensor operation costs several
times what the same costs in NumPy, and a projection is some thirty of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dfwlayer.ops.kernels.common import LARGEST, SMALLEST

__all__ = ["Nearest", "nearest_l1"]

Reals = npt.NDArray[np.floating]
Doubles = npt.NDArray[np.float64]


class Nearest(NamedTuple):
    """The projection and what its face consists of."""

    x: Reals  # (..., n)
    free: npt.NDArray[np.bool_]  # (..., n)
    multiplier: Reals  # (..., 1)
    normal: Reals  # (..., n), sign(x) w on the free coordinates where the ball is felt, else 0

    def pullback(self, v: Reals) -> tuple[Doubles, Doubles]:
        """Of a gradient v (..., n) in x: u (..., n) and ν (..., 1) with u + νa = v, ⟨a, u⟩ = 0.

        u is the gradient in z and ν that in the radius, in double precision and on the free
        coordinates. Both are NaN for problems whose v is not finite, which comes from elsewhere
        and goes on as it does everywhere in torch, and zero where they leave the range of a double.
        """
        a = self.normal.astype(np.float64)
        length = (a * a).sum(-1, keepdims=True)
        with np.errstate(invalid="ignore", over="ignore"):
            felt = v * self.free  # NaN also where an infinite entry is not free
            nu = (a * felt).sum(-1, keepdims=True) / np.where(length > 0, length, 1)
            u = felt - a * nu
            total = u.sum(-1, keepdims=True)
        if not np.isfinite(total).all():
            sound = np.isfinite(total)
            instead = np.where(np.isfinite(v).all(-1, keepdims=True), 0, np.nan)
            u, nu = np.where(sound, u, instead), np.where(sound, nu, instead)
        return u, nu


def nearest_l1(z: Reals, weight: Reals | None, radius: Reals) -> Nearest | None:
    """Project z (..., n) onto Σ |w x| ≤ t, in double precision, w (..., n), t (...).

    With δ = max(|z|/w) − |z|/w the result is sign(z) w (η − δ)₊, Σ w²(η − δ)₊ = t, as in
    `dfwlayer.constraints.balls.lp_projection`. Coordinates whose bound t/w the dtype of z cannot
    hold stay as they are. None where that could leave the range of a double, or t is negative.
    """
    wide = z.astype(np.float64)
    t = radius.astype(np.float64)[..., None]
    w = np.ones(1) if weight is None else np.abs(weight.astype(np.float64))
    if wide.size == 0:
        return None
    loose: npt.NDArray[np.bool_] | None = None
    lightest, largest_radius = w.min(), t.max()
    if lightest <= largest_radius / np.finfo(z.dtype).max:
        loose = np.broadcast_to(w <= t / np.finfo(z.dtype).max, wide.shape)
        w, wide = np.where(loose, 1, w), np.where(loose, 0, wide)
        lightest = w.min()
    size = np.abs(wide)
    if not (
        size.max() < LARGEST
        and lightest > SMALLEST
        and w.max() < LARGEST
        and t.min() >= 0
        and largest_radius < LARGEST
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
    rounded = _inside(x.astype(z.dtype), w, t)
    # |z| − x = θw on the support; θ is the multiplier
    multiplier = np.where(active, largest - eta, 0)
    free = np.where(active, rounded != 0, t > 0)
    normal = np.where(active, np.sign(rounded) * w, 0)
    if loose is not None:
        rounded, free = np.where(loose, z, rounded), free | loose
        normal = np.where(loose, 0, normal)
    return Nearest(rounded, free, multiplier.astype(z.dtype), normal.astype(z.dtype))


def _inside(x: Reals, w: Doubles, t: Doubles) -> Reals:
    """x, scaled back where rounding has carried it outside."""
    size = (w * np.abs(x)).sum(-1, keepdims=True, dtype=np.float64)
    outside = size > t
    if not outside.any():
        return x
    finfo = np.finfo(x.dtype)
    shrink = np.where(outside, t / np.where(outside, size, 1) * (1 - 2 * finfo.eps), 1)
    # twice eps makes room for the rounding of the product, but not below the normal range
    inner = (x * shrink).astype(x.dtype)
    return np.where(outside & (np.abs(inner) < finfo.tiny), 0, inner).astype(x.dtype)
