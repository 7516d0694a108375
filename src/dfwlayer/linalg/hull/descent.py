"""Fully corrective Frank-Wolfe: the loop, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dfwlayer.linalg.hull.points import Hull, Mixture
from dfwlayer.linalg.hull.step import corrective_step
from dfwlayer.ops.rows import dot, in_units, norm, or_one, where_rows
from dfwlayer.ops.scale import ROUNDING, Scale, scale_of_terms
from dfwlayer.solution import Status

if TYPE_CHECKING:
    from dfwlayer.objectives.base import Objective

__all__ = ["Descent", "descend_over_hull"]

PATIENCE = 2  # steps in a row that lower f by no more than rounding: nothing else is left
WANDER = 10  # steps in a row without a lower f or gap, likewise
SHARE = 4  # a batch shrinks once no more than one in so many problems goes on
PROBES = 4096  # most axes along which vertices are looked for where f is not finite


Oracle: TypeAlias = Callable[[Tensor], Tensor]


class Descent(NamedTuple):
    """Where `descend_over_hull` ended."""

    hull: Hull
    x: Tensor  # (..., n)
    gradient: Tensor  # (..., n), ∇f(x)
    scale: Scale  # at x, in double
    num_steps: Tensor  # (...), calls of the oracle
    status: Tensor  # (...)


class _Course(NamedTuple):
    """What goes on from step to step, per problem."""

    state: Mixture
    scale: Scale
    going: Tensor  # (...)
    status: Tensor  # (...)
    steps: Tensor  # (...)
    stalled: Tensor  # (...), steps in a row that did not lower f
    idle: Tensor  # (...), steps in a row without a lower f or gap
    after: Tensor  # (...), steps since the gap was small enough
    lowest: Tensor  # (...), of f, when it last fell by more than chance may have it
    least: Tensor  # (...), of the gap
    bound: Tensor  # (...), what ‖∇²f‖ is known to reach
    bent_down: Tensor  # (...), f is known not to be convex

    @classmethod
    def of(cls, objective: Objective, oracle: Oracle, start: Tensor) -> _Course:
        """The start, or another one where f is not finite there."""
        going = torch.ones(start.shape[:-1], dtype=torch.bool, device=start.device)
        state, going = _usable(objective, oracle, start, going)
        status = torch.where(going, int(Status.MAX_STEPS), int(Status.OUT_OF_RANGE))
        none, far = torch.zeros_like(status), torch.full_like(state.value, torch.inf).double()
        known = _curvature(objective, state.x)
        scale = _scale(objective, state)
        return cls(state, scale, going, status, none, none, none, none, far, far, *known)

    def rows(self, index: Tensor) -> _Course:
        """The problems at these positions."""
        hull, *at = self.state
        hull = Hull(hull.points[index], hull.weights[index]).pruned()
        scale = Scale(*(part.expand_as(self.state.x)[index] for part in self.scale))
        state = Mixture(hull, *(part[index] for part in at))
        return _Course(state, scale, *(part[index] for part in self[2:]))

    def merged(self, index: Tensor, other: _Course) -> _Course:
        """With the problems at these positions as they are in another one."""
        most = max(c.state.hull.weights.shape[-1] for c in (self, other))
        mine, theirs = (c.state.hull.padded(most) for c in (self, other))
        hull = Hull(
            mine.points.index_copy(0, index, theirs.points),
            mine.weights.index_copy(0, index, theirs.weights),
        )
        pairs = zip(self.state[1:], other.state[1:], strict=True)
        state = Mixture(hull, *(old.index_copy(0, index, new) for old, new in pairs))
        like = self.state.x
        pairs = zip(self.scale, other.scale, strict=True)
        scale = Scale(
            *(
                old.expand_as(like).index_copy(0, index, new.expand_as(other.state.x))
                for old, new in pairs
            )
        )
        pairs = zip(self[2:], other[2:], strict=True)
        return _Course(state, scale, *(old.index_copy(0, index, new) for old, new in pairs))


def descend_over_hull(
    objective: Objective,
    oracle: Oracle,  # ∇f(x) (..., n) -> the point of the set it favours most
    start: Tensor,  # (..., n), a point of the set
    tol: float,
    max_steps: int,
    *,
    settle: bool = False,
    stopped: Callable[[Tensor, Tensor, Tensor, Tensor], bool] | None = None,
    apart: Callable[[Tensor], tuple[Objective, Oracle] | None] | None = None,
) -> Descent:
    """Fully corrective Frank-Wolfe: ask for a vertex, then minimise over all that are in use.

    The second part is that of Wolfe (1976): the minimiser over the affine hull of the points in
    use; where that has a negative weight, go until the first weight is zero, drop its point, and
    look again. For a quadratic f over a polytope finitely many steps reach the exact solution.
    Other f have a quadratic model for each such step, and a line search. Where the model does not
    keep what it promises, the step goes to the vertex if that lowers f more, so that every step
    lowers f at least as much as one of Frank-Wolfe with a line search.

    With ``settle`` a problem whose gap is small enough goes on, for a while, until the oracle has
    nothing new to say: the points in use are then those of the solution's face. ``stopped`` is told
    x, f, ∇f and the steps taken, at the start and after each, and may end it all. ``apart`` gives
    objective and oracle of the problems at some positions, for the time when few are left.
    """
    course = _Course.of(objective, oracle, start)
    course = _go_on(objective, oracle, course, tol, max_steps, settle, stopped, apart)
    state, scale = course.state, course.scale
    status = torch.where(course.bent_down, int(Status.NOT_CONVEX), course.status)
    # x is a sum, in double precision, of points that may be larger than it
    sizes = Hull(state.hull.points.double().abs(), state.hull.weights).mean()
    blurred = scale.noisier(scale_of_terms(scale.curvature, sizes, torch.zeros_like(sizes)).noise)
    return Descent(state.hull, state.x, state.gradient, blurred, course.steps, status)


def _go_on(
    objective: Objective,
    oracle: Oracle,
    course: _Course,
    tol: float,
    left: int,
    settle: bool,
    stopped: Callable[[Tensor, Tensor, Tensor, Tensor], bool] | None,
    apart: Callable[[Tensor], tuple[Objective, Oracle] | None] | None,
) -> _Course:
    """At most so many steps; once few problems are left, without the others."""
    state, scale, going, status, steps, stalled, idle, after, lowest, least, bound, bent = course
    finfo = torch.finfo(state.x.dtype)
    while left > 0:
        if stopped is not None and stopped(state.x, state.value, state.gradient, steps):
            status = torch.where(going, int(Status.STOPPED), status)
            break
        vertex = oracle(state.gradient)
        d = vertex.double() - state.hull.mean()
        gap = -dot(state.gradient.double(), d)
        bend, bound = _bend(objective, state, d, bound)
        concave = going & (bend < -1)
        hull, toward = state.hull.joined(vertex)
        # with a margin for the rounding of the final certificate, which has the last word
        enough = tol * state.value.double().abs().clamp_min(finfo.tiny)
        close = gap <= 0.9 * enough
        noise = scale.blur(d).squeeze(-1) / ROUNDING
        lost = gap <= noise
        if settle:
            known = (hull.weights * toward).sum(-1) > 0
            settled = known & (gap <= (16 * noise if objective.quadratic else 1e-4 * enough))
            after = after + (close & going)
            close = close & (settled | (stalled > 0) | (after > 10 + steps // 2))
        value = state.value.double()
        fall = lowest - value
        fell = (fall > _grain(state, scale)) | (fall > 0.01 * lowest.abs())
        better = fell | (gap < 0.99 * least)
        lowest, least = torch.where(fell, value, lowest), torch.minimum(least, gap)
        idle = torch.where(better, 0, idle + 1)
        # noise may be far above what it is in truth: as long as f falls, there is something to gain
        floored = (lost & (stalled > 0)) | (stalled >= PATIENCE) | (idle >= WANDER)
        ended = going & ~concave & (close | floored)
        status = torch.where(concave, int(Status.NOT_CONVEX), status)
        status = torch.where(ended, int(Status.ROUNDING_FLOOR), status)
        going = going & ~concave & ~ended
        if not bool(going.any()):
            break
        steps, left = steps + going, left - 1
        state, lowered = corrective_step(objective, state._replace(hull=hull), toward, scale, going)
        state = state._replace(hull=state.hull.pruned())
        scale = _scale(objective, state)
        stalled = torch.where(lowered, 0, stalled + 1)
        if going.dim() == 1 and len(going) >= SHARE and int(going.sum()) <= len(going) // SHARE:
            index = going.nonzero().squeeze(-1)
            part = None if apart is None or stopped is not None else apart(index)
            if part is not None:
                here = _Course(
                    state, scale, going, status, steps,
                    stalled, idle, after, lowest, least, bound, bent,
                )  # fmt: skip
                few = here.rows(index)
                return here.merged(index, _go_on(*part, few, tol, left, settle, None, None))
    return _Course(
        state, scale, going, status, steps, stalled, idle, after, lowest, least, bound, bent
    )


def _usable(
    objective: Objective, oracle: Oracle, start: Tensor, going: Tensor
) -> tuple[Mixture, Tensor]:
    """The start, or the mean of many vertices where f is not finite; and whether it is there.

    The logarithm of a coordinate is infinite on a part of the boundary, and so at most vertices.
    The mean of the vertices along all axes is inside, as far as the set has an inside.
    """
    value, gradient = objective.value_and_gradient(start)
    state = Mixture(Hull.of(start), start, value, gradient)
    good = torch.isfinite(value) & torch.isfinite(gradient).all(-1)
    if bool(good.all()):
        return state, going
    mean, count = torch.zeros_like(start, dtype=torch.float64), 2 * min(start.shape[-1], PROBES)
    for axis in torch.eye(count // 2, start.shape[-1], dtype=start.dtype, device=start.device):
        for sign in (1, -1):
            mean = mean + oracle(sign * axis.expand_as(start)).double() / count
    x = where_rows(good, start, mean.to(start.dtype))
    value, gradient = objective.value_and_gradient(x)
    good = torch.isfinite(value) & torch.isfinite(gradient).all(-1)
    # nothing can be said about what is not finite, but it must not disturb others
    return Mixture(Hull.of(x), x, value, where_rows(good, gradient, 0)), going & good


def _scale(objective: Objective, state: Mixture) -> Scale:
    """The objective's at x, in double precision; what is out of range counts as zero."""
    curvature, noise = (part.double() for part in objective.scale(state.x, state.gradient))
    return Scale(curvature, torch.where(torch.isfinite(noise), noise, 0))


def _grain(state: Mixture, scale: Scale) -> Tensor:  # (...)
    """How f may fall by chance: as x is rounded, to its dtype, and as a sum of its points.

    These may be far larger than x is. Near a minimum that is half the curvature times a square.
    """
    rounding = torch.finfo(state.x.dtype).eps * state.x.double().abs()
    points = Hull(state.hull.points.double().abs(), state.hull.weights).mean()
    rounding = torch.maximum(rounding, torch.finfo(torch.float64).eps * points)
    return 0.5 * (scale.curvature * rounding**2).sum(-1)


def _curvature(objective: Objective, x: Tensor) -> tuple[Tensor, Tensor]:  # (...), (...)
    """What ‖∇²f‖ is known to reach, in double, and whether f is known not to be convex."""
    known = objective.curvature() if objective.quadratic else None
    if known is None:
        none = torch.zeros_like(x[..., 0], dtype=torch.float64)
        return none, none > 0
    low, high = (b.detach().double().expand(x.shape[:-1]) for b in known)
    # a singular ∇²f has eigenvalues this far below zero by rounding
    rounding = 16 * x.shape[-1] ** 0.5 * torch.finfo(x.dtype).eps
    return high, low < -rounding * high


def _bend(
    objective: Objective, state: Mixture, d: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:  # (...), (...)
    """⟨d, ∇²f d⟩ in units of what rounding may make of a zero, and the bound on ‖∇²f‖ so far."""
    n, eps = d.shape[-1], torch.finfo(state.x.dtype).eps
    unit, size = in_units(d)
    product = objective.hvp(state.x, unit.to(state.x.dtype)).double()
    length = norm(unit)
    bound = torch.maximum(bound, norm(product) / or_one(length))
    rounding = bound * length**2
    if not objective.quadratic:  # its curvature may be a difference of what makes the slope
        rounding = rounding + norm(state.gradient.double()) * length / size
    rounding = 64 * eps * n**0.5 * rounding
    curvature = dot(unit, product)
    bend = curvature / or_one(rounding)
    return torch.where(torch.isfinite(bend), bend, 0), bound
