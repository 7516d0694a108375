"""What compiled code finds of a batch, and what a kind of sets has to offer for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dfwlayer.engines.compiled.answer import Gradients
from dfwlayer.engines.compiled.arrays import Array

__all__ = ["NO_FACTORS", "NO_ORDERS", "Adjoint", "Arrays", "Limits", "Renewal", "Results", "Sets"]

Arrays = tuple[Array, Array, Array, Array]  # P, q, A and b of `Quadratics`
Limits = tuple[float, float, int]  # eps of the dtype, the tolerance, the most steps
Renewal = Callable[[Sequence[Tensor]], "Sets"]


NO_FACTORS: Array = np.empty((0, 0, 0))
NO_ORDERS: Array = np.empty((0, 0), np.int64)


class Results(NamedTuple):
    """What was found of a batch."""

    x: Array  # (B, n)
    values: Array  # (2, B): f and the gap
    codes: Array  # (2, B): what became of a problem, and steps
    multipliers: Array  # (B, k)
    face: tuple[Array, ...]  # what else a set keeps, (B, n) each
    factors: Array = NO_FACTORS  # on the face of a single problem, (1, n, n), if kept
    orders: Array = NO_ORDERS  # of their coordinates, (1, n + k)

    @classmethod
    def blank(cls, batch: int, n: int, k: int, *face: type) -> Results:
        """Memory for them."""
        return cls(
            np.empty((batch, n)),
            np.zeros((2, batch)),
            np.zeros((2, batch), np.int64),
            np.zeros((batch, k)),
            tuple([np.empty((batch, n), kind) for kind in face]),
        )


class Adjoint(NamedTuple):
    """The solution of the adjoint system: P u + Σ ν_j a_j = v on the face."""

    u: Array  # (B, n)
    nu: Array  # (B, k)
    rest: Array | None  # (B, n), v − P u − Σ ν_j a_j, where a set asks for it

    def times(self, w: Array) -> Adjoint:  # (B, 1)
        """For as much of each problem."""
        return Adjoint(w * self.u, w * self.nu, None if self.rest is None else w * self.rest)

    def drop_lost(self, x: Array, dtype: torch.dtype) -> None:
        """Beyond the dtype's range there is no gradient to give; other problems keep theirs."""
        if dtype == torch.float64:
            return
        largest = torch.finfo(dtype).max
        # the squares of all together, without a copy, are enough in nearly every call
        moves, places = (np.einsum("bi,bi->", part, part) for part in (self.u, x))
        if math.sqrt(moves) * math.sqrt(places + 1) < largest:
            return
        size = np.abs(self.u).max(-1) * np.maximum(np.abs(x).max(-1), 1.0)
        lost = ~(size < largest)
        if lost.any():
            for part in self:
                if part is not None and len(part):  # nobody may have asked
                    part[lost] = 0.0


class Sets(Protocol):
    """The sets of a batch, and the compiled code for them."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may be asked for, None for numbers."""

    def renewal(self) -> Renewal | None:
        """What makes the sets anew of other tensors in place of `tensors`, in their order.

        They have the same shapes, but what a row adds up to may lack its last dimension where no
        gradient is asked for. It holds none of the tensors of these. None where a set has to be
        laid out by its normal form in each call.
        """

    def search(self, objective: Arrays, start: Array, limits: Limits, batch: int) -> Results:
        """Solve what can be solved."""

    def adjoint(self, P: Array, found: Results, v: Array, eps: float) -> Adjoint:
        """Solve the adjoint system."""

    def envelope(self, found: Results, g: Array) -> Adjoint | None:
        """What makes `pullback` give the gradients of f*, for ∇f = g (B, n) at the solutions.

        That is u = 0, ν = −λ and ∇f + Σ λ_j a_j, or None where the set does not know.
        """

    def pullback(self, asked: Sequence[bool], found: Results, adjoint: Adjoint) -> Gradients:
        """Gradients in `tensors`."""
