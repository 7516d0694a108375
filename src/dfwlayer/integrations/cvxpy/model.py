"""A recognised problem as an objective and a set of this library, for any parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dfwlayer.integrations.cvxpy.affine import Arrays, lasting
from dfwlayer.integrations.cvxpy.pieces import Pieces, Posed
from dfwlayer.integrations.cvxpy.sets import Form
from dfwlayer.objectives import LeastSquares, Quadratic
from dfwlayer.objectives.base import Objective

__all__ = ["LARGE", "Dual", "Model", "Output"]

LARGE = 600  # coordinates beyond which least squares are not squared


class Output(NamedTuple):
    """A variable of the problem from y, the coordinates that are left: entries of y, or K y + k."""

    shape: tuple[int, ...]
    places: Tensor | slice | None  # None where equations define it
    name: str
    moves: bool  # whether it depends on y


class Dual(NamedTuple):
    """The dual variable of a constraint from the multipliers of rows or bounds."""

    shape: tuple[int, ...]
    side: str  # "h", "b", "lower" or "upper"
    places: Tensor
    factors: Tensor


@dataclass
class Model:
    """min f(y) over a set, and the variables of the problem from y."""

    n: int
    arrays: Arrays
    form: Form
    outputs: list[Output | Dual]
    diagonal: bool  # whether the P of what equations define is diagonal
    squares: bool  # whether f is Σ w_i z_i² of what equations define, and nothing else
    pieces: Pieces | None = None  # where cost or rows have kinks
    lifted: Model | None = None  # the same with further variables in the place of kinks
    _steady: dict[torch.device, tuple[Tensor | None, float]] = field(default_factory=dict)

    def on_pieces(self, at: dict[str, Tensor]) -> Posed | None:
        """f and the arrays of the set there, None where there are no kinks or this is not known."""
        if self.pieces is None:
            return None
        objective = self.objective(at)
        scale = self._steady.get(at["q"].device, (None, 1.0))[1]
        return self.pieces.posed(at, objective, scale)

    def objective(self, at: dict[str, Tensor]) -> Objective:
        """f, for arrays that have been evaluated, below all kinks."""
        q = at["q"]
        if self.squares:
            root = at["Pz"].sqrt()
            return LeastSquares(root.unsqueeze(-1) * at["K"], -root * at["k"])
        if "K" in at:
            k = at["k"]
            slope = at["qz"] + (at["Pz"] * k if self.diagonal else _times(at["Pz"], k))
            q = q + _times(at["K"].mT, slope)
            if "Pyz" in at:
                q = q + _times(at["Pyz"], k)
        if self.varies:
            return Quadratic(self._matrix(at), q)
        P, scale = self.steady(at)
        return Quadratic(P, q if scale == 1 else q / scale)

    def steady(self, at: dict[str, Tensor]) -> tuple[Tensor | None, float]:
        """P where no parameter has a part in it: None for a multiple of I, and what f is over."""
        device = at["q"].device
        if device not in self._steady:
            with lasting():
                whole = self._matrix(at)
            # multipliers are those of f, and not of a multiple of it
            held = self.form.region.held
            self._steady[device] = (whole, 1.0) if held else _simplest(whole)
        return self._steady[device]

    @cached_property
    def varies(self) -> bool:
        """Whether parameters have a part in P."""
        return any(self.arrays.uses.get(name) for name in ("P", "Pz", "Pyz", "K"))

    def _matrix(self, at: dict[str, Tensor]) -> Tensor:
        P = at.get("P")
        if "K" in at:
            K = at["K"]
            part = K.mT @ (at["Pz"].unsqueeze(-1) * K if self.diagonal else at["Pz"] @ K)
            if "Pyz" in at:
                cross = at["Pyz"] @ K
                part = part + cross + cross.mT
            P = part if P is None else P + part
        if P is None:
            P = torch.zeros(self.n, self.n, dtype=torch.float64, device=at["q"].device)
        return P

    def variables(
        self, at: dict[str, Tensor], y: Tensor, prices: Callable[[], dict[str, Tensor]]
    ) -> tuple[Tensor, ...]:
        """The outputs in their order."""
        found, lead = [], y.shape[:-1]
        for each in self.outputs:
            if isinstance(each, Dual):
                found_for = prices()[each.side][..., each.places.to(y.device)]
                value = found_for * each.factors.to(y.device)
            elif each.places is None:
                value = at[f"{each.name}.k"].expand(*lead, -1)
                if each.moves:
                    value = value + _times(at[f"{each.name}.K"], y)
            else:
                places = each.places
                value = y[..., places if isinstance(places, slice) else places.to(y.device)]
            found.append(value.reshape((*lead, *each.shape)))
        return tuple(found)


def _times(A: Tensor, x: Tensor) -> Tensor:
    """A x for each problem."""
    return (A @ x.unsqueeze(-1)).squeeze(-1)


def _simplest(P: Tensor) -> tuple[Tensor | None, float]:
    """P, or None and the number by which it is a multiple of the identity."""
    scale = float(P[0, 0]) if len(P) else 0.0
    eye = torch.eye(len(P), dtype=P.dtype, device=P.device)
    return (None, scale) if scale > 0 and torch.equal(P, scale * eye) else (P, 1.0)
