"""What the solution on some of the coordinates says of the others, and sparse columns, compiled."""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels import outcome, place, table
from dfwlayer.engines.compiled.kernels.active import side_of
from dfwlayer.engines.compiled.kernels.certificate import gap_beside, gap_of
from dfwlayer.engines.compiled.kernels.constants import CLEAR, DOUBLE, ROUNDING
from dfwlayer.engines.compiled.kernels.dense import STAMP, add_four, copy, entry, fill
from dfwlayer.engines.compiled.kernels.numbers import own
from dfwlayer.engines.compiled.kernels.polytope import project
from dfwlayer.engines.compiled.kernels.search import fit
from dfwlayer.engines.compiled.kernels.verdict import pushed

__all__ = ["adjoint", "assess", "begin", "certify", "combine", "correlate", "dots", "sum_rows"]


TILE = 2048  # columns whose sums stay in the fastest memory


def _on_disk(stamp):
    """What is called from Python, kept on disk until a stamp changes."""

    @entry
    def begin(
        first,
        end,
        bodies,  # (·, k, n + 2)
        blocks,  # (·, 4)
        q,  # (·, n), the gradient at zero
        z,  # (·, n)
        given,  # whether x is a point of the set, and not to be projected from z
        x,  # (B, n), and what follows is where the results go
        places,  # (B, n)
        codes,  # (B,), UNFIT for problems that others should solve
    ):
        """Points of the sets to start from, next to z, and where their coordinates are."""
        _ = stamp
        n, k = x.shape[1], bodies.shape[1]
        guess, scratch, none = np.zeros(k), np.empty(n), np.empty((0, 0))
        for b in range(first, end):
            body, at = bodies[own(b, bodies)], x[b]
            if fit(body, blocks, none, q[own(b, q)], z[own(b, z)]) == 0:
                codes[b] = outcome.UNFIT
                continue
            if not given:
                fill(0.0, guess)
                if not project(body, blocks, z[own(b, z)], at, guess, places[b], scratch):
                    codes[b] = outcome.UNFIT
                    continue
            for i in range(n):
                where = place.FREE
                if at[i] <= body[table.LOWER, i]:
                    where = place.LOW
                elif at[i] >= body[table.UPPER, i]:
                    where = place.HIGH
                elif at[i] == 0:
                    for row in range(table.ROWS, k):
                        if body[row, table.KIND] == table.BUDGET and body[row, i] > 0:
                            where = place.ZERO
                places[b, i] = where

    @entry
    def assess(
        first,
        end,
        bodies,  # (·, k, n + 2)
        g,  # (B, n), the gradient
        lengths,  # (n,), the square roots of the diagonal of the Hessian
        sizes,  # (B,), Σ_j lengths_j |x_j|, and ‖b‖ for least squares
        most,  # (B,), beyond which no multiplier is in doubt
        q,  # (·, n) or (1, 0) for least squares
        inside,  # (n,), coordinates that were not held
        places,  # (B, n)
        multipliers,  # (B, k)
        todo,  # (B,), which problems are asked for
        wrong,  # (B, n), and what follows is where the results go: what a coordinate promises
        found,  # (2, B): how many are wrong, how many that could be
    ):
        """The multipliers of the coordinates that were held."""
        _ = stamp
        n, k = g.shape[1], bodies.shape[1]
        for b in range(first, end):
            if not todo[b]:
                continue
            body, own_q = bodies[own(b, bodies)], q[own(b, q)]
            bad = doubtful = 0
            for i in range(n):
                wrong[b, i] = 0.0
                low, high, where = body[table.LOWER, i], body[table.UPPER, i], places[b, i]
                if inside[i]:
                    continue
                r, hold, pull = g[b, i], 0.0, 0.0
                for row in range(table.ROWS, k):
                    force = multipliers[b, row] * body[row, i]
                    pull += abs(force)
                    if body[row, table.KIND] == table.BUDGET:
                        hold += force
                    else:
                        r += force
                if low == high:
                    places[b, i] = pushed(r, hold, low, side_of(low, place.LOW))
                    continue
                if where == place.ZERO:
                    ahead = hold - abs(r)
                elif where == place.LOW:
                    ahead = r + hold * side_of(low, where)
                else:
                    ahead = -r - hold * side_of(high, where)
                if ahead > most[b]:  # which is so for nearly all in the end
                    continue
                noise = lengths[i] * sizes[b] + pull
                if len(own_q) > 0:
                    noise += abs(own_q[i])
                noise *= CLEAR * ROUNDING * DOUBLE
                if ahead < -noise:
                    bad += 1
                    wrong[b, i] = -ahead / max(lengths[i], 1e-300)
                elif not (ahead >= noise or (where == place.ZERO and abs(ahead) <= noise / CLEAR)):
                    doubtful += 1  # what is tied at a kink stays there, see `verdict.judge`
            found[0, b], found[1, b] = bad, doubtful

    @entry
    def certify(
        first,
        end,
        bodies,  # (·, k, n + 2)
        blocks,  # (·, 4)
        g,  # (B, n)
        x,  # (B, n)
        multipliers,  # (B, k)
        todo,  # (B,), which problems are asked for
        places,  # (B, n)
        change,  # (B, n), of g where free coordinates are minimised out, or (0, n)
        gap,  # (B,), where the results go
    ):
        """Bounds of f(x) − f*, see `gap_of` and `gap_beside`."""
        _ = stamp
        n = g.shape[1]
        guess, slopes, scratch = np.empty(bodies.shape[1]), np.empty(n), np.empty(n)
        for b in range(first, end):
            if todo[b]:
                copy(multipliers[b], guess)
                copy(g[b], slopes)
                body = bodies[own(b, bodies)]
                if len(change) > 0:
                    gap[b] = gap_beside(body, x[b], slopes, guess, places[b], scratch, change[b])
                else:
                    gap[b] = gap_of(body, blocks, x[b], slopes, guess, scratch, False)

    @entry
    def correlate(
        begins,  # (n + 1,), where each column begins
        rows,  # (nnz,)
        values,  # (nnz,)
        columns,  # (p,)
        first,  # the columns from here on are new
        dense,  # (m,), zero
        P,  # (c, c), where the results go
    ):
        """The products of new columns of a sparse matrix with each other and with the old ones."""
        _ = stamp
        for a in range(first, len(columns)):
            for e in range(begins[columns[a]], begins[columns[a] + 1]):
                dense[rows[e]] += values[e]
            for c in range(a + 1):
                total = 0.0
                for e in range(begins[columns[c]], begins[columns[c] + 1]):
                    total += values[e] * dense[rows[e]]
                P[a, c] = P[c, a] = total
            for e in range(begins[columns[a]], begins[columns[a] + 1]):
                dense[rows[e]] = 0.0

    @entry
    def dots(first, end, begins, rows, values, columns, r, out):
        """⟨A_j, r⟩ over some columns (p,) of a sparse matrix, r (B, m) and out (B, p)."""
        _ = stamp
        for b in range(len(r)):
            for a in range(first, end):
                total = 0.0
                for e in range(begins[columns[a]], begins[columns[a] + 1]):
                    total += values[e] * r[b, rows[e]]
                out[b, a] = total

    @entry
    def adjoint(first, end, begins, rows, values, r, out):
        """⟨A_j, r⟩ over a range of the columns of a sparse matrix, r (m,) and out (n,)."""
        _ = stamp
        for j in range(first, end):
            total = 0.0
            for e in range(begins[j], begins[j + 1]):
                total += values[e] * r[rows[e]]
            out[j] = total

    @entry
    def combine(begins, rows, values, columns, x, out):
        """Add Σ x_j A_j over some columns (p,) of a sparse matrix to out (B, m), x (B, p)."""
        _ = stamp
        for b in range(len(x)):
            for a in range(len(columns)):
                if x[b, a] != 0:
                    for e in range(begins[columns[a]], begins[columns[a] + 1]):
                        out[b, rows[e]] += x[b, a] * values[e]

    @entry
    def sum_rows(first, end, matrix, index, x, out):
        """Add Σ x_a M_a over some rows (k,) of a matrix to columns of out (B, n), x (B, k)."""
        _ = stamp
        k = len(index)
        for b in range(len(x)):
            for left in range(first, end, TILE):
                right = min(left + TILE, end)
                for a in range(0, k, 4):
                    i, j = min(a + 1, k - 1), min(a + 2, k - 1)
                    m = min(a + 3, k - 1)
                    add_four(
                        x[b, a],
                        x[b, i] if a + 1 < k else 0.0,
                        x[b, j] if a + 2 < k else 0.0,
                        x[b, m] if a + 3 < k else 0.0,
                        matrix,
                        index[a],
                        index[i],
                        index[j],
                        index[m],
                        left,
                        right,
                        out[b],
                    )

    return begin, assess, certify, correlate, dots, adjoint, combine, sum_rows


begin, assess, certify, correlate, dots, adjoint, combine, sum_rows = _on_disk(STAMP)
