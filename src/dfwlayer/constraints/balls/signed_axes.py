"""The vertices of the weighted ℓ1 ball."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SignedAxes"]


@dataclass(frozen=True)
class SignedAxes:
    """The vertices ±(t/w_i) e_i of the ℓ1 ball, first all positive ones, then the negative ones."""

    reach: Tensor  # (1,), (n,) or (B, n), zero where unbounded

    def scores(self, g: Tensor) -> Tensor:
        """±(t/w_i) g_i, 0 for coordinates that are not bounded."""
        scores = self.reach * g
        return torch.cat((scores, -scores), -1)

    def combine(self, weights: Tensor) -> Tensor:
        """(t/w) ∘ (weights of the positive − weights of the negative vertices)."""
        n = weights.shape[-1] // 2
        return self.reach * (weights[..., :n] - weights[..., n:])

    def weights(self, x: Tensor, g: Tensor) -> Tensor:
        """|w_i x_i| / t each, and what is left to 1 on a pair of opposite vertices.

        The pair is the one that contains the best vertex for g, so it leaves nothing to undo.
        """
        bounded = (self.reach > 0).expand_as(x)
        share = torch.where(bounded, x / torch.where(bounded, self.reach, 1), 0)
        rest = (1 - share.abs().sum(-1, keepdim=True)).clamp_min(0)
        best = (self.reach * g).abs().argmax(-1, keepdim=True)
        pair = torch.zeros_like(x).scatter(-1, best, 0.5 * rest)
        weights = torch.cat((share.clamp_min(0) + pair, (-share).clamp_min(0) + pair), -1)
        return weights / weights.sum(-1, keepdim=True)
