"""The published method: Frank-Wolfe with a soft vertex, to be differentiated by unrolling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.methods.base import Outcome, Problem, Settings, State, iterate, move, start_rule
from dfwlayer.solution import Status
from dfwlayer.step_size import Query

__all__ = ["DFW"]


@dataclass(frozen=True)
class DFW:
    """Differentiable Frank-Wolfe (Liu, Liu, Wang, Zhao, 2024).

    x ← (1 − γ_k) x + γ_k ŝ_k with ŝ_k the soft vertex at temperature τ_k, until
    |f(x_{k+1}) − f(x_k)| ≤ tol · |f(x_k)|, or for all steps if tol is 0. With the short step and
    hard vertices f(x_k) − f* ≤ 2LM²/(k + 3); a soft vertex that is δ(τ) short of the hard one
    adds δ(τ) and gives 5LM²/(2k + 4) + δ(τ_k), M being the diameter of the set.
    """

    @property
    def modes(self) -> tuple[str, ...]:
        return ("unroll", "implicit")

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """See the class."""
        rule = start_rule(problem, x, settings)
        tiny = torch.finfo(x.dtype).tiny

        def step(k: int, state: State) -> State:
            soft = problem.constraint.soft_vertex(state.gradient, settings.heat(k, x.dtype))
            direction = soft - state.x
            endless = problem.open_ended(state.gradient.detach())
            if endless is not None:
                direction = torch.where(endless, 0, direction)
            query = Query(k, state.x, state.value, state.gradient, direction, 1.0, endless)
            gamma = rule(query).unsqueeze(-1)
            # as a convex combination: x + γ(s − x) may leave the set by rounding
            moved = move(problem, rule, state, query, (1 - gamma) * state.x + gamma * soft)
            change = (moved.value - state.value).detach().abs()
            # f(x_0) = 0 at the origin; tiny in its place keeps the ratio large, not undefined
            settled = change <= settings.tol * state.value.detach().abs().clamp_min(tiny)
            # a soft vertex that points uphill moves nothing; tol = 0 goes on to the next τ
            settled = settled & (settings.tol > 0)
            ended = state.active & settled
            return moved._replace(
                active=state.active & ~settled,
                status=torch.where(ended, int(Status.CONVERGED), moved.status),
            )

        return iterate(problem, rule, x, settings, step)
