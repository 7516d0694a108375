"""What a row in the table of sets consists of."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

F64 = torch.float64


@dataclass(frozen=True)
class SetCase:
    """A set, its parameters, and what is right for it.

    Args:
        parameters: (generator, rows) -> tensors in float64, one problem per row, by name.
        build: The set from its parameters, per problem, for all problems or for a single one.
        constraints: (cvxpy variable, one problem's parameters) -> list of cvxpy constraints.
        violation: (x, one problem's parameters) -> how far x is outside, relative to the size of
            the set (NumPy, float64).
        shape: Of one problem's variable.
        pull: Size of the linear term; large enough that the constraint is active.
        methods: Those that make sense.
        bad: Changes of the parameters that are errors, with a part of the message.
        designed: (generator, parameters) -> a point x* of the set for each problem and a vector in
            its normal cone there. The objective is then made such that x* is the solution by the
            optimality conditions, for sets whose cones no other solver handles to ten digits.
        recorded: Whether a solve over the set becomes a CUDA graph.
        bounded: Whether it has a vertex for every direction.

    """

    parameters: Callable[[Generator, int], dict[str, Tensor]]
    build: Callable[[dict[str, Tensor]], Any]
    constraints: Callable[[Any, dict[str, np.ndarray]], list[Any]] | None
    violation: Callable[[np.ndarray, dict[str, np.ndarray]], float]
    shape: tuple[int, ...] = (8,)
    pull: float = 8.0
    methods: tuple[str, ...] = ("auto", "frank-wolfe", "dfw", "active-set")
    bad: tuple[tuple[dict[str, Any], str], ...] = field(default=())
    designed: Callable[[Generator, dict[str, Tensor]], tuple[Tensor, Tensor]] | None = None
    recorded: bool = False
    bounded: bool = True


def uniform(gen: Generator, *shape: int, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Uniform numbers."""
    return low + (high - low) * torch.rand(*shape, generator=gen, dtype=F64)


def above(*excess: Any) -> float:
    """The largest of several amounts by which constraints are missed, 0 if none is."""
    return max(0.0, *(float(np.max(e)) for e in excess))
