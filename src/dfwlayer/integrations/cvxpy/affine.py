"""Arrays that depend on the parameters of a problem, as sparse maps, evaluated in PyTorch.

A parametrised array is a sum of entries ``value · term``, where a term is the constant 1, an entry
of a parameter, or a product of two terms. The terms of a layer are numbered once; an array is then
a sparse matrix that is multiplied with the vector of terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from torch import Tensor

from dfwlayer.ops.rows import on_host
from dfwlayer.ops.tracing import real_tensors

__all__ = ["ONE", "Array", "Arrays", "Group", "Table", "Terms", "by_rows", "lasting"]

ONE = 0  # the term that is always 1
Integers = NDArray[np.int64]


@contextmanager
def lasting() -> Iterator[None]:
    """Where tensors are made that are kept for other calls than one in a transform or inference."""
    with real_tensors(), torch.inference_mode(False):
        yield


class Table(NamedTuple):
    """Entries of a matrix: ``value · term`` is added at (row, column)."""

    row: Integers
    column: Integers
    term: Integers
    value: NDArray[np.float64]

    @staticmethod
    def empty() -> Table:
        """Without entries."""
        none = np.zeros(0, np.int64)
        return Table(none, none, none, np.zeros(0))

    @staticmethod
    def joined(parts: Sequence[Table]) -> Table:
        """All entries, those at one place with one term added up."""
        given: Any = zip(*parts, strict=True)
        row, column, term, value = (np.concatenate(each) for each in given)
        if not len(value):
            return Table(row, column, term, value)
        places = np.stack((row, column, term))
        found, where = np.unique(places, axis=1, return_inverse=True)
        total = np.bincount(where.reshape(-1), value, found.shape[1])
        kept = total != 0
        row, column, term = found[:, kept]
        return Table(row, column, term, total[kept])

    def where(self, mask: Any) -> Table:
        """Some of the entries, by a mask, their numbers or a slice."""
        return Table(self.row[mask], self.column[mask], self.term[mask], self.value[mask])

    def scaled(self, factor: float) -> Table:
        """Times a number."""
        return self._replace(value=factor * self.value)

    def placed(self, rows: Integers | None = None, columns: Integers | None = None) -> Table:
        """With other numbers for rows and columns, those with a negative one left out."""
        row = self.row if rows is None else rows[self.row]
        column = self.column if columns is None else columns[self.column]
        return Table(row, column, self.term, self.value).where((row >= 0) & (column >= 0))

    @property
    def constant(self) -> bool:
        """Whether no parameter occurs."""
        return not self.term.any()


@dataclass
class Terms:
    """What entries are multiples of: 1, the entries of the parameters in their order, products."""

    sizes: list[int]  # entries of each parameter
    left: list[int] = field(default_factory=list)  # products, of terms with smaller numbers
    right: list[int] = field(default_factory=list)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def offsets(self) -> list[int]:
        """The first term of each parameter, and of the products."""
        return [1 + int(each) for each in np.cumsum([0, *self.sizes])]

    def products(self, left: Integers, right: Integers) -> Integers:
        """The term for each pair."""
        found = np.where(left == ONE, right, left)
        for i in np.flatnonzero((left != ONE) & (right != ONE)):
            pair = min(left[i], right[i]), max(left[i], right[i])
            if pair not in self._known:
                self._known[pair] = self.offsets[-1] + len(self.left)
                self.left.append(int(pair[0]))
                self.right.append(int(pair[1]))
            found[i] = self._known[pair]
        return found

    def parameters(self, terms: Integers) -> set[int]:
        """The parameters that occur in some terms."""
        first, pending, found = self.offsets, list({int(t) for t in terms}), set()
        while pending:
            term = pending.pop()
            if term >= first[-1]:
                pending += [self.left[term - first[-1]], self.right[term - first[-1]]]
            elif term != ONE:
                found.add(int(np.searchsorted(first, term, "right")) - 1)
        return found


class Array(NamedTuple):
    """A parametrised array: the entries of a table at flat places."""

    shape: tuple[int, ...]
    table: Table  # row is the flat place; the column does not count

    @staticmethod
    def matrix(table: Table, rows: int, columns: int) -> Array:
        """(rows, columns)."""
        return Array((rows, columns), table._replace(row=table.row * columns + table.column))

    @staticmethod
    def vector(table: Table, rows: int) -> Array:
        """(rows,)."""
        return Array((rows,), table)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class _Sparse:
    """A sparse matrix, and its transposed, wherever they are needed."""

    matrix: Any

    @cached_property
    def transposed(self) -> _Sparse:
        found = _Sparse(self.matrix.T.tocsr())
        vars(found)["transposed"] = self
        return found

    @cached_property
    def _placed(self) -> dict[torch.device, Tensor]:
        return {}

    def on(self, device: torch.device) -> Tensor:
        """The same as a tensor."""
        if device not in self._placed:
            coo = self.matrix.tocoo()
            places = np.stack((coo.row, coo.col)).astype(np.int64)
            shape = self.matrix.shape
            with lasting():
                made = torch.sparse_coo_tensor(
                    torch.from_numpy(places),
                    torch.from_numpy(coo.data),
                    shape,
                    check_invariants=False,
                )
                self._placed[device] = made.to(device).coalesce()
        return self._placed[device]

    def times(self, values: Tensor) -> Tensor:  # (..., k) -> (..., m)
        flat = values.reshape(-1, values.shape[-1])
        product = on_host(flat, lambda: self._host_product(flat.numpy()))
        if product is None:
            product = torch.sparse.mm(self.on(values.device), flat.mT).mT.contiguous()
        return product.reshape(*values.shape[:-1], self.matrix.shape[0])

    def _host_product(self, given: NDArray[np.float64]) -> Tensor:  # (B, k) -> (B, m)
        found = self.matrix @ given[0] if len(given) == 1 else (self.matrix @ given.T).T
        return torch.from_numpy(np.ascontiguousarray(found))


class _Product(torch.autograd.Function):
    """S v for each v, differentiable any number of times and under torch.func."""

    @staticmethod
    def forward(values: Tensor, matrix: _Sparse) -> Tensor:  # (..., k) -> (..., m)
        return matrix.times(values.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Sparse], output: Tensor) -> None:
        ctx.matrix = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _product(grad, ctx.matrix.transposed), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _product(tangent, ctx.matrix)

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, matrix: _Sparse) -> tuple[Tensor, int]:
        return _product(values.movedim(in_dims[0], 0), matrix), 0


def _product(values: Tensor, matrix: _Sparse) -> Tensor:
    apply: Any = _Product.apply
    if not torch._C._are_functorch_transforms_active():
        # what it does itself then, after it has looked for defaults, which takes longer than this
        apply = super(torch.autograd.Function, _Product).apply
    found: Tensor = apply(values, matrix)
    return found


class Group(NamedTuple):
    """Arrays that are evaluated together."""

    parameters: list[int]
    batched: bool
    one: bool  # whether there are constants, which are multiples of the term 1
    left: Tensor  # the products among the terms
    right: Tensor
    levels: list[int]  # how many products are known after each round
    matrix: _Sparse
    names: list[str]
    shapes: list[tuple[int, ...]]
    sizes: list[int]


@dataclass
class Arrays:
    """All arrays of a layer, evaluated with as few operations as there are kinds of them.

    Those without parameters are made once; those of parameters without a batch are shared by all
    problems; the others have a batch.
    """

    terms: Terms
    arrays: dict[str, Array]
    _groups: dict[tuple[bool, ...], list[Group]] = field(default_factory=dict)
    _constants: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def uses(self) -> dict[str, set[int]]:
        """The parameters that occur in each array."""
        return {k: self.terms.parameters(each.table.term) for k, each in self.arrays.items()}

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """The arrays without parameters."""
        if device not in self._constants:
            found = {}
            for name, array in self.arrays.items():
                if not self.uses[name]:
                    flat = np.bincount(array.table.row, array.table.value, array.size).astype(float)
                    with lasting():
                        found[name] = torch.from_numpy(flat).reshape(array.shape).to(device)
            self._constants[device] = found
        return self._constants[device]

    def at(self, parameters: Sequence[Tensor], batched: tuple[bool, ...]) -> dict[str, Tensor]:
        """The arrays (*shape) or (B, *shape), from parameters (size) or (B, size) in float64."""
        if batched not in self._groups:
            self._groups[batched] = self.grouped(batched)
        device = parameters[0].device if parameters else torch.device("cpu")
        found = dict(self.constants(device))
        sizes = [len(p) for p, has in zip(parameters, batched, strict=True) if has]
        for group in self._groups[batched]:
            vector = self._vector(group, parameters, batched, sizes[0] if sizes else 0)
            values = _product(vector, group.matrix)
            lead = values.shape[:-1]
            # what is done to tensors here counts twice, as autograd goes the same way back
            lone = len(group.names) == 1
            split = (values,) if lone else torch.split(values, group.sizes, -1)
            for name, shape, part in zip(group.names, group.shapes, split, strict=True):
                found[name] = part if len(shape) == 1 else part.reshape((*lead, *shape))
        return found

    def _vector(
        self, group: Group, parameters: Sequence[Tensor], batched: tuple[bool, ...], batch: int
    ) -> Tensor:
        """The terms, (k) or (B, k)."""
        lead = (batch,) if group.batched else ()
        used = [parameters[i] for i in group.parameters]
        parts = [used[0].new_ones(*lead, 1)] if group.one else []
        parts += [
            p.expand(*lead, p.shape[-1]) if group.batched and not batched[i] else p
            for i, p in zip(group.parameters, used, strict=True)
        ]
        vector, done = parts[0] if len(parts) == 1 else torch.cat(parts, -1), 0
        for end in group.levels:
            left, right = (
                vector[..., side[done:end].to(vector.device)] for side in (group.left, group.right)
            )
            vector, done = torch.cat((vector, left * right), -1), end
        return vector

    def grouped(self, batched: tuple[bool, ...]) -> list[Group]:
        """Which arrays are evaluated together, for parameters that have a batch or not."""
        kinds: dict[bool, list[str]] = {}
        for name, used in self.uses.items():
            if used:
                kinds.setdefault(any(batched[i] for i in used), []).append(name)
        return [self._group(names, has_batch) for has_batch, names in kinds.items()]

    def _group(self, names: list[str], batched: bool) -> Group:
        terms, first = self.terms, self.terms.offsets
        count = first[-1] + len(terms.left)
        wanted = np.zeros(count, bool)
        for name in names:
            wanted[self.arrays[name].table.term] = True
        for i in reversed(range(len(terms.left))):  # a product needs its factors
            if wanted[first[-1] + i]:
                wanted[[terms.left[i], terms.right[i]]] = True
        parameters = [i for i in range(len(terms.sizes)) if wanted[first[i] : first[i + 1]].any()]
        # the terms by their numbers in the vector of this group
        number, depth = np.full(count, -1), np.zeros(count, np.int64)
        one = bool(wanted[ONE])
        number[ONE], size = 0, int(one)
        for i in parameters:
            number[first[i] : first[i + 1]] = np.arange(size, size + terms.sizes[i])
            size += terms.sizes[i]
        products = [i for i in range(len(terms.left)) if wanted[first[-1] + i]]
        for i in products:
            depth[first[-1] + i] = 1 + max(depth[terms.left[i]], depth[terms.right[i]])
        products.sort(key=lambda i: depth[first[-1] + i])
        number[[first[-1] + i for i in products]] = np.arange(size, size + len(products))
        layers = np.cumsum(np.bincount([depth[first[-1] + i] for i in products])[1:])
        with lasting():
            left, right = (
                torch.from_numpy(np.array([number[side[i]] for i in products], np.int64))
                for side in (terms.left, terms.right)
            )
        matrix = self._stacked(names, number, size + len(products))
        ends = [int(end) for end in layers]
        shapes = [self.arrays[name].shape for name in names]
        sizes = [self.arrays[name].size for name in names]
        return Group(
            parameters, batched, one, left, right, ends, _Sparse(matrix), names, shapes, sizes
        )

    def _stacked(self, names: list[str], number: Integers, width: int) -> Any:
        """The maps of some arrays, one above the other."""
        sizes = [self.arrays[name].size for name in names]
        tables = [self.arrays[name].table for name in names]
        starts = np.cumsum([0, *sizes])
        rows = np.concatenate([t.row + at for t, at in zip(tables, starts, strict=False)])
        columns = number[np.concatenate([t.term for t in tables])]
        values = np.concatenate([t.value for t in tables])
        return sp.csr_array((values, (rows, columns)), shape=(int(starts[-1]), width))


def by_rows(shape: tuple[int, ...]) -> Integers:
    """Where the entries of an array are, row by row, that is held column by column."""
    size = int(np.prod(shape))
    return np.arange(size).reshape(shape, order="F").flatten()
