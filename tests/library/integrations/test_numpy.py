"""Solves with NumPy arrays and sparse matrices of SciPy."""

import numpy as np
import pytest
import torch

import dfwlayer
import dfwlayer.integrations.numpy as dfw

RNG = np.random.default_rng(1)
A, B = RNG.normal(size=(30, 8)), RNG.normal(size=30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_solution_is_that_of_the_library(dtype):
    a, b = A.astype(dtype), B.astype(dtype)
    found = dfw.solve(dfw.LeastSquares(a, b), dfw.LpBall(1, radius=0.5))
    known = dfwlayer.solve(
        dfwlayer.LeastSquares(torch.from_numpy(a), torch.from_numpy(b)), dfwlayer.LpBall(1, 0.5)
    )
    for name in ("x", "value", "gap", "num_steps", "status", "violation"):
        np.testing.assert_array_equal(getattr(found, name), getattr(known, name))
    assert found.x.dtype == dtype
    np.testing.assert_array_equal(found.multipliers["radius"], known.multipliers["radius"])
    assert found.status == dfw.Status.CONVERGED


def test_batches_products_starts_and_any_layout_of_arrays():
    P, q = A.T @ A, RNG.normal(size=(3, 8))
    body = dfw.Product([dfw.Simplex(), dfw.Box(-np.ones(5), 1.0)], [3, 5])
    known = dfw.solve(dfw.Quadratic(P, q), body)
    fixed = np.asfortranarray(P).astype(">f8")
    fixed.flags.writeable = False
    again = dfw.solve(dfw.Quadratic(fixed[::-1][::-1], q[::-1][::-1]), body, x0=known.x, tol=1e-9)
    np.testing.assert_allclose(again.x, known.x, atol=1e-8)
    groups = dfw.GroupBall(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.3)  # labels stay integers
    assert dfw.solve(dfw.Quadratic(P, q), groups).x.shape == (3, 8)
    mixed = dfw.solve(dfw.Quadratic(P, q.astype(np.float32)), body)
    assert mixed.x.dtype == np.float64


def test_memory_is_shared_where_it_can_be():
    array = np.ones((3, 4))
    dfw.tensor_of(array)[0, 0] = 5
    assert array[0, 0] == 5
    constant = np.ones(3)
    constant.flags.writeable = False
    dfw.tensor_of(constant)[0] = 5
    assert constant[0] == 1


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_sparse_matrices_of_scipy(form):
    sparse = pytest.importorskip("scipy.sparse")
    S = sparse.random_array((40, 12), density=0.3, format=form, random_state=0)
    b = RNG.normal(size=40)
    found = dfw.solve(dfw.LeastSquares(S, b), dfw.LpBall(1, 0.7), tol=1e-10)
    known = dfw.solve(dfw.LeastSquares(S.toarray(), b), dfw.LpBall(1, 0.7), tol=1e-10)
    np.testing.assert_allclose(found.x, known.x, atol=1e-10)
    if form == "csr":
        dfw.tensor_of(S).values()[0] = 7.0
        assert S.data[0] == 7.0
    twice = sparse.coo_array((np.ones(3), ([0, 0, 1], [1, 1, 0])), shape=(2, 2)).asformat(form)
    np.testing.assert_array_equal(dfw.tensor_of(twice).to_dense(), [[0, 2], [1, 0]])


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="b: expected shape"):
        dfw.solve(dfw.LeastSquares(A, B[:3]), dfw.LpBall(1))
    with pytest.raises(ValueError, match="radius: expected numbers ≥ 0"):
        dfw.solve(dfw.LeastSquares(A, B), dfw.LpBall(1, np.array(-1.0)))
    with pytest.raises(ValueError, match="q: expected float32 or float64"):
        dfw.solve(dfw.Quadratic(None, np.arange(3)), dfw.LpBall(1))
    with pytest.raises(
        ValueError, match=r"objective: expected one of dfwlayer\.integrations\.numpy"
    ):
        dfw.solve(A, dfw.LpBall(1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        dfw.solve(dfw.LeastSquares(A, B), dfw.LpBall(1), steps=3)
    with pytest.raises(AttributeError, match="no objective or set"):
        dfw.Bal(1)
    assert {"LpBall", "Polyhedron", "solve"} <= set(dir(dfw))
