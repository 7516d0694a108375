"""A quadratic problem over a set in normal form, from start to certificate, compiled.

The method is that of `dfwlayer.methods.projected_newton` in small: a few spectral projected
gradient steps show which coordinates are held, a Cholesky factor of what is free gives the
minimiser on that face exactly, and the multipliers there say whether it is the solution. Answers
are given only where that is beyond doubt: every multiplier and every slack is clear of rounding,
the point is feasible as it is rounded, and the gap is below the tolerance. Everything else is left
to the tensor operations, which have the patience and the rules for it.

How the set of a problem is laid out is said in `dfwlayer.engines.compiled.kernels.table`.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome, table
from dfwlayer.engines.compiled.kernels.certificate import gap_of, relaxed_gap, settle
from dfwlayer.engines.compiled.kernels.constants import DOUBLE, LARGEST, SMALLEST
from dfwlayer.engines.compiled.kernels.dense import (
    STAMP,
    absolute,
    copy,
    entry,
    fill,
    kernel,
    making,
    product,
    value_and_gradient,
)
from dfwlayer.engines.compiled.kernels.descent import descend
from dfwlayer.engines.compiled.kernels.faces import (
    FOUND,
    GUESS,
    LINES,
    NORMALS,
    PY,
    SHARES,
    SHORT,
    SIDES,
    WAY,
    X,
    Y,
    Z,
    factor_on,
    has_shares,
    holds,
    is_tied,
    iterates,
    prepare,
    slope,
    solve,
)
from dfwlayer.engines.compiled.kernels.numbers import NEITHER, asked, own, proven, sane, symmetric
from dfwlayer.engines.compiled.kernels.polytope import sound

__all__ = ["adjoint", "fit", "search"]


@kernel
def fit(body, blocks, P, q, start):
    """A bound of ‖P‖ if all numbers are such that this code may be used on them, otherwise 0."""
    n = len(q)
    bound = largest = 0.0
    for i in range(len(P)):
        total = absolute(P[i], n)
        largest = max(largest, P[i, i])
        bound = total if not total <= bound else bound  # keeps a NaN
    if len(P) == 0:
        bound = largest = 1.0
    if not (SMALLEST < bound < LARGEST and largest > 0):
        return 0.0
    for i in range(n):
        if not (abs(q[i]) < LARGEST and abs(start[i]) < LARGEST):
            return 0.0
    return bound if sound(body, blocks) else 0.0


@making
def _memory(n, k, dense, factors, orders):
    """For one problem, see `faces`: two tables, the Schur complement, integers, L, and P's room."""
    size = n if dense else 0
    tables = np.empty((NORMALS + 2 * k, n)), np.empty((LINES, k))
    L = factors[0] if len(factors) > 0 else np.empty((size, size))
    index = orders[0] if len(factors) > 0 else np.empty(n + k, np.int64)
    return *tables, np.empty((k, k)), index, L, np.empty((size, size))


@kernel
def _search(
    first, end, P, q, A, rhs, bodies, blocks, start, eps, tol, most,
    x, values, codes, places, sides, multipliers, memory,
):  # fmt: skip
    """See `search` below."""
    work, ties, schur, index, L, S = memory
    n, dense = x.shape[1], P.shape[1] > 0
    g, guess = work[Z], ties[GUESS]
    for b in range(first, end):
        codes[0, b] = outcome.UNFIT
        own_q, body = q[own(b, q)], bodies[own(b, bodies)]
        own_P, alike = symmetric(P[own(b, P)], eps, S)
        if dense and (not alike or sane(own_P, A, eps, L) == NEITHER):
            continue
        copy(start[own(b, start)], work[X])
        for i in range(n):  # the last solution of a problem that was bad then
            if not np.isfinite(work[X, i]):
                fill(0.0, work[X])
        bound = fit(body, blocks, own_P, own_q, work[X])
        if bound == 0:
            continue
        where, point, forces = places[b], x[b], multipliers[b]
        taken = descend(
            own_P,
            own_q,
            body,
            blocks,
            bound,
            most,
            eps,
            where,
            forces,
            point,
            work,
            ties,
            index,
            L,
            schur,
        )
        if taken < 0:
            codes[0, b] = -taken
            continue
        if not settle(body, blocks, where, point, eps, work[SIDES]):
            codes[0, b] = outcome.UNSETTLED
            continue
        own_A, own_b = A[own(b, A)], rhs[own(b, rhs)]
        total = value_and_gradient(own_P, own_q, own_A, own_b, point, g)
        copy(forces, guess)
        gap = gap_of(body, blocks, point, g, guess, work[WAY], not dense)
        if not proven(total, gap, tol, eps):
            # the bound of a coordinate is absent, or rounding of x has left a slope that all
            # of the set is wide for; the curvature of f tells how little it matters
            value_and_gradient(own_P, own_q, own_A, own_b, point, g)
            if (iterates(index) or has_shares(ties)) and not factor_on(own_P, where, index, L):
                codes[0, b] = outcome.UNPROVEN
                continue
            scratch = work[WAY], work[Y], work[PY]
            closed = relaxed_gap(
                own_P, body, point, g, forces, where, work[SIDES], L, index, *scratch
            )
            gap = min(gap, closed)
        if not proven(total, gap, tol, eps):
            codes[0, b] = outcome.UNPROVEN
            continue
        copy(work[SIDES], sides[b])
        values[0, b], values[1, b] = total, gap
        codes[0, b], codes[1, b] = outcome.SOLVED, taken
        for row in range(table.ROWS, len(body)):
            if holds(body, row, forces) and is_tied(body, row, where, work[SIDES]):
                codes[0, b] = outcome.TIED


@kernel
def _adjoint(
    first, end, P, bodies, eps, codes, places, sides, multipliers,
    v, u, nu, rest, kept, memory,
):  # fmt: skip
    """See `adjoint` below."""
    work, ties, schur, index, L, S = memory
    n, k = v.shape[1], bodies.shape[1]
    fill(0.0, ties[SHORT])
    fill(0.0, ties[SHARES])
    fall = max(4 * DOUBLE, 0.01 * eps)
    if not kept:
        index[-1] = 0
    for b in range(first, end):
        if len(rest) > 0:
            fill(0.0, rest[b])
        if not asked(b, codes, v, u, nu):
            continue
        own_P, _ = symmetric(P[own(b, P)], eps, S)
        body = bodies[own(b, bodies)]
        copy(sides[b], work[SIDES])
        face = own_P, body, places[b], multipliers[b], work, ties, index, L, schur
        free, held = prepare(*face, kept)
        if free < 0:
            continue
        for a in range(free):
            work[Z, a] = v[b, index[a]]
        if not solve(own_P, k, free, held, work, ties, index, L, schur, fall, 0.0):
            index[-1] = 0
            free, held = prepare(*face, False)
            if free < 0:
                continue
            for a in range(free):
                work[Z, a] = v[b, index[a]]
            solve(own_P, k, free, held, work, ties, index, L, schur, fall, 0.0)
        for a in range(free):
            u[b, index[a]] = work[Z, a]
        for j in range(held):
            nu[b, index[n + j]] = ties[FOUND, j]
        if len(rest) == 0:
            continue
        product(own_P, u[b], work[PY])
        for i in range(n):
            r = v[b, i] - work[PY, i]
            for j in range(held):
                r -= ties[FOUND, j] * slope(body, index[n + j], i, work[SIDES])
            rest[b, i] = r


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def search(
        first, end, P, q, A, rhs, bodies, blocks, start, eps, tol, most,
        x, values, codes, places, sides, multipliers, factors, orders,
    ):  # fmt: skip
        """Solve problems first … end − 1; see `kernels` for the arguments.

        ``factors`` is (1, n, n) for the Cholesky factor on the face of a single problem, or empty,
        and ``orders`` (1, n + k) for the order of its coordinates and whether it is one or P itself
        (see `faces.iterates`).
        """
        _ = stamp
        n, dense = x.shape[1], P.shape[1] > 0
        memory = _memory(n, bodies.shape[1], dense, factors, orders)
        _search(
            first, end, P, q, A, rhs, bodies, blocks, start, eps, tol, most, x, values, codes,
            places, sides, multipliers, memory,
        )  # fmt: skip

    @entry
    def adjoint(
        first, end, P, bodies, eps, codes, places, sides, multipliers,
        v, u, nu, rest, factors, orders,
    ):  # fmt: skip
        """P u + Σ ν_j a_j = v and ⟨a_j, u⟩ = 0 on the faces of problems first … end − 1.

        And v − P u − Σ ν_j a_j if anybody asks.
        """
        _ = stamp
        n, dense = v.shape[1], P.shape[1] > 0
        memory = _memory(n, bodies.shape[1], dense, factors, orders)
        given = P, bodies, eps, codes, places, sides, multipliers
        _adjoint(first, end, *given, v, u, nu, rest, len(factors) > 0, memory)

    return search, adjoint


search, adjoint = _on_disk(STAMP)
