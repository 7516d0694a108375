"""The tensors of a problem with batch dimensions in front, as transforms put them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.differentiate.transforms import has_derivatives
from dfwlayer.objectives import LeastSquares, Quadratic
from dfwlayer.objectives.base import Objective
from dfwlayer.ops.rows import common_shape, in_one_batch
from dfwlayer.ops.tensors import fields_of, tensors_in

__all__ = ["Batched", "check_no_others", "equal_depths", "one_batch", "ranks_of"]


@dataclass(frozen=True)
class Batched:
    """A `Recipe` on the tensors of a problem, none of which has to be a problem's own."""

    ranks: tuple[int, ...] | None  # of `ranks_of`, for the tensors

    @property
    def batches(self) -> bool:
        return self.ranks is not None

    @property
    def own(self) -> frozenset[int]:
        return frozenset()


def check_no_others(
    objective: Objective, constraint: Constraint, value: Callable[[], Tensor]
) -> None:
    """Raise if f has derivatives in something although the dense tensors are constants."""
    for name, part in (("objective", objective), ("constraint", constraint)):
        if not is_dataclass(part):
            raise ValueError(
                f"{name}: expected a dataclass, in whose fields tensors can be found and replaced, "
                f"got {type(part).__name__}; other objects have first derivatives only, and those "
                "outside of torch.func"
            )
    if any(t.requires_grad for t in tensors_in((objective, constraint))):
        raise RuntimeError(
            "a sparse tensor gets first derivatives only, and those outside of torch.func: "
            "detach it, or pass a dense one"
        )
    own = isinstance(objective, Quadratic | LeastSquares)
    if not own and has_derivatives(value()):
        raise RuntimeError(
            "the objective uses a tensor that is not one of its arguments, such as a module's "
            "parameter inside of fn, and the derivatives in it would be lost here: pass it as one "
            "of the params of Smooth, or detach it"
        )


def ranks_of(
    objective: Objective, constraint: Constraint, *others: object
) -> tuple[int, ...] | None:
    """The dimensions of one problem's tensors, for each of `tensors_in` all the arguments.

    None where it is not known that a batch may be put in front of each of them.
    """
    ranks: list[int] = []
    for part in (objective, constraint):
        known = part.ranks
        if not known:
            return None
        for name in fields_of(part):
            tensor = getattr(part, name)
            if isinstance(tensor, Tensor):
                if tensor.layout != torch.strided:
                    return None
                ranks.append(known[name])
    for other in others:  # a start, and parts that should have no tensors
        if isinstance(other, Tensor):
            ranks.append(1)
        elif tensors_in(other):
            return None
    return tuple(ranks)


def equal_depths(tensors: Sequence[Tensor], ranks: Sequence[int] | None) -> list[Tensor]:
    """The tensors, all with the same number of batch dimensions."""
    if ranks is None:
        return list(tensors)
    depths = [t.dim() - rank for t, rank in zip(tensors, ranks, strict=True)]
    return [t[(None,) * (max(depths) - depth)] for t, depth in zip(tensors, depths, strict=True)]


def one_batch(
    tensors: Sequence[Tensor], ranks: Sequence[int]
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Several batch dimensions as one, and their sizes; what is shared by all stays shared."""
    leads = [t.shape[: t.dim() - rank] for t, rank in zip(tensors, ranks, strict=True)]
    lead = common_shape(*leads)
    if len(lead) < 2:
        return list(tensors), lead
    merged = []
    for tensor, own in zip(tensors, leads, strict=True):
        event = tensor.shape[len(own) :]
        if all(size == 1 for size in own):
            merged.append(tensor.reshape(event))
        else:
            merged.append(in_one_batch(tensor, len(event), lead))
    return merged, lead
