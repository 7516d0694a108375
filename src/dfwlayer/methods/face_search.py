"""How `ProjectedNewton` looks for the face of the solution."""

from __future__ import annotations

import torch

from dfwlayer.methods.augmented_newton import augmented_newton
from dfwlayer.methods.phases import Accelerated, Spectral, Splitting
from dfwlayer.methods.progress import Progress
from dfwlayer.methods.second_order import minimise_models
from dfwlayer.methods.vertex_step import follow
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    any_row,
    inner,
    maximum,
    number,
    ratio,
    root,
    seen,
    select,
    select_mask,
)

__all__ = ["advance", "lasting"]

SPECTRAL_ROUNDS = 2  # what is not found by then is ill conditioned
SPLITTING_STEPS = 7  # between two looks at the face
LARGE = 4096  # coordinates beyond which a factorisation takes longer than most solves
SLOW = 1e3  # steepest by flattest curvature met, from which on it is worth it all the same
BETWEEN = 150  # steps from one turn of augmented Newton steps to the next


def advance(progress: Progress, rows: Mask) -> None:
    """Look for the face, with the phase whose turn it is."""
    at = progress.at
    if progress.phase is None:
        progress.phase = Spectral(_curvature(progress))
    elif isinstance(progress.phase, Spectral) and _hard(progress):
        split = Splitting.start(at) if _worth_factors(progress) else None
        progress.phase = split or Accelerated(1.2 * _curvature(progress))
    elif (
        isinstance(progress.phase, Accelerated) and not progress.split and _worth_factors(progress)
    ):
        progress.split = True
        progress.phase = Splitting.start(at) or progress.phase
    if isinstance(progress.phase, Accelerated) and progress.bent and not progress.formed:
        # what is left after a turn is too ill conditioned for gradient steps
        progress.formed = True
        progress.phase = Splitting.start(at, form=True) or progress.phase
    if isinstance(progress.phase, Accelerated):
        steps = min(8, 2**progress.rounds) * progress.method.block
    elif isinstance(progress.phase, Splitting):
        steps = SPLITTING_STEPS
    else:
        steps = progress.block()
    if not isinstance(progress.phase, Spectral):
        turn = _turn(progress, rows)
        if seen(turn):
            follow(progress, turn)  # all there is to do where f is linear
            if not minimise_models(at, turn):
                augmented_newton(at, turn)
                progress.bent = True
                progress.next_turn = select(turn, at.steps_left - BETWEEN, progress.next_turn)
                if isinstance(progress.phase, Splitting):
                    progress.phase.restart(at, turn)
            # where f tends to zero, a step on the face may lower f and raise the gap
            progress.note(turn, at.gap(at.x, at.gradient), progress.gap_blur(at.x, at.gradient))
            progress.tried = progress.tried | turn
            progress.slow = True
            rows = select_mask(turn, False, rows)
            if not any_row(rows):
                return
    progress.phase.advance(at, steps, rows)


def lasting(progress: Progress, rows: Mask) -> Mask:
    """Those on a face that is worth a polish; alternating directions drift over many others."""
    if not isinstance(progress.phase, Splitting):
        return rows
    free = progress.problem.constraint.face(progress.at.x, progress.at.gradient).free
    last, progress.free = progress.free, free
    if free is None or progress.rounds % 6 == 5:  # it may also take turns between a few
        return rows
    same = number((free == last).all(-1)) != 0 if last is not None else progress.exact
    return rows & (same | progress.exact | progress.close)


def _hard(progress: Progress) -> bool:
    """Whether spectral steps are not the right thing."""
    at = progress.at
    return progress.rounds >= SPECTRAL_ROUNDS or not any_row(at.steepest < 100 * at.flattest)


def _worth_factors(progress: Progress) -> bool:
    """Whether to factorise a Hessian: a large one only where products converge slowly."""
    at = progress.at
    return at.x.shape[-1] <= LARGE or any_row(at.steepest > SLOW * at.flattest)


def _turn(progress: Progress, rows: Mask) -> Mask:
    """The problems whose models are to be minimised now: once each, when steps did not help.

    The steps that come first take about as long, and leave enough of them. On a set that bends
    there are further turns, as each may end on the way from face to face.
    """
    first = progress.late() | (progress.stalled >= 2)
    again = progress.at.steps_left <= progress.next_turn
    return rows & select_mask(progress.tried, again, first)


def _curvature(progress: Progress) -> Scalar:
    """Where to begin with α: the curvature met, or that along the gradient."""
    at = progress.at
    finfo = torch.finfo(at.x.dtype)
    if not any_row(at.steepest <= 0):
        return at.steepest
    square = inner(at.gradient, at.gradient)
    product = progress.problem.objective.hvp(at.x, at.gradient)
    along = maximum(ratio(inner(at.gradient, product), square, 0.0), 0.0)
    # without curvature a step should still end near the set: α‖x‖ ~ ‖g‖/100
    d = at.x - progress.problem.constraint.vertex(at.gradient)
    least = ratio(0.01 * root(square), root(inner(d, d)), 1.0)
    start = select(along > 0, along, maximum(least, finfo.tiny))
    return select(at.steepest > 0, at.steepest, start)
