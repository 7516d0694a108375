"""Degenerate programs: redundant, dependent and zero rows, vertices with too many, flat f."""

from __future__ import annotations

import math

import pytest
import torch

import dfwlayer
from dfwlayer.linalg.quadratic import Program, Thin, minimise, thinned
from dfwlayer.objectives.model import Model, SparseModel
from dfwlayer.solution import Status

DONE = (Status.CONVERGED, Status.ROUNDING_FLOOR)


def program(P, q, **rows):
    q = torch.as_tensor(q, dtype=torch.float64).reshape(1, -1)
    n = q.shape[-1]
    blank = torch.zeros(1, 0, n, dtype=torch.float64)
    parts = {"G": blank, "h": blank[..., 0], "A": blank, "b": blank[..., 0]}
    parts["lower"], parts["upper"] = torch.full_like(q, -math.inf), torch.full_like(q, math.inf)
    parts |= {k: torch.as_tensor(v, dtype=torch.float64).unsqueeze(0) for k, v in rows.items()}
    return Program(P=torch.as_tensor(P, dtype=torch.float64).unsqueeze(0), q=q, **parts)


def solve(P, q, **rows):
    rows = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in rows.items()}
    P, q = torch.as_tensor(P, dtype=torch.float64), torch.as_tensor(q, dtype=torch.float64)
    return dfwlayer.solve(dfwlayer.Quadratic(P, q), dfwlayer.Polyhedron(**rows))


def random_rows(n, m, seed):
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    G, x = draw(m, n), draw(n)
    half = draw(n, n)
    return half @ half.mT + torch.eye(n), draw(n), G, G @ x + draw(m).abs()


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_add_nothing_change_nothing(seed):
    n, m = 8, 12
    P, q, G, h = random_rows(n, m, seed)
    plain = solve(P, q, G=G, h=h)
    more = torch.cat((G, G[:4], 3 * G[2:5], (G[:1] + G[1:2]) / 2, torch.zeros(2, n)))
    total = torch.cat((h, h[:4], 3 * h[2:5], (h[:1] + h[1:2]) / 2, torch.tensor([0.0, 5.0])))
    found = solve(P, q, G=more, h=total)
    assert plain.status.item() in DONE
    assert found.status.item() in DONE
    assert torch.allclose(found.x, plain.x, rtol=1e-9, atol=1e-10)


def test_a_zero_row_that_cannot_hold_is_a_proof():
    found = solve(torch.eye(2), [1.0, 1.0], G=[[0.0, 0.0]], h=[-1.0])
    assert found.status == Status.INFEASIBLE


@pytest.mark.parametrize("n", [3, 6, 10])
def test_a_vertex_with_many_rows(n):
    """A pyramid of 2n rows through one point, at which a linear f has its least value."""
    gen = torch.Generator().manual_seed(n)
    top = torch.randn(n, generator=gen, dtype=torch.float64)
    G = torch.randn(2 * n, n, generator=gen, dtype=torch.float64)
    G = G + 3 * torch.nn.functional.normalize(G.sum(0, keepdim=True), dim=-1)
    y = 0.2 + torch.rand(2 * n, generator=gen, dtype=torch.float64)
    found = solve(torch.zeros(n, n), -(y @ G), G=G, h=G @ top)
    assert found.status.item() in DONE
    assert torch.allclose(found.x, top, atol=1e-9)


def test_rows_that_touch_without_a_force():
    """The minimiser without rows lies on one of them: its multiplier is zero."""
    found = solve(torch.eye(3), [-1.0, -1.0, 0.0], G=[[1.0, 1.0, 0.0]], h=[2.0])
    assert found.status.item() in DONE
    assert torch.allclose(found.x, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), atol=1e-10)


def test_bounds_that_leave_one_value():
    lower, upper = [1.0, -math.inf, 0.0], [1.0, math.inf, 2.0]
    rows = {"lower": lower, "upper": upper, "A": [[1.0, 1.0, 1.0]], "b": [4.0]}
    found = solve(torch.eye(3), torch.zeros(3), **rows)
    assert found.status.item() in DONE
    assert torch.allclose(found.x, torch.tensor([1.0, 1.5, 1.5], dtype=torch.float64), atol=1e-12)


def test_everything_has_one_value():
    ones = torch.ones(4)
    found = solve(torch.eye(4), torch.arange(4.0), lower=ones, upper=ones, A=[[1.0] * 4], b=[4.0])
    assert found.status.item() in DONE
    assert torch.equal(found.x, ones.double())


@pytest.mark.parametrize("seed", range(5))
def test_f_that_is_flat_along_the_face(seed):
    """Many solutions: the value is the least one, which a linear program over a simplex has."""
    n = 6
    gen = torch.Generator().manual_seed(seed)
    cost = torch.randint(0, 3, (n,), generator=gen).double()
    found = solve(torch.zeros(n, n), cost, lower=torch.zeros(n), A=torch.ones(1, n), b=[1.0])
    assert found.status.item() in DONE
    assert abs(float(found.value) - float(cost.min())) <= 1e-10
    assert float(found.x.min()) >= 0
    assert abs(float(found.x.sum()) - 1) <= 1e-14


def test_dependent_equations_that_agree():
    A = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 0.0]])
    found = solve(torch.eye(3), torch.zeros(3), A=A, b=[6.0, 12.0, 1.0])
    near = torch.linalg.lstsq(A[[0, 2]].double(), torch.tensor([6.0, 1.0]).double()).solution
    assert found.status.item() in DONE
    assert torch.allclose(found.x, near, atol=1e-12)


def large(seed, n=120, m=80, k=20):
    """With few entries, so that sparse factors are used."""
    gen = torch.Generator().manual_seed(seed)

    def thin(*shape):
        full = torch.randn(*shape, generator=gen, dtype=torch.float64)
        return full * (torch.rand(*shape, generator=gen) < 0.04)

    x = torch.randn(n, generator=gen, dtype=torch.float64)
    half, G, A = thin(n // 2, n), thin(m, n), thin(k, n)
    h = G @ x + torch.rand(m, generator=gen, dtype=torch.float64)
    q = torch.randn(n, generator=gen, dtype=torch.float64)
    return program(half.mT @ half, q, G=G, h=h, A=A, b=A @ x, lower=x - 1, upper=x + 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("seed", range(3))
def test_sparse_factors_find_the_same(seed):
    pytest.importorskip("scipy")
    dense = large(seed)
    thin = thinned(dense)
    assert isinstance(thin, Thin)
    one, other = minimise(dense), minimise(thin)
    assert one.exact.all()
    assert other.exact.all()
    assert torch.allclose(dense.value(one.x), thin.value(other.x), rtol=1e-12)
    assert other.missed.item() <= 1e-13
    down = dense.P - torch.eye(dense.q.shape[-1])
    for P in (dense.P, down):
        bent = Model(P, dense.q, factored=False).bends_down(1e-13)
        assert torch.equal(bent, SparseModel(P[0].to_sparse_csr(), dense.q).bends_down(1e-13))
    assert bent.all()


@pytest.mark.parametrize("seed", range(2))
def test_sparse_programs_without_a_solution(seed):
    pytest.importorskip("scipy")
    given = large(seed)
    closed = given._replace(h=torch.cat((given.h[:, :-1], given.h[:, -1:] - 1000), -1))
    assert minimise(thinned(closed)).empty.all()
    n = given.q.shape[-1]
    open_ended = given._replace(
        P=torch.zeros_like(given.P),
        lower=torch.full_like(given.lower, -math.inf),
        upper=given.upper.clamp_min(0.5),  # zero is a point
        q=torch.cat((torch.ones(1, 1, dtype=torch.float64), given.q[:, 1:] * 0), -1),
        G=given.G[:, :0],
        h=given.h[:, :0],
        A=torch.cat((torch.zeros(1, 20, 1, dtype=torch.float64), given.A[..., 1:]), -1),
        b=given.b * 0,
    )
    found = minimise(thinned(open_ended))
    assert found.endless.all()
    assert found.x.shape == (1, n)


def test_numbers_of_many_sizes():
    """Rows and columns that differ by 10⁸, as in collections of test problems."""
    P, q, G, h = random_rows(10, 14, seed=11)
    plain = solve(P, q, G=G, h=h)
    d = 10.0 ** torch.linspace(-4, 4, 10, dtype=torch.float64)
    r = 10.0 ** torch.linspace(4, -4, 14, dtype=torch.float64)
    found = solve(P * d * d[:, None], q * d, G=G * d * r[:, None], h=h * r)
    assert found.status.item() in DONE
    assert torch.allclose(found.x * d, plain.x, rtol=1e-8, atol=1e-9)
