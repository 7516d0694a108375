"""Random problems over the sets of the table."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import dfwlayer as dfw
from set_cases import CASES, F64

ROWS = 6


class Drawn(NamedTuple):
    """A batch of problems of a set."""

    P: Tensor
    q: Tensor
    parameters: dict[str, Tensor]


def draw(name: str, seed: int = 0, rows: int = ROWS) -> Drawn:
    """Quadratics with numbers that float32 can hold, so that both dtypes have one answer."""
    case = CASES[name]
    gen = torch.Generator().manual_seed(seed)
    n = int(np.prod(case.shape))
    R = torch.randn(rows, n, n, generator=gen, dtype=F64) / n**0.5
    P = R @ R.mT + torch.eye(n, dtype=F64)
    q = case.pull * torch.randn(rows, n, generator=gen, dtype=F64)
    parameters = {k: short(v) for k, v in case.parameters(gen, rows).items()}
    P, q = short(P), short(q)
    if case.designed is not None:
        x, force = case.designed(gen, parameters)
        q = -(P @ x.reshape(rows, n, 1))[..., 0] - force
    return Drawn(P, q, parameters)


def designed(name: str, seed: int) -> Tensor:
    """x* of a problem that was made around it, from the same numbers once more."""
    case, n = CASES[name], int(np.prod(CASES[name].shape))
    gen = torch.Generator().manual_seed(seed)
    torch.randn(ROWS, n, n, generator=gen, dtype=F64)
    torch.randn(ROWS, n, generator=gen, dtype=F64)
    parameters = {k: short(v) for k, v in case.parameters(gen, ROWS).items()}
    return case.designed(gen, parameters)[0]


def short(v: Tensor) -> Tensor:
    return v.float().double()


def quadratic(P: Tensor, q: Tensor, shape: tuple[int, ...]):
    """½⟨x, Px⟩ + ⟨q, x⟩, also of a variable that is a matrix."""
    if len(shape) == 1:
        return dfw.Quadratic(P, q)

    def value(x, P, q):
        v = x.flatten(-len(shape))
        return 0.5 * (v * (P @ v.unsqueeze(-1)).squeeze(-1)).sum(-1) + (q * v).sum(-1)

    return dfw.Smooth(value, P, q, shape=shape)
