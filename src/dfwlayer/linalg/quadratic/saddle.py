"""The linear system of a face: the Hessian on the free coordinates, bordered by normals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.program import times
from dfwlayer.ops.matrices import lu_factor

__all__ = ["Saddle"]

RIDGE = 1e-10  # that makes the factor exist; refinement takes it away again
REFINEMENTS = 6  # of a solution, at most
PASSES = 6  # of the scaling
FLAT = 1e-10  # eigenvalues below, relative to the largest, count as zero
DOUBT = 1e-9  # what is left of a right-hand side, relative, where the factor did not serve


@dataclass(frozen=True)
class Saddle:
    """[H Nᵀ; N 0] on coordinates that are free, for B problems in double precision.

    Where it is singular, as normals depend on each other or H is flat along the face, the solution
    is that of least squares and of least norm.
    """

    free: Tensor  # (B, n)
    kept: Tensor | None  # of the n + k unknowns those in the matrix; None for all
    matrix: Tensor  # (B, n + k, n + k), in units of its rows and columns
    unit: Tensor  # (B, n + k)
    factor: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, H: Tensor, N: Tensor, free: Tensor) -> Saddle:
        """Factorise, for H (B, n, n) or (1, n, n) and normals N (B, k, n), zero or not."""
        batch, n = free.shape
        mask = free.to(H.dtype)
        kept = None
        # one unit of x in which H is of size one, and normals in units of theirs: a matrix whose
        # largest entries are one may have any H beside N, and large normals would shrink it
        size = H.abs().amax((-2, -1)).sqrt() if n else H.new_ones(len(H))
        size = torch.where(size > 0, size, 1).unsqueeze(-1).expand(batch, 1)
        if batch == 1:  # what is not free, or zero, need not be there
            inside = free[0].nonzero().squeeze(-1)
            H, N = H[:, inside][:, :, inside], N[:, :, inside]
            some = (N[0] != 0).any(-1).nonzero().squeeze(-1)
            N, mask = N[:, some], mask[:, inside]
            kept = torch.cat((inside, n + some))
            n = len(inside)
        else:
            H = (H * mask.unsqueeze(-1) * mask.unsqueeze(-2)).expand(batch, n, n)
            N = N * mask.unsqueeze(-2)
        k = N.shape[-2]
        blank = (N == 0).all(-1).to(H.dtype)
        matrix = H.new_zeros(batch, n + k, n + k)
        matrix[:, :n, :n] = H
        matrix[:, :n, n:] = N.mT
        matrix[:, n:, :n] = N
        matrix.diagonal(dim1=-2, dim2=-1).copy_(
            torch.cat((H.diagonal(dim1=-2, dim2=-1) + (1 - mask), -blank.expand(batch, k)), -1)
        )
        length = N.abs().amax(-1) if n else N.new_ones(batch, k)
        length = torch.where(length > 0, length, 1).expand(batch, k)
        unit = _unit(matrix, torch.cat((1 / size.expand(-1, n), size / length), -1))
        matrix = matrix * unit.unsqueeze(-1) * unit.unsqueeze(-2)
        ridge = torch.cat((mask, blank.expand(batch, k) - 1), -1) * RIDGE
        pivoted = lu_factor(matrix + torch.diag_embed(ridge))
        return cls(free, kept, matrix, unit, pivoted)

    def solve(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """u, zero where it is not free, and ν with H u + Nᵀν = v on the free ones and N u = c."""
        right = self._packed(v, c)
        found, rest = self._refined(right)
        size = _largest(right)
        lost = ~(rest <= DOUBT * size) | ~self._settled(found, right)
        if bool(lost.any()):
            index = lost.nonzero().squeeze(-1)
            found = found.index_copy(0, index, self._least(index, right[index]))
        return self._unpacked(found, v, c)

    def nearest(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """The same for a correction that is small: what cannot be corrected stays as it is."""
        return self._unpacked(self._refined(self._packed(v, c))[0], v, c)

    def _refined(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """A solution, with what the ridge has changed taken back, and what is left (B,)."""
        found = torch.zeros_like(right)
        rest, least = right, _largest(right)
        size = least
        for _ in range(REFINEMENTS):
            more = torch.linalg.lu_solve(*self.factor, rest.unsqueeze(-1)).squeeze(-1)
            trial = found + more
            left = right - times(self.matrix, trial)
            off = _largest(left)
            better = (off < least).unsqueeze(-1)
            found, rest = torch.where(better, trial, found), torch.where(better, left, rest)
            least = torch.where(better.squeeze(-1), off, least)
            if not bool((better.squeeze(-1) & (least > 1e-15 * size)).any()):
                break
        return found, least

    def _packed(self, v: Tensor, c: Tensor) -> Tensor:
        right = torch.cat((torch.where(self.free, v, 0), c), -1)
        return (right if self.kept is None else right[:, self.kept]) * self.unit

    def _unpacked(self, found: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        found = found * self.unit
        if self.kept is not None:
            blank = torch.cat((torch.zeros_like(v), torch.zeros_like(c)), -1)
            found = blank.index_copy(1, self.kept, found)
        n = v.shape[-1]
        return torch.where(self.free, found[:, :n], 0), found[:, n:]

    def _settled(self, found: Tensor, right: Tensor) -> Tensor:
        """Whether a solution does not consist of what the ridge let through."""
        return _largest(found) * RIDGE * 1e3 <= _largest(right) + 1e-300

    def _least(self, index: Tensor, right: Tensor) -> Tensor:
        """The solution of least squares of least norm, by eigenvalues."""
        values, vectors = torch.linalg.eigh(self.matrix[index])
        size = values.abs().amax(-1, keepdim=True)
        inverse = torch.where(
            values.abs() > FLAT * size, 1 / torch.where(values != 0, values, 1), 0
        )
        return times(vectors, inverse * times(vectors.mT, right))


def _unit(matrix: Tensor, unit: Tensor) -> Tensor:  # (B, n, n), (B, n) -> (B, n)
    """Powers of two that make the largest entries of rows and columns of a symmetric matrix one.

    There are many where entries are zero: those next to units that are given.
    """
    size = matrix.abs()
    for _ in range(PASSES if unit.shape[-1] else 0):
        largest = (size * unit.unsqueeze(-1) * unit.unsqueeze(-2)).amax(-1)
        unit = unit * torch.where(largest > 0, largest, 1).rsqrt()
    return torch.exp2(torch.round(torch.log2(unit)))


def _largest(v: Tensor) -> Tensor:  # (B, n) -> (B,)
    return v.abs().amax(-1) if v.shape[-1] else v.new_zeros(len(v))
