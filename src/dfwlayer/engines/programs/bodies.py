"""Sets as Triton programs read them, and the programs for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from dfwlayer.constraints.region import Linear, Power, Round
from dfwlayer.engines.compiled.kernels.table import BUDGET
from dfwlayer.engines.programs.form import FlatForm, Form, tensors_of
from dfwlayer.engines.programs.kernels import (
    adjoint,
    ball,
    polyhedron,
    polyhedron_adjoint,
    power,
    projection,
    search,
)
from dfwlayer.engines.programs.launch import Strided, strided

__all__ = ["Body", "body_of"]


class Body(NamedTuple):
    """The sets, and the kernels for them."""

    search: Any
    adjoint: Any
    parts: tuple[Strided | None, ...]  # what describes them, None for what they have not
    widths: tuple[int, ...]  # how many strides each has
    needed: tuple[int, ...]  # of the parts, by the adjoint
    tensors: tuple[Tensor | None, ...]  # what a gradient may be asked for
    shapes: tuple[tuple[int, ...], ...]  # of what one problem has of each
    constants: dict[str, Any]  # what kernels are compiled for
    state: int  # how many numbers of a solution are kept
    keeps: bool = False  # the inverse on a face may be handed from the search to the adjoint
    counts: tuple[int, ...] = ()  # of rows of each kind
    rows: Mapping[int, slice] = MappingProxyType({})  # tensors of rows: where these are in `state`

    @property
    def ties(self) -> int:
        """Rows of all kinds."""
        return sum(self.counts)


def body_of(form: Form) -> Body | None:
    """The sets of these problems, None where no program is for them."""
    sets, n, like = form.sets, form.n, form.vector
    if isinstance(sets, Round | Power):
        return _ball(sets, n, like)
    if isinstance(sets, Linear):
        return _polyhedron(sets, n, like)
    return _polytope(sets, n, like)


def _polytope(sets: FlatForm, n: int, like: Tensor) -> Body | None:
    """Bounds, and at most two rows that tie the coordinates together."""
    if len(sets.bounds) > 1:
        return None
    (bounds,), rows = sets
    ties = [strided(part, 1, like) for row in rows for part in (row.slope, row.total)]
    missing = [None] * (4 - len(ties))
    parts = strided(bounds.lower, 1, like), strided(bounds.upper, 1, like), *ties, *missing
    kind = projection.NOTHING.value
    if rows:
        kind = (projection.BUDGET if rows[0].kind == BUDGET else projection.EQUATION).value
    return Body(
        search.search,
        adjoint.adjoint,
        parts,
        (2, 2, 2, 1, 2, 1),
        (2, 4),
        sets.tensors,
        ((n,), (n,), (n,), (), (n,), ()),
        {"KIND": kind, "CUT": len(rows) > 1},
        2 * n + 2,
        keeps=True,
    )


def _ball(sets: Round | Power, n: int, like: Tensor) -> Body:
    """A weight and a radius, and p where it is not 2."""
    values = sets.weight, sets.radius
    parts = tuple(strided(part, 1, like) for part in values)
    tensors, shapes = tensors_of(*values), ((n,), ())
    if isinstance(sets, Power):
        parts = *parts, strided(sets.p, 0, like)
        kernels, needed = (power.search, power.adjoint), (0, 1, 2)
        return Body(*kernels, parts, (2, 1, 1), needed, tensors, shapes, {}, 2 * n + 2)
    kernels = ball.search, ball.adjoint
    return Body(*kernels, parts, (2, 1), (0, 1), tensors, shapes, {}, 2 * n + 2)


def _polyhedron(sets: Linear, n: int, like: Tensor) -> Body:
    """Equations, inequalities and bounds."""
    k, g = (0 if rows is None else rows.shape[-2] for rows in (sets.A, sets.G))
    E, G = (None if rows is None else strided(rows, 2, like) for rows in (sets.A, sets.G))
    e, h, lower, upper = (
        strided(side, 1, like) for side in (sets.b, sets.h, sets.lower, sets.upper)
    )
    return Body(
        polyhedron.search,
        polyhedron_adjoint.adjoint,
        (E, e, G, h, lower, upper),
        (3, 2, 3, 2, 2, 2),
        (0, 2, 4, 5),
        (sets.G, *tensors_of(sets.h), sets.A, *tensors_of(sets.b, sets.lower, sets.upper)),
        ((g, n), (g,), (k, n), (k,), (n,), (n,)),
        {},
        2 * n + k + g + 1,
        False,
        (k, g),
        {0: slice(n + k, n + k + g), 2: slice(n, n + k)},
    )
