"""What the rounds of `ProjectedNewton` know of each problem."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from dfwlayer.methods.base import Problem, Settings
from dfwlayer.methods.phases import Accelerated, Iterate, Spectral, Splitting, rows_of
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    absolute,
    any_row,
    fill,
    inner,
    keep,
    maximum,
    number,
    seen,
    select,
    select_mask,
)
from dfwlayer.ops.scale import ROUNDING
from dfwlayer.solution import Status

__all__ = ["FLOOR", "Progress", "RecordedProgress"]

STARTS = 8  # where f is tried if it is infinite at the start
SHARE = 4  # a batch shrinks once no more than one in so many problems goes on
RECORDED_STEPS = 20  # of conjugate gradients in the first round of a CUDA graph
FLOOR = 100  # times the rounding of the gap, above which a gap is not what rounding left


class Plan(Protocol):
    """How long a phase lasts."""

    @property
    def block(self) -> int:
        """Spectral steps in a round."""

    @property
    def inner(self) -> int:
        """Most steps of conjugate gradients in the first rounds."""


def _infinite(value: Scalar, gradient: Tensor) -> Mask:
    """Where f or its gradient is infinite or NaN."""
    size = absolute(value) + number(gradient.abs().amax(-1))
    return select_mask(size < torch.inf, False, fill(0.0, size) == 0)


def _elsewhere(
    problem: Problem, x: Tensor, value: Scalar, gradient: Tensor
) -> tuple[Tensor, Scalar, Tensor]:
    """A start where f is finite, among means of vertices in directions from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros_like(x)
    for count in range(1, STARTS + 1):
        direction = torch.randn(x.shape[-1], generator=generator).to(x).expand_as(x)
        for sign in (1, -1):
            total = total + problem.constraint.vertex(sign * direction)
        trial = problem.constraint.retract(total / (2 * count))
        tensor, slope = problem.objective.value_and_gradient(trial)
        found = number(tensor)
        better = _infinite(value, gradient) & (_infinite(found, slope) == 0)
        x, gradient = keep(better, trial, x), keep(better, slope, gradient)
        value = select(better, found, value)
        if not any_row(_infinite(value, gradient)):
            break
    return x, value, gradient


class Progress:
    """Where one solve by `ProjectedNewton` is between its phases, and how far each may go."""

    second_looks = 2  # at a solution that may be on a wrong face
    newton_looks = 4  # at one whose last step leaves something to square

    def __init__(self, method: Plan, problem: Problem, x: Tensor, settings: Settings) -> None:
        self.method = method
        self.problem = problem
        self.settings = settings
        tensor, gradient = problem.objective.value_and_gradient(x)
        value = number(tensor)
        outside = _infinite(value, gradient)
        if seen(outside):
            x, value, gradient = _elsewhere(problem, x, value, gradient)
            outside = _infinite(value, gradient)
        zero = fill(0.0, value)
        none = zero > 0
        steps_left = zero + float(settings.max_steps)
        if settings.spent is not None:
            steps_left = steps_left - number(settings.spent.to(x.dtype))
        endless, resolution = zero + torch.inf, settings.resolution
        self.at = Iterate(problem, x, value, gradient, zero, endless, none, steps_left, resolution)
        self.origin = x, gradient
        self.best = x
        self.best_gap: Scalar = zero + torch.inf
        self.round_value = value
        self.stalled = zero  # rounds without progress
        self.unhalved = zero  # rounds in which the gap was not halved
        self.floored = zero  # rounds whose best gap was one of rounding
        self.exact = none  # the last polish left nothing to gain but rounding
        self.close = none  # the gap was small enough before,
        self.closed = zero  # for so many rounds
        self.quick = none  # and has fallen as it does where x is on the right face
        self.sharpening = none  # the last polish was a Newton step with something left to square
        self.refused = none  # the last polish would have raised f: x is not on the right face
        self.status = select(outside, float(Status.OUT_OF_RANGE), zero + float(Status.MAX_STEPS))
        self.rounds = 0
        self.slow = False  # conjugate gradients did not get there
        self.free: Tensor | None = None  # of the last face, while it is being looked for
        self.phase: Spectral | Accelerated | Splitting | None = None
        self.split = False  # a second look at whether to factorise was taken
        self.modelled = False  # the last polish was exact for a model of f only
        self.tried = none  # models were minimised
        self.paid = none  # the last polish halved the gap, and may do so again
        self.next_turn = zero - 1  # how many steps are left when the next one begins
        self.formed = False  # a Hessian was written down, or is too large for it
        self.asked = none  # whether f falls for ever
        self.bent = False  # on a set for which there are only models on its faces

    def few(self, going: Mask) -> tuple[Tensor, Progress] | None:
        """The problems that go on and where they are, if they are a small part of the batch."""
        if self.at.x.dim() < 2:
            return None
        going = torch.as_tensor(going)
        if self.settings.callback is not None:  # which sees the whole batch
            return None
        if len(going) < SHARE or int(going.sum()) > len(going) // SHARE:
            return None
        index = going.squeeze(-1).nonzero().squeeze(-1)
        problem = self.problem.rows(index)
        if problem is None:
            return None
        part = copy(self)
        for name, value in vars(self).items():
            setattr(part, name, rows_of(value, index))
        part.problem = part.at.problem = problem
        return index, part

    def note(self, rows: Mask, gap: Scalar, blur: Scalar) -> None:
        """Keep the best point.

        Of points that the gap cannot tell apart the last one is the most exact, all the more where
        a model has been minimised.
        """
        known = select(self.exact | self.sharpening, FLOOR, 1.0) * blur
        better = rows & ((gap < self.best_gap) | (gap <= known))
        self.best = keep(better, self.at.x, self.best)
        self.best_gap = select(better, gap, self.best_gap)

    def most(self) -> int:
        """Steps of conjugate gradients in this round."""
        return self.method.inner << min(self.rounds, 2)

    def block(self) -> int:
        """Spectral steps in this round."""
        return self.method.block

    def enough(self) -> bool:
        """Whether to end although problems go on."""
        return False

    def watched(self, off_face: Callable[[Tensor], Mask]) -> Callable[[Tensor], Mask] | None:
        """What conjugate gradients ask whether they have left the face."""
        return off_face

    def no_worse(self, rows: Mask, x: Tensor, gradient: Tensor) -> Mask:
        """Whether to go to x where f changes by rounding alone.

        Yes if the gap shows no more than rounding, as the model knows better then; or if f falls
        by the mean of both slopes, which for a quadratic f is by how much it does. Unlike f and the
        gap that has no terms but those of the coordinates that move.
        """
        if not any_row(rows):
            return rows
        at = self.at
        least = maximum(at.gap(at.x, at.gradient), FLOOR * self.gap_blur(x, gradient))
        falls = inner(gradient + at.gradient, x - at.x) < 0
        return (at.gap(x, gradient) <= least) | falls

    def going(self) -> Mask:
        """The problems that go on."""
        return (self.status == float(Status.MAX_STEPS)) & (self.at.steps_left > 0)

    def late(self) -> Mask:
        """Where so many steps were taken that those to come have to be better ones."""
        at, most = self.at, self.settings.max_steps
        return most - at.steps_left >= min(250 + at.x.shape[-1] / 4, 0.4 * most)

    def gap_blur(self, x: Tensor, gradient: Tensor) -> Scalar:
        """Rounding of the two terms of the gap, for a gradient without any."""
        return 4 * torch.finfo(x.dtype).eps * absolute(inner(gradient, x))

    def gap_noise(self) -> Scalar:
        """Rounding of the gap: that of ∇f(x) times the way to go."""
        at = self.at
        d = at.x - self.problem.constraint.vertex(at.gradient)
        scale = self.problem.objective.scale(at.x, at.gradient)
        noise = scale.blur(d).squeeze(-1) / ROUNDING
        terms = self.problem.constraint.lowest_terms(at.gradient)
        return number(noise if terms is None else noise + torch.finfo(at.x.dtype).eps * terms)


class RecordedProgress(Progress):
    """The same in a CUDA graph, where nothing can be looked at and the number of rounds is fixed.

    A batch has a second round, which a few of many problems will need; what is not done then goes
    on without a graph.
    """

    second_looks = newton_looks = 0

    def __init__(self, method: Plan, problem: Problem, x: Tensor, settings: Settings) -> None:
        super().__init__(method, problem, x, settings)
        self.tried = self.tried | True  # models are not to be had

    def few(self, going: Mask) -> None:
        return None

    def most(self) -> int:
        steps = RECORDED_STEPS >> self.rounds
        return steps if self.at.x.dtype == torch.float32 else 2 * steps

    def block(self) -> int:
        return self.method.block >> self.rounds

    def enough(self) -> bool:
        return self.rounds == self.at.x.dim()

    def watched(self, off_face: Callable[[Tensor], Mask]) -> None:
        return None

    def no_worse(self, rows: Mask, x: Tensor, gradient: Tensor) -> Mask:
        return rows  # the gap, which has the last word, will tell
