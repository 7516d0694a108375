"""First-order phases that bring an iterate close to the face of the solution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.methods.base import Problem, gap_of, priced
from dfwlayer.objectives.factors import Factor
from dfwlayer.objectives.model import LARGEST
from dfwlayer.ops import fused
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    absolute,
    any_row,
    axpy,
    descend,
    fill,
    inner,
    keep,
    maximum,
    minimum,
    number,
    ratio,
    root,
    seen,
    select,
)
from dfwlayer.ops.scale import ROUNDING

__all__ = ["Accelerated", "Iterate", "Spectral", "Splitting", "least_along", "rows_of"]

BISECTIONS = 60  # of a step that does not lower f enough, or goes beyond where it is least
ARMIJO = 1e-4  # of the decrease that the slope promises
NEXT_TO_NONE = 0.1  # of the slope at the start of a step, at its end


@dataclass
class Iterate:
    """Where a solve is; every number and mask is one per problem, and no row sees another."""

    problem: Problem
    x: Tensor  # (B, n)
    value: Scalar  # f(x)
    gradient: Tensor  # (B, n)
    steepest: Scalar  # largest curvature met, from below an estimate of L
    flattest: Scalar  # least curvature met
    bent_down: Mask  # negative curvature was met
    steps_left: Scalar  # steps that may still be taken
    resolution: float  # rounding of the data

    @property
    def blur(self) -> float:
        """Rounding of a curvature, relative to the steepest one."""
        count: int = self.x.shape[-1]
        return 64 * max(self.resolution, torch.finfo(self.x.dtype).eps) * math.sqrt(count)

    def observe(self, curvature: Scalar, square: Scalar, rounding: Scalar) -> None:
        """Take note of ⟨d, ∇²f d⟩ along a step with ‖d‖² = square."""
        # where the data are rounded more than the dtype, flat directions may seem to bend down
        rounding = rounding + self.blur * self.steepest * square
        self.bent_down = self.bent_down | (curvature < -rounding)
        met = ratio(curvature, square, 0.0)
        sure = curvature > rounding
        self.steepest = select(sure, maximum(self.steepest, met), self.steepest)
        self.flattest = select(sure, minimum(self.flattest, met), self.flattest)

    def move(self, rows: Mask, x: Tensor, value: Scalar, gradient: Tensor) -> None:
        """Take a new point for some problems."""
        self.x, self.gradient = keep(rows, x, self.x), keep(rows, gradient, self.gradient)
        self.value = select(rows, value, self.value)

    def gap(self, x: Tensor, gradient: Tensor) -> Scalar:
        """The Frank-Wolfe gap; along open-ended coordinates a decrease of first order stands in."""
        constraint, gradient = priced(self.problem, x, gradient)
        endless = constraint.open_ended(gradient)
        gap = number(gap_of(constraint, x, gradient))
        if endless is not None:
            g = torch.where(endless, gradient, 0)
            gap = gap + inner(g.abs(), x.abs()) + ratio(inner(g, g), self.steepest, 0.0)
        return gap

    def rounding(self) -> Scalar:
        """Rounding of ⟨d, ∇f(x + d) − ∇f(x)⟩ for a d of length one."""
        # at a minimum inside the set the gradient is small, but not the terms it is the sum of
        scale = self.problem.objective.scale(self.x, self.gradient)
        noise = scale.noise.expand_as(self.x)
        size = root(inner(noise, noise)) / ROUNDING
        if not self.problem.objective.quadratic:
            # here f may be flat, and a step away as steep as it was met before
            eps = torch.finfo(self.x.dtype).eps
            size = size + eps * self.steepest * root(inner(self.x, self.x))
        return 16 * math.sqrt(self.x.shape[-1]) * size

    def spend(self, steps: int, rows: Mask) -> Mask | None:
        """Count steps; mask of the problems that may not take them all, None if all may."""
        short = rows & (self.steps_left < steps)
        self.steps_left = select(rows, maximum(self.steps_left - steps, 0.0), self.steps_left)
        # a recording is made only where there are steps to spare
        return short if seen(short) else None


def rows_of(state: Any, index: Tensor) -> Any:
    """Part of a state: the rows at these positions of all tensors in it."""
    if isinstance(state, Tensor):
        return state[index]
    if isinstance(state, Iterate | Spectral | Accelerated | Splitting):
        return replace(state, **{k: rows_of(v, index) for k, v in vars(state).items()})
    if isinstance(state, Factor | WideFactor):
        return state.rows(index)
    if type(state) is tuple:
        return tuple(rows_of(part, index) for part in state)
    return state


def least_along(
    at: Iterate, rows: Mask, d: Tensor, slope: Scalar
) -> tuple[Mask, Tensor, Scalar, Tensor]:
    """Where x + γd is lower, with γ = 1 or the minimiser on the way, that point, f and ∇f there.

    A slope may change within a small part of the way, as that of a Huber function does which is
    nearly a sum of |r_i|. A model sees such a bend from inside of it alone. So γ is found by
    bisection, as one where the slope is next to nothing.
    """
    objective, eps = at.problem.objective, torch.finfo(at.x.dtype).eps
    rounding_of_f = 4 * eps * absolute(at.value)
    low, high = fill(0.0, at.value), fill(1.0, at.value)
    length, waiting = high, rows
    x, value, gradient = at.x, at.value, at.gradient
    for _ in range(BISECTIONS):
        if not any_row(waiting):
            break
        trial = axpy(at.x, length, d)
        tensor, there = objective.value_and_gradient(trial)
        rise = inner(there, d)
        # f(x + γd) ≤ f(x) + c γ⟨∇f(x), d⟩, to rounding, and not far beyond the minimiser
        lower = number(tensor) <= at.value + maximum(ARMIJO * length * slope, -rounding_of_f)
        lower = lower & (rise <= NEXT_TO_NONE * absolute(slope))
        taken = waiting & lower
        x, gradient = keep(taken, trial, x), keep(taken, there, gradient)
        value = select(taken, number(tensor), value)
        low, high = select(taken, length, low), select(lower, high, length)
        done = lower & ((length >= 1) | (rise >= NEXT_TO_NONE * slope))
        length = 0.5 * (low + high)
        waiting = waiting & (done == 0) & (length > low) & (length < high)
    return rows & (low > 0), x, value, gradient


@dataclass
class Spectral:
    """Projected gradient steps x ← proj(x − ∇f(x)/α), α the curvature along the last step.

    The steps of Barzilai and Borwein: they need no Lipschitz constant, and a handful finds the
    face of a well-conditioned problem. f may rise on the way; a block that ends higher than it
    began is undone, and α starts from the steepest curvature again.
    """

    alpha: Scalar

    def advance(self, at: Iterate, steps: int, rows: Mask) -> None:
        """Take so many steps, as far as each problem may."""
        objective, constraint = at.problem.objective, at.problem.constraint
        x, gradient, rounding, steps_left = at.x, at.gradient, at.rounding(), at.steps_left
        short = at.spend(steps, rows)
        value: Scalar = at.value
        self.alpha, at.steepest, at.flattest, at.bent_down = fused.own(
            x, self.alpha, at.steepest, at.flattest, at.bent_down
        )
        for step in range(steps):
            trial, inside = self._step(constraint, x, gradient)
            # inside the set there is no face to look for
            last = step == steps - 1 or inside
            if not last:
                slope = objective.gradient(trial)
            else:
                tensor, slope = objective.value_and_gradient(trial)
                value = number(tensor)
            if short is not None:
                trial, slope = (
                    keep(steps_left > step, trial, x),
                    keep(steps_left > step, slope, gradient),
                )
            self._observe(at, x, gradient, trial, slope, rounding)
            x, gradient = trial, slope
            if last:
                if step < steps - 1:
                    at.steps_left = minimum(at.steps_left + (steps - 1 - step), steps_left)
                break
        if short is not None:
            value = number(objective.value(x))
        # close to the solution f changes by rounding alone, while the gap still falls
        rounding_of_f = torch.finfo(x.dtype).eps * max(4.0, x.shape[-1] ** 0.5)
        fell = value <= at.value + rounding_of_f * absolute(at.value)
        self.alpha = select(fell, self.alpha, 2 * maximum(at.steepest, self.alpha))
        at.move(rows & fell, x, value, gradient)

    def _step(self, constraint: Constraint, x: Tensor, gradient: Tensor) -> tuple[Tensor, bool]:
        """Where a step leads, and whether it is known to need no projection."""
        by_kernel = constraint.step(x, gradient, self.alpha)
        if by_kernel is not None:
            return by_kernel, False
        free = descend(x, gradient, self.alpha)
        trial = constraint.project(free, near=x)
        return trial, trial is free

    def _observe(
        self,
        at: Iterate,
        x: Tensor,
        gradient: Tensor,
        trial: Tensor,
        slope: Tensor,
        rounding: Scalar,
    ) -> None:
        """Take note of the curvature along a step and choose the next α."""
        blur = at.blur
        numbers = (self.alpha, at.steepest, at.flattest, at.bent_down, rounding)
        if fused.observe(x, gradient, trial, slope, *numbers, blur):
            return
        d = trial - x
        square, curvature = inner(d, d), inner(d, slope - gradient)
        at.observe(curvature, square, rounding * root(square))
        # along a flat direction the next step may be longer
        met = maximum(ratio(curvature, square, 0.0), 0.1 * self.alpha)
        self.alpha = select(square > 0, met, self.alpha)


@dataclass
class Accelerated:
    """Nesterov's y ← x + β(x − x_prev), x ← proj(y − ∇f(y)/L), restarted when it climbs.

    L follows the curvature met: a step that met more than L is not taken, and L is raised.
    """

    lipschitz: Scalar

    def advance(self, at: Iterate, steps: int, rows: Mask) -> None:
        """Take so many steps, as far as each problem may, starting at rest."""
        objective, constraint = at.problem.objective, at.problem.constraint
        x, gradient, rounding, steps_left = at.x, at.gradient, at.rounding(), at.steps_left
        previous, previous_gradient = x, gradient
        short = at.spend(steps, rows)
        inertia = fill(1.0, at.value)
        self.lipschitz = maximum(self.lipschitz, at.steepest)
        for step in range(steps):
            following = 0.5 * (1 + root(1 + 4 * inertia * inertia))
            beta = (inertia - 1) / following
            y = axpy(x, beta, x - previous)
            if objective.quadratic:  # the gradient is affine, so no product is needed for y
                slope = axpy(gradient, beta, gradient - previous_gradient)
            else:
                slope = objective.gradient(y)
            trial = constraint.project(descend(y, slope, self.lipschitz), near=x)
            trial_slope = objective.gradient(trial)
            d = trial - y
            square, curvature = inner(d, d), inner(d, trial_slope - slope)
            error = rounding * root(square)
            at.observe(curvature, square, error)
            taken = curvature <= maximum(1.01 * self.lipschitz * square, error)
            onward = inner(d, trial - x) >= 0
            if short is not None:
                taken = taken & (steps_left > step)
            raised = maximum(ratio(curvature, square, 0.0), 1.5 * self.lipschitz)
            self.lipschitz = select(taken, self.lipschitz, raised)
            previous, previous_gradient = x, gradient
            x, gradient = keep(taken, trial, x), keep(taken, trial_slope, gradient)
            inertia = select(taken & onward, following, 1.0)
        tensor, gradient = objective.value_and_gradient(x)
        value = number(tensor)
        at.move(rows & (absolute(value) < torch.inf), x, value, gradient)


@dataclass(frozen=True)
class WideFactor:
    """A factor in double precision, for vectors of any."""

    factor: Factor

    def __call__(self, v: Tensor) -> Tensor:
        return self.factor(v.double()).to(v.dtype)

    def rows(self, index: Tensor) -> WideFactor:
        """The same for the problems at these positions."""
        return WideFactor(self.factor.rows(index))


def factorised(at: Iterate, rho: Scalar) -> WideFactor | None:
    """(∇²f + ρ)⁻¹ from a Hessian written down in double precision; None where it is too large."""
    x, n = at.x, at.x.shape[-1]
    model = at.problem.objective.model(x) if x.numel() * n <= LARGEST else None
    if model is None:
        return None
    shift = torch.as_tensor(rho, dtype=torch.double, device=x.device).reshape(-1, 1)
    matrix = model.dense().matrix.expand(x.shape[:-1].numel(), n, n).clone()
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift)
    lower, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        return None
    return WideFactor(Factor(lower if x.dim() == 2 else lower[0]))


@dataclass
class Splitting:
    """Alternating directions (ADMM): minimise f(x) + ρ/2 ‖x − z + u‖², project, add up.

    One factorisation of ∇²f + ρ serves many steps and takes the conditioning of f away, so that
    a few dozen steps find a face that gradient steps need hundreds for. ρ starts at a tenth of the
    geometric mean of the least and the largest curvature met and follows the balance of the two
    residuals.
    """

    penalty: Scalar
    solve: Callable[[Tensor], Tensor]  # (∇²f + ρ)⁻¹, (B, n) -> (B, n)
    linear: Tensor  # (B, n), ∇f(0)
    z: Tensor
    dual: Tensor  # u
    formed: bool = False  # ∇²f was written down for it
    changes: int = 0

    @staticmethod
    def start(at: Iterate, form: bool = False) -> Splitting | None:
        """From where the solve is; None where ∇²f cannot be factorised.

        One that the objective does not have as a matrix is written down if ``form`` says so.
        """
        objective = at.problem.objective
        if not objective.quadratic:
            return None
        # the mean of both without a constraint; with one, less: on spectra of several kinds a tenth
        # took the fewest steps and changes
        penalty = 0.1 * root(maximum(at.flattest, 1e-6 * at.steepest) * at.steepest)
        found = objective.shifted(penalty)
        formed = found is None and form
        if formed and (factor := factorised(at, penalty)) is not None:
            found = factor, penalty
        if found is None:
            return None
        solve, penalty = found
        dual = descend(torch.zeros_like(at.x), at.gradient, penalty)
        linear = objective.gradient(torch.zeros_like(at.x))
        return Splitting(penalty, solve, linear, at.x, dual, formed)

    def restart(self, at: Iterate, rows: Mask) -> None:
        """Go on from where another phase has brought these problems."""
        self.z = keep(rows, at.x, self.z)
        dual = descend(torch.zeros_like(at.x), at.gradient, self.penalty)
        self.dual = keep(rows, dual, self.dual)

    def advance(self, at: Iterate, steps: int, rows: Mask) -> None:
        """Take so many steps, as far as each problem may; the iterate becomes z."""
        constraint, steps_left = at.problem.constraint, at.steps_left
        short = at.spend(steps, rows)
        x = last = self.z
        for step in range(steps):
            x = self.solve(axpy(-self.linear, self.penalty, self.z - self.dual))
            mixed = torch.lerp(self.z, x, 1.6)  # over-relaxation saves a third of the steps
            z = constraint.project(mixed + self.dual, near=self.z)
            dual = self.dual + (mixed - z)
            last = self.z
            if short is not None:
                z, dual = (
                    keep(steps_left > step, z, self.z),
                    keep(steps_left > step, dual, self.dual),
                )
            self.z, self.dual = z, dual
        tensor, gradient = at.problem.objective.value_and_gradient(self.z)
        at.move(rows & (number(tensor) < torch.inf), self.z, number(tensor), gradient)
        self._balance(at, x, last)

    def _balance(self, at: Iterate, x: Tensor, last: Tensor) -> None:
        """Change ρ where one residual is far larger than the other, both relative to their size."""
        if self.changes >= 6:
            return
        gap, move = x - self.z, self.z - last
        primal = ratio(inner(gap, gap), maximum(inner(x, x), inner(self.z, self.z)), 0.0)
        force = self.penalty * self.penalty
        scale = maximum(force * inner(self.dual, self.dual), inner(self.linear, self.linear))
        dual = ratio(force * inner(move, move), scale, 0.0)
        factor = root(root(ratio(primal, dual, 1.0)))
        factor = minimum(maximum(factor, 0.1), 10.0)
        factor = select((factor > 2) | (factor < 0.5), factor, 1.0)
        if not any_row(absolute(factor - 1) > 0):
            return
        penalty = self.penalty * factor
        found = at.problem.objective.shifted(penalty)
        if self.formed and (formed := factorised(at, penalty)) is not None:
            found = formed, penalty
        if found is not None:
            self.changes += 1
            before, (self.solve, self.penalty) = self.penalty, found
            change = ratio(before, self.penalty, 1.0)
            self.dual = axpy(torch.zeros_like(self.dual), change, self.dual)
