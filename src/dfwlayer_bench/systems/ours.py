"""dfwlayer itself: its default method, and the published one."""

from __future__ import annotations

import torch

from dfwlayer import DFWLayer, Status
from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready, Setting

__all__ = ["prepare_default", "prepare_published"]


def prepare_default(problem: Instance) -> Ready:
    """method="auto" with the implicit gradient; in float64 the gap is asked to be tiny."""
    tol = 1e-5 if problem.dtype == torch.float32 else 1e-12
    return _prepare(problem, "auto", "implicit", tol)


def prepare_published(problem: Instance) -> Ready:
    """The paper's method and tolerance, differentiated through its steps."""
    return _prepare(problem, "dfw", "unroll", 1e-4)


def _prepare(problem: Instance, method: str, differentiate: str, tol: float) -> Ready:
    layer = DFWLayer(p=1.0, method=method, differentiate=differentiate, tol=tol)
    settings: dict[str, Setting] = {
        "method": method,
        "differentiate": differentiate,
        "tol": tol,
        "max_steps": layer.max_steps,
        "dtype": str(problem.dtype).removeprefix("torch."),
    }

    def call() -> Answer:
        q = problem.q.detach().requires_grad_()
        solution = layer.solve(problem.P, q, problem.w, problem.t)
        (gradient,) = torch.autograd.grad(problem.v @ solution.x, q)
        status = Status(int(solution.status))
        note = "" if status == Status.CONVERGED else status.name.lower().replace("_", " ")
        return Answer(solution.x.detach(), gradient, note)

    return Ready(call, settings)
