"""A quadratic problem over {x : l ≤ x ≤ u, G x ≤ h, E x = e}, from start to certificate, in one
Triton program.

The method is Goldfarb and Idnani's, as in `dfwlayer.engines.compiled.kernels.linear`, and so are
its rules; what is held and what a step does to it is kept in a tableau
(`dfwlayer.engines.programs.kernels.tableau`) in place of a triangle times orthonormal rows. That
loses digits where rows nearly depend on each other, which corrections with the residuals of the
problem as it was given bring back: where they do not, the problem is left to others.

A lane is a coordinate or a row. It is at y = x_i or ⟨n_j, x⟩, between ``low`` and ``high``, and
``force`` holds it there: ∇f + Σ force_j n_j + force = 0.
"""

from __future__ import annotations

import triton.language as tl

from dfwlayer.engines.compiled.kernels import constants
from dfwlayer.engines.programs.kernels import ends, tableau
from dfwlayer.engines.programs.kernels.blocks import (
    column_of,
    count,
    dot,
    entries,
    entry,
    jit,
    largest,
    number,
    pivoted,
    product,
    rounded,
    row_sizes,
    stored,
    sums,
    symmetry_of,
    yes,
)

__all__ = ["search"]

CLEAR, SKEW = tl.constexpr(constants.CLEAR), tl.constexpr(constants.SKEW)
DOUBLE = tl.constexpr(constants.DOUBLE)
BENT, CLOSE = tl.constexpr(constants.BENT), tl.constexpr(constants.CLOSE)

ROUNDS = tl.constexpr(4)  # times that rows are looked for again after all digits are there
PASSES = tl.constexpr(6)  # corrections; two or three are needed
NOISE = tl.constexpr(1e-12)  # what steps in the tableau are off by
APART = tl.constexpr(1e-10)  # what is left of the square of a row beside others that are met
DOUBTFUL = tl.constexpr(1e-6)  # a correction that is larger shows that the tableau is not right


@jit
def _at(values, k):
    """Entry k."""
    lane = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(lane == k, values, 0.0))


@jit
def _first(mask):
    """The first lane of a mask, or as many as there are."""
    lane = tl.arange(0, mask.shape[0])
    return tl.min(tl.where(mask, lane, mask.shape[0]))


@jit
def _fit(q, low, high, row, equation, sizes, LARGEST: tl.constexpr):
    """Whether all numbers are such that this code may be used on them, and a point is possible."""
    infinite = float("inf")
    sound = (tl.abs(q) < LARGEST) & (sizes < LARGEST) & (low <= high)
    sound = sound & ((tl.abs(low) < LARGEST) | (low == -infinite))
    sound = sound & ((tl.abs(high) < LARGEST) | (high == infinite))
    sound = sound & ((equation == 0) | (tl.abs(high) < LARGEST))
    # a row of zeros holds for all x or none
    trivial = (sizes == 0) & (low <= 0) & (high >= 0)
    sound = sound & ((row == 0) | (sizes > 1 / LARGEST) | trivial)
    return count(sound == 0) == 0


@jit
def _climb(
    M, y, force, held, side, meets, low, high, lengths, given, row, first, depends, reach, limit,
    N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Let lanes be held until none is beyond its sides by more than rounding.

    Those that are met join as well. Returns the tableau, y, forces, what is held and on which side,
    steps, and a code: SOLVED, LOST where there is no end or no point, DOUBTED where a lane that is
    met depends on those that are held.
    """
    lane = tl.arange(0, N)
    code, steps = tl.full((), ends.SOLVED, tl.int32), 0
    joins = tl.full((), N, tl.int32)  # the lane that joins, N for none
    up = number(0.0, y)  # the side at which it does
    going = yes()
    while going:
        # the lane that is beyond a side by most, if none is on its way
        over, under = y - high, low - y
        above = over > under
        excess, bound = tl.where(above, over, under), tl.where(above, high, low)
        bend = tl.sum((given + force) * y)
        noise = ((reach + tl.sqrt(tl.abs(bend))) * lengths + tl.abs(bound)) * NOISE
        open_ = (held == 0) & (depends == 0)
        score = tl.where(open_ & (excess > noise), excess / lengths, 0.0)
        worst = tl.max(score)
        next_ = _first(tl.where(worst > 0, (score == worst) & (score > 0), meets & open_))
        fresh = joins == N
        joins = tl.where(fresh, next_, joins)
        here = lane == joins
        own = column_of(M, joins, N, C)
        square, length, side_ = sums(
            tl.where(here, -own, 0.0),
            tl.where(here, lengths, 0.0),
            tl.where(here, tl.where(above, 1.0, -1.0), 0.0).to(tl.float64),
        )
        up = tl.where(fresh, side_, up)
        excess = tl.where(up > 0, over, under)
        # what a unit of force does to the lanes: y of those that are not held, or their forces
        does = up * tl.where(joins >= first, own, -own)
        way = side * does
        falls = (side != 0) & (way * lengths > length * 1e-13)
        ratio = tl.where(falls, tl.maximum(side * force, 0.0) / tl.where(falls, way, 1.0), 1e300)
        part = tl.min(ratio)
        leaves = _first((ratio == part) & falls)
        met = count(here & meets) > 0
        apart = square > length * length * tl.where(met, APART, tableau.DEPENDENT)
        excess = tl.sum(tl.where(here, tl.maximum(excess, 0.0), 0.0))
        whole = tl.where(apart, excess / tl.where(apart, square, 1.0), 1e300)
        step = tl.minimum(part, whole)
        going = joins < N
        steps += tl.where(going, 1, 0)
        doubted = going & met & (apart == 0)
        lost = going & ((step >= 1e300) | (steps > limit))
        code = tl.where(doubted, ends.DOUBTED, tl.where(lost, ends.LOST, code))
        going = going & (lost == 0) & (doubted == 0)
        step = tl.where(going, step, 0.0)
        change = step * does
        y += tl.where(held, 0.0, tl.where(row, change, -change))
        force += tl.where(here, step * up, tl.where(held, -change, 0.0))
        full = whole <= part
        turns, pivot = tl.where(full, joins, leaves), -square
        if full == 0:
            own = column_of(M, turns, N, C)
            pivot = _at(own, turns)
        # rows that are held and coordinates that are not are inverted; where it has come to an end,
        # nothing turns
        turns = tl.where(going, turns, N)
        there = lane == turns
        sign = tl.where((turns >= first) == full, 1.0, -1.0)
        own, pivot = tl.where(going, own, 0.0), tl.where(going, pivot, 1.0)
        M = pivoted(M, own, turns, pivot, sign.to(tl.float64), N, C)
        held = tl.where(full, held | there, held & (there == 0))
        y = tl.where(full, tl.where(there, tl.where(up > 0, high, low), y), y)
        side = tl.where(there, tl.where(full, up, 0.0), side)
        force = tl.where(full, force, tl.where(there, 0.0, force))
        joins = tl.where(full, N, joins)
    return M, y, force, held, side, steps, code


@jit
def _nudged(x, excess, pull, low, high, coordinate, x_out, EPS: tl.constexpr, N: tl.constexpr):
    """x, rounded otherwise, such that ⟨Nᵀλ, x⟩ is about as much more as is given.

    That is by how much rounding has moved f: next to a solution with f* ≈ 0 it is more than the
    tolerance allows. One coordinate after the other moves by a few units in its last place, each
    time the one with the smallest effect of those for which that suffices.
    """
    lane = tl.arange(0, N)
    infinite = float("inf")
    inside = coordinate & (low < x) & (x < high)
    for _ in range(3):
        effect = tl.abs(pull * x)
        able = inside & (effect > 0) & (tl.abs(excess) <= 4 * EPS * effect)
        effect = tl.where(able, effect, infinite)
        least = tl.min(effect)
        chosen = lane == tl.min(tl.where(able & (effect == least), lane, N))
        new = rounded(x + excess / tl.where(chosen, pull, 1.0), x_out)
        new = tl.where(chosen, tl.minimum(tl.maximum(new, low), high), x)
        excess -= tl.sum(tl.where(chosen, pull * (new - x), 0.0))
        x = new
    return x


def _search(
    P, q,
    E, e,  # (·, k, n) or none, and a number, (k,) or (·, k)
    G, h,  # (·, g, n) or none, and a number, (g,) or (·, g)
    lower, upper,  # numbers, (n,) or (·, n)
    start,  # (·, n) or none, which is not used but has to be a point
    A, rhs, x_out, values, codes,
    state,  # (B, 2n + k + g + 1): x, the forces of rows and of bounds, how P was made to bend up
    left,
    p_batch, p_row, p_column, q_batch, q_column, E_batch, E_row, E_column, e_batch, e_column,
    G_batch, G_row, G_column, h_batch, h_column, lower_batch, lower_column, upper_batch,
    upper_column, start_batch, start_column, a_batch, rhs_batch, n, m, k, g, batch, tol, most,
    DENSE: tl.constexpr, EPS: tl.constexpr, MAX: tl.constexpr, LARGEST: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    infinite = float("inf")
    ties = k + g
    b, lane, coordinate = ends.own_lanes(n, N)
    cell, row, equation = tableau.own_rows(lane, n, k, g)
    blank = tl.zeros((N,), tl.float64)
    zero = number(0.0, blank)
    linear = entries(q, b, q_batch, q_column, lane, coordinate, 0.0, state)
    low = entries(lower, b, lower_batch, lower_column, lane, coordinate, -infinite, x_out)
    high = entries(upper, b, upper_batch, upper_column, lane, coordinate, infinite, x_out)
    low, high = low.to(tl.float64), high.to(tl.float64)
    if E is not None:
        side = entries(e, b, e_batch, e_column, lane - n, equation, 0.0, x_out).to(tl.float64)
        low, high = tl.where(equation, side, low), tl.where(equation, side, high)
        E += b * E_batch
    if G is not None:
        mine = row & (equation == 0)
        side = entries(h, b, h_batch, h_column, lane - n - k, mine, 0.0, x_out).to(tl.float64)
        high = tl.where(mine, side, high)
        G += b * G_batch
    _, usable = ends.started(start, b, start_batch, start_column, lane, coordinate, state, N)
    if DENSE:
        P += b * p_batch
    fixed = coordinate & (low == high)
    state += b * (2 * n + ties + 1)
    scratch = state  # where the results will be

    # P or, where that is singular, P + σNᵀN with rows whose sum is known; between the two it is
    # seen whether P with a small ridge bends up, as it has to
    PLAIN: tl.constexpr = 0
    RIDGE: tl.constexpr = 1
    STIFF: tl.constexpr = 2
    kind = tl.full((), PLAIN, tl.int32)
    M = tl.zeros((N // C, N, C), tl.float64)
    sound, trying, fit = yes() == 0, yes(), yes()
    given, weight = -linear, blank
    for _ in range(3):
        if trying:
            M = tableau.system_of(
                P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g, DENSE, N, C
            )
            skew, diagonal = symmetry_of(M, N, C)
            sizes, weight = row_sizes(M), tableau.largest_of(M)
            steep = tl.max(diagonal)
            rough = tl.sqrt(n.to(tl.float64)) * steep * (SKEW * EPS)
            fit = usable & _fit(linear, low, high, row, equation, sizes, LARGEST)
            fit = fit & (skew <= rough) & (steep > 1 / LARGEST)
            ridge = steep * tl.maximum(n.to(tl.float64) * (BENT * EPS), 128 * DOUBLE)
            shift = tl.where(kind == RIDGE, ridge, 0.0) * tl.where(coordinate, 1.0, 0.0)
            shift = tl.where((kind == STIFF) & fixed, steep, shift)
            if kind == STIFF:
                square = tl.sum(tl.sum(M * M, axis=2), axis=0)
                pull = tl.where(equation & (square > 0), high, 0.0) / tl.where(row, square, 1.0)
                pull = product(M, tl.where(equation & (square > 0), pull, 0.0), N, C)
                pull += tl.where(fixed, high, 0.0)
                given += tl.where(coordinate, pull * steep, 0.0)
            count_ = tl.where(kind == STIFF, k, 0)
            M = tableau.stiffened(M, E, E_row, E_column, steep, shift, n, count_, N, C)
            sound = fit
            if fit:
                M, sound = tableau.inverted(M, coordinate, n, N, C)
            # what is next, if anything
            trying = fit & (((kind == PLAIN) & (sound == 0)) | ((kind == RIDGE) & sound))
            kind += tl.where(trying, 2 if A is not None else 1, 0)
    sound = sound & (kind != RIDGE)

    code = tl.where(fit, ends.LOST, ends.UNFIT)
    steps = 0
    x, force = blank, blank
    value, gap = zero, zero
    lengths = tableau.lengths_of(M, N, C)
    trace = tl.sum(tl.where(coordinate, lengths * lengths, 0.0))
    reach = tl.sqrt(tl.abs(dot(given, product(M, given, N, C))))
    M, swept, depends = tableau.tie(M, fixed | equation, lengths, coordinate, n + k, N, C)
    held = swept == row
    z = tl.where(fixed, low, 0.0)
    found = product(M, tl.where(swept, tl.where(row, high, given), z), N, C)
    y = tl.where(row, tl.where(held, high, found), tl.where(held, z, -found))
    force = tl.where(row, tl.where(held, -found, 0.0), tl.where(held, given - found, 0.0))
    force = tl.where(cell, force, 0.0)
    side, meets = blank, held & (held == 0)
    turn, going = 0, sound
    while going:
        M, y, force, held, side, more, code = _climb(
            M, y, force, held, side, meets, low, high, lengths, given, row, n, depends, reach,
            tl.minimum(most, 8 * N) - steps, N, C,
        )  # fmt: skip
        steps += more
        # all digits, by the residuals of the problem as it was given
        swept = (held == row) & cell
        target = tl.where(row, high, -linear)
        moved, before, shaken, size = zero, zero + 1e300, zero, zero
        last = blank
        passes = 0
        while passes < PASSES:
            lead, pull, bulk = tableau.products(
                P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g,
                scratch, y, force, DENSE, N,
            )  # fmt: skip
            off = target - lead - pull
            off = -product(M, tl.where(swept, off, 0.0), N, C)
            last = tl.where(swept, off, 0.0)
            y += tl.where(row, 0.0, last)
            force += tl.where(row, last, 0.0)
            moved, shaken, size = largest(
                tl.where(row, 0.0, tl.abs(last)),
                tl.where(row, tl.abs(last) * lengths, 0.0),
                tl.where(coordinate, tl.abs(y), 0.0),
            )
            passes += 1
            still = (moved <= size * (2 * DOUBLE)) | (moved > 1e-3 * before)
            passes = tl.where(still & (passes > 1), PASSES, passes)
            before = moved
        x = tl.where(coordinate, y, 0.0)
        # what the last one did to the rows and to the forces of bounds
        shifts, pulls_, blur = tableau.products(
            P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g,
            scratch, last, last, DENSE, N,
        )  # fmt: skip
        lead, pull, bulk = tableau.products(
            P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g,
            scratch, x, force, DENSE, N,
        )  # fmt: skip
        blur = tl.where(row, blur, tl.abs(last))
        y = tl.where(row, lead, y)
        shakes = tl.abs(shifts + pulls_)
        free = (held == 0) | (cell == 0)
        force = tl.where(row, force, tl.where(free, 0.0, -(lead + linear + pull)))
        shaken = tl.maximum(shaken, tl.max(tl.where(coordinate & held, shakes * lengths, 0.0)))
        over, under = y - high, low - y
        slack = -tl.maximum(over, under)
        bound = tl.abs(tl.where(over > under, high, low))
        bound = tl.where(slack < infinite, bound, 0.0)
        bend = tl.sqrt(tl.abs(dot(x, lead)))
        noise = (tl.where(row, bulk, tl.abs(x)) + bound) * (CLEAR * DOUBLE)
        noise += 4 * (blur + (reach + bend) * lengths * DOUBLE)
        open_ = (held == 0) & (depends == 0)
        wrong = open_ & (slack < -noise)
        meets = open_ & (slack <= noise) & (wrong == 0)
        strongest = tl.max(tl.abs(force) * lengths)
        rough = (shaken + (reach + bend + strongest) * DOUBLE) * CLEAR
        pulls = (side != 0) & (side * force * lengths < -rough)
        missed = depends & ((tl.abs(y - high) <= noise) == 0)
        bad = count(pulls | missed) > 0
        bad = bad | ((moved <= size * DOUBTFUL) == 0)
        again = count(wrong | meets) > 0
        turn += 1
        bad = bad | (again & (turn >= ROUNDS))
        code = tl.where((code == ends.SOLVED) & bad, ends.LOST, code)
        going = again & (code == ends.SOLVED)
        held_by = (side == 0) | (side * force * lengths > rough)
        force = tl.where(going | held_by, force, 0.0)
    if code == ends.SOLVED:
        x = rounded(x, x_out)
        x = tl.where(coordinate, tl.minimum(tl.maximum(x, low), high), 0.0)
        force = tableau.shared(M, force, weight, equation & held, depends, N, C)
        price = tl.where(row, force, 0.0)
        slope, pull = blank, blank
        trials = 2
        while trials > 0:
            lead, pull, bulk = tableau.products(
                P, p_row, p_column, E, E_row, E_column, G, G_row, G_column, n, k, g,
                scratch, x, price, DENSE, N,
            )  # fmt: skip
            # rows may be off by what rounding x does to them
            over = tl.where(equation, tl.abs(lead - high), lead - high)
            most_over = (bulk + tl.abs(high)) * ((2 * CLOSE if EPS < 1e-10 else CLOSE) * EPS)
            off = row & ((over <= most_over) == 0) & (high < infinite)
            settled = count(off) == 0
            bent = tl.where(coordinate, lead, 0.0)
            value, slope = ends.valued(A, rhs, b, a_batch, rhs_batch, x, bent, linear, n, m, N)
            # f(x) − f(s) ≤ Σ λ_j (c_j − ⟨n_j, x⟩) + rᵀP⁻¹r / 2 with r = ∇f + Σ λ_j n_j, of which
            # what points from a bound at which x is makes nothing
            rest = tl.where(coordinate, slope + pull, 0.0)
            away = ((rest > 0) & (x == low)) | ((rest < 0) & (x == high))
            rest = tl.where(away, 0.0, rest)
            tight = tl.where(price != 0, price * (high - lead), 0.0)
            terms = tl.abs(slope * x) + tl.abs(price) * tl.where(row, bulk, 0.0)
            excess, curve, rounding = sums(tight, rest * rest, terms)
            gap = tl.abs(excess) + curve * trace + rounding * (2 * DOUBLE)
            code = ends.verdict(settled, value, gap, tol, MAX)
            trials = tl.where(code == ends.UNPROVEN, trials - 1, 0)
            if trials > 0:
                x = _nudged(x, excess, pull, low, high, coordinate, x_out, EPS, N)
        force = tl.where(coordinate & (force != 0), -(slope + pull), force)
    answered = code == ends.SOLVED
    x = tl.where(answered, x, 0.0)
    force = tl.where(answered, force, 0.0)
    stored(x_out, b * n + lane, x, coordinate)
    tl.debug_barrier()
    tl.store(state + lane, tl.where(row, force, x), mask=cell)
    tl.store(state + n + ties + lane, force, mask=coordinate)
    tl.store(state + 2 * n + ties, kind.to(tl.float64))
    ends.told(values, codes, left, b, batch, value, gap, code, steps, EPS)


search = entry(_search)
