"""The least value of a quadratic function on the points that several sets have in common.

An augmented Lagrangian (Rockafellar, 1976), whose minimisers semismooth Newton steps find (Li, Sun
and Toh, 2018). With the distance d_i to the member S_i,

    φ(x) = f(x) + Σ_i ρ/2 d_i(x + y_i/ρ)²,

is convex and has the gradient ∇f + Σ_i ŷ_i, ŷ_i = ρ (x + y_i/ρ − Proj_i(x + y_i/ρ)), and what a
face knows is the derivative of the projection that ends on it. Rows of a polyhedron are members of
their own. Forces y_i ← ŷ_i follow, ρ grows, and as soon as the faces are those of the solution,
Newton's method on all of them at once has its last digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.composed.contact import in_contact
from dfwlayer.constraints.composed.members import ROUNDING, Forces, Look, Members
from dfwlayer.linalg.quadratic import Program
from dfwlayer.ops.rows import or_one

__all__ = ["Meeting", "Units", "meet", "program_of"]

STEPS = 120  # at most, whatever the settings allow
TURNS = 32  # of the members at rounding
FIRST, GROWTH, LAST = 30.0, 4.0, 1e7  # ρ in units of the curvature
INEXACT = 0.1  # slope of φ against the distance to the members, at which forces follow
ENOUGH = 1e-4  # of the decrease that a slope promises
SHORTEST = 2.0**-16  # step of a line search
AGAIN = 12  # steps after which the faces are tried wherever they are
PATIENCE = 4  # steps that do not lead down, after which rounding is all that is left
CLOSE = 1e-2  # distance of the members, relative, at which their faces are first tried
NEAR = 1e-9  # the same at which ρ is large enough
APART = 1e-7  # what a proof of emptiness may be off by, relative to what it proves
FAINT = 2.0**-28  # of the curvature of f, what bends it where minimisers are many
FLAT = 1e-1  # of the size of x, what a step is at most where f does not bend


class Meeting(NamedTuple):
    """What was found of B problems; vectors are in double precision."""

    x: Tensor  # (B, n)
    forces: Forces
    exact: Tensor  # (B,)
    empty: Tensor  # (B,)
    steps: Tensor  # (B,)
    members: Members


class _State(NamedTuple):
    """Where the problems that are left stand."""

    places: Tensor  # which ones these are
    members: Members
    forces: Forces  # y
    rho: Tensor  # (B, 1)
    x: Tensor
    look: Look
    flat: Tensor  # (B,), whether f may not bend
    size: Tensor  # (B,), of x
    stuck: Tensor  # (B,), steps after which φ did not fall
    turns: Tensor  # (B,), how often forces have followed
    due: Tensor  # (B,), the turn at which the faces are tried next

    def some(self, kept: Tensor) -> _State:
        """Of the problems at these positions."""
        look = self.look
        return _State(
            self.places[kept],
            self.members.some(kept),
            self.forces.some(kept),
            self.rho[kept],
            self.x[kept],
            Look(look.points[:, kept], look.forces.some(kept), *(p[kept] for p in look[2:])),
            self.flat[kept],
            self.size[kept],
            *(part[kept] for part in self[-3:]),
        )


def meet(members: Members, most: int) -> Meeting:
    """Minimise f over the members; x is between the bounds to the last digit."""
    found = _bent(members, _met(members, most), most)
    return found._replace(x=_settled(members, members.clipped(found.x)))


def _bent(members: Members, found: Meeting, most: int) -> Meeting:
    """With problems that were not solved as they are for an f that bends a little everywhere.

    A bounded member may keep next to nothing of the points at which f is least. Which of them it
    keeps, no slope tells: f + ½ε‖x − c‖², with c in the middle of it, is least next to the one that
    is there, and what ε moves it by costs f no more than ε².
    """
    lost = ~(found.exact | found.empty)
    if not bool(lost.any()):
        return found
    index = lost.nonzero().squeeze(-1)
    part = members.some(index)
    program = part.program
    own = program.P.diagonal(dim1=-2, dim2=-1)
    ridge = FAINT * own.mean(-1, keepdim=True).expand(len(index), 1)
    bent = program._replace(
        P=program.P + torch.diag_embed(ridge.expand_as(program.q)),
        q=program.q - ridge * part.middle(),
    )
    again = _met(Members(part.sets, bent), most)
    x, before = part.clipped(again.x), found.x[index]
    extent = ROUNDING * x.abs().amax(-1)
    inside = part.missed(x) <= torch.maximum(part.missed(before), extent)
    better = again.exact & inside & (program.value(x) < program.value(before))
    return found._replace(
        x=found.x.index_copy(0, index, torch.where(better.unsqueeze(-1), x, before)),
        forces=found.forces.put(index, again.forces.chosen(better, found.forces.some(index))),
        steps=found.steps.index_add(0, index, again.steps),
    )


def _settled(members: Members, x: Tensor) -> Tensor:
    """x with what rounding has left it outside of members taken off.

    Faces of an ill-conditioned f are met to some hundred units of rounding. Each member in its turn
    moves x by what it misses, by which others may miss a part of that.
    """
    at, missed = x, members.missed(x)
    for _ in range(TURNS if members.sets else 0):
        before = at
        for part in members.sets:
            at = part.retract(at)
        at = members.clipped(at)
        if torch.equal(at, before):
            break
    better = torch.isfinite(at).all(-1) & (members.missed(at) <= missed)
    return torch.where(better.unsqueeze(-1), at, x)


def _met(members: Members, most: int) -> Meeting:
    program = members.program
    q = program.q
    crossed = (program.lower > program.upper).any(-1)
    steps = torch.zeros_like(q[:, 0], dtype=torch.long)
    one = torch.ones_like(steps)
    state = _start(members)
    # there is no smaller value of ½xᵀPx than that at zero
    zero = (q == 0).all(-1) & (members.missed(torch.zeros_like(q)) == 0) & ~crossed
    x = torch.where(zero.unsqueeze(-1), 0, state.x)
    best = Meeting(x, state.forces, zero, crossed, steps, members)
    for step in range(min(most, STEPS)):
        left = ~(best.exact | best.empty)[state.places] & (state.stuck < PATIENCE)
        if not bool(left.all()):
            best = _put(state, best)
            if not bool(left.any()):
                return best
            state = state.some(left.nonzero().squeeze(-1))
        best = best._replace(steps=best.steps.index_add(0, state.places, one[: len(state.places)]))
        state, best = _follow(state, best, step % AGAIN == AGAIN - 1)
        state = _stepped(state, (best.exact | best.empty)[state.places])
    return _put(state, best)


def _put(state: _State, best: Meeting) -> Meeting:
    """With the points that are not known to be optimal as they are now."""
    kept = (~(best.exact | best.empty)[state.places]).nonzero().squeeze(-1)
    index = state.places[kept]
    return best._replace(
        x=best.x.index_copy(0, index, state.x[kept]),
        forces=best.forces.put(index, state.look.forces.some(kept)),
    )


def _start(members: Members) -> _State:
    program = members.program
    q = program.q
    x = members.clipped(torch.zeros_like(q))
    if members.sets:
        x = torch.stack([x, *(part.project(x) for part in members.sets)]).mean(0)
    size = _extent(members, x)
    P = program.P
    own = P.diagonal(dim1=-2, dim2=-1)
    bend = own.mean(-1).expand(len(q))
    slope = q.abs().amax(-1)
    some = torch.where(slope > 0, slope / size, 1)
    unit = torch.maximum(bend, some)
    # whether a step of Newton's may be longer than the members are wide
    least = torch.maximum(1e-8 * bend, slope / size)
    if members.diagonal is not None:
        flat = own.amin(-1) <= least
    else:
        flat = torch.linalg.cholesky_ex(P - torch.diag_embed(least[:, None].expand_as(q)))[1] > 0
    rho = (FIRST * unit).unsqueeze(-1)
    forces = members.none()
    look = members.look(x, forces, rho)
    index = torch.arange(len(q), device=q.device)
    none = torch.zeros_like(index)
    return _State(index, members, forces, rho, x, look, flat, size, none, none, none)


def _extent(members: Members, x: Tensor) -> Tensor:  # (B,)
    """How large x may be: no more than the smallest member that is bounded and no single point."""
    sizes = [part.inner.diameter(members.n).expand(len(x)) for part in members.sets]
    sizes.append((members.program.upper - members.program.lower).norm(dim=-1))
    some = torch.stack(sizes)
    least = torch.where(some > 0, some, torch.inf).amin(0)
    largest = x.abs().amax(-1)
    return torch.where(torch.isfinite(least), least, torch.where(largest > 0, largest, 1))


def _follow(state: _State, best: Meeting, anyway: bool) -> tuple[_State, Meeting]:
    """Let forces follow where φ is about minimal, and try the faces there.

    ``anyway`` tries them wherever the members are close: steps may go to and fro between the two
    sides of a face along which f hardly bends.
    """
    look, rho = state.look, state.rho.squeeze(-1)
    program = state.members.program
    steep = look.slope.abs().amax(-1)
    extent = state.x.abs().amax(-1)
    terms = program.absolute().gradient(state.x.abs()).amax(-1) + look.forces.largest()
    # forces that are this small are none to a face, whose normal may have n equal entries
    terms = state.members.n**0.5 * (terms + rho * extent)
    ready = steep <= torch.maximum(INEXACT * rho * look.missed, ROUNDING * terms)
    left = ~(best.exact | best.empty)[state.places]
    ready = ready & left
    if not bool((left if anyway else ready).any()):
        return state, best
    size = torch.maximum(extent, look.forces.largest() / rho) + 1e-300
    near = left if anyway else ready & (state.turns >= state.due)
    near = near & (look.missed <= CLOSE * size)
    turns = state.turns + ready
    due = torch.where(near, turns + turns // 2, state.due)
    if bool(near.any()):
        kept = near.nonzero().squeeze(-1)
        part = state if bool(near.all()) else state.some(kept)
        found = in_contact(part.members, part.x, part.look.points, part.look.forces, part.size)
        index = part.places
        mask = found.exact.unsqueeze(-1)
        best = best._replace(
            x=best.x.index_copy(0, index, torch.where(mask, found.x, best.x[index])),
            forces=best.forces.put(
                index, found.forces.chosen(found.exact, best.forces.some(index))
            ),
            exact=best.exact.index_copy(0, index, found.exact),
        )
    best = _proof(state, ready & ~best.exact[state.places], best)
    forces = look.forces.chosen(ready, state.forces)
    grown = torch.where(ready & (look.missed > NEAR * size), GROWTH * rho, rho).unsqueeze(-1)
    grown = torch.minimum(grown, torch.maximum(state.rho, _cap(state)))
    again = state.members.look(state.x, forces, grown)
    # faces that did not serve where nothing is missed will not serve later
    stuck = state.stuck + (ready & near & (look.missed <= ROUNDING * size)) * (PATIENCE // 2)
    state = state._replace(forces=forces, rho=grown, look=again)
    return state._replace(turns=turns, due=due, stuck=stuck), best


def _cap(state: _State) -> Tensor:
    """The largest ρ."""
    bend = state.members.program.P.diagonal(dim1=-2, dim2=-1).mean(-1).expand(len(state.x))
    slope = state.members.program.q.abs().amax(-1) / or_one(state.size)
    return (LAST * torch.maximum(bend, slope)).unsqueeze(-1)


def _stepped(state: _State, done: Tensor) -> _State:
    """One Newton step, as long as φ falls."""
    members, look, rho = state.members, state.look, state.rho
    steep = look.slope.abs().amax(-1)
    ridge = torch.where(state.flat, steep / (FLAT * state.size), 0)
    mean = members.program.P.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = (ridge + 1e-13 * (mean + rho.squeeze(-1))).unsqueeze(-1)
    way = members.newton(members.bend(look, rho), look.slope, ridge)
    fall = (look.slope * way).sum(-1)
    rounding = ROUNDING * (look.value.abs() + (look.slope * way).abs().sum(-1))
    length = torch.ones_like(fall)
    x = state.x + way
    trial = members.look(x, state.forces, rho)
    fits = done | (trial.value <= look.value + ENOUGH * length * fall + rounding)
    while not bool((fits | (length <= SHORTEST)).all()):
        length = torch.where(fits, length, 0.25 * length)
        x = state.x + length.unsqueeze(-1) * way
        trial = members.look(x, state.forces, rho)
        fits = fits | (trial.value <= look.value + ENOUGH * length * fall + rounding)
    return state._replace(x=x, look=trial, stuck=torch.where(fits, state.stuck, state.stuck + 1))


def _proof(state: _State, asked: Tensor, best: Meeting) -> Meeting:
    """Whether the forces that still grow pull the members apart: Σ d_i = 0, Σ max ⟨d_i, s⟩ < 0."""
    if not bool(asked.any()):
        return best
    kept = asked.nonzero().squeeze(-1)
    part = state.some(kept)
    change = part.look.forces.minus(part.forces)
    members, zero = part.members.without_f(), torch.zeros_like(part.x)
    size = change.largest().clamp_min(1e-300).unsqueeze(-1)
    d = change.times(1 / size)
    d = d._replace(rows=d.rows.clamp_min(0))
    most = members.gap(zero, zero, d)
    empty = most < -APART * members.terms(zero, zero, d)
    index = part.places
    return best._replace(
        empty=best.empty.index_copy(0, index, empty),
        forces=best.forces.put(index, d.chosen(empty, best.forces.some(index))),
    )


class Units(NamedTuple):
    """Lengths of the rows that were given."""

    rows: Tensor  # (·, m)
    equations: Tensor  # (·, k)


def program_of(P: Tensor, q: Tensor, rows: Program | None) -> tuple[Program, Units]:
    """f over the rows of a polyhedron, if there is one, which get the length one."""
    if rows is None:
        blank, none = q.new_zeros(1, 0, q.shape[-1]), q[:, :0]
        endless = torch.full_like(q, torch.inf)
        return Program(P, q, blank, none, blank, none, -endless, endless), Units(none, none)
    units = Units(or_one(rows.G.norm(dim=-1)), or_one(rows.A.norm(dim=-1)))
    program = rows._replace(
        P=P,
        q=q,
        G=rows.G / units.rows.unsqueeze(-1),
        h=rows.h / units.rows,
        A=rows.A / units.equations.unsqueeze(-1),
        b=rows.b / units.equations,
    )
    return program, units
