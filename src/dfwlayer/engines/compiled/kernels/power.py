"""A quadratic problem over a weighted ℓp ball, 1 < p < ∞, from start to certificate, compiled.

In v = Wx/t the ball is Σ |v_i|^p ≤ 1, and f is ½ vᵀSv + rᵀv. On its boundary, with
s = sign(v)|v|^(p−1),

    S v + r + μ s = 0,  ⟨s, v⟩ = 1,  μ > 0.

Of v and s, one is a smooth function of the other: s of v for p ≥ 2, v of s below. So the unknown a
is v there and s here, the other one is sign(a)|a|^m with m = p − 1 or 1/(p − 1), at least 1, and
Newton's method works on (a, μ). A few spectral projected gradient steps bring it near.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, LARGEST, ROUNDING, SMALLEST
from dfwlayer.engines.compiled.kernels.curved import (
    BEND,
    LINES,
    ROOT,
    SLOPE,
    A,
    D,
    F,
    R,
    V,
    X,
    Y,
    Z,
    curves,
    descend,
    factorised,
    inside,
    inverse,
)
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    add,
    copy,
    entry,
    fill,
    kernel,
    making,
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.norms import over_ball, settle, size_of
from dfwlayer.engines.compiled.kernels.numbers import NEITHER, asked, own, proven, symmetric

__all__ = ["adjoint", "search"]


@kernel
def _prepare(P, q, weight, radius, S, work):
    """S and r, and a bound of ‖S‖, 0 where that is too small or too large for this code."""
    n = len(q)
    bound = 0.0
    for i in range(n):
        work[R, i] = q[i] * radius / weight[i]
        work[D, i] = (radius / weight[i]) ** 2
    for i in range(n):
        total = 0.0 if len(P) > 0 else work[D, i]
        for j in range(len(P)):
            S[i, j] = P[i, j] * (radius / weight[i]) * (radius / weight[j])
            total += abs(S[i, j])
        bound = total if not total <= bound else bound  # keeps a NaN
    return bound if SMALLEST < bound < LARGEST else 0.0


@making
def _memory(n, dense):
    """S, the factor of a matrix of its size, P made symmetric, lines of memory for one problem."""
    size = n if dense else 0
    matrices = np.empty((size, size)), np.empty((size, size)), np.empty((size, size))
    return *matrices, np.empty((LINES, n))


@kernel
def _search(
    first, end, p, P, q, A_, rhs, weights, radii, start, eps, tol, most,
    x, values, codes, multipliers, unknowns, memory,
):  # fmt: skip
    """See `search` below."""
    S, L, own_room, work = memory
    n, low = x.shape[1], p < 2
    m = 1 / (p - 1) if low else p - 1
    for b in range(first, end):
        codes[0, b] = outcome.UNFIT
        fit, own_P, own_q, weight, radius = over_ball(b, P, q, A_, weights, radii, eps, L, own_room)
        bound = _prepare(own_P, own_q, weight, radius, S, work) if fit != NEITHER else 0.0
        if bound == 0:
            continue
        point, scale = x[b], bound
        for i in range(n):
            scale = max(scale, abs(work[R, i]))
        multiplier, taken = 0.0, 1
        there = inside(S, work, p, L)
        if there < 0:
            codes[0, b] = outcome.DOUBTED
            continue
        if there == 0:
            for i in range(n):
                begin = start[own(b, start), i] * weight[i] / radius
                work[X, i] = begin if abs(begin) < LARGEST else 0.0
            multiplier, taken = descend(S, work, m, low, p, bound, scale, most, L)
            if taken < 0 or taken > most:
                codes[0, b] = outcome.LOST
                continue
            curves(work, m, low)
            if not multiplier > CLEAR * ROUNDING * DOUBLE * scale:
                codes[0, b] = outcome.DOUBTED
                continue
        for i in range(n):
            point[i] = work[V, i] * radius / weight[i]
            unknowns[b, i] = work[A, i] if multiplier > 0 else 0.0
        if not settle(weight, radius, p, point, eps, multiplier > 0):
            codes[0, b] = outcome.UNSETTLED
            continue
        g = work[F]
        own_A, own_b = A_[own(b, A_)], rhs[own(b, rhs)]
        total = value_and_gradient(own_P, own_q, own_A, own_b, point, g)
        along = terms = 0.0
        for i in range(n):
            along += g[i] * point[i]
            terms += abs(g[i] * point[i])
            work[Z, i], work[Y, i] = g[i], 1 / weight[i]
        # ⟨g, x⟩ + t ‖W⁻¹g‖ in the dual norm, with the rounding of powers
        dual = radius * size_of(work[Y], work[Z], p / (p - 1))
        gap = max(along + dual, 0.0) + 2 * DOUBLE * terms + ROUNDING * DOUBLE * dual
        if not proven(total, gap, tol, eps):
            codes[0, b] = outcome.UNPROVEN
            continue
        multipliers[b, 0] = multiplier
        values[0, b], values[1, b] = total, gap
        codes[0, b], codes[1, b] = outcome.SOLVED, taken


@kernel
def _adjoint(first, end, p, P, weights, radii, eps, codes, multipliers, unknowns, v, u, nu, memory):
    """See `adjoint` below."""
    S, L, own_room, work = memory
    n, low = v.shape[1], p < 2
    m = 1 / (p - 1) if low else p - 1
    for b in range(first, end):
        if not asked(b, codes, v, u, nu):
            continue
        out = u[b]
        weight, multiplier = weights[own(b, weights)], multipliers[b, 0]
        radius = radii[own(b, radii), 0]
        own_P, _ = symmetric(P[own(b, P)], eps, own_room)
        _prepare(own_P, v[b], weight, radius, S, work)
        copy(unknowns[b], work[A])
        curves(work, m, low)
        if multiplier == 0:
            fill(1.0, work[ROOT])
        root, s, y, z = work[ROOT], work[SLOPE], work[Y], work[Z]
        if not factorised(S, work[D], root, work[BEND], multiplier, L, work[X]):
            continue
        for i in range(n):
            y[i], z[i] = root[i] * work[R, i], root[i] * s[i]
        inverse(S, L, work[X], y)
        if multiplier > 0:
            inverse(S, L, work[X], z)
            along = across = 0.0
            for i in range(n):
                along += root[i] * s[i] * y[i]
                across += root[i] * s[i] * z[i]
            nu[b, 0] = along / across / radius
            add(y, -along / across, z, n)
        for i in range(n):
            out[i] = root[i] * y[i] * radius / weight[i]


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first, end, p, P, q, A_, rhs, weights, radii, start, eps, tol, most,
        x, values, codes, multipliers, unknowns,
    ):  # fmt: skip
        """Solve problems first … end − 1; see `kernels`. Multipliers are μ, ``unknowns`` a."""
        _ = stamp
        memory = _memory(x.shape[1], P.shape[1] > 0)
        _search(
            first, end, p, P, q, A_, rhs, weights, radii, start, eps, tol, most, x, values, codes,
            multipliers, unknowns, memory,
        )  # fmt: skip

    @entry
    def adjoint(first, end, p, P, weights, radii, eps, codes, multipliers, unknowns, v, u, nu):
        """(P + λ∇²h) u + ν∇h = v and ⟨∇h, u⟩ = 0 with h = ‖Wx‖_p, where that holds x."""
        _ = stamp
        memory = _memory(v.shape[1], P.shape[1] > 0)
        _adjoint(
            first, end, p, P, weights, radii, eps, codes, multipliers, unknowns, v, u, nu, memory,
        )  # fmt: skip

    return search, adjoint


search, adjoint = _on_disk(STAMP)
