"""The one-dimensional dual of a projection: the multiplier of a single linear constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dfwlayer.linalg import any_row

__all__ = ["Knapsack", "clipped", "falling_root", "spend"]

FEW = 16  # coordinates, for which all pieces are looked at at once
MOST = 100  # steps; about 5 are needed, bisection guards the rest


class Knapsack(NamedTuple):
    """x(θ) = clip(z − θa, l, u), and θ such that ⟨a, x(θ)⟩ = b; one θ per problem.

    ⟨a, x(θ)⟩ falls with θ and is piecewise linear, so that a Newton step from the right piece is
    exact. Newton steps are kept within a bracket, as the continuous quadratic knapsack is
    (Cominetti, Mascarenhas, Silva, 2014).
    """

    z: Tensor  # (..., n)
    slope: Tensor  # a, (1,), (n,) or (..., n)
    lower: Tensor  # l, likewise, may be −∞
    upper: Tensor  # u, may be ∞
    total: Tensor  # b, (1,) or (..., 1)

    def multiplier(self, low: Tensor, high: Tensor, guess: Tensor) -> Tensor:
        """θ (..., 1), known to be between low and high (both finite), where a guess is, too.

        It is differentiable in what the knapsack consists of.
        """
        with torch.no_grad():
            if self.z.shape[-1] <= FEW:
                theta = self._among_all(low, high)
            elif self.z.ndim == 1 and self.z.device.type == "cpu":
                theta = self._among_sorted(float(low), float(high))
            else:
                theta = self._search(low, high, guess)
        if not (torch.is_grad_enabled() and any(part.requires_grad for part in self)):
            return theta
        # a Newton step from the solution is zero, but its derivatives are those of the solution
        excess, inside = self._excess(theta)
        return theta + self._newton(excess, inside)

    def at(self, theta: Tensor) -> Tensor:
        """x(θ)."""
        return clipped(self.z - theta * self.slope, self.lower, self.upper)

    def _excess(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """⟨a, x(θ)⟩ − b, and the coordinates that are within their bounds."""
        moved = self.z - theta * self.slope
        x = clipped(moved, self.lower, self.upper)
        return (self.slope * x).sum(-1, keepdim=True) - self.total, x == moved

    def _width(self, inside: Tensor) -> Tensor:
        """How fast the excess falls: Σ a² of the coordinates within their bounds."""
        return torch.where(inside, self.slope.detach() ** 2, 0).sum(-1, keepdim=True)

    def _newton(self, excess: Tensor, inside: Tensor) -> Tensor:
        """The step after which a piece that is straight has no excess; none where it is flat."""
        width = self._width(inside)
        return torch.where(width > 0, excess / torch.where(width > 0, width, 1), 0)

    def _among_all(self, low: Tensor, high: Tensor) -> Tensor:
        """θ from the excess at all the points where a coordinate meets a bound, at once."""
        slope = torch.where(self.slope != 0, self.slope, torch.inf)
        kinks = torch.cat(((self.z - self.lower) / slope, (self.z - self.upper) / slope), -1)
        kinks = torch.minimum(torch.maximum(kinks, low), high)
        excess, _ = Knapsack(*(part.unsqueeze(-2) for part in self))._excess(kinks.unsqueeze(-1))
        excess = torch.cat((excess.squeeze(-1), self._excess(low)[0], self._excess(high)[0]), -1)
        kinks = torch.cat(
            (kinks, low.expand_as(kinks[..., :1]), high.expand_as(kinks[..., :1])), -1
        )
        over = excess > 0
        left = torch.where(over, kinks, low).amax(-1, keepdim=True)
        right = torch.where(over, high, kinks).amin(-1, keepdim=True)
        rise = torch.where(over, excess, torch.inf).amin(-1, keepdim=True)
        fall = torch.where(over, -torch.inf, excess).amax(-1, keepdim=True)
        share = torch.where(torch.isfinite(rise - fall), rise / (rise - fall), 0)
        theta = torch.lerp(left, right, share.clamp(0, 1))
        return theta + self._newton(*self._excess(theta))  # what rounding left

    def _among_sorted(self, low: float, high: float) -> Tensor:
        """θ of a single problem by bisection of its kinks, in NumPy.

        Its operations are short, and there a tensor costs several times what an array does.
        """
        a, lower, upper = (part.detach().double().numpy() for part in self[1:4])
        z, total = self.z.detach().double().numpy(), float(self.total)

        def excess(theta: float) -> float:
            x: float = (a * np.clip(z - theta * a, lower, upper)).sum()
            return x - total

        with np.errstate(all="ignore"):
            kinks = np.concatenate(((z - lower) / a, (z - upper) / a))
            kinks = np.clip(kinks[np.isfinite(kinks)], low, high)
            kinks = np.sort(np.concatenate((kinks, (low, high))))
            left, right = 0, len(kinks) - 1
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if excess(kinks[middle]) > 0 else (left, middle)
            rise, fall = excess(kinks[left]), excess(kinks[right])
            share = min(max(rise / (rise - fall), 0.0), 1.0) if rise > fall else 0.0
            theta = kinks[left] + share * (kinks[right] - kinks[left])
        return self.z.new_tensor([theta])

    def _search(self, low: Tensor, high: Tensor, guess: Tensor) -> Tensor:
        """θ by Newton steps, as the excess of many coordinates is nearly smooth."""

        def evaluate(theta: Tensor) -> tuple[Tensor, Tensor]:
            excess, inside = self._excess(theta)
            return excess, self._width(inside)

        return falling_root(evaluate, low, high, guess, self.total.abs())


def falling_root(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    low: Tensor,
    high: Tensor,
    guess: Tensor,
    size: Tensor,
) -> Tensor:
    """The root of a falling, piecewise smooth function, one per row, by Newton within a bracket.

    Args:
        evaluate: θ (..., 1) ↦ the value there and minus its derivative, 0 where it is flat.
        low: (..., 1), where the value is not negative; −∞ if that is not known.
        high: (..., 1), where it is not positive; or ∞.
        guess: (..., 1), where to begin, between the two.
        size: (..., 1), of the terms the value consists of, for its rounding.

    """
    eps = torch.finfo(guess.dtype).eps
    theta = guess
    value, width = evaluate(theta)
    rounding = 4 * eps * (value.abs() + size)
    every = 1 if theta.device.type == "cpu" else 4
    going = torch.ones_like(value, dtype=torch.bool)
    for step in range(MOST):
        newton = theta + value / width  # nowhere if flat here
        low = torch.where(value >= 0, theta, low)
        high = torch.where(value <= 0, theta, high)
        usable = (newton >= low) & (newton <= high) & torch.isfinite(newton)
        # the last Newton step is taken as well: on the right piece it is exact
        ended = (value.abs() <= rounding) | (high - low <= 2 * eps * theta.abs())
        ended = ended | ((newton - theta).abs() <= eps * theta.abs())
        middle = 0.5 * (low + high)
        bracketed = torch.isfinite(middle)
        if step % 6 == 5:  # Newton steps may creep along one side of the bracket
            usable = usable & (ended | ~bracketed)
        # beyond what is known, ever further out
        beyond = theta + torch.sign(value) * (1 + theta.abs()) * 2.0 ** (step + 1)
        other = torch.where(ended, theta, torch.where(bracketed, middle, beyond))
        theta = torch.where(going, torch.where(usable, newton, other), theta)
        going = going & ~ended
        if step % every == 0 and not any_row(going):
            break
        value, width = evaluate(theta)
    return theta


def clipped(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """x within bounds."""
    return torch.minimum(torch.maximum(x, lower), upper)


def spend(budget: Tensor, price: Tensor, order: Tensor) -> Tensor:
    """How much is spent on each of n things, bought as a whole one after the other, while it lasts.

    Args:
        budget: (1,) or (..., 1).
        price: (..., n).
        order: (..., n), indices.

    """
    price = price.gather(-1, order)
    left = budget - (price.cumsum(-1) - price)  # before a thing's turn
    spent = torch.minimum(left.clamp_min(0), price)
    return torch.zeros_like(spent).scatter(-1, order, spent)
