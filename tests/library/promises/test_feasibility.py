"""Feasible, always: ‖w ∘ x‖_p ≤ t up to 4 units in the last place, measured in 60 digits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dfwlayer as dfw
from helpers import DTYPES, F64, METHODS, PS, solved, ulps_outside

ULPS = 4
STOPS = (0, 1, 2, 5, 50)


def check(sol, weight, radius, p):
    rows = sol.x.reshape(-1, sol.x.shape[-1])
    weight, radius = weight.expand(rows.shape), radius.expand(len(rows))
    for x, w, t in zip(rows, weight, radius, strict=True):
        assert torch.isfinite(x).all(), (x, w, t)
        assert ulps_outside(x, w, t, p) <= ULPS, (x, w, t)


def numbers(low, high, zero=True):
    """±10^e with e in [low, high], sometimes 0."""
    size = st.floats(low, high).map(lambda e: 10.0**e)
    signed = st.tuples(st.sampled_from((-1.0, 1.0)), size).map(math.prod)
    return st.one_of(signed, st.just(0.0)) if zero else signed


@st.composite
def problems(draw, spread):
    """Data of magnitudes 10^−spread … 10^spread."""
    dtype = draw(st.sampled_from(DTYPES))
    n, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def tensor(elements, *shape):
        count = math.prod(shape)
        values = draw(st.lists(elements, min_size=count, max_size=count))
        return torch.tensor(values, dtype=dtype).reshape(shape)

    R = tensor(numbers(-spread / 4, spread / 4), n, n)
    P = draw(st.sampled_from((None, R.mT @ R)))
    q = tensor(numbers(-spread, spread), rows, n)
    weight = tensor(numbers(-spread, spread), rows, n)
    radius = tensor(numbers(-spread, spread), rows).abs()
    x0 = draw(st.sampled_from((None, tensor(numbers(-spread, spread), rows, n))))
    return P, q, weight, radius, x0


@pytest.mark.parametrize("spread", [1, 6, 30])
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=80)
@given(data=st.data())
def test_feasible(method, spread, data):
    P, q, weight, radius, x0 = data.draw(problems(spread))
    p = data.draw(st.sampled_from((*PS, 1.01, 100.0)))
    max_steps = data.draw(st.sampled_from(STOPS))
    sol = solved(
        METHODS[method],
        dfw.Quadratic(P, q),
        dfw.LpBall(p, radius, weight),
        x0=x0,
        max_steps=max_steps,
        tol=data.draw(st.sampled_from((0.0, 1e-5))),
    )
    if sol is not None:
        check(sol, weight, radius, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize("method", METHODS)
def test_feasible_at_every_stop(method, p, dtype):
    """Ordinary problems, many of them, with the constraint active: rounding alone is at work."""
    gen = torch.Generator().manual_seed(61)
    q = torch.randn(25, 5, generator=gen, dtype=F64).to(dtype)
    weight = torch.randn(25, 5, generator=gen, dtype=F64).to(dtype)
    radius = (0.2 * torch.rand(25, generator=gen, dtype=F64)).to(dtype)
    for max_steps in STOPS:
        sol = dfw.solve(
            dfw.Quadratic(None, 10 * q),
            dfw.LpBall(p, radius, weight),
            method=METHODS[method].method,
            max_steps=max_steps,
        )
        check(sol, weight, radius, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", PS)
def test_feasible_in_many_dimensions(p, dtype):
    """Long sums must not add up to a violation."""
    gen = torch.Generator().manual_seed(62)
    n = 400
    q = torch.randn(2, n, generator=gen, dtype=F64).to(dtype)
    weight = (torch.rand(n, generator=gen, dtype=F64) + 0.5).to(dtype)
    radius = torch.tensor(1.7, dtype=dtype)
    for method in METHODS.values():
        sol = dfw.solve(
            dfw.Quadratic(None, 100 * q),
            dfw.LpBall(p, radius, weight),
            method=method.method,
            max_steps=15,
        )
        check(sol, weight, radius, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", PS)
def test_weights_down_to_the_smallest_numbers(p, dtype):
    """t/w that the dtype can only hold coarsely (subnormal), or not at all (overflow)."""
    finfo = torch.finfo(dtype)
    tiny, huge = finfo.tiny, finfo.max
    weight = torch.tensor(
        [[1.0, 3.0, 7.0], [1e12, 3e13, 1.0], [tiny, 1.0, 2.0], [huge / 4, 1.0, 3.0]], dtype=dtype
    )
    q = torch.tensor([-1.0, 0.7, 0.4], dtype=dtype)
    for t in (tiny, 11 * tiny, tiny * 1e4, 1.0, 1e10, huge / 8):
        radius = torch.tensor(t, dtype=dtype)
        for method in METHODS.values():
            for max_steps in (1, 5):
                sol = solved(
                    method,
                    dfw.Quadratic(None, q),
                    dfw.LpBall(p, radius, weight),
                    max_steps=max_steps,
                )
                if sol is not None:
                    check(sol, weight, radius, p)


@pytest.mark.parametrize("objective", ["logistic"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", PS)
def test_feasible_for_smooth(p, method, objective):
    from helpers import make_case

    case = make_case(objective, p, "signed", rows=4, seed=63).to(torch.float32)
    for max_steps in STOPS:
        sol = dfw.solve(*case.problem(), method=METHODS[method].method, max_steps=max_steps)
        check(sol, case.params["weight"], case.params["radius"], p)
