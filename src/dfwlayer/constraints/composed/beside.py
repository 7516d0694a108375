"""Lists of rows and intersections over blocks of coordinates, as sets over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from operator import not_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.composed.intersection import Intersection
from dfwlayer.constraints.composed.joined import below
from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron
from dfwlayer.ops.rows import common_shape

__all__ = ["Crossed", "Leaf", "beside", "layers_of", "told_apart"]


class Leaf(NamedTuple):
    """A bound set that is no intersection, and what its prices are called in the set it is of."""

    constraint: Constraint
    names: Mapping[str, str]


@dataclass(frozen=True, init=False)
class Crossed(Intersection):
    """A product as an intersection: each member limits some of the blocks, others are open in it.

    Its prices have the names, and the order, of those of the product.
    """

    sets: tuple[Constraint, ...]
    names: tuple[str, ...]  # of all prices
    known_as: tuple[Mapping[str, str], ...]  # what those of each member are among them

    def __init__(
        self,
        sets: tuple[Constraint, ...],
        names: tuple[str, ...],
        known_as: tuple[Mapping[str, str], ...],
    ) -> None:
        super().__init__(*sets)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "known_as", known_as)

    def priced(self, shape: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...] | None]]:
        """Those of the members, by the names of the product."""
        found = {}
        for part, known_as in zip(self.sets, self.known_as, strict=True):
            about = part.priced(shape)
            found.update({name: about[own] for own, name in known_as.items()})
        return {name: found[name] for name in self.names}


def leaves_of(part: Constraint, shape: tuple[int, ...]) -> Iterator[Leaf]:
    """What a bound set over variables of this shape is an intersection of, maybe of itself only."""
    if isinstance(part, Crossed):
        yield from (Leaf(*pair) for pair in zip(part.sets, part.known_as, strict=True))
    elif isinstance(part, Intersection):
        for i, own in enumerate(part.sets):
            for leaf in leaves_of(own, shape):
                yield Leaf(leaf.constraint, {k: f"{i}.{name}" for k, name in leaf.names.items()})
    else:
        yield Leaf(part, {name: name for name in part.priced(shape)})


def told_apart(
    sets: Sequence[Constraint], shapes: Sequence[tuple[int, ...]], blank: Sequence[Tensor]
) -> tuple[list[list[Leaf]], list[list[Leaf]]]:
    """The leaves of bound sets that are lists of rows, and the others, for each set.

    ``blank`` is a vector of each.
    """
    lists, others = [], []
    for part, shape, like in zip(sets, shapes, blank, strict=True):
        leaves = [*leaves_of(part, shape)]
        rows = [leaf.constraint.as_polyhedron(like) is not None for leaf in leaves]
        lists.append([*compress(leaves, rows)])
        others.append([*compress(leaves, map(not_, rows))])
    return lists, others


def layers_of(
    blocks: Sequence[Sequence[Leaf]], free: Sequence[Leaf]
) -> list[tuple[tuple[Constraint, ...], dict[str, str]]]:
    """Products over all blocks that take one leaf of each, and the whole space where it has none.

    With the names of their prices, which start with the number of the block on both sides.
    """
    layers = []
    for some in zip_longest(*blocks):
        leaves = [own or space for own, space in zip(some, free, strict=True)]
        names = {
            f"{i}.{own}": f"{i}.{name}"
            for i, leaf in enumerate(leaves)
            for own, name in leaf.names.items()
        }
        layers.append((tuple(leaf.constraint for leaf in leaves), names))
    return layers


def beside(parts: Sequence[Polyhedron], counts: Sequence[int], like: Tensor) -> Polyhedron:
    """Of bound polyhedra with dense rows, over so many each of the coordinates of (..., n)."""
    n, first = like.shape[-1], 0
    sides, ends = [], []
    for part, count in zip(parts, counts, strict=True):
        own = like[..., first : first + count]
        A, b, G, h = part.rows_of(own)
        around = (first, n - first - count)
        sides.append((pad(A, around), b, pad(G, around), h))
        ends.append([end.expand(*end.shape[:-1], count) for end in part.bounds(own)])
        first += count
    every = [list(each) for each in zip(*sides, strict=True)]
    bounds = []
    for each in zip(*ends, strict=True):
        lead = common_shape(*(end.shape[:-1] for end in each))
        bounds.append(torch.cat([end.expand(*lead, -1) for end in each], -1))
    A, b, G, h = (below(each, kind) for each, kind in zip(every, (2, 1, 2, 1), strict=True))
    return Polyhedron(G, h, A, b, *bounds).as_bound()
