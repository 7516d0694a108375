"""Limits that all compiled code agrees on."""

from __future__ import annotations

__all__ = [
    "BENT",
    "CLEAR",
    "CLOSE",
    "DOUBLE",
    "FLATTEST",
    "LARGEST",
    "ROUNDING",
    "SINGLE",
    "SINGULAR",
    "SKEW",
    "SMALLEST",
    "STEEPEST",
]

ROUNDING = 16.0  # units of rounding that a sum of products is taken to be off by
CLEAR = 64.0  # times rounding: multipliers and slacks beyond that are no rounding
BENT = 16.0  # units of rounding of the dtype, times n, of its largest entry, that P may bend down
CLOSE = 2.0  # units of rounding of its terms that a row which is held is off by
SINGULAR = 64.0  # units of rounding of the diagonal: a smaller pivot is what rounding left of zero
LARGEST, SMALLEST = 1e60, 1e-60  # numbers whose products of three and squares are numbers
SKEW = 8.0  # units of rounding of the dtype, times √n: |P − Pᵀ| against the largest entry of P
SINGLE, DOUBLE = 2.0**-23, 2.0**-52  # eps of float32 and float64
FLATTEST, STEEPEST = 1.05, 40.0  # p of the balls whose powers leave enough digits
