"""One problem of a batch whose set makes no sense has a status; a call of its own is an error."""

import math

import pytest
import torch

import dfwlayer as dfw
from dfwlayer import Status
from helpers import DEVICES, F64

ROWS, N, BAD = 5, 4, 3
INF = math.inf
GROUPS = [[0, 1], [2, 3]]


def full(value, *shape):
    return torch.full(shape, value, dtype=F64)


def spread(seed, *shape):
    """Numbers in [0.5, 1.5]."""
    gen = torch.Generator().manual_seed(seed)
    return 0.5 + torch.rand(ROWS, *shape, generator=gen, dtype=F64)


def singular():
    A = torch.eye(N, dtype=F64)
    A[0, 0] = 0
    return A


# name: parameters with a batch in front, the set, the parameter that is spoilt, how, the status
CASES = {
    "LpBall radius": ({"t": spread(1)}, lambda p: dfw.LpBall(1.5, p["t"]), "t", -1.0, "INVALID"),
    "weighted LpBall": (
        {"t": spread(1), "w": spread(2, N)},
        lambda p: dfw.LpBall(1, p["t"], p["w"]),
        "t",
        -1e-30,
        "INVALID",
    ),
    "LpBall around a centre": (
        {"t": spread(1), "c": spread(2, N)},
        lambda p: dfw.LpBall(2, p["t"], centre=p["c"]),
        "t",
        -1.0,
        "INVALID",
    ),
    "Box upside down": (
        {"l": -spread(1, N), "u": spread(2, N)},
        lambda p: dfw.Box(p["l"], p["u"]),
        "l",
        2.0,
        "INFEASIBLE",
    ),
    "Box, shared upper": (
        {"l": -spread(1, N)},
        lambda p: dfw.Box(p["l"], 1.0),
        "l",
        torch.tensor([0.0, 0.0, 1.5, 0.0]),
        "INFEASIBLE",
    ),
    "Box of minus infinity": (
        {"l": -spread(1, N), "u": spread(2, N)},
        lambda p: dfw.Box(p["l"], p["u"]),
        "u",
        torch.tensor([1.0, -INF, 1.0, 1.0]),
        "INFEASIBLE",
    ),
    "Box of infinities": (
        {"l": -spread(1, N), "u": spread(2, N)},
        lambda p: dfw.Box(p["l"], p["u"]),
        ("l", "u"),
        INF,
        "INFEASIBLE",
    ),
    "Simplex": ({"t": spread(1)}, lambda p: dfw.Simplex(p["t"]), "t", -1.0, "INVALID"),
    "caps that do not reach": (
        {"t": spread(1), "c": spread(2, N)},
        lambda p: dfw.CappedSimplex(p["t"], p["c"]),
        "c",
        0.1,
        "INFEASIBLE",
    ),
    "radius beyond shared caps": (
        {"t": spread(1)},
        lambda p: dfw.CappedSimplex(p["t"], p["t"].new_full((N,), 0.5)),
        "t",
        2.5,
        "INFEASIBLE",
    ),
    "radius beyond a number": (
        {"t": spread(1)},
        lambda p: dfw.CappedSimplex(p["t"], 0.5),
        "t",
        2.5,
        "INFEASIBLE",
    ),
    "negative cap": (
        {"c": spread(2, N)},
        lambda p: dfw.CappedSimplex(1.0, p["c"]),
        "c",
        torch.tensor([1.0, 1.0, -0.1, 1.0]),
        "INVALID",
    ),
    "negative radius with caps": (
        {"t": spread(1), "c": spread(2, N)},
        lambda p: dfw.CappedSimplex(p["t"], p["c"]),
        "t",
        -1.0,
        "INVALID",
    ),
    "KSparse radius": (
        {"t": spread(1), "k": 1 + spread(2)},
        lambda p: dfw.KSparse(p["k"], p["t"]),
        "t",
        -1.0,
        "INVALID",
    ),
    "KSparse k": (
        {"k": 1 + spread(2)},
        lambda p: dfw.KSparse(p["k"]),
        "k",
        0.5,
        "INVALID",
    ),
    "L1Box radius": (
        {"t": spread(1), "w": spread(2, N)},
        lambda p: dfw.L1Box(p["t"], p["w"]),
        "t",
        -1.0,
        "INVALID",
    ),
    "L1Box upper": (
        {"u": spread(1, N)},
        lambda p: dfw.L1Box(1.0, upper=p["u"]),
        "u",
        -0.5,
        "INFEASIBLE",
    ),
    "L1Box lower": (
        {"l": -spread(1, N)},
        lambda p: dfw.L1Box(1.0, lower=p["l"]),
        "l",
        0.5,
        "INFEASIBLE",
    ),
    "level out of reach": (
        {"b": 0.1 * spread(1)},
        lambda p: dfw.PlaneCut(dfw.LpBall(1), 1.0, p["b"]),
        "b",
        2.0,
        "INFEASIBLE",
    ),
    "a plane of zeros": (
        {"a": spread(1, N)},
        lambda p: dfw.PlaneCut(dfw.Box(-1.0, 1.0), p["a"], 0.3),
        "a",
        0.0,
        "INFEASIBLE",
    ),
    "a cut through nothing": (
        {"l": -spread(1, N)},
        lambda p: dfw.PlaneCut(dfw.Box(p["l"], 1.0), 1.0, 0.3),
        "l",
        2.0,
        "INFEASIBLE",
    ),
    "a cut beside what has no upper bounds": (
        {"l": -spread(1, N)},
        lambda p: dfw.PlaneCut(dfw.Box(lower=p["l"]), 1.0, 0.3),
        "l",
        2.0,
        "INFEASIBLE",
    ),
    "GroupBall": ({"t": spread(1)}, lambda p: dfw.GroupBall(GROUPS, p["t"]), "t", -1.0, "INVALID"),
    "Ellipsoid radius": (
        {"t": spread(1)},
        lambda p: dfw.Ellipsoid(torch.eye(N, dtype=F64).to(p["t"]), None, p["t"]),
        "t",
        -1.0,
        "INVALID",
    ),
    "Ellipsoid A": (
        {"A": torch.diag_embed(spread(1, N)), "t": spread(2)},
        lambda p: dfw.Ellipsoid(p["A"], None, p["t"]),
        "A",
        singular(),
        "INVALID",
    ),
    "Ellipsoid A of zeros": (
        {"A": torch.diag_embed(spread(1, N)), "c": spread(2, N)},
        lambda p: dfw.Ellipsoid(p["A"], p["c"]),
        "A",
        0.0,
        "INVALID",
    ),
    "NuclearBall": (
        {"t": spread(1)},
        lambda p: dfw.NuclearBall(p["t"], (2, 2)),
        "t",
        -1.0,
        "INVALID",
    ),
    "Product": (
        {"t": spread(1), "l": -spread(2, 2)},
        lambda p: dfw.Product([dfw.LpBall(2, p["t"]), dfw.Box(p["l"], 1.0)], [2, 2]),
        "l",
        3.0,
        "INFEASIBLE",
    ),
    "Shifted": (
        {"t": spread(1), "c": spread(2, N)},
        lambda p: dfw.Shifted(dfw.Simplex(p["t"]), p["c"]),
        "t",
        -1.0,
        "INVALID",
    ),
}


def spoilt(params, name, value):
    changed = {k: v.clone() for k, v in params.items()}
    names = name if isinstance(name, tuple) else (name,)
    values = value if isinstance(value, tuple) else (value,) * len(names)
    for each, bad in zip(names, values, strict=True):
        changed[each][BAD] = bad
    return changed


def quadratic(rows):
    gen = torch.Generator().manual_seed(7)
    R = torch.randn(ROWS, N, N, generator=gen, dtype=F64)
    P = R @ R.mT / N + torch.eye(N, dtype=F64)
    return {"P": P[rows], "q": 3 * torch.randn(ROWS, N, generator=gen, dtype=F64)[rows]}


def run(build, params, objective, method, dtype=F64, device="cpu"):
    leaves = {
        k: v.to(device, dtype).clone().requires_grad_() for k, v in (params | objective).items()
    }
    objective, steps = dfw.Quadratic(leaves["P"], leaves["q"]), 1000 if method == "auto" else 30
    sol = dfw.solve(objective, build(leaves), method=method, max_steps=steps)
    sol.x.square().sum().backward()  # sends NaN back into the bad row
    return sol, {k: v.grad for k, v in leaves.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["auto", "frank-wolfe", "dfw"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", CASES)
def test_one_impossible_problem(name, dtype, method, device):
    params, build, which, value, status = CASES[name]
    others = [i for i in range(ROWS) if i != BAD]
    sound = {k: v[others] for k, v in params.items()}
    changed, everything = spoilt(params, which, value), quadratic(slice(None))
    sol, grads = run(build, changed, everything, method, dtype, device)
    want, want_grads = run(build, sound, quadratic(others), method, dtype, device)
    assert sol.status[BAD] == Status[status]
    assert sol.x[BAD].isnan().all()
    assert sol.value[BAD].isnan()
    assert sol.gap[BAD].isnan()
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if dtype == F64 else {"rtol": 1e-3, "atol": 1e-4}
    assert torch.equal(sol.status[others] == 0, want.status == 0)
    torch.testing.assert_close(sol.x[others], want.x, **tolerance)
    for key, grad in grads.items():
        assert (grad[BAD] == 0).all(), key
        torch.testing.assert_close(grad[others], want_grads[key], **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_the_same_without_a_batch_is_an_error(name):
    params, build, which, value, _ = CASES[name]
    own = {k: v[BAD] for k, v in spoilt(params, which, value).items()}
    with pytest.raises(ValueError, match=r"^(\w|\[|\]|, |: )+: expected"):
        run(build, own, quadratic(BAD), "auto")
    # nor is it isolated where all problems share it
    with pytest.raises(ValueError, match=r"^(\w|\[|\]|, |: )+: expected"):
        run(build, own, quadratic(slice(None)), "auto")


@pytest.mark.parametrize("name", CASES)
def test_no_problem_makes_sense(name):
    params, build, which, value, status = CASES[name]
    row = {k: v[BAD].expand_as(v) for k, v in spoilt(params, which, value).items()}
    sol, grads = run(build, row, quadratic(slice(None)), "auto")
    assert (sol.status == Status[status]).all()
    assert all((g == 0).all() for g in grads.values())


def test_several_faults_of_a_batch_and_of_a_problem():
    """NaN comes first, and every row has a reason of its own."""
    lower = full(-1.0, ROWS, N)
    upper = full(1.0, ROWS, N)
    q = torch.ones(ROWS, N, dtype=F64)
    lower[0], upper[1, 1], lower[2, 0], q[3, 0] = 2.0, -INF, math.nan, math.nan
    lower[3] = 2.0
    sol = dfw.solve(dfw.Quadratic(None, q), dfw.Box(lower, upper))
    names = [Status(int(s)).name for s in sol.status]
    assert names == ["INFEASIBLE", "INFEASIBLE", "NONFINITE", "NONFINITE", "CONVERGED"]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_numbers_are_refused_in_any_case(verify, p):
    q = torch.ones(ROWS, N)
    with pytest.raises(ValueError, match=r"^radius: expected a finite number ≥ 0, got -1"):
        dfw.DFWLayer(p, verify=verify)(None, q, radius=-1.0)


def test_a_projection_layer():
    q = torch.randn(ROWS, N, requires_grad=True)
    radius = torch.ones(ROWS)
    radius[BAD] = -1.0
    radius.requires_grad_()
    with pytest.warns(RuntimeWarning, match="^1 of 5 problems were not solved .1 INVALID"):
        x = dfw.DFWLayer(1)(None, q, radius=radius)
    assert x[BAD].isnan().all()
    x.nansum().backward()
    assert (q.grad[BAD] == 0).all()
    assert radius.grad[BAD] == 0
    others = [i for i in range(ROWS) if i != BAD]
    want = dfw.DFWLayer(1)(None, q[others], radius=radius[others])
    torch.testing.assert_close(x[others], want)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_project_l1_box_takes_a_row_out(shape):
    z = 2 * torch.randn(shape, dtype=F64)
    leaves = [z.clone().requires_grad_(), torch.ones(shape[:-1], dtype=F64).requires_grad_()]
    want = dfw.project_l1_box(leaves[0], None, leaves[1], -0.5, 0.5)
    spoilt = leaves[1].detach().clone()
    spoilt.view(-1)[-1] = -1.0
    if len(shape) == 1:
        with pytest.raises(ValueError, match=r"^radius: expected numbers ≥ 0, found -1"):
            dfw.project_l1_box(z, None, spoilt.reshape(()), -0.5, 0.5)
        return
    spoilt.requires_grad_()
    x = dfw.project_l1_box(leaves[0], None, spoilt, -0.5, 0.5)
    bad = torch.zeros(shape[:-1], dtype=torch.bool)
    bad.view(-1)[-1] = True
    assert x[bad].isnan().all()
    assert torch.equal(x[~bad], want[~bad])
    gradients = torch.autograd.grad(x.square().sum(), [leaves[0], spoilt])
    expected = torch.autograd.grad(want.square().sum(), leaves)
    for got, exact in zip(gradients, expected, strict=True):
        assert (got[bad] == 0).all()
        assert torch.equal(got[~bad], exact[~bad])
