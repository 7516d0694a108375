"""A cvxpy problem as a quadratic program whose numbers are affine in the parameters.

cvxpy's own reductions lift what is piecewise linear (ℓ1 norms, maxima, absolute values, …) into
rows with further variables. Those that an equation defines are then taken out again: least squares
‖Ax − b‖² come as ‖z‖² with z = Ax − b, of which x alone is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cvxpy as cp
import numpy as np
from cvxpy.constraints import Zero
from cvxpy.utilities import scopes

from dfwlayer.integrations.cvxpy.affine import ONE, Integers, Table, Terms
from dfwlayer.integrations.cvxpy.recognise import NotRecognisedError

__all__ = ["Block", "Program", "matching", "program_of"]

PRODUCTS = 20_000  # most products of parameters that taking out one variable may make
GROWTH = 1e3  # largest coefficient of an equation against that of the variable it is solved for


@dataclass(frozen=True)
class Block:
    """Consecutive rows or columns: a constraint or a variable."""

    key: int  # the id of the constraint or variable
    first: int
    size: int
    own: bool = True  # not one that a reduction has introduced

    @property
    def places(self) -> Integers:
        return np.arange(self.first, self.first + self.size)


@dataclass
class Program:
    """½ xᵀPx + qᵀx over A x + a = 0, G x + g ≤ 0; the column after the last one holds a and g.

    Equations are solved for variables, which are then gone from all rows, but not from f.
    """

    terms: Terms
    width: int  # of x
    variables: dict[int, Block]
    P: Table
    q: Table  # in column 0
    equations: Table
    inequalities: Table
    equation_blocks: list[Block]
    inequality_blocks: list[Block]
    solved: Table = field(default_factory=Table.empty)  # x_row = Σ value · term · x_column
    gone: Any = None  # mask of the columns that are among `solved`

    def __post_init__(self) -> None:
        self.gone = np.zeros(self.width, bool)

    @property
    def kept(self) -> Integers:
        """The columns that no equation has been solved for."""
        return np.flatnonzero(~self.gone)

    def simplify(self, hold: set[int], last: set[int], keep: set[int]) -> None:
        """Take out variables that one equation defines.

        Args:
            hold: Equations that stay, as their multipliers are asked for.
            last: Variables that are taken out only where no other can be.
            keep: Variables that stay.

        """
        again = True
        while again:
            again = False
            for block in list(self.equation_blocks):
                if block.key in hold:
                    continue
                rows = self._rows(self.equations, block)
                found = self._defined(rows, block, last, keep)
                if found is not None and self._solve(block, rows, *found):
                    again = True

    def _rows(self, table: Table, block: Block) -> Table:
        at = (table.row >= block.first) & (table.row < block.first + block.size)
        return table.where(at)

    def _defined(
        self, rows: Table, block: Block, last: set[int], keep: set[int]
    ) -> tuple[Block, Integers, Any] | None:
        """A variable of which each entry is in one of the rows, with its column and factor."""
        within = rows.column < self.width
        if block.size == 1 and within.sum() == 1 and rows.term[within][0] == ONE:
            column = rows.column[within]  # which gives one entry its value
            key = self._owner[column[0]]
            lone = Block(key, int(column[0]), 1)
            return None if key in keep else (lone, column, rows.value[within])
        present = set(self._owner[rows.column[within]].tolist())
        fits = [v for v in self._blocks if v.key in present and v.size == block.size]
        fits = [v for v in fits if v.key not in keep]
        fits.sort(key=lambda v: (v.key in last, v.own, -v.first))
        for variable in fits:
            at = (rows.column >= variable.first) & (rows.column < variable.first + variable.size)
            row, column, term, value = rows.where(at)
            if len(row) != block.size or (term != ONE).any():
                continue
            if len(np.unique(row)) < len(row) or len(np.unique(column)) < len(row):
                continue
            order = np.argsort(row)
            column, factor = column[order], value[order]
            fixed = rows.where((rows.term == ONE) & (rows.column < self.width))
            largest = np.zeros(block.size)
            np.maximum.at(largest, fixed.row - block.first, abs(fixed.value))
            if (largest <= GROWTH * abs(factor)).all():
                return variable, column, factor
        return None

    @property
    def _blocks(self) -> list[Block]:
        return [v for v in self.variables.values() if not self.gone[v.places].any()]

    @property
    def _owner(self) -> Integers:
        """The id of the variable that a column belongs to."""
        owner = np.zeros(self.width + 1, np.int64)
        for block in self.variables.values():
            owner[block.places] = block.key
        return owner

    def _solve(self, block: Block, rows: Table, variable: Block, column: Integers, by: Any) -> bool:
        """Put what the equation says of the variable in its place, everywhere but in f."""
        others = ~((rows.column >= variable.first) & (rows.column < variable.first + variable.size))
        rest = rows.where(others)
        local = rest.row - block.first
        says = Table(column[local], rest.column, rest.term, -rest.value / by[local])
        outside = (self.equations.row < block.first) | (
            self.equations.row >= block.first + block.size
        )
        tables = [self.equations.where(outside), self.inequalities, self.solved]
        hits = [self._meeting(t, variable, says) for t in tables]
        products = sum(
            int(((t.term[i] != ONE) & (says.term[j] != ONE)).sum())
            for t, (i, j) in zip(tables, hits, strict=True)
        )
        if products > PRODUCTS:
            return False
        self.equations, self.inequalities, self.solved = (
            self._substituted(t, variable, says, *hit) for t, hit in zip(tables, hits, strict=True)
        )
        self.solved = Table.joined((self.solved, says))
        self.gone[variable.places] = True
        self.equation_blocks.remove(block)
        return True

    def _meeting(self, table: Table, variable: Block, says: Table) -> tuple[Integers, Integers]:
        """The pairs of an entry with the variable and one of what is to take its place."""
        at = np.flatnonzero(
            (table.column >= variable.first) & (table.column < variable.first + variable.size)
        )
        i, j = matching(table.column[at], says)
        return at[i], j

    def _substituted(
        self, table: Table, variable: Block, says: Table, i: Integers, j: Integers
    ) -> Table:
        inside = (table.column >= variable.first) & (table.column < variable.first + variable.size)
        if not inside.any():
            return table
        new = Table(
            table.row[i],
            says.column[j],
            self.terms.products(table.term[i], says.term[j]),
            table.value[i] * says.value[j],
        )
        return Table.joined((table.where(~inside), new))


def matching(columns: Integers, says: Table) -> tuple[Integers, Integers]:
    """The pairs of a place in ``columns`` and an entry of ``says`` whose row is that column."""
    order = np.argsort(says.row, kind="stable")
    ordered = says.row[order]
    first = np.searchsorted(ordered, columns, "left")
    count = np.searchsorted(ordered, columns, "right") - first
    starts = np.repeat(first - np.concatenate(([0], np.cumsum(count)))[:-1], count)
    return np.repeat(np.arange(len(columns)), count), order[np.arange(count.sum()) + starts]


def program_of(
    objective: cp.Minimize,
    constraints: Sequence[cp.Constraint],
    parameters: Sequence[cp.Parameter],
    own: set[int],
) -> Program:
    """By cvxpy's reductions for solvers of quadratic programs.

    Args:
        objective: Quadratic, of what is piecewise affine.
        constraints: Affine equations, and inequalities that are piecewise affine.
        parameters: In the order of the layer.
        own: The ids of the variables of the problem.

    """
    problem = cp.Problem(objective, list(constraints))
    with scopes.quad_form_dpp_scope():
        data, chain, _ = problem.get_problem_data(solver=cp.OSQP)
    stuffed = data[cp.settings.PARAM_PROB]
    terms = Terms([p.size for p in parameters])
    numbers = _numbers(stuffed, chain, parameters, terms)
    n = stuffed.x.size
    moved = {k: v[0] for k, v in chain.compose_var_id_map().items()}
    names = {new: old for old, new in moved.items()}
    starts = stuffed.var_id_to_col
    ends = dict(zip(starts, [*list(starts.values())[1:], n], strict=True))
    variables = {}
    for key, first in starts.items():
        known = names.get(key, key)
        variables[known] = Block(known, first, ends[key] - first, known in own)
    rows = sum(c.size for c in stuffed.constraints)
    A = _tabled(stuffed.A, rows, numbers)
    P = _tabled(stuffed.P, n, numbers) if stuffed.P is not None else Table.empty()
    blocks: tuple[list[Block], list[Block]] = ([], [])
    limit = stuffed.cone_dims.zero
    known_ids = {new: old for old, new in chain.compose_constr_id_map().items()}
    first = 0
    for constraint in stuffed.constraints:
        equation = isinstance(constraint, Zero)
        key = known_ids.get(constraint.id, constraint.id)
        at = first if equation else first - limit
        blocks[0 if equation else 1].append(Block(key, at, constraint.size))
        first += constraint.size
    above = A.where(A.row < limit)
    below = A.where(A.row >= limit)
    q = _tabled(stuffed.q, n + 1, numbers)
    return Program(
        terms,
        n,
        variables,
        P,
        q.where(q.row < n),
        above,
        below._replace(row=below.row - limit).scaled(-1.0),
        *blocks,
    )


def _numbers(
    stuffed: Any, chain: Any, parameters: Sequence[cp.Parameter], terms: Terms
) -> Integers:
    """The term for each column of cvxpy's maps, which hold parameters column by column."""
    moved = {k: v[0] for k, v in chain.compose_param_id_map().items()}
    numbers = np.full(stuffed.total_param_size + 1, ONE)
    for parameter, first in zip(parameters, terms.offsets, strict=False):
        key = moved.get(parameter.id, parameter.id)
        if key not in stuffed.param_id_to_col:  # it does not matter to the solution
            continue
        start = stuffed.param_id_to_col[key]
        places = np.arange(parameter.size).reshape(parameter.shape)
        if key != parameter.id:
            places = places[_entries(parameter)]
        flat = places.flatten(order="F")
        numbers[start : start + len(flat)] = first + flat
    return numbers


def _entries(parameter: cp.Parameter) -> Any:
    """Which entries cvxpy keeps of a parameter whose attribute says the others, in its order."""
    told = {
        k for k, value in parameter.attributes.items() if value is not False and value is not None
    }
    if "diag" in told:
        return np.diag_indices(parameter.shape[-1])
    if told & {"symmetric", "PSD", "NSD"} and not told & {"sparsity", "hermitian"}:
        return np.triu_indices(parameter.shape[-1])
    raise NotRecognisedError(
        f"parameter {parameter.name()}: it has an attribute that leaves out entries; give it as a "
        "vector of those that count"
    )


def _tabled(matrix: Any, rows: int, numbers: Integers) -> Table:
    """cvxpy's map of a matrix, whose entries it holds column by column."""
    coo = matrix.tocoo()
    place = coo.row.astype(np.int64)
    term = numbers[coo.col]
    return Table.joined([Table(place % rows, place // rows, term, coo.data.astype(float))])
