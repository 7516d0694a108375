"""The gradient of the steps that were taken."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.methods.base import Outcome, Problem, Settings

__all__ = ["unroll"]


def unroll(problem: Problem, x: Tensor, settings: Settings) -> Outcome:
    """Run the method under autograd: exact for the steps taken, memory O(steps · n)."""
    outcome = settings.method.run(problem, x, settings)
    x = problem.constraint.retract(outcome.x)
    if settings.max_steps == 0 or x.numel() == 0:  # no step was taken; zero is still a gradient
        gradient = problem.objective.gradient(x)
        soft = problem.constraint.soft_vertex(gradient, settings.heat(0, x.dtype))
        never = torch.zeros_like(gradient, dtype=torch.bool)
        x = x + torch.where(never, gradient + soft, 0)
    return outcome._replace(x=x)
