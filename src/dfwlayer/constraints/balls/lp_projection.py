"""Euclidean projection onto the weighted ℓp ball, direct and batched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.ops import fused
from dfwlayer.ops.rows import by_count, dot, or_one

__all__ = ["AxisBounds", "project_l1", "project_lp"]

INNER = 7  # Newton steps for one coordinate; the start is within a factor of the root
OUTER = 40  # most steps for the multiplier; about 6 are needed, bisection guards the rest


class AxisBounds(NamedTuple):
    """The weighted ℓ1 ball Σ ω|x| ≤ t in units of its largest weight."""

    omega: Tensor  # (n,) or (B, n), in [0, 1]
    inverse: Tensor  # 1/ω, 0 where unbounded
    square: Tensor  # ω², kept above underflow where ω > 0
    length: Tensor  # t, (1,) or (B, 1)
    unbounded: Tensor | None  # mask, None if every coordinate is bounded


def project_l1(ball: AxisBounds, z: Tensor, near: Tensor | None = None) -> Tensor:
    """sign(z)(|z| − θω)₊ with Σ ω(|z| − θω)₊ = t, or z where it is inside.

    In terms of δ = max(|z|/ω) − |z|/ω this is ω(η − δ)₊ with Σ ω²(η − δ)₊ = t. Sorted by δ, the η
    of the first k entries, (t + Σ ω²δ) / Σ ω², is least at the right k. For a point far outside,
    where |z| − θω would be lost to cancellation, ω(η − δ) is not.

    Args:
        ball: The set.
        z: (..., n).
        near: For a single problem on the CPU, a point whose support may be that of the result;
            a few Newton steps for θ from there usually make sorting unnecessary.

    """
    if ball.unbounded is None:
        x = fused.project_l1(z, ball.omega, ball.inverse, ball.length)
        if x is not None:
            return x
    return by_count(z, lambda: _from_guess(ball, z, near), lambda: _by_sorting(ball, z))


def _by_sorting(ball: AxisBounds, z: Tensor) -> Tensor:
    """The projection from the sums of the first k entries, for every k."""
    size = z.abs()
    inside = (ball.omega * size).sum(-1, keepdim=True) <= ball.length
    pull = (size * ball.inverse).clamp(max=0.25 * torch.finfo(z.dtype).max)
    largest = pull.amax(-1, keepdim=True)
    delta = largest - pull
    ordered, index = delta.sort(-1)
    square = ball.square.expand_as(z).gather(-1, index)
    wide = torch.float64  # running sums in float32 would cost the result a digit
    total = (square * ordered).cumsum(-1, dtype=wide) + ball.length
    eta = (total / square.cumsum(-1, dtype=wide)).amin(-1, keepdim=True).to(z.dtype)
    x = torch.copysign((eta - delta).clamp_min(0) * ball.omega, z)
    keep = inside if ball.unbounded is None else inside | ball.unbounded
    return torch.where(keep, z, x)


def _from_guess(ball: AxisBounds, z: Tensor, near: Tensor | None) -> Tensor:
    """The projection of a single point by Newton on θ, or by sorting where that did not settle.

    In NumPy, whose operations on a short vector cost a third of what a tensor's do.
    """
    point = z.numpy()
    omega, length = ball.omega.numpy(), ball.length.item()
    size = np.abs(point)
    weighted = omega * size
    if weighted.sum() <= length:
        return z
    if near is None or ball.unbounded is not None:
        return _by_sorting(ball, z)
    square = ball.square.numpy()
    if len(square) < len(point):
        square = np.broadcast_to(square, point.shape)
    finfo = np.finfo(point.dtype)
    slack = 4 * finfo.eps * len(point) ** 0.5 * length
    mask = (near.numpy() != 0).astype(point.dtype)
    for _ in range(4):
        width = float(mask @ square)
        if width <= 0:
            break
        theta = (float(mask @ weighted) - length) / width
        if not 0 < theta < finfo.max:
            break
        x = np.maximum(size - point.dtype.type(theta) * omega, 0)
        if abs(float((omega * x).sum()) - length) <= slack:
            return torch.from_numpy(np.copysign(x, point))
        mask = (x > 0).astype(point.dtype)
    return _by_sorting(ball, z)


def project_lp(
    p: float,
    weight: Tensor,
    radius: Tensor,
    z: Tensor,
    bounded: Tensor | None = None,
    steps: int | None = None,
) -> Tensor:
    """argmin ½‖x − z‖² subject to ‖w ∘ x‖_p ≤ t.

    Args:
        p: In (1, ∞].
        weight: (B, n), not negative.
        radius: (B,), not negative.
        z: (B, n).
        bounded: (B, n) mask of the coordinates whose weight is not zero, None if all are; the
            others stay as they are.
        steps: For the multiplier, so many and no question asked; None for as many as it takes.

    """
    t = radius.unsqueeze(-1)
    if p == torch.inf:
        bound = t / _only(bounded, weight, 1)
        return _only(bounded, z.clamp(-bound, bound), z)
    # in units of the radius and of the largest weight nothing overflows
    unit = or_one(weight.amax(-1, keepdim=True))
    omega, length = weight / unit, t / unit
    sized = length > 0
    # so far out that 1 is below the rounding of z, only the direction of z matters
    size = z.abs()
    furthest = _only(bounded, size, 0).amax(-1, keepdim=True)
    distance = furthest / torch.where(sized, length, 1)
    distance = torch.where(sized, distance.clamp(max=torch.finfo(z.dtype).eps ** -2), 0)
    share = size * (distance / or_one(furthest))
    share = torch.where(torch.isfinite(share), share, 0)
    inside = _inside(p, omega, share)
    moved = _ellipsoid(omega, share, steps) if p == 2 else _curved(p, omega, share, inside, steps)
    x = torch.sign(z) * torch.where(sized, moved * length, 0)
    x = torch.where(torch.isfinite(x), x, 0)  # weights too far apart for the dtype
    stays = inside & sized
    return torch.where(stays if bounded is None else stays | ~bounded, z, x)


def _only(mask: Tensor | None, a: Tensor, b: Tensor | float) -> Tensor:
    """a where the mask holds, or everywhere without one; b elsewhere."""
    return a if mask is None else torch.where(mask, a, b)


def _inside(p: float, omega: Tensor, share: Tensor) -> Tensor:
    weighted = omega * share
    # entries above 1 are outside by themselves, and their powers could overflow
    return (weighted.amax(-1, keepdim=True) <= 1) & (
        (weighted.clamp(max=1) ** p).sum(-1, keepdim=True) <= 1
    )


def _ellipsoid(omega: Tensor, share: Tensor, steps: int | None) -> Tensor:
    """share / (1 + μω²) with ‖ω ∘ share / (1 + μω²)‖ = 1.

    Newton on 1/‖·‖, which is concave in μ and nearly straight, climbs to the root from μ = 0.
    """
    square = omega * omega
    mu = torch.zeros_like(share[..., :1])
    tol = 4 * torch.finfo(share.dtype).eps
    largest = (omega * share).amax(-1, keepdim=True).clamp_min(1)
    point = omega * share / largest  # so that squares do not overflow
    for step in range(OUTER if steps is None else steps):
        scaled = point / (1 + mu * square)
        size = or_one(torch.linalg.vector_norm(scaled, dim=-1, keepdim=True))
        slope = dot(scaled * square / (1 + mu * square), scaled).unsqueeze(-1) / size**2
        # 1/‖·‖ − 1 with ‖·‖ = largest · size, over its derivative in μ
        before, mu = mu, (mu + (largest * size - 1) / or_one(slope)).clamp_min(0)
        # rows that are inside stay at μ = 0, whatever the step would be
        if steps is None and step % 2 == 1 and bool(((mu - before).abs() <= tol * (1 + mu)).all()):
            break
    return share / (1 + mu * square)


def _curved(p: float, omega: Tensor, share: Tensor, idle: Tensor, steps: int | None) -> Tensor:
    """y/ω with y + μω² y^(p−1) = ω share and Σ y^p = 1, for 1 < p < ∞, p ≠ 2.

    Newton on ‖y‖^(1−p), which is nearly straight in μ, from μ = 0, within a bracket. Rows that
    are idle need no answer.
    """
    bounded = omega > 0
    finfo = torch.finfo(share.dtype)
    zeta = omega * share  # what y would be without the constraint
    square = omega * omega
    largest = zeta.amax(-1, keepdim=True).clamp_min(1)
    least = torch.where(bounded, square, 1).amin(-1, keepdim=True)
    count = bounded.sum(-1, keepdim=True, dtype=share.dtype).clamp_min(1)
    # y ≤ n^(−1/p) in all entries is enough, and there μω² y^(p−1) ≤ ζ
    high = 2 * (largest / least * count ** ((p - 1) / p)).clamp(max=finfo.max**0.5)
    low = mu = torch.zeros_like(high)
    tol = 4 * finfo.eps * max(1.0, 1 / (p - 1))
    y = zeta
    for step in range(OUTER if steps is None else steps):
        if step > 0:  # at μ = 0 the root is ζ itself
            y = _root(p, mu * square, zeta)
        top = or_one(y.amax(-1, keepdim=True))
        part = torch.where(y > 0, y / top, 1)
        power = torch.where(y > 0, part**p, 0)
        size = power.sum(-1, keepdim=True) ** (1 / p)  # ‖y‖ / top
        low, high = torch.where(top * size > 1, mu, low), torch.where(top * size > 1, high, mu)
        # −y' y^(p−1) = ω² y^(2p−2) / (1 + μ(p−1)ω² y^(p−2)), in units of top
        bend = torch.where(y > 0, square * y.clamp_min(finfo.tiny) ** (p - 2), 0)
        fall = (power * bend / (1 + mu * (p - 1) * bend)).sum(-1, keepdim=True) / size**p
        # Newton for ‖y‖^(1−p) − 1, whose derivative is (p − 1)‖y‖^(1−p) · fall
        rise = torch.expm1((p - 1) * (top * size).log()) / (p - 1)
        newton = mu + rise / fall.clamp_min(finfo.tiny)
        within = (newton >= low) & (newton <= high)
        settled = ((top * size - 1).abs() <= tol) | (high - low <= tol * high) | idle
        mu = torch.where(within, newton, 0.5 * (low + high))
        if steps is None and step % 2 == 1 and bool(settled.all()):
            break
    return torch.where(bounded, y / torch.where(bounded, omega, 1), share)


def _root(p: float, coefficient: Tensor, zeta: Tensor) -> Tensor:
    """The y ≥ 0 with y + c y^(p−1) = ζ.

    In v = y (p ≥ 2) or v = y^(p−1) (p < 2) the left side is convex, and Newton comes down to the
    root from where one of the two terms alone makes ζ.
    """
    exponent = p - 1 if p >= 2 else 1 / (p - 1)
    positive = zeta > 0
    zeta = torch.where(positive, zeta, 1)
    c = coefficient.expand_as(zeta)
    steep, flat = (c, torch.ones_like(c)) if p >= 2 else (torch.ones_like(c), c)
    # v with flat · v = ζ, and v with steep · v^e = ζ
    tiny = torch.finfo(zeta.dtype).tiny
    v = torch.minimum(zeta / flat.clamp_min(tiny), (zeta / steep.clamp_min(tiny)) ** (1 / exponent))
    for _ in range(INNER):
        bent = steep * v ** (exponent - 1)
        v = v - (flat * v + bent * v - zeta) / (flat + exponent * bent)
        v = v.clamp_min(0)
    y = v if p >= 2 else v**exponent
    return torch.where(positive, y, 0)
