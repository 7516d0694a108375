"""Large problems, sparse ones, many at once, and starts from the last solution, in small."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import dfwlayer as dfw
from dfwlayer.linalg import sparse
from helpers import certificate, close

F64 = torch.float64


def quadratics(count, n, seed, dtype=F64):
    """Well-conditioned problems and the solutions of the unconstrained ones."""
    gen = torch.Generator().manual_seed(seed)
    R = torch.randn(count, n, n, generator=gen, dtype=dtype)
    P = R.mT @ R + n * torch.eye(n, dtype=dtype)
    q = torch.randn(count, n, generator=gen, dtype=dtype)
    weight = torch.rand(count, n, generator=gen, dtype=dtype) + 0.5
    return P, q, weight, torch.linalg.solve(P, -q)


# ---------------------------------------------------------------------------------------------
# memory

PEAK = """
import sys
from pathlib import Path
import torch
from dfwlayer import LpBall, Quadratic, solve

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

def call(n, P, p):
    q = torch.randn(n, requires_grad=True)
    weight = (torch.rand(n) + 0.5).requires_grad_()
    radius = torch.tensor(n ** (0.2 / p), requires_grad=True)
    solve(Quadratic(P, q), LpBall(p, radius, weight)).x.square().sum().backward()
    assert weight.grad.abs().max() > 0 and radius.grad != 0

torch.manual_seed(0)
torch.set_num_threads(1)
n = 4500
R = torch.randn(n // 10, n) / (n // 10) ** 0.5
P = torch.empty(n, n)
torch.mm(R.mT, R, out=P)
P.diagonal().add_(1.0)
for p in (1.0, 2.0, torch.inf):
    call(700, P[:700, :700].contiguous(), p)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call(n, P, p)
    print((resident("VmHWM") - before) / (P.numel() * P.element_size()))
"""


def _can_reset_the_peak():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _can_reset_the_peak(), reason="the peak of the memory cannot be told here")
def test_a_dense_problem_needs_little_memory_beside_its_matrix():
    """Not even a mask of P's shape, which would be a quarter of it in float32."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    shares = [float(line) for line in run.stdout.split()]
    assert len(shares) == 3
    assert max(shares) < 0.1, shares


# ---------------------------------------------------------------------------------------------
# sparse least squares


def sparse_problem(m, n, per_row, dtype=F64, seed=0):
    """Indices sorted by row, entries and b of a lasso with a sparse solution."""
    gen = torch.Generator().manual_seed(seed)
    stride = n // per_row
    col = torch.arange(per_row) * stride + torch.randint(stride, (m, per_row), generator=gen)
    indices = torch.stack((torch.arange(m).repeat_interleave(per_row), col.flatten()))
    entries = torch.randn(m * per_row, generator=gen, dtype=dtype)
    truth = torch.zeros(n, dtype=dtype)
    truth[torch.randperm(n, generator=gen)[: n // 20]] = 1.0
    b = torch.sparse_coo_tensor(indices, entries, (m, n), check_invariants=False) @ truth
    return indices, entries, b + 0.1 * torch.randn(m, generator=gen, dtype=dtype), truth


def matrix(layout, indices, entries, shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR tensors a beta
        A = torch.sparse_coo_tensor(indices, entries, shape, check_invariants=False)
        if layout == "COO":
            return A.coalesce()
        if layout == "CSR":
            return A.coalesce().to_sparse_csr()
        if layout == "shuffled COO":  # and each entry in two halves
            order = torch.randperm(len(entries))
            twice = torch.cat((order, order.flip(0)))
            return torch.sparse_coo_tensor(
                indices[:, twice], 0.5 * entries[twice], shape, check_invariants=False
            )
        return A.to_dense()


LAYOUTS = ["COO", "CSR", "shuffled COO"]


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_lasso_is_the_dense_one(layout, rows):
    m, n = 60, 200
    indices, entries, b, truth = sparse_problem(m, n, 10)
    if rows is not None:
        b = b + 0.1 * torch.randn(rows, m, dtype=F64)
    radius = 0.7 * float(truth.sum())
    found = []
    for kind in (layout, "dense"):
        A = matrix(kind, indices, entries, (m, n)).requires_grad_()
        given = b.clone().requires_grad_()
        sol = dfw.solve(dfw.LeastSquares(A, given), dfw.LpBall(1, radius), tol=1e-10)
        (sol.x * truth + sol.x.square()).sum().backward()
        grad = A.grad.to_dense()[indices[0], indices[1]]
        found.append((sol.x, sol.value, given.grad, grad))
    for got, want in zip(*found, strict=True):
        close(got, want, rtol=1e-6, atol=1e-8)
    x, A = found[0][0].detach(), matrix("dense", indices, entries, (m, n))
    slope = (x @ A.mT - b) @ A
    one = torch.ones(n, dtype=F64)
    gap = certificate(x, slope, 1.0, one, torch.tensor(radius, dtype=F64))
    assert (gap <= 1e-8 * found[0][1].detach()).all()
    assert (x != 0).sum(-1).max() < n // 2


@pytest.mark.parametrize("layout", ["COO", "CSR"])
def test_the_gradient_of_a_sparse_matrix_is_sparse(layout):
    """A dense one would have 400 million entries."""
    m = n = 20_000
    indices, entries, b, truth = sparse_problem(m, n, 5, torch.float32)
    A = matrix(layout, indices, entries, (m, n)).requires_grad_()
    sol = dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, 0.5 * float(truth.sum())))
    sol.x.square().sum().backward()
    assert A.grad.layout == A.layout
    grad = A.grad.coalesce() if layout == "COO" else A.grad
    assert len(grad.values()) == len(entries)
    assert grad.values().abs().max() > 0


def test_entries_that_are_parameters_get_their_gradient():
    m, n = 30, 50
    indices, entries, b, truth = sparse_problem(m, n, 5)
    ball = dfw.LpBall(1, 0.7 * float(truth.sum()))

    def loss(entries):
        A = torch.sparse_coo_tensor(
            indices, entries, (m, n), is_coalesced=True, check_invariants=False
        )
        return dfw.solve(dfw.LeastSquares(A, b), ball, tol=1e-14).x.square().sum()

    at = entries.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(at), at)
    for seed in range(3):
        d = torch.randn(len(entries), dtype=F64, generator=torch.Generator().manual_seed(seed))
        step = 1e-6
        with torch.no_grad():
            slope = (loss(entries + step * d) - loss(entries - step * d)) / (2 * step)
        close(grad @ d, slope, rtol=1e-5)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows", [None, 1, 4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_products_and_their_derivatives(layout, rows, transpose):
    m, n = 5, 8
    indices, entries, _, _ = sparse_problem(m, n, 2)
    keep = indices[0] != 2  # one empty row
    indices, entries = indices[:, keep], entries[keep]
    size = m if transpose else n
    x = torch.randn(size if rows is None else (rows, size), dtype=F64)

    def product(entries, x):
        A = matrix(layout, indices, entries, (m, n))
        objective = dfw.LeastSquares(A, torch.zeros(m, dtype=F64))
        return objective.adjoint(x) if transpose else objective.product(x)

    dense = matrix("dense", indices, entries, (m, n))
    close(product(entries, x), x @ (dense if transpose else dense.mT), rtol=1e-14, atol=1e-14)
    if layout == "shuffled COO" and rows is not None:
        return  # its derivatives go through torch's own coalesce, one case is enough
    torch.manual_seed(1)
    at = (entries.clone().requires_grad_(), x.clone().requires_grad_())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(product, at)
        if layout == "COO":  # torch cannot differentiate its other constructors twice
            assert torch.autograd.gradgradcheck(product, at)


def test_sparse_products_without_mkl(monkeypatch):
    indices, entries, _, _ = sparse_problem(5, 8, 2)
    A = matrix("CSR", indices, entries, (5, 8))
    x = torch.randn(8, dtype=F64)
    want = sparse.SparseMatrix.of(A).product(entries, x)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    close(sparse.SparseMatrix.of(A).product(entries, x), want, rtol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_matrix_changed_in_place_is_seen(layout):
    """What is kept of A belongs to one solve."""
    indices, entries, b, _ = sparse_problem(40, 20, 4)
    A = matrix(layout, indices, entries, (40, 20))
    objective = dfw.LeastSquares(A, b)
    ball = dfw.LpBall(1, 1.0)
    dfw.solve(objective, ball)
    before = objective.value(torch.ones(20, dtype=F64))
    stored = A.values() if layout == "CSR" else A._values()
    stored.mul_(2.0)
    other = dfw.LeastSquares(matrix("dense", indices, 2 * entries, (40, 20)), b)
    close(dfw.solve(objective, ball).x, dfw.solve(other, ball).x, rtol=1e-6, atol=1e-9)
    one = torch.ones(20, dtype=F64)
    close(objective.value(one), other.value(one), rtol=1e-12)
    assert objective.value(one) != before


def test_sparse_entries_that_are_vectors_are_refused():
    A = torch.eye(4).to_sparse(1)
    with pytest.raises(ValueError, match=r"^A: .*dense"):
        dfw.LeastSquares(A, torch.ones(4))


# ---------------------------------------------------------------------------------------------
# many small problems


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_many_small_problems_are_each_solved_as_alone(p):
    count, n = 20_000, 10
    P, q, weight, free = quadratics(count, n, seed=1, dtype=torch.float32)
    radius = 0.3 * torch.linalg.vector_norm(weight * free, p, dim=-1)
    leaves = [t.clone().requires_grad_() for t in (P, q, weight, radius)]
    ball = dfw.LpBall(p, leaves[3], leaves[2])
    sol = dfw.solve(dfw.Quadratic(leaves[0], leaves[1]), ball)
    sol.x.square().sum().backward()
    assert sol.converged.all()
    assert (ball.violation(sol.x.detach()) <= 1e-6 * radius).all()
    for i in range(0, count, count // 7):
        alone = [t[i].clone().requires_grad_() for t in (P, q, weight, radius)]
        ball = dfw.LpBall(p, alone[3], alone[2])
        x = dfw.solve(dfw.Quadratic(alone[0], alone[1]), ball).x
        x.square().sum().backward()
        close(sol.x[i], x, rtol=0, atol=1e-5 * float(x.detach().abs().max()))
        for together, single in zip(leaves, alone, strict=True):
            size = float(single.grad.abs().max())
            close(together.grad[i], single.grad, rtol=0, atol=1e-3 * size)


# ---------------------------------------------------------------------------------------------
# starts from the last solution


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_start_at_or_near_the_solution_saves_steps(p):
    cold, near, exact = [], [], []
    for seed in range(6):
        P, q, weight, free = quadratics(8, 60, seed, torch.float32)
        ball = dfw.LpBall(p, 0.3 * torch.linalg.vector_norm(weight * free, p, dim=-1), weight)
        before = dfw.solve(dfw.Quadratic(P, q), ball)
        exact.append(dfw.solve(dfw.Quadratic(P, q), ball, x0=before.x).num_steps)
        moved = dfw.Quadratic(P, q + 1e-3 * q.abs().mean() * torch.randn_like(q))
        afresh, again = dfw.solve(moved, ball), dfw.solve(moved, ball, x0=before.x)
        cold.append(afresh.num_steps)
        near.append(again.num_steps)
        assert again.converged.all()
        size = float(afresh.x.abs().max())
        close(again.x, afresh.x, rtol=0, atol=1e-4 * size)
    cold, near, exact = (torch.cat(each).float().mean() for each in (cold, near, exact))
    assert exact <= 0.75 * cold
    assert near <= 0.85 * cold


def test_rows_of_other_batches_serve_as_a_start():
    """Solutions kept by sample: in another order, in another batch size, some not there yet."""
    P, q, weight, free = quadratics(12, 40, seed=3)
    radius = 0.3 * (weight * free).abs().sum(-1)

    def solved(index, x0=None):
        ball = dfw.LpBall(1, radius[index], weight[index])
        return dfw.solve(dfw.Quadratic(P[index], q[index]), ball, x0=x0, tol=1e-10)

    kept = torch.full((12, 40), torch.nan, dtype=F64)
    first = torch.arange(8)
    kept[first] = solved(first).x
    mixed = torch.tensor([10, 3, 7, 11, 0])
    cold, warm = solved(mixed), solved(mixed, kept[mixed])
    assert warm.converged.all()
    close(warm.x, cold.x, rtol=1e-6, atol=1e-9)
    known = torch.tensor([1, 2, 4])
    assert (warm.num_steps[known] < cold.num_steps[known]).all()
