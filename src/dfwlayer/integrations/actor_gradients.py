"""How an actor learns through the projection that ends it.

An actor proposes z, and executes x = Π(z), the nearest action allowed. The derivative of Π at a z
outside has no part along the constraints that hold x: what z is there changes nothing, so
nothing pulls it back, and where all directions are held (at a vertex) the actor no longer learns.
A mode says what a gradient v = ∂loss/∂x becomes at z:

    exact      Jᵀv                              J the derivative of Π
    penalty    Jᵀv + weight · (z − x) / B       with that of weight · mean ½‖z − Π(z)‖², B rows
    soft       (1 − share) · Jᵀv + share · v    that of (1 − share) · Π(z) + share · z

The action itself is x in all of them. A mode is a function of z and x, where x carries the exact
gradient:

    >>> x = Soft(0.5)(z, layer(None, -z, weight, radius))

"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dfwlayer.arguments import as_number, shown

__all__ = ["Exact", "GradientMode", "Penalty", "Soft", "as_mode"]


class GradientMode(Protocol):
    """See the module."""

    def __call__(self, wanted: Tensor, nearest: Tensor) -> Tensor:
        """The action ``nearest`` (B, n) with another gradient in ``wanted`` (B, n)."""


@dataclass(frozen=True)
class Exact:
    """The derivative of the projection."""

    def __call__(self, wanted: Tensor, nearest: Tensor) -> Tensor:
        """The action as it is."""
        return nearest


@dataclass(frozen=True)
class Penalty:
    """The exact derivative, and a pull towards the set in proportion to the distance.

    It is the gradient of ``weight`` · mean ½‖z − Π(z)‖² over the batch, added without touching the
    loss: Π being a projection, that is (z − Π(z)) / B. The loss has to be one that is minimised.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        weight = as_number("weight", self.weight, "a finite number ≥ 0", least=0)
        object.__setattr__(self, "weight", weight)

    def __call__(self, wanted: Tensor, nearest: Tensor) -> Tensor:
        """The action with the pull added to the gradient of what was wanted."""
        pulled: Tensor = _Pulled.apply(wanted, nearest, self.weight)  # type: ignore[no-untyped-call]
        return pulled


@dataclass(frozen=True)
class Soft:
    """A mixture of the exact derivative and the identity, which is never flat.

    A share of 1 passes gradients straight through, as if there were no limit.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        share = as_number("share", self.share, "a number in [0, 1]", least=0, most=1)
        object.__setattr__(self, "share", share)

    def __call__(self, wanted: Tensor, nearest: Tensor) -> Tensor:
        """The action, part of whose gradient goes to what was wanted as it is."""
        mixed: Tensor = _Mixed.apply(wanted, nearest, self.share)  # type: ignore[no-untyped-call]
        return mixed


NAMED: dict[str, GradientMode] = {"exact": Exact(), "penalty": Penalty(), "soft": Soft()}


def as_mode(gradient: Any) -> GradientMode:
    """A mode by its name, or as it was given."""
    mode = NAMED.get(gradient) if isinstance(gradient, str) else gradient
    if mode is None or isinstance(mode, type) or not callable(mode):
        raise ValueError(
            f"gradient: expected one of {list(NAMED)} or a mode such as Penalty(0.5), got "
            f"{shown(gradient)}"
        )
    return mode


class _Pulled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wanted: Tensor, nearest: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(wanted, nearest)
        return nearest.view_as(nearest)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor, None]:
        wanted, nearest = ctx.saved_tensors
        rows = max(1, wanted[..., 0].numel())
        return ctx.weight * (wanted - nearest) / rows, v, None


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wanted: Tensor, nearest: Tensor, share: float) -> Tensor:
        ctx.share = share
        return nearest.view_as(nearest)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.share * v, (1 - ctx.share) * v, None
