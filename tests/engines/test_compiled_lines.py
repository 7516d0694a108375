"""Passes of compiled code over a line of numbers, against Python's own and fractions."""

from fractions import Fraction

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dfwlayer.engines.compiled.kernels import table
from dfwlayer.engines.compiled.kernels.certificate import BLOCK, total_of
from dfwlayer.engines.compiled.kernels.numbers import number_of, ordered
from dfwlayer.engines.compiled.kernels.polytope import _next_bend

DIGIT = 2.0**-52


@numba.njit
def total(body, x):
    return total_of(body, table.ROWS, x)


@numba.njit
def keys(values):
    found = np.empty(len(values), np.int64)
    for i in range(len(values)):
        found[i] = ordered(values[i])
    return found


@numba.njit
def numbers(found):
    values = np.empty(len(found))
    for i in range(len(found)):
        values[i] = number_of(found[i])
    return values


@numba.njit(error_model="numpy")
def next_bend(low, high, slopes, budget, multiplier, z, up):
    return _next_bend(low, high, slopes, budget, multiplier, z, up)


def row_of(slopes, kind):
    body = np.zeros((3, len(slopes) + 2))
    body[table.ROWS, : len(slopes)] = slopes
    body[table.ROWS, table.KIND] = kind
    return body


@pytest.mark.parametrize("kind", [table.EQUATION, table.BUDGET])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 33, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_row_adds_up_to_the_last_digit_also_where_its_terms_cancel(n, kind):
    draw = np.random.default_rng(n)
    for spread in (0, 6, 40):
        slopes = np.exp(spread * draw.standard_normal(n) / 4)
        x = draw.standard_normal(n)
        if n > 2:  # all but the digits of one of them are gone in the end
            x[-1] = -(slopes[:-1] @ x[:-1]) / slopes[-1]
        terms = slopes * x
        terms = abs(terms) if kind == table.BUDGET else terms
        exact = sum(map(Fraction, terms.tolist()))
        found, size = total(row_of(slopes, kind), x)
        assert size == abs(terms).max()
        lost = Fraction(size) * n * min(n, BLOCK) ** 2 * 4 * Fraction(DIGIT) ** 2
        assert abs(Fraction(found) - exact) <= Fraction(DIGIT) * abs(exact) + lost


def test_rows_of_numbers_that_have_no_such_digits_add_up_as_well():
    ones = row_of(np.ones(4), table.EQUATION)
    assert total(ones, np.zeros(4)) == (0.0, 0.0)
    assert total(ones, np.full(4, 1e-310)) == (4e-310, 1e-310)
    assert total(ones, np.array([1e80, 1.0, -1e80, 1.0])) == (2.0, 1e80)
    assert total(ones, np.array([1.0, 1e-310, 2.0, 3.0])) == (6.0, 3.0)
    for wrong in (np.nan, np.inf):
        assert np.isnan(total(ones, np.array([1.0, wrong, 2.0, 3.0]))[0])


@given(arrays(np.float64, st.integers(1, 30), elements=st.floats(allow_nan=False)))
@settings(max_examples=50, deadline=None)
def test_integers_are_in_the_order_of_their_numbers(values):
    found = keys(values)
    for i, j in np.ndindex(len(values), len(values)):
        assert values[i] >= values[j] or found[i] < found[j]
    np.testing.assert_array_equal(numbers(found), values)
    assert keys(np.array([np.nan]))[0] > found.max()


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize("up", [False, True])
def test_the_next_bend_is_the_nearest_one_that_is_ahead(budget, up):
    draw = np.random.default_rng(0)
    for _ in range(40):
        n = int(draw.integers(1, 20))
        low, high = -draw.random(n), draw.random(n)
        low[draw.random(n) < 0.2], high[draw.random(n) < 0.2] = -np.inf, np.inf
        slopes = draw.random(n) if budget else draw.standard_normal(n)
        slopes[draw.random(n) < 0.2] = 0.0
        z, at = 3 * draw.standard_normal(n), draw.standard_normal()
        bends = [
            (abs(z[i]) - abs(bound)) / slopes[i] if budget else (z[i] - bound) / slopes[i]
            for i in np.flatnonzero(slopes)
            for bound in (low[i], high[i])
        ]
        ahead = [b for b in bends if np.isfinite(b) and (b > at if up else b < at)]
        nearest = (min(ahead) if up else max(ahead)) if ahead else np.nan
        np.testing.assert_equal(next_bend(low, high, slopes, budget, at, z, up), nearest)
