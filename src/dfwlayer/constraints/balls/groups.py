"""A partition of the coordinates into groups, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dfwlayer.arguments import INTEGERS, check_tensor, shown
from dfwlayer.ops.tensors import unwrapped
from dfwlayer.ops.tracing import may_be_fake, real_tensors

__all__ = ["Groups"]

SHOWN = 5  # coordinates named in a message
FURTHEST = 10**6  # gap beyond which coordinates are not looked through for a better message


class Groups:
    """A label for every coordinate, from 0 to ``count`` − 1.

    Not a dataclass: its tensor is a structure, not a parameter that could be differentiated.
    """

    def __init__(self, label: Tensor) -> None:  # (n,), integers
        self.label = label = unwrapped(label)
        with real_tensors():
            self.count = int(label.max()) + 1
            self.given = tuple(label.tolist())  # what `of` makes the same from
        self._there: dict[torch.device, Tensor] = {label.device: label}

    def __len__(self) -> int:
        """Number of coordinates."""
        return len(self.label)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Groups) and torch.equal(self.label.cpu(), other.label.cpu())

    def __hash__(self) -> int:
        return hash((len(self), self.count))

    def __repr__(self) -> str:
        return f"Groups({self.count} groups of {len(self)} coordinates)"

    @classmethod
    def of(cls, given: Sequence[Sequence[int]] | Sequence[int] | Tensor | Groups) -> Groups:
        """From a label per coordinate, or from the indices of each group."""
        if isinstance(given, Groups):
            return given
        if isinstance(given, Tensor):
            return cls._of_labels(given)
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) == 0:
            raise ValueError(
                "groups: expected a list of index lists, or a label per coordinate, got "
                + ("none" if isinstance(given, Sequence) else type(given).__name__)
            )
        with real_tensors():
            if all(_is_index(entry) for entry in given):
                return cls._of_labels(_indices(given))
            return cls._of_indices(given)

    @classmethod
    def _of_labels(cls, label: Tensor) -> Groups:
        check_tensor("groups", label)
        if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
            raise ValueError(f"groups: expected integer labels, got {label.dtype}; call .long()")
        if label.dim() == 0 or label.numel() == 0:
            raise ValueError(
                f"groups: expected a label per coordinate, got shape {tuple(label.shape)}"
            )
        if type(label) is not Tensor and may_be_fake():
            raise ValueError(
                "groups: labels in a tensor cannot be read where a graph is recorded; make the set "
                "outside of it, or pass a list of integers"
            )
        label = label.detach().flatten().long()
        if int(label.min()) < 0:
            raise ValueError(
                f"groups: expected labels from 0 on, found {int(label.min())}; every coordinate "
                "needs a group, and one that should not be bounded a group of weight 0"
            )
        if int(label.max()) > FURTHEST + label.numel():  # then some are missing, by far
            raise ValueError(
                f"groups: expected labels without gaps, found {int(label.max())} among the labels "
                f"of {label.numel()} coordinates"
            )
        found = torch.zeros(int(label.max()) + 1, dtype=torch.bool, device=label.device)
        found[label] = True
        if not bool(found.all()):
            raise ValueError(
                f"groups: labels go up to {len(found) - 1}, but {_some(~found)} are not in use; "
                "number the groups without gaps, as torch.unique(label, return_inverse=True)[1] "
                "does"
            )
        return cls(label)

    @classmethod
    def _of_indices(cls, given: Sequence[Any]) -> Groups:
        parts = []
        for k, part in enumerate(given):
            if isinstance(part, Tensor):
                check_tensor("groups", part)
            given_well = isinstance(part, Tensor) or (
                isinstance(part, Sequence)
                and not isinstance(part, str)
                and all(_is_index(entry) for entry in part)
            )
            indices = _indices(part) if given_well else torch.empty(0)
            if indices.dim() != 1 or indices.numel() == 0 or indices.dtype != torch.long:
                raise ValueError(
                    f"groups: expected lists of at least one index each, found {shown(part)} for "
                    f"group {k}"
                )
            if int(indices.min()) < 0:
                raise ValueError(
                    f"groups: expected indices from 0 on, found {int(indices.min())} in group {k}"
                )
            parts.append(indices.cpu())
        index = torch.cat(parts)
        if int(index.max()) > FURTHEST + index.numel():  # then some are missing, by far
            raise ValueError(
                f"groups: expected every coordinate in a group, found the coordinate "
                f"{int(index.max())} and {index.numel()} in all"
            )
        owner = torch.cat([torch.full_like(part, k) for k, part in enumerate(parts)])
        times = torch.bincount(index)
        if int(times.max()) > 1:
            twice = int(times.argmax())
            owners = sorted(set(owner[index == twice].tolist()))
            where = f"groups {owners[0]} and {owners[1]}" if len(owners) > 1 else "one group twice"
            raise ValueError(
                f"groups: coordinate {twice} is in {where}; overlapping groups have no such "
                "projection or face and are not supported. Let every coordinate be in one group, "
                "or give the problem a copy of the coordinate for each group"
            )
        label = torch.full((len(times),), -1)
        label[index] = owner
        _check_complete(label)
        return cls(label)

    def check_covers(self, n: int) -> None:
        """Raise unless these are the groups of n coordinates."""
        if len(self) < n:
            _check_complete(torch.cat((self.label.cpu(), torch.full((n - len(self),), -1))))
        if len(self) > n:
            raise ValueError(
                f"groups: found coordinates up to {len(self) - 1}, but the variable has {n} entries"
            )

    def sums(self, values: Tensor) -> Tensor:  # (..., n) -> (..., G)
        """The sum of each group."""
        blank = values.new_zeros(*values.shape[:-1], self.count)
        return blank.index_add(-1, self._label(values), values)

    def spread(self, each: Tensor) -> Tensor:  # (..., G) -> (..., n)
        """Every coordinate gets the value of its group."""
        return each.index_select(-1, self._label(each))

    def norms(self, x: Tensor) -> Tensor:  # (..., n) -> (..., G)
        """‖x_g‖₂, with derivative zero where x_g = 0."""
        largest = x.detach().abs().amax(-1, keepdim=True)
        scale = torch.where((largest > 0) & torch.isfinite(largest), largest, 1)
        squares = self.sums((x / scale) ** 2)
        some = squares > 0
        return torch.where(some, torch.where(some, squares, 1).sqrt(), 0) * scale

    def units(self, x: Tensor, norms: Tensor | None = None) -> Tensor:  # (..., n) -> (..., n)
        """x_g / ‖x_g‖₂, and 0 where x_g = 0."""
        norms = self.norms(x) if norms is None else norms
        some = norms > 0
        return torch.where(self.spread(some), x / self.spread(torch.where(some, norms, 1)), 0)

    def _label(self, like: Tensor) -> Tensor:
        if like.device not in self._there:
            self._there[like.device] = self.label.to(like.device)
        return self._there[like.device]


def _is_index(entry: Any) -> bool:
    return isinstance(entry, INTEGERS) and not isinstance(entry, bool)


def _indices(given: Any) -> Tensor:
    """Integers as a tensor, if it can hold them."""
    if isinstance(given, Tensor):
        return given
    try:
        return torch.tensor([int(entry) for entry in given], dtype=torch.long)
    except (OverflowError, RuntimeError, ValueError):
        raise ValueError(
            "groups: expected integers below 2**63, found larger ones in the list"
        ) from None


def _check_complete(label: Tensor) -> None:
    """Raise if a coordinate has no group, that is, the label −1."""
    missing = label < 0
    if bool(missing.any()):
        raise ValueError(
            f"groups: coordinates {_some(missing)} are in no group; give each a group of its own, "
            "or, to leave them unconstrained, put them into one more group of weight 0"
        )


def _some(mask: Tensor) -> str:
    """The first places where a mask holds, in words."""
    places = mask.nonzero().flatten().tolist()
    rest = len(places) - SHOWN
    return ", ".join(map(str, places[:SHOWN])) + (f" and {rest} more" if rest > 0 else "")
