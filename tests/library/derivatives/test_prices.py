"""The derivative of the value, and the multipliers, which are a part of it."""

import copy
import pickle

import pytest
import torch
from torch.func import grad, hessian, jacfwd, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import default_collate

import dfwlayer as dfw
from dfwlayer.engines import compiled
from set_cases import CASES, F64
from set_problems import draw, quadratic

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
STEP = 1e-5
ENGINES = {"compiled": True, "tensor operations": False}


def problem(name, seed=0, dtype=F64):
    """A function from (P, q, the set's parameters) to the solution, and these."""
    case, drawn = CASES[name], draw(name, seed)
    names = list(drawn.parameters)

    def solved(P, q, *parameters, **settings):
        objective = quadratic(0.5 * (P + P.mT), q, case.shape)
        constraint = case.build(dict(zip(names, parameters, strict=True)))
        return dfw.solve(objective, constraint, **{"tol": 1e-11} | settings)

    given = (drawn.P, drawn.q, *drawn.parameters.values())
    return solved, [t.to(dtype).requires_grad_() for t in given], ["P", "q", *names]


def directions(leaves, seed=1):
    """Movements of all of them; what is exactly zero, a weight, is at a kink and stays."""
    gen = torch.Generator().manual_seed(seed)
    draws = (torch.randn(a.shape, generator=gen, dtype=F64) for a in leaves)
    return [0.1 * d * (a.detach() != 0) for a, d in zip(leaves, draws, strict=True)]


def moved(leaves, ways, step):
    return [(a.detach() + step * d).requires_grad_() for a, d in zip(leaves, ways, strict=True)]


def along(gradients, ways):
    pairs = zip(gradients, ways, strict=True)
    return sum((g * d).sum() for g, d in pairs if g is not None)


def close(a, b, rtol=1e-6, atol=1e-7):
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def weighted(prices):
    """One number of all prices that tells them apart."""
    return sum((i + 1) * p.sum() for i, p in enumerate(prices.values()))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_the_value_against_differences(name, engine):
    """First ones, and, with the same graph, second ones."""
    solved, leaves, _ = problem(name)
    ways = directions(leaves)

    def gradients(at, create_graph=False):
        with compiled.using(ENGINES[engine]):
            return torch.autograd.grad(solved(*at).value.sum(), at, create_graph=create_graph)

    with compiled.using(ENGINES[engine]):
        ahead, behind = (solved(*moved(leaves, ways, s)).value.sum() for s in (STEP, -STEP))
    first = gradients(leaves, create_graph=True)
    slope = along(first, ways)
    close(slope, (ahead - behind) / (2 * STEP))
    for own, other in zip(gradients(leaves), first, strict=True):
        close(own, other, rtol=1e-12, atol=1e-12)
    second = torch.autograd.grad(slope, leaves)
    ends = (gradients(moved(leaves, ways, s)) for s in (STEP, -STEP))
    pairs = zip(*ends, strict=True)
    for own, (a, b), leaf in zip(second, pairs, leaves, strict=True):
        other = (a - b) / (2 * STEP)
        close(own, torch.where(leaf == 0, own, other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_prices_are_what_the_limits_cost(name):
    """−∂f*/∂t for each parameter, with the right signs, and gradients."""
    solved, leaves, names = problem(name)
    sol = solved(*leaves)
    prices, slopes = (
        sol.multipliers,
        torch.autograd.grad(sol.value.sum(), leaves, retain_graph=True),
    )
    assert sol.multipliers is prices
    for own, price in prices.items():
        if own in names:
            close(price, -slopes[names.index(own)], rtol=1e-10, atol=1e-10)
        if own.endswith(("upper", "cap", "top")) or (own == "radius" and "Simplex" not in name):
            assert (price >= 0).all()
        if own.endswith("lower"):
            assert (price <= 0).all()
    if not prices:
        return
    ways = directions(leaves, seed=2)
    got = torch.autograd.grad(weighted(prices), leaves, allow_unused=True, create_graph=True)
    ends = (weighted(solved(*moved(leaves, ways, s)).multipliers) for s in (STEP, -STEP))
    close(along(got, ways), torch.sub(*ends) / (2 * STEP), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("CustomSet", "Birkhoff")])
def test_prices_times_limits_are_the_slope_along_x(name, engine, dtype):
    """Σ price · t = −⟨∇f, x⟩, as {cx : x in the set} has c times all t; x seen from the centre."""
    solved, leaves, names = problem(name, 3, dtype)
    if "centre" in names and name != "Product":
        leaves[names.index("centre")] = torch.zeros_like(leaves[names.index("centre")])
    values = dict(zip(names, (t.detach() for t in leaves), strict=True))
    with compiled.using(ENGINES[engine]), torch.no_grad():
        sol = solved(*leaves, tol=1e-5 if dtype == torch.float32 else 1e-11)
        prices = sol.multipliers
    x = sol.x.flatten(1)
    if name == "Product":
        x = torch.cat((x[:, :4], x[:, 4:6] - values["centre"], x[:, 6:]), -1)
        values |= {"0.radius": values["radius"], "1.radius": values["radius"]}
        values["2.radius"] = values["bound"]
    if name == "Transport":
        plan = sol.x.reshape(len(x), values["rows"].shape[-1], -1)
        values |= {"row_sums": plan.sum(-1), "column_sums": plan.sum(-2)}
    P = 0.5 * (values["P"] + values["P"].mT)
    slope = (P @ sol.x.flatten(1).unsqueeze(-1)).squeeze(-1) + values["q"]
    total = torch.zeros_like(sol.value)
    for own, price in prices.items():
        assert price.dtype == dtype
        assert price.shape[0] == len(x)
        if own in values:
            absent = torch.isinf(values[own])
            assert (price[absent.expand_as(price)] == 0).all()
            limits = torch.where(absent, 0, values[own])
            total = total + (price * limits).reshape(len(x), -1).sum(-1)
    size = (slope * x).abs().sum(-1)
    rounding = 1e-8 if dtype == F64 else 2e-3
    assert ((total + (slope * x).sum(-1)).abs() <= rounding * (1 + size)).all()


def objective_of(kind, like):
    gen = torch.Generator().manual_seed(5)
    A = torch.randn(9, 4, generator=gen, dtype=F64).to(like).requires_grad_()
    b = 3 * torch.randn(3, 9, generator=gen, dtype=F64).to(like)
    b.requires_grad_()
    if kind == "sparse":
        A = A.detach().to_sparse().requires_grad_()
    if kind == "Smooth":
        return (
            dfw.Smooth(lambda x, A, b: 0.5 * (x @ A.mT - b).square().sum(-1), A, b, shape=(4,)),
            A,
            b,
        )
    return dfw.LeastSquares(A, b), A, b


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["dense", "sparse", "Smooth"])
def test_every_objective(kind, engine, dtype):
    """∂f*/∂b = b − Ax, ∂f*/∂A = (Ax − b) xᵀ, ∂f*/∂t = ⟨Ax − b, Ax⟩/t for a ball."""
    objective, A, b = objective_of(kind, torch.empty(0, dtype=dtype))
    radius = torch.tensor(0.4, dtype=dtype, requires_grad=True)
    with compiled.using(ENGINES[engine]):
        sol = dfw.solve(objective, dfw.LpBall(1, radius))
        got = torch.autograd.grad(sol.value.sum(), (A, b, radius))
    with torch.no_grad():
        x, rest = sol.x, sol.x @ A.to_dense().mT - b
        along_x = (rest * (x @ A.to_dense().mT)).sum(-1)
    rtol, atol = (2e-4, 2e-4) if dtype == torch.float32 else (1e-9, 1e-9)
    close(got[0].to_dense(), rest.mT @ x, rtol, atol)
    close(got[1], -rest, rtol, atol)
    close(got[2], along_x.sum() / radius.detach(), rtol, atol)
    with torch.no_grad():
        quiet = dfw.solve(objective, dfw.LpBall(1, radius)).multipliers["radius"]
    close(quiet, -along_x / radius.detach(), rtol, atol)
    assert not quiet.requires_grad


def test_a_tensor_that_the_function_holds_gets_its_gradient_from_the_value():
    """And the multipliers say that theirs would be lost."""
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    q = torch.tensor([-3.0, 1.0], dtype=F64)
    f = dfw.Smooth(lambda x, q: 0.5 * scale * (x * x).sum(-1) + (q * x).sum(-1), q, shape=(2,))
    sol = dfw.solve(f, dfw.LpBall(2))
    (got,) = torch.autograd.grad(sol.value, scale)
    close(got, 0.5 * (sol.x.detach() ** 2).sum())
    with pytest.raises(RuntimeError, match="not one of its arguments"):
        _ = sol.multipliers


def test_steps_that_were_taken():
    """Unrolled, the value depends on the parameters through the steps, too."""
    P = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64))
    q = torch.tensor([-1.0, 0.5, -3.0], dtype=F64, requires_grad=True)
    t = torch.tensor(0.7, dtype=F64, requires_grad=True)

    def value(q, t):
        return dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(3, t), method="dfw", max_steps=5).value

    assert torch.autograd.gradcheck(value, (q, t))
    assert torch.autograd.gradgradcheck(value, (q, t))


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_problems_have_neither_prices_nor_gradients(engine):
    q = torch.tensor([[-2.0, 1.0], [torch.nan, 0.0], [-3.0, 0.1]], dtype=F64, requires_grad=True)
    t = torch.tensor([0.5, 0.5, -1.0], dtype=F64, requires_grad=True)
    with compiled.using(ENGINES[engine]):
        sol = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, t))
        prices = sol.multipliers["radius"]
    assert sol.status.tolist() == [0, dfw.Status.NONFINITE, dfw.Status.INVALID]
    assert torch.isnan(sol.value).tolist() == torch.isnan(prices).tolist() == [False, True, True]
    assert torch.isnan(sol.violation).tolist() == [False, True, True]
    both = sol.value.nan_to_num().sum() + prices.nan_to_num().sum()
    for leaf in torch.autograd.grad(both, (q, t)):
        assert torch.isfinite(leaf).all()
        assert leaf[0].abs().sum() > 0
        assert (leaf[1:] == 0).all()


def test_shapes_follow_the_call():
    q = torch.tensor([-2.0, 1.0, 0.1], dtype=F64)
    one = dfw.solve(dfw.Quadratic(None, q), dfw.Box(-0.5, 0.5)).multipliers
    assert {k: tuple(v.shape) for k, v in one.items()} == {"lower": (3,), "upper": (3,)}
    close(one["upper"], torch.tensor([1.5, 0, 0], dtype=F64))
    close(one["lower"], torch.tensor([0, -0.5, 0], dtype=F64))
    shared = torch.tensor(0.5, dtype=F64, requires_grad=True)
    sol = dfw.solve(dfw.Quadratic(None, torch.stack((q, 0.1 * q))), dfw.LpBall(1, shared))
    close(sol.multipliers["radius"].detach(), torch.tensor([1.5, 0.0], dtype=F64))
    (got,) = torch.autograd.grad(sol.multipliers["radius"].sum(), shared)
    close(got, torch.tensor(-1.0, dtype=F64))  # soft threshold of one entry: λ = 2 − t


def test_a_batch_of_one_bad_problem_and_one_that_the_start_makes():
    q = torch.tensor([[torch.nan, 1.0]], dtype=F64)
    sol = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, 0.5))
    assert torch.isnan(sol.multipliers["radius"]).tolist() == [True]
    assert torch.isnan(sol.violation).tolist() == [True]
    start = torch.zeros(2, 2, dtype=F64)
    sol = dfw.solve(
        dfw.Quadratic(None, torch.tensor([-2.0, 1.0], dtype=F64)), dfw.LpBall(1, 0.5), x0=start
    )
    start.fill_(7)
    close(sol.multipliers["radius"], torch.full((2,), 1.5, dtype=F64))
    assert sol.violation.shape == (2,)


def test_one_tensor_in_several_places():
    """A radius of two sets, and a vector that is the objective's and the set's."""
    v = torch.tensor([1.0, 2.0, -2.0, 3.0], dtype=F64, requires_grad=True)
    t = torch.tensor(0.6, dtype=F64, requires_grad=True)

    def value(v, t):
        sets = dfw.Product([dfw.LpBall(1, t), dfw.LpBall(2, t)], [2, 2])
        halves = dfw.solve(dfw.Quadratic(None, v), sets).value
        return halves + dfw.solve(dfw.Quadratic(None, v), dfw.LpBall(2, t, weight=v)).value

    for engine in ENGINES.values():
        with compiled.using(engine):
            assert torch.autograd.gradcheck(value, (v, t))
            assert torch.autograd.gradgradcheck(value, (v, t))


def test_changes_in_place_are_noticed():
    q = torch.tensor([-2.0, 1.0], dtype=F64, requires_grad=True)
    for engine in ENGINES.values():
        held = q.clone()
        with compiled.using(engine):
            sol = dfw.solve(dfw.Quadratic(torch.eye(2, dtype=F64), held), dfw.LpBall(2, 0.5))
        with torch.no_grad():
            held.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            sol.value.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            _ = sol.multipliers


@pytest.mark.parametrize("name", ["LpBall, p=1", "Simplex", "Box in a plane", "Ellipsoid"])
def test_inside_of_transforms(name):
    """The value's gradient and Hessian, and prices, as autograd has them."""
    solved, leaves, _ = problem(name, 4)
    P, q, *parameters = (t.detach()[0] for t in leaves)

    def value(q):
        return solved(P, q, *parameters).value

    def price(q):
        return weighted(solved(P, q, *parameters).multipliers)

    leaf = q.clone().requires_grad_()
    sol = solved(P, leaf, *parameters)
    close(grad(value)(q), sol.x.detach(), rtol=1e-10)
    right = torch.autograd.functional.jacobian(lambda q: solved(P, q, *parameters).x, q)
    close(hessian(value)(q), right, rtol=1e-8, atol=1e-9)
    close(jacfwd(value)(q), sol.x.detach(), rtol=1e-10)
    (slope,) = torch.autograd.grad(weighted(sol.multipliers), leaf)
    close(grad(price)(q), slope, rtol=1e-8, atol=1e-10)
    close(jacfwd(price)(q), slope, rtol=1e-8, atol=1e-10)
    batch = torch.stack((q, 0.9 * q))
    close(vmap(grad(value))(batch)[0], sol.x.detach(), rtol=1e-8, atol=1e-9)
    close(vmap(price)(batch)[0], price(q), rtol=1e-8, atol=1e-9)


def test_a_solution_is_a_pytree():
    q = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))

    def solved(q):
        return dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, 0.5))

    mapped, sol = vmap(solved)(q), solved(q)
    assert isinstance(mapped, dfw.Solution)
    close(mapped.x, sol.x)
    close(mapped.value, sol.value)
    parts, how = tree_flatten(sol)
    assert len(parts) == 5
    again = tree_unflatten(parts, how)
    assert all(getattr(again, k) is getattr(sol, k) for k in ("x", "value", "gap", "num_steps"))
    halves = tree_map(lambda t: t[:2], sol)
    assert halves.converged.shape == (2,)
    whole = default_collate([solved(row) for row in q])
    assert isinstance(whole, dfw.Solution)
    close(whole.x, sol.x)
    assert whole.status.shape == (4,)
    for other in (again, pickle.loads(pickle.dumps(sol)), copy.deepcopy(sol)):
        close(other.x, sol.x)
        with pytest.raises(RuntimeError, match="ask for them before"):
            _ = other.multipliers


def test_violation_is_the_sets_own():
    sol = dfw.solve(dfw.Quadratic(None, torch.tensor([-2.0, 1.0])), dfw.LpBall(2, 0.5))
    assert sol.violation.shape == ()
    close(sol.violation, dfw.LpBall(2, 0.5).violation(sol.x))
    matrix = torch.randn(3, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    f = dfw.Smooth(lambda x, m: 0.5 * (x - m).square().sum((-2, -1)), matrix, shape=(4, 5))
    sol = dfw.solve(f, dfw.NuclearBall(1.0))
    assert sol.violation.shape == (3,)
    assert (sol.violation <= 1e-14).all()
    assert sol.multipliers["radius"].shape == (3,)


def test_without_autograd_and_in_inference_mode():
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            q = torch.tensor([-2.0, 1.0], dtype=F64)
            sol = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, 0.5))
            inside = sol.multipliers["radius"]
            other = dfw.solve(dfw.Quadratic(None, q), dfw.LpBall(1, 0.5))
        assert not inside.requires_grad
        close(inside.clone(), torch.tensor(1.5, dtype=F64))
        close(other.multipliers["radius"].clone(), torch.tensor(1.5, dtype=F64))
