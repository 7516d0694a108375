"""Quadratic programs to the last digits: units, interior-point steps, the face, and the proof."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.contradiction import MET, NOISE, contradiction
from dfwlayer.linalg.quadratic.faces import FEW, ROUNDS, Corner, given, held_by, on_face
from dfwlayer.linalg.quadratic.homogeneous import STEPS, Interior, faster, interior
from dfwlayer.linalg.quadratic.program import Program
from dfwlayer.linalg.quadratic.thin import Thin
from dfwlayer.linalg.quadratic.units import in_units

__all__ = ["Answer", "duality_gap", "least_value", "minimise", "minimise_on", "unopened"]

SURE = 1e-6  # relative gap of a solution beyond doubt
NEAR = 1e-6  # of a solution: residuals and gap, relative
ALMOST, CLOSE = 1e-6, 1e-8  # the same where some faces, and many, are worth a look
REFINEMENTS = 2  # of the multipliers of a linear program, each by what the last one left


class Answer(NamedTuple):
    """What became of B programs."""

    x: Tensor  # (B, n), a feasible point also where f falls for ever
    nu: Tensor  # multipliers of A x = b (B, k)
    z: Tensor  # of the m + 2n inequalities (B, m + 2n); where there is no point, these prove it
    active: Tensor  # (B, m + 2n), rows that hold x
    exact: Tensor  # (B,), optimal to rounding
    empty: Tensor  # (B,), no point is feasible
    endless: Tensor  # (B,), f falls for ever
    steps: Tensor  # (B,)
    missed: Tensor  # (B,), the largest amount by which x misses a row, relative to its terms
    gap: Tensor | None = None  # (B,), f(x) − f* at most, where that is known already


def minimise(program: Program | Thin, most: int = STEPS) -> Answer:
    """Solve B programs, each of which may have a solution, no feasible point, or no least value.

    After ``most`` steps it ends with a feasible point wherever it is.
    """
    if not len(program.q):
        x, limits = program.q, program.limits
        count = torch.zeros_like(x[:, 0], dtype=torch.long)
        none, zero = count > 0, torch.zeros_like(x[:, 0])
        return Answer(x, program.b, limits, limits.isnan(), none, none, none, count, zero)
    answer, off = _attempt(program, most)
    answer = _at_zero(program, answer)
    gap = duality_gap(program, answer, answer.x, program.gradient(answer.x))
    known = answer.exact & (gap <= SURE * program.value(answer.x).abs())
    # f* may be zero: then what rounding makes of f at points of this size
    known = known | (answer.exact & (off <= NEAR) & (gap <= _rounding(program, answer.x)))
    near = ~answer.exact & (off <= NEAR)
    doubtful = ~(answer.empty | answer.endless | known | near)
    decided = _somewhere(program, _decided(program, answer, doubtful))
    return decided._replace(gap=gap) if decided is answer else decided


def minimise_on(program: Program | Thin, active: Tensor) -> Answer:
    """Solve B programs of which the rows that hold the solutions (B, m + 2n) may be known.

    If they are, one linear system is enough.
    """
    if not len(program.q):
        return minimise(program)
    corner = held_by(program, torch.zeros_like(program.q), active)
    if not bool(corner.exact.all()):
        return minimise(program)
    none = torch.zeros_like(corner.exact)
    x, nu, z, active, exact = corner
    z = torch.where(active, z, 0).clamp_min(0)
    return Answer(x, nu, z, active, exact, none, none, none.long(), _missed(program, x))


def _attempt(program: Program | Thin, most: int = STEPS) -> tuple[Answer, Tensor]:
    """What interior-point steps and the face say, and how far their end is from a solution (B,)."""
    fixed = program.lower >= program.upper
    crossed = (program.lower > program.upper).any(-1)
    single = fixed & ~crossed.unsqueeze(-1)
    scaled, units = in_units(program.without(single) if bool(single.any()) else program)
    found, corner = _located(scaled, most)
    m, n = program.h.shape[-1], program.q.shape[-1]
    x = corner.x * units.x
    z = corner.z * units.cost / units.limits()
    nu = corner.nu * units.cost / units.equations
    active = corner.active
    if bool(fixed.any()):
        x = torch.where(fixed, program.upper, x)
        leaned = program.gathered(torch.cat((z[:, :m], torch.zeros_like(z[:, m:])), -1))
        force = program.gradient(x) + program.pulled(nu) + leaned
        above, below = fixed & (force <= 0), fixed & (force > 0)
        z = torch.cat(
            (
                z[:, :m],
                torch.where(fixed, torch.where(above, -force, 0), z[:, m : m + n]),
                torch.where(fixed, torch.where(below, force, 0), z[:, m + n :]),
            ),
            -1,
        )
        active = torch.cat(
            (active[:, :m], active[:, m : m + n] | above, active[:, m + n :] | below), -1
        )
    # a bound is met to the last bit, and what is not held stays within
    x = torch.minimum(torch.maximum(x, program.lower), program.upper)
    none = found.empty, found.endless
    missed = _missed(program, x)
    # a face that is right to rounding in units may miss rows of the program as it was given
    exact = corner.exact & (missed <= MET)
    answer = Answer(x, nu, z, active, exact, *none, found.steps, missed)
    if bool(found.empty.any()):
        answer = answer._replace(z=torch.where(found.empty[:, None], _closed(program, nu, z), z))
    if bool(crossed.any()):
        answer = _crossed(program, answer, crossed)
    return answer, found.off


def _closed(program: Program | Thin, nu: Tensor, z: Tensor) -> Tensor:  # (B, m + 2n)
    """Multipliers z with those of bounds that take what Aᵀν + Rᵀz leaves of zero, if they can."""
    m, n = program.h.shape[-1], program.q.shape[-1]
    rest = program.pulled(nu) + program.gathered(z)
    above = torch.where(torch.isfinite(program.upper), (-rest).clamp_min(0), 0)
    below = torch.where(torch.isfinite(program.lower), rest.clamp_min(0), 0)
    return torch.cat((z[:, :m], z[:, m : m + n] + above, z[:, m + n :] + below), -1)


def _located(program: Program | Thin, most: int) -> tuple[Interior, Corner]:
    """Where steps end, and the solution on the face that they lead to.

    Faster steps tell neither programs without a solution nor those that are hard: what does not end
    on a face that is right to rounding is done over. The further off they end, the sooner a face
    has to be right.
    """
    found = faster(program, most)
    if found is not None:
        corner = given(program, found)
        off = float(found.off.amax())
        if corner is None and off <= ALMOST:
            corner = on_face(program, found, ROUNDS if off <= CLOSE else FEW)
        if corner is not None and bool(corner.exact.all()):
            return found, corner
    found = interior(program, most)
    return found, on_face(program, found)


def _at_zero(program: Program | Thin, answer: Answer) -> Answer:
    """With x = 0 for problems ½xᵀPx that have it, than which there is no smaller value.

    What steps towards it, and the last digits of a face, leave of zero is not zero, though it
    satisfies all conditions to what is rounding beside one.
    """
    there = (program.limits >= 0).all(-1) & (program.b == 0).all(-1) & (program.q == 0).all(-1)
    there = there & (~answer.exact | (program.value(answer.x) > 0))
    rows = there.unsqueeze(-1)
    x, nu, z = (torch.where(rows, 0, part) for part in answer[:3])
    missed = torch.where(there, 0, answer.missed)
    return answer._replace(
        x=x,
        nu=nu,
        z=z,
        active=answer.active & ~rows,
        exact=answer.exact | there,
        empty=answer.empty & ~there,
        endless=answer.endless & ~there,
        missed=missed,
    )


def _rounding(program: Program | Thin, x: Tensor) -> Tensor:  # (B, n) -> (B,)
    """That of f at points whose entries are as large as the largest one of x."""
    largest = x.abs().amax(-1, keepdim=True)
    terms = program.absolute().gradient(largest.expand_as(x)).amax(-1)
    return NOISE * largest.squeeze(-1) * terms


def _decided(program: Program | Thin, answer: Answer, doubtful: Tensor) -> Answer:
    """Whether problems that did not come near a solution have none, by two programs that have.

    The point next to zero exists if any is feasible, and is found, or a proof that none is. The
    projection of −q onto the directions in which no row ends and f does not bend is zero if f does
    not fall for ever.
    """
    if not bool(doubtful.any()):
        return answer
    index = doubtful.nonzero().squeeze(-1)
    part = program.some(index)
    near, _ = _attempt(part.towards(torch.zeros_like(part.q)))
    way, _ = _attempt(part.cone())
    size = part.q.abs().amax(-1)
    falls = way.exact & (way.x.abs().amax(-1) > NEAR * size) & ~near.empty
    empty = near.empty.unsqueeze(-1)
    return answer._replace(
        nu=answer.nu.index_copy(0, index, torch.where(empty, near.nu, answer.nu[index])),
        z=answer.z.index_copy(0, index, torch.where(empty, near.z, answer.z[index])),
        empty=answer.empty.index_copy(0, index, near.empty),
        endless=answer.endless.index_copy(0, index, falls),
        exact=answer.exact.index_copy(0, index, answer.exact[index] & ~(near.empty | falls)),
    )


def duality_gap(program: Program | Thin, answer: Answer, x: Tensor, gradient: Tensor) -> Tensor:
    """f(x) − f* ≤ gap (B,) for any point x (B, n) with that gradient, by the multipliers.

    With L(y) = f(y) + zᵀ(Gy − h) + νᵀ(Ay − b), f* ≥ min L over the bounds. L is bounded from below
    by its linear model; coordinates that are open on the side to which L falls are minimised out
    first, by a Newton step, as in `dfwlayer.certificate`.
    """
    known = answer.gap
    here = known is not None and torch.equal(x, answer.x)
    if known is not None and here and torch.equal(gradient, program.gradient(x)):
        return known
    m, n = program.h.shape[-1], x.shape[-1]
    z = answer.z[:, :m].clamp_min(0)
    rows = torch.cat((z, z.new_zeros(len(z), 2 * n)), -1)
    absolute = program.absolute()
    rest = gradient + program.pulled(answer.nu) + program.gathered(rows)
    terms = gradient.abs() + absolute.pulled(answer.nu.abs())
    largest = x.abs().amax(-1, keepdim=True)  # whose rounding all entries have
    terms = terms + absolute.gathered(rows) + absolute.bent(largest.expand_as(x))
    held = torch.isfinite(program.h)
    slack = torch.where(held, program.h - program.across(x)[:, :m], 0)
    gap = (z * slack).sum(-1) + (answer.nu * (program.b - program.along(x))).sum(-1)
    freed = unopened(program, rest, terms, largest)
    pushed = freed.slope
    end = torch.where(pushed > 0, program.lower, program.upper)
    along = torch.where(pushed != 0, pushed * (x - end), 0).sum(-1)
    gap = (gap + freed.fall + along).clamp_min(0) + freed.blur
    return torch.where(freed.flat | torch.isnan(gap), torch.inf, gap)


class Unopened(NamedTuple):
    """What is left of a slope when the coordinates that no bound ends are minimised out."""

    slope: Tensor  # (B, n), zero along these
    fall: Tensor  # (B,), by which f is lower at their best
    blur: Tensor  # (B,), what rounding leaves of the slope along them, times the size of x
    flat: Tensor  # (B,), whether more than that is left: f does not bend along them


def unopened(
    program: Program | Thin,
    slope: Tensor,  # (B, n), of a Lagrangian with the curvature of f
    terms: Tensor,  # (B, n), the size of what the slope is a sum of
    largest: Tensor,  # (B, 1), entry of x
) -> Unopened:
    """By a Newton step in the coordinates that are open on the side to which the slope falls."""
    gone = torch.zeros_like(slope, dtype=torch.bool)
    pushed, fall = slope, torch.zeros_like(slope[:, 0])
    blur, flat = fall, torch.zeros_like(fall, dtype=torch.bool)
    for _ in range(5):
        endless = _endless(program, pushed)
        if not bool((endless & ~gone).any()):
            break
        gone = gone | endless
        u = program.unbent(gone, torch.where(gone, slope, 0))
        fall = 0.5 * (slope * u).sum(-1)
        pushed = slope - program.bent(u)
        remaining = torch.where(gone, pushed, 0).abs()
        blur = (remaining * largest).sum(-1)
        flat = (remaining > NOISE * terms.amax(-1, keepdim=True)).any(-1)
        pushed = torch.where(gone, 0, pushed)
    return Unopened(pushed, fall, blur, flat)


def least_value(program: Program | Thin) -> Tensor:
    """What the multipliers of B linear programs prove that ⟨q, x⟩ is at least (B,).

    Where rows alone bound x, multipliers prove something only if they cancel q: what they leave
    of it falls for ever along a line. A slope that is all but orthogonal to a face, as gradients at
    solutions are, is cancelled to the rounding of the steps and no further. What is left, in units
    of its own, is the slope of another program over the same set, whose multipliers are added
    (iterative refinement as of Gleixner, Steffy and Wolter, 2016). −∞ where there is no least
    value.
    """
    found = minimise(program)
    gap = duality_gap(program, found, found.x, program.q)
    m = program.h.shape[-1]
    for _ in range(REFINEMENTS):
        unproven = torch.isinf(gap) & ~(found.empty | found.endless)
        if not bool(unproven.any()):
            break
        index = unproven.nonzero().squeeze(-1)
        part = program.some(index)
        nu, z = found.nu[index], found.z[index]
        z = torch.cat((z[:, :m].clamp_min(0), torch.zeros_like(z[:, m:])), -1)
        rest = part.q + part.pulled(nu) + part.gathered(z)
        rest = torch.where(_endless(part, rest), rest, 0)  # bounds hold what they can themselves
        size = rest.abs().amax(-1, keepdim=True)
        size = torch.where((size > 0) & torch.isfinite(size), size, 1)
        more = minimise(part.tilted(rest / size))
        found = found._replace(
            nu=found.nu.index_copy(0, index, nu + size * more.nu),
            z=found.z.index_copy(0, index, z + size * more.z.clamp_min(0)),
            gap=None,
        )
        gap = duality_gap(program, found, found.x, program.q)
    value: Tensor = (program.q * found.x).sum(-1) - gap
    return torch.where(found.endless, -torch.inf, value)


def _endless(program: Program | Thin, slope: Tensor) -> Tensor:  # (B, n) -> (B, n)
    """The coordinates along which a slope falls and no bound ends it."""
    return ((slope > 0) & (program.lower == -torch.inf)) | (
        (slope < 0) & (program.upper == torch.inf)
    )


def _missed(program: Program | Thin, x: Tensor) -> Tensor:
    absolute, size = program.absolute(), x.abs()
    largest = size.amax(-1, keepdim=True).clamp_min(1e-300)
    beside = (program.along(x) - program.b).abs() / (
        absolute.along(size) + program.b.abs() + largest
    )
    limits = program.limits
    held = torch.isfinite(limits)
    limits = torch.where(held, limits, 0)
    over = torch.where(held, program.across(x) - limits, 0)
    over = over / (absolute.across(size).abs() + limits.abs() + largest)
    worst: Tensor = torch.cat((beside, over), -1).amax(-1).clamp_min(0)
    return worst


def _crossed(program: Program | Thin, answer: Answer, crossed: Tensor) -> Answer:
    """Bounds that exclude each other prove by themselves that there is no point."""
    m = program.h.shape[-1]
    worst = (program.lower - program.upper).argmax(-1, keepdim=True)
    unit = torch.zeros_like(program.q).scatter(1, worst, 1.0)
    proof = torch.cat((torch.zeros_like(answer.z[:, :m]), unit, unit), -1)
    return answer._replace(
        nu=torch.where(crossed.unsqueeze(-1), 0, answer.nu),
        z=torch.where(crossed.unsqueeze(-1), proof, answer.z),
        empty=answer.empty | crossed,
        endless=answer.endless & ~crossed,
    )


def _somewhere(program: Program | Thin, answer: Answer) -> Answer:
    """A feasible point for the problems whose f falls for ever or that were not solved.

    If there is none, f does not fall for ever, either: it does so along directions alone.
    """
    lost = ~(answer.exact | answer.empty)
    if not bool(lost.any()):
        return answer
    index = lost.nonzero().squeeze(-1)
    part, endless = program.some(index), answer.endless[index]
    near = torch.where(endless.unsqueeze(-1), 0, answer.x[index])
    found, _ = _attempt(part.towards(near))
    # far out on a way without end rows seem to be met, as x is what their misses are compared to
    better = found.exact | endless | (found.missed < answer.missed[index])
    x = torch.where(better.unsqueeze(-1), found.x, near)
    scaled, units = in_units(part)
    feasible = found.exact | _meets(scaled, x / units.x)
    # also of those that seem to be met: they may be so only beside an x that is far out
    if bool((asked := ~(found.empty | found.exact)).any()):
        proof = contradiction(scaled, x / units.x, asked, _ended)
        mask = proof.found.unsqueeze(-1)
        found = found._replace(
            nu=torch.where(mask, proof.nu / units.equations, found.nu),
            z=torch.where(mask, proof.z / units.limits(), found.z),
            empty=found.empty | proof.found,
        )
    empty = found.empty.unsqueeze(-1)
    missed = torch.where(better, found.missed, answer.missed[index])
    return answer._replace(
        x=answer.x.index_copy(0, index, x),
        nu=answer.nu.index_copy(0, index, torch.where(empty, found.nu, answer.nu[index])),
        z=answer.z.index_copy(0, index, torch.where(empty, found.z, answer.z[index])),
        missed=answer.missed.index_copy(0, index, missed),
        empty=answer.empty.index_copy(0, index, found.empty),
        endless=answer.endless.index_copy(0, index, endless & ~found.empty & feasible),
    )


def _ended(program: Program | Thin) -> tuple[Tensor, Tensor, Tensor]:
    """Where an attempt at B programs ends: x, ν and z."""
    answer, _ = _attempt(program)
    return answer.x, answer.nu, answer.z


def _meets(scaled: Program | Thin, x: Tensor) -> Tensor:  # (B, n) -> (B,)
    """Whether a point is feasible to rounding, in units in which one is neither large nor small."""
    held = torch.isfinite(scaled.limits)
    over = torch.where(held, scaled.across(x) - torch.where(held, scaled.limits, 0), 0)
    off = torch.cat(((scaled.along(x) - scaled.b).abs(), over), -1).amax(-1)
    met: Tensor = off <= MET * (1 + x.abs().amax(-1))
    return met
