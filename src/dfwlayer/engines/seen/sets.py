"""Which sets a compiler can see through, and for which parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.parameters import Kind, Parameter, table
from dfwlayer.constraints.region import Block, Flat, Round
from dfwlayer.engines.seen.budget import project_in_sight
from dfwlayer.engines.seen.limits import Limits, project_onto_limits
from dfwlayer.engines.seen.round import project_onto_round
from dfwlayer.ops.tensors import fields_of, filled
from dfwlayer.ops.values import Value, equal, tensor_of

__all__ = ["can_be_seen", "set_in_sight"]

PLAIN = (float, int, type(None))  # see `dfwlayer.arguments.NUMBERS`
Seen = tuple[Tensor, Tensor]  # x, and whether there are numbers that cannot be


def set_in_sight(constraint: Constraint, q: Tensor) -> Seen | None:  # q (..., n)
    """The point of a set nearest to −q, and whether there are numbers that cannot be.

    None for sets whose projection is no formula, and for parameters that are not simply one for all
    problems or one for each.
    """
    if not can_be_seen(q):
        return None
    given, about = constraint.tensors(), table(type(constraint))
    others = [getattr(constraint, name) for name in fields_of(constraint) if name not in given]
    if not all(isinstance(value, PLAIN) for value in others):
        return None  # a set made of others
    if not all(_goes_with(about[name], value, q) for name, value in given.items()):
        return None
    wide = filled(constraint, iter([value.double() for value in given.values()]))
    blocks = wide.form_in_sight(q.shape[-1])
    if blocks is None or len(blocks) > 1:
        return None
    sound = torch.ones((), dtype=torch.bool, device=q.device)
    for name, value in given.items():
        allowed = about[name].allowed(value.detach())
        if about[name].kind is Kind.ENTRIES and value.dim():
            sound = sound & allowed.all(-1, keepdim=True)
        else:
            sound = sound & allowed.unsqueeze(-1)
    seen = _nearest(blocks[0], q, sound)
    if seen is None:
        return None
    x, suspect = seen
    with torch.no_grad():  # where f or its gap may be beyond the largest number, too
        size = (q.double().abs() + x.double().abs()).square().sum(-1)
        suspect = suspect | (size > torch.finfo(q.dtype).max / 16).any()
    return x, suspect


def can_be_seen(q: Any) -> bool:
    """Whether a projection of −q is of a kind that can be seen through.

    That is single precision: its numbers, their quotients and squares are within the range of
    double precision whatever they are.
    """
    if not isinstance(q, Tensor) or not _alike(q, q) or q.device.type not in ("cpu", "cuda"):
        return False
    return q.dim() > 0 and q.shape[-1] > 0


def _alike(value: Tensor, q: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return plain and value.dtype == torch.float32 and value.device == q.device


def _goes_with(about: Parameter, value: Tensor, q: Tensor) -> bool:
    """Whether a parameter is one for all problems, or one for each."""
    if about.kind is Kind.MATRIX or about.apart or not _alike(value, q):
        return False
    if about.kind is Kind.NUMBER:
        return value.dim() == 0 or _is_shape(value, q.shape[:-1])
    if value.dim() == 0:
        return about.numbers
    return _is_shape(value, q.shape[-1:]) or _is_shape(value, q.shape)


def _is_shape(value: Tensor, shape: Sequence[int]) -> bool:
    # lengths first: older compilers would otherwise remember how two sizes of the batch compare
    return value.dim() == len(shape) and tuple(value.shape) == tuple(shape)


def _nearest(block: Block, q: Tensor, sound: Tensor) -> Seen | None:
    """Onto what has a formula: bounds with a budget or a total, ℓ1 balls, Euclidean balls."""
    if isinstance(block, Round):
        return project_onto_round(q, _radius(block.radius, q)) if equal(block.weight, 1.0) else None
    if not isinstance(block, Flat):
        return None
    _, lower, upper, weight, radius, equations = block
    ends = _entries(lower, q), _entries(upper, q)
    if weight is None and not equations:
        return project_onto_limits(q, Limits(*ends, sound=sound))
    if weight is None:
        ((slope, total), *others) = equations
        if others or not equal(slope, 1.0) or not equal(lower, 0.0):
            return None
        return project_onto_limits(q, Limits(*ends, total=_column(total, q), sound=sound))
    if equations:
        return None
    if equal(lower, -math.inf) and equal(upper, math.inf):
        own = None if equal(weight, 1.0) else _entries(weight, q)
        return project_in_sight(q, own, _radius(radius, q))
    budget = _entries(weight, q).abs(), _column(radius, q)
    return project_onto_limits(q, Limits(*ends, *budget, sound=sound))


def _entries(value: Value, q: Tensor) -> Tensor:
    """Of a normal form, in double precision."""
    return tensor_of(value, q).double()


def _column(value: Value, q: Tensor) -> Tensor:
    """A total of a normal form, (1,) or (..., 1)."""
    found = _entries(value, q)
    return found if found.dim() else found.unsqueeze(-1)


def _radius(value: Value, q: Tensor) -> Tensor:
    """The same as () or (...)."""
    return _column(value, q).squeeze(-1)
