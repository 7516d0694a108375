"""Linear rows: equations alone, and inequalities with a point that satisfies all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.constraints.plain.base import Plain, less
from dfwlayer.linalg.quadratic import Program, minimise

__all__ = ["PlainAffine", "PlainRows", "onto_rows"]

LEAST = 1e-9  # a room below this, relative to the numbers of the rows, is none
PIVOT = 1e-11  # a pivot below this is rounding
FIRST = 2.0**-24  # less by this, the ratio of the cover is the least of equal ones


def onto_rows(A: Tensor, inverse: Tensor, b: Tensor, z: Tensor) -> Tensor:
    """z − A⁺(A z − b) in double precision, refined once; (k, n), (n, k), (k,) and (..., n)."""
    x = z
    for _ in range(2):
        missed = (A @ x.unsqueeze(-1)).squeeze(-1) - b
        x = x - (inverse @ missed.unsqueeze(-1)).squeeze(-1)
    return x


@dataclass(frozen=True)
class PlainAffine(Plain):
    """{x : A x = b}."""

    A: Tensor  # (k, n) or (..., k, n)
    inverse: Tensor  # A⁺
    b: Tensor  # (k,) or (..., k)

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """By A⁺."""
        return onto_rows(self.A.double(), self.inverse.double(), self.b.double(), z)

    def inside(self, x: Tensor) -> Tensor:
        """x, which satisfies the rows up to its rounding."""
        return x


@dataclass(frozen=True)
class PlainRows(Plain):
    """argmin ½ xᵀQx − ⟨z, x⟩ over {x : G x ≤ h, A x = b}, for rows and a Q that are constants.

    With a point c where all inequalities have room d = h − G c > 0, and x = c + N y where A N = 0
    and NᵀQN = I, it is the point nearest to u = Nᵀ(z − Qc) in {y : F y ≤ d}, F = G N. Lemke's
    method follows the points nearest to u in {y : F y ≤ (1 + s) d} from the s where that is u
    itself down to s = 0, a pivot for each piece of the path (Cottle, Pang and Stone, 1992,
    chapter 4). Wherever the steps end, y/(1 + s) is in the set.
    """

    rows: Tensor  # G (m, n)
    room: Tensor  # d (m,)
    centre: Tensor  # c (n,)
    back: Tensor  # N (n, k)
    pulled: Tensor  # Qc (n,)
    inner: Tensor  # F (m, k)

    @classmethod
    def of(
        cls,
        G: Tensor,  # (m, n), in double precision as all of it
        h: Tensor,  # (m,), may be ∞
        A: Tensor,  # (k, n)
        b: Tensor,  # (k,)
        Q: Tensor | None = None,  # (n, n), positive definite, None for the identity
    ) -> PlainRows:
        """From rows; a ValueError where they leave no point, or no room."""
        counted = torch.isfinite(h) & (G != 0).any(-1)
        if bool((h[~counted] < 0).any()):
            raise ValueError("its rows leave no point: one is 0 ≤ h with a negative h")
        G, h = G[counted], h[counted]
        length = torch.linalg.vector_norm(G, dim=-1)
        G, h = G / length.unsqueeze(-1), h / length
        centre = _inner_point(G, h, A, b)
        room = h - G @ centre
        if room.numel() and float(room.amin()) <= LEAST * (1 + float(h.abs().amax())):
            raise ValueError(
                "no point satisfies all of its inequalities strictly, as those do that together "
                "are an equation; state it as a row of A, and then they can be scaled into"
            )
        _, values, right = torch.linalg.svd(A, full_matrices=True)
        rank = int((values > values.new_tensor(A.shape).amax() * 1e-15 * _top(values)).sum())
        free = right[rank:].mT
        metric = free.mT @ free if Q is None else free.mT @ Q @ free
        factor, wrong = torch.linalg.cholesky_ex(metric)
        if bool(wrong):
            raise ValueError("Q is not positive definite where the equations leave x free")
        back = torch.linalg.solve_triangular(factor, free.mT, upper=False).mT
        pulled = centre if Q is None else Q @ centre
        return cls(G, room, centre, back, pulled, G @ back)

    @property
    def exact(self) -> bool:
        """No."""
        return False

    def nearest(self, z: Tensor, steps: int) -> Tensor:
        """By pivots."""
        back, inner, room = (part.double() for part in (self.back, self.inner, self.room))
        u = (z - self.pulled.double()) @ back
        if len(room):
            across = inner.transpose(-2, -1)
            y = u - _lemke(inner @ across, room - u @ across, room, steps) @ inner
            beyond = (y @ across / room).amax(-1, keepdim=True)
            u = y / beyond.clamp_min(1.0)
        return self.centre.double() + u @ back.transpose(-2, -1)

    def inside(self, x: Tensor) -> Tensor:
        """x, scaled towards c where a row lacks room for the rounding of its terms."""
        if not len(self.room):
            return x
        rows, room, c = (part.double() for part in (self.rows, self.room, self.centre))
        at = x.double()
        eps = 0.5 * torch.finfo(x.dtype).eps  # a power of two
        rounding = eps * ((at.abs() + c.abs()) @ rows.abs().transpose(-2, -1))
        share = (((at - c) @ rows.transpose(-2, -1) + rounding) / room).amax(-1, keepdim=True)
        inner = (c + (at - c) / share.clamp_min(1.0)).to(x.dtype)
        return torch.where(share > 1.0, inner, x)


def _top(values: Tensor) -> float:
    return float(values.amax()) if values.numel() else 0.0


def _inner_point(G: Tensor, h: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """A point with room in all rows, as far as one is of size one: the largest r with G x + r ≤ h.

    Next to zero where there is a choice.
    """
    m, n = G.shape
    one = G.new_ones(m, 1)
    none = G.new_full((1, n), torch.inf)
    limit = torch.cat((none, G.new_ones(1, 1)), -1)
    P = torch.diag(torch.cat((G.new_full((n,), 1e-6), G.new_zeros(1))))
    program = Program(
        P.unsqueeze(0),
        torch.cat((G.new_zeros(1, n), -G.new_ones(1, 1)), -1),
        torch.cat((G, one), -1).unsqueeze(0),
        h.unsqueeze(0),
        torch.cat((A, A.new_zeros(len(A), 1)), -1).unsqueeze(0),
        b.unsqueeze(0),
        torch.cat((-none, G.new_full((1, 1), -torch.inf)), -1),
        limit,
    )
    found = minimise(program)
    if bool(found.empty):
        raise ValueError("its equations have no solution")
    return found.x[0, :n]


def _lemke(M: Tensor, q: Tensor, d: Tensor, steps: int) -> Tensor:
    """λ ≥ 0 of w = Mλ + q + s d ≥ 0 with ⟨λ, w⟩ = 0 and the least s that is reached; (..., m).

    Args:
        M: (m, m), positive semi-definite.
        q: (..., m).
        d: (m,), positive.
        steps: Pivots.

    """
    m = len(M)
    lead = q.shape[:-1]
    first = torch.tensor(FIRST, dtype=q.dtype, device=q.device)
    cover, count = 2 * m, torch.arange(m, device=q.device)
    eye = torch.eye(m, dtype=q.dtype, device=q.device)
    fixed = torch.cat((eye, -M, -d.unsqueeze(-1)), -1)
    table = torch.cat((fixed.expand(*lead, m, 2 * m + 1), q.unsqueeze(-1)), -1)
    basis = count.expand(*lead, m)
    ratio = q / d
    done = ratio.amin(-1, keepdim=True) >= 0
    leaving = ratio.argmin(-1, keepdim=True)
    entering = torch.full_like(leaving, cover)
    for step in range(steps):
        column = table.gather(-1, entering.unsqueeze(-1).expand(*lead, m, 1)).squeeze(-1)
        if step:
            usable = column > PIVOT
            ratio = table[..., -1].clamp_min(0.0) / torch.where(usable, column, 1.0)
            # of equal ones the cover leaves first
            ratio = torch.where(basis == cover, less(ratio, first), ratio)
            ratio = torch.where(usable, ratio, torch.inf)
            leaving = ratio.argmin(-1, keepdim=True)
            done = done | ~usable.any(-1, keepdim=True)
        chosen = count == leaving
        row = torch.where(chosen.unsqueeze(-1), table, 0.0).sum(-2)
        pivot = torch.where(chosen, column, 0.0).sum(-1, keepdim=True)
        row = row / torch.where(done, 1.0, pivot)
        turned = table - column.unsqueeze(-1) * row.unsqueeze(-2)
        turned = torch.where(chosen.unsqueeze(-1), row.unsqueeze(-2), turned)
        gone = torch.where(chosen, basis, 0).sum(-1, keepdim=True)
        table = torch.where(done.unsqueeze(-1), table, turned)
        basis = torch.where(chosen & ~done, entering, basis)
        done = done | (gone == cover)
        entering = torch.where(gone < m, gone + m, gone - m).clamp(0, cover)
    held = basis.unsqueeze(-1) == count + m
    return torch.where(held, table[..., -1:], 0.0).sum(-2).clamp_min(0.0)
