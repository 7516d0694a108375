"""What a solve returns: the point, its certificate, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Solution", "Status"]


class Status(IntEnum):
    """How one problem of the batch ended.

    ``Solution.status`` is an integer tensor, so ``sol.status == Status.CONVERGED``
    is a mask over the batch.
    """

    CONVERGED = 0
    MAX_STEPS = 1
    ROUNDING_FLOOR = 2
    NONFINITE = 3
    NOT_CONVEX = 4
    UNBOUNDED = 5
    OUT_OF_RANGE = 8  # f is infinite or NaN at x: outside f's domain, or beyond the dtype's range

    @property
    def message(self) -> str:
        """What happened, the likely cause, and what to do about it."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "the stopping rule was met",
    Status.MAX_STEPS: (
        "the cap max_steps was reached first; x is feasible and gap says how far from optimal it "
        "can be: raise max_steps or tol"
    ),
    Status.ROUNDING_FLOOR: (
        "the gap cannot fall further in this dtype although it is above tol: use float64 or a "
        "larger tol"
    ),
    Status.NONFINITE: (
        "this problem's own data hold NaN or infinity; x is NaN and its gradient zero: look for "
        "the layer that produced them"
    ),
    Status.NOT_CONVEX: (
        "negative curvature was met, so the objective is not convex; x is feasible but nothing "
        "more is promised: build P as M @ M.mT, or add a multiple of the identity"
    ),
    Status.UNBOUNDED: (
        "the objective decreases for ever along a coordinate of zero weight; x is feasible: give "
        "that coordinate a weight or the objective curvature there"
    ),
    Status.OUT_OF_RANGE: (
        "f is infinite or NaN at every start that was tried; x is feasible: pass an x0 in the "
        "domain of f, or, where its values leave the range of the dtype, scale it"
    ),
}


@dataclass(frozen=True)
class Solution:
    """The outcome of `dfwlayer.solve`, one entry per problem of the batch.

    Every field follows the call: (B, ...) for a batch, without the B for a single problem.

    Attributes:
        x: The solution, feasible to rounding; it alone carries the gradient.
        value: f(x).
        gap: The Frank-Wolfe certificate ⟨∇f(x), x − s⟩ with s the hard vertex; f(x) − f* ≤ gap.
        num_steps: Steps this problem took before it stopped.
        status: `Status` codes as an integer tensor.

    """

    x: Tensor
    value: Tensor
    gap: Tensor
    num_steps: Tensor
    status: Tensor

    @property
    def converged(self) -> Tensor:
        """Mask of the problems that met the stopping rule."""
        return self.status == Status.CONVERGED

    def __repr__(self) -> str:
        counts = torch.bincount(self.status.reshape(-1).long(), minlength=max(Status) + 1).tolist()
        ended = ", ".join(f"{Status(i).name} {c}" for i, c in enumerate(counts) if c)
        worst = f"{self.gap.max().item():.3g}" if self.gap.numel() else "none"
        steps = int(self.num_steps.max().item()) if self.num_steps.numel() else 0
        return (
            f"Solution(x={tuple(self.x.shape)} {self.x.dtype}, status=[{ended}], "
            f"largest gap={worst}, most steps={steps})"
        )
