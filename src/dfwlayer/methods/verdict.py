"""How a round of `ProjectedNewton` ends: with the gap, and with problems that are done."""

from __future__ import annotations

import torch

from dfwlayer.methods.phases import Splitting
from dfwlayer.methods.progress import FLOOR, Progress
from dfwlayer.ops.rows import Mask, absolute, any_row, maximum, select, select_mask
from dfwlayer.solution import Status

__all__ = ["judge"]

QUICK = 0.01  # of a gap, to which a step of Newton's close to the solution brings it at least


def judge(progress: Progress, rows: Mask) -> None:
    """Measure the gap, keep the best point, and end the problems that are done."""
    at = progress.at
    finfo = torch.finfo(at.x.dtype)
    gap = at.gap(at.x, at.gradient)
    blur = progress.gap_blur(at.x, at.gradient)
    fell = progress.round_value - at.value > 8 * finfo.eps * absolute(at.value)
    halved = (gap < 0.5 * progress.best_gap) & (progress.best_gap > blur)
    advanced = fell | halved
    # no face is looked for where a step has brought the gap down to rounding, or where one of
    # Newton's, which squares the error, has made it a hundredth of what it was
    known = gap <= FLOOR * blur
    quick = select_mask(
        progress.exact | progress.refused, known, known | (gap <= QUICK * progress.best_gap)
    )
    progress.quick = select_mask(rows, quick, progress.quick)
    progress.paid = progress.paid & halved
    progress.unhalved = select(rows, select(halved, 0.0, progress.unhalved + 1), progress.unhalved)
    progress.stalled = select(rows, select(advanced, 0.0, progress.stalled + 1), progress.stalled)
    progress.note(rows, gap, blur)
    progress.round_value = select(rows, at.value, progress.round_value)
    # with a margin for the rounding of the final certificate, which has the last word
    close = progress.best_gap <= 0.9 * progress.settings.tol * maximum(
        absolute(at.value), finfo.tiny
    )
    # x may be on a wrong face all the same: one more search may bring the last digits, and
    # where steps of Newton's still square the error, so may more of them
    squares = progress.sharpening & (progress.closed < progress.newton_looks)
    enough = select_mask(squares, False, progress.closed >= progress.second_looks)
    if not progress.modelled:
        enough = enough | (progress.refused == 0)
    enough = progress.close & enough
    settled = progress.exact & (known | (progress.closed >= progress.second_looks))
    settled = settled | (progress.refused & known & (progress.stalled >= 1))
    ended = rows & close & (settled | enough)
    if any_row(select_mask(ended, False, rows)):
        ended = ended | _left_by_rounding(progress, rows, close, squares)
    progress.close = select_mask(rows, close, progress.close)
    progress.closed = select(rows, select(close, progress.closed + 1, 0.0), progress.closed)
    progress.status = select(ended, float(Status.ROUNDING_FLOOR), progress.status)


def _left_by_rounding(progress: Progress, rows: Mask, close: Mask, squares: Mask) -> Mask:
    """Which of these problems are done as rounding is all that is left of them.

    Those whose gap stays far above it get the status STALLED. ``close`` says whose gap is small
    enough, ``squares`` where another step of Newton's may square the error.
    """
    at = progress.at
    # neither f nor the gap has anything left to give in this dtype
    noise = progress.gap_noise()
    lost = progress.best_gap <= select(close, 8.0, select(progress.stalled >= 1, 2.0, 0.0)) * noise
    # the gap of a point on a curved face is lost at half of x's digits
    lost = lost & (
        progress.exact | select_mask(squares, False, progress.close) | (progress.stalled >= 1)
    )
    # an exact solve that has brought the gap far below its rounding is the last one, though
    # f may go on falling where it tends to zero
    far_below = progress.best_gap <= (0.01 if progress.second_looks else 2.0) * noise
    lost = lost | (progress.exact & far_below)
    patience = 12 if isinstance(progress.phase, Splitting) else 3
    over = (progress.stalled >= patience) & progress.tried
    if at.x.dtype == torch.float32:
        # f may fall by less than the rounding of its terms; double precision sees more
        over = over | (progress.tried & (progress.unhalved >= patience))
    # ⟨g, x⟩ may be far smaller than its terms, whose rounding it has all the same
    terms = progress.gap_blur(at.x.abs(), at.gradient.abs())
    floor = progress.best_gap <= maximum(FLOOR * noise, terms)
    # so close to rounding, f may fall by its own rounding for ever where it tends to zero
    weary = progress.tried & (progress.unhalved >= patience)
    # and so may the gap fall and rise, by factors, where rounding is all of it
    progress.floored = select(rows & floor, progress.floored + 1, progress.floored)
    weary = weary | (progress.tried & (progress.floored >= 4 * patience))
    ended = rows & (((over | weary) & floor) | lost)
    # nothing here can bring the gap to where rounding alone would leave it; the steps that
    # a float32 problem has left are worth more in double precision
    stuck = select_mask(floor, False, rows & over)
    if at.x.dtype != torch.float32:
        stuck = stuck & (progress.stalled >= 3 * patience)
    progress.status = select(stuck, float(Status.STALLED), progress.status)
    return ended
