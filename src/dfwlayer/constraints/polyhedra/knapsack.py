"""The one-dimensional dual of a projection: the multiplier of a single linear constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dfwlayer.ops.rows import any_row, by_count, interval, or_one, passes, quotient

Doubles = npt.NDArray[np.float64]
_Numbers = TypeVar("_Numbers", Tensor, Doubles)

__all__ = ["Knapsack", "clipped", "falling_root", "power_of_two", "reduced", "rest_of", "spend"]

FEW = 16  # coordinates, for which all pieces are looked at at once
MOST = 100  # steps; about 5 are needed, a median of what is left guards the rest
PASSES = 24  # most times the origin is moved; one is enough unless z is far out
RECORDED = 3  # times it is moved while a CUDA graph is recorded, where nobody can ask
ROUNDING = 16  # units in the last place, within which an equation holds
EPS = 2.0**-52
LARGEST = 1.7e308  # for numbers that stand for infinity


class Knapsack(NamedTuple):
    """x(θ) = clip(z − θa, l, u), and θ such that ⟨a, x(θ)⟩ = b; one θ per problem.

    ⟨a, x(θ)⟩ falls with θ and is piecewise linear, so that a Newton step from the right piece is
    exact. Newton steps are kept within a bracket, as the continuous quadratic knapsack is
    (Cominetti, Mascarenhas, Silva, 2014).

    Where z is far outside of the bounds, θ is large and z − θa is a small difference of large
    numbers. So θ is never formed as one number: z − θ₀a, which is exact where it is small, takes
    the place of z, and what is missing to θ is found from there, in double precision.
    """

    z: Tensor  # (..., n)
    slope: Tensor  # a, (1,), (n,) or (..., n)
    lower: Tensor  # l, likewise, finite where a is not zero
    upper: Tensor  # u, likewise
    total: Tensor  # b, (1,) or (..., 1)

    def nearest(self) -> Tensor:
        """x(θ) for the right θ, (..., n), of the dtype of z and differentiable in all the parts.

        Where no θ is right, as the bounds do not let ⟨a, x⟩ reach b, they are all met.
        """
        with torch.no_grad():
            wide = Knapsack(*(part.detach().double() for part in self))._in_units()
            x, inside = by_count(self.z, wide._solved_alone, wide._solved)
        if torch.is_grad_enabled() and any(part.requires_grad for part in self):
            x = x + self._movement(x, inside)
        return x.to(self.z.dtype)

    def _in_units(self) -> Knapsack:
        """The same with slopes of size one, so that their squares stay within range.

        A slope that all coordinates share becomes 1, which makes z − θa free of products.
        """
        a = self.slope
        if a.shape[-1] == 1:
            unit = torch.where(a != 0, a, 1)
            return self._replace(slope=a / unit, total=self.total / unit)
        unit = power_of_two(a)
        return self._replace(slope=a / unit, total=self.total / unit)

    def _solved(self) -> tuple[Tensor, Tensor]:
        """x and the coordinates that are within their bounds."""
        sack, (x, decided) = self, self._extremes()
        if not any_row(~decided):
            return x, torch.zeros_like(x, dtype=torch.bool)
        extreme = x
        for _ in range(passes(self.z, PASSES, RECORDED)):
            sack = sack._moved(sack._multiplier(decided))
            excess, inside = sack._excess()
            point = sack._moved(sack._newton(excess, inside))  # what rounding left
            excess, inside = point._excess()
            x = point._x()
            size = (point.slope * x).abs().sum(-1, keepdim=True) + point.total.abs()
            if not any_row((excess.abs() > ROUNDING * EPS * size) & ~decided):
                break
        return torch.where(decided, extreme, x), inside & ~decided

    def _extremes(self) -> tuple[Tensor, Tensor]:
        """The points where bounds let ⟨a, x⟩ only just reach b, or not, and where that is so.

        There all bounds are met that bring it closest, and there is no θ to look for.
        """
        none = (self.slope == 0) | torch.zeros_like(self.z, dtype=torch.bool)
        up = self.slope > 0
        top = torch.where(up, self.upper, self.lower).expand_as(self.z)
        bottom = torch.where(up, self.lower, self.upper).expand_as(self.z)
        most, least = (torch.where(none, 0, self.slope * end) for end in (top, bottom))
        rounding = EPS * (most.abs().sum(-1, keepdim=True) + least.abs().sum(-1, keepdim=True))
        full = most.sum(-1, keepdim=True) <= self.total + rounding
        blank = least.sum(-1, keepdim=True) >= self.total - rounding
        still = clipped(self.z, self.lower, self.upper)  # what has no slope stays where it is
        ends = torch.where(full, top, bottom)
        return torch.where(none, still, ends), full | blank

    def _movement(self, x: Tensor, inside: Tensor) -> Tensor:
        """Zero, with the derivatives of x: on its piece x is a smooth function of the parts.

        There θ = (Σ a z + Σ a·bound − b) / Σ a², the first and the last sum over the coordinates
        within their bounds, the other one over the rest.
        """
        z, a, lower, upper, total = (part.double() for part in self)
        held = torch.where(x <= lower, lower, upper)
        each = torch.where(inside, z, torch.where(inside, 0, held))
        width = torch.where(inside, a**2, 0).sum(-1, keepdim=True)
        theta = ((a * each).sum(-1, keepdim=True) - total) / or_one(width)
        piece = torch.where(inside, z - theta * a, held)
        return torch.where(torch.isfinite(piece.detach()), piece - piece.detach(), 0)

    def _x(self) -> Tensor:
        """x(0)."""
        return clipped(self.z, self.lower, self.upper)

    def _moved(self, theta: Tensor) -> Knapsack:
        """The same problem seen from θ: z − θa takes the place of z."""
        if self.slope.shape[-1] == 1:
            return self._replace(z=self.z - theta * self.slope)  # which is 1, or 0
        return self._replace(z=reduced(self.z, theta, self.slope))

    def _excess(self) -> tuple[Tensor, Tensor]:
        """⟨a, x(0)⟩ − b, and the coordinates that are within their bounds."""
        x = self._x()
        return (self.slope * x).sum(-1, keepdim=True) - self.total, x == self.z

    def _newton(self, excess: Tensor, inside: Tensor) -> Tensor:
        """The step after which a piece that is straight has no excess; none where it is flat."""
        width = self._width(inside)
        return quotient(excess, width)

    def _width(self, inside: Tensor) -> Tensor:
        """How fast the excess falls: Σ a² of the coordinates within their bounds."""
        return torch.where(inside, self.slope**2, 0).sum(-1, keepdim=True)

    def _multiplier(self, decided: Tensor) -> Tensor:
        """θ (..., 1), up to the rounding of numbers of the size of z; any where it is decided."""
        slope = torch.where(self.slope != 0, self.slope, torch.inf)
        kinks = torch.cat(((self.z - self.lower) / slope, (self.z - self.upper) / slope), -1)
        # coordinates without a slope have none, and their bounds may be infinite
        kinks = torch.where(torch.isnan(kinks), 0, kinks).clamp_(-LARGEST, LARGEST)
        if self.z.shape[-1] <= FEW:
            return self._among_all(kinks)
        return self._search(kinks, decided)

    def _at(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The excess at θ and the width there."""
        moved = self.z - theta * self.slope
        x = clipped(moved, self.lower, self.upper)
        excess = (self.slope * x).sum(-1, keepdim=True) - self.total
        return excess, self._width(x == moved)

    def _among_all(self, kinks: Tensor) -> Tensor:
        """θ from the excess at all the points where a coordinate meets a bound, at once."""
        each = Knapsack(*(part.unsqueeze(-2) for part in self))
        moved = each.z - kinks.unsqueeze(-1) * each.slope
        x = clipped(moved, each.lower, each.upper)
        excess = (each.slope * x).sum(-1) - self.total
        over = excess > 0
        low, high = kinks.amin(-1, keepdim=True), kinks.amax(-1, keepdim=True)
        left = torch.where(over, kinks, low).amax(-1, keepdim=True)
        right = torch.where(over, high, kinks).amin(-1, keepdim=True)
        rise = torch.where(over, excess, torch.inf).amin(-1, keepdim=True)
        fall = torch.where(over, -torch.inf, excess).amax(-1, keepdim=True)
        share = torch.where(torch.isfinite(rise - fall), rise / (rise - fall), 0)
        theta = torch.lerp(left, right, share)
        # where z is so large that bounds are lost in it, the excess falls at one of the two
        excess, _ = self._at(theta)
        rounding = ROUNDING * EPS * (rise - fall + self.total.abs())
        theta = torch.where(excess > rounding, right, theta)
        return torch.where(excess < -rounding, left, theta)

    def _solved_alone(self) -> tuple[Tensor, Tensor]:
        """The same for a single problem, in NumPy, with θ by bisection of the sorted kinks.

        The operations are short, and there a tensor costs several times what an array does.
        """
        z, a, lower, upper = (part.numpy() for part in self[:4])
        total = float(self.total)
        plain = len(a) == 1 and a[0] == 1
        extreme, decided = self._extremes()
        if bool(decided):
            return extreme, torch.zeros_like(extreme, dtype=torch.bool)

        def at(z: Doubles) -> tuple[Doubles, float]:
            x = np.minimum(np.maximum(z, lower), upper)
            return x, float((x if plain else a * x).sum()) - total

        with np.errstate(all="ignore"):
            for _ in range(PASSES):
                theta = _among_sorted(z, a, lower, upper, total, lambda z: at(z)[1])
                z = z - theta if plain else reduced(z, theta, a)
                x, excess = at(z)
                inside = x == z
                width = float(np.count_nonzero(inside) if plain else (a * a * inside).sum())
                if width > 0:  # what rounding left
                    z = z - excess / width if plain else reduced(z, excess / width, a)
                    x, excess = at(z)
                    inside = x == z
                size = float(np.abs(x if plain else a * x).sum()) + abs(total)
                if abs(excess) <= ROUNDING * EPS * size:
                    break
        return torch.from_numpy(x), torch.from_numpy(inside)

    def _search(self, kinks: Tensor, decided: Tensor) -> Tensor:
        """θ by Newton steps, as the excess of many coordinates is nearly smooth.

        Where they do not get on, the median of the kinks that are left halves their number,
        however far apart they are.
        """

        def median(low: Tensor, high: Tensor) -> Tensor:
            left = torch.where((kinks > low) & (kinks < high), kinks, torch.nan)
            return left.nanmedian(-1, keepdim=True).values

        low, high = kinks.amin(-1, keepdim=True), kinks.amax(-1, keepdim=True)
        square = (self.slope**2).expand_as(self.z).sum(-1, keepdim=True)
        along = (self.slope * self.z).sum(-1, keepdim=True) - self.total
        guess = clipped(along / or_one(square), low, high)
        guess = torch.where(torch.isnan(guess), low, guess)
        # a search for what is not there would go on until the bracket is rounding
        low, high = torch.where(decided, guess, low), torch.where(decided, guess, high)
        return falling_root(self._at, low, high, guess, self.total.abs(), median)


def _among_sorted(
    z: Doubles,
    a: Doubles,
    lower: Doubles,
    upper: Doubles,
    total: float,
    excess: Callable[[Doubles], float],  # of z − θa
) -> float:
    """θ of a single problem, up to the rounding of numbers of the size of z."""
    kinks = np.concatenate(((z - lower) / a, (z - upper) / a))
    kinks = kinks[np.isfinite(kinks)]
    if len(kinks) == 0:
        return 0.0
    kinks.sort()
    left, right = 0, len(kinks) - 1
    rise = fall = 0.0
    while right - left > 1:
        middle = (left + right) // 2
        found = excess(z - kinks[middle] * a)
        if found > 0:
            left, rise = middle, found
        else:
            right, fall = middle, found
    rise = rise or excess(z - kinks[left] * a)
    fall = fall or excess(z - kinks[right] * a)
    share = min(max(rise / (rise - fall), 0.0), 1.0) if rise > fall else 0.0
    theta = kinks[left] + share * (kinks[right] - kinks[left])
    # where z is so large that bounds are lost in it, the excess falls at one of the two
    found = excess(z - theta * a)
    if abs(found) > ROUNDING * EPS * (abs(rise - fall) + abs(total)):
        theta = kinks[right] if found > 0 else kinks[left]
    return float(theta)


def reduced(z: _Numbers, theta: Any, slope: _Numbers) -> _Numbers:
    """z − θa, rounded as if it were computed exactly where it is small compared to z.

    Halves of θ and a have products without rounding, and differences of numbers that are close to
    each other have none either. Of tensors or arrays.
    """
    a, rest = _halves(slope * 2.0**30)  # of size one; θ may be as large as a double can be
    t, small = _halves(theta * 2.0**-30)
    found: _Numbers = z - t * a - t * rest - small * a - small * rest
    return found


def power_of_two(a: Tensor) -> Tensor:  # (..., n) -> (..., 1)
    """One above the largest |a_i|, by less than a factor of two; 1 for a = 0."""
    largest = a.abs().amax(-1, keepdim=True)
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def _halves(x: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Two numbers of 26 bits each whose sum is the double x (Veltkamp)."""
    big = x * 134217729.0  # 2²⁷ + 1
    high = big - (big - x)
    return high, x - high


def falling_root(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    low: Tensor,
    high: Tensor,
    guess: Tensor,
    size: Tensor,
    between: Callable[[Tensor, Tensor], Tensor] | None = None,
    unit: Tensor | float = 1.0,
) -> Tensor:
    """The root of a falling, piecewise smooth function, one per row, by Newton within a bracket.

    Args:
        evaluate: θ (..., 1) ↦ the value there and minus its derivative, 0 where it is flat.
        low: (..., 1), where the value is not negative; −∞ if that is not known.
        high: (..., 1), where it is not positive; or ∞.
        guess: (..., 1), where to begin, between the two.
        size: (..., 1), of the terms the value consists of, for its rounding.
        between: A number between two (..., 1), to divide a bracket where Newton steps do not help,
            NaN for their mean; without it that is always the mean.
        unit: (..., 1), the size of a θ, to look for the other end of a bracket.

    """
    eps = torch.finfo(guess.dtype).eps
    theta = guess
    value, width = evaluate(theta)
    rounding = 4 * eps * (value.abs() + size)
    every = interval(theta, 4)
    going = torch.ones_like(value, dtype=torch.bool)
    for step in range(MOST):
        newton = theta + value / width  # nowhere if flat here
        low = torch.where(value >= 0, theta, low)
        high = torch.where(value <= 0, theta, high)
        usable = (newton >= low) & (newton <= high) & torch.isfinite(newton) & (newton != theta)
        # the last Newton step is taken as well: on the right piece it is exact
        ended = (value.abs() <= rounding) | (high - low <= 2 * eps * theta.abs())
        # nor does it get on by less than the rounding of θ, where the value is not that of a jump
        still = (newton - theta).abs() <= eps * theta.abs()
        ended = ended | (still & (value.abs() <= rounding / eps**0.5))
        # the other end is nowhere to be found
        ended = ended | (theta.abs() > 2.0**200 * (unit + guess.abs())) | torch.isnan(value)
        middle = 0.5 * low + 0.5 * high
        bracketed = torch.isfinite(middle)
        if between is not None and step > 11:  # most rows are done by then
            found = between(low, high)
            middle = torch.where(torch.isnan(found), middle, found)
        if step % 6 == 5:  # Newton steps may creep along one side
            usable = usable & ended
        # beyond what is known, ever further out; where the root is as close as θ is to the next
        # number, that is the other end
        way = torch.sign(value) * 2.0 ** (step + 1)
        beyond, next_to = theta + way * (unit + theta.abs()), theta + way * eps * theta.abs()
        other = torch.where(bracketed, middle, beyond)
        other = torch.where(still & (next_to > low) & (next_to < high), next_to, other)
        other = torch.where(ended, theta, other)
        theta = torch.where(going, torch.where(usable, newton, other), theta)
        going = going & ~ended
        if step % every == 0 and not any_row(going):
            break
        value, width = evaluate(theta)
    return theta


def clipped(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """x within bounds."""
    return torch.minimum(torch.maximum(x, lower), upper)


def rest_of(total: Tensor, x: Tensor) -> Tensor:  # (..., 1), (..., n) -> (..., 1)
    """total − Σ x in double precision, without the rounding of the sum."""
    coarse, fine = _digits(x.double())
    return (total.double() - coarse.sum(-1, keepdim=True)) - fine.sum(-1, keepdim=True)


def _digits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of x (..., n), the first multiples of a number such that sums have no rounding."""
    unit = x.abs().amax(-1, keepdim=True) * (4 * x.shape[-1])
    coarse = (x + unit) - unit
    return coarse, x - coarse


def spend(budget: Tensor, price: Tensor, order: Tensor) -> Tensor:
    """How much is spent on each of n things, bought as a whole one after the other, while it lasts.

    What is left for a thing counts as nothing, or as its price, where the difference is below the
    rounding of the budget: k things for the k-fold price are bought as a whole, and nothing else.

    Args:
        budget: (1,) or (..., 1).
        price: (..., n), no more than the budget.
        order: (..., n), indices.

    """
    price = price.gather(-1, order)
    cost, purse = price.detach().double(), budget.detach().double()
    coarse, fine = _digits(cost)
    left = purse - (coarse.cumsum(-1) - coarse) - (fine.cumsum(-1) - fine)  # before a thing's turn
    rounding = 2 * torch.finfo(price.dtype).eps * purse
    whole = (left >= cost) | ((left >= cost - rounding) & (left > rounding))
    part = ~whole & (left > rounding)
    rest = (budget - torch.where(whole, price, 0).sum(-1, keepdim=True)).expand_as(price)
    rest = rest + (left.to(price.dtype) - rest.detach())  # which is exact
    spent = torch.where(whole, price, torch.where(part, rest, 0))
    return torch.zeros_like(spent).scatter(-1, order, spent)
