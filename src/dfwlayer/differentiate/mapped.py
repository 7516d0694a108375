"""What solve() does inside of torch.func transforms and forward-mode automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dfwlayer.constraints import LpBall
from dfwlayer.constraints.base import Constraint
from dfwlayer.differentiate.expansion import Known
from dfwlayer.differentiate.transforms import derived, filled, has_derivatives, tensors_in
from dfwlayer.linalg.rows import common_shape
from dfwlayer.objectives import LeastSquares, Quadratic
from dfwlayer.objectives.base import Objective, common_batch
from dfwlayer.solution import Solution
from dfwlayer.step_size import StepSize

__all__ = [
    "Arguments",
    "check_no_others",
    "level",
    "one_batch",
    "ranks_of",
    "solve_transformed",
]

# dimensions of one problem's tensors; all of them may have a batch in front
RANKS: dict[type, dict[str, int]] = {
    Quadratic: {"P": 2, "q": 1},
    LeastSquares: {"A": 2, "b": 1},
    LpBall: {"radius": 0, "weight": 1},
}


class Arguments(NamedTuple):
    """The arguments of solve() that may hold tensors."""

    objective: Objective
    constraint: Constraint
    x0: Tensor | None
    step_size: StepSize | None


def solve_transformed(
    solve: Callable[..., Solution], arguments: Arguments, settings: dict[str, Any]
) -> Solution:
    """Solve on plain tensors, batched where a vmap asks for it, and attach the derivatives."""
    ranks = ranks_of(*arguments)
    tensors = tensors_in(arguments, sparse=False)
    constants = [t.detach() for t in tensors]
    # no_grad leaves forward mode as it is
    differentiable = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if differentiable:
        objective, constraint, _, _ = filled(arguments, iter(constants))
        check_no_others(objective, constraint, lambda: _value_at_zero(objective))
    call = _Call(solve, arguments, settings, ranks)
    x, value, gap, num_steps, status = derived(_Found(call), *level(constants, ranks))
    if differentiable:
        (x,) = derived(_Carried(call), x.detach(), *level(tensors, ranks))
    return Solution(x, value, gap, num_steps, status)


@dataclass(frozen=True)
class _Call:
    """A call of solve() with other tensors in its arguments."""

    solve: Callable[..., Solution]
    arguments: Arguments
    settings: dict[str, Any]
    ranks: tuple[int, ...] | None

    def __call__(
        self, tensors: Sequence[Tensor], known: Tensor | None = None, order: int | None = None
    ) -> Solution:
        """Solve, or, given an order, take a known solution and attach its derivatives."""
        lead: tuple[int, ...] | None = None
        if self.ranks is not None:
            if known is None:
                tensors, lead = one_batch(tensors, self.ranks)
            else:
                (known, *tensors), lead = one_batch((known, *tensors), (1, *self.ranks))
        objective, constraint, x0, step_size = filled(self.arguments, iter(tensors))
        settings = self.settings | {"step_size": step_size}
        if order is not None:
            x0, settings = known, settings | {"method": Known(order), "differentiate": "implicit"}
        sol = self.solve(objective, constraint, x0=x0, **settings)
        if lead is None or len(lead) < 2:
            return sol
        numbers = (sol.value, sol.gap, sol.num_steps, sol.status)
        return Solution(sol.x.reshape(*lead, sol.x.shape[-1]), *(n.reshape(lead) for n in numbers))


@dataclass(frozen=True)
class _Found:
    """The solution and its certificate, without derivatives."""

    call: _Call

    @property
    def batches(self) -> bool:
        return self.call.ranks is not None

    @property
    def own(self) -> frozenset[int]:
        return frozenset()

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        sol = self.call(inputs)
        return sol.x, sol.value, sol.gap, sol.num_steps, sol.status


@dataclass(frozen=True)
class _Carried:
    """(the solution, what it was found from) ↦ the solution, differentiably."""

    call: _Call

    @property
    def batches(self) -> bool:
        return self.call.ranks is not None

    @property
    def own(self) -> frozenset[int]:
        return frozenset()

    def __call__(self, order: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, *tensors = inputs
        if order == 0:
            return (x.clone(),)
        implicit = self.call.settings["differentiate"] == "implicit"
        return (self.call(tensors, x, order if implicit else None).x,)


def _value_at_zero(objective: Objective) -> Tensor:
    """f(0), for an objective that is not bound yet."""
    batch = common_batch(objective.batch_sizes)
    objective, n = objective.bind(batch), math.prod(objective.shape)
    size = (n,) if batch is None else (batch, n)
    with torch.enable_grad():
        return objective.value(torch.zeros(size, dtype=objective.dtype, device=objective.device))


def check_no_others(
    objective: Objective, constraint: Constraint, value: Callable[[], Tensor]
) -> None:
    """Raise if f has derivatives in something although the dense tensors are constants."""
    for name, part in (("objective", objective), ("constraint", constraint)):
        if not is_dataclass(part):
            raise ValueError(
                f"{name}: expected a dataclass, in whose fields tensors can be found and replaced, "
                f"got {type(part).__name__}; other objects have first derivatives only, and those "
                "outside of torch.func"
            )
    if any(t.requires_grad for t in tensors_in((objective, constraint))):
        raise RuntimeError(
            "a sparse tensor gets first derivatives only, and those outside of torch.func: "
            "detach it, or pass a dense one"
        )
    if type(objective) not in RANKS and has_derivatives(value()):
        raise RuntimeError(
            "the objective uses a tensor that is not one of its arguments, such as a module's "
            "parameter inside of fn, and the derivatives in it would be lost here: pass it as one "
            "of the params of Smooth, or detach it"
        )


def ranks_of(
    objective: Objective, constraint: Constraint, *others: object
) -> tuple[int, ...] | None:
    """The dimensions of one problem's tensors, for each of `tensors_in` all the arguments.

    None where it is not known that a batch may be put in front of each of them.
    """
    ranks: list[int] = []
    for part in (objective, constraint):
        known = next((RANKS[kind] for kind in type(part).__mro__ if kind in RANKS), None)
        if known is None:
            return None
        tensors = [(getattr(part, name), rank) for name, rank in known.items()]
        ranks += [rank for tensor, rank in tensors if isinstance(tensor, Tensor)]
        if any(isinstance(t, Tensor) and t.layout != torch.strided for t, _ in tensors):
            return None
    for other in others:  # a start, and parts that should have no tensors
        if isinstance(other, Tensor):
            ranks.append(1)
        elif tensors_in(other):
            return None
    return tuple(ranks)


def level(tensors: Sequence[Tensor], ranks: Sequence[int] | None) -> list[Tensor]:
    """The tensors, all with the same number of batch dimensions."""
    if ranks is None:
        return list(tensors)
    depths = [t.dim() - rank for t, rank in zip(tensors, ranks, strict=True)]
    return [t[(None,) * (max(depths) - depth)] for t, depth in zip(tensors, depths, strict=True)]


def one_batch(
    tensors: Sequence[Tensor], ranks: Sequence[int]
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Several batch dimensions as one, and their sizes; what is shared by all stays shared."""
    leads = [t.shape[: t.dim() - rank] for t, rank in zip(tensors, ranks, strict=True)]
    lead = common_shape(*leads)
    if len(lead) < 2:
        return list(tensors), lead
    merged = []
    for tensor, own in zip(tensors, leads, strict=True):
        event = tensor.shape[len(own) :]
        if all(size == 1 for size in own):
            merged.append(tensor.reshape(event))
        else:
            merged.append(tensor.expand(*lead, *event).reshape(-1, *event))
    return merged, lead
