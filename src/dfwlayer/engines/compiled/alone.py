"""One problem, found and differentiated in arrays, for callers with an autograd node of their own.

A tensor operation takes longer than the arithmetic of a small problem. What stands around a solve
can be done in NumPy as well; then a whole layer is one node of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, from_numpy

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.region import Linear
from dfwlayer.engines.compiled.arrays import Array, Batch
from dfwlayer.engines.compiled.background import NotCompiledError, busy, mode, start
from dfwlayer.engines.compiled.kernels import outcome
from dfwlayer.engines.compiled.layout import Layout, Quadratics, lay_out, origin
from dfwlayer.engines.compiled.results import Results
from dfwlayer.engines.compiled.sets import sets_of
from dfwlayer.objectives.quadratic import Quadratic

__all__ = ["Alone", "located", "tensors_of"]


@dataclass(frozen=True)
class Alone:
    """The solution of a problem without a batch."""

    layout: Layout
    found: Results

    @property
    def x(self) -> Array:  # (n,)
        """The solution."""
        found: Array = self.layout.point(self.found.x).numpy()
        return found

    @property
    def multiplier(self) -> float:
        """Of the radius of a ball; other sets have theirs in an order of their own."""
        found: float = self.found.multipliers.item(0)
        return found

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the set was made of: its centre first, None for numbers."""
        return self.layout.tensors[2:]

    def gradients(self, asked: Sequence[bool], v: Array) -> list[Array | None] | None:
        """From v in x: those in q, and in the `tensors` that are asked for.

        A gradient w in q, which is minus the solution of the adjoint system, is all there is to
        know of f: that in any of its numbers is the derivative of ⟨w, ∇f(x)⟩. None where code is
        still to be compiled.
        """
        try:
            own = self.layout.gradients((False, True, *asked), self.found, from_numpy(v))
        except NotCompiledError as missing:
            start(missing)
            return None
        return [None if each is None else each.numpy() for each in own[1:]]


def located(
    P: Tensor | None,  # (n, n)
    q: Tensor,  # (n,)
    body: Constraint | Linear,
    tol: float,
    most: int,
    *,
    sets_of: Layout | None = None,
    asked: bool = True,
) -> Alone | None:
    """The solution for plain tensors in float64, None where tensor operations should look for it.

    Args:
        P: None for the identity.
        q: The linear term.
        body: The set, or rows and bounds that are known to fit.
        tol: As in `dfwlayer.solve`.
        most: Steps.
        sets_of: The layout of another problem over the same set, all of whose tensors are constant.
        asked: Whether gradients are going to be asked for.

    """
    if busy() or mode() == "off":
        return None
    if sets_of is not None:
        layout = replace(sets_of, objective=Quadratics.of(P, q, False, sets_of.n))
    else:
        laid = _laid(P, q, body)
        if laid is None or laid.batch is not None:
            return None
        layout = laid
    try:
        found = layout.search(origin(layout.n), tol, most)
    except NotCompiledError as missing:
        start(missing)
        return None
    code = found.codes.item(0)
    if code != outcome.SOLVED:
        # which multipliers hold x is of no interest where the set is constant, or nobody asks
        told = not asked or (code == outcome.TIED and sets_of is not None)
        if not told or code not in (outcome.TIED, outcome.SHARED):
            return None
        found.codes[0, 0] = outcome.SOLVED
    if not np.isfinite(found.values.item(0)):
        return None
    return Alone(layout, found)


def tensors_of(P: Tensor | None, q: Tensor, body: Constraint | Linear) -> tuple[Tensor | None, ...]:
    """Those of such a problem, as `Alone.tensors` tells them, and as autograd knows them."""
    laid = _laid(P, q, body)
    return () if laid is None else laid.tensors[2:]


def _laid(P: Tensor | None, q: Tensor, body: Constraint | Linear) -> Layout | None:
    if isinstance(body, Constraint):
        return lay_out(Quadratic(P, q), body)
    n = len(q)
    sets = sets_of((body,), n, Batch(q.dtype))
    if sets is None:
        return None
    return Layout(Quadratics.of(P, q, False, n), sets, None, n, None, q.dtype)
