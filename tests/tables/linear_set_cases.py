"""The rows of half-spaces, planes, affine sets and the orthant, and of transport plans."""

import numpy as np
import torch
from torch import Generator, Tensor

import dfwlayer as dfw
from set_case import F64, SetCase, above, uniform


def _cut(gen: Generator, rows: int) -> dict[str, Tensor]:
    normal = torch.randn(rows, 8, generator=gen, dtype=F64)
    return {"normal": normal, "level": torch.randn(rows, generator=gen, dtype=F64)}


def _equations(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {
        "A": torch.randn(rows, 3, 8, generator=gen, dtype=F64),
        "b": torch.randn(rows, 3, generator=gen, dtype=F64),
    }


def _terms(a, x, b):
    """What the two sides of a row consist of, in whose rounding it is met."""
    return np.abs(a) @ np.abs(x) + np.abs(b)


def _plans(gen: Generator, rows: int) -> dict[str, Tensor]:
    return {
        "rows": uniform(gen, rows, 3, low=1.2, high=1.6),
        "columns": uniform(gen, rows, 4, low=0.9, high=1.3),
    }


def _balanced(p):
    """The sums, those of the columns moved to the total of the others; tensors or NumPy."""
    missing = p["rows"].sum(-1) - p["columns"].sum(-1)
    return p["rows"], p["columns"] + missing[..., None] / 4


def _plan_constraints(x, p):
    import cvxpy as cp

    r, c = _balanced(p)
    return [x >= 0, cp.sum(x, axis=1) == r, cp.sum(x, axis=0)[:-1] == c[:-1]]


def _plan_violation(x, p):
    r, c = _balanced(p)
    # in float32 the sums themselves are rounded
    return above(-x, np.abs(x.sum(1) - r) / r, np.abs(x.sum(0) - c) / r.sum())


LINEAR_CASES = {
    "HalfSpace": SetCase(
        lambda gen, rows: _cut(gen, rows) | {"level": -uniform(gen, rows)},
        lambda p: dfw.HalfSpace(p["normal"], p["level"]),
        lambda x, p: [p["normal"] @ x <= p["level"]],
        lambda x, p: above(
            (p["normal"] @ x - p["level"]) / _terms(p["normal"], x, p["level"]),
        ),
        methods=("auto",),
        bounded=False,
        bad=(
            ({"normal": torch.ones(7, dtype=F64)}, r"normal: expected a number, shape \(8,\)"),
            ({"normal": "1"}, "normal: expected a number or a tensor, got '1'"),
            ({"level": torch.tensor(torch.inf, dtype=F64)}, "level: 1 of 1 values are NaN"),
        ),
    ),
    "Hyperplane": SetCase(
        _cut,
        lambda p: dfw.Hyperplane(p["normal"], p["level"]),
        lambda x, p: [p["normal"] @ x == p["level"]],
        lambda x, p: above(
            np.abs(p["normal"] @ x - p["level"]) / _terms(p["normal"], x, p["level"])
        ),
        methods=("auto",),
        bounded=False,
        bad=(
            ({"normal": torch.ones(7, dtype=F64)}, r"normal: expected a number, shape \(8,\)"),
            ({"level": None}, "level: expected a number or a tensor, got NoneType"),
        ),
    ),
    "AffineSet": SetCase(
        _equations,
        lambda p: dfw.AffineSet(p["A"], p["b"]),
        lambda x, p: [p["A"] @ x == p["b"]],
        lambda x, p: above(np.abs(p["A"] @ x - p["b"]) / _terms(p["A"], x, p["b"])),
        methods=("auto",),
        bounded=False,
        bad=(
            ({"A": torch.ones(3, 7, dtype=F64)}, "A: expected rows of 8 entries"),
            ({"A": torch.ones(8, dtype=F64)}, r"A: expected shape \(m, n\) or \(\*batch, m, n\)"),
            ({"A": None}, "A: expected a tensor, got NoneType"),
            ({"b": torch.ones(4, dtype=F64)}, "b: expected shape"),
        ),
    ),
    "NonNegative": SetCase(
        lambda _gen, _rows: {},
        lambda _: dfw.NonNegative(),
        lambda x, _: [x >= 0],
        lambda x, _: above(-x),
        pull=2.0,
        methods=("auto",),
        bounded=False,
    ),
    "Transport": SetCase(
        _plans,
        lambda p: dfw.Transport(*_balanced(p)),
        _plan_constraints,
        _plan_violation,
        shape=(3, 4),
        pull=2.0,
        methods=("auto", "frank-wolfe"),
        bad=(
            ({"rows": -torch.ones(3, dtype=F64)}, "row_sums: expected numbers ≥ 0, found -1"),
            ({"rows": torch.ones(2, dtype=F64)}, "row_sums, column_sums: 2 and 4 of them go with"),
        ),
    ),
}
