"""Programs without a feasible point: the best point among those that violate their rows least."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.engines.base import Arguments, bind
from dfwlayer.methods.base import Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.objectives.quadratic import Quadratic
from dfwlayer.solution import Solution, Status

if TYPE_CHECKING:
    from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron

__all__ = ["relaxed"]

Solve = Callable[[Objective, Constraint], Solution]

ROOM = 2.0**10  # units in the last place by which rows are widened, so that rounding leaves a point


def relaxed(run: Solve, arguments: Arguments, settings: Settings, found: Solution) -> Solution:
    """The solution with x, value and gap of the problems without a feasible point.

    Of all (x, s, t) with G x ≤ h + s, A x = b + t, s ≥ 0 and x within its bounds the one of least
    ‖s‖² + ‖t‖² tells how far the rows have to give way, in one way only; then f is minimised over
    the rows that gave way. Both are programs with gradients.
    """
    lost = found.status == Status.INFEASIBLE
    if not bool(lost.any()):
        return found
    task = bind(arguments, settings)
    objective = task.objective
    like = torch.empty(objective.shape, dtype=objective.dtype, device=objective.device).flatten()
    constraint = task.constraint.as_polyhedron(like)
    if constraint is None:
        raise ValueError(
            "on_infeasible: 'least-violation' is for sets of linear rows, such as Polyhedron, got "
            f"{type(arguments.constraint).__name__}"
        )
    index = lost.nonzero().squeeze(-1)
    if lost.dim():
        part, own = constraint.rows(index), objective.rows(index)
        constraint = None if part is None else part.as_polyhedron(like)
        assert constraint is not None and own is not None  # noqa: PT018
        objective = own
    count = len(index) if lost.dim() else None
    wider = _given_way(run, constraint, objective, count)
    again = run(objective, wider)
    shape = found.x.shape[1:] if lost.dim() else found.x.shape

    def put(old: Tensor, new: Tensor) -> Tensor:
        if not lost.dim():
            return new.reshape(old.shape)
        return old.index_copy(0, index, new.reshape(len(index), *old.shape[1:]))

    x = put(found.x, again.x.reshape(-1, *shape) if lost.dim() else again.x)
    failed = (again.status != Status.CONVERGED) & (again.status != Status.ROUNDING_FLOOR)
    status = torch.where(failed, again.status, int(Status.RELAXED))
    solution = Solution(
        x,
        put(found.value, again.value),
        put(found.gap, again.gap),
        put(found.num_steps, again.num_steps),
        put(found.status, status),
    )
    vars(solution)["_origin"] = _Both(found, again, put)
    return solution


class _Both(NamedTuple):
    """What may be asked later of problems of which some had to give way."""

    found: Solution
    again: Solution  # of those that had to, over the rows that gave way
    put: Callable[[Tensor, Tensor], Tensor]

    def multipliers(self, x: Tensor) -> dict[str, Tensor]:
        """Those of the rows as far as they gave way, for the others as they are."""
        own, other = self.found.multipliers, self.again.multipliers
        return {
            name: self.put(price, other[name]) if name in other else price
            for name, price in own.items()
        }

    def violation(self, x: Tensor) -> Tensor:
        """Of the rows as they were given."""
        found: Tensor = self.found._origin.violation(x)
        return found

    def proof(self, status: Tensor) -> dict[str, Tensor]:
        """That the rows could not be satisfied."""
        return self.found.proof


def _given_way(
    run: Solve, constraint: Polyhedron, objective: Objective, count: int | None
) -> Polyhedron:
    """The rows as far as they have to give way."""
    n = objective.shape[0]
    like = torch.zeros((*(() if count is None else (count,)), n)).to(objective.device)
    like = like.to(objective.dtype)
    A, b, G, h = constraint.rows_of(like)
    lower, upper = constraint.bounds(like)
    crossed = lower > upper
    middle = 0.5 * (lower + upper)
    lower, upper = torch.where(crossed, middle, lower), torch.where(crossed, middle, upper)
    lower, upper = lower.expand_as(like), upper.expand_as(like)
    lead, m, k = like.shape[:-1], G.shape[-2], A.shape[-2]

    def wide(rows: Tensor) -> Tensor:
        return rows.expand(*lead, *rows.shape[-2:])

    eye = torch.eye(m + k, dtype=like.dtype, device=like.device)
    aside = wide(-eye)
    endless = like.new_full((*lead, k), torch.inf)
    far = like.new_full((*lead, m), torch.inf)
    elastic = constraint.changed(
        G=torch.cat((wide(G), aside[..., :m, :]), -1),
        h=h.expand(*lead, m),
        A=torch.cat((wide(A), aside[..., m:, :]), -1),
        b=b.expand(*lead, k),
        lower=torch.cat((lower, torch.zeros_like(far), -endless), -1),
        upper=torch.cat((upper, far, endless), -1),
    )
    bend = torch.diag(torch.cat((like.new_zeros(n), like.new_ones(m + k))))
    give = run(Quadratic(bend, like.new_zeros(*lead, n + m + k)), elastic).x
    s, t = give[..., n : n + m], give[..., n + m :]
    eps = torch.finfo(like.dtype).eps
    finite = torch.where(torch.isfinite(h), h, 0).abs()
    room = ROOM * eps * (s.detach() + finite + give.detach()[..., :n].abs().amax(-1, keepdim=True))
    changes = {"lower": lower, "upper": upper}
    rows = {} if not m else {"G": wide(G), "h": h + s.clamp_min(0) + room}
    equations = {} if not k else {"A": wide(A), "b": b + t}
    return constraint.changed(**changes, **rows, **equations)
