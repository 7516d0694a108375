"""OptNet: a QP solved by an interior-point method and differentiated at its solution.

    minimise ½ zᵀQz + cᵀz   subject to   Gz ≤ h,  Az = b

After Amos and Kolter (2017). With slacks s and multipliers λ, ν, the optimality conditions are

    Qz + c + Gᵀλ + Aᵀν = 0,   Gz + s = h,   Az = b,   s ∘ λ = 0,   s, λ ≥ 0

and a Newton step on them, with E = s/λ, solves the symmetric system

    ⎡ Q  Gᵀ  Aᵀ ⎤ ⎡ dz ⎤   ⎡ r₁ ⎤
    ⎢ G  −E  0  ⎥ ⎢ dλ ⎥ = ⎢ r₂ ⎥
    ⎣ A  0   0  ⎦ ⎣ dν ⎦   ⎣ r₃ ⎦

Each step factors it once and solves it twice (Mehrotra's predictor and corrector). At the
solution the same matrix gives the gradient: for a cotangent v, solve with (−v, 0, 0); then
(dz, dλ, dν) are the cotangents of Qz + c + Gᵀλ + Aᵀν, of Gz − h and of Az − b, in which the
parameters appear explicitly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dfwlayer_bench.baselines.optnet_programs import Ball, Dense, Program, Solve, dot, eps

__all__ = ["OptNet", "OptNetQP"]

TOL = {torch.float32: 3e-7, torch.float64: 1e-8}
PATIENCE = 4  # steps without progress before the rounding floor is taken to be reached
FAINT = 1e-3  # of the largest size seen, below which a size is not believed
BOLDEST = 0.999  # of the way to the boundary, while the gap is large


class Point(NamedTuple):
    """An iterate: s and λ are positive."""

    z: Tensor  # (B, d)
    s: Tensor  # (B, m)
    lam: Tensor  # (B, m)
    nu: Tensor  # (B, k)

    def where(self, mask: Tensor, other: Point) -> Point:
        """Itself where ``mask`` (B,) holds, the other elsewhere."""
        choice = mask.unsqueeze(-1)
        return Point(*(torch.where(choice, a, b) for a, b in zip(self, other, strict=True)))


class Found(NamedTuple):
    """Where the interior-point method ended."""

    point: Point
    steps: int
    converged: Tensor  # (B,)


def interior_point(
    program: Program, factor: Callable[[Tensor], Solve], *, tol: float, max_steps: int
) -> Found:
    """Predictor-corrector steps until the residuals are below ``tol`` and the gap below tol².

    The gap is asked for squared because a distance from the solution goes with its root, and
    can be had because sᵀλ, a sum of positive terms, is exact far below the rounding of the
    objective. Each problem keeps the best of its iterates, and stops at the rounding floor.
    """
    c, h, b = program.c, program.h, program.b
    norm, ease = program.sizes()
    point = _start(program, factor, ease)
    tiny = torch.finfo(c.dtype).tiny ** 0.75  # s/λ stays far from overflow
    goal = c.new_tensor([[tol], [tol], [tol**2]])
    best = point
    score = torch.full_like(c[:, 0], torch.inf)
    since = torch.zeros_like(score)
    first_gap = dot(point.s, point.lam).squeeze(-1)
    most = FAINT * torch.stack([_largest(point.lam), _largest(point.s), first_gap])
    steps = 0
    while True:
        z, s, lam, nu = point
        Qz = program.hessian(z)
        force = Qz + c + program.pull(lam, nu)
        miss, error = program.rows(z) + s - h, program.equations(z) - b
        gap = dot(s, lam)
        wrong = torch.stack([_largest(force), _largest(miss, error), gap.squeeze(-1)])
        sizes = torch.stack(
            [
                # the rounding of Qz, not Qz: smaller forces cannot be told from none
                (norm * _largest(z)).maximum(_largest(c)),
                _largest(s, h, b),
                dot(z, Qz).abs().maximum(dot(c, z).abs()).squeeze(-1),
            ]
        )
        # where a size goes to zero with the solution, the one it had on the way counts
        most = most.maximum(sizes)
        relative = wrong / sizes.maximum(FAINT * most)
        found = (relative / goal).amax(0)
        better = found < score
        best, score = point.where(better, best), torch.where(better, found, score)
        since = torch.where(better, 0, since + 1)
        running = (score > 1) & (since < PATIENCE)
        if steps == max_steps or not bool(running.any()):
            return Found(best, steps, score <= 1)
        steps += 1
        E = s / lam
        solve = factor(E)
        trial = solve(-force, s - miss, -error)
        ds = -s - E * trial.lam
        length = _reach(s, ds).minimum(_reach(lam, trial.lam)).clamp_max(1)
        hoped = dot(s + length * ds, lam + length * trial.lam)
        centre = (hoped / gap) ** 3 * gap / s.shape[-1]
        # what complementarity must give up, in units of s
        give = s + (ds * trial.lam - centre) / lam
        trial = solve(-force, give - miss, -error)
        ds = -give - E * trial.lam
        boldness = 1 - relative[2].clamp(10 * eps(s), 1 - BOLDEST).unsqueeze(-1)
        length = (boldness * _reach(s, ds).minimum(_reach(lam, trial.lam))).clamp_max(1)
        moved = Point(
            z + length * trial.z,
            (s + length * ds).clamp_min(tiny),
            (lam + length * trial.lam).clamp_min(tiny),
            nu + length * trial.nu,
        )
        sound = torch.cat(moved, -1).isfinite().all(-1)
        point = moved.where(running & sound, point)


def _start(program: Program, factor: Callable[[Tensor], Solve], ease: Tensor) -> Point:
    """The solution for a constant E, with s and λ shifted to be positive."""
    h = program.h
    E = ease.reshape(-1, 1).expand_as(h)
    z, lam, nu = factor(E)(-program.c, h, program.b)

    def inside(v: Tensor) -> Tensor:
        margin = 0.1 * v.abs().amax(-1, keepdim=True)
        margin = torch.where(margin > 0, margin, torch.ones_like(margin))
        return v + (margin - v.amin(-1, keepdim=True)).clamp_min(0)

    return Point(z, inside(-E * lam), inside(lam), nu)


class OptNetQP(nn.Module):
    """The generic layer: z*(Q, c, G, h, A, b), one problem or a batch.

    Args:
        tol: Largest relative residual; the relative gap is brought below tol². None takes 3e-7
            in float32 and 1e-8 in float64. Rounding may end the steps before.
        max_steps: Most steps.

    After a call, ``steps`` and ``converged`` (in every problem) tell how it went.

    """

    def __init__(self, *, tol: float | None = None, max_steps: int = 50) -> None:
        super().__init__()
        if tol is not None and not tol > 0:
            raise ValueError(f"tol: expected a positive number or None, got {tol}")
        if max_steps < 1:
            raise ValueError(f"max_steps: expected at least one step, got {max_steps}")
        self.tol, self.max_steps = tol, max_steps
        self.steps, self.converged = 0, False

    def forward(
        self,
        Q: Tensor,  # (d, d) or (B, d, d), symmetric positive definite
        c: Tensor,  # (d,) or (B, d)
        G: Tensor,  # (m, d) or (B, m, d)
        h: Tensor,  # (m,) or (B, m)
        A: Tensor | None = None,  # (k, d) or (B, k, d), independent rows
        b: Tensor | None = None,  # (k,) or (B, k)
    ) -> Tensor:
        """The solution z (d,) or (B, d)."""
        if A is None or b is None:
            if A is not b:
                raise ValueError("A, b: expected both or neither")
            A, b = Q.new_zeros(0, _length("c", c)), Q.new_zeros(0)
        d, m, k = _length("c", c), _length("h", h), b.shape[-1]
        expected = {"Q": (d, d), "c": (d,), "G": (m, d), "h": (m,), "A": (k, d), "b": (k,)}
        batch = _check({"Q": Q, "c": c, "G": G, "h": h, "A": A, "b": b}, expected)
        B = 1 if batch is None else batch
        program = Dense(_symmetric(Q), c.expand(B, d), G, h.expand(B, m), A, b.expand(B, k))
        z = self.solve(program)
        return z.squeeze(0) if batch is None else z

    def solve(self, program: Program) -> Tensor:
        """The solution (B, d), with its gradient attached to the tensors of the program."""
        with torch.no_grad():
            factor = program.eliminate()
            tol = TOL[program.c.dtype] if self.tol is None else self.tol
            found = interior_point(program, factor, tol=tol, max_steps=self.max_steps)
        self.steps, self.converged = found.steps, bool(found.converged.all())
        z, s, lam, nu = found.point
        residuals = (
            program.hessian(z) + program.c + program.pull(lam, nu),
            program.rows(z) - program.h,
            program.equations(z) - program.b,
        )
        if not any(residual.requires_grad for residual in residuals):
            return z
        with torch.no_grad():
            # the last one of the steps is too far from the solution for an exact gradient
            solve = factor(s / lam)
        solution: Tensor = _Implicit.apply(*residuals, z, solve)  # type: ignore[no-untyped-call]
        return solution


class OptNet(OptNetQP):
    """The layer over ‖w ∘ x‖₁ ≤ t: x*(P, q, w, t), one problem or a batch.

    The arguments are those of `OptNetQP`.
    """

    def forward(  # type: ignore[override]
        self,
        P: Tensor,  # (n, n) or (B, n, n)
        q: Tensor,  # (n,) or (B, n)
        weight: Tensor | None = None,  # (n,) or (B, n)
        radius: float | Tensor = 1.0,  # a number, () or (B,); positive
    ) -> Tensor:
        """The solution x (n,) or (B, n)."""
        n = _length("q", q)
        w = q.new_ones(n) if weight is None else weight
        t = torch.as_tensor(radius, dtype=q.dtype, device=q.device)
        tensors = {"P": P, "q": q, "weight": w, "radius": t}
        batch = _check(tensors, {"P": (n, n), "q": (n,), "weight": (n,), "radius": ()})
        if not bool((t > 0).all()):
            raise ValueError(f"radius: expected positive numbers, got {float(t.min())}")
        B = 1 if batch is None else batch
        w = w.abs()
        # an entry of y without weight would be unbounded; this bounds it far away from x
        w = w.maximum(eps(w) * w.detach().amax(-1, keepdim=True).clamp_min(1e-6))
        program = Ball(_symmetric(P), q.expand(B, n), w.expand(B, n), t.reshape(-1, 1).expand(B, 1))
        x = self.solve(program)[:, :n]
        return x.squeeze(0) if batch is None else x


class _Implicit(torch.autograd.Function):
    """z, its gradient by the factorisation at the solution."""

    @staticmethod
    def forward(
        ctx: Any, force: Tensor, excess: Tensor, error: Tensor, z: Tensor, solve: Solve
    ) -> Tensor:
        ctx.solve = solve
        ctx.save_for_backward(excess, error)
        return z.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        excess, error = ctx.saved_tensors
        return (*ctx.solve(-v, torch.zeros_like(excess), torch.zeros_like(error)), None, None)


def _length(name: str, vector: Tensor) -> int:
    """The number of entries of a vector or of each in a batch."""
    if vector.dim() == 0 or vector.shape[-1] == 0:
        raise ValueError(
            f"{name}: expected a vector of one entry or more, got {tuple(vector.shape)}"
        )
    return vector.shape[-1]


def _check(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> int | None:
    """The size of the batch, None without one; raises if an argument does not fit."""
    first = next(iter(tensors.values()))
    batch: int | None = None
    for name, tensor in tensors.items():
        one, extra = expected[name], tensor.dim() - len(expected[name])
        if extra not in (0, 1) or tuple(tensor.shape[extra:]) != one:
            raise ValueError(
                f"{name}: expected shape {one}, or a batch of it, got {tuple(tensor.shape)}"
            )
        if extra:
            batch = len(tensor) if batch is None else batch
            if len(tensor) != batch:
                raise ValueError(f"{name}: expected a batch of {batch}, got {len(tensor)}")
        if tensor.dtype not in TOL:
            raise ValueError(f"{name}: expected float32 or float64, got {tensor.dtype}")
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name}: expected {first.dtype} on {first.device} as the first argument, "
                f"got {tensor.dtype} on {tensor.device}"
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name}: expected finite numbers; check the layer before this one")
    return batch


def _symmetric(matrix: Tensor) -> Tensor:
    """The part that a quadratic form sees; the gradient becomes symmetric too."""
    return 0.5 * (matrix + matrix.mT)


def _largest(*vectors: Tensor) -> Tensor:
    """The largest entry of all of them, in absolute value (B,)."""
    return torch.cat(vectors, -1).abs().amax(-1)


def _reach(v: Tensor, dv: Tensor) -> Tensor:
    """The longest step (B, 1) along dv that leaves no entry of v negative."""
    return torch.where(dv < 0, -v / dv, torch.inf).amin(-1, keepdim=True)
