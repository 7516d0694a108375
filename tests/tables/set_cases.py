"""One table of sets; the row of a set buys it every test of test_sets.py.

What is right is said here a second time, apart from the library: the set as constraints of cvxpy,
and how far a point is outside, in NumPy.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Generator, Tensor

import dfwlayer as dfw
from composed_set_cases import COMPOSED_CASES
from linear_set_cases import LINEAR_CASES
from round_set_cases import ROUND_CASES
from set_case import F64, SetCase, above, uniform

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


def box(gen: Generator, rows: int) -> dict[str, Tensor]:
    middle = torch.randn(rows, 8, generator=gen, dtype=F64)
    return {"lower": middle - uniform(gen, rows, 8), "upper": middle + uniform(gen, rows, 8)}


def _box_violation(x, p):
    size = np.maximum(np.abs(p["lower"]), np.abs(p["upper"]))
    return above((x - p["upper"]) / size, (p["lower"] - x) / size)


# which of the eight coordinates lack a lower or an upper bound: none, one, the other, both
NO_LOWER = torch.tensor([0, 1, 0, 1, 0, 1, 0, 0], dtype=torch.bool)
NO_UPPER = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)


def half_open_box(gen: Generator, rows: int) -> dict[str, Tensor]:
    own = box(gen, rows)
    own["lower"][:, NO_LOWER] = -torch.inf
    own["upper"][:, NO_UPPER] = torch.inf
    return own


def _half_open_constraints(x, p):
    low, high = (~NO_LOWER).numpy(), (~NO_UPPER).numpy()
    return [x[low] >= p["lower"][low], x[high] <= p["upper"][high]]


def _half_open_violation(x, p):
    low, high = (~NO_LOWER).numpy(), (~NO_UPPER).numpy()
    over, under = (x - p["upper"])[high], (p["lower"] - x)[low]
    return above(over / np.abs(p["upper"][high]), under / np.abs(p["lower"][low]))


def _held_from_below(gen: Generator, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Points of which half the coordinates are at their bounds, and what pushes them there."""
    size, free = uniform(gen, *p["lower"].shape), torch.arange(8) % 2 == 0
    return p["lower"] + torch.where(free, size, 0), torch.where(free, 0, -size)


def l1_beside_zero(gen: Generator, rows: int) -> dict[str, Tensor]:
    """The point of the box next to zero spends less than 1.2 of at least 2."""
    lower, width = uniform(gen, rows, 8, low=-0.3, high=0.3), uniform(gen, rows, 8, low=0.1)
    return {
        "radius": uniform(gen, rows, low=2.0, high=2.5),
        "weight": uniform(gen, rows, 8, low=0.2, high=0.5),
        "lower": lower,
        "upper": lower + width,
    }


def _k_sparse_constraints(x, p):
    import cvxpy as cp

    return [cp.norm1(x) <= p["k"] * p["radius"], cp.norm_inf(x) <= p["radius"]]


def _capped_violation(x, p):
    cap = p.get("cap", np.inf)
    return above((-x).max(), (x - cap) / p["radius"], abs(x.sum() - p["radius"]) / p["radius"])


CASES = {
    "Box": SetCase(
        box,
        lambda p: dfw.Box(p["lower"], p["upper"]),
        lambda x, p: [x >= p["lower"], x <= p["upper"]],
        _box_violation,
        pull=3.0,
        bad=(
            ({"lower": 9.0}, "lower: expected numbers below upper, found a bound that is"),
            ({"lower": torch.inf}, "lower: expected numbers below inf, found inf"),
            ({"upper": "1"}, "upper: expected a number or a tensor, got '1'"),
        ),
    ),
    "Box with lower bounds": SetCase(
        lambda gen, rows: {"lower": torch.randn(rows, 8, generator=gen, dtype=F64)},
        lambda p: dfw.Box(lower=p["lower"]),
        None,
        lambda x, p: above((p["lower"] - x) / np.abs(p["lower"])),
        methods=("auto", "frank-wolfe", "dfw"),
        bad=(({"lower": torch.inf}, "lower: expected numbers below inf, found inf"),),
        designed=_held_from_below,
    ),
    "Box with some bounds": SetCase(
        half_open_box,
        lambda p: dfw.Box(p["lower"], p["upper"]),
        _half_open_constraints,
        _half_open_violation,
        pull=3.0,
        methods=("auto", "frank-wolfe", "dfw"),
        bad=(({"lower": 9.0}, "lower: expected numbers below upper, found a bound that is"),),
    ),
    "L1Box beside zero": SetCase(
        l1_beside_zero,
        lambda p: dfw.L1Box(p["radius"], p["weight"], p["lower"], p["upper"]),
        _l1_box_constraints,
        lambda x, p: above(
            (np.abs(p["weight"] * x).sum() - p["radius"]) / p["radius"],
            x - p["upper"],
            p["lower"] - x,
        ),
        bad=(({"radius": 0.01}, r"radius: expected numbers ≥ .*, Σ w\|x\| at the point"),),
    ),
    "Simplex": SetCase(
        lambda gen, rows: {"radius": uniform(gen, rows)},
        lambda p: dfw.Simplex(p["radius"]),
        lambda x, p: [x >= 0, sum(x) == p["radius"]],
        _capped_violation,
        pull=2.0,
        bad=(({"radius": -1.0}, "radius: expected numbers ≥ 0, found -1"),),
    ),
    "CappedSimplex": SetCase(
        lambda gen, rows: {
            "radius": uniform(gen, rows),
            "cap": uniform(gen, rows, 8, low=0.2, high=0.6),
        },
        lambda p: dfw.CappedSimplex(p["radius"], p["cap"]),
        lambda x, p: [x >= 0, x <= p["cap"], sum(x) == p["radius"]],
        _capped_violation,
        pull=2.0,
        bad=(
            ({"radius": -1.0}, "radius: expected numbers ≥ 0, found -1"),
            ({"cap": -1.0}, "cap: expected numbers ≥ 0, found -1"),
            ({"cap": 0.05}, "cap: expected caps whose sum reaches the radius .* a sum of 0.4"),
        ),
    ),
    "KSparse": SetCase(
        lambda gen, rows: {"k": uniform(gen, rows, low=1.5, high=5), "radius": uniform(gen, rows)},
        lambda p: dfw.KSparse(p["k"], p["radius"]),
        _k_sparse_constraints,
        lambda x, p: above(
            np.abs(x).sum() / (p["k"] * p["radius"]) - 1, np.abs(x).max() / p["radius"] - 1
        ),
        bad=(
            ({"k": 0.5}, "k: expected numbers ≥ 1, found 0.5"),
            ({"radius": -1.0}, "radius: expected numbers ≥ 0, found -1"),
        ),
    ),
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
            ({"upper": -9.0}, "lower: expected numbers below upper, found a bound that is"),
            (
                {"lower": 9.0, "upper": 10.0},
                r"radius: expected numbers ≥ .*, Σ w\|x\| at the point",
            ),
            ({"radius": "1"}, "radius: expected a number or a tensor, got '1'"),
            ({"weight": torch.ones(3, dtype=F64)}, r"weight: expected a number, shape \(8,\)"),
            ({"lower": torch.zeros(8)}, "lower: is torch.float32 while"),
            ({"lower": torch.full((8,), torch.nan, dtype=F64)}, "lower: 8 of 8 values are NaN"),
        ),
    ),
}


# ---------------------------------------------------------------------------------------------
# those, cut by a plane


def _in_plane(base):
    """The parameters of a set, and a plane that meets it."""

    def parameters(gen: Generator, rows: int) -> dict[str, Tensor]:
        own = base(gen, rows)
        normal = torch.randn(rows, 8, generator=gen, dtype=F64)
        # half way between the value at zero, or at the middle of the bounds, and an extreme one
        if "cap" in own or "lower" not in own:
            normal = 2 + normal.abs() if "weight" in own else normal
            return own | {"normal": normal, "level": own["radius"] * normal.mean(-1)}
        middle = 0.5 * (own["lower"] + own["upper"])
        nearest = torch.zeros_like(middle).clamp(own["lower"], own["upper"])  # to zero
        middle = torch.where(middle.isfinite(), middle, nearest)
        return own | {"normal": normal, "level": (normal * middle).sum(-1) + 0.1}

    return parameters


def _cut(name):
    case = CASES[name]

    def constraints(x, p):
        return [*case.constraints(x, p), p["normal"] @ x == p["level"]]

    def violation(x, p):
        size = np.abs(p["normal"] * x).sum() + abs(p["level"])
        return above(case.violation(x, p), abs(p["normal"] @ x - p["level"]) / size)

    return SetCase(
        _in_plane(case.parameters),
        lambda p: dfw.PlaneCut(case.build(p), p["normal"], p["level"]),
        constraints,
        violation,
        pull=case.pull,
        methods=("auto", "frank-wolfe", "active-set"),
        bad=(
            ({"level": 99.0}, "level: expected a number between .* on the set, found 99"),
            ({"normal": "1"}, "normal: expected a number or a tensor, got '1'"),
        ),
    )


CASES |= {f"{name} in a plane": _cut(name) for name in ("Box", "L1Box", "Simplex")}
CASES["Box with some bounds in a plane"] = replace(
    _cut("Box with some bounds"), methods=("auto",), bad=()
)


def portfolio(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {"radius": uniform(gen, rows, low=1.2, high=1.8), "level": uniform(gen, rows, high=1.0)}


def _portfolio_constraints(x, p):
    import cvxpy as cp

    return [cp.norm1(x) <= p["radius"], cp.sum(x) == p["level"]]


CASES["portfolio with leverage"] = SetCase(
    portfolio,
    lambda p: dfw.PlaneCut(dfw.LpBall(1, p["radius"]), level=p["level"]),
    _portfolio_constraints,
    lambda x, p: above(
        np.abs(x).sum() / p["radius"] - 1, abs(x.sum() - p["level"]) / np.abs(x).sum()
    ),
    bad=(({"level": 2.0}, "level: expected a number between .*, found 2"),),
)


def _rows(gen: Generator, rows: int) -> dict[str, Tensor]:
    """Five inequalities, an equation and bounds around a point, with room in the inequalities."""
    x = 0.3 * torch.randn(rows, 8, generator=gen, dtype=F64)
    G = torch.randn(rows, 5, 8, generator=gen, dtype=F64)
    A = torch.randn(rows, 1, 8, generator=gen, dtype=F64)
    return {
        "G": G,
        "h": (G @ x[..., None])[..., 0] + uniform(gen, rows, 5, low=0.2, high=0.8),
        "A": A,
        "b": (A @ x[..., None])[..., 0],
        "lower": x - uniform(gen, rows, 8),
        "upper": x + uniform(gen, rows, 8),
    }


CASES["Polyhedron"] = SetCase(
    _rows,
    lambda p: dfw.Polyhedron(p["G"], p["h"], p["A"], p["b"], p["lower"], p["upper"]),
    lambda x, p: [
        p["G"] @ x <= p["h"],
        p["A"] @ x == p["b"],
        x >= p["lower"],
        x <= p["upper"],
    ],
    lambda x, p: above(
        (p["G"] @ x - p["h"]) / (np.abs(p["G"]) @ np.abs(x) + np.abs(p["h"])),
        np.abs(p["A"] @ x - p["b"]) / (np.abs(p["A"]) @ np.abs(x) + np.abs(p["b"])),
        p["lower"] - x,
        x - p["upper"],
    ),
    methods=("auto", "frank-wolfe"),
    bad=(
        ({"G": torch.ones(5, 7, dtype=F64)}, "G: expected rows of 8 entries"),
        ({"h": torch.ones(4, dtype=F64)}, "h: expected shape"),
        ({"A": None}, "A: expected a tensor to go with b, got None"),
        ({"lower": "1"}, "lower: expected a number or a tensor, got '1'"),
    ),
)


CASES |= COMPOSED_CASES | ROUND_CASES | LINEAR_CASES
