"""What the fuzz harness draws and calculates: its formulas against others, calls that are wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from dfwlayer_bench.fuzz import draw_call, draw_problem, judge_call
from dfwlayer_bench.fuzz.base import norm
from dfwlayer_bench.fuzz.checks import fractions
from dfwlayer_bench.fuzz.data import LONG, wide
from dfwlayer_bench.fuzz.grammar import BadCall, odd
from dfwlayer_bench.fuzz.matrices import singular_values
from dfwlayer_bench.fuzz.objectives import Units
from dfwlayer_bench.fuzz.problems import SETS


def test_norms_and_singular_values() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 5))
    for p in (1, 1.05, 2, 3.5, math.inf):
        assert np.allclose(norm(x.astype(LONG), p).astype(float), np.linalg.norm(x, p, axis=-1))
        exact = norm(fractions(x), p)
        assert all(isinstance(entry, Fraction) for entry in exact)
        assert np.allclose(exact.astype(float), np.linalg.norm(x, p, axis=-1))
    X = rng.standard_normal((7, 4, 3))
    found = -np.sort(-singular_values(X.astype(LONG)).astype(float), -1)
    assert np.allclose(found, np.linalg.svd(X, compute_uv=False), rtol=1e-13)


@pytest.mark.parametrize("index", range(2 * len(SETS)))
def test_vertices_are_feasible_and_lowest(index: int) -> None:
    """No point that the set draws of itself has a lower ⟨g, s⟩ than its vertex."""
    problem = replace(draw_problem(3, index, only=0), units=Units())
    rng = np.random.default_rng(index)
    p = wide(problem.params)
    row = problem.set
    costs = rng.standard_normal((20, row.n)).astype(LONG)
    if row.free(costs[:1], p) is not None:
        return
    vertices = np.concatenate([row.vertex(g[None], p) for g in costs])
    for excess in (e for v in vertices for e in row.excess(v[None], p)):
        # singular vectors and factors are of double precision
        assert excess.by[0] <= 1e-12 * (1 + excess.size[0])
    for g in costs:
        lowest = row.lowest(g[None], p)[0]
        assert (vertices @ g >= lowest - 1e-12 * (1 + abs(lowest))).all()


def test_every_problem_is_determined_by_seed_and_index() -> None:
    for index in range(0, 60, 7):
        one, two = draw_problem(9, index), draw_problem(9, index)
        assert one.about == two.about
        for name in one.params:
            assert np.array_equal(one.params[name].value, two.params[name].value)


# ---------------------------------------------------------------------------------------------
# bad inputs


def call(text: str) -> BadCall:
    return BadCall(0, 0, text, "dfw.solve", {"q", "radius", "x0"})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torch.ones(3) + torch.ones(4)", "raw error"),
        ("torch.ones(3).reshape('a')", "raw error"),
        ("int('a')", "unnamed"),
        ("3", "result"),
        ("torch.ones(3, device='meta')", "result"),
        ("(_ for _ in ()).throw(ValueError('radius: expected a number'))", None),
        ("dfw.Simplex(wieght=1.0)", None),
        ("torch.ones(3)", None),
    ],
)
def test_outcomes_of_bad_calls(text: str, kind: str | None) -> None:
    failure = judge_call(call(text))
    assert (failure and failure.kind) == kind


def test_calls_are_determined_and_compile() -> None:
    for index in range(40):
        assert draw_call(2, index).text == draw_call(2, index).text
        compile(draw_call(2, index).source(), "call", "exec")


def test_odd_arguments_exist() -> None:
    """What is passed to the library can itself be made, so that errors are the library's."""
    rng = np.random.default_rng(0)
    names = {"torch": torch, "np": np, "dfw": dfw}
    for _ in range(500):
        eval(odd(rng), names)
