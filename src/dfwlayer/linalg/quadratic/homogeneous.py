"""Interior-point steps for quadratic programs that end in a solution or in a proof of none.

The embedding is that of Goulart and Chen ("Clarabel", 2024): with a further unknown τ ≥ 0 the
conditions of optimality become homogeneous,

    P x + Aᵀν + Rᵀz + qτ = 0,   A x = bτ,   R x + s = rτ,   κ + qᵀx + bᵀν + rᵀz + xᵀPx/τ = 0,

s, z, τ, κ ≥ 0 and s∘z = 0, τκ = 0. Where τ > 0 in the limit, x/τ is a solution. Where it is not,
(ν, z) proves that no point is feasible, or x that f falls for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.program import Program
from dfwlayer.linalg.quadratic.system import System, system_of
from dfwlayer.linalg.quadratic.thin import Thin, small_or_thin

__all__ = ["PROVEN", "STEPS", "Interior", "faster", "interior", "offer"]

STEPS = 100  # of one program, at most
FASTER = 200  # the same of code that was offered, whose steps cost less and may begin anew
ENOUGH = 1e-12  # residuals and gap, relative, that leave no doubt about the face
PROVEN = 1e-8  # what a proof may be off by, relative to what it proves
BOUNDARY = 0.99  # of the way to where a number would be zero
LEAST = 1e-13  # of steps; below nothing moves any more
ROUGH = 1e-2  # the same for a start, which need not solve anything
CLOSE = 1e-5  # residuals below which no progress is rounding
TOLD = 0.5  # of μ: a step that makes it smaller than this tells which slacks go to zero
PATIENCE = 4  # steps without progress
IDLE = 5  # such steps after which corrections are taken for a cycle
CENTRED = 0.3  # of μ, what the products are to be after a step that is to end one


class Interior(NamedTuple):
    """Where the steps ended; x, ν, z and s are divided by τ where they are a solution."""

    x: Tensor  # (B, n)
    nu: Tensor  # (B, k)
    z: Tensor  # (B, m + 2n)
    s: Tensor  # (B, m + 2n)
    empty: Tensor  # (B,), ν and z prove that no point is feasible
    endless: Tensor  # (B,), x is a direction in which f falls for ever
    off: Tensor  # (B,), largest relative residual or gap of the others
    holds: Tensor  # (B, m + 2n), rows that seem to hold x
    steps: Tensor  # (B,)
    # x, ν and z of the minimiser on the face of ``holds``, where that is known already
    corner: tuple[Tensor, Tensor, Tensor] | None = None


Walk = Callable[[Thin, int], "Interior | None"]
_offered: list[Walk] = []


def offer(walk: Walk) -> None:
    """Have a single program walked through by other code first, which may answer None."""
    _offered.append(walk)


def faster(program: Program | Thin, most: int = STEPS) -> Interior | None:
    """Where steps of code that was offered end; None if there is none, or it does not know."""
    thin = small_or_thin(program)
    if thin is not None:
        for walk in _offered:
            found = walk(thin, min(most, FASTER))
            if found is not None:
                return found
    return None


class _Point(NamedTuple):
    x: Tensor
    nu: Tensor
    z: Tensor
    s: Tensor
    tau: Tensor  # (B, 1)
    kappa: Tensor  # (B, 1)

    def moved(self, by: _Point, length: Tensor) -> _Point:
        return _Point(*(part + length * way for part, way in zip(self, by, strict=True)))

    def chosen(self, mask: Tensor, other: _Point) -> _Point:
        return _Point(*(torch.where(mask, a, b) for a, b in zip(self, other, strict=True)))


def interior(program: Program | Thin, most: int = STEPS) -> Interior:
    """Mehrotra's predictor and corrector, from a start that the data suggest.

    The program should be in units (`in_units`); ``most`` is the largest number of steps.
    """
    rows = _Rows(program)
    at = rows.start()
    before, fallen = at, torch.ones_like(at.tau)
    holds = best_holds = rows.held & (at.z > at.s)
    best, steps = at, torch.zeros_like(at.tau[:, 0], dtype=torch.long)
    least = torch.full_like(at.tau[:, 0], torch.inf)
    done = torch.zeros_like(least, dtype=torch.bool)
    empty, endless, stuck, idle = done, done, torch.zeros_like(steps), torch.zeros_like(steps)
    for step in range(min(most, STEPS) + 1):
        state = rows.look(at)
        better = ~done & (state.off < least)
        advanced = state.off < 0.9 * least
        stuck = torch.where(advanced, 0, stuck + (least < CLOSE))
        idle = torch.where(advanced, 0, idle + 1)
        best = at.chosen(better.unsqueeze(-1), best)
        # slacks of rows that hold x go to zero as μ does and multipliers of the others, whatever
        # their units are; a step that is short does not tell
        told = (state.mu < TOLD * fallen) & rows.held
        holds = torch.where(told, at.s * before.z < at.z * before.s, holds)
        best_holds = torch.where(better.unsqueeze(-1), holds, best_holds)
        before, fallen = at, state.mu
        least = torch.where(better, state.off, least)
        new_empty, new_endless = ~done & state.empty, ~done & state.endless
        proof = (new_empty | new_endless).unsqueeze(-1)
        best = at.chosen(proof, best)
        empty, endless = empty | new_empty, endless | new_endless
        done = done | (least <= ENOUGH) | empty | endless | (stuck >= PATIENCE)
        if step == most or bool(done.all()):
            break
        cycles = (idle >= IDLE).unsqueeze(-1) & (at.tau > at.kappa)  # else there may be no solution
        by, length = rows.step(at, state, cycles)
        length = torch.where(done.unsqueeze(-1), 0, length)
        stuck = stuck + (length.squeeze(-1) < LEAST)
        at = at.moved(by, length).chosen(~done.unsqueeze(-1), at)
        steps = steps + ~done
    scale = torch.where((empty | endless).unsqueeze(-1), 1, best.tau)
    x, nu, z, s = (part / scale for part in best[:4])
    return Interior(x, nu, z, s, empty, endless, least, best_holds, steps)


class _State(NamedTuple):
    """What an iterate misses."""

    dual: Tensor  # (B, n)
    equations: Tensor  # (B, k)
    primal: Tensor  # (B, m + 2n)
    tau: Tensor  # (B, 1)
    product: Tensor  # P x (B, n)
    mu: Tensor  # (B, 1)
    off: Tensor  # (B,)
    empty: Tensor  # (B,)
    endless: Tensor  # (B,)


class _Rows:
    """The rows of a program, of which those without a limit are left out."""

    def __init__(self, program: Program | Thin) -> None:
        self.program = program
        limits = program.limits
        self.held = torch.isfinite(limits)
        self.limits = torch.where(self.held, limits, 0)
        self.count = self.held.sum(-1, keepdim=True).to(limits.dtype)

    def start(self) -> _Point:
        """From one system with s = z, both moved to where they are positive."""
        program = self.program
        ones = torch.where(self.held, 1.0, 0.0).to(self.limits)
        system = system_of(program, ones, ROUGH)
        x, nu, z = system.factor.once(-program.q, program.b, self.limits)
        z = z * ones
        s = -z
        s, z = (self._positive(part) for part in (s, z))
        unit = torch.ones_like(x[:, :1])
        return _Point(x, nu, z, s, unit, unit)

    def _positive(self, part: Tensor) -> Tensor:
        least = torch.where(self.held, part, torch.inf).amin(-1, keepdim=True)
        shift = torch.where(least < 1e-2, 1 - least.clamp_max(0), 0)
        return torch.where(self.held, part + torch.where(torch.isfinite(shift), shift, 0), 0)

    def look(self, at: _Point) -> _State:
        program, (x, nu, z, s, tau, kappa) = self.program, at
        q, b, r = program.q, program.b, self.limits
        product = program.bent(x)
        pulled, leaned = program.pulled(nu), program.gathered(z)
        along, across = program.along(x), torch.where(self.held, program.across(x), 0)
        dual = product + pulled + leaned + q * tau
        equations = along - b * tau
        primal = torch.where(self.held, across + s - r * tau, 0)
        bend = (x * product).sum(-1, keepdim=True)
        cost = (q * x).sum(-1, keepdim=True)
        reach = (b * nu).sum(-1, keepdim=True) + (r * z).sum(-1, keepdim=True)
        gap = kappa + cost + reach + bend / tau
        mu = ((s * z).sum(-1, keepdim=True) + tau * kappa) / (self.count + 1)
        # as a solution x/τ
        scale = 1 + torch.maximum(_size(product, leaned, pulled) / tau, _size(q))
        tight = 1 + torch.maximum(_size(along, across, s) / tau, _size(b, r))
        first = 0.5 * bend / tau**2 + cost / tau
        second = -0.5 * bend / tau**2 - reach / tau
        apart = (first - second).abs() / (1 + torch.minimum(first.abs(), second.abs()))
        off = torch.cat(
            (_size(dual) / tau / scale, _size(equations, primal) / tau / tight, apart), -1
        ).amax(-1)
        # as a proof
        wrong = _size(pulled + leaned)
        lean = _size(nu, z)
        empty = (reach < 0) & (wrong <= PROVEN * -reach) & (wrong <= 1e-6 * lean)
        bent = torch.maximum(_size(product), _size(along, torch.where(self.held, across + s, 0)))
        endless = (cost < 0) & (bent <= PROVEN * -cost) & (bent <= 1e-6 * _size(x))
        unsure = tau < 1e-2 * kappa
        return _State(
            dual,
            equations,
            primal,
            gap,
            product,
            mu,
            torch.where(torch.isfinite(off), off, torch.inf),
            (empty & unsure).squeeze(-1),
            (endless & unsure).squeeze(-1),
        )

    def step(self, at: _Point, state: _State, cycles: Tensor) -> tuple[_Point, Tensor]:
        """A direction and how far to go in it; a plain one towards the centre after cycles (B, 1).

        The corrections of Mehrotra's method may lead back and forth between two points.
        """
        program = self.program
        weight = torch.where(self.held, at.z / _or_one(at.s), 0)
        system = system_of(program, weight)
        steady = system.solve(-program.q, program.b, self.limits)
        none = torch.zeros_like(at.s)
        affine = self._direction(system, steady, at, state, torch.zeros_like(at.tau), none, 0.0)
        length = self._length(at, affine)
        ahead = at.moved(affine, length)
        mu = ((ahead.s * ahead.z).sum(-1, keepdim=True) + ahead.tau * ahead.kappa) / (
            self.count + 1
        )
        centre = ((mu / state.mu).clamp(0, 1)) ** 3
        centre = torch.where(cycles, centre.clamp_min(CENTRED), centre)
        pairs = affine.s * affine.z, affine.tau * affine.kappa
        second = tuple(torch.where(cycles, 0, pair) for pair in pairs)
        by = self._direction(system, steady, at, state, centre, second[0], second[1])
        length = BOUNDARY * self._length(at, by)
        sound = torch.isfinite(torch.cat(by, -1)).all(-1, keepdim=True)
        by = _Point(*(torch.where(sound, part, 0) for part in by))
        return by, torch.where(sound, length.clamp_max(1), 0)

    def _direction(
        self,
        system: System,
        steady: tuple[Tensor, Tensor, Tensor],
        at: _Point,
        state: _State,
        centre: Tensor,
        second: Tensor,
        last: Tensor | float,
    ) -> _Point:
        program, rest = self.program, 1 - centre
        pair = torch.where(self.held, centre * state.mu - at.s * at.z - second, 0)
        corner = centre * state.mu - at.tau * at.kappa - last
        x1, nu1, z1 = system.solve(
            -rest * state.dual,
            -rest * state.equations,
            -rest * state.primal - pair / _or_one(at.z),
        )
        x2, nu2, z2 = steady
        slope = program.q + 2 * state.product / at.tau

        def row(x: Tensor, nu: Tensor, z: Tensor) -> Tensor:
            inner = (slope * x).sum(-1, keepdim=True) + (program.b * nu).sum(-1, keepdim=True)
            return inner + (self.limits * z).sum(-1, keepdim=True)

        above = -rest * state.tau - corner / at.tau - row(x1, nu1, z1)
        # by the equations that x2, ν2 and z2 solve, a sum of terms that are all negative; where
        # they are not solved, as H is singular, the sum itself
        way = x2 - at.x / at.tau
        terms = (way * program.bent(way)).sum(-1, keepdim=True)
        terms = terms + (at.s / _or_one(at.z) * z2**2).sum(-1, keepdim=True)
        bend = (at.x * state.product).sum(-1, keepdim=True) / at.tau**2
        below = torch.minimum(-terms, row(x2, nu2, z2) - bend) - at.kappa / at.tau
        tau = above / torch.where(below < 0, below, -1e-300)
        x, nu, z = x1 + tau * x2, nu1 + tau * nu2, z1 + tau * z2
        s = torch.where(self.held, (pair - at.s * z) / _or_one(at.z), 0)
        kappa = (corner - at.kappa * tau) / at.tau
        return _Point(x, nu, z, s, tau, kappa)

    def _length(self, at: _Point, by: _Point) -> Tensor:  # (B, 1)
        """How far a direction goes before a number is negative, 1 at most."""
        value = torch.cat((at.s, at.z, at.tau, at.kappa), -1)
        way = torch.cat((by.s, by.z, by.tau, by.kappa), -1)
        ratio = torch.where(way < 0, -value / torch.where(way < 0, way, -1), torch.inf)
        return ratio.amin(-1, keepdim=True).clamp(0, 1)


def _or_one(v: Tensor) -> Tensor:
    return torch.where(v != 0, v, 1)


def _size(*parts: Tensor) -> Tensor:  # (B, ·) -> (B, 1)
    """The largest entry."""
    some = [part for part in parts if part.shape[-1]]
    largest: Tensor = torch.cat(some, -1).abs().amax(-1, keepdim=True)
    return largest
