"""Costs and rows with kinks in single coordinates, without the variables that make them linear.

Reductions write |z| as a + b with z = a − b and a, b ≥ 0, and (o − z)₊ as an s ≥ 0 with s ≥ o − z.
Where such variables have no other part in a program they are taken out again: what is a α + b β is

    −β z + (α + β) (z)₊,

and so is s, with a kink at o. Sums of these over single coordinates have a slope that jumps at the
kinks, in the cost and in rows, by numbers that are affine in the parameters. `Kinks` holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dfwlayer.integrations.cvxpy.affine import ONE, Array, Integers, Table
from dfwlayer.integrations.cvxpy.program import Block, Program, matching

__all__ = ["Kinks", "bent"]


class Kinks(NamedTuple):
    """Kinks (z_i − o)₊ of a program, by their coordinates and slots; rows of tables count kinks."""

    columns: Integers  # of the program, one for each kink
    slots: Integers  # the number of a kink among those of its coordinate
    places: Table  # o
    costs: Table  # what the slope of f rises by
    jumps: Table  # what the slopes of rows rise by; the column is the row
    rows: int  # those with kinks, which are the first ones of the program

    @property
    def depth(self) -> int:
        """The most of one coordinate."""
        return int(self.slots.max()) + 1

    def arrays(self, number: Integers, n: int) -> dict[str, Array]:
        """Places and costs (n, K) and jumps (rows, n, K), for the coordinates by their columns."""
        depth = self.depth
        at = number[self.columns] * depth + self.slots
        shape, found = (n, depth), {}
        found["kink.place"] = Array(shape, self.places._replace(row=at[self.places.row]))
        found["kink.cost"] = Array(shape, self.costs._replace(row=at[self.costs.row]))
        if self.rows:
            flat = self.jumps.column * n * depth + at[self.jumps.row]
            found["kink.jump"] = Array((self.rows, *shape), self.jumps._replace(row=flat))
        return found


class _Fold(NamedTuple):
    """What becomes of s = |σ| (z − o)₊, or with a negative sign of σ (o − z)₊."""

    column: int  # of z
    factor: float  # σ in s = (σ z + offset)₊
    offset: Table


def bent(program: Program, halves: dict[int, int], asked: set[int]) -> tuple[Program, Kinks] | None:
    """The program in single coordinates z, None where that is not what it is.

    Args:
        program: Over rows, simplified.
        halves: The ids of the variables b by those of a, of all pairs.
        asked: The ids of variables that are to be known in the end.

    """
    if not halves:
        return None
    return _Bending(program, halves).result(asked)


class _Bending:
    def __init__(self, program: Program, halves: dict[int, int]) -> None:
        self.program = program
        self.width = program.width
        self.first = np.arange(self.width + 1)  # the column that an entry is counted at
        self.second = np.zeros(self.width + 1, bool)  # the b of a pair
        self.paired = np.zeros(self.width + 1, bool)
        self.folded: dict[int, int] = {}  # s, and what is s + E, by their columns
        self.fits = True
        for one, other in halves.items():
            self._sort(program.variables.get(one), program.variables.get(other))
        self.inside = self.paired.copy()  # what is to be taken out, but for z
        self.inside[list(self.folded)] = True

    def _sort(self, one: Block | None, other: Block | None) -> None:
        """A pair both of which are there, or one that is s with the other defined by it."""
        if one is None or other is None:
            self.fits = False
            return
        gone = self.program.gone
        for a, b in zip(one.places, other.places, strict=True):
            if not gone[a] and not gone[b]:
                self.first[b] = a
                self.second[b] = True
                self.paired[[a, b]] = True
            elif gone[a] != gone[b]:
                self.folded[int(b if gone[a] else a)] = int(a if gone[a] else b)
            else:
                self.fits = False

    def result(self, asked: set[int]) -> tuple[Program, Kinks] | None:
        program = self.program
        used = np.concatenate((program.P.row, program.P.column))
        if not self.fits:
            return None
        lost = self._lost()
        q = self._expanded(program.q, lost)
        outputs = [program.variables[key].places for key in asked if key in program.variables]
        needed = np.concatenate([used, *outputs])
        if self.inside[needed].any() or lost[needed].any():
            return None
        folds = self._folds()
        if folds is None:
            return None
        rest, rows = self._without_signs(folds)
        if rest is None:
            return None
        return self._made(rest, rows, q, folds, lost)

    def _lost(self) -> Any:
        """Which columns are defined by what has kinks."""
        found, lost = self.program.solved, np.zeros(self.width + 1, bool)
        _, jumps = self._split(found)
        lost[jumps.row] = True
        lost[found.row[np.isin(found.column, list(self.folded))]] = True
        return lost

    def _split(self, table: Table) -> tuple[Table, Table]:
        """The entries in z = a − b, and those in (z)₊ by the column of z."""
        pair = self.paired[table.column]
        low = table.where(self.second[table.column]).scaled(-1.0)
        low = low._replace(column=self.first[low.column])
        jumps = table.where(pair)
        jumps = jumps._replace(column=self.first[jumps.column])
        return Table.joined((table.where(~pair), low)), Table.joined([jumps])

    def _expanded(self, q: Table, lost: Any) -> Table:
        """The slopes of f with what defines a column in its place, where that has kinks."""
        mine = lost[q.row]
        if not mine.any():
            return q
        cost, says = q.where(mine), self.program.solved
        i, j = matching(cost.row, says)
        terms = self.program.terms.products(cost.term[i], says.term[j])
        zero = np.zeros(len(i), np.int64)
        more = Table(says.column[j], zero, terms, cost.value[i] * says.value[j])
        more = more.where(more.row < self.width)  # the rest is a constant
        return Table.joined((q.where(~mine), more))

    def _folds(self) -> dict[int, _Fold] | None:
        """How each s folds the line of one coordinate: s ≥ 0, s + E ≥ 0 for E = −σ z − offset."""
        solved, _ = self._split(self.program.solved)
        order = np.argsort(solved.row, kind="stable")
        solved = solved.where(order)
        found = {}
        for s, other in self.folded.items():
            begin, end = np.searchsorted(solved.row, (other, other + 1))
            says = solved.where(slice(begin, end))
            itself = says.column == s
            line = ~itself & (says.column < self.width)
            one = itself.sum() == 1 and line.sum() == 1
            if not one or says.term[itself][0] != ONE or says.value[itself][0] != 1:
                return None
            if says.term[line][0] != ONE or int(says.column[line][0]) in self.folded:
                return None
            offset = says.where(says.column == self.width).scaled(-1.0)
            found[s] = _Fold(int(says.column[line][0]), -float(says.value[line][0]), offset)
        return found

    def _without_signs(self, folds: dict[int, _Fold]) -> tuple[Table | None, Integers]:
        """The inequalities but for a, b, s ≥ 0 and s + E ≥ 0, and the rows that are left."""
        rows = self.program.inequalities
        rows = rows.where(np.argsort(rows.row, kind="stable"))
        places = [block.places for block in self.program.inequality_blocks]
        every = np.unique(np.concatenate([np.zeros(0, np.int64), *places]))
        count = np.bincount(rows.row, minlength=len(every) + 1)
        signs: set[int] = set()
        seen: set[int] = set()
        single = np.flatnonzero(count[rows.row] == 1)
        for at in single[self.inside[rows.column[single]]]:
            if rows.term[at] == ONE and rows.value[at] < 0:
                signs.add(int(rows.row[at]))
                seen.add(int(rows.column[at]))
        if seen != set(np.flatnonzero(self.inside).tolist()):
            return None, every
        for s in folds:  # the row of s + E ≥ 0 is the negative of what defines it
            says = self.program.solved.where(self.program.solved.row == self.folded[s])
            mine = [r for r in rows.row[rows.column == s].tolist() if r not in signs]
            spans = {r: slice(*np.searchsorted(rows.row, (r, r + 1))) for r in mine}
            same = [r for r, span in spans.items() if _alike(rows.where(span), says)]
            if not same:
                return None, every
            signs.update(same)
        left = np.array([r for r in every.tolist() if r not in signs], np.int64)
        return rows.where(~np.isin(rows.row, list(signs))), left

    def _made(
        self, rows: Table, left: Integers, q: Table, folds: dict[int, _Fold], lost: Any
    ) -> tuple[Program, Kinks] | None:
        program, width = self.program, self.width
        equations, bends = self._split(program.equations)
        if len(bends.value) or np.isin(equations.column, list(folds)).any():
            return None
        turned = Table(np.zeros(len(q.row), np.int64), q.row, q.term, q.value)
        costs, cost_jumps = self._split(turned)
        base, row_jumps = self._split(rows)
        columns = [int(c) for c in np.flatnonzero(self.paired & ~self.second)]
        kink = {c: i for i, c in enumerate(columns)}
        places: list[Table] = []
        by_kink = []  # of cost and rows: the jumps at each kink
        plain = []
        for table, jumps in ((costs, cost_jumps), (base, row_jumps)):
            pair = np.array([kink[int(c)] for c in jumps.column], np.int64)
            parts = [Table(pair, jumps.row, jumps.term, jumps.value)]
            lines: list[Table] = []
            for i, (s, fold) in enumerate(folds.items()):
                own = table.where(table.column == s)
                at = np.full(len(own.row), len(columns) + i)
                parts.append(Table(at, own.row, own.term, abs(fold.factor) * own.value))
                lines += self._lines(own, fold)
            by_kink.append(Table.joined(parts))
            rest = table.where(~np.isin(table.column, list(folds)))
            plain.append(Table.joined((rest, *lines)))
        for fold in folds.values():
            columns.append(fold.column)
            offset = fold.offset.scaled(-1 / fold.factor)
            places.append(offset._replace(row=np.full(len(offset.row), len(columns) - 1)))
        inside = plain[0].where(plain[0].column < width)
        slope = Table(inside.column, np.zeros(len(inside.row), np.int64), *inside[2:])
        # rows with kinks come first
        turning = np.unique(by_kink[1].column)
        order = np.concatenate((turning, left[~np.isin(left, turning)]))
        number = np.full(int(max([*left.tolist(), 0])) + 1, -1)
        number[order] = np.arange(len(order))
        jumps = by_kink[1]._replace(column=number[by_kink[1].column])
        slots, counts = np.zeros(len(columns), np.int64), dict[int, int]()
        for i, c in enumerate(columns):
            slots[i] = counts.get(c, 0)
            counts[c] = slots[i] + 1
        kinks = Kinks(
            np.array(columns, np.int64),
            slots,
            Table.joined([Table.empty(), *places]),
            by_kink[0]._replace(column=np.zeros(len(by_kink[0].row), np.int64)),
            jumps,
            len(turning),
        )
        solved, _ = self._split(program.solved.where(~lost[program.solved.row]))
        made = replace(
            program,
            q=slope,
            equations=equations,
            inequalities=plain[1]._replace(row=number[plain[1].row]),
            inequality_blocks=[Block(-1, 0, len(order))] if len(order) else [],
            solved=solved,
        )
        made.gone = program.gone.copy()
        made.gone[self.second[:width]] = True
        made.gone[list(folds)] = True
        return made, kinks

    def _lines(self, own: Table, fold: _Fold) -> Iterator[Table]:
        """What s is beside its kink, where that bends up to the left: σ z + offset."""
        if fold.factor > 0:
            return
        at = np.full(len(own.row), fold.column)
        yield Table(own.row, at, own.term, fold.factor * own.value)
        for term, value in zip(fold.offset.term, fold.offset.value, strict=True):
            terms = self.program.terms.products(own.term, np.full(len(own.term), term))
            column = np.full(len(own.row), self.width)
            yield Table(own.row, column, terms, float(value) * own.value)


def _alike(row: Table, says: Table) -> bool:
    """Whether the entries of a row are those of another one with the opposite sign."""
    one, other = (
        sorted(zip(t.column.tolist(), t.term.tolist(), t.value.tolist(), strict=True))
        for t in (row, says.scaled(-1.0))
    )
    return one == other
