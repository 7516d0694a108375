"""Every set of the table: exact, feasible, certified, differentiable, one problem at a time."""

from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

import dfwlayer as dfw
from engine_cases import CPU, Place, moved, places
from set_cases import CASES, F64
from set_problems import ROWS, Drawn, designed, draw, quadratic

EXACT = {torch.float64: (1e-12, 1e-7), torch.float32: (1e-6, 1e-4)}  # tol, relative error of x
STOPS = (0, 1, 3, 1000)


def solve(name: str, problem: Drawn, **settings):
    case = CASES[name]
    objective = quadratic(problem.P, problem.q, case.shape)
    return dfw.solve(objective, case.build(problem.parameters), **settings)


@lru_cache
def reference(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x* (rows, *shape) and f* (rows,), known or from Clarabel."""
    case, problem = CASES[name], draw(name, seed)
    if case.designed is not None:
        best = designed(name, seed)
        return best, value(best, problem)
    cp = pytest.importorskip("cvxpy")
    found, values = [], []
    for i in range(ROWS):
        x = cp.Variable(case.shape)
        flat = x if len(case.shape) == 1 else cp.vec(x, order="C")
        factor = torch.linalg.cholesky(problem.P[i]).mT.numpy()
        f = 0.5 * cp.sum_squares(factor @ flat) + problem.q[i].numpy() @ flat
        own = {k: v[i].numpy() for k, v in problem.parameters.items()}
        task = cp.Problem(cp.Minimize(f), case.constraints(x, own))
        tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-13)
        task.solve(solver=cp.CLARABEL, **tight)
        found.append(torch.from_numpy(np.array(x.value)))
        values.append(float(task.value))
    return torch.stack(found), torch.tensor(values, dtype=F64)


def to(problem: Drawn, dtype: torch.dtype, place: Place = CPU) -> Drawn:
    return Drawn(*(moved(part, place, dtype) for part in problem))


def row(problem: Drawn, i: int) -> Drawn:
    own = {k: v[i] for k, v in problem.parameters.items()}
    return Drawn(problem.P[i], problem.q[i], own)


def outside(name: str, x: Tensor, problem: Drawn) -> float:
    """The largest relative violation of all rows, in float64."""
    case = CASES[name]
    rows = x.detach().double().cpu().numpy()
    own = {k: v.double().numpy() for k, v in problem.parameters.items()}
    each = [case.violation(y, {k: v[i] for k, v in own.items()}) for i, y in enumerate(rows)]
    return max(each)


def value(x: Tensor, problem: Drawn) -> Tensor:
    v = x.detach().double().cpu().flatten(1)
    return 0.5 * (v * (problem.P @ v.unsqueeze(-1)).squeeze(-1)).sum(-1) + (problem.q * v).sum(-1)


@places
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_exact_answer(name, dtype, place):
    tol, allowed = EXACT[dtype]
    want, _ = reference(name)
    problem = to(draw(name), dtype, place)
    sol = place.run(lambda: solve(name, problem, tol=tol), recorded=CASES[name].recorded)
    assert sol.x.device.type == place.device
    error = torch.linalg.vector_norm((sol.x.double().cpu() - want).flatten(1), dim=-1)
    assert (error <= allowed * torch.linalg.vector_norm(want.flatten(1), dim=-1)).all(), error


@places
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_feasible_and_certified_wherever_it_stops(name, dtype, place):
    problem, eps = draw(name), torch.finfo(dtype).eps
    _, best = reference(name)
    gen = torch.Generator().manual_seed(1)
    far = 3 * torch.randn(ROWS, *CASES[name].shape, generator=gen, dtype=F64)
    given, far = to(problem, dtype, place), moved(far, place, dtype)
    stops = [("auto", max_steps, x0) for max_steps in STOPS for x0 in (None, far)]
    if place.engine == "eager":  # other methods are neither compiled nor recorded
        rest = [method for method in CASES[name].methods if method != "auto"]
        stops += [(m, most, x0) for m in rest for most in (1, 3, 40) for x0 in (None, far)]
    for method, max_steps, x0 in stops:
        settings = {"method": method, "max_steps": max_steps, "x0": x0}
        sol = place.run(partial(solve, name, given, **settings))
        assert outside(name, sol.x, problem) <= 8 * eps, (method, max_steps)
        above_best = value(sol.x, problem) - best
        noise = 100 * eps * (best.abs() + (problem.q * problem.q).sum(-1).sqrt())
        assert (above_best <= sol.gap.double().cpu() + noise).all(), (method, max_steps)
        assert (sol.num_steps <= max_steps).all()


@places
@pytest.mark.parametrize("name", CASES)
def test_gradient_in_every_parameter(name, place):
    """Along one random direction per parameter, all problems at once."""
    problem = draw(name)
    leaves = {"P": problem.P, "q": problem.q, **problem.parameters}
    gen = torch.Generator().manual_seed(2)
    probe = torch.randn(ROWS, *CASES[name].shape, generator=gen, dtype=F64)

    def at(leaves):
        own = {k: v for k, v in leaves.items() if k not in ("P", "q")}
        sol = solve(name, Drawn(leaves["P"], leaves["q"], own), tol=1e-13, max_steps=5000)
        return (sol.x * probe.to(sol.x)).flatten(1).sum(-1)

    asked = {k: v.requires_grad_() for k, v in moved(leaves, place, copy=True).items()}
    found = place.run(
        lambda: torch.autograd.grad(at(asked).sum(), asked.values()),
        recorded=CASES[name].recorded,
    )
    grads = {k: v.cpu() for k, v in zip(asked, found, strict=True)}
    for key, leaf in leaves.items():
        d = torch.randn(leaf.shape, generator=gen, dtype=F64)
        d = d + d.mT if key == "P" else d * (leaf != 0)  # a weight of zero has a kink there
        step = 1e-5 * (leaf[leaf.isfinite()].abs().amax() if key != "q" else 1)
        want = (at(leaves | {key: leaf + step * d}) - at(leaves | {key: leaf - step * d})) / (
            2 * step
        )
        got = (grads[key] * d).reshape(ROWS, -1).sum(-1)
        size = (grads[key] * d).reshape(ROWS, -1).abs().sum(-1)
        assert ((got - want).abs() <= 1e-5 * (1 + size)).all(), (key, got, want)


@places
@pytest.mark.parametrize("name", CASES)
def test_batch_is_many_single_problems(name, place):
    problem = to(draw(name, seed=3), F64, place)
    both = place.run(partial(solve, name, problem, tol=1e-12))
    for i in (0, ROWS - 1):
        alone = place.run(partial(solve, name, row(problem, i), tol=1e-12))
        torch.testing.assert_close(alone.x, both.x[i], rtol=1e-7, atol=1e-8)
        assert alone.status.shape == ()


@places
@pytest.mark.parametrize("name", CASES)
def test_a_bad_problem_stays_alone(name, place):
    problem = to(draw(name), F64, place)
    clean = solve(name, problem)
    for key, tensor in problem.parameters.items():
        leaf = tensor.clone()
        leaf[1].reshape(-1)[0] = torch.nan
        leaf.requires_grad_()
        spoilt = problem._replace(parameters=problem.parameters | {key: leaf})
        sol = place.run(partial(solve, name, spoilt))
        others = torch.arange(ROWS, device=place.device) != 1
        assert sol.status[1] == dfw.Status.NONFINITE
        assert sol.x[1].isnan().all()
        torch.testing.assert_close(sol.x[others], clean.x[others])
        (grad,) = torch.autograd.grad(sol.x[others].sum(), leaf)
        assert grad.isfinite().all()


BAD = [(name, i) for name, case in CASES.items() for i in range(len(case.bad))]


@pytest.mark.parametrize(("name", "index"), BAD)
def test_bad_input(name, index):
    change, message = CASES[name].bad[index]
    problem = row(draw(name), 0)
    with pytest.raises(ValueError, match=message):
        solve(name, problem._replace(parameters=problem.parameters | change))
