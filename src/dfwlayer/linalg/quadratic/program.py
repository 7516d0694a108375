"""Quadratic programs: their data, and what is done with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.matrices import raised_cholesky

__all__ = ["Program", "Units", "cholesky", "times"]


class Program(NamedTuple):
    """min ½ xᵀPx + qᵀx over {x : l ≤ x ≤ u, G x ≤ h, A x = b}, for B problems in double precision.

    The inequalities are also seen as one list of m + 2n rows, first those of G, then the upper
    bounds, then the lower ones: R x ≤ r. A row whose r is infinite does not count.
    """

    P: Tensor  # (B, n, n) or (1, n, n)
    q: Tensor  # (B, n)
    G: Tensor  # (B, m, n) or (1, m, n)
    h: Tensor  # (B, m)
    A: Tensor  # (B, k, n) or (1, k, n)
    b: Tensor  # (B, k)
    lower: Tensor  # (B, n)
    upper: Tensor  # (B, n)

    def some(self, index: Tensor) -> Program:
        """The problems at these positions."""
        return Program(*(part if len(part) == 1 else part[index] for part in self))

    @property
    def limits(self) -> Tensor:  # (B, m + 2n)
        """r."""
        return torch.cat((self.h, self.upper, -self.lower), -1)

    def across(self, x: Tensor) -> Tensor:  # (B, n) -> (B, m + 2n)
        """R x."""
        return torch.cat((times(self.G, x), x, -x), -1)

    def gathered(self, z: Tensor) -> Tensor:  # (B, m + 2n) -> (B, n)
        """Rᵀz."""
        m, n = self.G.shape[-2:]
        return times(self.G.mT, z[..., :m]) + z[..., m : m + n] - z[..., m + n :]

    def bent(self, x: Tensor) -> Tensor:  # (B, n) -> (B, n)
        """P x."""
        return times(self.P, x)

    def along(self, x: Tensor) -> Tensor:  # (B, n) -> (B, k)
        """A x."""
        return times(self.A, x)

    def pulled(self, nu: Tensor) -> Tensor:  # (B, k) -> (B, n)
        """Aᵀν."""
        return times(self.A.mT, nu)

    def gradient(self, x: Tensor) -> Tensor:  # (B, n) -> (B, n)
        """P x + q."""
        return self.bent(x) + self.q

    def value(self, x: Tensor) -> Tensor:  # (B, n) -> (B,)
        """½ xᵀPx + qᵀx."""
        return (x * (0.5 * self.bent(x) + self.q)).sum(-1)

    def absolute(self) -> Program:
        """With |P|, |q|, |G| and |A|; its products are what the terms of a sum are."""
        return self._replace(P=self.P.abs(), q=self.q.abs(), G=self.G.abs(), A=self.A.abs())

    def extent(self, units: Units) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The largest entries in units: of columns of P, G and A, of rows of P, of G and of A.

        For a program with absolute values.
        """
        d = units.x.unsqueeze(-2)
        p = self.P * d * units.x.unsqueeze(-1)
        g = self.G * d / units.rows.unsqueeze(-1)
        a = self.A * d / units.equations.unsqueeze(-1)
        columns = bend = p.amax(-2)
        for part in (g, a):
            if part.shape[-2]:
                columns = torch.maximum(columns, part.amax(-2))
        return columns, bend, g.amax(-1), a.amax(-1)

    def measured(self, units: Units) -> Program:
        """In units."""
        d = units.x.unsqueeze(-2)
        return Program(
            self.P * d * units.x.unsqueeze(-1) / units.cost.unsqueeze(-1),
            self.q * units.x / units.cost,
            self.G * d / units.rows.unsqueeze(-1),
            self.h / units.rows,
            self.A * d / units.equations.unsqueeze(-1),
            self.b / units.equations,
            self.lower / units.x,
            self.upper / units.x,
        )

    def towards(self, point: Tensor) -> Program:  # (B, n)
        """The same rows with ½‖x − point‖² for f."""
        eye = torch.eye(self.q.shape[-1], dtype=self.q.dtype, device=self.q.device)
        return self._replace(P=eye.unsqueeze(0), q=-point)

    def tilted(self, q: Tensor) -> Program:  # (B, n)
        """The same rows with another linear part of f."""
        return self._replace(q=q)

    def between(self, h: Tensor, b: Tensor, lower: Tensor, upper: Tensor) -> Program:
        """With other limits."""
        return self._replace(h=h, b=b, lower=lower, upper=upper)

    def cone(self) -> Program:
        """½‖d + q‖² over the directions in which no row ends and f does not bend."""
        eye = torch.eye(self.q.shape[-1], dtype=self.q.dtype, device=self.q.device)
        batch = max(len(self.P), len(self.A))
        P, A = (part.expand(batch, *part.shape[-2:]) for part in (self.P, self.A))
        return Program(
            eye.unsqueeze(0),
            self.q,
            self.G,
            torch.where(torch.isfinite(self.h), 0, torch.inf).to(self.q),
            torch.cat((P, A), -2),
            self.q.new_zeros(len(self.q), P.shape[-2] + A.shape[-2]),
            torch.where(torch.isfinite(self.lower), 0, -torch.inf).to(self.q),
            torch.where(torch.isfinite(self.upper), 0, torch.inf).to(self.q),
        )

    def elastic(self, at: Tensor, near: float) -> Program:  # (B, n)
        """½‖s‖² + ½‖t‖² + ½ near ‖d‖² where G(x + d) ≤ h + s and A(x + d) = b + t, for a point x.

        The variables are d, s and t.
        """
        m, k, batch = self.h.shape[-1], self.b.shape[-1], len(self.q)
        aside = -torch.eye(m + k, dtype=self.q.dtype, device=self.q.device)
        bend = torch.cat((torch.full_like(self.q[0], near), -aside.diagonal()))
        open_ended = self.q.new_full((batch, m + k), torch.inf)

        def wide(rows: Tensor, own: Tensor) -> Tensor:
            return torch.cat((rows, own.expand(len(rows), -1, -1)), -1)

        return Program(
            torch.diag(bend).unsqueeze(0),
            torch.zeros_like(bend).expand(batch, -1),
            wide(self.G, aside[:m]),
            self.h - times(self.G, at),
            wide(self.A, aside[m:]),
            self.b - self.along(at),
            torch.cat((self.lower - at, -open_ended), -1),
            torch.cat((self.upper - at, open_ended), -1),
        )

    def unbent(self, free: Tensor, v: Tensor) -> Tensor:  # (B, n), (B, n) -> (B, n)
        """(P on the free coordinates)⁻¹ v, refined, of least norm where that is singular.

        Of a P that rounding made indefinite the factor is that of another one, and where these two
        differ in sign a correction adds to what it should take away: it is left out there.
        """
        bend = self.P.diagonal(dim1=-2, dim2=-1)
        free = free & (bend > 1e-16 * bend.amax(-1, keepdim=True))  # f is linear in the others
        mask = free.to(v.dtype)
        own = self.P * mask.unsqueeze(-1) * mask.unsqueeze(-2)
        own = own + torch.diag_embed((1 - mask).expand(len(own), -1))
        unit = own.diagonal(dim1=-2, dim2=-1).rsqrt()
        ridged = own * unit.unsqueeze(-1) * unit.unsqueeze(-2)
        ridged.diagonal(dim1=-2, dim2=-1).add_(1e-13)
        factor = cholesky(ridged)
        u, rest = torch.zeros_like(v), v
        for _ in range(3):
            way = torch.cholesky_solve((rest * unit).unsqueeze(-1), factor).squeeze(-1)
            closer = u + unit * way
            left = v - times(own, closer)
            better = left.abs().amax(-1, keepdim=True) < rest.abs().amax(-1, keepdim=True)
            u, rest = torch.where(better, closer, u), torch.where(better, left, rest)
        return torch.where(free & torch.isfinite(u), u, 0)

    def without(self, fixed: Tensor) -> Program:
        """With coordinates taken out that have one value only; they become zero.

        They bend f as much as the others do at most: units are told by what is in P.
        """
        x = torch.where(fixed, self.upper, 0)
        keep = (~fixed).to(x.dtype)
        P = self.P * keep.unsqueeze(-1) * keep.unsqueeze(-2)
        most = P.abs().amax((-2, -1)).unsqueeze(-1)
        return Program(
            P + torch.diag_embed(most * (1 - keep)),
            torch.where(fixed, 0, self.gradient(x)),
            self.G * keep.unsqueeze(-2),
            self.h - times(self.G, x),
            self.A * keep.unsqueeze(-2),
            self.b - self.along(x),
            torch.where(fixed, -torch.inf, self.lower),
            torch.where(fixed, torch.inf, self.upper),
        )


def times(matrix: Tensor, v: Tensor) -> Tensor:  # (·, m, n), (B, n) -> (B, m)
    """M v for each problem; one matrix may be that of all."""
    if len(matrix) == 1 and len(v) > 1:
        return v @ matrix[0].mT
    return (matrix @ v.unsqueeze(-1)).squeeze(-1)


def cholesky(matrix: Tensor) -> Tensor:
    """The factor of a matrix with a diagonal of ones; where it fails, of one with more of them."""
    return raised_cholesky(matrix, 1.0, 1e-12)[0]


class Units(NamedTuple):
    """x = d ∘ x̂; rows of G and A are divided by theirs, f by ``cost``; all are powers of two."""

    x: Tensor  # d (B, n)
    rows: Tensor  # of G (B, m)
    equations: Tensor  # of A (B, k)
    cost: Tensor  # (B, 1)

    def limits(self) -> Tensor:  # (B, m + 2n)
        """What a multiplier of a row is to be multiplied with, divided by ``cost``."""
        return torch.cat((self.rows, self.x, self.x), -1)
