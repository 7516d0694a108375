"""The saddle-point system of a face, by sparse factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.thin import PLAIN_RIDGE, Entries, Thin
from dfwlayer.linalg.sparse_factor import PIVOT, exact_factor, factor, module

__all__ = ["ThinFace"]

RIDGE = 1e-10  # see `dfwlayer.linalg.quadratic.saddle`
# ridges and pivots of factors that follow where one without pivots leaves much
FINER = (RIDGE, PIVOT), (1e-13, PIVOT)
REFINEMENTS = 6  # of a solution, at most
SOLVED = 1e-9  # what is left of a right-hand side, relative, of a system that has a solution
SHIFT = 1e-8  # ε, against which eigenvalues count as zero
DOUBT = 1e-6  # of a right-hand side: what is left where a factor did not serve
SHARP = 1e-14  # of a solution: what rounding leaves, and a ridge does not
PASSES = 6  # of the scaling of a face


class ThinFace:
    """The saddle-point system of active rows."""

    def __init__(self, program: Thin, active: Tensor, free: Tensor) -> None:
        m, n = program.G.shape
        k = program.A.shape[0]
        inside = np.flatnonzero(free[0].numpy())
        rows = np.flatnonzero(active[0, :m].numpy())
        N = module().vstack((program.A, program.G[rows])).tocsr()[:, inside]
        kept = np.flatnonzero(np.diff(N.indptr))
        N = N[kept]
        H = program.P[inside][:, inside]
        self.finer, self.largest = list(FINER), 0.0
        self.kept = np.concatenate((inside, n + np.concatenate((np.arange(k), k + rows))[kept]))
        if not len(self.kept):
            return
        matrix = module().bmat([[H, N.T], [N, None]], format="csr") if len(kept) else H.tocsr()
        # as in `dfwlayer.linalg.quadratic.saddle`
        size = np.sqrt(abs(program.P).max()) if program.P.nnz else 1.0
        size = size if size > 0 else 1.0
        length = Entries.of(N).largest(np.ones(len(kept)), np.ones(len(inside)))[0]
        self.unit = np.concatenate((np.full(len(inside), 1 / size), size / length))
        entries = Entries.of(matrix)
        for _ in range(PASSES):
            largest = entries.largest(self.unit, self.unit)[0]
            self.unit = self.unit / np.sqrt(np.where(largest > 0, largest, 1))
        self.unit = np.exp2(np.round(np.log2(self.unit)))
        d = module().diags(self.unit)
        self.matrix = (d @ matrix @ d).tocsr()
        self.sign = np.where(np.arange(len(self.kept)) < len(inside), 1.0, -1.0)
        self.factor = self._factorised(PLAIN_RIDGE, 0.0)

    def _factorised(self, ridge: float, pivot: float) -> Any:
        return factor((self.matrix + module().diags(ridge * self.sign)).tocsc(), pivot)

    def nearest(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """See `dfwlayer.linalg.quadratic.saddle.Saddle.nearest`."""
        return self._by(self._next, v, c)

    def solve(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """See `dfwlayer.linalg.quadratic.saddle.Saddle.solve`."""
        return self._by(self._settled, v, c)

    def _by(self, solver: Callable[[Any], Any], v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        n = v.shape[-1]
        full = torch.zeros(1, n + c.shape[-1], dtype=v.dtype)
        if len(self.kept):
            kept = torch.from_numpy(self.kept)
            right = torch.cat((v, c), -1)[0, kept].numpy() * self.unit
            full[0, kept] = torch.from_numpy(solver(right) * self.unit)
        return full[:, :n], full[:, n:]

    def _next(self, right: Any) -> Any:
        """A correction; those that follow a larger one are expected to be rounding in part."""
        self.largest = max(self.largest, abs(right).max(initial=0))
        return self._refined(right, self.largest)[0]

    def _settled(self, right: Any) -> Any:
        """What the ridge has let through, of a matrix that is singular, is no solution."""
        size = abs(right).max(initial=0)
        found, left = self._refined(right, size)
        while not _is_solution(found, left, size) and self.finer:
            found, left = self._by_finer(right, found, left, size)
        return found if _is_solution(found, left, size) else self._least(right)

    def _least(self, right: Any) -> Any:
        """The solution of least squares of least norm.

        Re (K + iε)⁻¹ r is Σ λ/(λ² + ε²) ⟨v, r⟩ v over the eigenvalues λ of K: what K does not
        reach is left out, and eigenvalues far above ε are inverted, the better the more often what
        is left is solved for.
        """
        found = np.zeros_like(right)
        shifted = (self.matrix + 1j * SHIFT * module().eye(len(right))).tocsc()
        inverse = exact_factor(shifted, 1.0)
        for _ in range(REFINEMENTS):
            found = found + inverse.solve((right - self.matrix @ found).astype(complex)).real
        return found

    def _refined(self, right: Any, size: float) -> tuple[Any, float]:
        """A solution, and what it leaves: where that is much against a size, ridges get smaller."""
        found, left = self._corrected(right)
        while left > DOUBT * size and self.finer:
            found, left = self._by_finer(right, found, left, size)
        return found, left

    def _by_finer(self, right: Any, found: Any, left: float, size: float) -> tuple[Any, float]:
        """The same by the next factor, which stays if it has solved more."""
        coarse, self.factor = self.factor, self._factorised(*self.finer.pop(0))
        again, less = self._corrected(right)
        if less < left or _is_solution(again, less, size):
            return again, less
        self.factor = coarse
        return found, left

    def _corrected(self, right: Any) -> tuple[Any, float]:
        """What refinement makes of the factor, and what it leaves."""
        found, rest = np.zeros_like(right), right
        size = least = abs(right).max(initial=0)
        for _ in range(REFINEMENTS):
            trial = found + self.factor.solve(rest)
            left = right - self.matrix @ trial
            off = abs(left).max()
            if not off < least:
                break
            found, rest, least = trial, left, off
            if off <= 1e-15 * size:
                break
        return found, least


def _is_solution(found: Any, left: float, size: float) -> bool:
    """Whether what a right-hand side of that size has made is none of what a ridge lets through.

    Of that it leaves a ridge's part. What is as large because the matrix is ill-conditioned leaves
    what rounding does.
    """
    most = float(abs(found).max(initial=0))
    return (left <= SOLVED * size and most * RIDGE * 1e3 <= size) or left <= SHARP * most
