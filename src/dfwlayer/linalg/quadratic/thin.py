"""One program with few entries that are not zero: the same by sparse matrices, where SciPy is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.program import Program, Units
from dfwlayer.linalg.sparse_factor import PIVOT, as_csr, factor, module
from dfwlayer.ops.matrices import by_scipy

__all__ = ["PLAIN_RIDGE", "Entries", "Thin", "ThinSystem", "pays", "small_or_thin", "thinned"]

DENSE = 2**13  # coordinates, beyond which no matrix is written down
SMALLEST = 150  # variables and rows; below, dense factors are faster
SHARE = 0.15  # of entries that are not zero
FEW = 2**15  # entries of all matrices, zeros included: so few that sparse factors are fast anyway
PLAIN_RIDGE = 1e-9  # that a factor without pivots needs
CLOSED = 1e-20  # weight of a row that does not count


def pays(like: Tensor, *rows: Tensor) -> bool:
    """Whether programs with these rows (·, n) should be solved by sparse matrices.

    That is for one problem like this (..., n) on the CPU, where SciPy is: if its rows are sparse
    or have mostly zeros, or if a dense matrix with n columns is too large.
    """
    if like.numel() != like.shape[-1] or not by_scipy(like):
        return False
    n = like.shape[-1]
    if n > DENSE or any(part.layout != torch.strided for part in rows):
        return True
    if n + sum(part.shape[-2] for part in rows) < SMALLEST:
        return False
    stored = sum(int(torch.count_nonzero(part.detach())) for part in rows)
    return stored <= SHARE * sum(part.numel() for part in rows)


def thinned(program: Program | Thin) -> Program | Thin:
    """By sparse matrices, where that pays: one problem, on the CPU, with mostly zeros."""
    if (
        isinstance(program, Thin)
        or len(program.q) != 1
        or not pays(program.q, program.P[0], program.G[0], program.A[0])
    ):
        return program
    parts = (as_csr(part[0]) for part in (program.P, program.G, program.A))
    return Thin(*parts, *(program[i] for i in (1, 3, 5, 6, 7)))


def small_or_thin(program: Program | Thin) -> Thin | None:
    """One problem on the CPU by sparse matrices, if it has few entries, zeros or not."""
    if isinstance(program, Thin):
        return program
    parts = program.P, program.G, program.A
    few = len(program.q) == 1 and sum(part.numel() for part in parts) <= FEW
    if not few or not by_scipy(program.q):
        return None
    return Thin(*(as_csr(part[0]) for part in parts), *(program[i] for i in (1, 3, 5, 6, 7)))


class Entries(NamedTuple):
    """The numbers of a sparse matrix, and where they are."""

    shape: tuple[int, int]
    row: Any  # (nnz,)
    col: Any  # (nnz,)
    size: Any  # (nnz,), |a_ij|

    @classmethod
    def of(cls, matrix: Any) -> Entries:  # CSR
        """Those of a matrix."""
        row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        return cls(matrix.shape, row, matrix.indices, np.abs(matrix.data))

    def largest(self, left: Any, right: Any) -> tuple[Any, Any]:  # (m,), (n,)
        """The largest entries |l_i a_ij r_j| of rows (m,) and of columns (n,)."""
        size = left[self.row] * self.size * right[self.col]
        rows, columns = np.zeros(self.shape[0]), np.zeros(self.shape[1])
        np.maximum.at(rows, self.row, size)
        np.maximum.at(columns, self.col, size)
        return rows, columns


class Frame(NamedTuple):
    """A symmetric sparse matrix by columns, whose diagonal and units change."""

    matrix: Any  # (n, n), CSC, with all diagonal entries
    diagonal: Any  # (n,), where these are
    col: Any  # (nnz,)

    @classmethod
    def of(cls, matrix: Any) -> Frame:
        """Of a matrix."""
        n, own = matrix.shape[0], matrix.tocoo()
        every = np.arange(n)
        places = np.concatenate((own.row, every)), np.concatenate((own.col, every))
        data = np.concatenate((own.data, np.zeros(n)))
        full = module().coo_matrix((data, places), matrix.shape).tocsc()
        col = np.repeat(every, np.diff(full.indptr))
        return cls(full, np.flatnonzero(full.indices == col), col)

    def within(self, diagonal: Any, unit: Any) -> Any:
        """D (M + diag(d)) D for units D."""
        found = self.matrix.copy()
        found.data[self.diagonal] += diagonal
        found.data *= unit[found.indices] * unit[self.col]
        return found


@dataclass(frozen=True)
class Thin:
    """A `Program` of one problem; matrices are SciPy's, vectors are tensors (1, ·)."""

    P: Any  # (n, n)
    G: Any  # (m, n)
    A: Any  # (k, n)
    q: Tensor  # (1, n)
    h: Tensor  # (1, m)
    b: Tensor  # (1, k)
    lower: Tensor  # (1, n)
    upper: Tensor  # (1, n)

    @classmethod
    def of(cls, program: Program | Thin, P: Tensor, q: Tensor) -> Thin:  # (n, n), (1, n)
        """The rows of a program with another f."""
        P = as_csr(P if P.dim() == 2 else P[0])
        if isinstance(program, Thin):
            return replace(program, P=P, q=q)
        _, _, G, h, A, b, lower, upper = program
        return cls(P, as_csr(G[0]), as_csr(A[0]), q, h, b, lower, upper)

    @cached_property
    def _sideways(self) -> tuple[Any, Any]:
        """Gᵀ and Aᵀ by columns, which takes nothing; by rows they would have to be sorted."""
        return self.G.T, self.A.T

    @cached_property
    def bordered(self) -> Any:
        """[P Aᵀ Gᵀ; A 0 0; G 0 0]."""
        if not len(self.h[0]) + len(self.b[0]):
            return self.P
        G, A = self._sideways
        return module().bmat([[self.P, A, G], [self.A, None, None], [self.G, None, None]])

    @cached_property
    def frame(self) -> Frame:
        """That of `bordered`."""
        return Frame.of(self.bordered)

    def some(self, index: Tensor) -> Thin:
        """The only problem there is."""
        return self

    @property
    def limits(self) -> Tensor:
        """As of `Program`, and so on."""
        return torch.cat((self.h, self.upper, -self.lower), -1)

    def across(self, x: Tensor) -> Tensor:
        return torch.cat((_times(self.G, x), x, -x), -1)

    def gathered(self, z: Tensor) -> Tensor:
        m, n = self.G.shape
        return _times(self._sideways[0], z[:, :m]) + z[:, m : m + n] - z[:, m + n :]

    def bent(self, x: Tensor) -> Tensor:
        return _times(self.P, x)

    def along(self, x: Tensor) -> Tensor:
        return _times(self.A, x)

    def pulled(self, nu: Tensor) -> Tensor:
        return _times(self._sideways[1], nu)

    def gradient(self, x: Tensor) -> Tensor:
        return self.bent(x) + self.q

    def value(self, x: Tensor) -> Tensor:
        return (x * (0.5 * self.bent(x) + self.q)).sum(-1)

    def absolute(self) -> Thin:
        return self._absolute

    @cached_property
    def _absolute(self) -> Thin:
        return replace(self, P=abs(self.P), G=abs(self.G), A=abs(self.A), q=self.q.abs())

    def extent(self, units: Units) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, rows, equations = (part[0].numpy() for part in (units.x, units.rows, units.equations))
        bend = self._entries[0].largest(x, x)[1]
        below, across = self._entries[1].largest(1 / rows, x)
        beside, along = self._entries[2].largest(1 / equations, x)
        columns = np.maximum(bend, np.maximum(across, along))
        one, two, three, four = map(torch.from_numpy, (columns, bend, below, beside))
        return one[None], two[None], three[None], four[None]

    @cached_property
    def _entries(self) -> tuple[Entries, Entries, Entries]:
        return Entries.of(self.P), Entries.of(self.G), Entries.of(self.A)

    def measured(self, units: Units) -> Thin:
        P, G, A = self._in(units)
        return Thin(
            P,
            G,
            A,
            self.q * units.x / units.cost,
            self.h / units.rows,
            self.b / units.equations,
            self.lower / units.x,
            self.upper / units.x,
        )

    def _in(self, units: Units) -> tuple[Any, Any, Any]:
        x, rows, equations = (part[0].numpy() for part in (units.x, units.rows, units.equations))
        lefts = x / float(units.cost), 1 / rows, 1 / equations
        P, G, A = (
            _within(matrix, left, entries, x)
            for matrix, left, entries in zip(
                (self.P, self.G, self.A), lefts, self._entries, strict=True
            )
        )
        return P, G, A

    def without(self, fixed: Tensor) -> Thin:
        x = torch.where(fixed, self.upper, 0)
        keep = (~fixed).to(x.dtype)
        d = _diagonal(keep)
        P = d @ self.P @ d
        most = abs(P).max() if P.nnz else 0.0
        return Thin(
            (P + _diagonal(most * (1 - keep))).tocsr(),
            (self.G @ d).tocsr(),
            (self.A @ d).tocsr(),
            torch.where(fixed, 0, self.gradient(x)),
            self.h - _times(self.G, x),
            self.b - self.along(x),
            torch.where(fixed, -torch.inf, self.lower),
            torch.where(fixed, torch.inf, self.upper),
        )

    def towards(self, point: Tensor) -> Thin:
        eye = module().eye(self.P.shape[0], format="csr")
        return replace(self, P=eye, q=-point)

    def tilted(self, q: Tensor) -> Thin:
        return replace(self, q=q)

    def between(self, h: Tensor, b: Tensor, lower: Tensor, upper: Tensor) -> Thin:
        return replace(self, h=h, b=b, lower=lower, upper=upper)

    def cone(self) -> Thin:
        n = self.P.shape[0]
        return Thin(
            module().eye(n, format="csr"),
            self.G,
            module().vstack((self.P, self.A)).tocsr(),
            self.q,
            torch.where(torch.isfinite(self.h), 0.0, torch.inf).double(),
            self.q.new_zeros(1, n + self.A.shape[0]),
            torch.where(torch.isfinite(self.lower), 0.0, -torch.inf).double(),
            torch.where(torch.isfinite(self.upper), 0.0, torch.inf).double(),
        )

    def elastic(self, at: Tensor, near: float) -> Thin:
        (m, n), k = self.G.shape, self.A.shape[0]
        aside = -module().eye(m + k, format="csr")
        bend = np.concatenate((np.full(n, near), np.ones(m + k)))
        open_ended = self.q.new_full((1, m + k), torch.inf)
        return Thin(
            module().diags(bend, format="csr"),
            module().hstack((self.G, aside[:m])).tocsr(),
            module().hstack((self.A, aside[m:])).tocsr(),
            self.q.new_zeros(1, len(bend)),
            self.h - _times(self.G, at),
            self.b - self.along(at),
            torch.cat((self.lower - at, -open_ended), -1),
            torch.cat((self.upper - at, open_ended), -1),
        )

    def unbent(self, free: Tensor, v: Tensor) -> Tensor:
        bend = self.P.diagonal()
        index = np.flatnonzero(free[0].numpy() & (bend > 1e-16 * bend.max(initial=0)))
        u = torch.zeros_like(v)
        if not len(index):
            return u
        own = self.P[index][:, index].tocsc()
        unit = module().diags(1 / np.sqrt(own.diagonal()))
        ridged = (unit @ own @ unit + 1e-13 * module().eye(len(index))).tocsc()
        inverse = factor(ridged)
        right, found = v[0].numpy()[index], np.zeros(len(index))
        for _ in range(3):
            found = found + unit @ inverse.solve(unit @ (right - own @ found))
        u[0, torch.from_numpy(index)] = torch.from_numpy(np.where(np.isfinite(found), found, 0))
        return u


class ThinSystem:
    """The system of an interior-point step: all unknowns but the multipliers of bounds.

    Without pivots off the diagonal the factor has few entries. Where its digits do not suffice,
    `steadier` has one with pivots, and a smaller ridge.
    """

    def __init__(self, program: Thin, weight: Tensor, ridge: float, pivot: float = 0.0) -> None:
        self.program, self.weight, self.ridge, self.pivot = program, weight, ridge, pivot
        ridge = ridge if pivot else max(ridge, PLAIN_RIDGE)
        m, n = program.G.shape
        k = program.A.shape[0]
        own = weight[0, m : m + n] + weight[0, m + n :] + ridge
        rows = -1 / weight[0, :m].clamp_min(CLOSED) - ridge
        below = torch.full((k,), -ridge, dtype=own.dtype)
        diagonal = torch.cat((own, below, rows)).numpy()
        # a unit diagonal for the rows, whose numbers differ most
        units = (own.rsqrt(), torch.ones_like(below), (-rows).rsqrt())
        self.unit = torch.cat(units).numpy()
        self.factor = factor(program.frame.within(diagonal, self.unit), pivot)

    def steadier(self) -> ThinSystem | None:
        return None if self.pivot else ThinSystem(self.program, self.weight, self.ridge, PIVOT)

    def once(self, dual: Tensor, equations: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        program, weight = self.program, self.weight
        m, n = program.G.shape
        k = program.A.shape[0]
        held = weight[:, m:] * rows[:, m:]
        right = torch.cat((dual + held[:, :n] - held[:, n:], equations, rows[:, :m]), -1)
        found = self.unit * self.factor.solve(self.unit * right[0].numpy())
        every = torch.from_numpy(found).unsqueeze(0)
        x, nu, z = every[:, :n], every[:, n : n + k], every[:, n + k :]
        bounds = weight[:, m:] * (torch.cat((x, -x), -1) - rows[:, m:])
        return x, nu, torch.cat((torch.where(weight[:, :m] > 0, z, 0), bounds), -1)


def _within(matrix: Any, left: Any, entries: Entries, right: Any) -> Any:
    """diag(l) M diag(r) of a CSR matrix."""
    data = left[entries.row] * matrix.data * right[entries.col]
    return module().csr_matrix((data, matrix.indices, matrix.indptr), matrix.shape)


def _times(matrix: Any, v: Tensor) -> Tensor:
    return torch.from_numpy(matrix @ v[0].numpy()).unsqueeze(0)


def _diagonal(v: Tensor) -> Any:
    return module().diags(v[0].numpy())
