"""Any batch dimensions and variables of any shape, as vectors with one batch, and back.

Engines know vectors (B, n), or (n,) for one problem. What has more dimensions is brought to that
form once, before anything else is done, by operations that autograd and torch.func follow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from dfwlayer.arguments import INTEGERS, as_sizes, common_lead
from dfwlayer.engines.base import Arguments, lead_of_start
from dfwlayer.methods.base import Settings
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.rows import in_one_batch
from dfwlayer.ops.said import warn
from dfwlayer.ops.tensors import filled, tensors_in
from dfwlayer.solution import Progress, Solution

__all__ = ["Flattened", "flattened", "sizes_of"]


class Flattened(NamedTuple):
    """Arguments in the form of vectors, and what they were before."""

    arguments: Arguments
    lead: tuple[int, ...]  # the batch dimensions
    shape: tuple[int, ...]  # of one problem's variable

    def changed(self, settings: Settings) -> Settings:
        """Settings that go with the arguments; a callback sees the shapes of the call."""
        callback, step_size = settings.callback, self.arguments.step_size
        if callback is None:
            return replace(settings, step_size=step_size)

        def seen(progress: Progress) -> Any:
            x, *numbers = progress
            return callback(Progress(self._point(x), *map(self._numbers, numbers)))

        return replace(settings, step_size=step_size, callback=seen)

    def restored(self, solution: Solution) -> Solution:
        """The solution with the shapes of the call."""
        restored = Solution(
            self._point(solution.x),
            *(
                self._numbers(each)
                for each in (solution.value, solution.gap, solution.num_steps, solution.status)
            ),
        )
        if solution._origin is not None:
            vars(restored)["_origin"] = _Asked(self, solution._origin)
        return restored

    def vectors(self, x: Tensor) -> Tensor:  # (*lead, *shape) -> (B, n)
        """A solution with the shapes of the call in the form of the arguments."""
        n = math.prod(self.shape)
        return x.reshape(-1, n) if self.lead else x.reshape(n)

    def _point(self, x: Tensor) -> Tensor:  # (B, n) -> (*lead, *shape)
        return x.reshape(*self.lead, *self.shape)

    def _numbers(self, each: Tensor) -> Tensor:  # (B,) -> (*lead)
        return each.reshape(self.lead)


class _Asked(NamedTuple):
    """The call that a restored solution is the answer to."""

    flat: Flattened
    origin: Any  # `dfwlayer.engines.prices.Origin`

    def multipliers(self, x: Tensor) -> dict[str, Tensor]:
        """With the shapes of the call."""
        lead, shape = self.flat.lead, self.flat.shape
        n = math.prod(shape)
        found: dict[str, Tensor] = self.origin.multipliers(self.flat.vectors(x))
        own = {k: t.shape[1:] if lead else t.shape for k, t in found.items()}
        return {
            name: t.reshape(*lead, *(shape if own[name] == (n,) else own[name]))
            for name, t in found.items()
        }

    def violation(self, x: Tensor) -> Tensor:
        """With the shapes of the call."""
        outside: Tensor = self.origin.violation(self.flat.vectors(x))
        return outside.reshape(self.flat.lead)


def flattened(arguments: Arguments, shape: tuple[int, ...] | int | None) -> Flattened | None:
    """The arguments as vectors with at most one batch dimension, None where they are so already.

    Args:
        arguments: Of the call.
        shape: Of one problem's variable, None where objective and set tell it.

    """
    objective, constraint, x0, step_size = arguments
    known = _known_shape(arguments, shape)
    usual = known is None and not objective.deep and not constraint.deep
    if usual and (x0 is None or x0.dim() <= 2):
        return None
    lead, variable = _sizes(arguments, known)
    _warn_of_pairs(arguments, lead, variable)
    if len(lead) < 2 and objective.sizes is None and variable == objective.shape:
        return None
    if x0 is not None:
        x0 = in_one_batch(x0.flatten(-len(variable)), 1, lead)
    flat = Arguments(
        objective.flattened(variable, lead),
        constraint.flattened(variable, lead),
        x0,
        filled(step_size, (_constants(each, lead) for each in tensors_in(step_size))),
    )
    return Flattened(flat, lead, variable)


def sizes_of(
    arguments: Arguments, shape: tuple[int, ...] | int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The batch dimensions of a solution, and the shape of one problem's; no value is read."""
    return _sizes(arguments, _known_shape(arguments, shape))


def _known_shape(
    arguments: Arguments, shape: tuple[int, ...] | int | None
) -> tuple[int, ...] | int | None:
    """What was said of the shape, or what the set knows of it."""
    sizes = arguments.objective.sizes
    return arguments.constraint.variable(sizes) if shape is None and sizes is not None else shape


def _sizes(
    arguments: Arguments, known: tuple[int, ...] | int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    variable = _variable(arguments.objective, known)
    return common_lead(_leads(arguments, variable)), variable


def _leads(arguments: Arguments, variable: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The batch dimensions of every tensor that has some, by its name."""
    objective, constraint, x0, _ = arguments
    leads = objective.leads(variable) | constraint.leads(variable)
    if x0 is not None:
        leads["x0"] = lead_of_start(x0, objective, variable)
    return leads


def _warn_of_pairs(arguments: Arguments, lead: tuple[int, ...], variable: tuple[int, ...]) -> None:
    """Say so where a column (B, 1) beside a batch (B,) makes problems of all pairs of them.

    That is how tensors broadcast, and seldom what is meant by a number that a linear layer returns.
    """
    if len(lead) != 2 or lead[0] != lead[1] or lead[0] < 2:
        return
    leads, count = _leads(arguments, variable), lead[0]
    columns = [name for name, own in leads.items() if own == (count, 1)]
    rows = [name for name, own in leads.items() if own == (count,)]
    if columns and rows:
        name = columns[0]
        warn(
            f"{name}: its batch dimensions ({count}, 1) and ({count},) of {rows[0]} make {count} x "
            f"{count} problems, each {rows[0]} with each {name}; for one problem each give {name} "
            "without the last one of its batch dimensions, such as by squeeze(-1)"
        )


def _constants(each: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Those of a step size, one for each problem; what does not fit is for the rule to refuse."""
    own = each.shape
    along = zip(reversed(own), reversed(lead), strict=False)
    fits = len(own) <= len(lead) and all(size in (1, most) for size, most in along)
    return in_one_batch(each, 0, lead) if fits else each


def _variable(objective: Objective, shape: tuple[int, ...] | int | None) -> tuple[int, ...]:
    """The shape of one problem's variable."""
    if shape is None:
        return objective.shape
    given = (shape,) if isinstance(shape, INTEGERS) else shape
    known = as_sizes("shape", given, "the sizes of one problem's variable, such as (n,), or None")
    own = objective.shape
    if objective.sizes is None and known != own and (len(own) > 1 or math.prod(known) != own[0]):
        raise ValueError(
            f"shape: expected that of the objective's variable, {own}, or None"
            + (f", or one with as many entries, got {known}" if len(own) == 1 else f", got {known}")
        )
    return known
