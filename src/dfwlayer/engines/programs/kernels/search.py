"""A quadratic problem over a set in normal form, from start to certificate, in one Triton program.

The method is that of `dfwlayer.engines.compiled.kernels.search`, and so are its rules: spectral
projected gradient steps show which coordinates are held, the inverse of P over what is free gives
the minimiser on that face, and its multipliers say whether it is the solution. When the face
changes, the inverse changes by as many pivots as coordinates have come and gone.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.programs.kernels import ends
from dfwlayer.engines.programs.kernels.blocks import (
    again,
    count,
    entries,
    entry,
    jit,
    kept,
    matrix_of,
    number,
    sign_of,
    sums,
    times,
    yes,
)
from dfwlayer.engines.programs.kernels.certificate import gap_of, settle
from dfwlayer.engines.programs.kernels.faces import CLEARLY, WRONG, invert, judge, minimise
from dfwlayer.engines.programs.kernels.projection import BUDGET, FREE, NOTHING, project

__all__ = ["search"]

LONGEST = tl.constexpr(480)  # steps
BLOCK = tl.constexpr(12)  # most spectral steps before a face is tried
SETTLED = tl.constexpr(2)  # steps without a change of the face, after which it is tried
FACES = tl.constexpr(40)  # most faces whose minimiser was not the solution
FAILURES = tl.constexpr(3)  # faces on which f was flat, after which others should look
START, STEP, RETURN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is next


@jit
def _fit(
    q,
    x,
    a,
    target,
    c,
    goal,
    low,
    high,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
    CUT: tl.constexpr,
):
    """Whether all numbers are such that this code may be used on them."""
    SMALLEST: tl.constexpr = 1 / LARGEST
    infinite = float("inf")
    below, above = tl.abs(low), tl.abs(high)
    sound = (tl.abs(q) < LARGEST) & (tl.abs(x) < LARGEST) & (low <= high)
    sound = sound & (low < infinite) & (high > -infinite)
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
    P, q,
    lower, upper, slope,  # numbers, (n,) or (·, n); the slope is w or a
    total,  # t or b, (·)
    normal, level,  # a and b of the second row
    start, A, rhs, x_out, values, codes,
    state,  # (B, 2n + 2): x, where coordinates are held, two multipliers
    factor,  # (B, N, N), the inverse on the face of the solution, or none
    left,
    p_batch, p_row, p_column, q_batch, q_column, lower_batch, lower_column, upper_batch,
    upper_column, slope_batch, slope_column, total_batch, normal_batch, normal_column, level_batch,
    start_batch, start_column, a_batch, rhs_batch, n, m, batch, tol, most,
    KIND: tl.constexpr, CUT: tl.constexpr,
    DENSE: tl.constexpr, EPS: tl.constexpr, MAX: tl.constexpr, LARGEST: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = tl.float64
    b, lane, cell = ends.own_lanes(n, N)
    # steps are taken in the dtype of the data, everything else in float64
    blank = tl.zeros((N,), x_out.dtype.element_ty)
    wide = tl.zeros((N,), W)
    exact = entries(q, b, q_batch, q_column, lane, cell, 0.0, q)
    linear = exact.to(blank.dtype)
    low = entries(lower, b, lower_batch, lower_column, lane, cell, 0.0, x_out)
    high = entries(upper, b, upper_batch, upper_column, lane, cell, 0.0, x_out)
    zero = number(0.0, blank)
    a, c, target, goal = blank, blank, zero, zero
    if KIND != NOTHING:
        a = entries(slope, b, slope_batch, slope_column, lane, cell, 0.0, x_out)
        if KIND == BUDGET:
            a = tl.abs(a)
        target = tl.load(total + b * total_batch).to(blank.dtype)
    if CUT:
        c = entries(normal, b, normal_batch, normal_column, lane, cell, 0.0, x_out)
        goal = tl.load(level + b * level_batch).to(blank.dtype)
    z, usable = ends.started(start, b, start_batch, start_column, lane, cell, x_out, N)
    fit = usable & _fit(linear, z, a, target, c, goal, low, high, LARGEST, KIND, CUT)
    limit, M, diagonal, matrix = number(1.0, wide), blank, wide, blank
    if DENSE:
        matrix = matrix_of(P + b * p_batch, p_row, p_column, n, N, C)
        regular, limit, diagonal = ends.sane(matrix, n, EPS, LARGEST, N, C)
        fit = fit & regular & (tl.max(diagonal) > 0)
        M = matrix.to(tl.float64 if N <= 64 else tl.float32)

    steps = 0
    bound = limit.to(blank.dtype)
    x, px, sides, best = z, blank, blank, wide
    places = tl.zeros((N,), tl.int32)
    inverted = places != 0
    first, second = number(0.0, wide), number(0.0, wide)
    guess, other = zero, zero
    close = (n.to(blank.dtype) * 0.25 + 2) * EPS
    alpha = 1 / bound
    kind = tl.full((), START if DENSE else STEP, tl.int32)
    if not DENSE:  # one gradient step is all it takes, from anywhere
        x, z = blank, -linear
    failed, tried, same, faces = 0, 0, 0, 0
    going = fit
    code = tl.where(fit, ends.LOST, ends.UNFIT)
    while going:
        # a trial: the start, a gradient step, or the minimiser on the last face, projected
        y, guess, other, held = project(
            z, guess, other, a, target, c, goal, low, high, close, KIND, CUT
        )
        py = times(matrix, y, DENSE, N, C)
        d = y - x
        fall, bend, square = sums(-d * (px + linear), d * (py - px), d * d)
        same = tl.where((kind == RETURN) | (count(held != places) > 0), 0, same + 1)
        places = held
        step = alpha
        curved = tl.where(bend > 0, bend, 1.0)
        length = tl.where(bend > 0, tl.minimum(fall / curved, 1.0), 1.0)
        length = tl.where(fall > 0, length, 0.0)
        length = tl.where(kind == START, 1.0, length)
        new = tl.minimum(tl.maximum(square / curved, 0.01 / bound), 1e8 / bound)
        alpha = tl.where((kind == STEP) & (fall > 0) & (bend > 0), new, alpha)
        x += length * d
        px += length * (py - px)
        steps += tl.where(kind == START, 0, 1)
        lost = (guess != guess) | (other != other)
        trying = kind == STEP
        leaps = (kind == RETURN) & (faces % 2 == 1)
        tried = tl.where(trying, tried + 1, 0)
        same = tl.where(trying, same, 0)
        if DENSE:
            early = (fall > 0) & (same < SETTLED) & (tried < BLOCK) & (steps < most)
            trying = (trying & (early == 0)) | leaps
        kind = tl.full((), STEP, tl.int32)
        if trying & (lost == 0):
            # the face of the last gradient step, whose multipliers are those of f times its length
            sides = y
            free = places == FREE
            steps += 1 if DENSE else 0
            tried, same = 0, 0
            first, second = guess.to(tl.float64), other.to(tl.float64)
            sound = yes()
            if DENSE:
                M, sound = invert(M, free, inverted, diagonal, n, N, C)
                inverted = free
            if sound:
                signs = sign_of(sides).to(W)
                f, r, s = exact.to(W), a.to(W), c.to(W)
                t, e, lo, hi = target.to(W), goal.to(W), low.to(W), high.to(W)
                best, pb, first, second, sound = minimise(
                    M,
                    matrix,
                    f,
                    free,
                    places,
                    r,
                    t,
                    s,
                    e,
                    lo,
                    hi,
                    signs,
                    first,
                    2 if N <= 64 or not DENSE else 8,
                    KIND,
                    CUT,
                    DENSE,
                    N,
                    C,
                )
                judged, still = judge(
                    f, r, t, s, lo, hi, places, first, second, best, pb, signs, limit, KIND, CUT
                )
                sound = sound & still
                if sound:
                    going = judged == WRONG
                    code = tl.where(
                        going, ends.LOST, tl.where(judged == CLEARLY, ends.SOLVED, ends.DOUBTED)
                    )
                    kind = tl.full((), RETURN, tl.int32)
                    # every other time a gradient step from there, whose face is tried at once
                    faces += 1
                    ahead = tl.where(faces % 2 == 1, alpha, 0.0)
                    z = (best - ahead.to(W) * (pb + f)).to(blank.dtype)
            elif DENSE:
                M, inverted = matrix.to(M.dtype), lane < 0  # what it has become is of no use
            failed += tl.where(sound, 0, 1)
            lost = (failed > FAILURES) | (faces > FACES)
        over = (steps > most) | (steps > LONGEST)
        code = tl.where(over, ends.LOST, code)
        going = going & (lost == 0) & (over == 0)
        back = kind == RETURN
        z = tl.where(back, z, x - alpha * (px + linear))
        # the multipliers of a projection grow with the length of the step
        guess = tl.where(back, 0.0, guess * (alpha / step))
        other = tl.where(back, 0.0, other * (alpha / step))

    value, gap = number(0.0, wide), number(0.0, wide)
    if code == ends.SOLVED:
        r, s, lo, hi = a.to(W), c.to(W), low.to(W), high.to(W)
        t, e = target.to(W), goal.to(W)
        best, settled = settle(x_out, places, best, r, t, s, e, lo, hi, EPS, KIND, CUT, N)
        bent = times(again(matrix, first), best, DENSE, N, C)
        value, g = ends.valued(A, rhs, b, a_batch, rhs_batch, best, bent, exact.to(W), n, m, N)
        gap = gap_of(best, g, r, t, s, e, first, second, lo, hi, KIND, CUT)
        code = ends.verdict(settled, value, gap, tol, MAX)
    answered = code == ends.SOLVED
    ends.solved_at(x_out, state, b, best, code, n, 2 * n + 2, lane, cell)
    state += b * (2 * n + 2)
    tl.store(state + n + lane, places.to(tl.float64), mask=cell)
    tl.store(state + 2 * n, tl.where(answered, first, 0.0))
    tl.store(state + 2 * n + 1, tl.where(answered, second, 0.0))
    if factor is not None:
        kept(factor, M, b, N, C)
    ends.told(values, codes, left, b, batch, value, gap, code, steps, EPS)


search = entry(_search)
