"""First-order steps to find the face, conjugate gradients to be exact on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.arguments import as_integer
from dfwlayer.methods.base import Ability, Outcome, Problem, Settings
from dfwlayer.methods.progress import Progress, RecordedProgress
from dfwlayer.methods.rounds import run
from dfwlayer.ops.rows import by_recording, on_host
from dfwlayer.solution import Status

__all__ = ["ProjectedNewton"]


@dataclass(frozen=True)
class ProjectedNewton:
    """Exact to the rounding of the dtype, in a few dozen products with the Hessian.

    Rounds of two phases. First a block of first-order steps looks for the face of the solution:
    spectral projected gradient steps, which need a handful where the problem is well
    conditioned; where that was not enough after two rounds, alternating directions with a
    factorised Hessian, or accelerated projected steps where there is none. Then conjugate
    gradients for the minimiser on the face the iterate is on; the result, projected, is taken if
    it lowers f. On the right face that is the solution, or, where the face or f bends, a Newton
    step towards it. A round ends with the Frank-Wolfe gap; the point with the least gap is
    returned.

    A step, for ``max_steps`` and ``num_steps``, is one gradient, one product with the Hessian or
    one solve with its factors.

    Args:
        block: Spectral steps in a round.
        inner: Most steps of conjugate gradients in the first rounds; more are allowed later.

    """

    block: int = 10
    inner: int = 50

    def __post_init__(self) -> None:
        for name in ("block", "inner"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 1))

    @property
    def modes(self) -> tuple[str, ...]:
        return ("implicit",)

    @property
    def abilities(self) -> Ability:
        """Compiled code takes its place where nobody has chosen another length of rounds."""
        compiled = Ability.COMPILED if self == ProjectedNewton() else Ability.NONE
        return Ability.ANY_UNITS | Ability.RECORDED | compiled

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """See the class."""
        if settings.max_steps > 0:
            found = _directly(problem, x)
            if found is not None:
                return _reported(found, problem, x, settings)
        with torch.no_grad():
            progress = by_recording(x, RecordedProgress, Progress)
            return run(progress(self, problem, x, settings))


@torch.no_grad()
def _directly(problem: Problem, x: Tensor) -> Outcome | None:
    """With the identity for a Hessian the solution is the projection of −∇f(0), in one step.

    With a diagonal D it is that in terms of √D x, over a set that is stretched accordingly.
    """
    objective, constraint, face = problem.objective, problem.constraint, None
    if objective.isotropic:
        z = -objective.gradient(torch.zeros_like(x))
        found = on_host(z, lambda: constraint.nearest(z))
        x, face = found or (constraint.project(z), None)
    elif (square := objective.diagonal) is not None:
        factor = square.sqrt()
        if (stretched := constraint.stretched(factor)) is None:
            return None
        z = -objective.gradient(torch.zeros_like(x)) / factor
        x = stretched.project(z) / factor
    else:
        return None
    one = torch.ones(x.shape[:-1], dtype=torch.long, device=x.device)
    # what the certificate does not confirm is rounding
    return Outcome(x, one, one * int(Status.ROUNDING_FLOOR), face=face)


def _reported(found: Outcome, problem: Problem, start: Tensor, settings: Settings) -> Outcome:
    """What took one step, unless the callback ends the solve before it."""
    if settings.callback is not None:
        for x, steps in ((start, torch.zeros_like(found.num_steps)), (found.x, found.num_steps)):
            at = problem.constraint.retract(x)
            if settings.stopped(problem, at, *problem.objective.value_and_gradient(at), steps):
                status = torch.full_like(steps, int(Status.STOPPED))
                return Outcome(x, steps, status, face=found.face if x is found.x else None)
    return found
