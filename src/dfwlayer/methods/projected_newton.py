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
    most ``inner`` steps of conjugate gradients for the minimiser on the face the iterate is on; the
    result, projected, is taken if it lowers f. On the right face that is the solution. A round
    ends with the Frank-Wolfe gap; the point with the least gap is returned.

    A step, for ``max_steps`` and ``num_steps``, is one gradient or one product with the Hessian.
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
            while solver.steps < settings.max_steps and bool(solver.active.any()):
                solver.accelerate(min(solver.block, settings.max_steps - solver.steps))
                solver.polish(min(self.inner, settings.max_steps - solver.steps))
                solver.judge()
        return Outcome(solver.best, solver.num_steps, solver.status)


def _projection(problem: Problem, x: Tensor) -> Outcome:
    """With the identity for a Hessian the solution is the projection of −∇f(0), in one step."""
    with torch.no_grad():
        x = problem.constraint.project(-problem.objective.gradient(torch.zeros_like(x)))
    one = torch.ones(len(x), dtype=torch.long, device=x.device)
    # what the certificate does not confirm is rounding
    return Outcome(x, one, one * Status.ROUNDING_FLOOR)


class _Rounds:
    """The state of one solve; every tensor has one row per problem."""

    def __init__(
        self, method: ProjectedNewton, problem: Problem, x: Tensor, settings: Settings
    ) -> None:
        self.method = method
        self.problem = problem
        self.settings = settings
        self.steps = 0
        self.block = method.block
        self.x = x
        self.value, self.gradient = problem.objective.value_and_gradient(x)
        self.lipschitz = self._first_lipschitz()
        self.previous, self.previous_gradient = x, self.gradient
        self.inertia = torch.ones_like(self.value)
        self.best = x
        self.best_gap = self._gap(x, self.gradient)
        zero = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.num_steps = zero
        self.status = zero + Status.MAX_STEPS
        self.active = zero == 0
        self.stalled = zero  # rounds without progress
        self.bent_down = zero > 0
        self.round_value = self.value
        self.judge()

    def accelerate(self, count: int) -> None:
        """Nesterov's steps y ← x + β(x − x_prev), x ← proj(y − ∇f(y)/L), restarted when they climb.

        L follows the curvature met: a step that met more than L is not taken, and L is raised.
        """
        objective, constraint = self.problem.objective, self.problem.constraint
        for _ in range(count):
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
            square = dot(d, d)
            curvature = dot(d, x_gradient - gradient)
            met = curvature / torch.where(square > 0, square, 1)
            # a fresh step without momentum must not climb beyond rounding
            rounding = (
                16 * torch.finfo(x.dtype).eps * (self.value.abs() + dot(d.abs(), gradient.abs()))
            )
            steep = (met > 1.01 * self.lipschitz) & (curvature > rounding)
            climbs = dot(y - x, x - self.x) > 0
            taken = self.active & ~steep & torch.isfinite(value)
            self.lipschitz = torch.where(
                self.active & steep, torch.maximum(met, 1.5 * self.lipschitz), self.lipschitz
            )
            self.bent_down = self.bent_down | (self.active & (curvature < -rounding))
            self.previous, self.previous_gradient = self.x, self.gradient
            self._move(taken, x, value, x_gradient)
            self.inertia = torch.where(taken & ~climbs, following, 1)
            self._count(1)

    def polish(self, count: int) -> None:
        """Minimise the quadratic model on the face of x, and take the result if f falls.

        Where no problem gains by that, the right face is far: the next block is longer.
        """
        if count == 0:
            return
        face = self.problem.constraint.face(self.x, self.gradient)
        system = FaceSystem(self.problem.objective, face, self.x)
        residual = where_rows(self.active, -(self.gradient + face.force()), 0)
        eps = torch.finfo(self.x.dtype).eps
        origin = self.x

        def left(u: Tensor) -> Tensor:
            """Whether x + u is so far off the face that the model has lost its meaning."""
            moved = origin + u
            return norm(self.problem.constraint.project(moved) - moved) > 0.1 * norm(u)

        # the next round refines what is left
        found = system.solve(residual, tol=0.03 * eps**0.5, max_steps=count, stop=left)
        self._count(found.steps)
        self.bent_down = self.bent_down | (self.active & self._negative(found.u, found.flat))
        x = self.problem.constraint.project(origin + found.u)
        value, gradient = self.problem.objective.value_and_gradient(x)
        self._count(1)
        flat = (value - self.value).abs() <= 4 * eps * self.value.abs()
        better = self._gap(x, gradient) < self._gap(self.x, self.gradient)
        taken = self.active & torch.isfinite(value) & torch.where(flat, better, value < self.value)
        self._move(taken, x, value, gradient)
        self.inertia = torch.where(taken, 1, self.inertia)  # the last step is no guide any more
        if not bool(taken.any()):
            self.block = min(2 * self.block, 8 * self.method.block)
        self._follow(self.active & found.flat)

    def judge(self) -> None:
        """Measure the gap, keep the best point, and end the problems that are done."""
        finfo = torch.finfo(self.x.dtype)
        gap = self._gap(self.x, self.gradient)
        better = self.active & (gap < self.best_gap)
        halved = gap < 0.5 * self.best_gap
        self.best = where_rows(better, self.x, self.best)
        self.best_gap = torch.where(better, gap, self.best_gap)
        fell = self.round_value - self.value > 8 * finfo.eps * self.value.abs()
        self.stalled = torch.where(halved | fell, 0, self.stalled + 1)
        self.round_value = self.value
        converged = self.best_gap <= self.settings.tol * self.value.abs().clamp_min(finfo.tiny)
        # neither f nor the gap has anything left to give in this dtype
        lost = self.best_gap <= self._noise()
        floored = ((self.stalled >= 3) | (self.stalled >= 1) & lost) & ~converged
        status = torch.where(floored, int(Status.ROUNDING_FLOOR), self.status)
        status = torch.where(converged, int(Status.CONVERGED), status)
        status = torch.where(self.bent_down, int(Status.NOT_CONVEX), status)
        self.status = torch.where(self.active, status, self.status)
        self.active = self.active & ~(converged | floored)

    def _follow(self, flat: Tensor) -> None:
        """A Frank-Wolfe step with exact line search, where f has no curvature on the face."""
        if self.steps + 2 > self.settings.max_steps or not bool(flat.any()):
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
        self._count(2)
        self._move(flat & (value < self.value), x, value, gradient)

    def _move(self, taken: Tensor, x: Tensor, value: Tensor, gradient: Tensor) -> None:
        self.x = where_rows(taken, x, self.x)
        self.value = torch.where(taken, value, self.value)
        self.gradient = where_rows(taken, gradient, self.gradient)

    def _count(self, steps: int) -> None:
        self.steps += steps
        self.num_steps = self.num_steps + steps * self.active

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
