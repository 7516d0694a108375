"""The linear system of a face: the Hessian on the free coordinates, bordered by normals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.program import times

__all__ = ["Saddle"]

RIDGE = 1e-10  # that makes the factor exist; refinement takes it away again
REFINEMENTS = 6
PASSES = 6  # of the scaling
FLAT = 1e-10  # eigenvalues below, relative to the largest, count as zero
DOUBT = 1e-9  # what is left of a right-hand side, relative, where the factor did not serve


@dataclass(frozen=True)
class Saddle:
    """[H Nᵀ; N 0] on coordinates that are free, for B problems in double precision.

    Where it is singular, as normals depend on each other or H is flat along the face, the solution
    is that of least squares and of least norm.
    """

    H: Tensor  # (B, n, n), or one for all (1, n, n)
    N: Tensor  # (B, k, n), zero rows for normals that do not count
    free: Tensor  # (B, n)
    matrix: Tensor  # (B, n + k, n + k), in units of its rows and columns
    unit: Tensor  # (B, n + k)
    factor: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, H: Tensor, N: Tensor, free: Tensor) -> Saddle:
        """Factorise."""
        batch, n = free.shape
        k = N.shape[-2]
        mask = free.to(H.dtype)
        own = (H * mask.unsqueeze(-1) * mask.unsqueeze(-2)).expand(batch, n, n)
        normals = N * mask.unsqueeze(-2)
        blank = (normals == 0).all(-1).to(H.dtype)
        matrix = H.new_zeros(batch, n + k, n + k)
        matrix[:, :n, :n] = own
        matrix[:, :n, n:] = normals.mT
        matrix[:, n:, :n] = normals
        matrix.diagonal(dim1=-2, dim2=-1).copy_(
            torch.cat((own.diagonal(dim1=-2, dim2=-1) + (1 - mask), -blank.expand(batch, k)), -1)
        )
        unit = _unit(matrix)
        matrix = matrix * unit.unsqueeze(-1) * unit.unsqueeze(-2)
        ridge = torch.cat((mask, blank.expand(batch, k) - 1), -1) * RIDGE
        pivoted = torch.linalg.lu_factor_ex(matrix + torch.diag_embed(ridge))
        return cls(H, normals, free, matrix, unit, (pivoted[0], pivoted[1]))

    def solve(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """u, zero where it is not free, and ν with H u + Nᵀν = v on the free ones and N u = c."""
        n = self.free.shape[-1]
        right = torch.cat((torch.where(self.free, v, 0), c), -1) * self.unit
        found = torch.zeros_like(right)
        rest = right
        size = right.abs().amax(-1)
        for _ in range(REFINEMENTS):
            more = torch.linalg.lu_solve(*self.factor, rest.unsqueeze(-1)).squeeze(-1)
            found = found + torch.where(torch.isfinite(more), more, 0)
            rest = right - times(self.matrix, found)
            if bool((rest.abs().amax(-1) <= 1e-15 * size).all()):
                break
        lost = ~(rest.abs().amax(-1) <= DOUBT * size) | ~self._settled(found, right)
        if bool(lost.any()):
            index = lost.nonzero().squeeze(-1)
            found = found.index_copy(0, index, self._least(index, right[index]))
        found = found * self.unit
        return torch.where(self.free, found[:, :n], 0), found[:, n:]

    def _settled(self, found: Tensor, right: Tensor) -> Tensor:
        """Whether a solution does not consist of what the ridge let through."""
        return found.abs().amax(-1) * RIDGE * 1e3 <= right.abs().amax(-1) + 1e-300

    def _least(self, index: Tensor, right: Tensor) -> Tensor:
        """The solution of least squares of least norm, by eigenvalues."""
        values, vectors = torch.linalg.eigh(self.matrix[index])
        size = values.abs().amax(-1, keepdim=True)
        inverse = torch.where(
            values.abs() > FLAT * size, 1 / torch.where(values != 0, values, 1), 0
        )
        return times(vectors, inverse * times(vectors.mT, right))


def _unit(matrix: Tensor) -> Tensor:  # (B, n, n) -> (B, n)
    """Powers of two that make the largest entries of rows and columns of a symmetric matrix one."""
    size = matrix.abs()
    unit = torch.ones_like(size[..., 0])
    for _ in range(PASSES):
        largest = (size * unit.unsqueeze(-1) * unit.unsqueeze(-2)).amax(-1)
        unit = unit * torch.where(largest > 0, largest, 1).rsqrt()
    return torch.exp2(torch.round(torch.log2(unit)))
