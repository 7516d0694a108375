"""Accelerated projected steps to find the face, conjugate gradients to be exact on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.face_system import FaceSystem
from dfwlayer.linalg import dot, norm, where_rows
from dfwlayer.methods.base import Outcome, Problem, Settings, gap_of
from dfwlayer.solution import Status

__all__ = ["ProjectedNewton"]


@dataclass(frozen=True)
class ProjectedNewton:
    """Exact to the rounding of the dtype, in a few dozen products with the Hessian.

    Rounds of two phases. First ``block`` accelerated projected gradient steps, which settle on
    the face of the solution within a few rounds where the problem is well conditioned. Then at
    most ``inner`` steps of conjugate gradients for the minimiser on the face the iterate is on;
    the result, projected, is taken if it lowers f. On the right face that is the solution, or,
    where the face or f bends, a Newton step towards it. A round ends with the Frank-Wolfe gap;
    the point with the least gap is returned.

    A step, for ``max_steps`` and ``num_steps``, is one gradient or one product with the Hessian.

    Args:
        block: Accelerated steps in a round; doubled, up to eightfold, for a problem whose second
            phase gained nothing.
        inner: Most steps of conjugate gradients in a round; doubled for a problem that used
            them all and gained by it.

    """

    block: int = 10
    inner: int = 50

    @property
    def modes(self) -> tuple[str, ...]:
        return ("implicit",)

    def run(self, problem: Problem, x: Tensor, settings: Settings) -> Outcome:
        """See the class."""
        if problem.objective.isotropic and settings.max_steps > 0:
            return _projection(problem, x)
        with torch.no_grad():
            solver = _Rounds(self, problem, x, settings)
            due = solver.judge(torch.ones_like(solver.bent_down))  # a start may be close already
            while True:
                for _ in range(2):
                    if bool(due.any()):
                        solver.polish(due)
                        due = solver.judge(due)
                if not bool(solver.active.any()):
                    break
                for _ in range(self.block):
                    solver.accelerate()
                due = solver.active & (solver.since >= solver.block)
            solver.judge(solver.status == Status.MAX_STEPS)
        status = torch.where(solver.bent_down, int(Status.NOT_CONVEX), solver.status)
        return Outcome(solver.best, solver.num_steps, status)


def _projection(problem: Problem, x: Tensor) -> Outcome:
    """With the identity for a Hessian the solution is the projection of −∇f(0), in one step."""
    with torch.no_grad():
        x = problem.constraint.project(-problem.objective.gradient(torch.zeros_like(x)))
    one = torch.ones(len(x), dtype=torch.long, device=x.device)
    # what the certificate does not confirm is rounding
    return Outcome(x, one, one * Status.ROUNDING_FLOOR)


class _Rounds:
    """The state of one solve; every tensor has one row per problem, and no row sees another."""

    def __init__(
        self, method: ProjectedNewton, problem: Problem, x: Tensor, settings: Settings
    ) -> None:
        self.method = method
        self.problem = problem
        self.settings = settings
        self.x = x
        self.value, self.gradient = problem.objective.value_and_gradient(x)
        self.lipschitz = self._first_lipschitz()
        self.previous, self.previous_gradient = x, self.gradient
        self.inertia = torch.ones_like(self.value)
        self.best = x
        self.best_gap = self._gap(x, self.gradient)
        zero = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.num_steps = zero
        self.since = zero  # accelerated steps since the last polish
        self.block = zero + method.block
        self.inner = zero + method.inner
        self.status = zero + Status.MAX_STEPS
        self.stalled = zero  # rounds without progress
        self.bent_down = zero > 0
        self.exact = zero > 0  # the last polish left nothing to gain but rounding
        self.close = zero > 0  # the gap was small enough before
        self.round_value = self.value

    @property
    def active(self) -> Tensor:
        """Mask (B,) of the problems that go on."""
        going: Tensor = self.num_steps < self.settings.max_steps
        return (self.status == Status.MAX_STEPS) & going

    def accelerate(self) -> None:
        """Nesterov's y ← x + β(x − x_prev), x ← proj(y − ∇f(y)/L), restarted when it climbs.

        L follows the curvature met: a step that met more than L is not taken, and L is raised.
        """
        objective, constraint, active = self.problem.objective, self.problem.constraint, self.active
        following = 0.5 * (1 + (1 + 4 * self.inertia**2).sqrt())
        beta = ((self.inertia - 1) / following).unsqueeze(-1)
        y = self.x + beta * (self.x - self.previous)
        if objective.quadratic:  # the gradient is affine, so no product is needed for y
            gradient = self.gradient + beta * (self.gradient - self.previous_gradient)
        else:
            gradient = objective.gradient(y)
        x = constraint.project(y - gradient / self.lipschitz.unsqueeze(-1))
        value, x_gradient = objective.value_and_gradient(x)
        d = x - y
        square, curvature = dot(d, d), dot(d, x_gradient - gradient)
        met = curvature / torch.where(square > 0, square, 1)
        size = self.value.abs() + dot(d.abs(), gradient.abs())
        rounding = 16 * torch.finfo(x.dtype).eps * size
        steep = (met > 1.01 * self.lipschitz) & (curvature > rounding)
        climbs = dot(y - x, x - self.x) > 0
        raised = torch.maximum(met, 1.5 * self.lipschitz)
        self.lipschitz = torch.where(active & steep, raised, self.lipschitz)
        self.bent_down = self.bent_down | (active & (curvature < -rounding))
        self.previous = where_rows(active, self.x, self.previous)
        self.previous_gradient = where_rows(active, self.gradient, self.previous_gradient)
        taken = active & ~steep & torch.isfinite(value)
        self._move(taken, x, value, x_gradient)
        inertia = torch.where(taken & ~climbs, following, 1)
        self.inertia = torch.where(active, inertia, self.inertia)
        self.since = self.since + active.long()
        self.num_steps = self.num_steps + active.long()

    def polish(self, rows: Tensor) -> None:
        """Minimise the quadratic model on the face of x, and take the result if f falls."""
        objective, constraint = self.problem.objective, self.problem.constraint
        eps = torch.finfo(self.x.dtype).eps
        rows = rows & self.active
        face = constraint.face(self.x, self.gradient)
        system = FaceSystem(objective, face, self.x)
        residual = where_rows(rows, -(self.gradient + face.force()), 0)
        origin = self.x

        def left(u: Tensor) -> Tensor:
            """Whether x + u is so far off the face that the model has lost its meaning."""
            moved = origin + u
            far: Tensor = norm(constraint.project(moved) - moved) > 0.1 * norm(u)
            return far

        # one product is kept for the gradient at the result; the next round refines what is left
        left_over = (self.settings.max_steps - self.num_steps - 1).clamp_min(0)
        cap = torch.minimum(left_over, self.inner)
        found = system.solve(residual, tol=0.03 * eps**0.5, max_steps=cap, stop=left)
        self.num_steps = self.num_steps + found.steps
        self.bent_down = self.bent_down | (rows & self._negative(found.u, found.flat))
        rows = rows & (found.steps > 0)
        x = constraint.project(origin + found.u)
        value, gradient = objective.value_and_gradient(x)
        self.num_steps = self.num_steps + rows.long()
        level = (value - self.value).abs() <= 4 * eps * self.value.abs()
        better = self._gap(x, gradient) < self._gap(self.x, self.gradient)
        taken = rows & torch.isfinite(value) & torch.where(level, better, value < self.value)
        # a Newton step squares a small relative error; without bends there is none to square
        step = norm(found.u) / norm(x).clamp_min(torch.finfo(x.dtype).tiny)
        on_face = norm(x - origin - found.u) <= eps**0.5 * norm(found.u)
        sharp = step <= eps**0.5
        if objective.quadratic:
            sharp = torch.where(system.bends, sharp, on_face)
        self.exact = torch.where(rows, (taken & sharp) | (level & ~taken), self.exact)
        self._move(taken, x, value, gradient)
        self.inertia = torch.where(taken, 1, self.inertia)  # the last step is no guide any more
        longer = (2 * self.block).clamp(max=8 * self.method.block)
        self.block = torch.where(rows & ~taken, longer, self.block)
        exhausted = taken & (found.steps == self.inner)
        self.inner = torch.where(exhausted, 2 * self.inner, self.inner)
        self.since = torch.where(rows, 0, self.since)
        self._follow(rows & found.flat)

    def judge(self, rows: Tensor) -> Tensor:
        """Measure the gap, keep the best point, and end the problems that are done.

        Returns the problems whose gap is small enough, but whose x may gain by one more polish.
        """
        finfo = torch.finfo(self.x.dtype)
        gap = self._gap(self.x, self.gradient)
        better = rows & (gap < self.best_gap)
        halved = gap < 0.5 * self.best_gap
        self.best = where_rows(better, self.x, self.best)
        self.best_gap = torch.where(better, gap, self.best_gap)
        fell = self.round_value - self.value > 8 * finfo.eps * self.value.abs()
        stalled = torch.where(halved | fell, 0, self.stalled + 1)
        self.stalled = torch.where(rows, stalled, self.stalled)
        self.round_value = torch.where(rows, self.value, self.round_value)
        # with a margin for the rounding of the final certificate, which has the last word
        close = self.best_gap <= 0.9 * self.settings.tol * self.value.abs().clamp_min(finfo.tiny)
        lost = self.best_gap <= self._noise()
        # neither f nor the gap has anything left to give in this dtype
        floored = (self.stalled >= 3) | (self.stalled >= 1) & lost
        ended = rows & (floored | close & (self.exact | self.close | lost))
        unsure = rows & close & ~ended
        self.close = torch.where(rows, close, self.close)
        self.status = torch.where(ended, int(Status.ROUNDING_FLOOR), self.status)
        return unsure & self.active

    def _follow(self, flat: Tensor) -> None:
        """A Frank-Wolfe step with exact line search, where f has no curvature on the face."""
        flat = flat & (self.num_steps + 2 <= self.settings.max_steps)
        if not bool(flat.any()):
            return
        objective = self.problem.objective
        d = self.problem.constraint.vertex(self.gradient) - self.x
        if self.problem.unbounded is not None:
            d = torch.where(self.problem.unbounded, 0, d)
        slope = -dot(self.gradient, d)
        curvature = dot(d, objective.hvp(self.x, d))
        bent = curvature > 0
        gamma = torch.where(bent, slope / torch.where(bent, curvature, 1), 1).clamp(0, 1)
        x = self.x + gamma.unsqueeze(-1) * d
        value, gradient = objective.value_and_gradient(x)
        self.num_steps = self.num_steps + 2 * flat.long()
        self._move(flat & (value < self.value), x, value, gradient)

    def _move(self, taken: Tensor, x: Tensor, value: Tensor, gradient: Tensor) -> None:
        self.x = where_rows(taken, x, self.x)
        self.value = torch.where(taken, value, self.value)
        self.gradient = where_rows(taken, gradient, self.gradient)

    def _gap(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The Frank-Wolfe gap; along unbounded coordinates a decrease of first order stands in."""
        gap = gap_of(self.problem.constraint, x, gradient, self.problem.unbounded)
        if self.problem.unbounded is not None:
            g = torch.where(self.problem.unbounded, gradient, 0)
            square = dot(g, g) / self.lipschitz
            gap = gap + dot(g.abs(), x.abs()) + square
        return gap

    def _noise(self) -> Tensor:
        """Rounding of the gap: ∇f(x) is off by about eps · (L‖x‖ + ‖g‖), times the way to go."""
        reach = norm(self.x - self.problem.constraint.vertex(self.gradient))
        size = self.lipschitz * norm(self.x) + norm(self.gradient)
        noise: Tensor = torch.finfo(self.x.dtype).eps * size * reach
        return noise

    def _negative(self, u: Tensor, flat: Tensor) -> Tensor:
        """Whether the flat direction that was met bends down for certain."""
        if not bool(flat.any()):
            return flat
        product = self.problem.objective.hvp(self.x, u)
        rounding = 64 * torch.finfo(u.dtype).eps * u.shape[-1] ** 0.5
        down: Tensor = dot(u, product) < -rounding * self.lipschitz * dot(u, u)
        return flat & down

    def _first_lipschitz(self) -> Tensor:
        """A few power iterations from the gradient; too low a value is raised on the way."""
        finfo = torch.finfo(self.x.dtype)
        v, size = self.gradient, torch.zeros_like(self.value)
        for _ in range(4):
            length = norm(v)
            v = v / torch.where(length > 0, length, 1).unsqueeze(-1)
            v = self.problem.objective.hvp(self.x, v)
            size = torch.maximum(size, norm(v))
        # without curvature a step of 1/L should still end near the set: L‖x‖ ~ ‖g‖/100
        reach = norm(self.x - self.problem.constraint.vertex(self.gradient))
        least = 0.01 * norm(self.gradient) / reach.clamp_min(finfo.tiny)
        return torch.maximum(1.2 * size, torch.minimum(least, torch.ones_like(least))).clamp_min(
            finfo.tiny
        )
