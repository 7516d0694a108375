"""What the paper reports, to stand beside what is measured.

Liu, Liu, Wang, Zhao: "DFWLayer: Differentiable Frank-Wolfe Optimization Layer", ICLR 2024, Tiny
Papers. Xeon 8255C, 40 GB, Tesla T4; tolerance 1e-4 for all systems, 5 trials, mean ± std.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ACCURACY", "MACHINE", "ROLES", "STAGES", "TIMES", "Accuracy", "Measured"]

MACHINE = "Xeon 8255C, 40 GB, Tesla T4"


class Measured(NamedTuple):
    """Mean and standard deviation over 5 trials."""

    mean: float
    std: float


class Accuracy(NamedTuple):
    """Against CvxpyLayer; a violation is max(0, ‖w∘x‖₁ − t)."""

    cosine: Measured
    distance: Measured
    mean_violation: float
    max_violation: float


# which of our systems stands for which of the paper's
ROLES = {"diffcp": "CvxpyLayer", "alt-diff-paper": "Alt-Diff", "dfw": "DFWLayer"}

TIMES: dict[str, dict[int, Measured]] = {
    "CvxpyLayer": {
        500: Measured(7.68, 0.07),
        1000: Measured(59.02, 0.16),
        2000: Measured(481.78, 2.54),
    },
    "Alt-Diff": {
        500: Measured(1.05, 0.14),
        1000: Measured(3.84, 0.12),
        2000: Measured(22.51, 0.13),
    },
    "DFWLayer": {
        500: Measured(0.18, 0.01),
        1000: Measured(0.21, 0.01),
        2000: Measured(0.31, 0.02),
    },
}

ACCURACY: dict[str, dict[int, Accuracy]] = {
    "Alt-Diff": {
        500: Accuracy(Measured(0.975, 0.049), Measured(0.002, 0.003), 0.063, 1.0),
        1000: Accuracy(Measured(0.980, 0.040), Measured(0.001, 0.002), 0.058, 1.0),
        2000: Accuracy(Measured(0.978, 0.044), Measured(0.001, 0.001), 0.061, 1.0),
    },
    "DFWLayer": {
        500: Accuracy(Measured(0.977, 0.025), Measured(0.002, 0.001), 0.0, 0.0),
        1000: Accuracy(Measured(0.980, 0.021), Measured(0.002, 0.001), 0.0, 0.0),
        2000: Accuracy(Measured(0.978, 0.023), Measured(0.001, 0.001), 0.0, 0.0),
    },
}

# of the temperature study: annealed, and constant
STAGES = (1.0, 0.5, 0.25, 0.125)
