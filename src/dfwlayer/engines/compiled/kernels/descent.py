"""From a start to the face of the solution of a quadratic problem over a set in normal form.

Spectral projected gradient steps show which coordinates are held, a Cholesky factor of what is free
gives the minimiser on that face, and the multipliers there say whether it is the solution. Where
that minimiser is outside of the set, coordinates on the way to it are held as well, one after the
other or many at once, until it is inside (Moré and Toraldo, 1991, with exact minimisers).
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome, place, table
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, SINGLE
from dfwlayer.engines.compiled.kernels.dense import copy, fill, kernel, product, summing
from dfwlayer.engines.compiled.kernels.faces import (
    GUESS,
    HELD,
    HOLDING,
    PB,
    PX,
    PY,
    SIDES,
    WAY,
    X,
    Y,
    Z,
    blur,
    free_in,
    iterates,
    minimise,
    on_face,
)
from dfwlayer.engines.compiled.kernels.polytope import project
from dfwlayer.engines.compiled.kernels.verdict import CLEARLY, DOUBTFUL, SINGULAR, WRONG, judge
from dfwlayer.engines.compiled.kernels.walked import has_vertex, vertex, walked

__all__ = ["descend"]

# Rounds of spectral steps, of minimisers on faces that get smaller, and of a walk from there, which
# ends without the solution only where f is flat. The first part of a round ends when the face has
# not changed for a while, and may take twice as long as in the last one.
ROUNDS = 4
BLOCK, BLOCKS = 25, 400  # most spectral steps in the first round, and in any
SETTLED, SURE = 2, 32  # steps without a change of the face, after which it is tried
FACES, MOST = 3, 16  # most minimisers in a row
# Multiplications after which tensor operations are not slower, or find what this does not: for
# well-conditioned problems in float32, in which they have half the numbers to load, and for others.
WELL, LONG = 9e7, 2e8
# The third spectral step, counted from zero, tells what is ahead. The curvature along the steps so
# far spreads by factors of 1 to 2.2 where one or two faces lead to the solution, and of 6 to 300
# where further steps would be long in finding it: seen on the families of `dfw bench`, on
# covariances, kernels and spectra falling by factors of 100 and 10,000, over ℓ1 balls and boxes, n
# = 100 to 600. Of the former, how many coordinates will be free is known to some 30 % then, and
# what would be beyond the limit is left at once. The latter go on from a vertex, coordinate by
# coordinate, which costs what the free ones do.
TELLS, SPREAD = 2, 5.0
# The same is told later by the pivots of a factor, whose squares spread by 2 to 50 where few faces
# lead to the solution. From a vertex a walk then takes less than from a face that is too broad: a
# third of the rotations for least squares with a condition of 1e8 in a box.
PIVOTS, UNEVEN = 1e3, -1
FEW = 2.0  # minimisers on faces of a well-conditioned problem
# What a factor costs from which on conjugate gradients are quicker on such a face, and the products
# that they are taken to need: about 160 free coordinates, timed on `active` and `paper` of
# `dfw bench`, n = 150 to 1000, both passes.
BROAD, ITERATED = 1.4e6, 40.0


@kernel
def _snap(body, x, places):
    """Hold coordinates at the bounds that they are at to rounding; whether there are any.

    Caps that add up to a total, but for the last digit, leave one of them a little free.
    """
    found, widest = False, 0.0
    for i in range(len(x)):
        widest = max(widest, abs(x[i]))
    for i in range(len(x)):
        low, high = body[table.LOWER, i], body[table.UPPER, i]
        if places[i] != place.FREE or low == high:
            continue
        if np.isfinite(high) and high - x[i] <= CLEAR * DOUBLE * max(widest, abs(high)):
            places[i], found = place.HIGH, True
        elif np.isfinite(low) and x[i] - low <= CLEAR * DOUBLE * max(widest, abs(low)):
            places[i], found = place.LOW, True
    return found


@kernel
def _stand(body, x, places, multipliers, sides):
    """The face that x lies on: places, signs, and which budgets hold (a multiplier of 1)."""
    n, k = len(x), len(body)
    for row in range(table.ROWS, k):
        total = 0.0
        for i in range(n):
            total += body[row, i] * abs(x[i])
        full = total >= (1 - CLEAR * DOUBLE) * body[row, table.TOTAL]
        multipliers[row] = 1.0 if body[row, table.KIND] == table.BUDGET and full else 0.0
    for i in range(n):
        sides[i] = 1.0 if x[i] > 0 else (-1.0 if x[i] < 0 else 0.0)
        places[i] = place.FREE
        for row in range(table.ROWS, k):
            if multipliers[row] > 0 and body[row, i] > 0 and x[i] == 0:
                places[i] = place.ZERO
        if x[i] >= body[table.UPPER, i]:
            places[i] = place.HIGH
        if x[i] <= body[table.LOWER, i]:
            places[i] = place.LOW


@kernel
def _reach(body, x, best, places, holding, sides):
    """How far one may go from x to the minimiser on its face: 1 is all the way.

    And the coordinate that is in the way, −1 for none or a budget, and where it stops.
    """
    n, k = len(x), len(body)
    reach, stop, at = 1.0, 0.0, -1
    for i in range(n):
        if places[i] != place.FREE:
            continue
        low, high = body[table.LOWER, i], body[table.UPPER, i]
        for row in range(table.ROWS, k):
            if holding[row] > 0 and body[row, i] > 0:  # beyond zero is another face
                low, high = (max(low, 0.0), high) if sides[i] > 0 else (low, min(high, 0.0))
        if low <= best[i] <= high:
            continue
        limit = low if best[i] < low else high
        end = max((limit - x[i]) / (best[i] - x[i]), 0.0)
        if end < reach:
            reach, stop, at = end, limit, i
    for row in range(table.ROWS, k):
        if body[row, table.KIND] != table.BUDGET or holding[row] > 0:
            continue
        for _ in range(
            BLOCK
        ):  # steps of Newton's method: the sum is convex along the way, so it is met from beyond
            total = slope = 0.0
            for i in range(n):
                d = best[i] - x[i]
                z = x[i] + reach * d
                total += body[row, i] * abs(z)
                slope += body[row, i] * (d if z > 0 else -d)
            if total <= body[row, table.TOTAL] or not slope > 0:
                break
            reach, at = max(reach - (total - body[row, table.TOTAL]) / slope, 0.0), -1
    return reach, stop, at


@summing
def _gain(q, x, px, y, py):
    """The slope of f from x to y, its bend, and the square of the way."""
    fall = bend = square = 0.0
    for i in range(len(x)):
        d = y[i] - x[i]
        fall -= d * (px[i] + q[i])
        bend += d * (py[i] - px[i])
        square += d * d
    return fall, bend, square


@kernel
def _best_length(fall, bend):
    """Which part of the way to go."""
    if not fall > 0:
        return 0.0
    return min(1.0, fall / bend) if bend > 0 else 1.0


@kernel
def _go(x, px, y, py, length):
    """x, and P x, that part of the way to y."""
    for i in range(len(x)):
        x[i] = y[i] if length == 1 else x[i] + length * (y[i] - x[i])
        px[i] = py[i] if length == 1 else px[i] + length * (py[i] - px[i])


@kernel
def _cost(places, index):
    """Multiplications that a minimiser on a face takes."""
    free = float(free_in(places))
    return ITERATED * free**2 if iterates(index) else free**3 / 3


@kernel
def _uneven(L, free):
    """Whether pivots tell that P is ill-conditioned on a face."""
    least, most = np.inf, 0.0
    for a in range(free):
        least, most = min(least, L[a, a]), max(most, L[a, a])
    return most * most > PIVOTS * least * least


@kernel
def _polish(
    P, q, body, eps, blocks, bound, most, left, restarts,
    places, multipliers, best, work, ties, index, L, schur,
):  # fmt: skip
    """From x on a face to the minimiser there, or if that is not in the set on smaller ones.

    Returns the verdict on the last face, how many there were, and what they took. A way that leaves
    the set is gone up to where it does, or to the projection of its end, whatever makes f smaller.
    Where f bends unevenly on a face there will be many, and if there is a vertex to begin from
    anew, ``restarts``, the verdict is `UNEVEN`.
    """
    n, k = len(q), len(body)
    x, px, y, py, sides, held = work[X], work[PX], work[Y], work[PY], work[SIDES], work[HELD]
    guess, holding = ties[GUESS], ties[HOLDING]
    face = P, q, body, eps, places, multipliers, best, work, ties, index, L, schur
    spent = 0.0
    for faces in range(1, most + 1):
        spent += _cost(places, index) + 5.0 * n * n
        if spent > left:
            return WRONG, faces, spent
        for row in range(table.ROWS, k):
            holding[row] = multipliers[row] if body[row, table.KIND] == table.BUDGET else 0.0
        if restarts and iterates(index):  # a factor of this face would be in vain
            if not on_face(*face, False):
                index[-1] = 0
                return UNEVEN, faces, spent
        elif not minimise(*face, False):
            return SINGULAR, faces, spent
        off = blur(index, eps)
        verdict = judge(q, body, places, multipliers, best, py, bound, sides, off)
        if verdict == DOUBTFUL and _snap(body, best, places):
            if not minimise(*face, False):
                return DOUBTFUL, faces, spent
            off = blur(index, eps)
            verdict = judge(q, body, places, multipliers, best, py, bound, sides, off)
            return verdict if verdict == CLEARLY else DOUBTFUL, faces, spent
        if verdict == WRONG and restarts and not iterates(index) and _uneven(L, free_in(places)):
            verdict = UNEVEN
        if verdict != WRONG:
            return verdict, faces, spent
        reach, stop, at = _reach(body, x, best, places, holding, sides)
        if reach == 1:
            _go(x, px, best, py, 1.0)
            return WRONG, faces, spent
        fall, bend, _ = _gain(q, x, px, best, py)
        gain = reach * (fall - 0.5 * reach * bend)
        copy(py, work[PB])
        for i in range(n):
            held[i] = places[i]
        fill(0.0, guess)
        more = length = 0.0
        if project(body, blocks, best, y, guess, places, work[WAY]):
            product(P, y, py)
            fall, bend, _ = _gain(q, x, px, y, py)
            length = _best_length(fall, bend)
            more = length * (fall - 0.5 * length * bend)
        if more > gain:
            _go(x, px, y, py, length)
            _stand(body, x, places, multipliers, sides)
            continue
        _go(x, px, best, work[PB], reach)
        if at < 0:
            _stand(body, x, places, multipliers, sides)
            continue
        x[at] = stop
        for i in range(n):
            places[i] = int(held[i])
        places[at] = (
            place.LOW
            if stop <= body[table.LOWER, at]
            else (place.HIGH if stop >= body[table.UPPER, at] else place.ZERO)
        )
        sides[at] = 1.0 if stop > 0 else (-1.0 if stop < 0 else 0.0)
        copy(holding, multipliers)
    return WRONG, most, spent


@kernel
def descend(
    P, q, body, blocks, bound, most, eps, places, multipliers, best, work, ties, index, L, schur
):
    """Find the face of the solution and x on it; the steps this took, or minus why it did not.

    The start is in line X.
    """
    n = len(q)
    dense = len(P) > 0
    x, px, y, py, z = work[X], work[PX], work[Y], work[PY], work[Z]
    sides, held, guess = work[SIDES], work[HELD], ties[GUESS]
    alpha = step = 1.0 / bound
    steps = 0
    least, most_bent = np.inf, 0.0
    effort, limit = 0.0, LONG
    index[-1] = 0
    cold = dense
    for i in range(n):
        cold = cold and x[i] == 0
    restarts = cold and has_vertex(body, blocks)
    if dense:
        copy(x, z)
        fill(0.0, guess)
        if not project(body, blocks, z, y, guess, places, work[WAY]):
            return -outcome.LOST
        product(P, y, py)
        _go(x, px, y, py, 1.0)
    else:  # one gradient step is all it takes, from anywhere
        fill(0.0, x)
        fill(0.0, px)
    for turn in range(ROUNDS if dense else 1):
        fill(0.0, guess)
        same, length, begun = 0, 1.0, False
        block = min(BLOCK << turn, BLOCKS) if dense else 1
        for trial in range(block):
            for i in range(n):
                z[i] = x[i] - alpha * (px[i] + q[i])
                held[i] = places[i]
            if not project(body, blocks, z, y, guess, places, work[WAY]):
                return -outcome.LOST
            product(P, y, py)
            steps += 1
            step = alpha
            fall, bend, square = _gain(q, x, px, y, py)
            length = _best_length(fall, bend)
            if length == 0:
                break
            if bend > 0:
                alpha = min(max(square / bend, 0.01 / bound), 1e8 / bound)
            changed = trial == 0
            for i in range(n):
                changed = changed or places[i] != held[i]
            same = 0 if changed else same + 1
            if dense and turn == 0 and bend > 0:
                least, most_bent = min(least, bend / square), max(most_bent, bend / square)
                if trial == TELLS:
                    well = most_bent <= SPREAD * least
                    limit = WELL if well and eps == SINGLE else LONG
                    index[-1] = 1 if well and _cost(places, index) > BROAD else 0
                    if well and _cost(places, index) * FEW > limit:
                        return -outcome.LOST
                    if not well and not cold:  # next to the solution, it may be hoped
                        _stand(body, x, places, multipliers, sides)
                        begun = True
                    elif not well and restarts:
                        vertex(P, q, body, blocks, x, places)
                        begun = True
                    if begun:
                        break
            if same >= min(SETTLED << turn, SURE) or trial == block - 1 or steps >= most:
                break
            _go(x, px, y, py, length)
        effort += n * n * (trial + 1.0)
        verdict = WRONG
        if not begun:
            if length > 0.5 or length == 0:
                # the face of the last step, whose multipliers are those of f times its length
                _go(x, px, y, py, 1.0)
                for row in range(table.ROWS, len(body)):
                    multipliers[row] = guess[row] / step
                for i in range(n):
                    sides[i] = 1.0 if y[i] > 0 else (-1.0 if y[i] < 0 else 0.0)
            else:
                _go(x, px, y, py, length)
                _stand(body, x, places, multipliers, sides)
            if steps >= most and dense:
                return -outcome.LOST
            verdict, faces, spent = _polish(
                P,
                q,
                body,
                eps,
                blocks,
                bound,
                1 if turn == 0 and iterates(index) else min(FACES << turn, MOST),
                limit - effort if dense else np.inf,
                restarts and turn == 0,
                places,
                multipliers,
                best,
                work,
                ties,
                index,
                L,
                schur,
            )
            steps += faces if dense else 0
            effort += spent
        # where conjugate gradients did arrive on a broad face, some more of the spectral steps cost
        # less than coordinates one by one
        again = turn == 0 and iterates(index) and float(free_in(places)) ** 3 / 3 > BROAD
        if dense and not again and verdict in (WRONG, UNEVEN, SINGULAR) and steps < most:
            singular = verdict == SINGULAR
            if verdict != WRONG and restarts:  # few are free there
                vertex(P, q, body, blocks, x, places)
            given = P, q, body, eps, bound, most - steps, limit - effort
            verdict, taken, spent = walked(
                *given, places, multipliers, best, work, ties, index, L, schur, singular
            )
            steps += taken
            effort += spent
            if verdict == SINGULAR:  # of many solutions, one is for others to choose
                return -outcome.LOST
        if verdict == CLEARLY:
            return steps if steps <= most else -outcome.LOST
        if verdict == DOUBTFUL:
            return -outcome.DOUBTED
        if steps > most or effort > limit:
            return -outcome.LOST
    return -outcome.LOST
