"""One table of sets; the row of a set buys it every test of test_sets.py.

What is right is said here a second time, apart from the library: the set as constraints of cvxpy,
and how far a point is outside, in NumPy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

import dfwlayer as dfw

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

    """

    parameters: Callable[[Generator, int], dict[str, Tensor]]
    build: Callable[[dict[str, Tensor]], Any]
    constraints: Callable[[Any, dict[str, np.ndarray]], list[Any]]
    violation: Callable[[np.ndarray, dict[str, np.ndarray]], float]
    shape: tuple[int, ...] = (8,)
    pull: float = 8.0
    methods: tuple[str, ...] = ("auto", "frank-wolfe", "dfw")
    bad: tuple[tuple[dict[str, Any], str], ...] = field(default=())


def uniform(gen: Generator, *shape: int, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Uniform numbers."""
    return low + (high - low) * torch.rand(*shape, generator=gen, dtype=F64)


def above(*excess: Any) -> float:
    """The largest of several amounts by which constraints are missed, 0 if none is."""
    return max(0.0, *(float(np.max(e)) for e in excess))


# ---------------------------------------------------------------------------------------------
# sets with bounds and linear constraints


def l1_box(gen: Generator, rows: int) -> dict[str, Tensor]:
    weight = uniform(gen, rows, 8)
    weight[:, 0] = 0
    weight[:, 1] *= -1
    return {
        "radius": uniform(gen, rows),
        "weight": weight,
        "lower": -uniform(gen, rows, 8, low=0.1, high=0.6),
        "upper": uniform(gen, rows, 8, low=0.1, high=0.6),
    }


def _l1_box_constraints(x, p):
    import cvxpy as cp

    size = cp.norm1(cp.multiply(np.abs(p["weight"]), x))
    return [size <= p["radius"], x >= p["lower"], x <= p["upper"]]


CASES = {
    "L1Box": SetCase(
        l1_box,
        lambda p: dfw.L1Box(p["radius"], p["weight"], p["lower"], p["upper"]),
        _l1_box_constraints,
        lambda x, p: above(
            (np.abs(p["weight"] * x).sum() - p["radius"]) / p["radius"],
            (x - p["upper"]) / p["upper"],
            (p["lower"] - x) / -p["lower"],
        ),
        bad=(
            ({"radius": -1.0}, "radius: expected numbers ≥ 0, found -1"),
            ({"upper": -0.5}, "upper: expected numbers ≥ 0, found -0.5; the set has to contain 0"),
            ({"lower": 0.5}, "lower: expected numbers ≤ 0, found 0.5; the set has to contain 0"),
            ({"radius": "1"}, "radius: expected a number or a tensor, got str"),
            ({"weight": torch.ones(3, dtype=F64)}, r"weight: expected a number, shape \(8,\)"),
            ({"lower": torch.zeros(8)}, "lower: is torch.float32 while"),
            ({"lower": torch.full((8,), torch.nan, dtype=F64)}, "lower: 8 of 8 values are NaN"),
        ),
    ),
}
