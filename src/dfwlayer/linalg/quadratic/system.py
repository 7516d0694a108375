"""The linear system of an interior-point step."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.program import Program, cholesky
from dfwlayer.linalg.quadratic.thin import Thin, ThinSystem

__all__ = ["RIDGE", "System", "system_of"]

RIDGE = 1e-11  # added to P and taken from 0 below A, for a factor; refinement takes it away again
REFINEMENTS = 8  # of a solution, at most
SLOW = 0.5  # what refinement should make of an error, to go on
BLUR = 1e-10  # of terms, below which right-hand sides count as zero
ENOUGH = 1e-11  # of a right-hand side, that refinement may leave
DOUBT = 1e-3  # the same where a factor did not serve

Unknowns = tuple[Tensor, Tensor, Tensor]


class _Factor(Protocol):
    def once(self, dual: Tensor, equations: Tensor, rows: Tensor) -> Unknowns:
        """(x, ν, z) up to what the ridge has changed."""

    def steadier(self) -> _Factor | None:
        """A factor with more digits, None if there is none."""


class System:
    """[P Aᵀ Rᵀ; A 0 0; R 0 −1/w] for weights w ≥ 0 of the rows."""

    def __init__(self, program: Program | Thin, weight: Tensor, factor: _Factor) -> None:
        self.program, self.weight, self.factor = program, weight, factor
        self.share = torch.where(weight > 0, 1 / torch.where(weight > 0, weight, 1), 0)

    def solve(self, dual: Tensor, equations: Tensor, rows: Tensor) -> Unknowns:
        """(x, ν, z) for a right-hand side, with what the ridge has changed taken back."""
        right = dual, equations, torch.where(self.weight > 0, rows, 0)
        found, off = self._refined(right)
        if bool((off > DOUBT).any()):
            other = self.factor.steadier()
            if other is not None:
                self.factor = other
                again, less = self._refined(right)
                found = _chosen(less < off, again, found)
        return found

    def _refined(self, right: Unknowns) -> tuple[Unknowns, Tensor]:
        """The best that the factor has, and how far it is off (B, 1)."""
        found = self.factor.once(*right)
        rest, least = self._rest(right, found)
        for _ in range(REFINEMENTS):
            more = self.factor.once(*rest)
            trial = (found[0] + more[0], found[1] + more[1], found[2] + more[2])
            left, off = self._rest(right, trial)
            better = off < least
            found, rest = _chosen(better, trial, found), _chosen(better, left, rest)
            going = better & (off < SLOW * least) & (off > ENOUGH)
            least = torch.where(better, off, least)
            if not bool(going.any()):
                break
        return found, least

    def _rest(self, right: Unknowns, found: Unknowns) -> tuple[Unknowns, Tensor]:
        """What is left of a right-hand side, and its size (B, 1).

        That is relative to the right-hand side, for each of the three kinds of equations: their
        numbers differ by many orders of magnitude. Nothing is expected below the rounding of terms.
        """
        program, (x, nu, z) = self.program, found
        terms = (program.bent(x), program.pulled(nu), program.gathered(z))
        along = program.along(x)
        across, own = torch.where(self.weight > 0, program.across(x), 0), z * self.share
        rest = (
            right[0] - terms[0] - terms[1] - terms[2],
            right[1] - along,
            right[2] - across + own,
        )
        sizes = _largest(*terms), _largest(along), _largest(across, own)
        off = torch.zeros_like(x[:, :1])
        for left, given, size in zip(rest, right, sizes, strict=True):
            allowed = (_largest(given) + BLUR * size).clamp_min(1e-300)
            off = torch.maximum(off, _largest(left) / allowed)
        return rest, off


def system_of(program: Program | Thin, weight: Tensor, ridge: float = RIDGE) -> System:
    """Factorise."""
    if isinstance(program, Thin):
        return System(program, weight, ThinSystem(program, weight, ridge))
    return System(program, weight, _Dense(program, weight, ridge))


def _largest(*parts: Tensor) -> Tensor:  # (B, ·) -> (B, 1)
    sizes = [part.abs().amax(-1, keepdim=True) for part in parts if part.shape[-1]]
    if not sizes:
        return parts[0].new_zeros(len(parts[0]), 1)
    return torch.cat(sizes, -1).amax(-1, keepdim=True)


def _chosen(mask: Tensor, one: Unknowns, other: Unknowns) -> Unknowns:
    x, nu, z = (torch.where(mask, a, b) for a, b in zip(one, other, strict=True))
    return x, nu, z


class _Dense:
    """All unknowns but those of A x = b eliminated into P + RᵀwR, by Cholesky."""

    def __init__(self, program: Program, weight: Tensor, ridge: float = RIDGE) -> None:
        self.program, self.weight = program, weight
        P, G, A = program.P, program.G, program.A
        m, n = G.shape[-2:]
        batch = len(weight)
        H = P.expand(batch, n, n)
        if m:
            H = H + G.mT @ (weight[:, :m].unsqueeze(-1) * G)
        own = weight[:, m : m + n] + weight[:, m + n :]
        H = H + torch.diag_embed(own + ridge)
        self.unit = H.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt()
        H = H * self.unit.unsqueeze(-1) * self.unit.unsqueeze(-2)
        self.factor = cholesky(H)
        self.slopes = A * self.unit.unsqueeze(-2)
        if A.shape[-2]:
            half = torch.linalg.solve_triangular(self.factor, self.slopes.mT, upper=False)
            schur = half.mT @ half
            schur.diagonal(dim1=-2, dim2=-1).add_(ridge)
            self.schur = cholesky(schur)

    def steadier(self) -> None:
        return None

    def once(self, dual: Tensor, equations: Tensor, rows: Tensor) -> Unknowns:
        program, weight = self.program, self.weight
        right = (dual + program.gathered(weight * rows)) * self.unit
        x = torch.cholesky_solve(right.unsqueeze(-1), self.factor)
        nu = equations
        if self.slopes.shape[-2]:
            nu = torch.cholesky_solve(self.slopes @ x - equations.unsqueeze(-1), self.schur)
            x = x - torch.cholesky_solve(self.slopes.mT @ nu, self.factor)
            nu = nu.squeeze(-1)
        x = x.squeeze(-1) * self.unit
        return x, nu, weight * (program.across(x) - rows)
