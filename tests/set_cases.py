"""One table of sets; the row of a set buys it every test of test_sets.py.

What is right is said here a second time, apart from the library: the set as constraints of cvxpy,
and how far a point is outside, in NumPy.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
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
        designed: (generator, parameters) -> a point x* of the set for each problem and a vector in
            its normal cone there. The objective is then made such that x* is the solution by the
            optimality conditions, for sets whose cones no other solver handles to ten digits.

    """

    parameters: Callable[[Generator, int], dict[str, Tensor]]
    build: Callable[[dict[str, Tensor]], Any]
    constraints: Callable[[Any, dict[str, np.ndarray]], list[Any]] | None
    violation: Callable[[np.ndarray, dict[str, np.ndarray]], float]
    shape: tuple[int, ...] = (8,)
    pull: float = 8.0
    methods: tuple[str, ...] = ("auto", "frank-wolfe", "dfw")
    bad: tuple[tuple[dict[str, Any], str], ...] = field(default=())
    designed: Callable[[Generator, dict[str, Tensor]], tuple[Tensor, Tensor]] | None = None


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


def box(gen: Generator, rows: int) -> dict[str, Tensor]:
    middle = torch.randn(rows, 8, generator=gen, dtype=F64)
    return {"lower": middle - uniform(gen, rows, 8), "upper": middle + uniform(gen, rows, 8)}


def _box_violation(x, p):
    size = np.maximum(np.abs(p["lower"]), np.abs(p["upper"]))
    return above((x - p["upper"]) / size, (p["lower"] - x) / size)


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
            ({"lower": -torch.inf}, "lower, upper: expected both finite, or −inf and inf"),
            ({"upper": None}, "upper: expected a number or a tensor, got NoneType"),
        ),
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
            ({"upper": -0.5}, "upper: expected numbers ≥ 0, found -0.5; the set has to contain 0"),
            ({"lower": 0.5}, "lower: expected numbers ≤ 0, found 0.5; the set has to contain 0"),
            ({"radius": "1"}, "radius: expected a number or a tensor, got str"),
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
        methods=("auto", "frank-wolfe"),
        bad=(
            ({"level": 99.0}, "level: expected a number between .* on the set, found 99"),
            ({"normal": "1"}, "normal: expected a number or a tensor, got str"),
        ),
    )


CASES |= {f"{name} in a plane": _cut(name) for name in ("Box", "L1Box", "Simplex")}


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


# ---------------------------------------------------------------------------------------------
# sets made of others


def centred_ball(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {
        "radius": uniform(gen, rows),
        "weight": uniform(gen, rows, 8),
        "centre": 2 * torch.randn(rows, 8, generator=gen, dtype=F64),
    }


def _norm_constraints(p):
    def constraints(x, own):
        import cvxpy as cp

        return [cp.pnorm(cp.multiply(own["weight"], x - own["centre"]), p) <= own["radius"]]

    return constraints


def _norm_violation(p):
    def violation(x, own):
        size = np.linalg.norm(own["weight"] * (x - own["centre"]), p)
        # x itself is rounded: in units of the centre, which may be larger than the set
        return above((size - own["radius"]) / np.maximum(own["radius"], np.abs(x).max()))

    return violation


def product(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {
        "radius": uniform(gen, rows),
        "weight": uniform(gen, rows, 4),
        "centre": torch.randn(rows, 2, generator=gen, dtype=F64),
        "bound": uniform(gen, rows, low=0.1, high=0.4),
    }


def _product_constraints(x, p):
    import cvxpy as cp

    return [
        cp.norm1(cp.multiply(p["weight"], x[:4])) <= p["radius"],
        cp.norm1(x[4:6] - p["centre"]) <= p["radius"],
        cp.norm_inf(x[6:]) <= p["bound"],
    ]


@lru_cache
def documented(page: str, name: str) -> Any:
    """What a page of the documentation defines, by running its code."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text()
    namespace = {"__name__": "documented"}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, namespace)  # the page's own code, which is also run as it stands
        if name in namespace:
            return namespace[name]
    raise ValueError(f"name: docs/{page} defines no {name}")


def three_smallest(cost: Tensor) -> Tensor:
    """The vertex of {0 ≤ x ≤ 1, Σx = 3}."""
    return torch.zeros_like(cost).scatter(-1, cost.topk(3, largest=False).indices, 1.0)


def sum_of_rows(x):
    import cvxpy as cp

    return cp.sum(x, axis=1)


CASES |= {
    f"LpBall around a centre, p={p}": SetCase(
        centred_ball,
        lambda own, p=p: dfw.LpBall(p, own["radius"], own["weight"], centre=own["centre"]),
        _norm_constraints(p),
        _norm_violation(p),
        bad=(
            ({"centre": "0"}, "centre: expected a number or a tensor, got str"),
            ({"centre": torch.ones(3, dtype=F64)}, r"centre: expected a number, shape \(8,\)"),
            ({"centre": torch.zeros(8)}, "centre: is torch.float32 while"),
            ({"centre": torch.full((8,), torch.inf, dtype=F64)}, "centre: 8 of 8 values are NaN"),
            ({"radius": -torch.ones((), dtype=F64)}, "radius: expected numbers ≥ 0, found -1"),
        ),
    )
    for p in (1, np.inf)
} | {
    "Product": SetCase(
        product,
        lambda p: dfw.Product(
            [
                dfw.LpBall(1, p["radius"], p["weight"]),
                dfw.LpBall(1, p["radius"], centre=p["centre"]),
                dfw.LpBall(float("inf"), p["bound"]),
            ],
            [4, 2, 2],
        ),
        _product_constraints,
        lambda x, p: above(
            (np.abs(p["weight"] * x[:4]).sum() - p["radius"]) / p["radius"],
            (np.abs(x[4:6] - p["centre"]).sum() - p["radius"])
            / np.maximum(p["radius"], np.abs(x).max()),
            (np.abs(x[6:]) - p["bound"]) / p["bound"],
        ),
        bad=(
            ({"weight": torch.ones(3, dtype=F64)}, r"sets\[0\]: weight: expected shape \(4,\)"),
            ({"bound": -torch.ones((), dtype=F64)}, r"sets\[2\]: radius: expected numbers ≥ 0"),
        ),
    ),
    "CustomSet": SetCase(
        lambda _gen, _rows: {},
        lambda _: dfw.CustomSet(vertex=three_smallest),
        lambda x, _: [x >= 0, x <= 1, sum(x) == 3],
        lambda x, _: above(-x, x - 1, abs(x.sum() - 3)),
        pull=1.0,
    ),
    "Ascending of docs/extending.md": SetCase(
        lambda gen, rows: {"top": uniform(gen, rows)},
        lambda p: documented("extending.md", "Ascending")(p["top"]),
        lambda x, p: [x[0] >= 0, x[1:] >= x[:-1], x[-1] <= p["top"]],
        lambda x, p: above(-x[0], x[:-1] - x[1:], x[-1] - p["top"]) / p["top"],
        pull=3.0,
        bad=(({"top": -1.0}, "top: expected numbers ≥ 0, found -1"),),
    ),
    "Birkhoff": SetCase(
        lambda _gen, _rows: {},
        lambda _: dfw.Birkhoff(4),
        lambda x, _: [x >= 0, sum_of_rows(x) == 1, sum_of_rows(x.T) == 1],
        lambda x, _: above(-x, np.abs(x.sum(0) - 1), np.abs(x.sum(1) - 1)),
        shape=(4, 4),
        pull=1.0,
    ),
}


# ---------------------------------------------------------------------------------------------
# sets that are round

GROUPS = [[0, 3], [1, 2, 6], [4, 5, 7]]


def group_ball(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {"radius": uniform(gen, rows), "weight": uniform(gen, rows, 3)}


def _group_norms(x):
    return np.array([np.linalg.norm(x[g]) for g in GROUPS])


def group_point(gen: Generator, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One group is zero, and there the multipliers are inside of their ball."""
    x = torch.randn(len(p["radius"]), 8, generator=gen, dtype=F64)
    x[:, GROUPS[1]] = 0
    inside = torch.randn(len(x), 3, generator=gen, dtype=F64)
    inside = 0.8 * inside / inside.norm(dim=-1, keepdim=True)
    force = torch.empty_like(x)
    size = torch.zeros(len(x), dtype=F64)
    for k, group in enumerate(GROUPS):
        length = x[:, group].norm(dim=-1, keepdim=True)
        unit = inside if k == 1 else x[:, group] / length
        force[:, group] = p["weight"][:, k : k + 1] * unit
        size += p["weight"][:, k] * length[:, 0]
    return x * (p["radius"] / size)[:, None], 0.7 * force


def ellipsoid(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {
        "A": torch.eye(7, 5, dtype=F64) + 0.4 * torch.randn(rows, 7, 5, generator=gen, dtype=F64),
        "centre": torch.randn(rows, 5, generator=gen, dtype=F64),
        "radius": uniform(gen, rows),
    }


def ellipsoid_point(gen: Generator, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = torch.randn(*p["centre"].shape, generator=gen, dtype=F64)
    image = (p["A"] @ y[..., None])[..., 0]
    y = y * (p["radius"] / image.norm(dim=-1))[:, None]
    slope = (p["A"].mT @ p["A"] @ y[..., None])[..., 0] / p["radius"][:, None]
    return p["centre"] + y, 0.7 * slope


def _ellipsoid_violation(x, p):
    size = np.linalg.norm(p["A"] @ (x - p["centre"]))
    # x itself is rounded, which A may make more of
    unit = np.linalg.norm(np.abs(p["A"]) @ np.abs(x)) / p["radius"]
    return above((size - p["radius"]) / p["radius"] / max(1.0, unit))


def schatten_point(p: float, rows: int, columns: int):
    """Low rank for p = 1, equal singular values at the bound for p = ∞."""

    def point(gen: Generator, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        t = own["radius"][:, None]
        seed = torch.randn(len(t), rows, columns, generator=gen, dtype=F64)
        left, _, right = torch.linalg.svd(seed, full_matrices=False)
        draw = uniform(gen, len(t), min(rows, columns), low=0.2, high=0.9)
        half = torch.arange(draw.shape[-1]) < draw.shape[-1] // 2
        if p == 1:
            values = torch.where(half, draw, 0)
            values, profile = values * t / values.sum(-1, keepdim=True), torch.where(half, 1, draw)
        elif p == np.inf:
            values, profile = torch.where(half, 1, draw) * t, torch.where(half, draw, 0)
        else:
            values = draw * t / torch.linalg.vector_norm(draw, p, dim=-1, keepdim=True)
            profile = (values / t) ** (p - 1)
        x, force = ((left * v[:, None]) @ right for v in (values, 0.7 * profile))
        return x, force.flatten(1)

    return point


def _schatten(p, shape=(4, 3), flat=False):
    point = schatten_point(p, *shape)

    def designed(gen: Generator, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x, force = point(gen, own)
        return x.flatten(1) if flat else x, force

    return SetCase(
        lambda gen, rows: {"radius": uniform(gen, rows)},
        lambda own: dfw.SchattenBall(p, own["radius"], shape if flat else None),
        None,
        lambda x, own: above(
            np.linalg.norm(np.linalg.svd(x.reshape(shape), compute_uv=False), p) / own["radius"] - 1
        ),
        shape=(shape[0] * shape[1],) if flat else shape,
        bad=(
            ({"radius": -1.0}, "radius: expected a finite number ≥ 0, got -1"),
            ({"radius": torch.ones(1, 2, dtype=F64)}, "radius: expected a number, a 0-d tensor"),
        ),
        designed=designed,
    )


CASES |= {
    "GroupBall": SetCase(
        group_ball,
        lambda p: dfw.GroupBall(GROUPS, p["radius"], p["weight"]),
        None,
        lambda x, p: above((p["weight"] * _group_norms(x)).sum() / p["radius"] - 1),
        bad=(
            ({"radius": -1.0}, "radius: expected a finite number ≥ 0, got -1"),
            ({"weight": torch.ones(8, dtype=F64)}, r"weight: expected shape \(3,\) or \(B, 3\)"),
        ),
        designed=group_point,
    ),
    "Ellipsoid": SetCase(
        ellipsoid,
        lambda p: dfw.Ellipsoid(p["A"], p["centre"], p["radius"]),
        None,
        _ellipsoid_violation,
        shape=(5,),
        bad=(
            ({"radius": -1.0}, "radius: expected numbers ≥ 0, found -1"),
            ({"A": torch.ones(5, 5, dtype=F64)}, "A: expected full column rank"),
            ({"A": torch.ones(5, 4, dtype=F64)}, "A: expected 5 columns, as the variable has"),
            ({"A": torch.ones(3, 5, dtype=F64)}, r"A: expected shape \(m, n\) or \(B, m, n\)"),
            ({"A": torch.eye(5)}, "A: is torch.float32 while|radius: is torch.float64 while"),
            ({"A": torch.full((5, 5), torch.nan, dtype=F64)}, "A: 25 of 25 values are NaN"),
        ),
        designed=ellipsoid_point,
    ),
    "NuclearBall": _schatten(1),
    "SchattenBall, p=1.5": _schatten(1.5, flat=True),
    "SchattenBall, p=3": _schatten(3.0, (3, 4), flat=True),
    "SpectralBall": _schatten(np.inf, flat=True),
}
