"""What became of a problem: solved, or left to others and why."""

from __future__ import annotations

__all__ = ["DOUBTED", "LOST", "SHARED", "SOLVED", "TIED", "UNFIT", "UNPROVEN", "UNSETTLED"]

SOLVED = 0
UNFIT = 1  # its numbers are not for compiled code
LOST = 2  # no face was found to be that of the solution
DOUBTED = 3  # whether it is was a matter of rounding
UNSETTLED = 4  # x could not be made feasible by a nudge
UNPROVEN = 5  # the gap is too large
SHARED = 6  # it is solved, but there is more than one set of multipliers, and of derivatives
TIED = 7  # the same, but all of them have one face, and derivatives in the data of f
