"""How the set of one problem is laid out for compiled code.

It is a table with n + 2 columns. Its first two lines are l and u, which may be infinite; each of
the others is a row of the set: w ≥ 0 or a, zero outside of its block, then t or b, then its kind. A
block is four integers: its first coordinate, the end of its coordinates, its first line in the
table, the end of its lines.
"""

from __future__ import annotations

__all__ = ["BUDGET", "EQUATION", "KIND", "LOWER", "ROWS", "TOTAL", "UPPER"]

LOWER, UPPER, ROWS = 0, 1, 2  # lines
TOTAL, KIND = -2, -1  # columns
EQUATION, BUDGET = 0.0, 1.0  # kinds
