"""Alt-Diff: ADMM for a QP whose every update is differentiated along with it (Sun et al., 2023).

    minimise ½ zᵀHz + cᵀz   subject to   Gz ≤ h,  Az = b

With slacks s ≥ 0, multipliers ν, λ and a penalty ρ, one round is

    z ← −(H + ρGᵀG + ρAᵀA)⁻¹ (c + Gᵀ(ν + ρ(s − h)) + Aᵀ(λ − ρb))
    s ← max(0, −ν/ρ − (Gz − h))
    ν ← ν + ρ(Gz + s − h)
    λ ← λ + ρ(Az − b)

and the same round applied to derivatives, with the kink of the maximum where s > 0, makes the
Jacobian dz/dc converge along with z. ``mode="jacobian"`` is that; ``mode="reverse"`` runs the
recursion backwards for one cotangent instead, which gives the same numbers for less, and in every
parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

__all__ = ["AltDiff", "AltDiffQP", "Ball", "Dense", "Rows", "alternate"]

Solve = Callable[[Tensor], Tensor]


class Rows(Protocol):
    """The inequalities Gz ≤ h, as an operator, so that their structure can be used."""

    @property
    def h(self) -> Tensor: ...

    def apply(self, z: Tensor) -> Tensor:
        """G z for z (d,) or (d, k)."""

    def adjoint(self, r: Tensor) -> Tensor:
        """Gᵀ r for r (m,) or (m, k)."""

    def solver(self, H: Tensor, A: Tensor | None, rho: float) -> Solve:
        """(H + ρGᵀG + ρAᵀA)⁻¹, factored once."""


@dataclass(frozen=True)
class Dense:
    """Any G (m, d) and h (m,)."""

    G: Tensor
    h: Tensor

    def apply(self, z: Tensor) -> Tensor:
        """G z."""
        return self.G @ z

    def adjoint(self, r: Tensor) -> Tensor:
        """Gᵀ r."""
        return self.G.mT @ r

    def solver(self, H: Tensor, A: Tensor | None, rho: float) -> Solve:
        """By the inverse, because it multiplies in every round."""
        matrix = H + rho * self.G.mT @ self.G
        if A is not None:
            matrix = matrix + rho * A.mT @ A
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        return lambda r: inverse @ r


@dataclass(frozen=True)
class Ball:
    """‖w ∘ x‖₁ ≤ t as 3n + 1 inequalities over z = (x, y): x ≤ y, −x ≤ y, −y ≤ 0, ⟨w, y⟩ ≤ t.

    GᵀG = diag(2I, 3I + wwᵀ), so only P + 2ρI needs a factorisation. H is P, acting on x alone.
    """

    w: Tensor  # (n,)
    t: Tensor  # ()

    @property
    def h(self) -> Tensor:
        return torch.cat([self.w.new_zeros(3 * len(self.w)), self.t.reshape(1)])

    def apply(self, z: Tensor) -> Tensor:
        """(x − y, −x − y, −y, ⟨w, y⟩)."""
        x, y = z.chunk(2)
        return torch.cat([x - y, -x - y, -y, (self.w @ y).unsqueeze(0)])

    def adjoint(self, r: Tensor) -> Tensor:
        """(r₁ − r₂, w r₄ − r₁ − r₂ − r₃)."""
        n = len(self.w)
        first, second, third, last = r[:n], r[n : 2 * n], r[2 * n : 3 * n], r[3 * n]
        pull = self.w * last if r.dim() == 1 else torch.outer(self.w, last)
        return torch.cat([first - second, pull - first - second - third])

    def solver(self, H: Tensor, A: Tensor | None, rho: float) -> Solve:
        """The blocks apart: P + 2ρI by Cholesky, 3I + wwᵀ by Sherman and Morrison."""
        if A is not None:
            raise ValueError("A: the ball has no equations; use Dense rows")
        eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(H + 2 * rho * eye))
        w = self.w
        size = 3 + w @ w

        def solve(r: Tensor) -> Tensor:
            top, bottom = r.chunk(2)
            along = (w @ bottom) / size
            pull = w * along if r.dim() == 1 else torch.outer(w, along)
            return torch.cat([inverse @ top, (bottom - pull) / (3 * rho)])

        return solve


class Rounds(NamedTuple):
    """Where the rounds ended."""

    z: Tensor  # (d,)
    jacobian: Tensor | None  # (d, k), dz/dc along the seed
    steps: int
    converged: bool


def alternate(
    H: Tensor,
    c: Tensor,  # (d,)
    rows: Rows,
    A: Tensor | None = None,
    b: Tensor | None = None,
    *,
    rho: float,
    tol: float,
    max_steps: int,
    seed: Tensor | None = None,  # (d, k), the columns of dc
) -> Rounds:
    """Rounds until z and Gz + s − h move and miss by less than ``tol`` of their sizes.

    Plain torch operations: autograd through them is the reverse mode. With a ``seed`` the
    Jacobian along it is carried forward.
    """
    solve, h = rows.solver(H, A, rho), rows.h
    s, nu = torch.zeros_like(h), torch.zeros_like(h)
    lam = None if b is None else torch.zeros_like(b)
    z = torch.zeros_like(c)
    width = None if seed is None else seed.shape[1]
    jacobian = None if seed is None else torch.zeros_like(seed)
    ds = None if width is None else h.new_zeros(len(h), width)
    dnu = ds
    dlam = None if width is None or b is None else b.new_zeros(len(b), width)
    for step in range(1, max_steps + 1):
        force = c + rows.adjoint(nu + rho * (s - h))
        if A is not None and b is not None and lam is not None:
            force = force + A.mT @ (lam - rho * b)
        last, z = z, -solve(force)
        miss = rows.apply(z) - h
        s = (-nu / rho - miss).clamp_min(0)
        nu = nu + rho * (miss + s)
        if A is not None and b is not None and lam is not None:
            lam = lam + rho * (A @ z - b)
        if seed is not None and ds is not None and dnu is not None:
            force = seed + rows.adjoint(dnu + rho * ds)
            if A is not None and dlam is not None:
                force = force + A.mT @ dlam
            jacobian = -solve(force)
            dmiss = rows.apply(jacobian)
            ds = torch.where((s > 0).unsqueeze(-1), -dnu / rho - dmiss, 0)
            dnu = dnu + rho * (dmiss + ds)
            if A is not None and dlam is not None:
                dlam = dlam + rho * (A @ jacobian)
        with torch.no_grad():
            still = (z - last).norm() <= tol * z.norm()
            met = (miss + s).norm() <= tol * s.norm().maximum(h.norm())
            if bool(still & met):
                return Rounds(z, jacobian, step, True)
    return Rounds(z, jacobian, max_steps, False)


class AltDiffQP(nn.Module):
    """The generic layer: z*(H, c, G, h, A, b), one problem a call.

    Args:
        rho: Penalty; None takes a third of the mean of H's diagonal.
        tol: Relative, on the movement of z and on the residual of the constraints.
        max_steps: Most rounds.
        mode: "jacobian" (as published; gradient in c only) or "reverse" (in every argument).

    After a call, ``steps`` and ``converged`` tell how it went.

    """

    def __init__(
        self,
        *,
        rho: float | None = None,
        tol: float = 1e-4,
        max_steps: int = 5000,
        mode: str = "reverse",
    ) -> None:
        super().__init__()
        if rho is not None and not rho > 0:
            raise ValueError(f"rho: expected a positive number or None, got {rho}")
        if mode not in ("jacobian", "reverse"):
            raise ValueError(f"mode: expected 'jacobian' or 'reverse', got {mode!r}")
        self.rho, self.tol, self.max_steps, self.mode = rho, tol, max_steps, mode
        self.steps, self.converged = 0, False

    def forward(
        self,
        H: Tensor,  # (d, d)
        c: Tensor,  # (d,)
        G: Tensor,  # (m, d)
        h: Tensor,  # (m,)
        A: Tensor | None = None,  # (k, d)
        b: Tensor | None = None,  # (k,)
    ) -> Tensor:
        """The solution z (d,)."""
        return self.solve(H, c, Dense(G, h), A, b, len(c))

    def solve(
        self, H: Tensor, c: Tensor, rows: Rows, A: Tensor | None, b: Tensor | None, width: int
    ) -> Tensor:
        """The rounds, and the gradient: in the Jacobian mode along the first ``width`` entries."""
        rho = float(H.detach().diagonal().mean()) / 3 if self.rho is None else self.rho

        def rounds(linear: Tensor, seed: Tensor | None = None) -> Rounds:
            found = alternate(
                H,
                linear,
                rows,
                A,
                b,
                rho=rho,
                tol=self.tol,
                max_steps=self.max_steps,
                seed=seed,
            )
            self.steps, self.converged = found.steps, found.converged
            return found

        if self.mode == "reverse":
            return rounds(c).z
        others = {"H": H, "A": A, "b": b, **vars(rows)}
        for name, tensor in others.items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise ValueError(f"{name}: mode='jacobian' differentiates in c only; use 'reverse'")
        seed = torch.eye(len(c), width, dtype=c.dtype, device=c.device)
        z: Tensor = _Carried.apply(c, lambda: rounds(c.detach(), seed))  # type: ignore[no-untyped-call]
        return z


class AltDiff(AltDiffQP):
    """The layer over ‖w ∘ x‖₁ ≤ t: x*(P, q, w, t), one problem a call.

    The arguments are those of `AltDiffQP`.
    """

    def forward(  # type: ignore[override]
        self,
        P: Tensor,  # (n, n)
        q: Tensor,  # (n,)
        weight: Tensor | None = None,  # (n,)
        radius: float | Tensor = 1.0,
    ) -> Tensor:
        """The solution x (n,)."""
        w = torch.ones_like(q) if weight is None else weight.abs()
        ball = Ball(w, torch.as_tensor(radius, dtype=q.dtype, device=q.device))
        c = torch.cat([q, torch.zeros_like(q)])
        return self.solve(P, c, ball, None, None, len(q))[: len(q)]


class _Carried(torch.autograd.Function):
    """z, with the Jacobian that was carried forward."""

    @staticmethod
    def forward(ctx: Any, c: Tensor, rounds: Callable[[], Rounds]) -> Tensor:
        found = rounds()
        assert found.jacobian is not None
        ctx.save_for_backward(found.jacobian)
        return found.z

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:
        (jacobian,) = ctx.saved_tensors
        gradient = torch.zeros_like(v)
        gradient[: jacobian.shape[1]] = jacobian.mT @ v
        return gradient, None
