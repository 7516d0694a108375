"""Compiled code against tensor operations, and where it runs."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dfwlayer as dfw
from dfwlayer.engines import compiled
from dfwlayer.engines.base import Arguments
from dfwlayer.methods import METHODS
from dfwlayer.ops.tensors import filled, tensors_in
from dfwlayer.solve import check_settings
from normal_form_cases import OBJECTIVES, SETS, N, leaf

F32, F64 = torch.float32, torch.float64


def attempted(objective, constraint, **options):
    settings = {
        "method": "auto",
        "differentiate": "auto",
        "tol": 1e-5,
        "max_steps": 1000,
        "step_size": None,
        "temperature": None,
        "verify": True,
    } | options
    arguments = Arguments(objective, constraint, None, None)
    return compiled.attempt(arguments, check_settings(**settings, constraint=constraint))


def answers(objective, constraint, **options):
    """x and its gradients in every tensor."""
    sol = dfw.solve(objective, constraint, **options)
    asked = [t for t in tensors_in((objective, constraint)) if t.requires_grad]
    v = torch.cos(torch.arange(sol.x.numel(), dtype=sol.x.dtype)).reshape(sol.x.shape)
    return sol, torch.autograd.grad(sol.x, asked, v, retain_graph=True)


def close(found, expected, tolerance):
    size = float(expected.detach().abs().max()) if expected.numel() else 0.0
    assert float((found - expected).detach().abs().max()) <= tolerance * max(size, 1e-3)


@pytest.mark.parametrize("lead", [(), (1,), (6,)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("constraint", SETS)
def test_agrees_with_tensor_operations(constraint, objective, dtype, lead):
    """The data are exact in float64, so that both solve the same problem to the last digits."""
    given = OBJECTIVES[objective](lead, dtype), SETS[constraint](lead, dtype)
    found = attempted(*given)
    assert found is not None
    assert found.left is None or not bool(found.left.all())
    sol, gradients = answers(*given)
    wide = [leaf(t.detach().double()) for t in tensors_in(given) if t.is_floating_point()]
    with compiled.using(False):
        expected, right = answers(*filled(given, iter(wide)), tol=1e-13)
    eps = torch.finfo(dtype).eps
    assert (sol.status == 0).all()
    close(sol.x.double(), expected.x, max(8 * eps, 1e-8))
    for own, other in zip(gradients, right, strict=True):
        close(own.double(), other, max(500 * eps, 1e-7))
    assert float((sol.value - expected.value).abs().max()) <= 64 * eps * (
        1 + float(expected.value.abs().max())
    )
    assert (sol.value - expected.value <= sol.gap + 8 * eps * expected.value.abs()).all()
    # as feasible as the dtype allows
    with torch.no_grad():
        assert float(given[1].violation(sol.x).max()) <= 4 * eps


@pytest.mark.parametrize("constraint", ["l1", "l2", "box", "simplex", "l1 in a plane"])
def test_second_derivatives(constraint):
    objective, body = OBJECTIVES["quadratic"]((), F64), SETS[constraint]((), F64)
    tensors = [objective.q, *(t for t in tensors_in(body) if t.requires_grad)]

    def gradient():
        x = dfw.solve(objective, body).x
        return torch.autograd.grad(x.square().sum(), tensors, create_graph=True)

    second = torch.autograd.grad(gradient()[0].sum(), tensors, allow_unused=True)
    with compiled.using(False):
        expected = torch.autograd.grad(gradient()[0].sum(), tensors, allow_unused=True)
    for own, other in zip(second, expected, strict=True):
        close(own, other, 1e-7)


def test_problems_that_are_left_are_solved_by_others():
    """A row of NaN, one whose solution is at a kink, and one like any other."""
    P = leaf(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64)) + 1)
    at_a_kink = -P.detach() @ torch.tensor([1.0, 0.5, -0.25], dtype=F64)
    q = torch.stack((at_a_kink * torch.nan, at_a_kink, at_a_kink * 1.5)).requires_grad_()
    body = dfw.Box(-1.0, 1.0)
    found = attempted(dfw.Quadratic(P, q), body)
    assert found is not None
    assert found.left.tolist() == [True, True, False]
    sol = dfw.solve(dfw.Quadratic(P, q), body)
    assert sol.status.tolist() == [dfw.Status.NONFINITE, 0, 0]
    assert sol.x[0].isnan().all()
    torch.autograd.backward(sol.x[1:].sum())
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P.detach(), q.detach()), body)
    torch.testing.assert_close(sol.x.detach()[1:], other.x[1:])
    assert (q.grad[0] == 0).all()
    assert torch.isfinite(P.grad).all()


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 5),
    name=st.sampled_from(["l1", "l2", "box", "simplex", "caps", "cut"]),
    f32=st.booleans(),
)
def test_whole_numbers(seed, n, name, f32):
    """Degenerate problems: what is not beyond doubt is left, and nothing is infeasible or wrong."""
    dtype = F32 if f32 else F64
    make = torch.Generator().manual_seed(seed)

    def numbers(*shape, low=-2, high=3):
        return torch.randint(low, high, shape, generator=make).to(dtype)

    root = numbers(7, n, n)
    P, q = root.mT @ root + torch.eye(n, dtype=dtype), numbers(7, n, low=-6, high=7)
    body = {
        "l1": lambda: dfw.LpBall(1, numbers(7, low=1)),
        "l2": lambda: dfw.LpBall(2, numbers(7, low=1)),
        "box": lambda: dfw.Box(numbers(7, n, low=-2, high=1), numbers(7, n, low=0, high=3)),
        "simplex": lambda: dfw.Simplex(numbers(7, low=1)),
        "caps": lambda: dfw.CappedSimplex(1.0, numbers(7, n, low=1)),
        "cut": lambda: dfw.PlaneCut(dfw.Box(-1.0, 1.0), numbers(7, n), 0.0),
    }[name]()
    sol = dfw.solve(dfw.Quadratic(P, q), body)
    eps = torch.finfo(dtype).eps
    assert float(body.violation(sol.x).max()) <= 16 * eps
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(P, q), body)
    size = 1 + float(other.x.abs().max())
    torch.testing.assert_close(sol.x, other.x, atol=max(1e3 * eps, 1e-8) * size, rtol=0)
    # in float64 a gap can be told from zero where it cannot in float32
    assert ((sol.status == other.status) | sol.converged).all()


def test_what_is_not_for_it():
    """Settings, dtypes and values that only tensor operations have an answer for."""
    q = torch.randn(4, dtype=F64)
    P = torch.eye(4, dtype=F64)
    body = dfw.LpBall(1.0)
    assert attempted(dfw.Quadratic(P, q), body) is not None
    for options in ({"method": "dfw"}, {"differentiate": "unroll"}, {"max_steps": 0}):
        assert attempted(dfw.Quadratic(P, q), body, **options) is None
    assert attempted(dfw.Quadratic(P, q), body, method=dfw.ProjectedNewton(inner=3)) is None
    assert attempted(dfw.Quadratic(P.half(), q.half()), body) is None
    assert attempted(dfw.Quadratic(P, q), dfw.LpBall(3.0)) is None
    assert attempted(dfw.Quadratic(-P, q), body) is None
    assert attempted(dfw.Quadratic(P + torch.ones(4, 4).triu(1), q), body) is None
    sparse = torch.eye(4, dtype=F64).to_sparse()
    assert attempted(dfw.LeastSquares(sparse, q), body) is None
    assert METHODS["auto"].compiles


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("k", lambda bad: dfw.KSparse(torch.tensor([2.0, bad], dtype=F64))),
        ("radius", lambda bad: dfw.LpBall(1, torch.tensor([1.0, bad - 1], dtype=F64))),
        (
            "cap",
            lambda bad: dfw.CappedSimplex(1.0, torch.tensor([[1.0] * 4, [bad - 1] * 4]).double()),
        ),
        (
            "upper",
            lambda bad: dfw.L1Box(
                1.0, None, -1.0, torch.tensor([[1.0] * 4, [bad - 1] * 4]).double()
            ),
        ),
    ],
)
def test_values_out_of_range_have_the_same_status(name, body):
    q = torch.randn(2, 4, dtype=F64)
    sol = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), body(0.5))
    with compiled.using(False):
        other = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), body(0.5))
    assert sol.status.tolist() == other.status.tolist()
    assert sol.status[1] != 0


def test_changed_in_place():
    q = torch.randn(4, dtype=F64, requires_grad=True)
    P = torch.eye(4, dtype=F64)
    x = dfw.solve(dfw.Quadratic(P, q * 1), dfw.LpBall(1.0, 0.5)).x
    P.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_without_numba(monkeypatch):
    q = torch.randn(4, dtype=F64)
    expected = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), dfw.Simplex())
    monkeypatch.setattr(compiled, "_loaded", {})
    monkeypatch.setitem(sys.modules, "dfwlayer.engines.compiled.engine", None)
    assert not dfw.warm_up()
    sol = dfw.solve(dfw.Quadratic(torch.eye(4, dtype=F64), q), dfw.Simplex())
    torch.testing.assert_close(sol.x, expected.x)


@cache
def batch():
    """Made once: matrices are multiplied by threads, which do not survive a fork."""
    make = torch.Generator().manual_seed(5)
    root = torch.randn(300, N, N, dtype=F64, generator=make)
    q = torch.randn(300, N, dtype=F64, generator=make)
    return dfw.Quadratic(root.mT @ root + torch.eye(N, dtype=F64), q)


def solved_there(_=None):
    torch.set_num_threads(1)
    objective = batch()
    torch.set_num_threads(2)
    try:
        return dfw.solve(objective, dfw.Simplex()).x.tolist()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["threads", "fork", "spawn"])
def test_threads_and_processes(kind):
    """Batches that are spread over threads, in threads, after a fork, and in a new process."""
    expected = solved_there()
    if kind == "threads":
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(solved_there, range(8))) == [expected] * 8
        return
    with multiprocessing.get_context(kind).Pool(2) as pool:
        assert pool.map_async(solved_there, range(4)).get(timeout=120) == [expected] * 4


def test_is_loaded_when_needed_only():
    """Numba takes a while to import; those who solve nothing small should not wait for it."""
    code = (
        "import sys, torch, dfwlayer as dfw; assert 'numba' not in sys.modules; "
        "dfw.solve(dfw.Quadratic(None, torch.ones(2)), dfw.LpBall(2, 1.0), method='dfw'); "
        "assert 'numba' not in sys.modules; assert dfw.warm_up(); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_nothing_can_be_written():
    """It is compiled anew in every process then."""
    code = (
        "import torch, numba.core.caching as caching, dfwlayer as dfw;"
        "kind = getattr(caching, 'CacheImpl', None) or caching._CacheImpl;"
        "kind._locator_classes = [];"
        "f = dfw.Quadratic(torch.eye(2), torch.ones(2));"
        "assert dfw.solve(f, dfw.LpBall(2, 0.5)).converged"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
