"""How the model of a problem is made: its coordinates, and the arrays of f and of the set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
import scipy.sparse as sp  # type: ignore[import-untyped]
import torch

from dfwlayer.integrations.cvxpy.affine import ONE, Array, Arrays, Integers, Table, by_rows
from dfwlayer.integrations.cvxpy.kinks import Kinks, bent
from dfwlayer.integrations.cvxpy.model import LARGE, Dual, Model, Output
from dfwlayer.integrations.cvxpy.pieces import Pieces
from dfwlayer.integrations.cvxpy.program import Program, matching, program_of
from dfwlayer.integrations.cvxpy.recognise import Ball, Recognised, recognise
from dfwlayer.integrations.cvxpy.sets import Part, Region, form_of

__all__ = ["model_of"]

REDUCING = ("symmetric", "PSD", "NSD", "diag", "sparsity")  # attributes that leave out entries
PRODUCTS = 200_000  # most entries of the slope that constant matrices may make


def model_of(
    problem: cp.Problem,
    parameters: Sequence[cp.Parameter],
    variables: Sequence[cp.Variable],
    duals: dict[int, cp.Constraint],
) -> Model:
    """By a set that is made for all constraints where there is one, otherwise by rows and balls.

    Args:
        problem: Convex, with parameters by cvxpy's rules (DPP).
        parameters: In the order of the layer.
        variables: What is asked for, in its order.
        duals: The constraints by the ids of their dual variables.

    """
    hold = {duals[v.id].id for v in variables if v.id in duals}
    for direct in (True, False):
        parts = recognise(problem, hold, direct)
        if direct and not any(ball.kind == "lp" and ball.p == 1 for ball in parts.balls):
            continue  # there is nothing that rows would say in another way
        whole = {v.id: _whole(v, parts) for v in variables if v.id not in duals}
        own = {v.id for v in problem.variables()} | {v.id for v in parts.replaced.values()}
        asked = [(v.shape, whole.get(v.id), duals.get(v.id)) for v in variables]
        points = {ball.point.id for ball in parts.balls}
        for kept in (set(), points, points | own):
            program = program_of(parts.objective, parts.constraints, parameters, own)
            program.simplify(hold, {*parts.halves, *parts.halves.values()}, kept)
            plain = not hold and not parts.balls
            turned = bent(program, parts.halves, {v.id for v in whole.values()}) if plain else None
            model = _Maker(program, parts.balls, hold, direct).model(asked)
            if model is not None and turned is not None:
                found = _Maker(turned[0], [], hold, direct, turned[1]).model(asked)
                return model if found is None else replace(found, lifted=model)
            if model is not None:
                return model
            if direct:
                break
    raise AssertionError("rows and balls make a set")


def _whole(v: cp.Variable, parts: Recognised) -> cp.Variable:
    """A variable with all its entries."""
    stands: cp.Variable = parts.replaced.get(v.id, v)
    if any(stands.attributes.get(name) for name in REDUCING):
        full = cp.Variable(v.shape)
        parts.constraints.append(full == stands)
        return full
    return stands


def _put_in(
    K: Table, k: Table, P: Table, cross: Table, q: Table, shape: tuple[int, int]
) -> tuple[Table, Table] | None:
    """What ½ zᵀPz + qᵀz + yᵀCz adds to the matrix and the slope of f(y), for z = K y + k.

    That is KᵀPK + CK + KᵀCᵀ and (KᵀP + C) k + Kᵀq. K, P and C are constant; None where products
    with them have so many entries that they are better formed in each call.
    """
    m, n = shape
    own, inner, mixed = (
        sp.coo_array((t.value, (t.row, t.column)), shape=size).tocsr()
        for t, size in ((K, (m, n)), (P, (m, m)), (cross, (n, m)))
    )
    half = own.T @ inner
    matrix = half @ own + mixed @ own + (mixed @ own).T
    parts = []
    for by, table in ((half + mixed, k), (own.T, q)):
        entries = by.tocoo()
        says = Table(entries.col, entries.row, np.zeros(entries.nnz, np.int64), entries.data)
        i, j = matching(table.row, says)
        if len(i) > PRODUCTS:
            return None
        blank = np.zeros(len(i), np.int64)
        parts.append(Table(says.column[j], blank, table.term[i], table.value[i] * says.value[j]))
    found = matrix.tocoo()
    none = np.zeros(found.nnz, np.int64)
    return Table(found.row, found.col, none, found.data), Table.joined(parts)


class _Selected(NamedTuple):
    """Z as multiples of single coordinates, and what is added to them."""

    columns: Integers
    factors: Any
    offset: Table  # rows count the entries of Z


class _Maker:
    """The arrays and the set of a program."""

    def __init__(
        self,
        program: Program,
        balls: list[Ball],
        hold: set[int],
        direct: bool,
        kinks: Kinks | None = None,
    ) -> None:
        self.program, self.balls, self.hold, self.direct = program, balls, hold, direct
        self.kinks = kinks
        self.arrays: dict[str, Array] = {}
        # where the multipliers of a constraint are, and what they are to be multiplied with
        self.sides: dict[int, tuple[str, Integers, Any]] = {}
        self.selected = [self._selection(ball) for ball in balls]
        first: list[int] = []
        for ball, found in sorted(
            zip(balls, self.selected, strict=True), key=lambda pair: pair[0].kind == "lp"
        ):
            if found is not None:
                first += [int(c) for c in found.columns[by_rows(ball.point.shape)]]
        order = list(dict.fromkeys(first))
        chosen = set(order)
        order += [int(c) for c in program.kept if int(c) not in chosen]
        self.n = len(order)
        self.number = np.full(program.width + 1, -1)  # of a column among the coordinates of y
        self.number[order] = np.arange(self.n)

    def model(self, asked: Sequence[tuple[tuple[int, ...], Any, Any]]) -> Model | None:
        region = self._region()
        form = form_of(region) if self.n else None
        if form is None:  # or nothing is left to be looked for
            return None
        pieces = None
        if self.kinks is not None:
            own = self.kinks.arrays(self.number, self.n)
            self.arrays |= own
            present = np.zeros(own["kink.place"].shape, np.bool_)
            present[self.number[self.kinks.columns], self.kinks.slots] = True
            pieces = Pieces(region, present)
            every = np.arange(self.n)
            whole = form_of(replace(region, lower=every, upper=every))
            assert whole is not None
            form = replace(whole, told=form.told)
        diagonal, squares = self._objective()
        if squares and (form.turned is not None or not (self.n > LARGE)):
            squares = False
        outputs: list[Output | Dual] = []
        for i, (shape, variable, constraint) in enumerate(asked):
            if constraint is None:
                outputs.append(self._output(f"x{i}", shape, variable))
            else:
                side, *flat = self.sides[constraint.id]
                order = by_rows(shape)
                outputs.append(Dual(shape, side, *(torch.from_numpy(v[order]) for v in flat)))
        arrays = Arrays(self.program.terms, self.arrays)
        return Model(self.n, arrays, form, outputs, diagonal, squares, pieces)

    def _solved(self, places: Integers) -> tuple[Table, Table]:
        """K and k of x = K y + k for some columns; rows count these."""
        rows = np.full(self.program.width, -1)
        rows[places] = np.arange(len(places))
        kept = places[~self.program.gone[places]]
        itself = Table(kept, kept, np.zeros(len(kept), np.int64), np.ones(len(kept)))
        found = self.program.solved
        inside = found.column < self.program.width
        K = Table.joined((found.where(inside), itself)).placed(rows, self.number)
        k = found.where(~inside).placed(rows)
        return K, k

    def _objective(self) -> tuple[bool, bool]:
        """The arrays of f; whether P of what is defined is diagonal, and f nothing but squares."""
        P, q, number = self.program.P, self.program.q, self.number
        touched = np.unique(np.concatenate((P.row, P.column, q.row)))
        defined = touched[number[touched] < 0]
        rows = np.full(self.program.width + 1, -1)
        rows[defined] = np.arange(len(defined))
        n, m = self.n, len(defined)
        own, slope = P.placed(number, number), q.placed(number)
        inner, cross, other = P.placed(rows, rows), P.placed(number, rows), q.placed(rows)
        K, k = self._solved(defined)
        if m and self.n <= LARGE and K.constant and inner.constant and cross.constant:
            known = _put_in(K, k, inner, cross, other, (m, self.n))
            if known is not None:
                own, slope = Table.joined((own, known[0])), Table.joined((slope, known[1]))
                m = 0
        if len(own.value):
            self.arrays["P"] = Array.matrix(own, n, n)
        self.arrays["q"] = Array.vector(slope, n)
        if not m:
            return False, False
        self.arrays["K"], self.arrays["k"] = Array.matrix(K, m, n), Array.vector(k, m)
        self.arrays["qz"] = Array.vector(other, m)
        if len(cross.value):
            self.arrays["Pyz"] = Array.matrix(cross, n, m)
        diagonal = bool((inner.row == inner.column).all())
        self.arrays["Pz"] = Array.vector(inner, m) if diagonal else Array.matrix(inner, m, m)
        positive = inner.constant and bool((inner.value > 0).all()) and len(inner.value) == m
        plain = not any(len(table.value) for table in (own, slope, cross, other))
        return diagonal, diagonal and plain and positive

    def _region(self) -> Region:
        """The arrays of the constraints, and what is known of them."""
        program = self.program
        bounds, rows = self._bounds()
        for name in ("lower", "upper"):
            mine = sorted(bounds[name].items())
            parts = [t._replace(row=np.full(len(t.row), i)) for i, (_, t) in enumerate(mine)]
            if mine:
                self.arrays[name] = Array.vector(Table.joined(parts), len(mine))
        for table, blocks, taken, left, right in (
            (program.equations, program.equation_blocks, None, "A", "b"),
            (program.inequalities, program.inequality_blocks, rows, "G", "h"),
        ):
            places = np.concatenate([b.places for b in blocks] or [np.zeros(0, np.int64)])
            if taken is not None:
                places = places[~np.isin(places, taken)]
            height = int(max([*places.tolist(), *table.row.tolist(), 0])) + 1
            numbers = np.full(height, -1)
            numbers[places] = np.arange(len(places))
            for block in blocks:
                if block.key in self.hold - self.sides.keys():
                    self.sides[block.key] = right, numbers[block.places], np.ones(block.size)
            if not len(places):
                continue
            inside = table.column < program.width
            matrix = table.where(inside).placed(numbers, self.number)
            side = table.where(~inside).placed(numbers).scaled(-1.0)
            self.arrays[left] = Array.matrix(matrix, len(places), self.n)
            self.arrays[right] = Array.vector(side, len(places))
        return self._described(bounds)

    def _described(self, bounds: dict[str, dict[int, Table]]) -> Region:
        lower, upper = (np.array(sorted(bounds[side]), np.int64) for side in ("lower", "upper"))
        heights = [self.arrays[name].shape[0] if name in self.arrays else 0 for name in ("A", "G")]
        parts = tuple(self._part(i, ball) for i, ball in enumerate(self.balls))
        return Region(
            self.n, lower, upper, heights[0], heights[1], parts, bool(self.hold), self.direct
        )

    def _bounds(self) -> tuple[dict[str, dict[int, Table]], Integers]:
        """The inequalities that bound one coordinate, by coordinate, and their rows."""
        program, table = self.program, self.program.inequalities
        found: dict[str, dict[int, Table]] = {"lower": {}, "upper": {}}
        inside = table.where(table.column < program.width)
        rows, starts, counts = np.unique(inside.row, return_index=True, return_counts=True)
        first = dict(zip(rows.tolist(), starts.tolist(), strict=True))
        count = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        offsets = table.where(table.column == program.width)
        order = np.argsort(offsets.row, kind="stable")
        offsets = offsets.where(order)
        taken: list[int] = []
        skipped = 0 if self.kinks is None else self.kinks.rows  # those with kinks are no bounds
        for block in sorted(program.inequality_blocks, key=lambda b: b.key not in self.hold):
            single = [
                row
                for row in block.places.tolist()[skipped:]
                if count.get(row) == 1 and inside.term[first[row]] == ONE
            ]
            at = np.array([first[row] for row in single], np.int64)
            places, factors = self.number[inside.column[at]], inside.value[at]
            if block.key in self.hold:  # all of it are bounds of one side, or none
                names = {"upper" if f > 0 else "lower" for f in factors}
                once = len(np.unique(places)) == block.size and len(names) == 1
                name = names.pop() if names else "upper"
                if not once or any(int(place) in found[name] for place in places):
                    continue
                self.sides[block.key] = name, places, 1 / factors
            for row, place, factor in zip(single, places.tolist(), factors, strict=True):
                begin, end = np.searchsorted(offsets.row, (row, row + 1))
                limit = offsets.where(slice(begin, end)).scaled(-1 / factor)
                side = found["upper" if factor > 0 else "lower"]
                if place in side:
                    known = side[place]
                    if self.hold or not (limit.constant and known.constant):
                        continue
                    pick = min if factor > 0 else max
                    values = limit.value.sum(), known.value.sum()
                    limit = limit if pick(values) == values[0] else known
                side[place] = limit
                taken.append(row)
        return found, np.array(taken, np.int64)

    def _selection(self, ball: Ball) -> _Selected | None:
        """Z as multiples of different coordinates, None where it is not."""
        program, block = self.program, self.program.variables[ball.point.id]
        if not program.gone[block.places].any():
            return _Selected(block.places, np.ones(block.size), Table.empty())
        found = program.solved
        mine = found.where((found.row >= block.first) & (found.row < block.first + block.size))
        mine = mine._replace(row=mine.row - block.first)
        inside = mine.column < program.width
        W, offset = mine.where(inside), mine.where(~inside)
        single = len(W.row) == block.size and len(np.unique(W.row)) == block.size
        if not single or not W.constant or len(np.unique(W.column)) < block.size:
            return None
        order = np.argsort(W.row)
        return _Selected(W.column[order], W.value[order], offset)

    def _number(self, name: str, variable: cp.Variable) -> None:
        """The array of a variable that is a number, and not one of y."""
        _, k = self._solved(self.program.variables[variable.id].places)
        self.arrays[name] = Array((), k)

    def _part(self, i: int, ball: Ball) -> Part:
        name, shape = f"ball{i}", ball.point.shape
        self._number(f"{name}.radius", ball.radius)
        if ball.factor is not None:
            self._number(f"{name}.factor", ball.factor)
        given = ball.kind, ball.p, shape
        last = ball.factor is not None, ball.squared
        found = self.selected[i]
        size = ball.point.size
        uniform = found is not None and len(np.unique(abs(found.factors))) == 1
        signed = found is not None and ball.kind == "trace" and (found.factors < 0).any()
        if found is None or signed or (ball.kind != "lp" and not uniform):
            K, k = self._solved(self.program.variables[ball.point.id].places)
            self.arrays[f"{name}.W"] = Array.matrix(K, size, self.n)
            self.arrays[f"{name}.c"] = Array.vector(k, size)
            tall = size >= self.n
            if tall and K.constant:
                dense = np.zeros((size, self.n))
                dense[K.row, K.column] = K.value
                tall = bool(np.linalg.matrix_rank(dense) == self.n)
            return Part(name, *given, None, np.ones(size), bool(len(k.value)), *last, tall)
        order = by_rows(shape)
        back = np.empty(size, np.int64)
        back[order] = np.arange(size)
        factors = found.factors[order]
        centred = bool(len(found.offset.value))
        if centred:
            row = back[found.offset.row]
            centre = found.offset._replace(row=row, value=-found.offset.value / factors[row])
            self.arrays[f"{name}.centre"] = Array.vector(centre, size)
        places = self.number[found.columns[order]]
        return Part(name, *given, places, abs(factors), centred, *last, axis=ball.axis)

    def _output(self, name: str, shape: tuple[int, ...], variable: cp.Variable) -> Output:
        block = self.program.variables.get(variable.id)
        if block is None:  # nothing depends on it
            self.arrays[f"{name}.k"] = Array.vector(Table.empty(), variable.size)
            return Output(shape, None, name, False)
        places = block.places[by_rows(shape)]
        if not self.program.gone[places].any():
            numbers = self.number[places]
            if (np.diff(numbers) == 1).all():
                return Output(shape, slice(int(numbers[0]), int(numbers[-1]) + 1), name, True)
            return Output(shape, torch.from_numpy(numbers), name, True)
        K, k = self._solved(places)
        if len(K.value):
            self.arrays[f"{name}.K"] = Array.matrix(K, len(places), self.n)
        self.arrays[f"{name}.k"] = Array.vector(k, len(places))
        return Output(shape, None, name, bool(len(K.value)))
