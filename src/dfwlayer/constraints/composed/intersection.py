"""The points that several sets have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.constraints.composed.meeting import Meeting, Seen, gap_of, meet
from dfwlayer.constraints.minimum import Minimum
from dfwlayer.constraints.parameters import merged, table
from dfwlayer.constraints.plain import Plain
from dfwlayer.constraints.polyhedra.linear_face import saddle_system
from dfwlayer.constraints.polyhedra.polyhedron import LinearSet, Polyhedron
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.rows import column
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.tensors import filled, tensors_in

if TYPE_CHECKING:
    from dfwlayer.linalg.face_system import FaceSystem
    from dfwlayer.objectives.base import Objective

__all__ = ["Intersection"]

LONG = 10**6


@dataclass(frozen=True, init=False)
class Intersection(Constraint):
    """S_1 ∩ … ∩ S_m, of sets of the library over the same variable.

    Where all are polyhedra without an ℓ1 norm (`Polyhedron`, `Box`, `Simplex`, `CappedSimplex`, …)
    they become one `Polyhedron`. Otherwise each takes part with its own projection and faces; sets
    whose faces are not aligned with the axes, such as balls of matrices, then end with the few
    digits that alternating projections give, and the gap says how many. Where the sets have no
    point in common the problem ends with status INFEASIBLE, and x is NaN.

    The default method is then "sqp".

    Args:
        sets: S_1 … S_m, any sets, each with its own parameters.

    """

    sets: tuple[Constraint, ...]

    def __init__(self, *sets: Constraint) -> None:
        for i, part in enumerate(sets):
            if not isinstance(part, Constraint):
                raise ValueError(
                    f"sets[{i}]: expected a set such as LpBall, got {type(part).__name__}"
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

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """The bound sets, those of linear rows as one polyhedron."""
        bound = [part.bind(shape, dtype, device) for part in self.sets]
        flat: list[Constraint] = []
        for part in bound:
            flat += part.sets if isinstance(part, Intersection) else (part,)
        like = torch.empty(shape, dtype=dtype, device=device).flatten()
        if len(flat) == 1:
            return flat[0]
        linear = [part.as_polyhedron(like) for part in flat]
        rows = [part for part in linear if isinstance(part, Polyhedron)]
        if len(rows) == len(flat):
            return reduce(_joined, rows)
        # beside others, a set keeps its own projection, and lists of rows become one
        lists = [part.as_polyhedron(like) for part in flat if isinstance(part, LinearSet)]
        others = [part for part in flat if not isinstance(part, LinearSet)]
        joined = (reduce(_joined, lists),) if lists else ()
        return self.as_bound(sets=(*joined, *others))

    def tensors(self) -> dict[str, Tensor]:
        """None of its own."""
        return {}

    def verified(self) -> tuple[Self, Tensor | None]:
        """What the sets ask for."""
        found = [part.verified() for part in self.sets]
        return self.changed(sets=tuple(part for part, _ in found)), merged(
            *(bad for _, bad in found)
        )

    def is_plain(self, like: Tensor) -> bool:
        """There is no normal form."""
        return False

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
        P = torch.zeros(1, g.shape[-1], g.shape[-1], dtype=torch.float64, device=g.device)
        return self._found(P, g.detach().double(), g)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """There is none that depends on the parameters of the sets."""
        raise ValueError(
            "method: 'dfw' needs a soft vertex, which an Intersection does not have; use 'sqp', "
            "which 'auto' means here"
        )

    def lowest(self, g: Tensor) -> Tensor:
        """What the forces of the sets prove."""
        slope = g.detach().double().reshape(-1, g.shape[-1])
        P = slope.new_zeros(1, g.shape[-1], g.shape[-1])
        found = meet(self._wide(), P, slope, LONG)
        gap = gap_of(self._wide(), found.x, slope, found.forces)
        value = (slope * found.x).sum(-1) - gap
        return value.to(g.dtype).reshape(g.shape[:-1])

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """Likewise."""
        eye = torch.eye(z.shape[-1], dtype=torch.float64, device=z.device).unsqueeze(0)
        return self._found(eye, -z.detach().double(), z)

    def retract(self, x: Tensor) -> Tensor:
        """x where all sets have it to rounding, otherwise the projection."""
        at = x.detach()
        allowed = 64 * torch.finfo(x.dtype).eps * at.abs().amax(-1)
        outside = self.violation(at) > allowed
        if not bool(outside.any()):
            return x
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
            whole = self.bind((*sizes,), like.dtype, like.device)
            if not isinstance(whole, Intersection):
                return whole.plain(fixed=fixed)
        raise ValueError(
            "a point of several sets is found by a search that watches its own convergence; what "
            "has a fixed number of steps are intersections of polyhedra one of which has rows, and "
            "sets that are intersections themselves, such as L1Box and PlaneCut"
        )

    def diameter(self, n: int) -> Tensor:
        """No more than that of the smallest set."""
        return reduce(torch.minimum, [part.diameter(n) for part in self.sets])

    def minimised(self, P: Tensor, q: Tensor, like: Tensor, most: int) -> _Minimum:
        """See `dfwlayer.constraints.composed.meeting`."""
        n = like.shape[-1]
        found = meet(self._wide(), P.reshape(-1, n, n), q, most)
        lost = ~(found.exact | found.empty)
        if bool(lost.any()):  # a point of all sets is what is left to ask for
            eye = torch.eye(n, dtype=q.dtype, device=q.device).unsqueeze(0)
            near = meet(self._wide(), eye, -found.x, LONG)
            found = found._replace(
                x=torch.where((lost & near.exact).unsqueeze(-1), near.x, found.x),
                empty=found.empty | (lost & near.empty),
            )
        none = torch.zeros_like(found.empty)
        size = found.x.abs().amax(-1) + 1e-300
        missed = reduce(torch.maximum, [part.violation(found.x) for part in self._wide()]) / size
        known = found.x, found.exact, found.empty, none, found.steps, missed
        return _Minimum(*known, self, found)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> StackedFace:
        """The faces of all sets, given the forces of which −g is the sum.

        They are those of the projection of x − g, which at a solution is x.
        """
        n = x.shape[-1]
        at = x.detach().double().reshape(-1, n)
        slope = g.detach().double().reshape(-1, n)
        unit = (slope.abs().amax(-1, keepdim=True) / at.abs().amax(-1, keepdim=True)).clamp(
            1e-100, 1e100
        )
        eye = torch.eye(n, dtype=at.dtype, device=at.device).unsqueeze(0)
        found = meet(self._wide(), eye, slope / unit - at, LONG)
        forces = [force * unit for force in found.forces]
        return self.stacked(x, forces, scale)

    def stacked(self, x: Tensor, forces: Sequence[Tensor], scale: Scale | None) -> StackedFace:
        """The face at x (..., n) with the forces of the sets (B, n)."""
        own = [force.to(x.dtype).reshape(x.shape) for force in forces]
        seen = tuple(Seen.of(part) for part in self.sets)
        with torch.no_grad():
            faces = [part.face(x, -force, scale) for part, force in zip(seen, own, strict=True)]
        return StackedFace.of(seen, faces, x)

    def _wide(self) -> tuple[Seen, ...]:
        """The sets in double precision, without autograd."""
        return tuple(Seen.of(_in_double(part)) for part in self.sets)

    def _found(self, P: Tensor, q: Tensor, like: Tensor) -> Tensor:
        found = meet(self._wide(), P, q.reshape(-1, like.shape[-1]), LONG)
        x = torch.where(found.empty.unsqueeze(-1), torch.nan, found.x)
        return x.to(like.dtype).reshape(like.shape)


@dataclass(frozen=True)
class _Minimum(Minimum):
    constraint: Intersection
    found: Meeting

    def gap(self, x: Tensor, gradient: Tensor) -> Tensor:
        found = gap_of(self.constraint._wide(), x, gradient, self.found.forces).clamp_min(0)
        return torch.where(torch.isnan(found), torch.inf, found)

    def face(self, x: Tensor, noise: Tensor) -> StackedFace:
        n = x.shape[-1]
        size = noise.reshape(*x.shape[:-1], 1).to(x.dtype)
        scale = Scale(torch.zeros_like(size), size)
        forces = [torch.where(self.empty.unsqueeze(-1), 0, y) for y in self.found.forces]
        return self.constraint.stacked(x.reshape(*x.shape[:-1], n), forces, scale)


@dataclass(frozen=True)
class StackedFace(Face):
    """The faces of several sets at one point; see `dfwlayer.constraints.Face`."""

    sets: tuple[Seen, ...]
    faces: tuple[Face, ...]
    origin: Tensor  # the point the faces were found at
    x: Tensor
    multiplier: Tensor  # (..., m), of all faces

    @classmethod
    def of(cls, sets: tuple[Seen, ...], faces: Sequence[Face], x: Tensor) -> StackedFace:
        """Of faces that are aligned with the axes."""
        lead = x.shape[:-1]
        each = [column(face.multiplier, x).expand(*lead, len(face.normals)) for face in faces]
        return cls(sets, tuple(faces), x, x, torch.cat(each, -1))

    @property
    def free(self) -> Tensor | None:
        """What no set pins, None where a face is not aligned with the axes."""
        masks = [face.free for face in self.faces]
        whole = [mask for mask in masks if mask is not None]
        return reduce(torch.logical_and, whole) if len(whole) == len(masks) else None

    @property
    def normals(self) -> tuple[Tensor, ...]:
        """Those of all faces, on what is free."""
        return tuple(self.restrict(normal) for face in self.faces for normal in face.normals)

    @property
    def bends(self) -> bool:
        return any(face.bends for face in self.faces)

    def curvature(self, v: Tensor) -> Tensor:
        """The sum."""
        bent = [face.curvature(v) for face in self.faces if face.bends]
        return sum(bent, torch.zeros_like(v))

    def curvature_diagonal(self) -> Tensor | None:
        """The sum, None where one is none."""
        each = [face.curvature_diagonal() for face in self.faces if face.bends]
        whole = [diagonal for diagonal in each if diagonal is not None]
        return sum(whole, torch.zeros_like(self.x)) if len(whole) == len(each) else None

    def force(self) -> Tensor:
        """The sum."""
        return sum((face.force() for face in self._moved(self.x)), torch.zeros_like(self.x))

    def excess(self) -> Tensor:
        """Of all faces, in the order of the normals; what one set pins the others see move."""
        x = self.x if self.free is None else torch.where(self.free, self.x, self.pinned())
        return torch.cat([face.excess() for face in self._moved(x)], -1)

    def pinned(self) -> Tensor:
        """Of the first set that pins a coordinate."""
        out, left = torch.zeros_like(self.x), torch.ones_like(self.x, dtype=torch.bool)
        for part, face in zip(self.sets, self._moved(self.x), strict=True):
            if face.free is not None:
                out = torch.where(left & ~face.free, part.outside(face.pinned()), out)
                left = left & face.free
        return out

    def system(self, objective: Objective) -> FaceSystem | None:
        """By one factorisation."""
        return saddle_system(objective, self)

    def _moved(self, x: Tensor) -> tuple[Face, ...]:
        """The faces with another x and the multipliers of this one."""
        if x is self.origin and all(part.centre is None for part in self.sets):
            return self.faces
        counts = [len(face.normals) for face in self.faces]
        each = torch.split(self.multiplier, counts, -1)
        parts: Any = zip(self.sets, self.faces, each, strict=True)
        return tuple(replace(face, x=part.inside(x), multiplier=m) for part, face, m in parts)


def _joined(a: Polyhedron, b: Polyhedron) -> Polyhedron:
    """Both lists of rows, and the narrower bounds."""

    def stacked(first: Any, second: Any, dim: int) -> Any:
        if first is None or second is None:
            return second if first is None else first
        wide = max(first.dim(), second.dim())
        parts = [part if part.dim() == wide else part.unsqueeze(0) for part in (first, second)]
        count = max(len(part) for part in parts) if wide + dim > 0 else 1
        if wide > -dim:
            parts = [part.expand(count, *part.shape[1:]) for part in parts]
        return torch.cat(parts, dim)

    def tighter(first: Any, second: Any, choose: Callable[[Tensor, Tensor], Tensor]) -> Any:
        if first is None or second is None:
            return second if first is None else first
        return choose(first, second)

    return a.as_bound(
        G=stacked(a.G, b.G, -2),
        h=stacked(a.h, b.h, -1),
        A=stacked(a.A, b.A, -2),
        b=stacked(a.b, b.b, -1),
        lower=tighter(a.lower, b.lower, torch.maximum),
        upper=tighter(a.upper, b.upper, torch.minimum),
    )


def _in_double(part: Constraint) -> Constraint:
    """A bound set with tensors in double precision, as constants."""
    tensors = tensors_in(part, sparse=False)
    wide = (t.detach().double() if t.is_floating_point() else t for t in tensors)
    found: Constraint = filled(part, wide)
    return found
