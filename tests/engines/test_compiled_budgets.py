"""Rows and bounds with a budget around a centre in compiled code: portfolios with turnover."""

import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F32, F64, answers, attempted, close, leaf
from dfwlayer.engines import compiled
from dfwlayer.engines.compiled import budgets

N = 7


def parts_of(lead, dtype=F64, seed=0):
    make = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, dtype=F64, generator=make)

    root = uniform(N, N) - 0.5
    held = torch.full((*lead, N), 1 / N, dtype=F64) * (0.7 + 0.6 * uniform(*lead, N))
    held = held / held.sum(-1, keepdim=True)
    G = uniform(2, N)
    parts = {
        "P": root.mT @ root + 0.1 * torch.eye(N, dtype=F64),
        "q": uniform(*lead, N) - 0.5,
        "held": held,
        "turnover": 0.1 + 0.1 * uniform(*lead),
        "weight": 0.5 + uniform(N),
        "cap": 0.25 + 0.1 * uniform(N),
        "G": G,
        "h": (held @ G.mT).reshape(-1, 2).amax(0) * 1.01,
    }
    return {name: leaf(part.to(dtype)) for name, part in parts.items()}


SETS = {
    "capped simplex": lambda p: (
        dfw.CappedSimplex(1.0, p["cap"]),
        dfw.LpBall(1, p["turnover"], centre=p["held"]),
    ),
    "rows and bounds": lambda p: (
        dfw.Polyhedron(p["G"], p["h"], lower=0.0, upper=p["cap"]),
        dfw.LpBall(1, p["turnover"], p["weight"], centre=p["held"]),
    ),
    "both": lambda p: (
        dfw.CappedSimplex(1.0, p["cap"]),
        dfw.Polyhedron(p["G"], p["h"]),
        dfw.LpBall(1, p["turnover"], p["weight"], centre=p["held"]),
    ),
    "around zero": lambda p: (
        dfw.Polyhedron(p["G"], p["h"], lower=-0.05),
        dfw.LpBall(1, p["turnover"], p["weight"]),
    ),
    "a centre outside": lambda p: (
        dfw.Polyhedron(p["G"], p["h"], lower=0.0, upper=p["cap"]),
        dfw.LpBall(1, 6 * p["turnover"], centre=p["held"] - 0.1),
    ),
}


def solved(parts, name, **options):
    objective = dfw.Quadratic(parts["P"], parts["q"])
    found = attempted(objective, dfw.Intersection(*SETS[name](parts)), tol=1e-6, **options)
    assert found is not None
    assert found.left is None
    return found.solution


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("lead", [(), (4,)])
def test_agrees_with_tensor_operations(name, lead):
    """x, and its gradients and those of the value in every tensor."""
    found = []
    for engine in ("wait", False):
        parts = parts_of(lead)
        objective = dfw.Quadratic(parts["P"], parts["q"])
        with compiled.using(engine):
            sol = dfw.solve(objective, dfw.Intersection(*SETS[name](parts)))
            slope = torch.linspace(0.5, 1.5, N, dtype=F64)
            ((slope * sol.x).sum() + 0.3 * sol.value.sum()).backward()
        found.append((sol, [part.grad for part in parts.values()]))
    solved(parts_of(lead), name)
    (own, gradients), (other, right) = found
    assert torch.equal(own.status, other.status)
    close(own.x, other.x, 1e-12)
    for one, expected in zip(gradients, right, strict=True):
        assert (one is None) == (expected is None)
        if one is not None:
            close(one, expected, 1e-9)


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_result_is_feasible_and_certified(name, dtype):
    for seed in range(3):
        parts = parts_of((4,), dtype, seed)
        sol = solved(parts, name)
        assert sol.x.dtype == dtype
        for part in SETS[name](parts):
            bound = part.bind((N,), dtype, torch.device("cpu"))
            assert (bound.violation(sol.x) <= 16 * torch.finfo(dtype).eps).all()
        wide = {name: part.detach().double() for name, part in parts.items()}
        with compiled.using(False):
            best = dfw.solve(
                dfw.Quadratic(wide["P"], wide["q"]), dfw.Intersection(*SETS[name](wide))
            ).value
        x, slack = sol.x.detach().double(), 64 * torch.finfo(dtype).eps
        value = (x * (0.5 * x @ wide["P"] + wide["q"])).sum(-1)
        assert (value - best <= sol.gap.double() + slack).all()


def test_a_budget_that_is_not_spent_is_no_force():
    parts = parts_of((3,))
    with torch.no_grad():
        parts["turnover"].fill_(5.0)
    sol = solved(parts, "both")
    parts["turnover"].grad = None
    sol.x.square().sum().backward()
    assert not parts["turnover"].grad.any()
    assert not parts["held"].grad.any()
    close(
        sol.x,
        answers(dfw.Quadratic(parts["P"], parts["q"]), dfw.Intersection(*SETS["both"](parts)[:2]))[
            0
        ].x,
        1e-14,
    )


def test_least_squares_with_turnover():
    parts, make = parts_of((3,)), torch.Generator().manual_seed(5)
    A, b = (
        torch.randn(9, N, dtype=F64, generator=make),
        torch.randn(3, 9, dtype=F64, generator=make),
    )
    constraint = dfw.Intersection(*SETS["capped simplex"](parts))
    found = attempted(dfw.LeastSquares(A, b), constraint, tol=1e-6)
    assert found is not None
    assert found.left is None
    with compiled.using(False):
        other = dfw.solve(dfw.LeastSquares(A, b), constraint)
    close(found.solution.x, other.x, 1e-12)
    close(found.solution.value, other.value, 1e-12)


def test_bad_problems_do_not_touch_the_others():
    parts = parts_of((4,))
    right = solved(parts, "both").x
    with torch.no_grad():
        parts["q"][1] = torch.nan
        parts["held"][2] = 3.0  # no point is that near
    objective = dfw.Quadratic(parts["P"], parts["q"])
    found = attempted(objective, dfw.Intersection(*SETS["both"](parts)), tol=1e-6)
    assert found.left.tolist() == [False, True, True, False]
    close(found.solution.x[[0, 3]], right[[0, 3]], 0.0)


def test_two_budgets_are_left():
    parts = parts_of(())
    sets = (*SETS["both"](parts), dfw.LpBall(1, 2.0))
    assert attempted(dfw.Quadratic(parts["P"], parts["q"]), dfw.Intersection(*sets)) is None


def test_signs_turn_where_the_budget_has_to_hold_the_other_side(monkeypatch):
    """The programs on sides of the centre end where the one of both parts of x − c ends."""
    make = torch.Generator().manual_seed(3)
    root = torch.randn(64, N, 2, dtype=F64, generator=make)
    P = 10 * root @ root.mT + 0.1 * torch.eye(N, dtype=F64)
    parts = parts_of((64,)) | {"P": leaf(P)}
    parts["q"] = leaf(0.3 * torch.randn(64, N, dtype=F64, generator=make))
    rounds, sided = [], budgets.Budgets._sided
    monkeypatch.setattr(
        budgets.Budgets, "_sided", lambda self, side: rounds.append(len(side)) or sided(self, side)
    )
    found = [solved(parts, "capped simplex")]
    assert len(rounds) > 1  # some signs were turned
    assert rounds[0] > 32
    monkeypatch.setattr(budgets, "TURNS", 0)
    found.append(solved(parts, "capped simplex"))
    v = torch.linspace(0.5, 1.5, N, dtype=F64)
    inputs = [parts[name] for name in ("P", "q", "held", "turnover", "cap")]
    gradients = [torch.autograd.grad((sol.x * v).sum() + sol.value.sum(), inputs) for sol in found]
    close(found[0].x, found[1].x, 1e-12)
    for one, other in zip(*gradients, strict=True):
        close(one, other, 1e-9)
