"""Tables of independent problems: a problem for each row, columns in and columns out.

    import dfwlayer.integrations.numpy as dfw
    from dfwlayer.integrations.batches import BatchSolver, Column

    solver = BatchSolver(dfw.Quadratic(P, Column("q")), dfw.LpBall(1, radius=Column("t")))
    solver({"id": ids, "q": q, "t": t})  # a dict with id, x, value, gap and status

A `BatchSolver` is a function of one batch that can be pickled: `ray.data.Dataset.map_batches` takes
it, and so does `map` of any executor. It needs none of them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from dfwlayer.engines.compiled.background import mode, using
from dfwlayer.integrations import tables
from dfwlayer.integrations.descriptions import Described, Spec, problem_of
from dfwlayer.integrations.numpy import precision, tensor_of
from dfwlayer.solution import Solution

__all__ = ["BatchSolver", "Column"]

OUTPUTS = ("x", "value", "gap", "status")
FIELDS = (*OUTPUTS, "num_steps", "violation")
PRICES = "multipliers."  # in front of the name of one
Array = NDArray[Any]


@dataclass(frozen=True)
class Column:
    """Where the rows of a table put their own numbers, in the place of an array.

    Attributes:
        name: Of the column.
        shape: Of what one row holds, None for what is found. A list of numbers becomes a matrix by
            it, and a row of another length becomes a bad one, where otherwise all have to agree.
        dtype: Of its numbers, None for what is found; integers then become float64.

    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: DTypeLike | None = None

    def of(self, found: Array) -> Array:
        """What a table holds under this name, (B,) objects or (B, ...), as (B, *shape).

        Rows without a value, or with one that does not fit, are NaN.
        """
        rows = self._stacked(found) if found.dtype == object else found
        if self.shape is not None:
            if rows.size != len(rows) * math.prod(self.shape):
                raise ValueError(
                    f"column {self.name!r}: expected {self.shape} in a row, got {rows.shape[1:]}"
                )
            rows = rows.reshape(len(rows), *self.shape)
        numbers = np.issubdtype(rows.dtype, np.floating)
        if not numbers and not np.issubdtype(rows.dtype, np.integer) and rows.dtype != np.bool_:
            raise ValueError(f"column {self.name!r}: expected numbers, got {rows.dtype}")
        kind = self.dtype or (rows.dtype if numbers else np.float64)
        return rows.astype(kind, copy=False)

    def _stacked(self, found: Array) -> Array:
        """Objects that are arrays, lists, numbers or None, as one array with NaN for bad ones."""
        rows = [_numbers(row) for row in found]
        shapes = {row.shape for row in rows if row is not None}
        if self.shape is None and len(shapes) != 1:
            raise ValueError(
                f"column {self.name!r}: expected rows of one shape, got {sorted(shapes)[:3]}; with "
                "Column(name, shape) those of another one are bad rows, and the others are solved"
            )
        shape = self.shape if self.shape is not None else next(iter(shapes))
        kinds = {row.dtype for row in rows if row is not None}
        kind = np.result_type(*kinds, np.float32) if kinds else np.dtype(np.float64)
        stacked = np.full((len(rows), *shape), np.nan, self.dtype or kind)
        for i, row in enumerate(rows):
            if row is not None and row.size == math.prod(shape):
                stacked[i] = row.reshape(shape)
        return stacked


def _numbers(row: Any) -> Array | None:
    """A row as an array, None where it has no numbers."""
    try:
        array = np.asarray(row)
        array = np.stack([np.asarray(r) for r in row]) if array.dtype == object else array
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "fiub" else None


class BatchSolver:
    """Solves a table of problems, one for each row.

    Bad rows (NaN or nothing in their data, sets that are empty, …) keep to themselves: their x is
    NaN and ``status`` says why. Code that is compiled for the problems is waited for, once in every
    process, so that all rows are solved by the same code.

    Args:
        objective: ``Quadratic``, ``LeastSquares`` or ``Smooth`` of `dfwlayer.integrations.numpy`
            with a `Column` wherever rows have numbers of their own; arrays are shared by all rows.
        constraint: A set of that module, likewise.
        x0: Start, a `Column` or an array.
        outputs: What is wanted of the solution: "x", "value", "gap", "status", "num_steps",
            "violation" and prices such as "multipliers.radius". A dict says under which names.
        keep: Columns that are handed on; None for all of those that the problem does not read.
        threads: Cores for a batch; None for as many as the worker of Ray has been given, one
            in other processes of a pool (or ``OMP_NUM_THREADS``), and all of torch's otherwise.
        options: ``tol``, ``max_steps``, ``method`` and the others of `dfwlayer.solve`.

    Attributes:
        columns: The names of the columns that the problem reads.

    """

    def __init__(
        self,
        objective: Described,
        constraint: Described,
        *,
        x0: Any = None,
        outputs: Sequence[str] | Mapping[str, str] = OUTPUTS,
        keep: Sequence[str] | None = None,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        started = x0 is not None
        module = "dfwlayer.integrations.numpy"
        self._problem = problem_of(objective, constraint, started, options, module)
        self._given = (*objective.arrays, *constraint.arrays, *[x0] * started)
        self._outputs = _checked(outputs)
        self._keep = None if keep is None else tuple(keep)
        self._threads = threads
        self.columns = tuple(
            dict.fromkeys(part.name for part in self._given if isinstance(part, Column))
        )
        if not self.columns:
            raise ValueError(
                "objective, constraint: expected a Column where rows have their own numbers, got "
                "none; a single problem is solved by dfwlayer.integrations.numpy.solve"
            )
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads: expected an integer of at least 1 or None, got {threads!r}")
        taken = set(self._outputs.values()) & set(self._keep or ())
        if taken:
            raise ValueError(f"keep: {min(taken)!r} is the name of an output, too")

    def __call__(self, batch: Any) -> Any:
        """Solve a batch: a dict of arrays, a table or batch of pyarrow, a DataFrame of pandas.

        Returns:
            The same kind of table: the columns that are kept, then the outputs.

        Raises:
            ValueError: Naming the column or the argument, if no row could be solved because of it.

        """
        names = tables.names(batch)
        absent = [name for name in (*self.columns, *(self._keep or ())) if name not in names]
        if absent:
            raise ValueError(f"batch: expected columns {absent}, which are not in {names}")
        with _threads(_allowance() if self._threads is None else self._threads):
            found = self._solved(batch)
        left = [n for n in names if n not in self.columns and n not in self._outputs.values()]
        return tables.made(batch, left if self._keep is None else self._keep, found)

    def _solved(self, batch: Any) -> dict[str, Array]:
        read = {name: tables.column(batch, name) for name in self.columns}
        given = [part.of(read[part.name]) if _own(part) else part for part in self._given]
        dtype = precision(given)
        tensors = self._laid_out([tensor_of(array, dtype) for array in given])
        waiting = nullcontext() if mode() == "off" else using("wait")
        with torch.no_grad(), waiting:
            sol = self._problem.solved(tensors)
            return {name: _output(sol, field) for field, name in self._outputs.items()}

    def _laid_out(self, tensors: list[Tensor]) -> list[Tensor]:
        """A number for each row may stand for all entries of a variable, or for all rows of A."""
        own = [_own(part) for part in self._given]
        numbers = any(mine and t.dim() == 1 for t, mine in zip(tensors, own, strict=True))
        if not numbers or any(t.layout != torch.strided for t in tensors):
            return tensors
        specs = tuple(
            Spec(tuple(t.shape[1:] if mine else t.shape), t.dtype)
            for t, mine in zip(tensors, own, strict=True)
        )
        layouts = self._problem.layouts(specs)
        if layouts is None:
            return tensors
        return [
            layout.spread(tensor, spec) if mine else tensor
            for tensor, spec, layout, mine in zip(tensors, specs, layouts, own, strict=True)
        ]


def _own(part: Any) -> bool:
    """Whether every row has its own."""
    return isinstance(part, Column)


def _checked(outputs: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    named = dict(outputs) if isinstance(outputs, Mapping) else {name: name for name in outputs}
    unknown = [name for name in named if name not in FIELDS and not name.startswith(PRICES)]
    if unknown or not named:
        raise ValueError(
            f"outputs: expected any of {[*FIELDS, PRICES + 'radius']}, got {list(outputs)}"
        )
    return named


def _output(sol: Solution, field: str) -> Array:
    if not field.startswith(PRICES):
        found: Tensor = getattr(sol, field)
        return found.numpy()
    prices = sol.multipliers
    if field.removeprefix(PRICES) not in prices:
        raise ValueError(
            f"outputs: {field} is not a price of this set, which has "
            f"{[PRICES + name for name in prices]}"
        )
    return prices[field.removeprefix(PRICES)].numpy()


def _allowance() -> int | None:
    """Cores that this process was given, None where nobody has said."""
    ray = sys.modules.get("ray")  # a worker of Ray has imported it
    if ray is not None and ray.is_initialized():
        context = ray.get_runtime_context()
        if context.get_task_id() is not None:  # not the program that hands out the work
            return max(1, int(context.get_assigned_resources().get("CPU", 1)))
    if multiprocessing.parent_process() is not None:
        given = os.environ.get("OMP_NUM_THREADS", "1")
        return int(given) if given.isdecimal() and int(given) else 1
    return None


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Hold torch, and with it this library, to so many threads."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
