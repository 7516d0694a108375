"""What a solve returns: the point, its certificate, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

__all__ = ["FAILURES", "Progress", "Solution", "SolveError", "Status"]


class Status(IntEnum):
    """How one problem of the batch ended.

    ``Solution.status`` is an integer tensor, so ``sol.status == Status.CONVERGED``
    is a mask over the batch.
    """

    CONVERGED = 0
    MAX_STEPS = 1
    ROUNDING_FLOOR = 2
    NONFINITE = 3
    NOT_CONVEX = 4
    UNBOUNDED = 5
    INFEASIBLE = 6
    INVALID = 7
    OUT_OF_RANGE = 8
    STALLED = 9
    STOPPED = 10
    RELAXED = 11

    def __str__(self) -> str:
        """The name; an IntEnum would print its number."""
        return self.name

    def __format__(self, spec: str) -> str:
        """The name in an f-string, or with a spec for integers the number."""
        return format(int(self) if spec[-1:] in tuple("bcdoxXn") else self.name, spec)

    @property
    def message(self) -> str:
        """What happened, the likely cause, and what to do about it."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "the stopping rule was met",
    Status.MAX_STEPS: (
        "the cap max_steps was reached first; x is feasible and gap says how far from optimal it "
        "can be: raise max_steps or tol"
    ),
    Status.ROUNDING_FLOOR: (
        "the gap cannot fall further in this dtype although it is above tol: use float64 or a "
        "larger tol"
    ),
    Status.NONFINITE: (
        "this problem's own data hold NaN or infinity; x is NaN and its gradient zero: look for "
        "the layer that produced them"
    ),
    Status.NOT_CONVEX: (
        "negative curvature was met, so the objective is not convex; x is feasible but nothing "
        "more is promised: build P as M @ M.mT, or add a multiple of the identity"
    ),
    Status.UNBOUNDED: (
        "the objective decreases for ever along coordinates of zero weight or without a bound; x "
        "is feasible: give them a weight or bounds, or the objective curvature there"
    ),
    Status.STALLED: (
        "neither f nor the gap falls any more although the gap is above tol and above rounding; x "
        "is feasible and gap says how far from optimal it can be: try another x0, method or units"
    ),
    Status.STOPPED: (
        "the callback ended the solve; x is feasible and gap says how far from optimal it can be: "
        "let the callback return False to go on"
    ),
    Status.RELAXED: (
        "no point satisfies all rows; x is the best of those that violate them least, by the sum "
        "of squares: look at the rows that gave way"
    ),
    Status.INFEASIBLE: (
        "the set of this problem is empty; x is NaN and its gradient zero: bring the level within "
        "reach, raise the caps, or put the lower bounds below the upper ones"
    ),
    Status.INVALID: (
        "the set of this problem has no meaning; x is NaN and its gradient zero: look for a "
        "negative radius or cap, a k below 1, or an A without full column rank"
    ),
    Status.OUT_OF_RANGE: (
        "f or its certificate is infinite or not a number at x, outside of f's domain or beyond "
        "the largest number of this dtype; x is feasible: give an x0 where f is finite, use other "
        "units, or float64"
    ),
}

# the statuses of problems whose x is not the solution that was asked for; at the rounding floor it
# is, as far as the dtype can tell
FAILURES = tuple(s for s in Status if s not in (Status.CONVERGED, Status.ROUNDING_FLOOR))


_LATE = ("gap", "num_steps", "status")  # what may be made when it is asked for


@dataclass(frozen=True)
class Solution:
    """The outcome of `dfwlayer.solve`, one entry per problem of the batch.

    Every field follows the call: (B, ...) for a batch, without the B for a single problem.

    Attributes:
        x: The solution, feasible to rounding, with its gradient.
        value: f(x), with its gradient.
        gap: f(x) − f* ≤ gap: the Frank-Wolfe certificate ⟨∇f(x), x − s⟩ with s the hard vertex, or
            from compiled code the same bound by Lagrangian duality, which is no smaller.
        num_steps: Steps this problem took before it stopped.
        status: `Status` codes as an integer tensor.

    A solution is a pytree of these five (``torch.utils._pytree``), so that torch.func may return
    one, ``tree_map`` change it and a ``DataLoader`` collate several.

    """

    x: Tensor
    value: Tensor
    gap: Tensor
    num_steps: Tensor
    status: Tensor

    _origin: ClassVar[Any] = None  # of `dfwlayer.engines.prices`, for what may be asked later
    _sound: ClassVar[bool] = False  # whether all problems are known to have `CONVERGED`

    @classmethod
    def of_parts(
        cls, x: Tensor, value: Tensor, sound: bool, rest: Callable[[], Sequence[Tensor]]
    ) -> Solution:
        """With gap, steps and status by a function that is called when one is first asked for."""
        made = object.__new__(cls)
        made.__dict__.update(x=x, value=value, _sound=sound, _rest=rest)
        return made

    def __getattr__(self, name: str) -> Any:
        """Of what is not there yet."""
        own = self.__dict__
        if name in _LATE:
            rest = own.get("_rest")
            if rest is not None:
                with torch.inference_mode(False):
                    own.update(zip(_LATE, rest(), strict=True))
                own.pop("_rest", None)
            if name in own:  # by this thread or by another one
                return own[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def converged(self) -> Tensor:
        """Mask of the problems that met the stopping rule."""
        return self.status == Status.CONVERGED

    @cached_property
    def multipliers(self) -> dict[str, Tensor]:
        """What the limits of the set cost, by the name of the parameter, with their gradients.

        The price of a parameter t (a radius, a bound, a level) is −∂f*/∂t, one for each problem:
        by how much the value falls as t grows. Thus it is not negative for radii, caps and upper
        bounds, not positive for lower bounds, of either sign for levels of equations, and zero
        for what is not active. The names of a product begin with the number of the set,
        "0.radius". A number for all coordinates, such as ``Box(upper=1.0)``, has a price in each.
        NaN where x is NaN. Computed when first asked for, as far as x carries a gradient with one.
        """
        found: dict[str, Tensor] = self._asked().multipliers(self.x)
        return found

    @cached_property
    def proof(self) -> dict[str, Tensor]:
        """What proves that problems over linear rows have no solution, by name; NaN for the others.

        "h", "b", "lower" and "upper" are Farkas multipliers of INFEASIBLE problems, with the signs
        of prices: Gᵀh' + Aᵀb' + upper' + lower' = 0 and ⟨h', h⟩ + ⟨b', b⟩ + ⟨upper', u⟩ +
        ⟨lower', l⟩ < 0, so that no x satisfies all rows. h' and b' are how far the rows have to
        give way, in the sense of least squares. "direction" is a d of UNBOUNDED ones along which no
        row ends, f does not bend and ⟨∇f, d⟩ < 0. Computed when first asked for; without gradients.
        """
        found: dict[str, Tensor] = self._asked().proof(self.status)
        return found

    @cached_property
    def violation(self) -> Tensor:
        """How far x is outside, by the set's own measure; 0 inside, NaN where x is NaN."""
        found: Tensor = self._asked().violation(self.x)
        return found

    def _asked(self) -> Any:
        """The call that this answers."""
        if self._origin is None:
            raise RuntimeError(
                "the multipliers and the violation are to be had of what solve() returned, not of "
                "a copy of it, or of what came out of a transform: ask for them before, and return "
                "them beside it"
            )
        return self._origin

    def __getstate__(self) -> dict[str, Any]:
        """Without the call, which may hold functions that cannot be copied."""
        parts = {name: getattr(self, name) for name in _FIELDS}
        return parts | {k: v for k, v in vars(self).items() if k not in ("_origin", "_rest")}

    def __repr__(self) -> str:
        counts = torch.bincount(self.status.reshape(-1).long(), minlength=max(Status) + 1).tolist()
        ended = ", ".join(f"{Status(i).name} {c}" for i, c in enumerate(counts) if c)
        worst = f"{self.gap.max().item():.3g}" if self.gap.numel() else "none"
        steps = int(self.num_steps.max().item()) if self.num_steps.numel() else 0
        return (
            f"Solution(x={tuple(self.x.shape)} {self.x.dtype}, status=[{ended}], "
            f"largest gap={worst}, most steps={steps})"
        )


def _flattened(solution: Solution) -> tuple[list[Tensor], None]:
    return [getattr(solution, name) for name in _FIELDS], None


_FIELDS = tuple(field.name for field in fields(Solution))
register_pytree_node(
    Solution,
    _flattened,
    lambda parts, _: Solution(*parts),
    serialized_type_name="dfwlayer.Solution",
    flatten_with_keys_fn=lambda solution: (
        [(GetAttrKey(name), getattr(solution, name)) for name in _FIELDS],
        None,
    ),
)


def _collated(batch: Sequence[Solution], *, collate_fn_map: Any) -> Solution:  # noqa: ARG001
    """What a DataLoader makes of the solutions of single problems."""
    return Solution(*(default_collate([getattr(s, name) for s in batch]) for name in _FIELDS))


default_collate_fn_map[Solution] = _collated  # the way to extend it that its documentation names


class Progress(NamedTuple):
    """What a callback of `dfwlayer.solve` sees, one entry per problem as in a `Solution`."""

    x: Tensor  # a point of the set, of the variable's shape, with its graph in an unrolled solve
    value: Tensor  # f(x)
    gap: Tensor  # f(x) − f* ≤ gap
    num_steps: Tensor  # steps each problem has taken


class SolveError(RuntimeError):
    """Raised by a layer with ``on_failure="raise"`` for problems that were not solved.

    Attributes:
        solution: The `Solution`, whose statuses tell which problems they are.

    """

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution

    def __reduce__(self) -> tuple[type[SolveError], tuple[str, Solution]]:
        """For copies and other processes."""
        return SolveError, (str(self), self.solution)
