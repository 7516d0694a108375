"""DC3 on the benchmark's problems: a network for this P, w and t, trained on other q."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dfwlayer_bench.baselines.dc3 import DC3, BallRule, Completion, Training, train
from dfwlayer_bench.problems.families import FAMILIES, Instance
from dfwlayer_bench.systems.base import Answer, Ready

__all__ = ["TRAINING", "prepare_dc3"]

TRAINING = Training(steps=5000, seconds=10.0)
SECONDS = 1 / 50  # of training for each variable, at most those above: a tiny run stays quick


def prepare_dc3(problem: Instance) -> Ready:
    """Trained beforehand on q of the family's distribution; the ball is one inequality.

    There are no equations to complete. The rate of the corrections is t²/(2‖w‖²), with which one
    step leads onto the plane of the ball's face if no coordinate changes its sign. f is in units
    of its mean without the ball, and x in units of the radius over Σw. Training is not timed; it
    is told in the settings.
    """
    n, scale = problem.n, problem.n ** FAMILIES[problem.family].power
    none = problem.q.new_zeros(0, n)
    rate = 0.5 * float(problem.t) ** 2 / float(problem.w @ problem.w)
    unit = float(problem.t / problem.w.sum())
    # E ½qᵀP⁻¹q for q of that scale
    worth = 0.5 * scale**2 * float(torch.linalg.inv(problem.P.double()).trace())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = DC3(n, Completion(none), BallRule(problem.w, problem.t), rate=rate, unit=unit)
    layer = layer.to(problem.device)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        q = scale * torch.randn(count, n, generator=generator, dtype=torch.float64)
        return q.to(problem.q), problem.q.new_zeros(count, 0)

    def value(x: Tensor, q: Tensor) -> Tensor:
        found: Tensor = ((0.5 * x @ problem.P + q) * x).sum(-1) / worth
        return found

    most = min(TRAINING.seconds, n * SECONDS)
    steps, seconds = train(layer, draw, value, replace(TRAINING, seconds=most))
    empty = problem.q.new_zeros(0)

    def call() -> Answer:
        q = problem.q.detach().requires_grad_()
        x = layer(q, empty)
        (gradient,) = torch.autograd.grad(problem.v @ x, q)
        return Answer(x.detach(), gradient, "a trained guess")

    return Ready(
        call,
        {
            "trained_on": f"{steps * TRAINING.batch} other q for this P, w and t",
            "steps": steps,
            "seconds": round(seconds, 1),
            "corrections": layer.steps,
            "rate": float(f"{rate:.1e}"),
            "penalty": TRAINING.penalty,
            "dtype": str(problem.dtype).removeprefix("torch."),
        },
    )
