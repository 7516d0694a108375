"""What tells a constraint that holds a solution back from one that is only near.

At a solution a constraint has a slack s ≥ 0 or a force λ ≥ 0, and the other one is zero. Computed
numbers are never zero, so one has to say when a force is one. Here it is, for every set:

    active  ⟺  λ > noise + c · s,

with c the curvature of f towards the constraint and ``noise`` the rounding of ∇f. If f were to give
way by the slack, its force would grow by c · s: a force beyond that is left when the constraint is
reached, so the constraint holds. This is the test of primal-dual active set methods (Hintermüller,
Ito and Kunisch, 2002). It rests on the sizes of the terms that ∇f consists of and on the curvature,
which do not vanish where ∇f does, and it does not change when f or x are given in other units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.ops.rows import or_one

__all__ = ["ROUNDING", "TINY", "Scale", "scale_of_terms"]

# units of rounding that a sum of products is taken to be off by; chosen once, and tried by the
# gradient checks of ``dfw fuzz``
ROUNDING = 8.0
TINY = 1e-300  # least number that double precision is divided by


class Scale(NamedTuple):
    """The curvature of f along each coordinate and the rounding of its gradient, at a point."""

    curvature: Tensor  # c ≥ 0, (1,), (n,), (B, 1) or (B, n)
    noise: Tensor  # likewise

    def holds(self, force: Tensor, slack: Tensor, extra: Tensor | float = 0.0) -> Tensor:
        """Mask (..., n) of the coordinates held by a constraint on each of them.

        ``extra`` is noise that the force has beside that of ∇f.
        """
        # an infinite slack is never gone, also where f has no curvature
        return (force > self.noise + extra + self.curvature * slack) & (slack < torch.inf)

    def felt(
        self,
        force: Tensor,  # (..., 1), λ = −⟨g, gauge⟩
        slack: Tensor,  # (..., 1), t − h(x)
        normal: Tensor,  # (..., n), a = ∇h(x)
        gauge: Tensor,  # (..., n), with ⟨a, gauge⟩ = 1
    ) -> Tensor:  # (..., 1)
        """Whether a constraint h(x) ≤ t on all coordinates is active.

        To raise h by s takes at least the step s a/‖a‖², against which f has the curvature
        Σ c a²/‖a‖⁴. With a in units of its largest entry nothing leaves the range of the dtype.
        """
        unit = or_one(normal.abs().amax(-1, keepdim=True))
        square = (normal / unit) ** 2
        length = square.sum(-1, keepdim=True)
        bend = (square * self.curvature).sum(-1, keepdim=True)
        bend = bend / or_one(length) ** 2
        return (force - self.blur(gauge)) * unit > bend * (slack.clamp_min(0) / unit)

    def blur(self, direction: Tensor) -> Tensor:  # (..., n) -> (..., 1)
        """Rounding of ⟨g, direction⟩."""
        return (self.noise * direction.abs()).sum(-1, keepdim=True)

    def noisier(self, noise: Tensor) -> Scale:
        """With this noise on top."""
        return self._replace(noise=self.noise + noise)

    def block(self, first: int, last: int) -> Scale:
        """Of the coordinates from ``first`` to before ``last``."""
        return Scale(
            *(part[..., first:last] if part.shape[-1] > 1 else part for part in self),
        )

    def whole(self) -> Scale:
        """One curvature and one noise for all directions, above those of the coordinates."""
        return Scale(*(part.amax(-1, keepdim=True) for part in self))


def scale_of_terms(
    curvature: Tensor,  # diagonal of ∇²f, (1,), (n,) or (B, n)
    x: Tensor,  # (..., n)
    linear: Tensor,  # |terms of ∇f that do not depend on x|, (1,), (n,), (B, 1) or (B, n)
) -> Scale:
    """The scale at x of an f with this curvature.

    For a positive semi-definite H = RᵀR, |Σ_j H_ij x_j| has terms |r_i||r_j||x_j|, so that
    √H_ii ‖√H_jj x_j‖₂ is the size of what is summed up, as rounding adds up: like a random walk.
    """
    curvature = curvature.clamp_min(0)
    root = curvature.sqrt()
    moved = root * x
    largest = or_one(moved.abs().amax(-1, keepdim=True))
    length = largest * ((moved / largest) ** 2).sum(-1, keepdim=True).sqrt()
    rounding = ROUNDING * torch.finfo(x.dtype).eps
    return Scale(curvature, rounding * (root * length + linear))
