"""Leading singular values and vectors of large matrices, without those that do not matter.

Everything grows a subspace around a guess by its residuals (a block Krylov space) and looks at
the matrix through it. That finds singular values from below, so that nobody can be sure to have
seen the largest; `norm_bound` therefore proves its answer by a factorisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.balls.singular import Factors, factors
from dfwlayer.ops.rows import or_one

__all__ = ["LARGE", "low_rank", "norm_bound", "shrunk", "top_pair"]

LARGE = 192  # from this size on a full decomposition takes longer
EXTRA = 6  # directions beside those expected, so that none that matters is missed
EXPANSIONS = 40  # most times a subspace grows


class LowRank(NamedTuple):
    """A matrix as factors and a remainder of the size of rounding."""

    at: Factors
    remainder: Tensor  # (...), Frobenius norm


def low_rank(x: Tensor) -> LowRank | None:  # (..., r, c)
    """The factors of a matrix of low rank, None if its rank is more than a quarter of its size."""
    rounding = 16 * torch.finfo(x.dtype).eps
    size = torch.linalg.matrix_norm(x)
    if not bool(torch.isfinite(size).all()):
        return None
    for count in _counts(x):
        basis = _orthonormal(x @ _random(x, count))
        at = _seen(basis, x.mT @ basis)
        remainder = torch.linalg.matrix_norm(x - at.product(at.values))
        if bool((remainder <= rounding * max(x.shape[-2:]) ** 0.5 * size).all()):
            rank = _rank(at.values, rounding * max(x.shape[-2:]) ** 0.5)
            return LowRank(_first(at, rank), remainder)
    return None


def top_pair(g: Tensor, below: Tensor | None = None) -> Factors:  # (..., r, c)
    """The largest singular value and its vectors, as factors with one column.

    Where the value is below ``below`` (...), or clearly above it, no more than that is found out.
    """
    last = torch.zeros_like(g[..., 0, 0])

    def settled(values: Tensor, residual: Tensor) -> Tensor:
        nonlocal last
        top, error = values[..., 0], residual[..., 0]
        # close to others a singular value settles long before its vectors
        done: Tensor = (top - last).abs() <= 4 * torch.finfo(g.dtype).eps ** 0.7 * top
        last = top
        return done if below is None else done | (top + error < below)

    at = _grown(g, g @ _random(g, 2 * EXTRA), lambda _: 1, settled, EXPANSIONS)
    return _first(factors(g) if at is None else at, 1)


def norm_bound(g: Tensor, guess: Tensor) -> Tensor:  # (..., r, c), (...) -> (...)
    """A number above the largest singular value and, if the guess is good, next to it.

    s is above it where s² − gᵀg has a Cholesky factorisation; the rounding of that is part of s.
    """
    wide = g.double()
    gram = wide.mT @ wide if g.shape[-2] >= g.shape[-1] else wide @ wide.mT
    count = gram.shape[-1]
    rounding = 4 * count * torch.finfo(torch.float64).eps
    eye = torch.eye(count, dtype=torch.float64, device=g.device)
    bound = guess.double()
    for power in range(5):
        bound = guess.double() * (1 + rounding * 300**power)
        _, failed = torch.linalg.cholesky_ex(bound[..., None, None] ** 2 * eye - gram)
        if not bool(failed.any()):
            break
    else:
        bound = torch.linalg.matrix_norm(wide, 2) * (1 + rounding)
    sure: Tensor = bound * (1 + rounding)
    return sure


def shrunk(
    z: Tensor,  # (..., r, c)
    near: Tensor | None,  # (..., r, c)
    project: Callable[[Tensor], Tensor],  # of singular values onto the ℓ1 ball
) -> Factors | None:
    """The projection onto the nuclear ball by the singular values that it does not make zero.

    With a guess the rank of the result is at most a little larger: a step is not worth the time
    that all of the noise in z would take, and a rank that has to grow may do so again in the next
    one. Without a guess it is exact, or None where the singular values that matter are too
    many, or z is inside.

    Args:
        z: The matrix.
        near: A matrix of low rank with similar singular vectors.
        project: What becomes of some of the singular values if the others are not too large.

    """
    if not bool(torch.isfinite(z.sum())):
        return None
    eps = torch.finfo(z.dtype).eps
    tol, rounding = 0.03 * eps**0.5, 16 * eps * max(z.shape[-2:]) ** 0.5
    start, limit = z @ _random(z, 2 * EXTRA), min(z.shape[-2:])
    if near is not None:  # a step need not be exact
        span = _range(near)
        if span is None:
            return None
        rank = span.shape[-1]
        limit = min(limit, rank + max(EXTRA, rank // 4))
        start = torch.cat((span, z @ _random(z, limit - rank + EXTRA)), -1)
        tol = max(tol, 1e-6)

    def kept(values: Tensor) -> int:
        return int((project(values[..., :limit]) > 0).sum(-1).max())

    def settled(values: Tensor, residual: Tensor) -> Tensor:
        some = values[..., :limit]
        new = project(some)
        threshold = (some - new).amax(-1, keepdim=True)
        count = min(residual.shape[-1], some.shape[-1])
        some, new, residual = some[..., :count], new[..., :count], residual[..., :count]
        error = (residual * new / or_one(some)).amax(-1)
        # the first one left out is below the threshold wherever in its range it is
        missed = (new == 0) & (some + residual > threshold + rounding * values[..., :1])
        cut = (new > 0).sum(-1) == limit  # by the rank it may have, which is no exact science
        exact: Tensor = (error <= tol * values[..., 0]) & ~missed.any(-1)
        return exact | cut

    at = _grown(z, start, kept, settled, patience=EXPANSIONS if near is None else 4)
    if at is None:
        return None
    at = _first(at, min(limit, at.values.shape[-1]))
    values = project(at.values)
    if near is None and bool((values == at.values).all(-1).any()):  # nothing was cut off
        return None
    return _first(at._replace(values=values), max(1, int((values > 0).sum(-1).max())))


def _grown(
    z: Tensor,
    start: Tensor,  # (..., r, k)
    wanted: Callable[[Tensor], int],
    settled: Callable[[Tensor, Tensor], Tensor],
    patience: int,
) -> Factors | None:
    """Ritz values and vectors from a subspace that grows until they are settled.

    ``wanted`` tells from the Ritz values how many of them matter, ``settled`` from them and the
    residuals of those and a few more whether that is all. None where it takes too many; with
    less than all patience what there is in the end will do.
    """
    most = max(4 * EXTRA, min(z.shape[-2:]) // 2)
    basis = _orthonormal(start)
    image = z.mT @ basis
    for step in range(patience):
        if basis.shape[-1] > most and patience == EXPANSIONS:
            return None
        at = _seen(basis, image)
        number = wanted(at.values)
        count = min(number + EXTRA, at.values.shape[-1])
        head = _first(at, count)
        residual = z @ head.right - head.left * head.values.unsqueeze(-2)
        length = torch.linalg.vector_norm(residual, dim=-2)
        if number < count and bool(settled(at.values, length).all()):
            return at
        if step == patience - 1 < EXPANSIONS - 1:
            return at
        more = _beside(basis, residual / or_one(length).unsqueeze(-2))
        basis, image = torch.cat((basis, more), -1), torch.cat((image, z.mT @ more), -1)
    return None


def _seen(basis: Tensor, image: Tensor) -> Factors:  # (..., r, k), (..., c, k)
    """The factors of the part of z in the span of orthonormal columns, whose image is zᵀ·basis."""
    right, triangle = torch.linalg.qr(image)
    small_right, values, small_left = torch.linalg.svd(triangle, full_matrices=False)
    return Factors(basis @ small_left.mT, values, right @ small_right)


def _beside(basis: Tensor, more: Tensor) -> Tensor:
    """Orthonormal columns beside the basis that add what is new, which may be next to nothing."""
    for _ in range(2):
        more = _orthonormal(more - basis @ (basis.mT @ more))
    return more - basis @ (basis.mT @ more)


def _range(x: Tensor) -> Tensor | None:
    """Orthonormal columns that span x, None if there are more than a quarter of its size."""
    rounding = 16 * torch.finfo(x.dtype).eps * max(x.shape[-2:]) ** 0.5
    for count in _counts(x):
        basis, triangle = torch.linalg.qr(x @ _random(x, count))
        rank = _rank(torch.diagonal(triangle, dim1=-2, dim2=-1).abs(), rounding)
        if rank < count:
            span: Tensor = basis[..., :rank]
            return span
    return None


def _counts(x: Tensor) -> list[int]:
    """Sizes of a sketch, from small to a quarter of the matrix."""
    most = min(x.shape[-2:]) // 4
    return [min(24 * 2**k, most) for k in range(12) if 12 * 2**k < most]


def _rank(values: Tensor, rounding: float) -> int:
    """How many of the singular values are more than rounding, and at least one."""
    return max(1, int((values > rounding * values.amax(-1, keepdim=True)).sum(-1).max()))


def _first(at: Factors, count: int) -> Factors:
    return Factors(at.left[..., :count], at.values[..., :count], at.right[..., :count])


def _orthonormal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns)[0]
    return basis


def _random(like: Tensor, count: int) -> Tensor:  # (..., r, c) -> (c, count)
    """The same numbers every time, so that results can be repeated."""
    generator = torch.Generator().manual_seed(like.shape[-1])
    numbers = torch.randn(like.shape[-1], count, generator=generator, dtype=torch.float64)
    return numbers.to(like)
