"""The Cholesky factor of compiled code, against NumPy's."""

import numba
import numpy as np
import pytest

from dfwlayer.engines.compiled.kernels.dense import factor


@numba.njit
def factored(L, n):
    return factor(L, n)


def positive(n, seed, share=1.0):
    """A positive definite matrix; few of the entries of what it is made of are not zero."""
    draw = np.random.default_rng(seed)
    part = np.where(draw.random((n, n)) < share, draw.standard_normal((n, n)), 0.0)
    return part @ part.T + 0.5 * np.eye(n)


@pytest.mark.parametrize("share", [1.0, 0.05])  # dense, and with zeros at the beginning of rows
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 30, 61, 130])
def test_it_is_the_factor_below_the_diagonal_and_nothing_is_written_above(n, share):
    P = positive(n, n, share)
    above = np.triu_indices(n, 1)
    L = P.copy()
    L[above] = np.nan
    assert factored(L, n)
    assert np.isnan(L[above]).all()
    L[above] = 0.0
    np.testing.assert_allclose(L, np.linalg.cholesky(P), rtol=0, atol=1e-13 * P.max())


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 21, 60])
def test_a_factor_of_the_first_rows_of_a_larger_array(n):
    P = positive(n + 3, n)
    L = P.copy()
    assert factored(L, n)
    np.testing.assert_array_equal(L[n:], P[n:])
    np.testing.assert_allclose(np.tril(L[:n, :n]), np.linalg.cholesky(P[:n, :n]), atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_a_row_that_is_zero_or_like_another_one_is_singular(n):
    for at in range(n):
        P = positive(n, 3)
        P[at] = P[:, at] = P[at - 1] if n > 1 else 0.0
        P[at, at] = P[at - 1, at - 1] if n > 1 else 0.0
        if n > 1:
            P[at, at - 1] = P[at - 1, at] = P[at - 1, at - 1]
        assert not factored(P.copy(), n)
        P[at] = P[:, at] = 0.0
        assert not factored(P.copy(), n)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_nan_and_what_is_not_positive_are_refused(n):
    for wrong in (np.nan, -1.0):
        P = positive(n, 5)
        P[-1, -1] = wrong
        assert not factored(P, n)
