"""Problems of which few coordinates are free: solved on those, the same as without that."""

import gc
import warnings

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from compiled_cases import SETS, N, attempted
from dfwlayer.engines import compiled
from dfwlayer.engines.compiled import pool
from dfwlayer.engines.compiled.layout import lay_out
from dfwlayer.engines.compiled.working_set import WorkingSets, lay_out_columns
from dfwlayer.linalg import sparse
from dfwlayer.ops.kept import Kept
from dfwlayer.ops.tensors import tensors_in

F32, F64 = torch.float32, torch.float64
BENT = (
    "l2",
    "l1.3",
    "l3",
    "l4",
    "around",
    "shifted",
    "ellipsoid",
)  # parts of the names of other sets
FLAT = [name for name in SETS if not any(part in name for part in BENT)]
LIMITS = 1e-10, 1000
BODIES = {  # of a radius and weights
    "l1": lambda t, _: dfw.LpBall(1.0, t),
    "weighted l1": lambda t, w: dfw.LpBall(1.0, t, w),
    "simplex": lambda t, _: dfw.Simplex(t),
    "capped simplex": dfw.CappedSimplex,
    "l1 in a box": lambda t, w: dfw.L1Box(t, None, -0.3 * w, 0.4),
    "k-sparse": lambda t, _: dfw.KSparse(12.0, t / 10),
    "box": lambda _, w: dfw.Box(-w, 0.2),
    "product": lambda t, _: dfw.Product((dfw.LpBall(1.0, t), dfw.Simplex(1.0)), (200, 200)),
}


def columns(m=100, n=400, dtype=F64, seed=0, rho=0.5, share=1.0):
    """Columns that resemble their neighbours, and a combination of ten of them with some noise."""
    torch.manual_seed(seed)
    A = torch.randn(m, n, dtype=F64)
    for j in range(1, n):
        A[:, j] = rho * A[:, j - 1] + (1 - rho**2) ** 0.5 * A[:, j]
    A = torch.where(torch.rand(m, n) < share, A, 0)
    x = torch.zeros(n, dtype=F64)
    x[torch.randperm(n)[:10]] = torch.randn(10, dtype=F64)
    b = A @ x + 0.1 * torch.randn(m, dtype=F64)
    weight = 0.5 + torch.rand(n, dtype=F64)
    return A.to(dtype), b.to(dtype), torch.tensor(4.0, dtype=dtype), weight.to(dtype)


def objective(kind, A, b):
    if kind == "quadratic":
        return dfw.Quadratic(A.mT @ A + torch.eye(A.shape[1], dtype=A.dtype), -(b @ A))
    if kind == "dense":
        return dfw.LeastSquares(A, b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dfw.LeastSquares(A.to_sparse_csr() if kind == "CSR" else A.to_sparse(), b)


def both(solve, wrt):
    """The solution and the gradients of a functional, with working sets and without them."""
    found = []
    for compiles in (True, False):
        with compiled.using(compiles):
            sol = solve()
        v = torch.linspace(-1, 2, sol.x.shape[-1], dtype=sol.x.dtype)
        gradients = torch.autograd.grad((sol.x * v).sum(), wrt, allow_unused=True)
        found.append((sol, [g if g is None else g.to_dense() for g in gradients]))
    return found


def agree(here, there, tol):
    here, there = here.detach(), there.detach()
    assert torch.allclose(here, there, rtol=tol, atol=tol * float(there.abs().max()) + 1e-300)


@pytest.mark.parametrize("kind", ["dense", "CSR", "COO", "quadratic"])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", [F64, F32])
def test_x_and_gradients_are_those_without(name, kind, dtype):
    A, b, t, weight = columns(dtype=dtype, share=0.5 if kind in ("CSR", "COO") else 1.0)
    if name == "box":  # many at their bounds
        b = 20 * b
    f = objective(kind, A, b)
    tol = 1e-9 if dtype == F64 else 1e-5
    body = BODIES[name](t, weight)
    assert attempted(f, body, tol=tol) is not None or name == "box"
    wrt = [p.requires_grad_() for p in (*tensors_in(f), t, weight)]
    (here, of_here), (there, of_there) = both(
        lambda: dfw.solve(f, BODIES[name](t, weight), tol=tol), wrt
    )
    assert here.status == there.status == dfw.Status.CONVERGED
    assert body.violation(here.x).detach() <= 16 * torch.finfo(dtype).eps
    close = 1e-9 if dtype == F64 else 1e-3
    agree(here.x, there.x, close)
    agree(here.value, there.value, close)
    assert 0 <= here.gap <= tol * here.value.abs()
    for own, other in zip(of_here, of_there, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            agree(own, other, 1e-7 if dtype == F64 else 5e-3)


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_small_problems_by_both_ways(name, lead, monkeypatch):
    """Every set in normal form, one coordinate after the other, against the whole at once."""
    monkeypatch.setattr(pool, "BLOCK", 2)
    monkeypatch.setattr(pool, "MANY", 2.0)
    monkeypatch.setattr(pool, "EARLY", (1e9, 1.0))
    solved = 0
    for seed in range(12):
        torch.manual_seed(seed)
        body = SETS[name](lead, F64)
        A = torch.randn(6 if seed % 3 == 0 else 12, N, dtype=F64)
        b = torch.randn(*lead, len(A), dtype=F64)
        f = dfw.LeastSquares(A, b) if seed % 3 else dfw.Quadratic(A.mT @ A, b @ A)
        whole, parts = lay_out(f, body), lay_out_columns(f, body)
        assert whole is not None and parts is not None  # noqa: PT018
        start = np.zeros((1, N))
        want, found = whole.search(start, *LIMITS), parts.search(start, *LIMITS)
        done = want.codes[0] == 0
        if found is None or not done.all() or (found.codes[0] != 0).any():
            continue
        solved += 1
        assert np.allclose(found.x, want.x, rtol=1e-9, atol=1e-12)
        assert np.allclose(found.values[0], want.values[0], rtol=1e-9)
        v = np.random.default_rng(seed).standard_normal(found.x.shape)
        of_parts, of_whole = (
            [
                g
                for g in layout.pullback([t is not None for t in layout.tensors], *at)
                if g is not None
            ]
            for layout, at in ((parts, (found, v)), (whole, (want, v.copy())))
        )
        for own, other in zip(of_parts, of_whole, strict=True):
            assert torch.allclose(own, other, rtol=1e-7, atol=1e-9)
    assert solved >= 7


def test_a_path_of_radii_in_one_call_and_with_warm_starts():
    A, b, _, _ = columns()
    radii = torch.linspace(0.5, 5, 12, dtype=F64)
    f = dfw.LeastSquares(A, b)
    path = dfw.solve(f, dfw.LpBall(1, radii), tol=1e-10)
    assert path.converged.all()
    x, steps = None, 0
    for i, t in enumerate(radii.tolist()):
        cold = dfw.solve(f, dfw.LpBall(1, t), tol=1e-10)
        warm = dfw.solve(f, dfw.LpBall(1, t), x0=x, tol=1e-10)
        agree(path.x[i], cold.x, 1e-10)
        agree(warm.x, cold.x, 1e-10)
        steps += int(cold.num_steps) - int(warm.num_steps)
        x = warm.x
    assert steps > 0
    again = dfw.solve(f, dfw.LpBall(1, radii), x0=path.x, tol=1e-10)
    agree(again.x, path.x, 1e-10)
    assert again.num_steps.sum() < path.num_steps.sum()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_all_of_a_path_is_feasible_and_certified(dtype):
    """Also those that are done long before the others."""
    A, b, _, _ = columns(dtype=dtype)
    radii = torch.linspace(0.1, 5, 25, dtype=dtype)
    f, body = dfw.LeastSquares(A, b), dfw.LpBall(1, radii)
    found = attempted(f, body)
    assert found is not None and found.left is None  # noqa: PT018
    sol = found.solution
    eps = torch.finfo(dtype).eps
    assert (sol.x.double().abs().sum(-1) <= radii.double() * (1 + 4 * eps)).all()
    value = dfw.LeastSquares(A.double(), b.double()).value(sol.x.double())
    assert torch.allclose(value, sol.value.double(), rtol=8 * eps)
    gradient = dfw.LeastSquares(A.double(), b.double()).gradient(sol.x.double())
    gap = (gradient * sol.x.double()).sum(-1) + radii.double() * gradient.abs().amax(-1)
    assert (gap <= sol.gap.double() + 1e-12 * value).all()
    assert (sol.gap <= 1e-5 * sol.value).all()


def test_the_number_of_threads_does_not_matter():
    A, b, _, _ = columns()
    radii = torch.linspace(0.1, 5, 25, dtype=F64)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, radii)))
    finally:
        torch.set_num_threads(threads)
    agree(found[0].x, found[1].x, 1e-13)
    assert torch.equal(found[0].num_steps, found[1].num_steps)


def test_a_batch_of_targets_with_one_that_is_bad():
    A, b, t, _ = columns()
    b = b + torch.randn(5, len(b), dtype=F64)
    b[2, 3] = torch.nan
    b.requires_grad_()
    sol = dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, t), tol=1e-9)
    assert sol.status.tolist() == [0, 0, dfw.Status.NONFINITE, 0, 0]
    sol.x.nansum().backward()
    for i in (0, 1, 3, 4):
        alone = b[i].detach().requires_grad_()
        one = dfw.solve(dfw.LeastSquares(A, alone), dfw.LpBall(1, t), tol=1e-9)
        agree(sol.x[i].detach(), one.x.detach(), 1e-10)
        one.x.sum().backward()
        agree(b.grad[i], alone.grad, 1e-8)
    assert not b.grad[2].any()
    start = sol.x.detach()  # with the NaN of the problem that was bad
    again = dfw.solve(dfw.LeastSquares(A, b.detach()), dfw.LpBall(1, t), x0=start, tol=1e-9)
    agree(again.x[3], start[3], 1e-10)


@pytest.mark.parametrize("kind", ["dense", "quadratic"])
def test_second_derivatives(kind):
    A, b, t, _ = columns(40, 320)
    tensors = [p.requires_grad_() for p in (b, t)]

    def second():
        f = objective(kind, A, b)
        x = dfw.solve(f, dfw.LpBall(1, t), tol=1e-10).x
        first = torch.autograd.grad(x.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    with compiled.using(False):
        want = second()
    for own, other in zip(second(), want, strict=True):
        agree(own, other, 1e-7)


def degenerate():
    A, b, t, _ = columns()
    yield "columns twice", torch.cat((A, A[:, :50]), 1), b, t
    yield "zero columns", torch.where(torch.arange(400) % 3 == 0, 0, A), b, t
    yield "integers", (3 * A).round(), (2 * b).round(), t
    yield "large", 1e20 * A, 1e20 * b, t
    yield "small", 1e-20 * A, 1e-25 * b, t * 1e-5
    yield "columns of all sizes", A * torch.logspace(-6, 6, 400, dtype=F64), b, t
    yield "no target", A, 0 * b, t
    yield "one column repeated", A[:, :1].expand(-1, 400), b, t
    yield "few rows", A[:3], b[:3], t
    yield "a point", A, b, 0 * t
    yield "not finite", A, b, t / 0


@pytest.mark.parametrize(
    ("A", "b", "t"), [pytest.param(*rest, id=name) for name, *rest in degenerate()]
)
@pytest.mark.parametrize("kind", ["dense", "CSR"])
def test_degenerate_data(A, b, t, kind):
    """The same answer, or where there are many another one that is as good."""
    f, body = objective(kind, A, b), dfw.LpBall(1, t)
    found = []
    for compiles in (True, False):
        with compiled.using(compiles):
            try:
                found.append(dfw.solve(f, body))
            except ValueError as error:
                found.append(str(error))
    here, there = found
    if isinstance(there, str):
        assert here == there
        return
    assert here.status == there.status
    assert torch.allclose(here.value, there.value, rtol=2e-5, atol=1e-300)
    assert float(body.violation(here.x)) <= 4e-16 * float(t)


def test_many_free_coordinates_are_left_to_others():
    torch.manual_seed(0)
    n = 1100  # more than compiled code takes whole
    R = torch.randn(n, n, dtype=F64)
    P, q = R.mT @ R / n + torch.eye(n, dtype=F64), torch.randn(n, dtype=F64)
    assert attempted(dfw.Quadratic(P, q), dfw.LpBall(1, 1e3)) is None
    assert attempted(dfw.Quadratic(P, q), dfw.LpBall(1, 1.0)) is not None


def test_steps_are_counted_and_end_where_they_should():
    A, b, t, _ = columns()
    f, body = dfw.LeastSquares(A, b), dfw.LpBall(1, t)
    steps = int(dfw.solve(f, body, tol=1e-9).num_steps)
    assert int(dfw.solve(f, body, tol=1e-9, max_steps=steps).num_steps) == steps
    for most in (0, 1, 3):
        with compiled.using(False):
            want = dfw.solve(f, body, tol=1e-9, max_steps=most)
        found = dfw.solve(f, body, tol=1e-9, max_steps=most)
        assert found.status == want.status == dfw.Status.MAX_STEPS
        assert found.num_steps <= most
    seen = []
    dfw.solve(f, body, callback=lambda at: seen.append(float(at.gap)))
    assert len(seen) > 1


def test_matrices_that_make_no_problem_are_refused_as_ever():
    torch.manual_seed(0)
    P, q = torch.eye(400, dtype=F64), -torch.ones(400, dtype=F64)
    q[:3] = -9.0
    skew = P.clone()
    skew[300, 301] = 1.0  # far from every coordinate that is free
    with pytest.raises(ValueError, match="symmetric"):
        dfw.solve(dfw.Quadratic(skew, q), dfw.LpBall(1, 1.0))
    A, b, t, _ = columns()
    A[5, 7] = torch.nan
    with pytest.raises(ValueError, match="A: 1 of 40000 values"):
        dfw.solve(dfw.LeastSquares(A, b), dfw.LpBall(1, t))


def test_the_right_way_is_chosen():
    A, b, t, _ = columns()
    assert isinstance(lay_out_columns(dfw.LeastSquares(A, b), dfw.LpBall(1, t)), WorkingSets)
    for f, body in (
        (dfw.LeastSquares(A, b), dfw.LpBall(2, t)),
        (dfw.LeastSquares(A.expand(2, -1, -1), b), dfw.LpBall(1, t)),
        (dfw.Quadratic(None, b @ A), dfw.LpBall(1, t)),
        (dfw.LeastSquares(A.half(), b.half()), dfw.LpBall(1, t.half())),
    ):
        assert lay_out_columns(f, body) is None


# what is kept of a matrix


@pytest.mark.parametrize("kind", ["CSR", "COO"])
def test_a_sparse_matrix_is_sorted_once_until_it_changes(kind, monkeypatch):
    A, b, t, _ = columns(share=0.3)
    matrix = objective(kind, A, b).A
    matrix = matrix.coalesce() if kind == "COO" else matrix
    sorts = []
    order = sparse.Pattern._by_column.func
    monkeypatch.setattr(
        sparse.Pattern, "_by_column", property(lambda own: sorts.append(1) or order(own))
    )
    ball = dfw.LpBall(1, t)
    first = dfw.solve(dfw.LeastSquares(matrix, b), ball)
    count = len(sorts)
    assert count > 0
    for compiles in (True, False):
        with compiled.using(compiles):
            agree(dfw.solve(dfw.LeastSquares(matrix, b), ball).x, first.x, 1e-6)
    assert len(sorts) == count
    matrix.values().mul_(2)
    doubled = dfw.solve(dfw.LeastSquares(matrix, b), ball)
    agree(doubled.x, dfw.solve(dfw.LeastSquares(2 * A, b), ball).x, 1e-6)
    assert len(sorts) > count


def test_what_is_kept_goes_with_its_tensor():
    kept = Kept()
    one, other = torch.ones(3), torch.ones(3)
    assert kept.of(one, lambda: "a") == kept.of(one, lambda: "b") == "a"
    assert kept.of(other, lambda: "c") == "c"
    one.add_(1)
    assert kept.of(one, lambda: "d") == "d"
    with torch.inference_mode():
        plain = torch.ones(3)
    assert kept.of(plain, lambda: "e") == "e"
    assert kept.of(plain, lambda: "f") == "f"
    del one, other
    gc.collect()
    assert len(kept) == 0
