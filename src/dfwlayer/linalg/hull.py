"""Minimising over the convex hull of points that an oracle gives one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.rows import dot, norm, where_rows
from dfwlayer.ops.scale import ROUNDING, Scale, scale_of_terms
from dfwlayer.solution import Status

if TYPE_CHECKING:
    from dfwlayer.objectives.base import Objective

__all__ = ["Descent", "Hull", "descend_over_hull", "span"]

NEWTON = 3  # models of an f that is not quadratic before the oracle is asked again
TRIALS = 40  # lengths that a line search may try; each is up to four times shorter than the last
FURTHEST = 2.0**20  # times the step to a model's minimum that a line search may go
PATIENCE = 2  # steps in a row that lower f by no more than rounding: nothing else is left
WANDER = 10  # steps in a row without a lower f or gap, likewise
ARMIJO = 0.1  # the part of the decrease that the slope promises which a step has to keep
FLAT = 0.5  # a step is long enough where this part of the slope is gone
PROBES = 4096  # most axes along which vertices are looked for where f is not finite
RIDGE = 1e-13  # relative curvature that is added in the space of weights
RANK = 1e-9  # a direction that is this much shorter than the longest one is rounding


@dataclass(frozen=True)
class Hull:
    """Points of a convex set with weights that say which combination of them is meant."""

    points: Tensor  # (..., m, n)
    weights: Tensor  # (..., m), double, ≥ 0 with sum 1

    @classmethod
    def of(cls, x: Tensor) -> Hull:  # (..., n)
        """One point."""
        return cls(x.unsqueeze(-2), torch.ones_like(x[..., :1], dtype=torch.float64))

    def mean(self) -> Tensor:  # (..., n)
        """Σ weight · point in double precision."""
        return self.sum_of(self.weights)

    def sum_of(self, coefficients: Tensor) -> Tensor:  # (..., m) -> (..., n)
        """Σ coefficient · point in double precision."""
        return (coefficients.unsqueeze(-2) @ self.points.double()).squeeze(-2)

    def combination(self) -> Tensor:  # (..., n)
        """The mean, rounded to the points' dtype."""
        return self.mean().to(self.points.dtype)

    def joined(self, point: Tensor) -> tuple[Hull, Tensor]:
        """With one more point (..., n), which has no weight yet, and where it is (..., m), 1 or 0.

        A point that was there before stays the only one of its kind.
        """
        points = torch.cat((self.points, point.unsqueeze(-2)), -2)
        first = (points == point.unsqueeze(-2)).all(-1).to(torch.uint8).argmax(-1, keepdim=True)
        weights = torch.nn.functional.pad(self.weights, (0, 1))
        return Hull(points, weights), torch.zeros_like(weights).scatter(-1, first, 1.0)

    def pruned(self) -> Hull:
        """Without points that no problem of the batch uses."""
        used = int((self.weights > 0).sum(-1).max())
        order = self.weights.argsort(-1, descending=True)[..., :used]
        index = order.unsqueeze(-1).expand(*order.shape, self.points.shape[-1])
        return Hull(self.points.gather(-2, index), self.weights.gather(-1, order))

    def in_use(self, eps: float) -> Tensor:  # (..., m)
        """Mask of the points without which x would be another one, to a relative rounding eps."""
        x = self.mean().unsqueeze(-2)
        share = self.weights * norm(self.points.double() - x)
        size = norm(x) + norm(self.points.double()).amax(-1, keepdim=True)
        # a point by itself is in use, though it is no way from x
        alone = self.weights >= self.weights.amax(-1, keepdim=True)
        return (self.weights > 0) & ((share > 16 * eps * size) | alone)


def span(points: Tensor, used: Tensor, eps: float) -> Tensor:  # (..., m, n), (..., m)
    """An orthonormal basis (..., n, r) of the differences of used points, zeros to fill it up.

    It is formed from the points themselves: a mean of theirs is rounded, and that rounding would
    be one more direction. The points are known to a relative ``eps``, and what is not longer
    than that is no direction either. Double precision.
    """
    points, size = points.double(), points.double().abs().amax((-2, -1))
    unit = torch.where(size > 0, size, 1)[..., None, None]
    first = used.to(torch.uint8).argmax(-1)[..., None, None]
    origin = points.gather(-2, first.expand(*first.shape[:-1], points.shape[-1]))
    offsets = torch.where(used.unsqueeze(-1), (points - origin) / unit, 0)
    _, sizes, rows = torch.linalg.svd(offsets, full_matrices=False)
    longest = sizes.amax(-1, keepdim=True)
    rank = sizes > (RANK * longest).clamp_min(64 * eps * points.shape[-2] ** 0.5)
    basis: Tensor = (rows * rank.unsqueeze(-1)).mT
    return basis


class Descent(NamedTuple):
    """Where `descend_over_hull` ended."""

    hull: Hull
    x: Tensor  # (..., n)
    gradient: Tensor  # (..., n), ∇f(x)
    scale: Scale  # at x, in double
    num_steps: Tensor  # (...), calls of the oracle
    status: Tensor  # (...)


class _State(NamedTuple):
    """A combination of points, and f there."""

    hull: Hull
    x: Tensor  # (..., n)
    value: Tensor  # (...)
    gradient: Tensor  # (..., n)

    def where(self, mask: Tensor, other: _State) -> _State:  # both with the same points
        """Itself where the mask (...) holds, the other one elsewhere."""
        weights = where_rows(mask, self.hull.weights, other.hull.weights)
        return _State(
            Hull(self.hull.points, weights),
            where_rows(mask, self.x, other.x),
            torch.where(mask, self.value, other.value),
            where_rows(mask, self.gradient, other.gradient),
        )


def descend_over_hull(
    objective: Objective,
    oracle: Callable[[Tensor], Tensor],  # ∇f(x) (..., n) -> the point of the set it favours most
    start: Tensor,  # (..., n), a point of the set
    tol: float,
    max_steps: int,
    *,
    settle: bool = False,
    stopped: Callable[[Tensor, Tensor, Tensor, Tensor], bool] | None = None,
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
    x, f, ∇f and the steps taken, at the start and after each, and may end it all.
    """
    going = torch.ones(start.shape[:-1], dtype=torch.bool, device=start.device)
    state, going = _usable(objective, oracle, start, going)
    status = torch.where(going, int(Status.MAX_STEPS), int(Status.OUT_OF_RANGE))
    steps, stalled = torch.zeros_like(status), torch.zeros_like(status)
    idle, after = torch.zeros_like(status), torch.zeros_like(status)
    lowest = torch.full_like(state.value, torch.inf, dtype=torch.float64)
    least = lowest.clone()
    scale, (bound, bent_down) = _scale(objective, state), _curvature(objective, state.x)
    finfo = torch.finfo(start.dtype)
    for _ in range(max_steps):
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
        better = (state.value < lowest) | (gap < 0.99 * least)
        lowest, least = torch.minimum(lowest, state.value.double()), torch.minimum(least, gap)
        idle = torch.where(better, 0, idle + 1)
        # noise may be far above what it is in truth: as long as f falls, there is something to gain
        floored = (lost & (stalled > 0)) | (stalled >= PATIENCE) | (idle >= WANDER)
        ended = going & ~concave & (close | floored)
        status = torch.where(concave, int(Status.NOT_CONVEX), status)
        status = torch.where(ended, int(Status.ROUNDING_FLOOR), status)
        going = going & ~concave & ~ended
        if not bool(going.any()):
            break
        steps = steps + going
        state, lowered = _step(objective, state._replace(hull=hull), toward, scale, going)
        state = state._replace(hull=state.hull.pruned())
        scale = _scale(objective, state)
        stalled = torch.where(lowered, 0, stalled + 1)
    status = torch.where(bent_down, int(Status.NOT_CONVEX), status)
    # x is a sum, in double precision, of points that may be larger than it
    sizes = Hull(state.hull.points.double().abs(), state.hull.weights).mean()
    blurred = scale.noisier(scale_of_terms(scale.curvature, sizes, torch.zeros_like(sizes)).noise)
    return Descent(state.hull, state.x, state.gradient, blurred, steps, status)


def _usable(
    objective: Objective, oracle: Callable[[Tensor], Tensor], start: Tensor, going: Tensor
) -> tuple[_State, Tensor]:
    """The start, or the mean of many vertices where f is not finite; and whether it is there.

    The logarithm of a coordinate is infinite on a part of the boundary, and so at most vertices.
    The mean of the vertices along all axes is inside, as far as the set has an inside.
    """
    value, gradient = objective.value_and_gradient(start)
    state = _State(Hull.of(start), start, value, gradient)
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
    return _State(Hull.of(x), x, value, where_rows(good, gradient, 0)), going & good


def _scale(objective: Objective, state: _State) -> Scale:
    """The objective's at x, in double precision; what is out of range counts as zero."""
    curvature, noise = (part.double() for part in objective.scale(state.x, state.gradient))
    return Scale(curvature, torch.where(torch.isfinite(noise), noise, 0))


def _unit(v: Tensor) -> tuple[Tensor, Tensor]:  # (..., n) -> (..., n), (...)
    """v / max|v|, so that no square leaves the dtype's range, and max|v|, or 1 for zero."""
    size = v.abs().amax(-1)
    size = torch.where(size > 0, size, 1)
    return v / size.unsqueeze(-1), size


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
    objective: Objective, state: _State, d: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:  # (...), (...)
    """⟨d, ∇²f d⟩ in units of what rounding may make of a zero, and the bound on ‖∇²f‖ so far."""
    n, eps = d.shape[-1], torch.finfo(state.x.dtype).eps
    unit, size = _unit(d)
    product = objective.hvp(state.x, unit.to(state.x.dtype)).double()
    length = norm(unit)
    bound = torch.maximum(bound, norm(product) / torch.where(length > 0, length, 1))
    rounding = bound * length**2
    if not objective.quadratic:  # its curvature may be a difference of what makes the slope
        rounding = rounding + norm(state.gradient.double()) * length / size
    rounding = 64 * eps * n**0.5 * rounding
    curvature = dot(unit, product)
    bend = curvature / torch.where(rounding > 0, rounding, 1)
    return torch.where(torch.isfinite(bend), bend, 0), bound


class _Model(NamedTuple):
    """f(x + p) − f(x) ≈ ⟨slope, p⟩ + ½⟨p, hessian p⟩ for steps p = Σ δ_i place_i.

    Places are coordinates of the points as seen from x: with sides of a set that differ by many
    orders of magnitude, products of ways to its points would hide the curvature along short ones.
    """

    places: Tensor  # (..., m, k), double
    hessian: Tensor  # (..., k, k), double
    slope: Tensor  # (..., k), double

    @classmethod
    def of(cls, objective: Objective, state: _State) -> _Model:
        """From products of ∇²f with a basis, that of all coordinates or of the points' span."""
        places = state.hull.points.double() - state.hull.mean().unsqueeze(-2)
        m, n = places.shape[-2:]
        slope, like = state.gradient.double(), state.x
        basis = torch.eye(n, dtype=torch.float64, device=like.device).expand(*like.shape[:-1], n, n)
        if m < n:
            basis = torch.linalg.svd(places, full_matrices=False).Vh
        products = objective.hvps(like, basis.movedim(-2, 0).to(like.dtype))
        hessian = basis @ products.movedim(0, -1).double()
        if m < n:
            places, slope = places @ basis.mT, (basis @ slope.unsqueeze(-1)).squeeze(-1)
        return cls(places, torch.nan_to_num(0.5 * (hessian + hessian.mT)), slope)

    def step(self, change: Tensor) -> Tensor:  # (..., m) -> (..., k)
        """p for changes of the weights."""
        return (change.unsqueeze(-2) @ self.places).squeeze(-2)

    def times(self, step: Tensor) -> Tensor:  # (..., k) -> (..., k)
        """∇²f p."""
        return (self.hessian @ step.unsqueeze(-1)).squeeze(-1)

    def lowered(self, change: Tensor) -> Tensor:  # (..., m) -> (...)
        """How much a change of the weights lowers the model."""
        step = self.step(change)
        return -dot(self.slope + 0.5 * self.times(step), step)


def _step(
    objective: Objective, state: _State, toward: Tensor, scale: Scale, going: Tensor
) -> tuple[_State, Tensor]:
    """One step with a vertex that is in the hull, and whether it lowered f beyond rounding."""
    before, open_ = state, going
    eps = torch.finfo(state.x.dtype).eps
    lowered = torch.zeros_like(going)
    for k in range(1 if objective.quadratic else NEWTON):
        model = _Model.of(objective, state)
        weights = state.hull.weights
        new = toward if k == 0 else torch.zeros_like(toward)
        target = _corrected(model, weights, new, open_, eps)
        short = torch.zeros_like(going)
        if k == 0:
            plain = toward - weights
            way = model.step(plain)
            slope, bend = dot(model.slope, way), dot(way, model.times(way))
            length = torch.where(bend > -slope, -slope / torch.where(bend > 0, bend, 1), 1)
            vertexwards = weights + length.clamp(0, 1).unsqueeze(-1) * plain
            promised = model.lowered(vertexwards - weights)
            short = open_ & ~(model.lowered(target - weights) >= 0.5 * promised)
            target = where_rows(short, vertexwards, target)
        found, kept, reached = _searched(objective, state, target, open_)
        poor = open_ & ~short & (reached < 0.25)
        if k == 0 and bool(poor.any()):
            other, too, _ = _searched(objective, state, toward, poor, length.clamp(0, 1))
            lower = too & (~kept | (other.value < found.value))
            found, kept = other.where(lower, found), kept | lower
        d = found.hull.mean() - state.hull.mean()
        down = -0.5 * dot(state.gradient.double() + found.gradient.double(), d)
        moved = (found.x != state.x).any(-1) & (down > 4 / ROUNDING * scale.blur(d).squeeze(-1))
        lowered = lowered | (open_ & kept & (moved | (found.value < before.value)))
        # a model that is good for a small part of its step only is not worth another one
        state, open_ = found, open_ & kept & moved & (reached >= 0.25)
        if not bool(open_.any()):
            break
    return state, lowered


def _corrected(model: _Model, weights: Tensor, toward: Tensor, going: Tensor, eps: float) -> Tensor:
    """Weights (..., m) that minimise the model, for the problems that go on."""
    if not bool(going.any()):
        return weights
    out = weights.clone()
    places, hessian, slope = (part[going] for part in model)
    weights, used = weights[going], (weights[going] > 0) | (toward[going] > 0)
    # a little more curvature makes up for products with ∇²f that are off by eps, or for an f that
    # is not convex
    eigenvalues = torch.linalg.eigvalsh(hessian)
    level = torch.where((top := eigenvalues.abs().amax(-1, keepdim=True)) > 0, top, 1)
    ridge = max(RIDGE, 8 * eps) * level + 2 * (-eigenvalues[..., :1]).clamp_min(0)
    hessian = hessian + torch.diag_embed(ridge.expand_as(slope))
    done = torch.zeros_like(used[..., :1])
    for _ in range(weights.shape[-1]):
        change = _affine_step(places, hessian, slope, used)
        falling = used & (change < 0)
        room = torch.where(falling, weights / torch.where(falling, -change, 1), torch.inf)
        limit = room.amin(-1, keepdim=True)
        length = torch.where(done, 0, limit.clamp(max=1))
        weights = (weights + length * change).clamp_min(0)
        step = length.unsqueeze(-1) * (change.unsqueeze(-2) @ places)
        slope = slope + (step @ hessian).squeeze(-2)
        dropped = (room <= limit) & (limit < 1) & ~done
        weights, used = torch.where(dropped, 0, weights), used & ~dropped
        done = done | (limit >= 1)
        if bool(done.all()):
            break
    out[going] = weights / weights.sum(-1, keepdim=True)
    return out


def _affine_step(places: Tensor, hessian: Tensor, slope: Tensor, used: Tensor) -> Tensor:
    """δ with sum 0 that leaves the unused at 0, of the least ⟨slope, p⟩ + ½⟨p, hessian p⟩.

    With C = USVᵀ the used places around their middle, p = Vz for δ = US⁻¹z. A direction that is
    rounding in C is none; where points are dependent, δ is the shortest of those with that p.
    """
    mask = used.to(places.dtype).unsqueeze(-1)
    middle = (mask * places).sum(-2, keepdim=True) / mask.sum(-2, keepdim=True).clamp_min(1)
    left, sizes, rows = torch.linalg.svd(mask * (places - middle), full_matrices=False)
    rounding = 16 * torch.finfo(sizes.dtype).eps * places.shape[-2] ** 0.5
    sure = sizes > rounding * sizes.amax(-1, keepdim=True)
    rows = rows * sure.unsqueeze(-1)
    inner = rows @ hessian @ rows.mT + torch.diag_embed((~sure).to(sizes.dtype))
    z = -torch.linalg.solve_ex(inner, rows @ slope.unsqueeze(-1)).result
    change = (mask * (left @ (z / torch.where(sure, sizes, 1).unsqueeze(-1)))).squeeze(-1)
    step = (change.unsqueeze(-2) @ places).squeeze(-2)
    sound = torch.isfinite(change).all(-1) & (dot(slope, step) < 0)
    return where_rows(sound, change, 0)


def _searched(
    objective: Objective,
    state: _State,
    target: Tensor,  # (..., m), weights
    going: Tensor,
    first: Tensor | None = None,  # (...), the part of the way that is tried first
) -> tuple[_State, Tensor, Tensor]:
    """A point on the way to the target with a lower f; whether there is one; the part of the way.

    With s the slope of f along the way, a step of length γ is taken if

        f(x + γd) ≤ f(x) + 0.1 γ s(0),  or  s(γ) ≤ 0,  or  s(γ) ≤ 0.8 |s(0)| and f does not rise.

    The second proves that a convex f did not rise; the third is the first one as slopes see it
    for a quadratic f, and slopes see changes that are lost in the rounding of f.
    """
    hull, old = state.hull, state.hull.weights
    change = target - old
    # of sum zero to the last digit, as a multiple of it may be taken
    change = change.scatter_add(-1, old.argmax(-1, keepdim=True), -change.sum(-1, keepdim=True))
    # from x, as what the points have in common would only add its rounding
    d = Hull(hull.points.double() - hull.mean().unsqueeze(-2), old).sum_of(change)
    slope = dot(state.gradient.double(), d)
    finfo = torch.finfo(state.x.dtype)
    value = state.value.double()
    slack = (
        4 * finfo.eps * (value.abs() + dot(state.gradient.double().abs(), state.x.double().abs()))
    )
    length = torch.ones_like(slope) if first is None else first
    # beyond the target, where the slope says so, up to where a weight is zero
    room = torch.where(change < 0, -old / torch.where(change < 0, change, 1), FURTHEST)
    most = room.amin(-1).clamp(1, FURTHEST)
    low, high = torch.zeros_like(slope), torch.full_like(slope, torch.inf)
    found, reached = state, torch.zeros_like(slope)
    searching = going & (slope < 0)
    for _ in range(TRIALS):
        weights = (old + length.unsqueeze(-1) * change).clamp_min(0)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = Hull(hull.points, where_rows(searching, weights, found.hull.weights))
        x = where_rows(searching, mixed.combination(), found.x)
        f, gradient = objective.value_and_gradient(x)
        after = dot(gradient.double(), d)
        flat = (after <= -(1 - 2 * ARMIJO) * slope) & (f.double() <= value + slack)
        lower = f.double() <= value + ARMIJO * length * slope
        sound = torch.isfinite(f) & torch.isfinite(gradient).all(-1)
        taken = searching & sound & (lower | (after <= 0) | flat)
        found = _State(mixed, x, f, gradient).where(taken, found)
        reached = torch.where(taken, length, reached)
        low, high = torch.where(taken, length, low), torch.where(taken, high, length)
        short = taken & (after < FLAT * slope) & (length < most) & (high > 2 * low)
        searching = searching & (short | (~taken & ~((low > 0) & (high <= 2 * low))))
        if not bool(searching.any()):
            break
        further = torch.minimum(4 * length, most)
        beyond = torch.where(torch.isfinite(high), 0.5 * (low + high), further)
        length = torch.where(low > 0, beyond, 0.25 * length)
    return found, reached > 0, reached
