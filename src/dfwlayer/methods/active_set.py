"""Frank-Wolfe over an explicit set of active vertices, for sets that only have a vertex."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dfwlayer.linalg.hull import descend_over_hull
from dfwlayer.methods.base import Outcome, Problem, Settings
from dfwlayer.objectives.base import Objective

__all__ = ["ActiveSet"]


@dataclass(frozen=True)
class ActiveSet:
    """Fully corrective Frank-Wolfe, stopped by the gap ≤ tol · |f(x)|.

    It asks the set for nothing but vertices, one per step, and keeps x as a convex combination
    of those in use: finitely many steps for a quadratic f over a polytope. For a
    set that has nothing else to offer (`CustomSet`), the implicit gradient is taken along the
    face that the vertices in use are on.
    """

    @property
    def modes(self) -> tuple[str, ...]:
        return ("implicit",)

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """See the class."""
        objective, constraint, unbounded = problem
        if unbounded is not None:
            raise ValueError(
                "method: 'active-set' needs a bounded set, found coordinates without a bound (or "
                "of weight zero); use 'auto'"
            )
        face_of = constraint.hull_faces()

        def apart(index: Tensor) -> tuple[Objective, Callable[[Tensor], Tensor]] | None:
            part = problem.rows(index)
            return None if part is None else (part.objective, part.constraint.vertex)

        with torch.no_grad():
            found = descend_over_hull(
                objective,
                constraint.vertex,
                x,
                settings.tol,
                settings.max_steps,
                settle=face_of is not None,
                stopped=None if settings.callback is None else partial(settings.stopped, problem),
                apart=apart,
            )
            face = None if face_of is None else face_of(found)
        return Outcome(found.x, found.num_steps, found.status, face=face)
