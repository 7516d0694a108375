"""Quadratic programs: min ½xᵀPx + qᵀx over low ≤ Gx ≤ high and Ax = b, one or a batch of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer_bench.problems.functional import Functional

__all__ = ["Rows"]


@dataclass(frozen=True)
class Rows(Functional):
    """One program, (...) being (), or a batch of B, (...) being (B,); in float64.

    G, A and their sides are the same for the whole batch but for b, which may be ``given``.
    """

    P: Tensor  # (n, n) or (..., n, n)
    q: Tensor  # (..., n)
    G: Tensor  # (m, n)
    low: Tensor  # (m,), −inf for none
    high: Tensor  # (m,), inf for none
    A: Tensor  # (k, n)
    b: Tensor  # (k,) or (..., k)
    v: Tensor  # (..., n), the functional that is differentiated is v·x
    given: str = "q"  # in what: "q" or "b"

    @property
    def count(self) -> int:
        return len(self.q) if self.batched else 1

    @property
    def data(self) -> Tensor:
        """What the functional is differentiated in."""
        return self.q if self.given == "q" else self.b

    def split(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """q and b, one of them being the data; both have the batch."""
        q, b = (data, self.b) if self.given == "q" else (self.q, data)
        return q, b.expand(*q.shape[:-1], b.shape[-1])

    def one_sided(self) -> tuple[Tensor, Tensor]:
        """Every side that there is as Gx ≤ h."""
        above, below = self.high.isfinite(), self.low.isfinite()
        rows = torch.cat([self.G[above], -self.G[below]])
        return rows, torch.cat([self.high[above], -self.low[below]])

    def objective(self, x: Tensor, q: Tensor) -> Tensor:
        """f(x), (...)."""
        product = (self.P @ x.unsqueeze(-1)).squeeze(-1)
        return ((0.5 * product + q) * x).sum(-1)

    def violation(self, x: Tensor) -> float:
        """The largest amount by which a row is missed."""
        image = x @ self.G.mT
        missed = [(image - self.high).amax(-1), (self.low - image).amax(-1)]
        if len(self.A):
            missed.append((x @ self.A.mT - self.b).abs().amax(-1))
        return max(0.0, float(torch.stack([m.max() for m in missed]).max()))
