"""One solve, every point of it: where the curves over iterations come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer import LpBall, Quadratic, ShortStep, solve
from dfwlayer.methods import Method
from dfwlayer.step_size import StepSize
from dfwlayer.temperature import Temperature
from dfwlayer_bench.bench.measure import cosine, relative
from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.problems.reference import Reference

__all__ = ["Trajectory", "follow", "marks"]

PAPER_TOL = 1e-4  # the published stopping rule's


@dataclass(frozen=True)
class Trajectory:
    """x_0, x_1, …, x_K of one solve, each with its graph back to q."""

    problem: Instance
    q: Tensor
    points: Sequence[Tensor]  # (n,) each

    @cached_property
    def values(self) -> Tensor:
        """f(x_k), (K + 1,), float64 on the CPU."""
        exact = self.problem.to(torch.float64)
        x = torch.stack([point.detach().to("cpu", torch.float64) for point in self.points])
        return (x * (0.5 * x @ exact.P + exact.q)).sum(-1)

    @property
    def stop(self) -> int:
        """Where the published rule ends with the published tolerance."""
        return self.stop_at(PAPER_TOL)

    def stop_at(self, tol: float) -> int:
        """Where |f(x_k) − f(x_{k−1})| ≤ tol |f(x_{k−1})| first holds, or the end."""
        change, before = self.values.diff().abs(), self.values[:-1].abs()
        # f(x_0) is 0 at the origin, so that the first step never counts as settled
        tiny = torch.finfo(self.problem.dtype).tiny
        settled = (change <= tol * before.clamp_min(tiny)).nonzero()
        return int(settled[0]) + 1 if len(settled) else len(self.points) - 1

    def at(self, step: int, reference: Reference) -> dict[str, float | None]:
        """How good x and its gradient are after so many steps."""
        (gradient,) = torch.autograd.grad(
            self.problem.v @ self.points[step], self.q, retain_graph=True
        )
        x = self.points[step].detach().to("cpu", torch.float64)
        gradient = gradient.to("cpu", torch.float64)
        return {
            "distance": float((x - reference.x).norm()),
            "error": relative(x, reference.x),
            "cosine": cosine(gradient, reference.gradient),
            "gradient_error": relative(gradient, reference.gradient),
            "length": float(gradient.norm() / reference.gradient.norm()),
        }


def follow(
    problem: Instance,
    steps: int,
    *,
    method: str | Method = "dfw",
    temperature: float | Temperature | None = None,
    step_size: StepSize | None = None,
) -> Trajectory:
    """Take so many steps from the origin, whatever the stopping rule would say.

    The points depend on neither tol nor max_steps, so one solve gives what a solve for each
    number of steps would.
    """
    points: list[Tensor] = []
    q = problem.q.detach().requires_grad_()
    end = solve(
        Quadratic(problem.P, q),
        LpBall(1.0, problem.t, problem.w),
        method=method,
        tol=0.0,
        max_steps=steps,
        step_size=step_size or ShortStep(),
        temperature=temperature,
        callback=lambda at: points.append(at.x.reshape(-1)),  # one problem, with or without a batch
    )
    return Trajectory(problem, q, [*points[:-1], end.x])


def marks(steps: int) -> list[int]:
    """The steps at which a curve has its points: all of the first few, then every tenth."""
    first = [k for k in (1, 2, 3, 5, 7) if k <= steps]
    return [*first, *range(10, steps + 1, 10)] or [steps]
