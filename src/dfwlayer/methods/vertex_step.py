"""The Frank-Wolfe step of `ProjectedNewton`, for where f has no curvature on the face."""

from __future__ import annotations

import torch

from dfwlayer.methods.progress import Progress
from dfwlayer.ops.rows import (
    Mask,
    any_row,
    axpy,
    inner,
    maximum,
    minimum,
    number,
    ratio,
    select,
    select_mask,
)

__all__ = ["follow"]

LENGTHS = 6  # of a Frank-Wolfe step that are tried, each a quarter of the last


def follow(progress: Progress, rows: Mask) -> None:
    """A Frank-Wolfe step, the length from the curvature here, and less where f does not fall.

    All there is to do where f has no curvature on the face, and on a set that bends itself
    enough to arrive where f stays steep.
    """
    at, objective = progress.at, progress.problem.objective
    rows = rows & (at.steps_left >= 2)
    d = progress.problem.constraint.vertex(at.gradient) - at.x
    if (endless := progress.problem.open_ended(at.gradient)) is not None:
        d = torch.where(endless, 0, d)
    slope = -inner(at.gradient, d)
    curvature = inner(d, objective.hvp(at.x, d))
    gamma = minimum(maximum(ratio(slope, curvature, 1.0), 0.0), 1.0)
    at.steps_left = select(rows, at.steps_left - 1, at.steps_left)
    for _ in range(1 if objective.quadratic else LENGTHS):
        if not any_row(rows):
            break
        x = axpy(at.x, gamma, d)
        tensor, gradient = objective.value_and_gradient(x)
        at.steps_left = select(rows, at.steps_left - 1, at.steps_left)
        fell = rows & (number(tensor) < at.value)
        at.move(fell, x, number(tensor), gradient)
        # where it was exact, there was more to gain
        progress.exact = select_mask(fell, False, progress.exact)
        rows = select_mask(fell, False, rows) & (at.steps_left >= 1)
        gamma = 0.25 * gamma
