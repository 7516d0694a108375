"""A partition of the coordinates into groups, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Groups"]

SHOWN = 5  # coordinates named in a message


class Groups:
    """A label for every coordinate, from 0 to ``count`` − 1.

    Not a dataclass: its tensor is a structure, not a parameter that could be differentiated.
    """

    def __init__(self, label: Tensor) -> None:  # (n,), integers
        self.label = label
        self.count = int(label.max()) + 1
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
        if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in given):
            return cls._of_labels(torch.tensor(given))
        return cls._of_indices(given)  # type: ignore[arg-type]

    @classmethod
    def _of_labels(cls, label: Tensor) -> Groups:
        if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
            raise ValueError(f"groups: expected integer labels, got {label.dtype}; call .long()")
        if label.dim() == 0 or label.numel() == 0:
            raise ValueError(
                f"groups: expected a label per coordinate, got shape {tuple(label.shape)}"
            )
        label = label.detach().flatten().long()
        if int(label.min()) < 0:
            raise ValueError(
                f"groups: expected labels from 0 on, found {int(label.min())}; every coordinate "
                "needs a group, and one that should not be bounded a group of weight 0"
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
    def _of_indices(cls, given: Sequence[Sequence[int]]) -> Groups:
        parts = []
        for k, part in enumerate(given):
            indices = torch.as_tensor(part)
            if indices.dim() != 1 or indices.numel() == 0 or indices.dtype != torch.long:
                raise ValueError(
                    f"groups: expected lists of at least one index each, found {part!r} for "
                    f"group {k}"
                )
            if int(indices.min()) < 0:
                raise ValueError(
                    f"groups: expected indices from 0 on, found {int(indices.min())} in group {k}"
                )
            parts.append(indices.cpu())
        index = torch.cat(parts)
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
