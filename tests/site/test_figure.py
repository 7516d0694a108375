"""The figure to drag computes what the library does, in a real browser."""

import math
from pathlib import Path

import pytest
import torch

from dfwlayer import LpBall, Quadratic, solve

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
F64 = torch.float64
SHAPES = [[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 0.7]], [[1.5, 0.9], [0.9, 1.0]]]


@pytest.fixture(scope="module")
def figure(browser):
    page = browser.new_page()
    page.add_script_tag(path=str(ROOT / "docs/assets/ball.js"))
    yield lambda problems: page.evaluate("all => all.map(one => dfwBall.solve(one))", problems)
    page.close()


def draw(count, p):
    """Problems with solutions inside, on sides and at corners."""
    gen = torch.Generator().manual_seed(round(100 * min(p, 99)))
    rand = lambda *shape: torch.rand(*shape, generator=gen, dtype=F64)  # noqa: E731
    return [
        {
            "P": SHAPES[k % 3],
            "q": (6 * rand(2) - 3).tolist(),
            "w": (0.3 + 2 * rand(2)).tolist(),
            "t": float(0.1 + 1.9 * rand(())),
            "p": p,
        }
        for k in range(count)
    ]


@pytest.mark.parametrize("p", [1.0, 1.05, 1.5, 2.0, 3.0, 20.0, math.inf])
def test_solution_price_and_derivatives_are_the_librarys(figure, p):
    problems = draw(12, p)
    P, q, w, t = (
        torch.tensor([problem[name] for problem in problems], dtype=F64) for name in "Pqwt"
    )
    found = figure(problems)

    def solution(q, t, w):
        return solve(Quadratic(P, q), LpBall(p, t, w), tol=1e-13).x

    sol = solve(Quadratic(P, q), LpBall(p, t, w), tol=1e-13)
    # problems do not see each other, so a sum over the batch has all derivatives of one entry
    slopes = [
        torch.autograd.grad(solution(*leaves)[:, i].sum(), leaves)
        for i in range(2)
        for leaves in [tuple(v.clone().requires_grad_() for v in (q, t, w))]
    ]
    dq, dt, dw = (torch.stack(rows, 1) for rows in zip(*slopes, strict=True))
    expected = {"x": sol.x, "value": sol.value, "price": sol.multipliers["radius"]}
    for name, value in (expected | {"dq": dq, "dt": dt, "dw": dw}).items():
        ours = torch.tensor([one[name] for one in found], dtype=F64)
        assert torch.allclose(ours, value, rtol=1e-10, atol=1e-10), name
    assert max(abs(one["gap"]) for one in found) < 1e-12


def test_every_kind_of_face_is_met(figure):
    faces = {one["face"] for p in (1.0, 2.0, math.inf) for one in figure(draw(12, p))}
    assert faces == {"inside", "corner", "side", "curve"}
