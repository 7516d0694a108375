"""A quadratic problem over a weighted ℓ2 ball, from start to certificate, compiled.

The solution inside of the ball is that without it. On the boundary it is x(λ) with
(P + λW²) x = −q for the λ > 0 at which ‖Wx‖ = t. Newton's method on 1/‖Wx‖ = 1/t finds it from
below, with one Cholesky factor for each λ (Moré and Sorensen, 1983).

Without a P and with one weight w for all coordinates it is z = −q times min(1, t/‖wz‖), and all
else follows in a few passes over the coordinates: λ = (‖wz‖/t − 1)/w², and for the gradient, with
a = w²x/t, ν = ⟨a, v⟩/⟨a, a⟩ and u = (v − νa)/(1 + λw²).
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, LARGEST, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    add,
    copy,
    dot,
    entry,
    factor,
    forward,
    kernel,
    product,
    solve_with,
    summing,
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.norms import length_of, over_ball, settle
from dfwlayer.engines.compiled.kernels.numbers import (
    DEFINITE,
    NEITHER,
    asked,
    bound_of,
    own,
    proven,
    symmetric,
)

__all__ = ["adjoint", "search"]

MOST = 60  # values of λ; about six are needed
CLOSE = 1.01  # times the radius, within which x is to have all its digits
NEAR = 0.99  # of the radius, where a start is taken to be on the boundary
FAINT = 1e-10  # times the curvature of f, a first λ where f alone has flat directions
SETTLED = 2.0**-10  # relative change of λ from which on those that do not shrink are rounding


@kernel
def _factorised(P, weight, multiplier, L):
    """L with LLᵀ = P + λW², False if that is singular; nothing is needed for P = 1."""
    n = len(P)
    for i in range(n):
        for j in range(i + 1):
            L[i, j] = P[i, j]
        L[i, i] += multiplier * weight[i] * weight[i]
    return factor(L, n)


@kernel
def _inverse(P, weight, multiplier, L, z):
    """(P + λW²)⁻¹ z, in the place of z."""
    n = len(z)
    if len(P) > 0:
        solve_with(L, z, n)
    else:
        for i in range(n):
            z[i] /= 1 + multiplier * weight[i] * weight[i]


@kernel
def _steepness(P, weight, multiplier, L, z):
    """zᵀ (P + λW²)⁻¹ z = ‖L⁻¹z‖², at the price of z."""
    n, total = len(z), 0.0
    if len(P) > 0:
        forward(L, z, n)
        return dot(z, z, n)
    for i in range(n):
        total += z[i] * z[i] / (1 + multiplier * weight[i] * weight[i])
    return total


@kernel
def _first(P, q, weight, radius, start, z):
    """The λ for which a start on the boundary would be the solution, 0 for any other start.

    Without a P, one that is not too large, and right for weights that are all the same.
    """
    if len(P) == 0:
        heaviest = 0.0
        for i in range(len(q)):
            heaviest = max(heaviest, weight[i])
        return max(length_of(weight, q) / radius - 1, 0.0) / (heaviest * heaviest)
    if not length_of(weight, start) > NEAR * radius:
        return 0.0
    product(P, start, z)
    along = across = 0.0
    for i in range(len(q)):
        along -= (z[i] + q[i]) * start[i]
        across += (weight[i] * start[i]) ** 2
    return max(along / across, 0.0)


@kernel
def _secular(P, q, A, b, weight, radius, start, x, z, L, known):
    """x, the multiplier λ and how many factors it took, negative for why it was not found.

    L may be ``known`` as the factor of P.
    """
    n = len(q)
    at = _first(P, q, weight, radius, start, z)
    warm, last = at > 0, np.inf
    for trial in range(MOST):
        known = known and at == 0
        if not known and not _factorised(P, weight, at, L):
            if at > 0:
                return 0.0, -outcome.LOST
            # P alone is singular: begin with a λ that is next to nothing
            for i in range(n):
                at = max(at, FAINT * P[i, i] / (weight[i] * weight[i]))
            continue
        for i in range(n):
            x[i] = -q[i]
        _inverse(P, weight, at, L, x)
        size = length_of(weight, x)
        # one step of refinement, so that λ is found to the last digits; not on the way to it. That
        # Aᵀ(Ax − b) is not formed by AᵀA gives digits that P has lost
        if size < CLOSE * radius:
            value_and_gradient(P, q, A, b, x, z)
            for i in range(n):
                z[i] = -(z[i] + at * weight[i] * weight[i] * x[i])
            _inverse(P, weight, at, L, z)
            add(x, 1.0, z, n)
            size = length_of(weight, x)
        if at == 0:
            if size < radius * (1 - CLEAR * ROUNDING * DOUBLE):
                return 0.0, 1
            if size < radius * (1 + CLEAR * ROUNDING * DOUBLE):
                return 0.0, -outcome.DOUBTED
        # an ill-conditioned P leaves fewer digits of x, and of its length: λ is as good as it gets
        settled = last <= SETTLED * at
        if size < radius * (1 - CLEAR * DOUBLE) and not warm and not settled:
            return 0.0, -outcome.LOST  # it is approached from above
        if abs(size - radius) <= 4 * DOUBLE * radius:
            return at, trial + 1
        for i in range(n):
            z[i] = weight[i] * weight[i] * x[i]
        new = at + (size / _steepness(P, weight, at, L, z)) * size * ((size - radius) / radius)
        if not new > 0:
            if not warm:
                return 0.0, -outcome.LOST
            warm, at, last = False, 0.0, np.inf  # the start was no good one
            continue
        change = abs(new - at)
        if change <= 2 * DOUBLE * at or (settled and change >= 0.5 * last):
            return at, trial + 1
        at, last = new, change
    return 0.0, -outcome.LOST


@kernel
def _even(weight):
    """The weight of all coordinates, 0 if they have several."""
    for i in range(len(weight)):
        if weight[i] != weight[0]:
            return 0.0
    return weight[0]


@kernel
def _nearest(q, w, radius, x):
    """The same as `_located` for one weight and no P; 0 for numbers that are not for this."""
    square = dot(q, q, len(q))
    if not square < LARGEST:
        return 0.0, 0
    size, at, shrink = w * np.sqrt(square), 0.0, 1.0
    if not size < radius * (1 - CLEAR * ROUNDING * DOUBLE):
        pull = size / radius - 1  # λw², a force that is one if it is clear of rounding
        if not pull > CLEAR * ROUNDING * DOUBLE * (size / radius + 1):
            return 0.0, -outcome.DOUBTED
        at, shrink = pull / (w * w), radius / size
    for i in range(len(q)):
        x[i] = -shrink * q[i]
    return at, 1


@kernel
def _located(P, q, A, b, weight, radius, start, x, z, L, known):
    """See `_secular`, with a force that is one."""
    bound = bound_of(P)
    if bound == 0:
        return 0.0, -outcome.UNFIT
    at, taken = _secular(P, q, A, b, weight, radius, start, x, z, L, known)
    noise = widest = pull = 0.0
    for i in range(len(q)):
        noise = max(noise, abs(q[i]))
        widest = max(widest, abs(x[i]))
    noise = ROUNDING * DOUBLE * (noise + bound * widest)
    for i in range(len(q)):
        pull = max(pull, at * weight[i] * weight[i] * abs(x[i]))
    if at > 0 and not pull > CLEAR * noise:
        return at, -outcome.DOUBTED
    return at, taken


@kernel
def _certificate(P, q, A, b, weight, radius, x, g):
    """f, and its gap ⟨g, x⟩ + t ‖W⁻¹g‖."""
    total = value_and_gradient(P, q, A, b, x, g)
    along = terms = dual = 0.0
    for i in range(len(q)):
        along += g[i] * x[i]
        terms += abs(g[i] * x[i])
        dual += (g[i] / weight[i]) ** 2
    return total, max(along + radius * np.sqrt(dual), 0.0) + 2 * DOUBLE * terms


@summing
def _certificate_nearby(q, w, radius, x):
    """The same for one weight and no P, in one pass."""
    total = along = terms = steep = 0.0
    for i in range(len(q)):
        g = x[i] + q[i]
        total += x[i] * (0.5 * x[i] + q[i])
        along += g * x[i]
        terms += abs(g * x[i])
        steep += g * g
    return total, max(along + radius * np.sqrt(steep) / w, 0.0) + 2 * DOUBLE * terms


@kernel
def _pulled(x, v, w, radius, multiplier, u):
    """u and ν for one weight and no P."""
    push = dot(x, v, len(x)) / dot(x, x, len(x)) if multiplier > 0 else 0.0  # νw²/t
    bend = 1 + multiplier * w * w
    for i in range(len(x)):
        u[i] = (v[i] - push * x[i]) / bend
    return push * radius / (w * w)


@kernel
def _search(
    first, end, P, q, A, rhs, weights, radii, start, eps, tol, most,
    x, values, codes, multipliers, memory,
):  # fmt: skip
    """See `search` below."""
    L, S, z, g = memory
    dense, even = P.shape[1] > 0, -1.0
    for b in range(first, end):
        codes[0, b] = outcome.UNFIT
        fit, own_P, own_q, weight, radius = over_ball(b, P, q, A, weights, radii, eps, L, S)
        if fit == NEITHER:
            continue
        point, taken, multiplier = x[b], 0, 0.0
        if not dense and (even < 0 or len(weights) > 1):
            even = _even(weight)
        if even > 0:
            multiplier, taken = _nearest(own_q, even, radius, point)
        nearby = taken != 0
        own_A, own_b = A[own(b, A)], rhs[own(b, rhs)]
        if not nearby:
            begin = start[own(b, start)]
            given = own_P, own_q, own_A, own_b, weight, radius, begin
            multiplier, taken = _located(*given, point, z, L, fit == DEFINITE)
        if taken < 0 or taken > most:
            codes[0, b] = -taken if taken < 0 else outcome.LOST
            continue
        if not settle(weight, radius, 2.0, point, eps, multiplier > 0):
            codes[0, b] = outcome.UNSETTLED
            continue
        if nearby:
            total, gap = _certificate_nearby(own_q, even, radius, point)
        else:
            total, gap = _certificate(own_P, own_q, own_A, own_b, weight, radius, point, g)
        if not proven(total, gap, tol, eps):
            codes[0, b] = outcome.UNPROVEN
            continue
        multipliers[b, 0] = multiplier
        values[0, b], values[1, b] = total, gap
        codes[0, b], codes[1, b] = outcome.SOLVED, taken if dense else 1


@kernel
def _adjoint(first, end, P, weights, radii, eps, x, codes, multipliers, v, u, nu, memory):
    """See `adjoint` below."""
    L, S, normal = memory
    n, even = x.shape[1], -1.0
    for b in range(first, end):
        if not asked(b, codes, v, u, nu):
            continue
        out = u[b]
        weight = weights[own(b, weights)]
        radius = radii[own(b, radii), 0]
        if P.shape[1] == 0:
            if even < 0 or len(weights) > 1:
                even = _even(weight)
            if even > 0:
                nu[b, 0] = _pulled(x[b], v[b], even, radius, multipliers[b, 0], out)
                continue
        own_P, _ = symmetric(P[own(b, P)], eps, S)
        if not _factorised(own_P, weight, multipliers[b, 0], L):
            continue
        copy(v[b], out)
        _inverse(own_P, weight, multipliers[b, 0], L, out)
        if multipliers[b, 0] > 0:
            for i in range(n):
                normal[i] = weight[i] * weight[i] * x[b, i] / radius
            along = dot(normal, out, n)
            across = 0.0
            _inverse(own_P, weight, multipliers[b, 0], L, normal)
            for i in range(n):
                across += normal[i] * weight[i] * weight[i] * x[b, i] / radius
            nu[b, 0] = along / across
            add(out, -nu[b, 0], normal, n)


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first, end, P, q, A, rhs, weights, radii, start, eps, tol, most,
        x, values, codes, multipliers,
    ):  # fmt: skip
        """Solve problems first … end − 1; see `kernels` for the arguments."""
        _ = stamp
        n, size = x.shape[1], P.shape[1]
        memory = np.empty((size, size)), np.empty((size, size)), np.empty(n), np.empty(n)
        _search(
            first, end, P, q, A, rhs, weights, radii, start, eps, tol, most, x, values, codes,
            multipliers, memory,
        )  # fmt: skip

    @entry
    def adjoint(first, end, P, weights, radii, eps, x, codes, multipliers, v, u, nu):
        """(P + λW²) u + νa = v and ⟨a, u⟩ = 0 with a = W²x/t, where that holds x."""
        _ = stamp
        n, size = x.shape[1], P.shape[1]
        memory = np.empty((size, size)), np.empty((size, size)), np.empty(n)
        _adjoint(first, end, P, weights, radii, eps, x, codes, multipliers, v, u, nu, memory)

    return search, adjoint


search, adjoint = _on_disk(STAMP)
