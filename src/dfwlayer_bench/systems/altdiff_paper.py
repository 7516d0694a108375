"""Alt-Diff as the paper ran it, which is not the best that can be done for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dfwlayer_bench.baselines.altdiff import AltDiff, Ball, alternate
from dfwlayer_bench.problems.families import Instance
from dfwlayer_bench.systems.base import Answer, Ready

__all__ = ["prepare_alt_diff", "rounds_of"]

RHO, TOL, MAX_ROUNDS = 1.0, 1e-4, 1000


@dataclass(frozen=True)
class _Watched(Ball):
    """The rows of the ball, writing down f at every point they are asked about."""

    P: Tensor  # (n, n)
    q: Tensor  # (n,)
    values: list[Tensor] = field(default_factory=list)

    def apply(self, z: Tensor) -> Tensor:
        """As the ball does."""
        x = z[: len(self.q)]
        self.values.append(x @ (0.5 * (self.P @ x) + self.q))
        return super().apply(z)


def prepare_alt_diff(problem: Instance) -> Ready:
    """Alt-Diff as in the authors' script: ρ = 1, stopped when f changes by less than 1e-4.

    The rounds do not depend on when they are stopped, so the number of them is found beforehand.
    """
    rounds = rounds_of(problem)
    layer = AltDiff(rho=RHO, tol=0.0, max_steps=rounds, mode="jacobian")

    def call() -> Answer:
        q = problem.q.detach().requires_grad_()
        x = layer(problem.P, q, problem.w, problem.t)
        (gradient,) = torch.autograd.grad(problem.v @ x, q)
        return Answer(x.detach(), gradient, "max rounds" if rounds == MAX_ROUNDS else "")

    return Ready(
        call,
        {
            "mode": "jacobian",
            "rho": RHO,
            "tol": TOL,
            "stop": "relative change of f",
            "rounds": rounds,
            "dtype": str(problem.dtype).removeprefix("torch."),
        },
    )


def rounds_of(problem: Instance) -> int:
    """The first round whose f differs from the last one's by at most 1e-4 of it."""
    rows = _Watched(problem.w, problem.t, problem.P, problem.q)
    c = torch.cat([problem.q, torch.zeros_like(problem.q)])
    with torch.no_grad():
        alternate(problem.P, c, rows, rho=RHO, tol=0.0, max_steps=MAX_ROUNDS)
    values = torch.stack(rows.values)
    settled = values.diff().abs() <= TOL * values[:-1].abs()
    found = settled.nonzero()
    return int(found[0]) + 2 if len(found) else MAX_ROUNDS
