"""What sets have in common that are lists of rows and bounds: one list."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.polyhedra.polyhedron import LinearSet
from dfwlayer.constraints.region import Block, Flat, Linear, Met, Spent, as_oval
from dfwlayer.ops.values import Value, first_tensor, larger, smaller

__all__ = ["Joined", "below", "common_form"]

MOST = 2  # budgets and equations of one normal form


@dataclass(frozen=True)
class Joined(LinearSet):
    """The points that bound sets of rows have in common, from the tensors of these."""

    parts: tuple[Constraint, ...]

    def rows_of(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of all."""
        lists = [part.rows_of(like) for part in self._lists(like)]
        A, b, G, h = (list(parts) for parts in zip(*lists, strict=True))
        return below(A, 2), below(b, 1), below(G, 2), below(h, 1)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The narrower ones."""
        both = [part.bounds(like) for part in self._lists(like)]
        lower = reduce(torch.maximum, [low for low, _ in both])
        return lower, reduce(torch.minimum, [high for _, high in both])

    def _lists(self, like: Tensor) -> list[LinearSet]:
        lists = [part.as_polyhedron(like) for part in self.parts]
        assert all(isinstance(part, LinearSet) for part in lists)
        return lists  # type: ignore[return-value]

    def blank(self, n: int) -> Tensor:
        """Like that of the first part."""
        return self.parts[0].blank(n)

    def tensors(self) -> dict[str, Tensor]:
        """None of its own."""
        return {}

    def _within(
        self, ask: Callable[[Constraint], Constraint | None], values: dict[str, Tensor]
    ) -> Self | None:
        parts = [ask(part) for part in self.parts]
        return None if any(part is None for part in parts) else self.changed(parts=tuple(parts))


def below(parts: Sequence[Tensor], kind: int) -> Tensor:
    """Rows (m, n), or their totals (m,), below each other, shared or not."""
    some = [part for part in parts if part.shape[-kind]] or [parts[0]]
    sizes = {len(part) for part in some if part.dim() > kind}
    if not sizes:
        return torch.cat(some, -kind)
    wide = [part.expand(max(sizes), *part.shape[-kind:]) for part in some]
    return torch.cat(wide, -kind)


def common_form(forms: Sequence[Sequence[Block] | None], n: int) -> Sequence[Block] | None:
    """The normal form of what sets over the same coordinates have in common, None without one.

    That is bounds, with a budget and equations, two of them at most; or bounds and rows, also
    within ellipsoids, or with one budget, which may have a centre.
    """
    blocks = [form[0] for form in forms if form is not None and len(form) == 1]
    if len(blocks) < len(forms):
        return None
    flat = [block for block in blocks if isinstance(block, Flat)]
    lists = [block for block in blocks if isinstance(block, Linear)]
    ovals = tuple(oval for block in blocks if (oval := as_oval(block)) is not None)
    spent = [block for block in blocks if isinstance(block, Spent)]
    lists += (block.linear for block in spent)
    if len(flat) + len(lists) + len(ovals) < len(blocks):
        return None
    bounded: list[Flat | Linear] = [*flat, *lists]
    ends: tuple[Value, Value] = (-math.inf, math.inf)
    lower = reduce(larger, [block.lower for block in bounded], ends[0])
    upper = reduce(smaller, [block.upper for block in bounded], ends[1])
    budgets = [block for block in flat if block.weight is not None]
    equations = tuple(equation for block in flat for equation in block.equations)
    if len(flat) == len(blocks) and len(budgets) < 2 and len(budgets) + len(equations) <= MOST:
        weight, radius = (budgets[0].weight, budgets[0].radius) if budgets else (None, 0.0)
        return (Flat(n, lower, upper, weight, radius, equations),)
    like = _some_tensor(blocks)
    costs = [(block.weight, block.centre, block.radius) for block in spent]
    costs += [(block.weight, 0.0, block.radius) for block in budgets if block.weight is not None]
    if len(costs) > 1 or (costs and ovals) or (like is None and equations):
        return None
    G = [(block.G, block.h) for block in lists if block.G is not None]
    A = [(block.A, block.b) for block in lists if block.A is not None]
    A += [(_row(a, n, like), b) for a, b in equations if like is not None]
    linear = Linear(n, lower, upper, *_stacked(G), *_stacked(A))
    if costs:
        return (Spent(n, linear, *costs[0]),)
    return (Met(n, linear, ovals),) if ovals else (linear,)


def _some_tensor(blocks: Sequence[Any]) -> Tensor | None:
    """One of which dtype and device are those of all."""
    for block in blocks:
        nested = [part for pair in getattr(block, "equations", ()) for part in pair]
        if (found := first_tensor(*block, *nested)) is not None:
            return found
    return None


def _row(a: Value, n: int, like: Tensor) -> Tensor:  # (..., 1, n)
    full = torch.as_tensor(a, dtype=like.dtype, device=like.device)
    return full.expand(*full.shape[:-1], n).unsqueeze(-2)


def _stacked(parts: Sequence[tuple[Tensor, Value]]) -> tuple[Tensor | None, Value]:
    """Matrices and their right-hand sides below each other."""
    if len(parts) < 2:
        return parts[0] if parts else (None, 0.0)
    like = parts[0][0]
    sides = []
    for matrix, side in parts:
        own = torch.as_tensor(side, dtype=like.dtype, device=like.device)
        sides.append(own.expand(*own.shape[:-1], matrix.shape[-2]))
    return below([matrix for matrix, _ in parts], 2), below(sides, 1)
