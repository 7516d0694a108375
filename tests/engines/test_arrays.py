"""Products of arrays around compiled code: right in every size, and large ones not NumPy's."""

import numpy as np
import pytest
import torch

import dfwlayer as dfw
from compiled_cases import F64
from dfwlayer.engines.compiled import arrays

SIZES = ((1, 4), (3, 7), (40, 30), (60, 90))


@pytest.fixture
def random():
    return np.random.default_rng(8)


@pytest.mark.parametrize(("batch", "n"), SIZES)
@pytest.mark.parametrize("shared", [True, False])
def test_products(batch, n, shared, random):
    """Against sums that are written out; a row of NaN stays alone."""
    A = random.standard_normal((1 if shared else batch, n + 2, n))
    x = random.standard_normal((batch, n))
    x[-1, 0] = np.nan
    expected = (A * x[:, None]).sum(-1)
    found = arrays.times(A, x)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert np.isnan(found).any(-1).tolist() == [False] * (batch - 1) + [True]
    turned = arrays.times(np.swapaxes(A, -2, -1), found[:, : n + 2])
    np.testing.assert_allclose(turned, (A * expected[..., None]).sum(-2), rtol=1e-11, atol=1e-11)
    squares = (A[..., None] * A[..., None, :]).sum(-3)
    np.testing.assert_allclose(arrays.gram(A), squares, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "n"), SIZES)
@pytest.mark.parametrize("shape", ["one", "one of a batch", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outer_products(batch, n, shape, dtype, random):
    rank = {"one": (n, n), "one of a batch": (1, n, n), "each": (batch, n, n)}[shape]
    a, b, c, d = random.standard_normal((4, batch, n))
    each = a[:, :, None] * b[:, None] + c[:, :, None] * d[:, None]
    expected = torch.from_numpy(each if shape == "each" else each.sum(0)).reshape(rank)
    found = arrays.outer(torch.zeros(rank, dtype=dtype), a, b, c, d)
    torch.testing.assert_close(found, expected.to(dtype))


@pytest.mark.parametrize("size", [1, arrays.FEW, arrays.FEW + 1, 40_000])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_what_arrives_is_numbers(size, bad, random):
    values = random.standard_normal((1, size))
    if bad is not None:
        values[0, size // 2] = bad
    assert arrays._sums_up(values) == (bad is None)
    if size > 1 and bad is None:
        values[0, :2] = np.finfo(np.float64).max  # beyond the range of a sum: told apart later
        assert not arrays._sums_up(values)


class Products:
    """NumPy's products of matrices, and the most numbers that one of them multiplied."""

    def __init__(self):
        self.most, self.matmul, self.vdot = 0, np.matmul, np.vdot

    def of_matrices(self, a, b):
        self.most = max(self.most, a.shape[-2] * a.shape[-1] * b.shape[-1])
        return self.matmul(a, b)

    def of_vectors(self, a, b):
        self.most = max(self.most, a.size)
        return self.vdot(a, b)


SETS = [dfw.Box(-0.3, 0.3), dfw.CappedSimplex(0.3), dfw.LpBall(1, 2.0), dfw.LpBall(2, 1.0)]


@pytest.mark.parametrize("constraint", SETS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("kind", ["nearest", "quadratic", "squares"])
def test_large_products_are_not_numpys(constraint, kind, random, monkeypatch):
    """Its threads are all cores whatever `torch.set_num_threads` said, and wait for each other.

    With others at work there the gradient of a projection of 512 points took 22 ms and not 0.7.
    """
    seen = Products()
    monkeypatch.setattr(np, "matmul", seen.of_matrices)
    monkeypatch.setattr(np, "vdot", seen.of_vectors)
    batch, n = 300, 70
    q = torch.from_numpy(random.standard_normal((batch, n))).requires_grad_()
    root = torch.from_numpy(random.standard_normal((n + 5, n))).requires_grad_()
    if kind == "nearest":
        f = dfw.Quadratic(None, q)
    elif kind == "quadratic":
        f = dfw.Quadratic(root.mT @ root / n + torch.eye(n, dtype=F64), q)
    else:
        f = dfw.LeastSquares(root, torch.cat((q, q[:, :5]), -1))
    sol = dfw.solve(f, constraint)
    assert sol.converged.all()
    (sol.x.square().sum() + sol.value.sum()).backward()
    assert seen.most <= arrays.LARGE
