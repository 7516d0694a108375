"""A quadratic problem over a set in normal form, from start to certificate, in one Triton program.

The method is that of `dfwlayer.engines.compiled.kernels.search`, and so are its rules: spectral
projected gradient steps show which coordinates are held, the inverse of P over what is free gives
the minimiser on that face, and its multipliers say whether it is the solution. When the face
changes, the inverse changes by as many pivots as coordinates have come and gone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants
from dfwlayer.engines.programs.kernels.blocks import (
    RUNTIME,
    across,
    count,
    dot,
    entries,
    jit,
    loaded,
    number,
    outer_index,
    product,
    stored,
    stored_product,
    sums,
    symmetric_matrix,
    symmetry_of,
    yes,
)
from dfwlayer.engines.programs.kernels.certificate import gap_of, settle
from dfwlayer.engines.programs.kernels.faces import (
    CLEARLY,
    WRONG,
    inverse,
    invert,
    judge,
    tie,
    tied,
)
from dfwlayer.engines.programs.kernels.projection import (
    BUDGET,
    FREE,
    HIGH,
    LOW,
    NOTHING,
    project,
    slope_of,
)

__all__ = ["adjoint", "search"]

SOLVED, UNFIT = tl.constexpr(constants.SOLVED), tl.constexpr(constants.UNFIT)
LOST, DOUBTED = tl.constexpr(constants.LOST), tl.constexpr(constants.DOUBTED)
UNSETTLED, UNPROVEN = tl.constexpr(constants.UNSETTLED), tl.constexpr(constants.UNPROVEN)
LARGEST, SMALLEST = tl.constexpr(constants.LARGEST), tl.constexpr(constants.SMALLEST)

LONGEST = tl.constexpr(480)  # steps
BLOCK = tl.constexpr(12)  # most spectral steps before a face is tried
SETTLED = tl.constexpr(2)  # steps without a change of the face, after which it is tried
FAILURES = tl.constexpr(3)  # faces on which f was flat, after which others should look
START, STEP, RETURN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is projected next


@jit
def _times(
    M,
    P,
    p_row,
    p_column,
    n,
    symmetric,
    x,
    DENSE: tl.constexpr,
    KEEP: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """P x, by the block M that it is in or from memory."""
    if not DENSE:
        return x
    elif KEEP:  # noqa: RET505 (Triton compiles one branch or the other)
        return product(M, x, N, C)
    else:
        return stored_product(P, p_row, p_column, n, symmetric, x, N, C)


@jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@jit
def _minimise(
    M,
    matrix,
    P,
    p_row,
    p_column,
    n,
    symmetric,
    q,
    free,
    places,
    a,
    target,
    c,
    goal,
    low,
    high,
    sides,
    first,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
    DENSE: tl.constexpr,
    KEEP: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """The minimiser x of f on a face, P x, the multipliers of the rows, and whether there is one.

    Where coordinates are held is told by the places, whether a budget holds by its multiplier, and
    the signs in it by ``sides``.
    """
    normal, other, moved, second, one, both, two, sound = tie(
        M, free, a, c, sides, first, KIND, CUT, DENSE, N, C
    )
    slopes = slope_of(a, sides, KIND)
    holds = (first > 0) if KIND == BUDGET else yes()
    x = tl.where(places == LOW, low, tl.where(places == HIGH, high, 0.0))
    found, cut = number(0.0), number(0.0)
    px = _times(matrix, P, p_row, p_column, n, symmetric, x, DENSE, KEEP, N, C)
    for _ in range(2):  # the second time for the rounding of the first
        z = inverse(M, -(px + q + found * normal + cut * other), free, DENSE, N, C)
        short, lack = number(0.0), number(0.0)
        if KIND != NOTHING:
            short = tl.where(holds, target - dot(slopes, x), 0.0)
        if CUT:
            lack = goal - dot(c, x)
        u, nu, mu = tied(z, short, lack, normal, other, moved, second, one, both, two, CUT)
        x += u
        found += nu
        cut += mu
        px = _times(matrix, P, p_row, p_column, n, symmetric, x, DENSE, KEEP, N, C)
    return x, px, tl.where(holds, found, 0.0), cut, sound


@jit
def _fit(q, x, a, target, c, goal, low, high, KIND: tl.constexpr, CUT: tl.constexpr):
    """Whether all numbers are such that this code may be used on them."""
    infinite = float("inf")
    below, above = tl.abs(low), tl.abs(high)
    sound = (tl.abs(q) < LARGEST) & (tl.abs(x) < LARGEST) & (low <= high)
    sound = sound & ((below < LARGEST) | (below == infinite)) & ((below == 0) | (below > SMALLEST))
    sound = sound & ((above < LARGEST) | (above == infinite)) & ((above == 0) | (above > SMALLEST))
    open_ended = (low == -infinite) | (high == infinite)
    totals = yes()
    if KIND == NOTHING:
        sound = sound & (open_ended == 0)  # nothing else bounds it
    else:
        sound = sound & (tl.abs(a) < LARGEST)
        totals = tl.abs(target) < LARGEST
    if KIND == BUDGET:
        sound = sound & (low <= 0) & (high >= 0) & ((open_ended == 0) | (a > 0))
        totals = totals & (target > SMALLEST)
    else:
        sound = sound & ((low > -infinite) | (high < infinite))
    if CUT:
        sound = sound & (tl.abs(c) < LARGEST)
        totals = totals & (tl.abs(goal) < LARGEST)
    return totals & (count(sound == 0) == 0)


def _search(
    P,  # (·, n, n), with three strides
    q,  # (·, n), with its stride, as all that follows
    lower,  # a number, (n,) or (·, n), with two strides
    upper,
    slope,  # w or a, likewise
    total,  # t or b, (·), with one
    normal,  # a of the second row
    level,  # b of the second row
    start,  # (·, n) or none
    A,  # (·, m, n), with P = AᵀA and q = −Aᵀb, or none
    rhs,  # b (·, m)
    x_out,  # (B, n), and what follows is where the results go
    own_out,  # (B, n), x once more
    values,  # (2, B): f and the gap
    codes,  # (2, B): what became of it, and steps
    places_out,  # (B, n)
    multipliers,  # (B, 2)
    p_batch,
    p_row,
    p_column,
    q_batch,
    q_column,
    lower_batch,
    lower_column,
    upper_batch,
    upper_column,
    slope_batch,
    slope_column,
    total_batch,
    normal_batch,
    normal_column,
    level_batch,
    start_batch,
    start_column,
    a_batch,
    rhs_batch,
    n,
    m,
    batch,
    tol,
    most,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
    DENSE: tl.constexpr,
    EPS: tl.constexpr,
    MAX: tl.constexpr,
    KEEP: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, N)
    cell = lane < n
    linear = loaded(q, b * q_batch + lane * q_column, cell, 0.0)
    low = entries(lower, b, lower_batch, lower_column, lane, cell, 0.0)
    high = entries(upper, b, upper_batch, upper_column, lane, cell, 0.0)
    blank = tl.zeros((N,), tl.float64)
    a, c, target, goal = blank, blank, number(0.0), number(0.0)
    if KIND != NOTHING:
        a = entries(slope, b, slope_batch, slope_column, lane, cell, 0.0)
        if KIND == BUDGET:
            a = tl.abs(a)
        target = tl.load(total + b * total_batch).to(tl.float64)
    if CUT:
        c = entries(normal, b, normal_batch, normal_column, lane, cell, 0.0)
        goal = tl.load(level + b * level_batch).to(tl.float64)
    z = blank
    usable = yes()
    if start is not None:
        z = loaded(start, b * start_batch + lane * start_column, cell, 0.0)
        # the last solution of a problem that was bad then; one start for all has to be a point
        finite = count((z - z) == 0) == N
        usable = finite | (start_batch != 0)
        z = tl.where(finite, z, 0.0)
    fit = usable & _fit(linear, z, a, target, c, goal, low, high, KIND, CUT)
    bound, M, diagonal, matrix, symmetric = number(1.0), blank, blank, blank, yes()
    if DENSE:
        P += b * p_batch
        symmetric, nearly, diagonal, size = symmetry_of(P, p_row, p_column, n, number(EPS), N, C)
        bound = tl.max(size)
        fit = fit & nearly & (count(size < LARGEST) == N)
        fit = fit & (bound > SMALLEST) & (tl.max(diagonal) > 0)
        if KEEP:
            matrix = symmetric_matrix(P, p_row, p_column, n, symmetric, N, C)
        M = matrix

    steps = 0
    x, px, best, sides = z, blank, blank, blank
    places = tl.zeros((N,), tl.int32)
    inverted = places != 0
    first, second = number(0.0), number(0.0)
    guess, other = number(0.0), number(0.0)
    alpha = 1.0 / bound
    kind = tl.full((), START if DENSE else STEP, tl.int32)
    if not DENSE:  # one gradient step is all it takes, from anywhere
        x, z = blank, -linear
    failed, tried, same = 0, 0, 0
    going = fit
    code = tl.where(fit, LOST, UNFIT)
    while going:
        # a trial: the start, a gradient step, or the minimiser on the last face, projected
        lanes = n.to(tl.float64)
        y, guess, other, held = project(
            z, guess, other, a, target, c, goal, low, high, lanes, KIND, CUT
        )
        # nothing, but not to the compiler, which would keep the addresses of all entries otherwise
        row = p_row + tl.where(steps > LONGEST, 1, 0)
        py = _times(matrix, P, row, p_column, n, symmetric, y, DENSE, KEEP, N, C)
        d = y - x
        fall, bend, square = sums(-d * (px + linear), d * (py - px), d * d)
        same = tl.where((kind == RETURN) | (count(held != places) > 0), 0, same + 1)
        places = held
        step = alpha
        length = tl.where(bend > 0, tl.minimum(fall / tl.where(bend > 0, bend, 1.0), 1.0), 1.0)
        length = tl.where(fall > 0, length, 0.0)
        length = tl.where(kind == START, 1.0, length)
        spectral = (kind == STEP) & (fall > 0) & (bend > 0)
        new = tl.minimum(
            tl.maximum(square / tl.where(bend > 0, bend, 1.0), 0.01 / bound), 1e8 / bound
        )
        alpha = tl.where(spectral, new, alpha)
        x += length * d
        px += length * (py - px)
        steps += tl.where(kind == START, 0, 1)
        lost = (guess != guess) | (other != other)
        trying = kind == STEP
        tried = tl.where(trying, tried + 1, 0)
        same = tl.where(trying, same, 0)
        if DENSE:
            early = (fall > 0) & (same < SETTLED) & (tried < BLOCK) & (steps < most)
            trying = trying & (early == 0)
        kind = tl.full((), STEP, tl.int32)
        if trying & (lost == 0):
            # the face of the last gradient step, whose multipliers are those of f times its length
            sides = y
            first, second = guess / step, other / step
            free = places == FREE
            steps += 1 if DENSE else 0
            tried, same = 0, 0
            sound = yes()
            T = M
            if DENSE:
                if not KEEP:
                    T = symmetric_matrix(P, row, p_column, n, symmetric, N, C)
                T, sound = invert(T, free, inverted, diagonal, n, N, C)
                if KEEP:
                    M, inverted = T, free
            if sound:
                best, pb, first, second, sound = _minimise(
                    T,
                    matrix,
                    P,
                    row,
                    p_column,
                    n,
                    symmetric,
                    linear,
                    free,
                    places,
                    a,
                    target,
                    c,
                    goal,
                    low,
                    high,
                    sides,
                    first,
                    KIND,
                    CUT,
                    DENSE,
                    KEEP,
                    N,
                    C,
                )
                signs = _sign(sides)
                verdict = judge(
                    linear,
                    a,
                    target,
                    c,
                    low,
                    high,
                    places,
                    first,
                    second,
                    best,
                    pb,
                    signs,
                    bound,
                    KIND,
                    CUT,
                )
                if sound:
                    going = verdict == WRONG
                    code = tl.where(going, LOST, tl.where(verdict == CLEARLY, SOLVED, DOUBTED))
                    kind = tl.full((), RETURN, tl.int32)
            elif KEEP:
                M, inverted = matrix, lane < 0  # what it has become is of no use
            failed += tl.where(sound, 0, 1)
            lost = failed > FAILURES
            guess, other = number(0.0), number(0.0)
        over = (steps > most) | (steps > LONGEST)
        code = tl.where(over, LOST, code)
        going = going & (lost == 0) & (over == 0)
        z = tl.where(kind == RETURN, best, x - alpha * (px + linear))
        if kind != STEP:
            guess, other = number(0.0), number(0.0)

    value, gap = number(0.0), number(0.0)
    if code == SOLVED:
        eps = number(EPS)
        best, settled = settle(
            x_out, places, best, a, target, c, goal, low, high, eps, KIND, CUT, N
        )
        if A is not None:
            value, g = _squares(A + b * a_batch, rhs + b * rhs_batch, best, n, m, N)
        else:
            g = _times(matrix, P, p_row, p_column, n, symmetric, best, DENSE, KEEP, N, C)
            value = dot(best, 0.5 * g + linear)
            g += linear
        gap = gap_of(best, g, a, target, c, goal, first, second, low, high, KIND, CUT)
        proven = (gap <= tol * tl.maximum(tl.abs(value), 1e-300)) & (tl.abs(value) < MAX)
        code = tl.where(settled, tl.where(proven, SOLVED, UNPROVEN), UNSETTLED)
    answered = code == SOLVED
    best = tl.where(answered, best, 0.0)
    stored(x_out, b * n + lane, best, cell)
    stored(own_out, b * n + lane, best, cell)
    tl.store(places_out + b * n + lane, places.to(tl.int8), mask=cell)
    tl.store(multipliers + 2 * b, tl.where(answered, first, 0.0))
    tl.store(multipliers + 2 * b + 1, tl.where(answered, second, 0.0))
    tl.store(codes + b, code)
    tl.store(codes + batch + b, steps)
    tl.store(values + b, value)
    # a bound stays one
    tl.store(values + batch + b, gap * (1 + EPS) + 1e-45)


@jit
def _squares(A, rhs, x, n, m, N: tl.constexpr):
    """½ ‖Ax − b‖² and its gradient, a few rows at a time."""
    ROWS: tl.constexpr = 8
    lane = tl.arange(0, N)[None, :]
    total, g = number(0.0), tl.zeros_like(x)
    for j in range(0, m, ROWS):
        row = j + tl.arange(0, ROWS)[:, None]
        block = loaded(A, row * n + lane, (row < m) & (lane < n), 0.0)
        here = tl.arange(0, ROWS) + j
        r = tl.sum(block * x[None, :], axis=1) - loaded(rhs, here, here < m, 0.0)
        total += 0.5 * tl.sum(r * r)
        g += tl.sum(block * r[:, None], axis=0)
    return total, g


def _adjoint(
    P,
    slope,
    normal,
    x_in,  # (B, n)
    codes,  # (2, B)
    places_in,  # (B, n)
    multipliers,  # (B, 2)
    v_in,  # (B, n), the gradient that arrives
    u_out,  # (B, n), and what follows is where the results go, none for what nobody asks for
    to_matrix,  # (B, n, n)
    to_vector,  # (B, n)
    to_lower,
    to_upper,
    to_slope,
    to_total,  # (B,)
    to_normal,  # (B, n)
    to_level,  # (B,)
    p_batch,
    p_row,
    p_column,
    slope_batch,
    slope_column,
    normal_batch,
    normal_column,
    v_batch,
    v_column,
    n,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
    DENSE: tl.constexpr,
    EPS: tl.constexpr,
    MAX: tl.constexpr,
    KEEP: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """P u + Σ ν_j a_j = v and ⟨a_j, u⟩ = 0 on the face, and the gradients that follow."""
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, N)
    cell = lane < n
    at = b * n + lane
    v = loaded(v_in, b * v_batch + lane * v_column, cell, 0.0)
    x = loaded(x_in, at, cell, 0.0)
    places = tl.load(places_in + at, mask=cell, other=LOW).to(tl.int32)
    first, second = tl.load(multipliers + 2 * b), tl.load(multipliers + 2 * b + 1)
    answered = (tl.load(codes + b) == SOLVED) & (count((v - v) == 0) == N)
    blank = tl.zeros((N,), tl.float64)
    u, rest, signed, c, nu, mu = blank, blank, blank, blank, number(0.0), number(0.0)
    if KIND != NOTHING:
        signed = entries(slope, b, slope_batch, slope_column, lane, cell, 0.0)
    if CUT:
        c = entries(normal, b, normal_batch, normal_column, lane, cell, 0.0)
    if answered:
        a = tl.abs(signed) if KIND == BUDGET else signed
        free = (places == FREE) & cell
        M, matrix, symmetric, sound = blank, blank, yes(), yes()
        if DENSE:
            P += b * p_batch
            symmetric, _, diagonal, _ = symmetry_of(P, p_row, p_column, n, number(EPS), N, C)
            M = symmetric_matrix(P, p_row, p_column, n, symmetric, N, C)
            matrix = M if KEEP else blank
            M, sound = invert(M, free, lane < 0, diagonal, n, N, C)
        own, other, moved, also, one, both, two, tight = tie(
            M, free, a, c, x, first, KIND, CUT, DENSE, N, C
        )
        z = inverse(M, v, free, DENSE, N, C)
        zero = number(0.0)
        u, nu, mu = tied(z, zero, zero, own, other, moved, also, one, both, two, CUT)
        # beyond the dtype's range there is no gradient to give; the other problems keep theirs
        size = tl.max(tl.abs(u)) * tl.maximum(tl.max(tl.abs(x)), 1.0)
        good = sound & tight & (size < MAX)
        u = tl.where(good, u, 0.0)
        nu, mu = tl.where(good, nu, 0.0), tl.where(good, mu, 0.0)
        pu = _times(matrix, P, p_row, p_column, n, symmetric, u, DENSE, KEEP, N, C)
        rest = v - pu - mu * c
        if KIND == BUDGET:
            holds = tl.where(first > 0, nu, 0.0)
            rest -= holds * slope_of(a, x, KIND)
            nu = holds
        elif KIND != NOTHING:
            rest -= nu * a
        rest = tl.where(good, rest, 0.0)
    if u_out is not None:
        stored(u_out, at, u, cell)
    if to_vector is not None:
        stored(to_vector, at, -u, cell)
    if to_matrix is not None:
        row, column = outer_index(N, C)
        outer = u[None, :, None] * across(x, N, C) + x[None, :, None] * across(u, N, C)
        stored(to_matrix, b * n * n + row * n + column, -0.5 * outer, (row < n) & (column < n))
    if to_lower is not None:
        stored(to_lower, at, tl.where(places == LOW, rest, 0.0), cell)
    if to_upper is not None:
        stored(to_upper, at, tl.where(places == HIGH, rest, 0.0), cell)
    if to_slope is not None:
        pull = -(first * u + nu * x)
        if KIND == BUDGET:
            pull = pull * slope_of(
                tl.where(signed > 0, 1.0, tl.where(signed < 0, -1.0, 0.0)), x, KIND
            )
        stored(to_slope, at, pull, cell)
    if to_normal is not None:
        stored(to_normal, at, -(second * u + mu * x), cell)
    if to_total is not None:
        stored(to_total, b, nu, b >= 0)
    if to_level is not None:
        stored(to_level, b, mu, b >= 0)


search = triton.jit(_search, do_not_specialize=RUNTIME)
adjoint = triton.jit(_adjoint, do_not_specialize=RUNTIME)
