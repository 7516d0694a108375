"""The rounds of `ProjectedNewton`: look for the face, be exact on it, measure the gap."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.methods.base import Outcome, confirmed
from dfwlayer.methods.face_search import advance, lasting
from dfwlayer.methods.polish import polish
from dfwlayer.methods.progress import Progress
from dfwlayer.methods.verdict import judge
from dfwlayer.methods.vertex_step import follow
from dfwlayer.ops.rows import any_row, as_rows, inner, maximum, root, seen, select, select_mask
from dfwlayer.solution import Status

__all__ = ["run"]

CREEPING = 5  # rounds in which f falls and the gap is not halved, until a face is looked for again


def run(progress: Progress) -> Outcome:
    """Polish a start that was given, which may be close already, then go round by round."""
    _report(progress)
    going = progress.going()
    if progress.settings.warm and any_row(going):
        polish(progress, going, ask=2)
        judge(progress, going)
        if progress.slow and any_row(going := progress.going()):
            # the start may be the solution of a problem too ill conditioned for products
            polish(progress, going)
            judge(progress, going)
    return _go_on(progress)


def _go_on(progress: Progress) -> Outcome:
    """Round by round; once few problems are left, without the others."""
    few: tuple[Tensor, Progress] | None = None
    while any_row(going := progress.going()):
        few = progress.few(going)
        if few is not None:
            break
        # an exact solve that paid off may have left something to a second one; f may fall by
        # next to nothing for ever
        fresh = progress.exact & (progress.stalled < 1) & (progress.unhalved < CREEPING)
        again = select_mask(progress.close, progress.quick, fresh) | progress.paid
        searching = select_mask(again, False, going)
        if any_row(searching):
            advance(progress, searching)
        polish(progress, lasting(progress, going))
        if seen(late := going & progress.tried & (progress.close == 0)):
            follow(progress, late)
        judge(progress, going)
        _report(progress)
        progress.rounds += 1
        if progress.enough():
            break
    _look_back(progress)
    at, resolution = progress.at, progress.settings.resolution
    flagged = as_rows(at.bent_down, torch.bool)
    bent_down = confirmed(progress.problem, at.x, flagged, resolution)
    status = torch.where(bent_down, int(Status.NOT_CONVEX), as_rows(progress.status, torch.long))
    steps = progress.settings.max_steps - maximum(progress.at.steps_left, 0.0)
    out = Outcome(progress.best, as_rows(steps, torch.long), status, refinable=True)
    if few is None:
        return out
    index, rest = few[0], _go_on(few[1])
    return Outcome(
        out.x.index_copy(0, index, rest.x),
        out.num_steps.index_copy(0, index, rest.num_steps),
        out.status.index_copy(0, index, rest.status),
        refinable=True,
    )


def _report(progress: Progress) -> None:
    """Tell the callback, and end the problems that go on if it says so."""
    at, settings = progress.at, progress.settings
    if settings.callback is None:
        return
    x = progress.problem.constraint.retract(at.x)
    value = as_rows(at.value, x.dtype)
    steps = as_rows(settings.max_steps - maximum(at.steps_left, 0.0), torch.long)
    if settings.stopped(progress.problem, x, value, at.gradient, steps):
        progress.status = select(progress.going(), float(Status.STOPPED), progress.status)


def _look_back(progress: Progress) -> None:
    """Convexity along the whole way: ⟨∇f(x) − ∇f(x₀), x − x₀⟩ ≥ 0."""
    at, (x, gradient) = progress.at, progress.origin
    d = at.x - x
    square = inner(d, d)
    sizes = inner(gradient, gradient) + inner(at.gradient, at.gradient)
    rounding = 0.5 * at.blur * root(sizes) + 4 * at.rounding()
    rounding = rounding * root(square) + at.blur * at.steepest * square
    at.bent_down = at.bent_down | (inner(d, at.gradient - gradient) < -rounding)
