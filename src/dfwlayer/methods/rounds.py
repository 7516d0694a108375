"""The rounds of `ProjectedNewton`: look for the face, be exact on it, measure the gap."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.linalg.krylov import Krylov
from dfwlayer.methods.augmented_newton import augmented_newton
from dfwlayer.methods.base import Outcome, Problem, Settings
from dfwlayer.methods.face_newton import newton_step
from dfwlayer.methods.phases import Accelerated, Iterate, Spectral, Splitting, rows_of
from dfwlayer.methods.recession import falls_for_ever, is_far_out
from dfwlayer.methods.second_order import minimise_models
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    absolute,
    any_row,
    as_rows,
    axpy,
    fill,
    inner,
    keep,
    maximum,
    minimum,
    number,
    number_mask,
    ratio,
    root,
    seen,
    select,
    select_mask,
)
from dfwlayer.ops.scale import ROUNDING
from dfwlayer.solution import Status

__all__ = ["RecordedRounds", "Rounds"]

SPECTRAL_ROUNDS = 2  # what is not found by then is ill conditioned
SHARE = 4  # a batch shrinks once no more than one in so many problems goes on
SPLITTING_STEPS = 7  # between two looks at the face
FLOOR = 100  # times the rounding of the gap, above which a gap is not what rounding left
SHARP = 1e3  # times the rounding of x, below which an error of x is part of it
QUICK = 0.01  # of a gap, to which a step of Newton's close to the solution brings it at least
STARTS = 8  # where f is tried if it is infinite at the start
LARGE = 4096  # coordinates beyond which a factorisation takes longer than most solves
SLOW = 1e3  # steepest by flattest curvature met, from which on it is worth it all the same
BETWEEN = 150  # steps from one turn of augmented Newton steps to the next
CREEPING = 5  # rounds in which f falls and the gap is not halved, until a face is looked for again
HALVINGS = 6  # lengths of a Frank-Wolfe step that are tried, each a quarter of the last
RECORDED_STEPS = 20  # of conjugate gradients in the first round of a CUDA graph


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


class Rounds:
    """The state of one solve by `ProjectedNewton`, whose class says what a round is."""

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
        left = zero + float(settings.max_steps)
        if settings.spent is not None:
            left = left - number(settings.spent.to(x.dtype))
        endless, resolution = zero + torch.inf, settings.resolution
        self.at = Iterate(problem, x, value, gradient, zero, endless, none, left, resolution)
        self.origin = x, gradient
        self.best = x
        self.best_gap: Scalar = zero + torch.inf
        self.round_value = value
        self.stalled = zero  # rounds without progress
        self.unhalved = zero  # rounds in which the gap was not halved
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

    def run(self) -> Outcome:
        """Polish a start that was given, which may be close already, then go round by round."""
        self._report()
        going = self._going()
        if self.settings.warm and any_row(going):
            self.polish(going, ask=2)
            self.judge(going)
            if self.slow and any_row(going := self._going()):
                # the start may be the solution of a problem too ill conditioned for products
                self.polish(going)
                self.judge(going)
        return self._go_on()

    def _go_on(self) -> Outcome:
        """Round by round; once few problems are left, without the others."""
        few: tuple[Tensor, Rounds] | None = None
        while any_row(going := self._going()):
            few = self._few(going)
            if few is not None:
                break
            # an exact solve that paid off may have left something to a second one; f may fall by
            # next to nothing for ever
            fresh = self.exact & (self.stalled < 1) & (self.unhalved < CREEPING)
            again = select_mask(self.close, self.quick, fresh) | self.paid
            searching = select_mask(again, False, going)
            if any_row(searching):
                self.advance(searching)
            self.polish(self._settled(going))
            if seen(late := going & self.tried & (self.close == 0)):
                self._follow(late)
            self.judge(going)
            self._report()
            self.rounds += 1
            if self._enough():
                break
        self._look_back()
        status = select(self.at.bent_down, float(Status.NOT_CONVEX), self.status)
        steps = self.settings.max_steps - maximum(self.at.left, 0.0)
        counts = as_rows(steps, torch.long), as_rows(status, torch.long)
        out = Outcome(self.best, *counts, refinable=True)
        if few is None:
            return out
        index, rest = few[0], few[1]._go_on()
        return Outcome(
            out.x.index_copy(0, index, rest.x),
            out.num_steps.index_copy(0, index, rest.num_steps),
            out.status.index_copy(0, index, rest.status),
            refinable=True,
        )

    def _report(self) -> None:
        """Tell the callback, and end the problems that go on if it says so."""
        at, settings = self.at, self.settings
        if settings.callback is None:
            return
        x = self.problem.constraint.retract(at.x)
        value = as_rows(at.value, x.dtype)
        steps = as_rows(settings.max_steps - maximum(at.left, 0.0), torch.long)
        if settings.stopped(self.problem, x, value, at.gradient, steps):
            self.status = select(self._going(), float(Status.STOPPED), self.status)

    def _few(self, going: Mask) -> tuple[Tensor, Rounds] | None:
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

    def _look_back(self) -> None:
        """Convexity along the whole way: ⟨∇f(x) − ∇f(x₀), x − x₀⟩ ≥ 0."""
        at, (x, gradient) = self.at, self.origin
        d = at.x - x
        square = inner(d, d)
        sizes = inner(gradient, gradient) + inner(at.gradient, at.gradient)
        rounding = 0.5 * at.blur * root(sizes) + 4 * at.rounding()
        rounding = rounding * root(square) + at.blur * at.steepest * square
        at.bent_down = at.bent_down | (inner(d, at.gradient - gradient) < -rounding)

    def advance(self, rows: Mask) -> None:
        """Look for the face, with the phase whose turn it is."""
        at = self.at
        if self.phase is None:
            self.phase = Spectral(self._curvature())
        elif isinstance(self.phase, Spectral) and self._hard():
            split = Splitting.start(at) if self._worth_factors() else None
            self.phase = split or Accelerated(1.2 * self._curvature())
        elif isinstance(self.phase, Accelerated) and not self.split and self._worth_factors():
            self.split = True
            self.phase = Splitting.start(at) or self.phase
        if isinstance(self.phase, Accelerated) and self.bent and not self.formed:
            # what is left after a turn is too ill conditioned for gradient steps
            self.formed = True
            self.phase = Splitting.start(at, form=True) or self.phase
        if isinstance(self.phase, Accelerated):
            steps = min(8, 2**self.rounds) * self.method.block
        elif isinstance(self.phase, Splitting):
            steps = SPLITTING_STEPS
        else:
            steps = self._block()
        if not isinstance(self.phase, Spectral):
            turn = self._turn(rows)
            if seen(turn):
                self._follow(turn)  # all there is to do where f is linear
                if not minimise_models(at, turn):
                    augmented_newton(at, turn)
                    self.bent = True
                    self.next_turn = select(turn, at.left - BETWEEN, self.next_turn)
                    if isinstance(self.phase, Splitting):
                        self.phase.restart(at, turn)
                # where f tends to zero, a step on the face may lower f and raise the gap
                self._note(turn, at.gap(at.x, at.gradient), self._blur(at.x, at.gradient))
                self.tried = self.tried | turn
                self.slow = True
                rows = select_mask(turn, False, rows)
                if not any_row(rows):
                    return
        self.phase.advance(at, steps, rows)

    def _worth_factors(self) -> bool:
        """Whether to factorise a Hessian: a large one only where products converge slowly."""
        at = self.at
        return at.x.shape[-1] <= LARGE or any_row(at.steepest > SLOW * at.flattest)

    def _turn(self, rows: Mask) -> Mask:
        """The problems whose models are to be minimised now: once each, when steps did not help.

        The steps that come first take about as long, and leave enough of them. On a set that bends
        there are further turns, as each may end on the way from face to face.
        """
        first = self._late() | (self.stalled >= 2)
        again = self.at.left <= self.next_turn
        return rows & select_mask(self.tried, again, first)

    def _late(self) -> Mask:
        """Where so many steps were taken that those to come have to be better ones."""
        at, most = self.at, self.settings.max_steps
        return most - at.left >= min(250 + at.x.shape[-1] / 4, 0.4 * most)

    def polish(self, rows: Mask, ask: int = 8) -> None:
        """Minimise the quadratic model on the face of x, and take the result if f falls."""
        at, objective, constraint = self.at, self.problem.objective, self.problem.constraint
        eps = torch.finfo(at.x.dtype).eps
        origin = at.x
        system = FaceSystem(objective, constraint.face(origin, at.gradient), origin)

        def off_face(u: Tensor) -> Mask:
            """Whether x + u is so far off the face that the model has lost its meaning."""
            moved = origin + u
            away = constraint.project(moved, near=origin) - moved
            return inner(away, away) > 0.01 * inner(u, u)

        found = self._directly(system, rows) if self.slow else None
        if found is None:
            # a model of f is not worth more than half of the digits
            model = self.modelled = system.face.bends or not objective.quadratic
            # one product is kept for the gradient at the result; the next round refines it
            found = system.solve(
                system.tangent(-at.gradient),
                tol=0.03 * eps**0.5 if model else 0.0,
                max_steps=self._most(),
                cap=select(rows, at.left - 1, 0.0),
                stop=None if system.face.bends else self._watched(off_face),
                ask=ask,
                floor=self._floor(system.face),
            )
            self.slow = seen(found.unfinished & (at.left > 1))
        at.left = at.left - found.steps
        # where no step was needed, ∇f on the face is rounding already
        self.exact = self.exact | (rows & (found.steps <= 0) & (at.left > 1))
        rows = rows & (found.steps > 0)
        if not any_row(rows):
            return
        self._observe(found, rows, system.face)
        x = constraint.project(origin + found.u, near=origin)
        tensor, gradient = objective.value_and_gradient(x)
        value = number(tensor)
        at.left = select(rows, at.left - 1, at.left)
        lower = value < at.value
        # both points are in the set to rounding, and f lower by ⟨∇f, x⟩ times that outside of it
        level = absolute(value - at.value) <= 4 * eps * absolute(at.value) + self._blur(x, gradient)
        taken = rows & select_mask(level, self._no_worse(rows & level, x, gradient), lower)
        length = inner(found.u, found.u)
        if system.face.bends or not objective.quadratic:
            # after a Newton step the relative error of x is of the order of its length squared
            sharp = length <= eps * inner(x, x)
            if system.face.bends:
                # a set that is curved near zero bends differently at another size of an entry
                change = found.u.abs()
                error = change * (change / x.abs()).nan_to_num(0.0).clamp_max(1.0)
                sharp = sharp & (inner(error, error) <= (SHARP * eps) ** 2 * inner(x, x))
        else:
            # f is its own model, so x is exact unless the projection has changed it by more than
            # rounding, or the step itself is no more than that
            off = axpy(x - origin, -1.0, found.u)
            small = length <= (SHARP * eps) ** 2 * inner(x, x)
            sharp = (inner(off, off) <= eps * length) | small
        idle = self._idle(select_mask(taken, False, rows & level), found.u)
        self.exact = select_mask(rows, select_mask(taken, sharp, idle), self.exact)
        self.refused = select_mask(rows, (taken | idle) == 0, self.refused)
        if self.modelled:
            self.sharpening = select_mask(rows, select_mask(sharp, False, taken), self.sharpening)
        if not objective.quadratic:
            # a Newton step that paid off is followed by another one; where f is flatter than a
            # quadratic at its minimum, each brings but a part of a digit
            self.paid = select_mask(rows, taken, self.paid)
        at.move(taken, x, value, gradient)
        if self.problem.unbounded is not None:
            self._ask(rows & found.flat)
        if seen(rows & found.flat):
            self._follow(rows & found.flat)

    def _ask(self, rows: Mask) -> None:
        """End the problems whose f falls for ever, of these and of those that are far out.

        Once for each: what there is to know does not depend on where it is.
        """
        far = number_mask(is_far_out(self.problem, self.at.x))
        rows = select_mask(self.asked, False, (rows | far) & self._going())
        if any_row(rows):
            self.asked = self.asked | rows
            mask = as_rows(rows, torch.bool).reshape(self.at.x.shape[:-1])
            endless = number_mask(falls_for_ever(self.problem, self.at.x, mask))
            self.status = select(rows & endless, float(Status.UNBOUNDED), self.status)

    def _directly(self, system: FaceSystem, rows: Mask) -> Krylov | None:
        """The minimiser on the face by a factorisation, where there is one, in a step.

        That of a model is for problems that conjugate gradients have had their chance with.
        """
        u = system.direct(-self.at.gradient)
        if u is None and (self.bent or seen(rows & self._late())):
            u = newton_step(self.at, system)
        if u is None:
            return None
        zero = fill(0.0, self.at.value)
        return Krylov(u, zero > 0, select(rows, 1.0, zero), zero, zero + torch.inf, zero > 0)

    def judge(self, rows: Mask) -> None:
        """Measure the gap, keep the best point, and end the problems that are done."""
        at = self.at
        finfo = torch.finfo(at.x.dtype)
        gap = at.gap(at.x, at.gradient)
        blur = self._blur(at.x, at.gradient)
        fell = self.round_value - at.value > 8 * finfo.eps * absolute(at.value)
        halved = (gap < 0.5 * self.best_gap) & (self.best_gap > blur)
        advanced = fell | halved
        # a step of Newton's squares the error; where the gap of an exact step is not lost, or that
        # of another not much smaller than it was, there is a face to be looked for
        known = gap <= FLOOR * blur
        quick = select_mask(
            self.exact | self.refused, known, known | (gap <= QUICK * self.best_gap)
        )
        self.quick = select_mask(rows, quick, self.quick)
        self.paid = self.paid & halved
        self.unhalved = select(rows, select(halved, 0.0, self.unhalved + 1), self.unhalved)
        self.stalled = select(rows, select(advanced, 0.0, self.stalled + 1), self.stalled)
        self._note(rows, gap, blur)
        self.round_value = select(rows, at.value, self.round_value)
        # with a margin for the rounding of the final certificate, which has the last word
        close = self.best_gap <= 0.9 * self.settings.tol * maximum(absolute(at.value), finfo.tiny)
        # where it is not on the right face, one more search may bring the last digits
        # (and where the polish was a step of Newton's, more bring those that it squares)
        squares = self.sharpening & (self.closed < self.newton_looks)
        enough = select_mask(squares, False, self.closed >= self.second_looks)
        if not self.modelled:
            enough = enough | (self.refused == 0)
        enough = self.close & enough
        settled = self.exact & (known | (self.closed >= self.second_looks))
        settled = settled | (self.refused & known & (self.stalled >= 1))
        ended = rows & close & (settled | enough)
        if any_row(select_mask(ended, False, rows)):
            # neither f nor the gap has anything left to give in this dtype
            noise = self._noise()
            lost = self.best_gap <= select(close, 8.0, select(self.stalled >= 1, 2.0, 0.0)) * noise
            # the gap of a point on a curved face is lost at half of x's digits
            lost = lost & (
                self.exact | select_mask(squares, False, self.close) | (self.stalled >= 1)
            )
            # an exact solve that has brought the gap far below its rounding is the last one, though
            # f may go on falling where it tends to zero
            far_below = self.best_gap <= (0.01 if self.second_looks else 2.0) * noise
            lost = lost | (self.exact & far_below)
            patience = 12 if isinstance(self.phase, Splitting) else 3
            over = (self.stalled >= patience) & self.tried
            if at.x.dtype == torch.float32:
                # f may fall by less than the rounding of its terms; double precision sees more
                over = over | (self.tried & (self.unhalved >= patience))
            floor = self.best_gap <= maximum(FLOOR * noise, blur)
            # so close to rounding, f may fall by its own rounding for ever where it tends to zero
            weary = self.tried & (self.unhalved >= patience)
            ended = ended | (rows & (((over | weary) & floor) | lost))
            # nothing here can bring the gap to where rounding alone would leave it; the steps that
            # a float32 problem has left are worth more in double precision
            stuck = select_mask(floor, False, rows & over)
            if at.x.dtype != torch.float32:
                stuck = stuck & (self.stalled >= 3 * patience)
            self.status = select(stuck, float(Status.STALLED), self.status)
        self.close = select_mask(rows, close, self.close)
        self.closed = select(rows, select(close, self.closed + 1, 0.0), self.closed)
        self.status = select(ended, float(Status.ROUNDING_FLOOR), self.status)

    def _note(self, rows: Mask, gap: Scalar, blur: Scalar) -> None:
        """Keep the best point.

        Of points that the gap cannot tell apart the last one is the most exact, all the more where
        a model has been minimised.
        """
        known = select(self.exact | self.sharpening, FLOOR, 1.0) * blur
        better = rows & ((gap < self.best_gap) | (gap <= known))
        self.best = keep(better, self.at.x, self.best)
        self.best_gap = select(better, gap, self.best_gap)

    def _most(self) -> int:
        """Steps of conjugate gradients in this round."""
        return self.method.inner << min(self.rounds, 2)

    def _block(self) -> int:
        """Spectral steps in this round."""
        return self.method.block

    def _enough(self) -> bool:
        """Whether to end although problems go on."""
        return False

    def _watched(self, off_face: Callable[[Tensor], Mask]) -> Callable[[Tensor], Mask] | None:
        """What conjugate gradients ask whether they have left the face."""
        return off_face

    def _no_worse(self, rows: Mask, x: Tensor, gradient: Tensor) -> Mask:
        """Whether to take x where f is level to rounding.

        Yes if the gap shows no more than rounding, as the model knows better then; or if f falls
        by the mean of both slopes, which for a quadratic f is by how much it does. Unlike f and the
        gap that has no terms but those of the coordinates that move.
        """
        if not any_row(rows):
            return rows
        at = self.at
        least = maximum(at.gap(at.x, at.gradient), FLOOR * self._blur(x, gradient))
        falls = inner(gradient + at.gradient, x - at.x) < 0
        return (at.gap(x, gradient) <= least) | falls

    def _idle(self, rows: Mask, u: Tensor) -> Mask:
        """Which of these steps were not worth taking: the model promised no more than rounding."""
        if not seen(rows):
            return rows
        at = self.at
        promised = absolute(inner(at.gradient, u))
        noise = number(self.problem.objective.scale(at.x, at.gradient).blur(u).squeeze(-1))
        return rows & (promised <= noise)

    def _going(self) -> Mask:
        """The problems that go on."""
        return (self.status == float(Status.MAX_STEPS)) & (self.at.left > 0)

    def _hard(self) -> bool:
        """Whether spectral steps are not the right thing."""
        at = self.at
        return self.rounds >= SPECTRAL_ROUNDS or not any_row(at.steepest < 100 * at.flattest)

    def _settled(self, rows: Mask) -> Mask:
        """Alternating directions drift over many faces: only one that lasts is worth a polish."""
        if not isinstance(self.phase, Splitting):
            return rows
        free = self.problem.constraint.face(self.at.x, self.at.gradient).free
        last, self.free = self.free, free
        if free is None or self.rounds % 6 == 5:  # it may also take turns between a few
            return rows
        same = number((free == last).all(-1)) != 0 if last is not None else self.exact
        return rows & (same | self.exact | self.close)

    def _curvature(self) -> Scalar:
        """Where to begin with α: the curvature met, or that along the gradient."""
        at = self.at
        finfo = torch.finfo(at.x.dtype)
        if not any_row(at.steepest <= 0):
            return at.steepest
        square = inner(at.gradient, at.gradient)
        product = self.problem.objective.hvp(at.x, at.gradient)
        along = maximum(ratio(inner(at.gradient, product), square, 0.0), 0.0)
        # without curvature a step should still end near the set: α‖x‖ ~ ‖g‖/100
        d = at.x - self.problem.constraint.vertex(at.gradient)
        least = ratio(0.01 * root(square), root(inner(d, d)), 1.0)
        start = select(along > 0, along, maximum(least, finfo.tiny))
        return select(at.steepest > 0, at.steepest, start)

    def _observe(self, found: Krylov, rows: Mask, face: Face) -> None:
        """Take note of the curvature conjugate gradients met."""
        at = self.at
        rounding = at.blur
        size = found.steepest
        met = at.steepest
        if any_row(found.flattest < 0):
            # where f is flat along the face, no step may have met the curvature that it has
            own = self.problem.objective.scale(at.x, at.gradient).curvature.amax(-1)
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

    def _follow(self, rows: Mask) -> None:
        """A Frank-Wolfe step, the length from the curvature here, and less where f does not fall.

        All there is to do where f has no curvature on the face, and on a set that bends itself
        enough to arrive where f stays steep.
        """
        at, objective = self.at, self.problem.objective
        rows = rows & (at.left >= 2)
        d = self.problem.constraint.vertex(at.gradient) - at.x
        if (endless := self.problem.open_ended(at.gradient)) is not None:
            d = torch.where(endless, 0, d)
        slope = -inner(at.gradient, d)
        curvature = inner(d, objective.hvp(at.x, d))
        gamma = minimum(maximum(ratio(slope, curvature, 1.0), 0.0), 1.0)
        at.left = select(rows, at.left - 1, at.left)
        for _ in range(1 if objective.quadratic else HALVINGS):
            if not any_row(rows):
                break
            x = axpy(at.x, gamma, d)
            tensor, gradient = objective.value_and_gradient(x)
            at.left = select(rows, at.left - 1, at.left)
            fell = rows & (number(tensor) < at.value)
            at.move(fell, x, number(tensor), gradient)
            self.exact = select_mask(
                fell, False, self.exact
            )  # where it was, there was more to gain
            rows = select_mask(fell, False, rows) & (at.left >= 1)
            gamma = 0.25 * gamma

    def _blur(self, x: Tensor, gradient: Tensor) -> Scalar:
        """Rounding of the two terms of the gap, for a gradient without any."""
        return 4 * torch.finfo(x.dtype).eps * absolute(inner(gradient, x))

    def _noise(self) -> Scalar:
        """Rounding of the gap: that of ∇f(x) times the way to go."""
        at = self.at
        d = at.x - self.problem.constraint.vertex(at.gradient)
        scale = self.problem.objective.scale(at.x, at.gradient)
        noise = scale.blur(d).squeeze(-1) / ROUNDING
        terms = self.problem.constraint.lowest_terms(at.gradient)
        return number(noise if terms is None else noise + torch.finfo(at.x.dtype).eps * terms)

    def _floor(self, face: Face) -> Scalar:
        """The rounding of ∇f(x) along the face.

        Coordinates that are not free may have terms that are far larger than those of the free.
        """
        at = self.at
        noise = self.problem.objective.scale(at.x, at.gradient).noise.expand_as(at.x)
        noise = noise if face.free is None else noise * face.free
        # as much as nine coordinates make of it: with that x has the digits of float32 in
        # `dfw bench` up to n = 2000, and small problems take no steps for the sake of rounding
        share: float = min(1.0, 3 / at.x.shape[-1] ** 0.5)
        return share * root(inner(noise, noise)) / ROUNDING


class RecordedRounds(Rounds):
    """The same in a CUDA graph, where nothing can be looked at and the number of rounds is fixed.

    A batch has a second round, which a few of many problems will need; what is not done then goes
    on without a graph.
    """

    second_looks = newton_looks = 0

    def __init__(self, method: Plan, problem: Problem, x: Tensor, settings: Settings) -> None:
        super().__init__(method, problem, x, settings)
        self.tried = self.tried | True  # models are not to be had

    def _few(self, going: Mask) -> None:
        return None

    def _most(self) -> int:
        steps = RECORDED_STEPS >> self.rounds
        return steps if self.at.x.dtype == torch.float32 else 2 * steps

    def _block(self) -> int:
        return self.method.block >> self.rounds

    def _enough(self) -> bool:
        return self.rounds == self.at.x.dim()

    def _watched(self, off_face: Callable[[Tensor], Mask]) -> None:
        return None

    def _no_worse(self, rows: Mask, x: Tensor, gradient: Tensor) -> Mask:
        return rows  # the gap, which has the last word, will tell
