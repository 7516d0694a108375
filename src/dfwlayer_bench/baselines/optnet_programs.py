"""The QPs that OptNet solves, as operators: any dense one, and the one over an ℓ1 ball."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Ball", "Dense", "Direction", "Program", "Solve", "dot", "eps"]


class Direction(NamedTuple):
    """What the system above is solved for."""

    z: Tensor  # (B, d)
    lam: Tensor  # (B, m)
    nu: Tensor  # (B, k)


Solve = Callable[[Tensor, Tensor, Tensor], Direction]


class Program(Protocol):
    """A batch of QPs as operators, so that the structure of Q and G can be used."""

    @property
    def c(self) -> Tensor: ...  # (B, d)

    @property
    def h(self) -> Tensor: ...  # (B, m)

    @property
    def b(self) -> Tensor: ...  # (B, k)

    def hessian(self, z: Tensor) -> Tensor:
        """Q z."""

    def rows(self, z: Tensor) -> Tensor:
        """G z."""

    def equations(self, z: Tensor) -> Tensor:
        """A z."""

    def pull(self, lam: Tensor, nu: Tensor) -> Tensor:
        """Gᵀλ + Aᵀν."""

    def sizes(self) -> tuple[Tensor, Tensor]:
        """‖Q‖_∞ (B,) or (), and the E for which Q and GᵀE⁻¹G have the same trace."""

    def eliminate(self) -> Callable[[Tensor], Solve]:
        """Do what does not depend on E; returns what factors the system for an E (B, m)."""


@dataclass(frozen=True)
class Dense:
    """Any positive definite Q, with G and A; each with a batch dimension or shared."""

    Q: Tensor  # (d, d) or (B, d, d)
    c: Tensor  # (B, d)
    G: Tensor  # (m, d) or (B, m, d)
    h: Tensor  # (B, m)
    A: Tensor  # (k, d) or (B, k, d)
    b: Tensor  # (B, k)

    def hessian(self, z: Tensor) -> Tensor:
        """Q z."""
        return _times(self.Q, z)

    def rows(self, z: Tensor) -> Tensor:
        """G z."""
        return _times(self.G, z)

    def equations(self, z: Tensor) -> Tensor:
        """A z."""
        return _times(self.A, z)

    def pull(self, lam: Tensor, nu: Tensor) -> Tensor:
        """Gᵀλ + Aᵀν."""
        return _times(self.G.mT, lam) + _times(self.A.mT, nu)

    def sizes(self) -> tuple[Tensor, Tensor]:
        """The norm of Q, and ‖G‖² / tr Q."""
        trace = self.Q.diagonal(dim1=-2, dim2=-1).sum(-1)
        return self.Q.abs().sum(-1).amax(-1), self.G.square().sum((-2, -1)) / trace

    def eliminate(self) -> Callable[[Tensor], Solve]:
        """Q by Cholesky and A by QR, once; then each E costs one m × m factorisation.

        With Q = LLᵀ, u = Lᵀdz and N = L⁻¹Gᵀ, the equations fix the part of u in the range V of
        L⁻¹Aᵀ = VR. What is left for dλ is the Schur complement Nᵀ(I − VVᵀ)N + E.
        """
        L, info = torch.linalg.cholesky_ex(self.Q)
        if bool((info > 0).any()):
            raise ValueError("Q: expected positive definite matrices; add a multiple of I")
        V, R = torch.linalg.qr(torch.linalg.solve_triangular(L, self.A.mT, upper=False))
        extent = R.diagonal(dim1=-2, dim2=-1).abs()
        if extent.shape[-1] and bool((extent.amin(-1) <= 10 * eps(extent) * extent.amax(-1)).any()):
            raise ValueError("A: expected independent rows; remove the redundant equations")
        N = torch.linalg.solve_triangular(L, self.G.mT, upper=False)
        free = N - V @ (V.mT @ N)
        schur = free.mT @ free

        def factor(E: Tensor) -> Solve:
            C = _cholesky(schur + torch.diag_embed(E))

            def solve(r1: Tensor, r2: Tensor, r3: Tensor) -> Direction:
                force, fixed = _lower(L, r1), _lower(R.mT, r3)
                base = force + _times(V, fixed - _times(V.mT, force))
                lam = _upper(C.mT, _lower(C, _times(N.mT, base) - r2))
                u = base - _times(free, lam)
                nu = _upper(R, _times(V.mT, force - _times(N, lam)) - fixed)
                return Direction(_upper(L.mT, u), lam, nu)

            return solve

        return factor


@dataclass(frozen=True)
class Ball:
    """½xᵀPx + qᵀx over ‖w ∘ x‖₁ ≤ t as 2n + 1 rows for z = (x, y): ±x ≤ y, ⟨w, y⟩ ≤ t.

    y ≥ 0 follows and is left out: as a row it would only make the multipliers ambiguous.
    """

    P: Tensor  # (n, n) or (B, n, n)
    q: Tensor  # (B, n)
    w: Tensor  # (B, n), positive
    t: Tensor  # (B, 1)

    @property
    def c(self) -> Tensor:
        return torch.cat([self.q, torch.zeros_like(self.q)], -1)

    @property
    def h(self) -> Tensor:
        return torch.cat([torch.zeros_like(self.q), torch.zeros_like(self.q), self.t], -1)

    @property
    def b(self) -> Tensor:
        return self.q[:, :0]

    def hessian(self, z: Tensor) -> Tensor:
        """(Px, 0)."""
        x, y = z.chunk(2, -1)
        return torch.cat([_times(self.P, x), torch.zeros_like(y)], -1)

    def rows(self, z: Tensor) -> Tensor:
        """(x − y, −x − y, ⟨w, y⟩)."""
        x, y = z.chunk(2, -1)
        return torch.cat([x - y, -x - y, dot(self.w, y)], -1)

    def equations(self, z: Tensor) -> Tensor:
        """There are none."""
        return z[:, :0]

    def pull(self, lam: Tensor, nu: Tensor) -> Tensor:
        """(λ₁ − λ₂, w λ₃ − λ₁ − λ₂)."""
        over, under, last = self._split(lam)
        return torch.cat([over - under, self.w * last - over - under], -1)

    def sizes(self) -> tuple[Tensor, Tensor]:
        """The norm of P, and ‖G‖² / tr P; P may be zero, then any E will do."""
        rows = 4 * self.w.shape[-1] + self.w.square().sum(-1)
        trace = self.P.diagonal(dim1=-2, dim2=-1).sum(-1)
        return self.P.abs().sum(-1).amax(-1), torch.where(trace > 0, rows / trace, 1.0)

    def eliminate(self) -> Callable[[Tensor], Solve]:
        """Nothing beforehand."""
        return self._factor

    def _factor(self, E: Tensor) -> Solve:
        """One n × n factorisation; λ₁, λ₂ and y are eliminated by hand, λ₃ is a border.

        With k = 1/(E₁ + E₂), e = k(E₂ − E₁) and a = kE₁E₂ (which subtract nothing, so that no
        digits are lost as E goes to zero) dx and dλ₃ solve

            (P + 4k) dx + (e∘w) dλ₃ = f,   ⟨e∘w, dx⟩ − (⟨w², a⟩ + E₃) dλ₃ = g
        """
        over, under, last = self._split(E)
        stiff = 1 / (over + under)
        tilt, slip = stiff * (under - over), stiff * over * under
        matrix = self.P.expand(len(E), *self.P.shape[-2:]).clone()
        matrix.diagonal(dim1=-2, dim2=-1).add_(4 * stiff)
        L = _cholesky(matrix)
        normal = tilt * self.w
        along = _upper(L.mT, _lower(L, normal))
        size = dot(normal, along) + dot(self.w.square(), slip) + last

        def solve(r1: Tensor, r2: Tensor, r3: Tensor) -> Direction:
            rx, ry = r1.chunk(2, -1)
            first, second, third = self._split(r2)
            odd, even = 0.5 * (first - second), 0.5 * (first + second)
            f = rx + 4 * stiff * odd + tilt * ry
            g = third + dot(self.w, even + tilt * odd - slip * ry)
            free = _upper(L.mT, _lower(L, f))
            lam = (dot(normal, free) - g) / size
            dx = free - lam * along
            both = self.w * lam - ry  # dλ₁ + dλ₂
            apart = 2 * stiff * (dx - odd)
            dy = tilt * (dx - odd) - even - slip * both
            one, two = apart + stiff * under * both, stiff * over * both - apart
            return Direction(torch.cat([dx, dy], -1), torch.cat([one, two, lam], -1), r3)

        return solve

    def _split(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.w.shape[-1]
        return r[..., :n], r[..., n : 2 * n], r[..., 2 * n :]


def _cholesky(matrix: Tensor) -> Tensor:
    """The factor (B, n, n); where rounding made a matrix indefinite, of the nearest that is not."""
    L: Tensor
    L, info = torch.linalg.cholesky_ex(matrix)
    shift = eps(matrix)
    while shift < 1 and bool((info > 0).any()):
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        matrix = matrix + torch.diag_embed(shift * diagonal * (info > 0).unsqueeze(-1))
        L, info = torch.linalg.cholesky_ex(matrix)
        shift *= 100
    return L


def _lower(L: Tensor, r: Tensor) -> Tensor:
    """L⁻¹ r for L (n, n) or (B, n, n) and r (B, n)."""
    return _triangular(L, r, upper=False)


def _upper(U: Tensor, r: Tensor) -> Tensor:
    """U⁻¹ r for U (n, n) or (B, n, n) and r (B, n)."""
    return _triangular(U, r, upper=True)


def _triangular(matrix: Tensor, r: Tensor, *, upper: bool) -> Tensor:
    # a shared matrix takes the whole batch as columns, instead of being repeated for it
    columns = r.mT if matrix.dim() == 2 else r.unsqueeze(-1)
    found: Tensor = torch.linalg.solve_triangular(matrix, columns, upper=upper)
    return found.mT if matrix.dim() == 2 else found.squeeze(-1)


def _times(M: Tensor, v: Tensor) -> Tensor:
    """M v for M (m, d) or (B, m, d) and v (B, d)."""
    return v @ M.mT if M.dim() == 2 else (M @ v.unsqueeze(-1)).squeeze(-1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ (B, 1)."""
    return (a * b).sum(-1, keepdim=True)


def eps(tensor: Tensor) -> float:
    """The rounding unit of its dtype."""
    return torch.finfo(tensor.dtype).eps
