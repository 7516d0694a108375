"""Triton kernels for CUDA: the vector work of an inner loop in one launch instead of dozens.

Each kernel does what the same formulas in ``linalg``, ``constraints.balls.lp_projection`` and
``methods.phases`` do, and never waits for the host, so that a loop of them can be captured in a
CUDA graph. What is changed in place is contiguous and shares memory with nothing else.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from dfwlayer.ops.kernels.common import (
    EPS,
    cells,
    each,
    entries,
    is_wide,
    jit,
    larger,
    launch,
    least_eta,
    pull_most,
    quotient_of,
    row_sum,
    row_sums,
    settled_eta,
    smaller,
    weight_cells,
)

with suppress(ImportError):
    import triton.language as tl

__all__ = ["cg_update", "observe", "project_l1", "step_l1"]

CEILING = {dtype: 0.25 * torch.finfo(dtype).max for dtype in EPS}  # of |z|/ω


def cg_update(
    product: Tensor,  # ∇²f d, (B, n)
    direction: Tensor,  # d, changed
    residual: Tensor,  # changed
    u: Tensor,  # changed
    free: Tensor,  # 1 for a free coordinate, 0 for another
    unit: Tensor,  # unit normal of the face, 0 if it has none
    rho: Tensor,  # ⟨residual, residual⟩, (B, 1), changed
    target: Tensor,  # the ρ that will do
    length: Tensor,  # ⟨d, d⟩, changed
    going: Tensor,  # mask, changed
    steepest: Tensor,  # changed
    flattest: Tensor,  # changed
    flat: Tensor,  # mask, changed
    steps: Tensor,  # changed
    cap: Tensor,  # most steps of each problem
    step: int = -1,
) -> None:
    """Everything after the product in a step of ``conjugate_gradient``, without preconditioner.

    A problem that is not going, or stops at this step for want of curvature, keeps its vectors,
    ρ and ⟨d, d⟩. ``step`` is compared with the cap; without it the steps that the problem has
    taken are, which is the same where they are counted from 0 and also right in a CUDA graph that
    is replayed.
    """
    product, free, unit = product.contiguous(), free.contiguous(), unit.contiguous()
    vectors = (product, direction, residual, u, free, unit)
    numbers = (rho, target, length, going, steepest, flattest, flat, steps, cap)
    constants = {"EPS": EPS[direction.dtype], "WIDE": is_wide(direction)}
    launch(_cg_update, direction, (*vectors, *numbers, step), constants)


def project_l1(z: Tensor, omega: Tensor, inverse: Tensor, length: Tensor) -> Tensor:
    """Projection of z (B, n) onto Σ ω|x| ≤ t; see ``lp_projection.project_l1``.

    Args:
        z: (B, n) or (n,).
        omega: ω in (0, 1], of shape (n,), (B, n), (B, 1) or (1,).
        inverse: 1/ω, of the same shape.
        length: t, (1,) or (B, 1).

    """
    return _project(z.contiguous(), None, None, omega, inverse, length)


def step_l1(
    x: Tensor, gradient: Tensor, alpha: Tensor, omega: Tensor, inverse: Tensor, length: Tensor
) -> Tensor:
    """Projection of x − gradient/α, or of x where α ≤ 0, onto Σ ω|x| ≤ t."""
    return _project(x.contiguous(), gradient.contiguous(), alpha, omega, inverse, length)


def observe(
    x: Tensor,  # (B, n)
    gradient: Tensor,  # at x
    trial: Tensor,  # where the step led
    slope: Tensor,  # gradient there
    alpha: Tensor,  # (B, 1), changed
    steepest: Tensor,  # changed
    flattest: Tensor,  # changed
    bent_down: Tensor,  # mask, changed
    rounding: Tensor,  # of ⟨d, ∇f(x + d) − ∇f(x)⟩ for a d of length one
    *,
    blur: float,  # rounding of a curvature, relative to the steepest
) -> None:
    """Take note of the curvature along a step of ``Spectral`` and choose the next α."""
    x, gradient, trial, slope = (v.contiguous() for v in (x, gradient, trial, slope))
    numbers = (alpha, steepest, flattest, bent_down, rounding)
    launch(_observe, x, (x, gradient, trial, slope, *numbers, blur), {})


def _project(
    x: Tensor,
    gradient: Tensor | None,
    alpha: Tensor | None,
    omega: Tensor,
    inverse: Tensor,
    length: Tensor,
) -> Tensor:
    out = torch.empty_like(x)
    columns = omega.shape[-1]
    weight_stride = columns if omega.numel() > columns else 0
    length_stride = 1 if length.numel() > 1 else 0
    launch(
        _project_l1,
        x,
        (x, gradient, alpha, omega, inverse, length, out, weight_stride, length_stride),
        {"WEIGHTED": columns > 1, "CEILING": CEILING[x.dtype], "WIDE": is_wide(x)},
    )
    return out


@jit
def _cg_update(
    product: tl.tensor,
    direction: tl.tensor,
    residual: tl.tensor,
    u: tl.tensor,
    free: tl.tensor,
    unit: tl.tensor,
    rho: tl.tensor,
    target: tl.tensor,
    length: tl.tensor,
    going: tl.tensor,
    steepest: tl.tensor,
    flattest: tl.tensor,
    flat: tl.tensor,
    steps: tl.tensor,
    cap: tl.tensor,
    step: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    EPS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, _, here, cell, at = cells(rows, n, ROWS, BLOCK)
    p = entries(product, at, cell)
    d = entries(direction, at, cell)
    if not WIDE:  # loads that nobody waits for yet
        r = entries(residual, at, cell)
        point = entries(u, at, cell)
        open_ = entries(free, at, cell)
        a = entries(unit, at, cell)
    on, lost = each(going, row, here), each(flat, row, here)
    square, enough, size = each(rho, row, here), each(target, row, here), each(length, row, here)
    top, low = each(steepest, row, here), each(flattest, row, here)
    taken, most = each(steps, row, here), each(cap, row, here)

    on = on & (square > enough) & (tl.where(step < 0, taken, step) < most)
    curvature = row_sum(d * p)
    quotient = quotient_of(curvature, size)
    top = larger(top, tl.abs(quotient))
    least = EPS * top * size
    tl.store(steepest + row, top, mask=here)
    tl.store(flattest + row, smaller(low, quotient), mask=here & on)
    tl.store(steps + row, taken + 1, mask=here & on)
    tl.store(flat + row, lost | (on & (curvature <= least)), mask=here)
    on = on & (curvature > least)
    tl.store(going + row, on, mask=here)

    alpha = tl.where(on, quotient_of(square, curvature), 0.0)
    if WIDE:  # held in registers from the start, so many entries would be spilled
        p = entries(product, at, cell)
        r = entries(residual, at, cell)
        open_ = entries(free, at, cell)
        a = entries(unit, at, cell)
    r = (r - alpha * p) * open_
    r = r - a * row_sum(a * r)
    following = row_sum(r * r)
    beta = quotient_of(following, square)
    moved = cell & on
    if WIDE:
        d = entries(direction, at, cell)
        point = entries(u, at, cell)
    tl.store(u + at, point + alpha * d, mask=moved)
    tl.store(residual + at, r, mask=moved)
    tl.store(direction + at, r + beta * d, mask=moved)
    tl.store(length + row, following + beta * beta * size, mask=here & on)
    tl.store(rho + row, following, mask=here & on)


@jit
def _project_l1(
    x: tl.tensor,
    gradient: tl.tensor,
    alpha: tl.tensor,
    omega: tl.tensor,
    inverse: tl.tensor,
    length: tl.tensor,
    out: tl.tensor,
    weight_stride: tl.tensor,
    length_stride: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    WEIGHTED: tl.constexpr,
    CEILING: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, column, here, cell, at = cells(rows, n, ROWS, BLOCK)
    z = entries(x, at, cell)
    weights, weighed = weight_cells(row, column, here, cell, weight_stride, WEIGHTED)
    w = tl.load(omega + weights, mask=weighed, other=1.0)
    steepness = tl.load(inverse + weights, mask=weighed, other=1.0)
    t = tl.load(length + row * length_stride, mask=here, other=0.0).to(tl.float64)
    support = z != 0
    if gradient is not None:
        slope = entries(gradient, at, cell)
        steep = each(alpha, row, here)
        z = z - slope * quotient_of(1.0, steep)
    if WIDE:  # the registers are needed for the loop
        tl.store(out + at, z, mask=cell)

    # sums in double precision: in float32 they would cost the result a digit
    size = tl.abs(z)
    wide = w.to(tl.float64)
    pull = smaller(size * steepness, CEILING)
    square = tl.where(cell, tl.maximum(wide * wide, 2.0**-1022), 0.0)
    weight, largest, lead = tl.reduce(
        (wide * size.to(tl.float64), pull, square), 1, pull_most, keep_dims=True
    )
    # threads may round the sum differently; on the boundary they have to agree all the same
    outside = (weight <= t) == 0  # also where the sum is not a number
    inside = tl.max(tl.where(cell, outside.to(tl.int32), 0), axis=1, keep_dims=True) == 0
    delta = (largest - pull).to(tl.float64)

    # from the η of the entry that pulls most, so that no sum leaves the range, or from that of
    # the support of x, which is often the right one
    eta = tl.where(inside, 0.0, quotient_of(t, lead))
    if gradient is not None:
        eta = tl.minimum(eta, least_eta(support, square, delta, t, eta))
    eta = settled_eta(eta, square, delta, t)

    eta = tl.where(weight == weight, eta, weight)  # NaN if z is
    if WIDE:
        tl.debug_barrier()  # other threads may have written what this one reads
        z = entries(out, at, cell)
        wide = tl.load(omega + weights, mask=weighed, other=1.0).to(tl.float64)
    moved = larger(eta - delta, 0.0) * wide
    moved = tl.where(z < 0, -moved, moved).to(z.dtype)
    tl.store(out + at, tl.where(inside, z, moved), mask=cell)


@jit
def _observe(
    x: tl.tensor,
    gradient: tl.tensor,
    trial: tl.tensor,
    slope: tl.tensor,
    alpha: tl.tensor,
    steepest: tl.tensor,
    flattest: tl.tensor,
    bent_down: tl.tensor,
    rounding: tl.tensor,
    blur: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, _, here, cell, at = cells(rows, n, ROWS, BLOCK)
    old = entries(x, at, cell)
    new = entries(trial, at, cell)
    old_slope = entries(gradient, at, cell)
    new_slope = entries(slope, at, cell)
    top, low = each(steepest, row, here), each(flattest, row, here)
    steep, bent, error = (
        each(alpha, row, here),
        each(bent_down, row, here),
        each(rounding, row, here),
    )

    d = new - old
    square, curvature = row_sums(d * d, d * (new_slope - old_slope))
    error = error * tl.sqrt(square) + blur * top * square
    met = quotient_of(curvature, square)
    sure = here & (curvature > error)
    tl.store(bent_down + row, bent | (curvature < -error), mask=here)
    tl.store(steepest + row, larger(top, met), mask=sure)
    tl.store(flattest + row, smaller(low, met), mask=sure)
    tl.store(alpha + row, larger(met, 0.1 * steep), mask=here & (square > 0))
