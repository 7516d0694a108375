"""Quadratic programs to the last digits: units, interior-point steps, the face, and the proof."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.quadratic.faces import on_face
from dfwlayer.linalg.quadratic.homogeneous import STEPS, cholesky, interior
from dfwlayer.linalg.quadratic.program import Program, in_units, times

__all__ = ["Answer", "duality_gap", "minimise"]

NOISE = 256 * torch.finfo(torch.float64).eps  # of a slope along which f does not bend


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


def minimise(program: Program, most: int = STEPS) -> Answer:
    """Solve B programs, each of which may have a solution, no feasible point, or no least value.

    After ``most`` steps it ends with a feasible point wherever it is.
    """
    if not len(program.q):
        x, limits = program.q, program.limits
        count = torch.zeros_like(x[:, 0], dtype=torch.long)
        none = count > 0
        return Answer(x, program.b, limits, limits.isnan(), none, none, none, count)
    fixed = program.lower >= program.upper
    crossed = (program.lower > program.upper).any(-1)
    reduced = _without(program, fixed & ~crossed.unsqueeze(-1))
    scaled, units = in_units(reduced)
    found = interior(scaled, most)
    corner = on_face(scaled, found)
    m, n = program.G.shape[-2:]
    x = corner.x * units.x
    z = corner.z * units.cost / units.limits()
    nu = corner.nu * units.cost / units.equations
    active = corner.active
    if bool(fixed.any()):
        x = torch.where(fixed, program.upper, x)
        force = program.gradient(x) + times(program.A.mT, nu) + times(program.G.mT, z[:, :m])
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
    answer = Answer(x, nu, z, active, corner.exact, found.empty, found.endless, found.steps)
    if bool(crossed.any()):
        answer = _crossed(program, answer, crossed)
    return _somewhere(program, answer)


def duality_gap(program: Program, answer: Answer, x: Tensor, gradient: Tensor) -> Tensor:
    """f(x) − f* ≤ gap (B,) for any point x (B, n) with that gradient, by the multipliers.

    With L(y) = f(y) + zᵀ(Gy − h) + νᵀ(Ay − b), f* ≥ min L over the bounds. L is bounded from below
    by its linear model; coordinates that are open on the side to which L falls are minimised out
    first, by a Newton step, as in `dfwlayer.certificate`.
    """
    m = program.G.shape[-2]
    z = answer.z[:, :m].clamp_min(0)
    rest = gradient + times(program.A.mT, answer.nu) + times(program.G.mT, z)
    terms = gradient.abs() + times(program.A.abs().mT, answer.nu.abs())
    terms = terms + times(program.G.abs().mT, z) + times(program.P.abs(), x.abs())
    held = torch.isfinite(program.h)
    slack = torch.where(held, program.h - times(program.G, x), 0)
    gap = (z * slack).sum(-1) + (answer.nu * (program.b - times(program.A, x))).sum(-1)
    gone = torch.zeros_like(rest, dtype=torch.bool)
    pushed, fall, flat = rest, torch.zeros_like(gap), torch.zeros_like(gap, dtype=torch.bool)
    for _ in range(5):
        endless = ((pushed > 0) & (program.lower == -torch.inf)) | (
            (pushed < 0) & (program.upper == torch.inf)
        )
        if not bool((endless & ~gone).any()):
            break
        gone = gone | endless
        u = _inverse(program.P, gone, torch.where(gone, rest, 0))
        fall = 0.5 * (rest * u).sum(-1)
        pushed = rest - times(program.P, u)
        left = torch.where(gone, pushed, 0).abs()
        flat = (left > NOISE * terms.amax(-1, keepdim=True)).any(-1)
        pushed = torch.where(gone, 0, pushed)
    end = torch.where(pushed > 0, program.lower, program.upper)
    along = torch.where(pushed != 0, pushed * (x - end), 0).sum(-1)
    gap = (gap + fall + along).clamp_min(0)
    return torch.where(flat | torch.isnan(gap), torch.inf, gap)


def _inverse(P: Tensor, free: Tensor, v: Tensor) -> Tensor:
    """(P on the free coordinates)⁻¹ v, refined, of least norm where that is singular."""
    bend = P.diagonal(dim1=-2, dim2=-1)
    free = free & (bend > 1e-16 * bend.amax(-1, keepdim=True))  # f is linear in the others
    mask = free.to(P.dtype)
    own = P * mask.unsqueeze(-1) * mask.unsqueeze(-2)
    own = own + torch.diag_embed((1 - mask).expand(len(own), -1))
    unit = own.diagonal(dim1=-2, dim2=-1).rsqrt()
    scaled = own * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    ridged = scaled.clone()
    ridged.diagonal(dim1=-2, dim2=-1).add_(1e-13)
    factor = cholesky(ridged)
    u = torch.zeros_like(v)
    for _ in range(3):
        rest = (v - times(own, u)) * unit
        u = u + unit * torch.cholesky_solve(rest.unsqueeze(-1), factor).squeeze(-1)
    return torch.where(free & torch.isfinite(u), u, 0)


def _without(program: Program, fixed: Tensor) -> Program:
    """The program with coordinates taken out that have one value only; they become zero."""
    if not bool(fixed.any()):
        return program
    x = torch.where(fixed, program.upper, 0)
    keep = (~fixed).to(x.dtype)
    P = program.P * keep.unsqueeze(-1) * keep.unsqueeze(-2)
    return Program(
        P + torch.diag_embed(1 - keep),
        torch.where(fixed, 0, program.q + times(program.P, x)),
        program.G * keep.unsqueeze(-2),
        program.h - times(program.G, x),
        program.A * keep.unsqueeze(-2),
        program.b - times(program.A, x),
        torch.where(fixed, -torch.inf, program.lower),
        torch.where(fixed, torch.inf, program.upper),
    )


def _crossed(program: Program, answer: Answer, crossed: Tensor) -> Answer:
    """Bounds that exclude each other prove by themselves that there is no point."""
    m = program.G.shape[-2]
    worst = (program.lower - program.upper).argmax(-1, keepdim=True)
    unit = torch.zeros_like(program.q).scatter(1, worst, 1.0)
    proof = torch.cat((torch.zeros_like(answer.z[:, :m]), unit, unit), -1)
    return answer._replace(
        nu=torch.where(crossed.unsqueeze(-1), 0, answer.nu),
        z=torch.where(crossed.unsqueeze(-1), proof, answer.z),
        empty=answer.empty | crossed,
        endless=answer.endless & ~crossed,
    )


def _somewhere(program: Program, answer: Answer) -> Answer:
    """A feasible point for the problems whose f falls for ever or that were not solved."""
    lost = ~(answer.exact | answer.empty)
    if not bool(lost.any()):
        return answer
    index = lost.nonzero().squeeze(-1)
    part = program.some(index)
    eye = torch.eye(part.q.shape[-1], dtype=part.q.dtype, device=part.q.device).unsqueeze(0)
    endless = answer.endless[index]
    near = torch.where(endless.unsqueeze(-1), 0, answer.x[index])
    if bool((eye == part.P).all()) and bool((part.q == -near).all()):
        return answer  # that was the question
    found = minimise(part._replace(P=eye, q=-near))
    return answer._replace(
        x=answer.x.index_copy(0, index, torch.where(found.exact.unsqueeze(-1), found.x, near)),
        empty=answer.empty.index_copy(0, index, found.empty),
        endless=answer.endless.index_copy(0, index, endless & ~found.empty),
    )
