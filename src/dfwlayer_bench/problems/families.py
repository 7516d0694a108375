"""The benchmark's problems: min ½xᵀPx + qᵀx over ‖w ∘ x‖₁ ≤ t, by family, size and seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

__all__ = ["FAMILIES", "Family", "Instance", "make"]


@dataclass(frozen=True)
class Instance:
    """One problem, and the functional v·x whose gradient in q is asked for."""

    family: str
    seed: int
    P: Tensor  # (n, n)
    q: Tensor  # (n,)
    w: Tensor  # (n,)
    t: Tensor  # ()
    v: Tensor  # (n,)

    @property
    def n(self) -> int:
        return len(self.q)

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        return self.q.device

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Instance:
        """The same numbers in another dtype or on another device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        return replace(
            self,
            P=move(self.P),
            q=move(self.q),
            w=move(self.w),
            t=move(self.t),
            v=move(self.v),
        )


@dataclass(frozen=True)
class Family:
    """A recipe: the matrix, the scale of q, and the radius.

    Attributes:
        description: One line for tables.
        matrix: (n, random) -> P.
        power: q ~ n^power · N(0, 1).
        radius: Fraction of ‖w ∘ x_unconstrained‖₁, or None for t = |N(0, 1)|.

    """

    description: str
    matrix: Callable[[int, np.random.RandomState], Tensor]
    power: float
    radius: float | None


def _well(n: int, random: np.random.RandomState) -> Tensor:
    R = torch.from_numpy(random.standard_normal((n, n)))
    return R.mT @ R + n * torch.eye(n, dtype=torch.float64)


def _ill(n: int, random: np.random.RandomState) -> Tensor:
    R = torch.from_numpy(random.standard_normal((max(1, n // 10), n)))
    return R.mT @ R + 1e-3 * n * torch.eye(n, dtype=torch.float64)


FAMILIES: dict[str, Family] = {
    "paper": Family("P = RᵀR + nI, t = |N(0,1)|: active for some seeds only", _well, 0.0, None),
    "active": Family("the same, t = 0.3 of the unconstrained norm", _well, 0.0, 0.3),
    "ill": Family("P = RᵀR + 1e-3·nI, R of rank n/10, t = 0.1 of the norm", _ill, 0.5, 0.1),
    "very": Family("P = RᵀR + nI, t = 0.03 of the unconstrained norm", _well, 0.0, 0.03),
    "loose": Family("P = RᵀR + nI, t = twice the unconstrained norm", _well, 0.0, 2.0),
}


def make(
    family: str,
    n: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    functional: str = "sum",
) -> Instance:
    """The problem of that family, size and seed, drawn in float64 and then rounded to dtype.

    t, R, q and w are drawn in this order from NumPy's legacy generator, so that ``paper`` with
    the seeds 100, 200, …, 500 gives the problems of the paper's experiments.

    Args:
        family: A key of ``FAMILIES``.
        n: Number of variables.
        seed: Seed of the generator; the draws are those of the CPU whatever the device.
        dtype: Precision of the numbers returned.
        device: Where they live.
        functional: "sum" for v = 1 (the paper's), "random" for v ~ N(0, 1).

    """
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {sorted(FAMILIES)}, got {family!r}")
    if n < 1:
        raise ValueError(f"n: expected at least one variable, got {n}")
    if functional not in ("sum", "random"):
        raise ValueError(f"functional: expected 'sum' or 'random', got {functional!r}")
    recipe = FAMILIES[family]
    random = np.random.RandomState(seed)
    draw = torch.tensor(abs(float(random.standard_normal(1)[0])), dtype=torch.float64)
    P = recipe.matrix(n, random)
    P = 0.5 * (P + P.mT)  # a product need not be symmetric to the last bit
    q = n**recipe.power * torch.from_numpy(random.standard_normal(n))
    w = torch.from_numpy(random.uniform(0.5, 1.5, n))
    v = torch.from_numpy(random.standard_normal(n))
    if recipe.radius is None:
        t = draw
    else:
        free = torch.cholesky_solve(-q.unsqueeze(-1), torch.linalg.cholesky(P)).squeeze(-1)
        t = recipe.radius * (w * free).abs().sum()
    v = v if functional == "random" else torch.ones_like(v)
    return Instance(family, seed, P, q, w, t, v).to(dtype, device)
