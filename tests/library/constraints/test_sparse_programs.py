"""A sparse P, over every kind of set, and sparse rows that are never made dense."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close as close

import dfwlayer as dfw
from dfwlayer.constraints.polyhedra import polyhedron
from dfwlayer.objectives import factors
from dfwlayer.objectives.factors import reduced_sparse

F64 = torch.float64


def banded(n, dtype=F64):
    """A positive definite matrix with three diagonals."""
    main = torch.linspace(2.2, 3.0, n, dtype=dtype)
    side = torch.linspace(-1.0, 0.9, n - 1, dtype=dtype)
    return torch.diag(main) + torch.diag(side, 1) + torch.diag(side, -1)


def rows(k, n, generator):
    """Three entries in each of k rows."""
    out = torch.zeros(k, n, dtype=F64)
    for j in range(k):
        out[j, j * (n - 3) // k + torch.arange(3)] = torch.randn(3, generator=generator, dtype=F64)
    return out


def as_layout(matrix, layout):
    return {"COO": matrix.to_sparse, "CSR": matrix.to_sparse_csr}[layout]().detach()


SETS = {
    "l1": lambda: dfw.LpBall(1, 1.5),
    "l2": lambda: dfw.LpBall(2, 1.0),
    "l3": lambda: dfw.LpBall(3, 1.0),
    "box": lambda: dfw.Box(-0.2, 0.3),
    "simplex": lambda: dfw.Simplex(1.0),
    "cut": lambda: dfw.PlaneCut(dfw.Box(-0.5, 0.5), torch.ones(12, dtype=F64), 0.4),
    "polyhedron": lambda: dfw.Polyhedron(
        G=torch.eye(4, 12, dtype=F64) + 1, h=0.3, lower=-1.0, upper=0.6
    ),
    "intersection": lambda: dfw.Intersection(dfw.LpBall(2, 1.0), dfw.Box(-0.3, 0.4)),
}


@pytest.mark.parametrize("layout", ["COO", "CSR"])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_sparse_matrix_is_the_dense_one(name, layout, lead):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(*lead, 12, generator=generator, dtype=F64, requires_grad=True)
    v = torch.randn(*lead, 12, generator=generator, dtype=F64)
    found = []
    for matrix in (banded(12), as_layout(banded(12), layout)):
        P = matrix.requires_grad_()
        sol = dfw.solve(dfw.Quadratic(P, q), SETS[name](), tol=1e-9)
        assert sol.converged.all()
        loss = (sol.x * v).sum() + sol.value.sum()
        in_P, in_q = torch.autograd.grad(loss, (P, q))
        found.append((sol.x.detach(), sol.value.detach(), in_P, in_q))
    (x, value, in_P, in_q), (x_sparse, value_sparse, in_sparse, in_q_sparse) = found
    close(x_sparse, x, rtol=1e-7, atol=1e-8)
    close(value_sparse, value, rtol=1e-9, atol=1e-9)
    close(in_q_sparse, in_q, rtol=1e-6, atol=1e-7)
    assert in_sparse.layout == matrix.layout  # on its own pattern
    close(in_sparse.to_dense(), in_P * (banded(12) != 0), rtol=1e-6, atol=1e-7)


def test_a_sparse_matrix_of_few_digits_goes_to_more():
    """float32 problems are solved again in float64 where their numbers need it."""
    q = torch.randn(12, generator=torch.Generator().manual_seed(0))
    for size in (1e-12, 1.0, 1e12):
        P = (size * banded(12, torch.float32)).to_sparse()
        plain = dfw.solve(dfw.Quadratic(P.to_dense(), size * q), dfw.LpBall(1, 1.0))
        sol = dfw.solve(dfw.Quadratic(P, size * q), dfw.LpBall(1, 1.0))
        close(sol.x, plain.x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["dfw", "frank-wolfe"])
def test_methods_with_steps_of_a_known_length(method):
    """The largest eigenvalue is found from products, for 80 coordinates by Lanczos steps."""
    for n in (12, 80):
        q = torch.linspace(-1, 1, n, dtype=F64)
        dense, sparse = (
            dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(1, 1.0), method=method, tol=1e-4).x
            for P in (banded(n), banded(n).to_sparse())
        )
        close(sparse, dense, rtol=1e-4, atol=1e-5)


def test_second_derivatives_beside_a_sparse_constant():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(4, generator=generator, dtype=F64, requires_grad=True)
    P = banded(4).to_sparse()

    def grad(q):
        x = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2, 0.5)).x
        return torch.autograd.grad(x.pow(3).sum(), q, create_graph=True)[0]

    assert torch.autograd.gradcheck(grad, (q,), eps=1e-5, atol=1e-5)


def test_asymmetry_is_averaged_away_or_refused():
    P, q = banded(12), torch.ones(12, dtype=F64)
    skew = torch.zeros_like(P)
    skew[0, 1] = 1.0
    x = dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2, 0.5)).x
    for layout in ("COO", "CSR"):
        near = as_layout(P + 1e-6 * skew, layout).requires_grad_()
        found = dfw.solve(dfw.Quadratic(near, q), dfw.LpBall(2, 0.5)).x
        close(found, x, rtol=1e-4, atol=1e-6)
        found.sum().backward()
        assert near.grad is not None
        with pytest.raises(ValueError, match=r"^P: expected a symmetric"):
            dfw.solve(dfw.Quadratic(as_layout(P + 0.1 * skew, layout), q), dfw.LpBall(2))


def test_what_is_wrong_with_a_sparse_matrix_is_said():
    q = torch.ones(3)
    for P, words in (
        (torch.eye(3).to_sparse(1), "P: expected a sparse tensor of numbers"),
        (torch.eye(3).expand(2, 3, 3).to_sparse(), "P: expected shape"),
        (torch.eye(4).to_sparse(), r"P: expected shape \(3, 3\)"),
        (torch.eye(3).double().to_sparse(), "P: "),
        ((torch.eye(3) * torch.nan).to_sparse(), "P: 9 of 9 values are NaN"),
    ):
        with pytest.raises(ValueError, match=words):
            dfw.solve(dfw.Quadratic(P, q), dfw.LpBall(2))
    with pytest.raises(ValueError, match="G: expected shape"):
        dfw.Polyhedron(torch.eye(3).expand(2, 3, 3).to_sparse(), 1.0)


def test_negative_curvature_is_seen():
    P = banded(200)
    P[7, 7] = -3.0
    sol = dfw.solve(
        dfw.Quadratic(P.to_sparse(), torch.ones(200, dtype=F64)), dfw.Polyhedron(lower=-1, upper=1)
    )
    assert sol.status == dfw.Status.NOT_CONVEX


@pytest.mark.parametrize("with_scipy", [True, False])
def test_factors_on_the_free_coordinates(with_scipy, monkeypatch):
    monkeypatch.setattr(factors, "by_scipy", lambda _: with_scipy)
    P, generator = banded(20), torch.Generator().manual_seed(0)
    free = torch.rand(3, 20, generator=generator) < 0.6
    bend, v = torch.rand(2, 3, 20, generator=generator, dtype=F64)
    solve = reduced_sparse(dfw.Quadratic(P.to_sparse(), v).bind(3)._sparse, free, bend)
    for row in range(3):
        at = free[row].nonzero().squeeze(-1)
        own = P[at][:, at] + torch.diag(bend[row, at])
        close(solve(v)[row, at], torch.linalg.solve(own, v[row, at]))
        assert (solve(v)[row, ~free[row]] == 0).all()


class TestRows:
    """Programs whose rows stay sparse, at a size at which they may also be made dense."""

    N = 160

    @pytest.fixture(autouse=True)
    def kept(self, monkeypatch):
        monkeypatch.setattr(polyhedron, "KEPT", 0)

    def parts(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        A, G = rows(30, self.N, generator), rows(40, self.N, generator)
        x = torch.rand(self.N, generator=generator, dtype=F64) - 0.5
        q = torch.randn(self.N, generator=generator, dtype=F64)
        return banded(self.N), q, G, G @ x + 0.05, A, A @ x

    def solved(self, P, q, G, h, A, b, **settings):
        body = dfw.Polyhedron(G, h, A, b, lower=-1.0, upper=0.6)
        return dfw.solve(dfw.Quadratic(P, q), body, **settings)

    @pytest.mark.parametrize("layout", ["COO", "CSR"])
    def test_it_is_the_dense_solution(self, layout):
        found = []
        for sparse in (False, True):
            parts = self.parts()
            for i in (0, 2, 4):
                parts[i].data = parts[i].data
            parts = [as_layout(t, layout) if sparse and t.dim() == 2 else t.clone() for t in parts]
            for t in parts:
                t.requires_grad_()
            sol = self.solved(*parts)
            assert sol.converged
            loss = (sol.x * torch.linspace(-1, 1, self.N, dtype=F64)).sum() + sol.value
            found.append((sol.x.detach(), torch.autograd.grad(loss, parts)))
        (x, dense), (x_sparse, sparse) = found
        close(x_sparse, x, rtol=1e-9, atol=1e-10)
        for own, other, given in zip(dense, sparse, self.parts(), strict=True):
            other = other if other.layout == torch.strided else other.to_dense()
            close(other, own * (given != 0) if own.dim() == 2 else own, rtol=1e-7, atol=1e-8)

    def test_gradients_against_differences(self):
        P, q, G, h, A, b = self.parts(1)
        inputs = [P.to_sparse(), q, G.to_sparse(), h, A.to_sparse(), b]
        places = [t.coalesce().indices() if t.is_sparse else None for t in inputs]
        shapes = [t.shape for t in inputs]
        values = [t.coalesce().values() if t.is_sparse else t for t in inputs]

        def tensors(values):
            return [
                v if at is None else torch.sparse_coo_tensor(at, v, size, check_invariants=False)
                for v, at, size in zip(values, places, shapes, strict=True)
            ]

        weights = torch.linspace(-1, 1, self.N, dtype=F64)
        leaves = [v.clone().requires_grad_() for v in values]
        sol = self.solved(*tensors(leaves))
        found = torch.autograd.grad(sol.x @ weights, leaves)
        generator = torch.Generator().manual_seed(7)
        mirror = (P.to_sparse().mT.coalesce().indices()[0] >= 0).sum()  # its pattern is symmetric
        assert mirror == len(values[0])
        for i, gradient in enumerate(found):
            way = torch.randn(values[i].shape, generator=generator, dtype=F64)
            if i == 0:  # along symmetric matrices
                way = torch.sparse_coo_tensor(places[0], way, shapes[0], check_invariants=False)
                way = (way + way.t()).coalesce().values()
            ends = []
            for sign in (-1, 1):
                moved = list(values)
                moved[i] = values[i] + sign * 1e-6 * way
                ends.append(self.solved(*tensors(moved)).x @ weights)
            slope = (ends[1] - ends[0]) / 2e-6
            close((gradient * way).sum(), slope, rtol=1e-5, atol=1e-6)

    def test_multipliers_and_second_derivatives(self):
        P, q, G, h, A, b = self.parts(2)
        h, b = h.requires_grad_(), b.requires_grad_()
        dense = self.solved(P, q, G, h, A, b)
        sparse = self.solved(*(t.to_sparse() if t.dim() == 2 else t for t in (P, q, G, h, A, b)))
        for name, price in dense.multipliers.items():
            close(sparse.multipliers[name], price, rtol=1e-7, atol=1e-8)
            slopes = [
                torch.autograd.grad(sol.multipliers[name].square().sum(), (h, b), retain_graph=True)
                for sol in (dense, sparse)
            ]
            close(slopes[1], slopes[0], rtol=1e-6, atol=1e-7)

    def test_dependent_rows_and_a_flat_objective(self):
        """A face whose system is singular has a gradient of least norm."""
        n = self.N
        generator = torch.Generator().manual_seed(5)
        A = rows(10, n, generator)
        A = torch.cat((A, A[:1] + A[1:2], torch.zeros(1, n, dtype=F64)))
        x = torch.rand(n, generator=generator, dtype=F64)
        P = banded(n) * (torch.arange(n) < n - 4).double().outer((torch.arange(n) < n - 4).double())
        q = torch.randn(n, generator=generator, dtype=F64) * (torch.arange(n) < n - 4)
        found = []
        for sparse in (False, True):
            b, own = (A @ x).requires_grad_(), q.clone().requires_grad_()
            body = dfw.Polyhedron(A=A.to_sparse() if sparse else A, b=b, lower=-1.0, upper=2.0)
            sol = dfw.solve(dfw.Quadratic(P.to_sparse() if sparse else P, own), body)
            assert sol.converged
            loss = (sol.x * torch.linspace(-1, 1, n, dtype=F64)).sum()
            found.append((sol.value.detach(), *torch.autograd.grad(loss, (own, b))))
        for one, other in zip(*found, strict=True):
            close(one, other, rtol=1e-6, atol=1e-7)

    def test_statuses(self):
        P, q, *_ = self.parts()
        row = torch.zeros(1, self.N, dtype=F64)
        row[0, 0] = 1.0
        falls = dfw.solve(
            dfw.Quadratic((0 * P).to_sparse(), q.abs()), dfw.Polyhedron(row.to_sparse(), 1.0)
        )
        assert falls.status == dfw.Status.UNBOUNDED
        G2 = torch.cat((row, -row)).to_sparse()
        none = dfw.solve(
            dfw.Quadratic(P.to_sparse(), q),
            dfw.Polyhedron(G2, torch.tensor([-1.0, -1.0], dtype=F64)),
        )
        assert none.status == dfw.Status.INFEASIBLE

    def test_float32(self):
        P, q, G, h, A, b = (t.float() for t in self.parts())
        sol = self.solved(P.to_sparse(), q, G.to_sparse(), h, A.to_sparse(), b)
        wide = self.solved(*self.parts())
        close(sol.x.double(), wide.x, rtol=1e-3, atol=1e-4)
        assert sol.converged

    def test_a_batch_is_refused_with_the_remedy(self):
        P, q, G, h, A, b = self.parts()
        with pytest.raises(ValueError, match=r"constraint: sparse rows .* one by one"):
            self.solved(P, q.expand(2, -1), G.to_sparse(), h, A.to_sparse(), b)


def test_many_variables():
    """A dense matrix of this size would take 3 GB."""
    n, k = 20_000, 2_000
    each = torch.arange(n)
    main = torch.stack((each, each))
    side = torch.stack((each[:-1], each[1:]))
    place = torch.cat((main, side, side.flip(0)), 1)
    numbers = torch.cat((torch.full((n,), 2.5), -torch.ones(2 * n - 2))).double()
    P = torch.sparse_coo_tensor(place, numbers, (n, n), check_invariants=False).coalesce()
    row = torch.arange(k).repeat_interleave(3)
    place = torch.stack((row, row * (n // k) + torch.arange(3).repeat(k)))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3 * k, generator=generator, dtype=F64)
    A = torch.sparse_coo_tensor(place, numbers, (k, n), check_invariants=False).coalesce()
    inside = torch.rand(n, generator=generator, dtype=F64) - 0.5
    b = torch.sparse.mm(A, inside.unsqueeze(-1)).squeeze(-1)
    q = torch.randn(n, generator=generator, dtype=F64)
    for t in (P, q, A, b):
        t.requires_grad_()
    sol = dfw.solve(dfw.Quadratic(P, q), dfw.Polyhedron(A=A, b=b, lower=-1.0, upper=1.0))
    assert sol.converged
    assert float(sol.violation) < 1e-12
    sol.x.square().sum().backward()
    assert all(t.grad is not None and t.grad.layout == t.layout for t in (P, q, A, b))
    assert np.isfinite(float(q.grad.norm()))
