"""Alt-Diff on the benchmark's problems, its penalty tuned beforehand."""

from __future__ import annotations

import torch

from dfwlayer_bench.baselines.altdiff import AltDiff, Ball, alternate
from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready

__all__ = ["prepare_jacobian", "prepare_reverse"]

MAX_STEPS = 5000


def prepare_jacobian(problem: Instance) -> Ready:
    """As published: the whole Jacobian dx/dq is carried forward."""
    return _prepare(problem, "jacobian")


def prepare_reverse(problem: Instance) -> Ready:
    """The same recursion, differentiated backwards for the one functional asked for."""
    return _prepare(problem, "reverse")


def _prepare(problem: Instance, mode: str) -> Ready:
    tol = 1e-5 if problem.dtype == torch.float32 else 1e-9
    rho = _tune(problem, tol)
    layer = AltDiff(rho=rho, tol=tol, max_steps=MAX_STEPS, mode=mode)

    def call() -> Answer:
        q = problem.q.detach().requires_grad_()
        x = layer(problem.P, q, problem.w, problem.t)
        (gradient,) = torch.autograd.grad(problem.v @ x, q)
        return Answer(x.detach(), gradient, "" if layer.converged else "max steps")

    return Ready(
        call,
        {
            "mode": mode,
            "rho": float(f"{rho:.3g}"),
            "tol": tol,
            "max_steps": MAX_STEPS,
            "rows": 3 * problem.n + 1,
            "dtype": str(problem.dtype).removeprefix("torch."),
        },
    )


def _tune(problem: Instance, tol: float) -> float:
    """The ρ of a grid that needs the fewest rounds on this very problem; not timed."""
    mean = float(problem.P.diagonal().mean())
    c = torch.cat([problem.q, torch.zeros_like(problem.q)])
    best, fewest = mean / 3, MAX_STEPS
    for power in (-0.5, 0.0, -1.0, 0.5, -1.5, -2.0):
        rho = mean * 10**power
        found = alternate(
            problem.P, c, Ball(problem.w, problem.t), rho=rho, tol=tol, max_steps=fewest
        )
        if found.converged and found.steps < fewest:
            best, fewest = rho, found.steps
    return best
