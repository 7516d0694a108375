"""A product of sets: each over its own block of consecutive coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from dfwlayer.arguments import as_sizes
from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.constraints.composed.beside import Crossed, Leaf, beside, layers_of, told_apart
from dfwlayer.constraints.composed.shifted import Shifted
from dfwlayer.constraints.parameters import merged
from dfwlayer.constraints.plain import Plain, PlainProduct
from dfwlayer.constraints.polyhedra.box import Box
from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron
from dfwlayer.constraints.region import Block, Region
from dfwlayer.constraints.relaxation import Relaxation
from dfwlayer.ops.rows import common_shape
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.tensors import SEQUENCES

__all__ = ["Product"]


@dataclass(frozen=True)
class Product(Constraint):
    """S_1 × … × S_m: the first block of the variable in S_1, the next one in S_2, and so on.

    Args:
        sets: S_1 … S_m, any sets, each with its own parameters.
        sizes: How many coordinates each one has, or, for a set of matrices, their shape.

    """

    sets: Sequence[Constraint]
    sizes: Sequence[int | tuple[int, ...]]

    def __post_init__(self) -> None:
        for name, value in (("sets", self.sets), ("sizes", self.sizes)):
            if not isinstance(value, SEQUENCES):
                raise ValueError(
                    f"{name}: expected a list with one for each block, got {type(value).__name__}"
                )
        sets, sizes = tuple(self.sets), tuple(self.sizes)
        if not sets or len(sets) != len(sizes):
            raise ValueError(
                f"sizes: expected one for each of the sets, got {len(sizes)} for {len(sets)} sets"
            )
        for i, part in enumerate(sets):
            if not isinstance(part, Constraint):
                raise ValueError(
                    f"sets[{i}]: expected a set such as LpBall, got {type(part).__name__}"
                )
        shapes = []
        for i, size in enumerate(sizes):
            entries = size if isinstance(size, SEQUENCES) else (size,)
            shape = as_sizes(f"sizes[{i}]", entries, "a positive integer or a shape")
            shapes.append(shape if isinstance(size, SEQUENCES) else shape[0])
        object.__setattr__(self, "sets", sets)
        object.__setattr__(self, "sizes", tuple(shapes))

    @property
    def preferred_method(self) -> str:
        """That of the first set which prefers one."""
        wishes = (part.preferred_method for part in self.sets)
        return next((wish for wish in wishes if wish != "auto"), "auto")

    def leads(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Those of the sets."""
        self._check(shape)
        return {
            f"sets[{i}]: {name}": lead
            for i, (part, own) in enumerate(zip(self.sets, self._shapes, strict=True))
            for name, lead in part.leads(own).items()
        }

    @property
    def deep(self) -> bool:
        """Of any of the sets."""
        return any(part.deep for part in self.sets)

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Constraint:
        """Each of the sets over vectors."""
        sets = []
        for i, (part, own) in enumerate(zip(self.sets, self._shapes, strict=True)):
            with _named(i):
                sets.append(part.flattened(own, lead))
        return self.changed(sets=tuple(sets), sizes=tuple(self._counts))

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """The product of the bound sets, around the centres of those that have one."""
        self._check(shape)
        bound = []
        for i, (part, own) in enumerate(zip(self.sets, self._shapes, strict=True)):
            with _named(i):
                bound.append(part.bind(own, dtype, device))
        return self._of_bound(bound, shape, dtype, device)

    def _of_bound(
        self,
        bound: Sequence[Constraint],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Constraint:
        """Of sets that are bound already, moved to the centres of those that have one."""
        sets, centres = [], []
        for part, count in zip(bound, self._counts, strict=True):
            centre = torch.zeros(count, dtype=dtype, device=device)
            while (seen := part.centred()) is not None:
                part, own_centre = seen
                centre = centre + own_centre
            sets.append(part)
            centres.append(centre)
        whole: Constraint
        if any(part.preferred_method == "sqp" for part in sets):
            whole = self._met(sets, shape, dtype, device)
        else:
            whole = super(Product, self.changed(sets=tuple(sets))).bind(shape, dtype, device)
        if all(part is own for part, own in zip(sets, bound, strict=True)):
            return whole
        lead = common_shape(*(c.shape[:-1] for c in centres))
        centre = torch.cat([c.expand(*lead, -1) for c in centres], -1)
        return Shifted(whole, centre).as_bound()

    def _met(
        self,
        sets: Sequence[Constraint],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Crossed:
        """The same as an intersection, where lists of rows, or intersections, are among the sets.

        What "sqp" asks of a set, these know for all coordinates at once only: each member limits
        some of the blocks and leaves the others open, and all rows are in members that have
        nothing else.
        """
        blank = [torch.zeros(count, dtype=dtype, device=device) for count in self._counts]
        lists, others = told_apart(sets, self._shapes, blank)
        about = shape, dtype, device
        free = [Leaf(Box().bind((count,), dtype, device), {}) for count in self._counts]
        flat, bent = layers_of(lists, free), layers_of(others, free)
        members = [super(Product, self.changed(sets=own)).bind(*about) for own, _ in flat]
        members += [self._of_bound(own, *about) for own, _ in bent]
        names = tuple(self.changed(sets=tuple(sets)).priced(shape))
        return Crossed(tuple(members), names, tuple(known for _, known in flat + bent)).as_bound()

    def as_polyhedron(self, like: Tensor) -> Polyhedron | None:
        """The rows of all sets, each in its own block, where the sets are nothing else."""
        blocks = zip(self.sets, self._split(like), strict=True)
        parts = [found for part, own in blocks if (found := part.as_polyhedron(own)) is not None]
        return beside(parts, self._counts, like) if len(parts) == len(self.sets) else None

    def normal_form(self, n: int) -> Sequence[Block] | None:
        """The blocks of the sets, one after the other."""
        blocks: list[Block] = []
        for part, count in zip(self.sets, self._counts, strict=True):
            form = part.normal_form(count)
            if form is None:
                return None
            blocks += form
        return blocks

    def is_plain(self, like: Tensor) -> bool:
        """All of the sets."""
        if sum(self._counts) != like.shape[-1]:
            return False
        parts = zip(self.sets, torch.split(like, self._counts, -1), strict=True)
        return all(part.is_plain(own) for part, own in parts)

    def priced(self, shape: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...] | None]]:
        """Those of the sets, with the number of the set in front: "0.radius"."""
        return {
            f"{i}.{name}": about
            for i, (part, own) in enumerate(zip(self.sets, self._shapes, strict=True))
            for name, about in part.priced(own).items()
        }

    def verified(self) -> tuple[Self, Tensor | None]:
        """What each set asks for."""
        sets, flags = [], []
        for i, part in enumerate(self.sets):
            with _named(i):
                part, flagged = part.verified()
            sets.append(part)
            flags.append(flagged)
        return self.changed(sets=tuple(sets)), merged(*flags)

    def scaled(self, factor: Tensor) -> Constraint | None:
        """Every set scaled, None where one cannot be."""
        return self._within(lambda part: part.scaled(factor), {})

    def _within(
        self, ask: Callable[[Constraint], Constraint | None], values: dict[str, Tensor]
    ) -> Self | None:
        sets = tuple(part for part in map(ask, self.sets) if part is not None)
        return self.changed(sets=sets) if len(sets) == len(self.sets) else None

    def start(self, like: Tensor) -> Tensor:
        """Where the sets start."""
        return self._each(lambda part, block: part.start(block), like)

    def unbounded(self) -> Tensor | None:
        """Those of the sets."""
        return self._joined([part.unbounded() for part in self.sets])

    def open_ended(self, g: Tensor) -> Tensor | None:
        """Those of the sets."""
        blocks = zip(self.sets, self._split(g), strict=True)
        return self._joined([part.open_ended(block) for part, block in blocks])

    def relaxation(self, x: Tensor, g: Tensor) -> Relaxation | None:
        """The product of the sets' own, each plane in its own block; None where none has one."""
        blocks = zip(self.sets, self._split(x), self._split(g), strict=True)
        found = [part.relaxation(own, slope) for part, own, slope in blocks]
        if all(each is None for each in found):
            return None
        sets = tuple(
            part if each is None else each.constraint
            for part, each in zip(self.sets, found, strict=True)
        )
        known = [each for each in found if each is not None]
        ends = zip(found, [0, *accumulate(self._counts)], self._counts, strict=False)
        n = x.shape[-1]
        normals = tuple(
            torch.nn.functional.pad(a.expand(*x.shape[:-1], count), (first, n - first - count))
            for each, first, count in ends
            if each is not None
            for a in each.normals
        )
        multiplier = torch.cat([each.multiplier for each in known], -1)
        excess = torch.cat([each.excess for each in known], -1)
        return Relaxation(self.changed(sets=sets), normals, multiplier, excess)

    def _joined(self, masks: Sequence[Tensor | None]) -> Tensor | None:
        """Masks of the blocks as one, None where there is none."""
        if all(mask is None for mask in masks):
            return None
        device = next(mask.device for mask in masks if mask is not None)
        whole = [
            torch.zeros(count, dtype=torch.bool, device=device) if mask is None else mask
            for mask, count in zip(masks, self._counts, strict=True)
        ]
        lead = common_shape(*(mask.shape[:-1] for mask in whole))
        return torch.cat([m.expand(*lead, c) for m, c in zip(whole, self._counts, strict=True)], -1)

    def vertex(self, g: Tensor) -> Tensor:
        """A vertex in each block."""
        return self._each(lambda part, block: part.vertex(block), g)

    def lowest(self, g: Tensor) -> Tensor:
        """The sum of the sets' own."""
        blocks = zip(self.sets, self._split(g), strict=True)
        return torch.stack([part.lowest(block) for part, block in blocks]).sum(0)

    def lowest_terms(self, g: Tensor) -> Tensor | None:
        """The sum of the sets' own."""
        blocks = zip(self.sets, self._split(g), strict=True)
        found = [part.lowest_terms(block) for part, block in blocks]
        known = [terms for terms in found if terms is not None]
        return torch.stack(known).sum(0) if known else None

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """A soft vertex in each block."""
        return self._each(lambda part, block: part.soft_vertex(block, temperature), g)

    def violation(self, x: Tensor) -> Tensor:
        """The largest one."""
        blocks = zip(self.sets, self._split(x), strict=True)
        return torch.stack([part.violation(block) for part, block in blocks]).amax(0)

    def retract(self, x: Tensor) -> Tensor:
        """Block by block."""
        return self._each(lambda part, block: part.retract(block), x)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """Block by block."""
        if near is None:
            return self._each(lambda part, block: part.project(block), z)
        return self._each(lambda part, block, guess: part.project(block, guess), z, near)

    def plain(self, *, fixed: bool = True) -> Plain | None:
        """Those of the sets, None where one has none."""
        parts = []
        for i, (part, shape) in enumerate(zip(self.sets, self._shapes, strict=True)):
            with _named(i):
                flat = part.flattened(shape, ()) if len(shape) > 1 else part
                parts.append(flat.plain(fixed=fixed))
        known = tuple(part for part in parts if part is not None)
        return PlainProduct(known, tuple(self._counts)) if len(known) == len(parts) else None

    def diameter(self, n: int) -> Tensor:
        """The root of the sum of squares."""
        each = [part.diameter(c) for part, c in zip(self.sets, self._counts, strict=True)]
        return reduce(torch.hypot, each)

    def region(self, like: Tensor) -> Region | None:
        """Those of the sets beside each other, None where one has none."""
        blocks = zip(self.sets, self._split(like), strict=True)
        found = [region for part, own in blocks if (region := part.region(own)) is not None]
        return Region.product(found) if len(found) == len(self.sets) else None

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> ProductFace:
        """The product of the faces."""
        ends = [0, *accumulate(self._counts)]
        scales = [None if scale is None else scale.block(i, j) for i, j in pairwise(ends)]
        blocks = zip(self.sets, self._split(x), self._split(g), scales, strict=True)
        faces = tuple(part.face(own, slope, each) for part, own, slope, each in blocks)
        multipliers = [
            torch.as_tensor(face.multiplier, dtype=x.dtype, device=x.device).expand(
                *x.shape[:-1], len(face.normals)
            )
            for face in faces
        ]
        return ProductFace(faces, self._counts, x, x, torch.cat(multipliers, -1))

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(size if isinstance(size, tuple) else (size,) for size in self.sizes)

    @property
    def _counts(self) -> list[int]:
        return [math.prod(shape) for shape in self._shapes]

    def _check(self, shape: tuple[int, ...]) -> None:
        if math.prod(shape) != sum(self._counts):
            raise ValueError(
                f"sizes: {list(self.sizes)} are {sum(self._counts)} coordinates, expected the "
                f"{math.prod(shape)} of the variable, whose shape is {shape}"
            )

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return _blocks(x, self._counts)

    def _each(self, ask: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """What each set answers for its blocks of the vectors, as one vector."""
        blocks = zip(self.sets, *(self._split(v) for v in vectors), strict=True)
        return torch.cat([ask(part, *own) for part, *own in blocks], -1)


@dataclass(frozen=True)
class ProductFace(Face):
    """A product of faces; see `dfwlayer.constraints.Face`."""

    faces: tuple[Face, ...]
    counts: list[int]
    origin: Tensor  # the point the faces were found at
    x: Tensor
    multiplier: Tensor  # (..., m)

    @property
    def free(self) -> Tensor | None:
        """The masks, None where a face has none."""
        masks = [face.free for face in self.faces]
        whole = [mask for mask in masks if mask is not None]
        return torch.cat(whole, -1) if len(whole) == len(masks) else None

    def restrict(self, v: Tensor) -> Tensor:
        """Block by block."""
        return self._each(lambda face, own: face.restrict(own), v)

    @property
    def bends(self) -> bool:
        return any(face.bends for face in self.faces)

    @property
    def normals(self) -> tuple[Tensor, ...]:
        """Those of the faces, zero in the other blocks."""
        before = [0, *accumulate(self.counts)]
        n = before[-1]
        return tuple(
            torch.nn.functional.pad(normal, (first, n - first - count))
            for face, first, count in zip(self.faces, before[:-1], self.counts, strict=True)
            for normal in face.normals
        )

    def curvature(self, v: Tensor) -> Tensor:
        """Block by block."""
        return self._each(
            lambda face, own: face.curvature(own) if face.bends else torch.zeros_like(own), v
        )

    def bent(self, u: Tensor) -> Tensor:
        """Block by block."""
        return self._each(lambda face, own: face.bent(own), u)

    def curvature_diagonal(self) -> Tensor | None:
        """The faces' own, None where one has none."""
        each = [
            face.curvature_diagonal() if face.bends else torch.zeros_like(own)
            for face, own in zip(self.faces, _blocks(self.x, self.counts), strict=True)
        ]
        whole = [diagonal for diagonal in each if diagonal is not None]
        return torch.cat(whole, -1) if len(whole) == len(each) else None

    def force(self) -> Tensor:
        """Of all faces."""
        return torch.cat([face.force() for face in self._moved()], -1)

    def excess(self) -> Tensor:
        """Of all faces, in the order of the normals."""
        return torch.cat([face.excess() for face in self._moved()], -1)

    def pinned(self) -> Tensor:
        """Of all faces."""
        return torch.cat([face.pinned() for face in self._moved()], -1)

    def _moved(self) -> tuple[Face, ...]:
        """The faces with the x and the multipliers of this one."""
        if self.x is self.origin:
            return self.faces
        counts = [len(face.normals) for face in self.faces]
        parts: Any = zip(
            self.faces,
            _blocks(self.x, self.counts),
            _blocks(self.multiplier, counts),
            strict=True,
        )
        return tuple(replace(face, x=x, multiplier=each) for face, x, each in parts)

    def _each(self, ask: Callable[[Face, Tensor], Tensor], v: Tensor) -> Tensor:
        blocks = zip(self.faces, _blocks(v, self.counts), strict=True)
        return torch.cat([ask(face, own) for face, own in blocks], -1)


def _blocks(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:  # (..., n)
    """Consecutive coordinates, so many at a time."""
    first = [0, *accumulate(counts)]
    return tuple(x[..., i:j] for i, j in pairwise(first))


@contextmanager
def _named(i: int) -> Iterator[None]:
    """Errors of the i-th set say so."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"sets[{i}]: {error}") from error
