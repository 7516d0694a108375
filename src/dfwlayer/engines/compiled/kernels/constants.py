"""Codes and limits that all compiled code agrees on."""

from __future__ import annotations

__all__ = [
    "BUDGET",
    "CLEAR",
    "DOUBLE",
    "DOUBTED",
    "EQUATION",
    "FREE",
    "HIGH",
    "LARGEST",
    "LOST",
    "LOW",
    "ROUNDING",
    "SINGLE",
    "SINGULAR",
    "SKEW",
    "SMALLEST",
    "SOLVED",
    "UNFIT",
    "UNPROVEN",
    "UNSETTLED",
    "ZERO",
]

# what became of a problem: solved, or left to others, because its numbers are not for this code, no
# face was found to be that of the solution, that was a matter of rounding, x could not be made
# feasible by a nudge, or the gap is too large
SOLVED, UNFIT, LOST, DOUBTED, UNSETTLED, UNPROVEN = 0, 1, 2, 3, 4, 5

ROUNDING = 16.0  # units of rounding that a sum of products is taken to be off by
CLEAR = 64.0  # times rounding: multipliers and slacks beyond that are no rounding
SINGULAR = 64.0  # units of rounding of the diagonal: a smaller pivot is what rounding left of zero
LARGEST, SMALLEST = 1e60, 1e-60  # numbers whose products of three and squares are numbers
SKEW = 8.0  # units of rounding of the dtype, times √n: |P − Pᵀ| against the largest entry of P
SINGLE, DOUBLE = 2.0**-23, 2.0**-52  # eps of float32 and float64

EQUATION, BUDGET = 0.0, 1.0  # kinds of rows
FREE, LOW, HIGH, ZERO = 0, 1, 2, 3  # where a coordinate is; ZERO is at the kink of |x| in a budget
