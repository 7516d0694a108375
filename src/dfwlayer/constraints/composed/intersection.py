"""The points that several sets have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.constraints.composed.joined import Joined, common_form
from dfwlayer.constraints.composed.meeting import Meeting, Units, meet, program_of
from dfwlayer.constraints.composed.members import Members
from dfwlayer.constraints.composed.seen import Seen
from dfwlayer.constraints.composed.stacked_face import StackedFace
from dfwlayer.constraints.minimum import Minimum
from dfwlayer.constraints.parameters import merged, table
from dfwlayer.constraints.plain import Plain
from dfwlayer.constraints.polyhedra.linear_face import face_of_answer
from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron
from dfwlayer.constraints.region import Block
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.linalg.quadratic import Answer, Thin
from dfwlayer.ops.rows import or_one
from dfwlayer.ops.scale import Scale

__all__ = ["Intersection"]

LONG = 10**6  # steps, where no setting limits them


@dataclass(frozen=True, init=False)
class Intersection(Constraint):
    """S_1 ∩ … ∩ S_m, of sets of the library over the same variable.

    Bounds, rows and equations become one polyhedron, also within ℓ2 balls and ellipsoids; other
    sets take part with their projections and faces (`dfwlayer.constraints.composed.meeting`). A
    `PlaneCut` is the intersection with one `Hyperplane`. Where the sets have no point in common
    the problem ends with status INFEASIBLE, and x is NaN.

    The default method is then "sqp".

    Args:
        sets: S_1 … S_m, any sets, each with its own parameters.

    """

    sets: tuple[Constraint, ...]

    def __init__(self, *sets: Constraint) -> None:
        for i, part in enumerate(sets):
            if not isinstance(part, Constraint):
                listed = isinstance(part, list | tuple)
                hint = "; give the sets one by one: Intersection(S, T)" if listed else ""
                raise ValueError(
                    f"sets[{i}]: expected a set such as LpBall, got {type(part).__name__}{hint}"
                )
        if not sets:
            raise ValueError("sets: expected at least one, got none")
        object.__setattr__(self, "sets", tuple(sets))

    @property
    def preferred_method(self) -> str:
        """What "auto" means for it."""
        return "sqp"

    @property
    def variable_dims(self) -> int:
        """The most that one of the sets has."""
        return max(part.variable_dims for part in self.sets)

    def leads(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Those of the sets."""
        return {
            f"sets[{i}]: {name}": lead
            for i, part in enumerate(self.sets)
            for name, lead in part.leads(shape).items()
        }

    @property
    def deep(self) -> bool:
        """Of any of the sets."""
        return any(part.deep for part in self.sets)

    def variable(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """That of the first set which knows it."""
        known = (part.variable(sizes) for part in self.sets)
        return next((shape for shape in known if shape is not None), None)

    def priced(self, shape: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...] | None]]:
        """Those of the sets, each with the number of its set before its name."""
        return {
            f"{i}.{name}": about
            for i, part in enumerate(self.sets)
            for name, about in part.priced(shape).items()
        }

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Self:
        """All sets."""
        return self._within(lambda part: part.flattened(shape, lead), {}) or self

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """The bound sets."""
        return self.as_bound(sets=tuple(part.bind(shape, dtype, device) for part in self.sets))

    def normal_form(self, n: int) -> Sequence[Block] | None:
        """Where all sets are bounds, rows and one budget at most; see `common_form`."""
        return common_form([part.normal_form(n) for part in self._leaves()], n)

    def is_plain(self, like: Tensor) -> bool:
        """All sets."""
        return all(part.is_plain(like) for part in self.sets)

    def as_polyhedron(self, like: Tensor) -> Polyhedron | None:
        """All rows and the narrower bounds, where the sets are nothing else."""
        rows, others = self._sorted(like)
        return None if others or rows is None else rows.as_polyhedron(like)

    def _leaves(self) -> Iterator[Constraint]:
        """The sets, with those of an intersection in place of it."""
        for part in self.sets:
            if isinstance(part, Intersection):
                yield from part._leaves()
            else:
                yield part

    def _sorted(self, like: Tensor) -> tuple[Joined | None, list[Constraint]]:
        """Those that are lists of rows as one, and the others."""
        rows: list[Constraint] = []
        others: list[Constraint] = []
        for part in self._leaves():
            (others if part.as_polyhedron(like) is None else rows).append(part)
        return (Joined(tuple(rows)).as_bound() if rows else None), others

    def tensors(self) -> dict[str, Tensor]:
        """None of its own."""
        return {}

    def verified(self) -> tuple[Self, Tensor | None]:
        """What the sets ask for."""
        found = [part.verified() for part in self.sets]
        return self.changed(sets=tuple(part for part, _ in found)), merged(
            *(bad for _, bad in found)
        )

    def blank(self, n: int) -> Tensor:
        """Like that of the first set."""
        return self.sets[0].blank(n)

    def _within(
        self, ask: Callable[[Constraint], Constraint | None], values: dict[str, Tensor]
    ) -> Self | None:
        parts = [ask(part) for part in self.sets]
        if any(part is None for part in parts):
            return None
        return self.changed(sets=tuple(parts))

    def rows(self, index: Tensor) -> Constraint | None:
        """Of all sets."""
        return self._within(lambda part: part.rows(index), {})

    def replace_rows(self, bad: Tensor) -> Self:
        """In all sets."""
        return self._within(lambda part: part.replace_rows(bad), {}) or self

    def float32(self) -> Self:
        """All sets."""
        return self._within(lambda part: part.float32(), {}) or self

    # what a set writes

    def start(self, like: Tensor) -> Tensor:
        """The point next to zero."""
        return self.project(torch.zeros_like(like))

    def vertex(self, g: Tensor) -> Tensor:
        """By the same steps as everything else here."""
        rows, others = self._sorted(g)
        if not others and rows is not None:
            return rows.vertex(g)
        return self._found(self._flat(g), g.detach().double(), g)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """There is none that depends on the parameters of the sets."""
        raise ValueError(
            "method: 'dfw' needs a soft vertex, which an Intersection does not have; use 'sqp', "
            "which 'auto' means here"
        )

    def lowest(self, g: Tensor) -> Tensor:
        """What the forces of the sets prove."""
        rows, others = self._sorted(g)
        if not others and rows is not None:
            return rows.lowest(g)
        slope = g.detach().double().reshape(-1, g.shape[-1])
        found = self._meet(self._flat(g), slope, g, LONG)[0]
        value = (slope * found.x).sum(-1) - found.members.gap(found.x, slope, found.forces)
        return value.to(g.dtype).reshape(g.shape[:-1])

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """Likewise."""
        rows, others = self._sorted(z)
        if not others and rows is not None:
            return rows.project(z)
        return self._found(self._eye(z), -z.detach().double(), z)

    def retract(self, x: Tensor) -> Tensor:
        """x between the bounds where all sets have that to rounding, otherwise the projection."""
        rows, _ = self._sorted(x)
        at = x.detach() if rows is None else rows.clipped(x.detach())
        allowed = 64 * torch.finfo(x.dtype).eps * at.abs().amax(-1)
        outside = self.violation(at) > allowed
        if not bool(outside.any()):
            return moved_to(x, at)
        return moved_to(x, torch.where(outside.unsqueeze(-1), self.project(at), at))

    def violation(self, x: Tensor) -> Tensor:
        """That of the set which is missed most."""
        return torch.stack([part.violation(x) for part in self.sets]).amax(0)

    def plain(self, *, fixed: bool = True) -> Plain | None:
        """That of the polyhedron, where all sets are."""
        sizes, like = set(), torch.empty(0)
        for part in self.sets:
            for name, tensor in part.tensors().items():
                about, like = table(type(part))[name], tensor
                if 0 < about.kind <= tensor.dim() and not about.apart:
                    sizes.add(tensor.shape[-1])
        if len(sizes) == 1:
            whole = self.bind((*sizes,), like.dtype, like.device).as_polyhedron(
                like.new_zeros(*sizes)
            )
            if whole is not None:
                return whole.plain(fixed=fixed)
        raise ValueError(
            "a point of several sets is found by a search that watches its own convergence; what "
            "has a fixed number of steps are intersections of polyhedra one of which has rows, and "
            "sets that are intersections themselves, such as L1Box and PlaneCut"
        )

    def diameter(self, n: int) -> Tensor:
        """No more than that of the smallest set."""
        return reduce(torch.minimum, [part.diameter(n) for part in self.sets])

    def minimised(self, P: Tensor, q: Tensor, like: Tensor, most: int) -> Minimum:
        """See `dfwlayer.constraints.composed.meeting`."""
        rows, others = self._sorted(like)
        if not others and rows is not None:
            return rows.minimised(P, q, like, most)
        n = like.shape[-1]
        found, units = self._meet(P.reshape(-1, n, n), q, like, most)
        lost = ~(found.exact | found.empty)
        if bool(lost.any()):  # a point of all sets is what is left to ask for
            near, _ = self._meet(self._eye(like), -found.x, like, LONG)
            found = found._replace(
                x=torch.where((lost & near.exact).unsqueeze(-1), near.x, found.x),
                empty=found.empty | (lost & near.empty),
            )
        none = torch.zeros_like(found.empty)
        size = found.x.abs().amax(-1) + 1e-300
        missed = found.members.missed(found.x) / size
        known = found.x, found.exact, found.empty, none, found.steps, missed
        return _Minimum(*known, self, found, units)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> Face:
        """The faces of all sets, given the forces of which −g is the sum.

        They are those of the projection of x − g, which at a solution is x.
        """
        rows, others = self._sorted(x)
        if not others and rows is not None:
            return rows.face(x, g, scale)
        n = x.shape[-1]
        at = x.detach().double().reshape(-1, n)
        slope = g.detach().double().reshape(-1, n)
        unit = (slope.abs().amax(-1, keepdim=True) / at.abs().amax(-1, keepdim=True)).clamp(
            1e-100, 1e100
        )
        found, units = self._meet(self._eye(x), slope / unit - at, x, LONG)
        found = found._replace(forces=found.forces.times(unit))
        noise = 64 * torch.finfo(x.dtype).eps * slope.abs().amax(-1)
        if scale is not None:
            noise = torch.maximum(noise, scale.noise.double().amax(-1).reshape(-1))
        return self.stacked(x, found, units, noise)

    def stacked(self, x: Tensor, found: Meeting, units: Units, noise: Tensor) -> StackedFace:
        """The face at x (..., n); multipliers below their noise (B,) count as zero.

        A force that is short of what would hold x by little more than noise leaves x where it is,
        off what would hold it: slack counts as a force, by the largest force over the largest x.
        """
        rows, others = self._sorted(x)
        lost = found.empty.unsqueeze(-1)
        own = [torch.where(lost, 0, y).to(x.dtype).reshape(x.shape) for y in found.forces.sets]
        size, far = noise.reshape(*x.shape[:-1], 1).to(x.dtype), x.detach().abs().amax(-1, True)
        most = reduce(torch.maximum, [y.abs().amax(-1, keepdim=True) for y in own], 0 * size)
        scale = Scale(torch.where(far > 0, most / or_one(far), 0), size)
        seen = [Seen.of(part) for part in others]
        with torch.no_grad():
            faces: list[Face] = [
                part.face(x, -force, scale) for part, force in zip(seen, own, strict=True)
            ]
            if rows is not None:
                faces.insert(0, face_of_answer(rows, _answer(found, units), x, noise))
                seen.insert(0, Seen(rows, None))
                own.insert(0, torch.zeros_like(x))
        return StackedFace.of(tuple(seen), faces, own, x)

    def _meet(self, P: Tensor, q: Tensor, like: Tensor, most: int) -> tuple[Meeting, Units]:
        """What was found, and the units of the rows."""
        rows, others = self._sorted(like)
        with torch.no_grad():
            listed = None if rows is None else rows.linear(like)
            assert not isinstance(listed, Thin)  # rows of polyhedra that were merged are dense
            program, units = program_of(P, q.reshape(-1, like.shape[-1]), listed)
            members = Members(tuple(Seen.wide(part) for part in others), program)
            return meet(members, most), units

    @staticmethod
    def _eye(like: Tensor) -> Tensor:
        return torch.eye(like.shape[-1], dtype=torch.float64, device=like.device).unsqueeze(0)

    @staticmethod
    def _flat(like: Tensor) -> Tensor:
        n = like.shape[-1]
        return torch.zeros(1, n, n, dtype=torch.float64, device=like.device)

    def _found(self, P: Tensor, q: Tensor, like: Tensor) -> Tensor:
        found, _ = self._meet(P, q, like, LONG)
        x = torch.where(found.empty.unsqueeze(-1), torch.nan, found.x)
        return x.to(like.dtype).reshape(like.shape)


@dataclass(frozen=True)
class _Minimum(Minimum):
    constraint: Intersection
    found: Meeting
    units: Units

    def gap(self, x: Tensor, gradient: Tensor) -> Tensor:
        found = self.found.members.gap(x, gradient, self.found.forces).clamp_min(0)
        return torch.where(torch.isnan(found), torch.inf, found)

    def face(self, x: Tensor, noise: Tensor) -> StackedFace:
        return self.constraint.stacked(x, self.found, self.units, noise)


def _answer(found: Meeting, units: Units) -> Answer:
    """The multipliers of the rows in the units that these were given in."""
    forces = found.forces
    rows = forces.rows.clamp_min(0) / units.rows
    z = torch.cat((rows, forces.bounds.clamp_min(0), (-forces.bounds).clamp_min(0)), -1)
    none = torch.zeros_like(found.empty)
    missed = torch.zeros_like(found.x[:, 0])
    nu = forces.equations / units.equations
    known = found.exact, found.empty, none, found.steps, missed
    return Answer(found.x, nu, z, z > 0, *known)
