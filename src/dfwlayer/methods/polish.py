"""How `ProjectedNewton` becomes exact on the face that an iterate is on."""

from __future__ import annotations

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.linalg.krylov import Krylov
from dfwlayer.methods.face_newton import newton_step
from dfwlayer.methods.progress import Progress
from dfwlayer.methods.recession import falls_for_ever, is_far_out
from dfwlayer.methods.vertex_step import follow
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    absolute,
    any_row,
    as_rows,
    axpy,
    fill,
    inner,
    maximum,
    minimum,
    number,
    number_mask,
    root,
    seen,
    select,
    select_mask,
)
from dfwlayer.ops.scale import ROUNDING
from dfwlayer.solution import Status

__all__ = ["polish"]

SHARP = 1e3  # times the rounding of x, below which an error of x is part of it


def polish(progress: Progress, rows: Mask, ask: int = 8) -> None:
    """Minimise the quadratic model on the face of x, and take the result if f falls."""
    at, objective, constraint = progress.at, progress.problem.objective, progress.problem.constraint
    eps = torch.finfo(at.x.dtype).eps
    origin = at.x
    system = FaceSystem(objective, constraint.face(origin, at.gradient), origin)

    def off_face(u: Tensor) -> Mask:
        """Whether x + u is so far off the face that the model has lost its meaning."""
        moved = origin + u
        away = constraint.project(moved, near=origin) - moved
        return inner(away, away) > 0.01 * inner(u, u)

    found = _directly(progress, system, rows) if progress.slow else None
    if found is None:
        # a model of f is not worth more than half of the digits
        model = progress.modelled = system.face.bends or not objective.quadratic
        # one product is kept for the gradient at the result; the next round refines it
        found = system.solve(
            system.tangent(-at.gradient),
            tol=0.03 * eps**0.5 if model else 0.0,
            max_steps=progress.most(),
            cap=select(rows, at.steps_left - 1, 0.0),
            stop=None if system.face.bends else progress.watched(off_face),
            ask=ask,
            floor=_floor(progress, system.face),
        )
        progress.slow = seen(found.unfinished & (at.steps_left > 1))
    at.steps_left = at.steps_left - found.steps
    # where no step was needed, ∇f on the face is rounding already
    progress.exact = progress.exact | (rows & (found.steps <= 0) & (at.steps_left > 1))
    rows = rows & (found.steps > 0)
    if not any_row(rows):
        return
    _observe(progress, found, rows, system.face)
    step = system.face.bent(found.u) if system.face.bends else found.u
    x = constraint.project(origin + step, near=origin)
    tensor, gradient = objective.value_and_gradient(x)
    value = number(tensor)
    at.steps_left = select(rows, at.steps_left - 1, at.steps_left)
    lower = value < at.value
    # both points are in the set to rounding, and f lower by ⟨∇f, x⟩ times that outside of it
    rounding = 4 * eps * absolute(at.value) + progress.gap_blur(x, gradient)
    unchanged = absolute(value - at.value) <= rounding
    taken = rows & select_mask(unchanged, progress.no_worse(rows & unchanged, x, gradient), lower)
    sharp = _sharp(progress, system.face, origin, found.u, x)
    idle = _idle(progress, select_mask(taken, False, rows & unchanged), found.u)
    progress.exact = select_mask(rows, select_mask(taken, sharp, idle), progress.exact)
    progress.refused = select_mask(rows, (taken | idle) == 0, progress.refused)
    if progress.modelled:
        blunt = select_mask(sharp, False, taken)
        progress.sharpening = select_mask(rows, blunt, progress.sharpening)
    if not objective.quadratic:
        # a Newton step that paid off is followed by another one; where f is flatter than a
        # quadratic at its minimum, each brings but a part of a digit
        progress.paid = select_mask(rows, taken, progress.paid)
    at.move(taken, x, value, gradient)
    if progress.problem.unbounded is not None:
        _ask(progress, rows & found.flat)
    if seen(rows & found.flat):
        follow(progress, rows & found.flat)


def _sharp(progress: Progress, face: Face, origin: Tensor, u: Tensor, x: Tensor) -> Mask:
    """Whether the step u has brought the origin to an x that is exact on its face."""
    eps = torch.finfo(x.dtype).eps
    length = inner(u, u)
    if not face.bends and progress.problem.objective.quadratic:
        # f is its own model, so x is exact unless the projection has changed it by more than
        # rounding, or the step itself is no more than that
        off = axpy(x - origin, -1.0, u)
        small = length <= (SHARP * eps) ** 2 * inner(x, x)
        return (inner(off, off) <= eps * length) | small
    # after a Newton step the relative error of x is of the order of its length squared
    sharp = length <= eps * inner(x, x)
    if face.bends:
        # a set that is curved near zero bends differently at another size of an entry
        change = u.abs()
        error = change * (change / x.abs()).nan_to_num(0.0).clamp_max(1.0)
        sharp = sharp & (inner(error, error) <= (SHARP * eps) ** 2 * inner(x, x))
    return sharp


def _ask(progress: Progress, rows: Mask) -> None:
    """End the problems whose f falls for ever, of these and of those that are far out.

    Once for each: what there is to know does not depend on where it is.
    """
    x = progress.at.x
    far = number_mask(is_far_out(progress.problem, x))
    rows = select_mask(progress.asked, False, (rows | far) & progress.going())
    if any_row(rows):
        progress.asked = progress.asked | rows
        mask = as_rows(rows, torch.bool).reshape(x.shape[:-1])
        endless = number_mask(falls_for_ever(progress.problem, x, mask))
        progress.status = select(rows & endless, float(Status.UNBOUNDED), progress.status)


def _directly(progress: Progress, system: FaceSystem, rows: Mask) -> Krylov | None:
    """The minimiser on the face by a factorisation, where there is one, in a step.

    That of a model is for problems that conjugate gradients have had their chance with.
    """
    u = system.direct(-progress.at.gradient)
    if u is None and (progress.bent or seen(rows & progress.late())):
        u = newton_step(progress.at, system)
    if u is None:
        return None
    zero = fill(0.0, progress.at.value)
    return Krylov(u, zero > 0, select(rows, 1.0, zero), zero, zero + torch.inf, zero > 0)


def _idle(progress: Progress, rows: Mask, u: Tensor) -> Mask:
    """Which of these steps were not worth taking: the model promised no more than rounding."""
    if not seen(rows):
        return rows
    at = progress.at
    promised = absolute(inner(at.gradient, u))
    noise = number(progress.problem.objective.scale(at.x, at.gradient).blur(u).squeeze(-1))
    return rows & (promised <= noise)


def _observe(progress: Progress, found: Krylov, rows: Mask, face: Face) -> None:
    """Take note of the curvature conjugate gradients met."""
    at = progress.at
    rounding = at.blur
    size = found.steepest
    met = at.steepest
    if any_row(found.flattest < 0):
        # where f is flat along the face, no step may have met the curvature that it has
        own = progress.problem.objective.scale(at.x, at.gradient).curvature.amax(-1)
        met = maximum(met, number(own.expand(at.x.shape[:-1])))
    bend = face.curvature_diagonal() if face.bends and len(face.normals) <= 1 else None
    # without a preconditioner curvature is f's own, of which some face may have none but the
    # rounding of the steepest
    plain = fill(0.0, size) == 0 if bend is None else number((bend == 0).all(-1)) != 0
    size = select(plain, maximum(size, met), size)
    if not face.bends or face.free is not None:
        # the curvature of matrices of one rank is not positive before the solution is reached
        at.bent_down = at.bent_down | (rows & (found.flattest < -rounding * size))
    if not face.bends:  # otherwise it is not f's alone
        some = rows & (found.flattest > rounding * found.steepest)
        at.steepest = select(some, maximum(at.steepest, found.steepest), at.steepest)
        at.flattest = select(some, minimum(at.flattest, found.flattest), at.flattest)


def _floor(progress: Progress, face: Face) -> Scalar:
    """The rounding of ∇f(x) along the face.

    Coordinates that are not free may have terms that are far larger than those of the free.
    """
    at = progress.at
    noise = progress.problem.objective.scale(at.x, at.gradient).noise.expand_as(at.x)
    noise = noise if face.free is None else noise * face.free
    # as much as nine coordinates make of it: with that x has the digits of float32 in
    # `dfw bench` up to n = 2000, and small problems take no steps for the sake of rounding
    share: float = min(1.0, 3 / at.x.shape[-1] ** 0.5)
    return share * root(inner(noise, noise)) / ROUNDING
