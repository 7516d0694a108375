"""OptNet on the benchmark's problems, to the end of the precision asked for."""

from __future__ import annotations

import torch

from dfwlayer_bench.baselines.optnet import TOL, OptNet
from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready

__all__ = ["prepare_optnet"]

MAX_STEPS = 50


def prepare_optnet(problem: Instance) -> Ready:
    """The default tolerance of the layer; nothing is done beforehand."""
    layer = OptNet(max_steps=MAX_STEPS)

    def call() -> Answer:
        q = problem.q.detach().requires_grad_()
        x = layer(problem.P, q, problem.w, problem.t)
        (gradient,) = torch.autograd.grad(problem.v @ x, q)
        return Answer(x.detach(), gradient, "" if layer.converged else _note(layer.steps))

    return Ready(
        call,
        {
            "tol": TOL[problem.dtype],
            "max_steps": MAX_STEPS,
            "rows": 2 * problem.n + 1,
            "dtype": str(problem.dtype).removeprefix("torch."),
        },
    )


def _note(steps: int) -> str:
    return "max steps" if steps == MAX_STEPS else "rounding floor above the tolerance"
