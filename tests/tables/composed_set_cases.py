"""Rows of the table of sets: balls around a centre, and sets made of others."""

import re
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

import dfwlayer as dfw
from repository import ROOT
from set_case import F64, SetCase, above, uniform


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


def documented(page: str, name: str) -> Any:
    """What a page of the documentation defines, by running its code."""
    text = (ROOT / "docs" / page).read_text()
    namespace = {"__name__": "documented"}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, namespace)  # the page's own code, which is also run as it stands
        if name in namespace:
            return namespace[name]
    raise ValueError(f"name: docs/{page} defines no {name}")


# here and not in the table: the page takes gradients, which torch.func would not allow in its midst
Ascending = documented("extending.md", "Ascending")


def three_smallest(cost: Tensor) -> Tensor:
    """The vertex of {0 ≤ x ≤ 1, Σx = 3}."""
    return torch.zeros_like(cost).scatter(-1, cost.topk(3, largest=False).indices, 1.0)


def sum_of_rows(x):
    import cvxpy as cp

    return cp.sum(x, axis=1)


COMPOSED_CASES = {
    f"LpBall, p={p}": SetCase(
        lambda gen, rows: {"radius": uniform(gen, rows), "weight": uniform(gen, rows, 8)},
        lambda own, p=p: dfw.LpBall(p, own["radius"], own["weight"]),
        lambda x, own, p=p: _norm_constraints(p)(x, own | {"centre": 0.0}),
        lambda x, own, p=p: _norm_violation(p)(x, own | {"centre": 0.0}),
        bad=(({"radius": -torch.ones((), dtype=F64)}, "radius: expected numbers ≥ 0, found -1"),),
        recorded=True,
    )
    for p in (1, np.inf)
}

COMPOSED_CASES |= {
    f"LpBall around a centre, p={p}": SetCase(
        centred_ball,
        lambda own, p=p: dfw.LpBall(p, own["radius"], own["weight"], centre=own["centre"]),
        _norm_constraints(p),
        _norm_violation(p),
        bad=(
            ({"centre": "0"}, "centre: expected a number or a tensor, got '0'"),
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
        lambda p: Ascending(p["top"]),
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
