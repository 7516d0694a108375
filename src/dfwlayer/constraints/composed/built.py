"""What sets that are built on another one have in common."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.parameters import merged

__all__ = ["Built"]


class Built(Constraint):
    """A set with a field ``constraint``, the set S it is built on, which has the same variable."""

    constraint: Constraint

    preferred_method = property(attrgetter("constraint.preferred_method"))
    variable_dims = property(attrgetter("constraint.variable_dims"))

    def leads(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Of S and of the set's own parameters."""
        return self.constraint.leads(shape) | super().leads(shape)

    @property
    def deep(self) -> bool:
        """Of either."""
        return self.constraint.deep or super().deep

    def variable(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """That of S."""
        return self.constraint.variable(sizes)

    def priced(self, shape: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...] | None]]:
        """Those of S, then the set's own."""
        return self.constraint.priced(shape) | super().priced(shape)

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Both."""
        inner = self.changed(constraint=self.constraint.bind(shape, dtype, device))
        return super(Built, inner).bind(shape, dtype, device)

    def verified(self) -> tuple[Self, Tensor | None]:
        """What S asks for, then, where S is sound, the rest."""
        constraint, bad = self.constraint.verified()
        known = self.changed(constraint=constraint)
        sound = known if bad is None else known.replace_rows(bad != 0)
        return known, merged(bad, super(Built, sound).verified()[1])

    def is_plain(self, like: Tensor) -> bool:
        """Both."""
        return self.constraint.is_plain(like) and super().is_plain(like)

    def _within(
        self, ask: Callable[[Constraint], Constraint | None], values: dict[str, Tensor]
    ) -> Self | None:
        inner = ask(self.constraint)
        return None if inner is None else self.changed(constraint=inner, **values)
