"""The minimiser of a quadratic function on a face of a set in normal form, compiled."""

from __future__ import annotations

import math

import numpy as np

from dfwlayer.engines.compiled.kernels import place, table
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, ROUNDING, SINGLE
from dfwlayer.engines.compiled.kernels.dense import (
    add,
    backward,
    copy,
    dot,
    factor,
    fill,
    forward,
    kernel,
    part_times,
    product,
)

__all__ = [
    "FOUND",
    "GUESS",
    "HELD",
    "HOLDING",
    "LINES",
    "NORMALS",
    "PB",
    "PX",
    "PY",
    "SHARES",
    "SHORT",
    "SIDES",
    "WAY",
    "X",
    "Y",
    "Z",
    "blur",
    "factor_on",
    "forces",
    "free_in",
    "has_shares",
    "holds",
    "is_tied",
    "iterates",
    "minimise",
    "on_face",
    "prepare",
    "share_of",
    "slope",
    "solve",
]

# Memory for one problem with n coordinates and a table of k lines is a table with n columns, of
# which these are lines: the iterate, P x, a trial y, P y, where a trial comes from, the way to it,
# the signs of x in the budgets, places as they were, P times a minimiser, and then k lines for the
# normals of the rows over the free coordinates, and k for L⁻¹ of each. A second one, with k
# columns, has the multipliers of a projection, two right-hand sides, which budgets hold, what a
# minimiser was asked for with, and what L has of the squares of equations. L and
# the Schur complement of the rows are matrices of their own: parts of others would be another type,
# for which everything is compiled again.
X, PX, Y, PY, Z, WAY, SIDES, HELD, PB, NORMALS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
GUESS, SHORT, FOUND, HOLDING, GIVEN, SHARES, LINES = 0, 1, 2, 3, 4, 5, 6
# Conjugate gradients to a minimiser end when the residual is this much of q, and of what that left
# a second time; one run to less is enough for the digits of single precision. Any are given up
# after so many steps: where eigenvalues spread by a factor of 5, all digits take 40. So are those
# that a third of them left with more than a hundredth, which is gone by then for a factor of 60.
FALL, ONCE, PATIENCE, TRIED, HOPE = 1e-8, 1e-10, 60, 20, 1e-2


@kernel
def slope(body, row, i, sides):
    """The derivative of a row's sum in x_i."""
    a = body[row, i]
    return a * sides[i] if body[row, table.KIND] == table.BUDGET else a


@kernel
def forces(body, multipliers, i, r):
    """From r = ∂f/∂x_i: with what the equations add to it, and what the budgets hold against it."""
    hold = 0.0
    for row in range(table.ROWS, len(body)):
        if body[row, table.KIND] == table.BUDGET:
            hold += multipliers[row] * body[row, i]
        else:
            r += multipliers[row] * body[row, i]
    return r, hold


@kernel
def holds(body, row, multipliers):
    """Whether a row is met with equality: an equation, or a budget with a force."""
    return body[row, table.KIND] == table.EQUATION or multipliers[row] > 0


@kernel
def is_tied(body, row, places, sides):
    """Whether no coordinate that is free moves a row: bounds alone hold what is in it."""
    for i in range(len(places)):
        if places[i] == place.FREE and slope(body, row, i, sides) != 0:
            return False
    return True


@kernel
def free_in(places):
    """How many coordinates are free."""
    free = 0
    for i in range(len(places)):
        free += 1 if places[i] == place.FREE else 0
    return free


@kernel
def iterates(index):
    """Whether systems on a face are solved by conjugate gradients: its last number is 1."""
    return index[-1] == 1


@kernel
def share_of(P, body, row):
    """How much of its square, times ½, makes an equation as large as f; 0 for budgets.

    On a set with an equation a, f and f + ½σ(⟨a, x⟩ − t)² are the same, and P + σaaᵀ may be regular
    on a face where P is not.
    """
    trace = square = 0.0
    if body[row, table.KIND] == table.EQUATION:
        for i in range(len(P)):
            trace += P[i, i]
            square += body[row, i] * body[row, i]
    return trace / square if square > 0 else 0.0


@kernel
def _share(P, free, held, body, work, ties, index, L):
    """The factor of P + Σ σ a aᵀ on a face, over its equations; False where that is singular."""
    shares, shared = ties[SHARES], False
    for j in range(held):
        row = index[len(P) + j]
        shares[row] = share_of(P, body, row)
        shared = shared or shares[row] > 0
    if not shared:
        return False
    for a in range(free):
        i = index[a]
        for b in range(a + 1):
            L[a, b] = P[i, index[b]]
        for j in range(held):
            normal = work[NORMALS + j]
            add(L[a], shares[index[len(P) + j]] * normal[a], normal, a + 1)
    return factor(L, free)


@kernel
def factor_on(P, places, index, L):
    """Make L the factor of P alone on the free coordinates, in their order; False if singular."""
    free = free_in(places)
    for a in range(free):
        for b in range(a + 1):
            L[a, b] = P[index[a], index[b]]
    index[-1] = 0
    return factor(L, free)


@kernel
def has_shares(ties):
    """Whether L is the factor of more than P, see `prepare`."""
    found = False
    for row in range(ties.shape[1]):
        found = found or ties[SHARES, row] != 0
    return found


@kernel
def prepare(P, body, places, multipliers, work, ties, index, L, schur, kept):
    """Factorise f on a face: free coordinates, rows that hold, L with LLᵀ = P there, and the rest.

    Rows that are tied by bounds alone are left out. Where P is singular there, L is the factor of
    P + Σ σ a aᵀ over the equations, with σ in line SHARES of the second table.
    L and the order of its coordinates in ``index`` may have been ``kept`` from when it was made.
    Where systems are solved by conjugate gradients, see `iterates`, L is P there, or nothing where
    all are free.
    Returns how many coordinates are free and how many rows hold, (−1, 0) where that is singular.
    The integers in ``index`` are the free coordinates, and from n on the rows that hold.
    """
    n, k = len(places), len(body)
    free = held = 0
    for i in range(n):
        if places[i] == place.FREE:
            if not kept:
                index[free] = i
            free += 1
    for row in range(table.ROWS, k):
        if holds(body, row, multipliers) and not is_tied(body, row, places, work[SIDES]):
            index[n + held] = row
            held += 1
    if held > free:
        return -1, 0
    dense, whole = len(P) > 0, iterates(index)
    for j in range(held):
        normal = work[NORMALS + j]
        for a in range(free):
            normal[a] = slope(body, index[n + j], index[a], work[SIDES])
    if not kept:
        fill(0.0, ties[SHARES])
    if dense and not kept:
        for a in range(0 if whole and free == n else free):
            i = index[a]
            for b in range(free if whole else a + 1):
                L[a, b] = P[i, index[b]]
        regular = whole or factor(L, free)
        if not (regular or _share(P, free, held, body, work, ties, index, L)):
            return -1, 0
    for j in range(held):
        normal, reduced = work[NORMALS + j], work[NORMALS + k + j]
        for a in range(free):
            reduced[a] = normal[a]
        if dense and not whole:
            forward(L, reduced, free)
        for m in range(j + 1):
            schur[j, m] = dot(reduced, work[NORMALS + k + m], free)
    if not factor(schur, held):
        return -1, 0
    return free, held


@kernel
def _flatten(r, free, held, work, found, schur):
    """Take from r its part along the normals, whose coefficients are ``found``."""
    for j in range(held):
        found[j] = dot(work[NORMALS + j], r, free)
    forward(schur, found, held)
    backward(schur, found, held)
    for j in range(held):
        add(r, -found[j], work[NORMALS + j], free)


@kernel
def _iterate(P, free, held, work, ties, L, schur, fall, size):
    """The system of `solve` by conjugate gradients along the face; False if they do not arrive.

    L is P on the face, and the Schur complement that of the identity. Lines Y, WAY, HELD and PB are
    scratch.
    """
    z, u, r, way, bent, found = work[Z], work[Y], work[WAY], work[HELD], work[PB], ties[FOUND]
    matrix = P if free == len(P) else L
    for j in range(held):
        found[j] = ties[SHORT, j]
    forward(schur, found, held)
    backward(schur, found, held)
    for a in range(free):
        u[a] = 0.0
    for j in range(held):
        add(u, found[j], work[NORMALS + j], free)
    part_times(matrix, u, bent, free, free)
    for a in range(free):
        r[a] = z[a] - bent[a]
    _flatten(r, free, held, work, found, schur)
    for a in range(free):
        way[a] = r[a]
    square = begun = dot(r, r, free)
    target, steps = fall * fall * max(square, size * size), 0
    while square > target:
        part_times(matrix, way, bent, free, free)
        bend = dot(way, bent, free)
        slow = steps == TRIED and square > HOPE * HOPE * begun
        if steps == PATIENCE or slow or not bend > 0:
            return False
        steps += 1
        add(u, square / bend, way, free)
        add(r, -square / bend, bent, free)
        _flatten(r, free, held, work, found, schur)
        before, square = square, dot(r, r, free)
        for a in range(free):
            way[a] = r[a] + square / before * way[a]
    part_times(matrix, u, bent, free, free)
    for a in range(free):
        bent[a] = z[a] - bent[a]
        z[a] = u[a]
    _flatten(bent, free, held, work, found, schur)
    return True


@kernel
def solve(P, k, free, held, work, ties, index, L, schur, fall, size):
    """P u + Σ ν_j a_j = z and ⟨a_j, u⟩ = c_j on a prepared face; False if that is not found.

    z is in line Z and c in line SHORT of the tables; u takes the place of z, ν is in line FOUND.
    Where conjugate gradients find them the residual has to fall to ``fall`` times what it is at
    first, or times ``size`` if that is more.
    """
    dense = len(P) > 0
    if dense and iterates(index):
        return _iterate(P, free, held, work, ties, L, schur, fall, size)
    z, found = work[Z], ties[FOUND]
    if dense:
        forward(L, z, free)
    for j in range(held):
        found[j] = dot(work[NORMALS + k + j], z, free) - ties[SHORT, j]
    forward(schur, found, held)
    backward(schur, found, held)
    for j in range(held):
        add(z, -found[j], work[NORMALS + k + j], free)
    if dense:
        backward(L, z, free)
    for j in range(held):
        found[j] += ties[SHARES, index[len(z) + j]] * ties[SHORT, j]
    return True


@kernel
def _limits(body, row, i, where, r, hold, side):
    """Between which forces of a row a coordinate stays where it is held.

    r is ∇f with the forces of the other equations, ``hold`` what the other budgets weigh on it.
    """
    a, budget = body[row, i], body[row, table.KIND] == table.BUDGET
    if where == place.ZERO:
        if budget:
            return (abs(r) - hold) / a, np.inf
        one, two = (-hold - r) / a, (hold - r) / a
        return min(one, two), max(one, two)
    c = a * side if budget else a
    if c == 0:
        return -np.inf, np.inf
    at = -(r + hold * side) / c
    if (where == place.LOW) == (c > 0):
        return at, np.inf
    return -np.inf, at


@kernel
def _tie(body, row, places, q, px, x, multipliers, sides):
    """A force of a row that bounds alone tie: the middle of those that keep all where they are.

    False where there is none, or where another row is tied by the same coordinates. A force that
    was not found yet is NaN.
    """
    budget = body[row, table.KIND] == table.BUDGET
    least, most = 0.0 if budget else -np.inf, np.inf
    total = size = 0.0
    for i in range(len(x)):
        if body[row, i] == 0:
            continue
        term = body[row, i] * (abs(x[i]) if budget else x[i])
        total += term
        size += abs(term)
        if body[table.LOWER, i] == body[table.UPPER, i]:
            continue
        r, hold = px[i] + q[i], 0.0
        for other in range(table.ROWS, len(body)):
            if other == row or body[other, i] == 0:
                continue
            if np.isnan(multipliers[other]):
                return False
            if body[other, table.KIND] == table.BUDGET:
                hold += multipliers[other] * body[other, i]
            else:
                r += multipliers[other] * body[other, i]
        low, high = _limits(body, row, i, places[i], r, hold, sides[i])
        least, most = max(least, low), min(most, high)
    multipliers[row] = 0.5 * (least + most)
    off = abs(total - body[row, table.TOTAL])
    return np.isfinite(multipliers[row]) and off <= CLEAR * DOUBLE * size


@kernel
def minimise(P, q, body, eps, places, multipliers, x, work, ties, index, L, schur, kept):
    """The minimiser x of f on the face, and the multipliers of the rows; False if singular.

    Where coordinates are held is told by ``places``, which rows hold by ``multipliers`` > 0, and
    the signs in budgets by line SIDES. P x is in line PY afterwards. For ``kept`` see `prepare`.
    Conjugate gradients begin at the point of the face in line X, and find what counts in the dtype
    that has this eps. Where they do not arrive a factor takes their place.
    """
    given = P, q, body, eps, places, multipliers, x, work, ties, index, L, schur
    if not iterates(index):
        return on_face(*given, kept)
    copy(multipliers, ties[GIVEN])
    if on_face(*given, kept):
        return True
    index[-1] = 0
    copy(ties[GIVEN], multipliers)
    return on_face(*given, False)


@kernel
def blur(index, eps):
    """Units that what `minimise` finds is off by: rounding, or what iterations have left."""
    return ONCE if iterates(index) and eps == SINGLE else ROUNDING * DOUBLE


@kernel
def on_face(P, q, body, eps, places, multipliers, x, work, ties, index, L, schur, kept):
    """See `minimise`, by conjugate gradients or a factor."""
    n, k = len(q), len(body)
    free, held = prepare(P, body, places, multipliers, work, ties, index, L, schur, kept)
    if free < 0:
        return False
    sides, z, py, whole = work[SIDES], work[Z], work[PY], len(P) > 0 and iterates(index)
    last = 1 if whole and eps == SINGLE else 2
    fall, size = ONCE if last == 1 else FALL, 0.0
    for i in range(n):
        where, begin = places[i], work[X, i] if whole else 0.0
        x[i] = (
            body[table.LOWER, i]
            if where == place.LOW
            else (body[table.UPPER, i] if where == place.HIGH else 0.0)
        )
        if where == place.FREE:
            x[i] = begin
            size += q[i] * q[i]
    size = math.sqrt(size)
    for row in range(table.ROWS):
        multipliers[row] = 0.0
    for row in range(table.ROWS, k):
        tied = holds(body, row, multipliers) and is_tied(body, row, places, sides)
        multipliers[row] = np.nan if tied else 0.0
    for attempt in range(last + 1):  # the second time for the rounding of the first
        product(P, x, py)
        if attempt == last:
            break
        for a in range(free):
            i = index[a]
            total = py[i] + q[i]
            for j in range(held):
                total += multipliers[index[n + j]] * work[NORMALS + j, a]
            z[a] = -total
        for j in range(held):
            row = index[n + j]
            total = -body[row, table.TOTAL]
            for i in range(n):
                total += slope(body, row, i, sides) * x[i]
            ties[SHORT, j] = -total
        if not solve(P, k, free, held, work, ties, index, L, schur, fall, size):
            return False
        size = 0.0
        for a in range(free):
            x[index[a]] += z[a]
        for j in range(held):
            multipliers[index[n + j]] += ties[FOUND, j]
    for row in range(table.ROWS, k):
        if np.isnan(multipliers[row]) and not _tie(body, row, places, q, py, x, multipliers, sides):
            return False
    return True
