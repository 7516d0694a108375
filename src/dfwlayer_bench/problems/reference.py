"""Exact answers in float64, by means the library does not share, to measure everything against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer_bench.problems.families import Instance

__all__ = ["Reference", "project_l1", "solve_reference"]


@dataclass(frozen=True)
class Reference:
    """The solution, the gradient of v·x in q, and how well the optimality conditions hold.

    Attributes:
        x: (n,), float64 on the CPU.
        gradient: (n,), d(v·x)/dq.
        multiplier: λ of the constraint; 0 where it is inactive.
        support: Number of coordinates that are not zero.
        residual: Largest violation of the optimality conditions, relative to max |q|.

    """

    x: Tensor
    gradient: Tensor
    multiplier: float
    support: int
    residual: float

    @property
    def active(self) -> bool:
        return self.multiplier > 0


def solve_reference(
    problem: Instance, *, tol: float = 1e-10, max_steps: int = 200_000
) -> Reference:
    """Accelerated projected gradient until the face settles, then one exact solve on the face.

    The solve is accepted only if all optimality conditions hold to ``tol``: with g = Px + q,
    λ ≥ 0 and s = sign(x),

        g + λ w ∘ s = 0 on the support,  |g| ≤ λw off it,  ‖w ∘ x‖₁ ≤ t, with equality if λ > 0.

    Raises:
        RuntimeError: If no face passes within ``max_steps``.

    """
    exact = problem.to(torch.float64)
    P, q, w, t = exact.P, exact.q, exact.w, float(exact.t)
    free = _unconstrained(exact)
    if float((w * free).abs().sum()) <= t:
        return _finish(exact, free, 0.0, tol)
    # the largest eigenvalue, and the smallest for the momentum of a strongly convex objective
    values = torch.linalg.eigvalsh(P)
    high, low = float(values[-1]), max(float(values[0]), 0.0)
    root = (low / high) ** 0.5
    momentum = (1 - root) / (1 + root)
    x = torch.zeros_like(q)
    y = x
    face: Tensor | None = None
    unchanged = 0
    for step in range(max_steps):
        following = project_l1(y - (P @ y + q) / high, w, t)
        k = momentum if low > 0 else step / (step + 3)
        y = following + k * (following - x)
        x = following
        signs = torch.sign(x)
        unchanged = unchanged + 1 if face is not None and torch.equal(signs, face) else 0
        face = signs
        if unchanged and unchanged % 20 == 0:
            candidate, multiplier = _on_face(exact, signs)
            if multiplier > 0 and kkt_residual(exact, candidate, multiplier) <= tol:
                return _finish(exact, candidate, multiplier, tol)
    raise RuntimeError(
        f"no exact reference for {problem.family}, n = {problem.n}, seed {problem.seed} within "
        f"{max_steps} steps: the solution may be degenerate; try another seed"
    )


def project_l1(y: Tensor, w: Tensor, t: float) -> Tensor:
    """Projection of y onto ‖w ∘ x‖₁ ≤ t by sorting the kinks |y|/w of the dual function."""
    size = y.abs()
    if float((w * size).sum()) <= t:
        return y
    order = torch.argsort(size / w, descending=True)
    weights, sizes = w[order], size[order]
    level = (torch.cumsum(weights * sizes, 0) - t) / torch.cumsum(weights * weights, 0)
    last = int((sizes / weights > level).nonzero().max())
    return torch.sign(y) * (size - level[last] * w).clamp_min(0)


def kkt_residual(problem: Instance, x: Tensor, multiplier: float) -> float:
    """The largest violation of the conditions above: forces against max |q|, the norm against t."""
    w, t = problem.w, float(problem.t)
    force = problem.P @ x + problem.q
    on = x != 0
    inside = (force + multiplier * w * torch.sign(x))[on].abs()
    outside = (force.abs() - multiplier * w)[~on].clamp_min(0)
    worst = torch.cat([inside, outside]).max() / problem.q.abs().max()
    excess = float((w * x).abs().sum()) - t
    slack = abs(excess) if multiplier > 0 else max(excess, 0.0)
    return max(float(worst), slack / t)


def _unconstrained(problem: Instance) -> Tensor:
    return _solve(torch.linalg.cholesky(problem.P), -problem.q)


def _on_face(problem: Instance, signs: Tensor) -> tuple[Tensor, float]:
    """The minimiser on the plane of the face and its λ: P_SS x + λa = −q_S, ⟨a, x⟩ = t."""
    on = signs != 0
    a = (problem.w * signs)[on]
    factor = torch.linalg.cholesky(problem.P[on][:, on])
    free, pull = _solve(factor, -problem.q[on]), _solve(factor, a)
    multiplier = (a @ free - problem.t) / (a @ pull)
    x = torch.zeros_like(problem.q)
    x[on] = free - multiplier * pull
    if torch.equal(torch.sign(x), signs):
        return x, float(multiplier)
    return x, -1.0  # the plane's minimiser lies outside the face


def _finish(problem: Instance, x: Tensor, multiplier: float, tol: float) -> Reference:
    residual = kkt_residual(problem, x, multiplier)
    if residual > tol:
        raise RuntimeError(
            f"the reference for {problem.family}, n = {problem.n}, seed {problem.seed} leaves a "
            f"residual of {residual:.1e}, above {tol:.1e}"
        )
    on = x != 0
    factor = torch.linalg.cholesky(problem.P[on][:, on])
    u = _solve(factor, problem.v[on])
    if multiplier > 0:
        a = (problem.w * torch.sign(x))[on]
        pull = _solve(factor, a)
        u = u - pull * (a @ u) / (a @ pull)
    gradient = torch.zeros_like(x)
    gradient[on] = -u
    return Reference(x, gradient, multiplier, int(on.sum()), residual)


def _solve(factor: Tensor, rhs: Tensor) -> Tensor:
    return torch.cholesky_solve(rhs.unsqueeze(-1), factor).squeeze(-1)
