"""Which sets a compiler can see through, and for which parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dfwlayer.constraints import (
    Box,
    CappedSimplex,
    KSparse,
    L1Box,
    LpBall,
    NonNegative,
    Simplex,
)
from dfwlayer.constraints.base import Constraint
from dfwlayer.engines.seen.budget import project_in_sight
from dfwlayer.engines.seen.limits import Limits, project_onto_limits
from dfwlayer.engines.seen.round import project_onto_round
from dfwlayer.ops.values import Value, tensor_of

__all__ = ["can_be_seen", "set_in_sight"]

Seen = tuple[Tensor, Tensor]  # x, and whether there are numbers that cannot be


def set_in_sight(constraint: Constraint, q: Tensor) -> Seen | None:  # q (..., n)
    """The point of a set nearest to −q, and whether there are numbers that cannot be.

    None for sets whose projection is no formula, and for parameters that are not simply one for all
    problems or one for each.
    """
    kind = type(constraint)
    if kind not in _ENTRIES or not can_be_seen(q):
        return None
    own: dict[str, Any] = {
        name: getattr(constraint, name) for name in (*_ENTRIES[kind], *_NUMBERS[kind])
    }
    for name, value in own.items():
        wanted = tuple(q.shape) if name in _ENTRIES[kind] else tuple(q.shape[:-1])
        short = wanted[-1:] if name in _ENTRIES[kind] else ()
        if isinstance(value, Tensor) and not (
            _alike(value, q) and tuple(value.shape) in ((), short, wanted)
        ):
            return None
    if isinstance(constraint, LpBall):
        seen = _onto_ball(constraint.p, q, constraint.weight, tensor_of(constraint.radius, q))
    else:
        seen = project_onto_limits(q, _limits(constraint, own, q))
    if seen is None:
        return None
    x, suspect = seen
    with torch.no_grad():  # where f or its gap may be beyond the largest number, too
        size = (q.double().abs() + x.double().abs()).square().sum(-1)
        suspect = suspect | (size > torch.finfo(q.dtype).max / 16).any()
    return x, suspect


def can_be_seen(q: Any, weight: Tensor | None = None, radius: Value = 1.0) -> bool:
    """Whether a projection of −q, and these of a ball, are of kinds that can be seen through.

    That is single precision: its numbers, their quotients and squares are within the range of
    double precision whatever they are.
    """
    if not isinstance(q, Tensor) or not _alike(q, q) or q.device.type not in ("cpu", "cuda"):
        return False
    if q.dim() == 0 or q.shape[-1] == 0:
        return False
    if weight is not None and not (
        _alike(weight, q) and tuple(weight.shape) in (tuple(q.shape), tuple(q.shape[-1:]))
    ):
        return False
    if not isinstance(radius, Tensor):
        return True
    return _alike(radius, q) and tuple(radius.shape) in ((), tuple(q.shape[:-1]))


# the parameters of a set that are one for each coordinate, and those that are one for each problem
_ENTRIES: dict[type, tuple[str, ...]] = {
    Box: ("lower", "upper"),
    NonNegative: (),
    Simplex: (),
    CappedSimplex: ("cap",),
    L1Box: ("weight", "lower", "upper"),
    KSparse: (),
    LpBall: ("weight",),
}
_NUMBERS: dict[type, tuple[str, ...]] = {
    Box: (),
    NonNegative: (),
    Simplex: ("radius",),
    CappedSimplex: ("radius",),
    L1Box: ("radius",),
    KSparse: ("k", "radius"),
    LpBall: ("radius",),
}


def _alike(value: Tensor, q: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return plain and value.dtype == torch.float32 and value.device == q.device


def _onto_ball(p: float, q: Tensor, weight: Tensor | None, radius: Tensor) -> Seen | None:
    if p == 1:
        return project_in_sight(q, weight, radius)
    if p == 2 and weight is None:
        return project_onto_round(q, radius)
    if p != math.inf:
        return None
    reach, none = radius.double().unsqueeze(-1), None
    sound = reach.isfinite() & (reach >= 0)
    if weight is not None:
        size = weight.double().abs()
        sound = sound & size.isfinite().all(-1, keepdim=True)
        heavy = size > reach / torch.finfo(q.dtype).max
        reach = torch.where(heavy, reach / torch.where(heavy, size, 1.0), math.inf)
    return project_onto_limits(q, Limits(-reach, reach, none, none, none, sound))


def _limits(constraint: Constraint, own: dict[str, Any], q: Tensor) -> Limits:
    """The limits of a set, in double precision."""

    def entries(name: str, none: float) -> Tensor:
        value = own.get(name)
        return tensor_of(none if value is None else value, q).double()

    def column(name: str) -> Tensor:
        return tensor_of(own[name], q).double().unsqueeze(-1)

    if isinstance(constraint, Simplex):
        return Limits(entries("", 0.0), entries("", math.inf), total=column("radius"))
    if isinstance(constraint, CappedSimplex):
        return Limits(entries("", 0.0), entries("cap", 1.0), total=column("radius"))
    if isinstance(constraint, KSparse):
        k, reach = column("k"), column("radius")
        sound = (k >= 1) & k.isfinite() & reach.isfinite()
        return Limits(-reach, reach, entries("", 1.0), k * reach, None, sound)
    if isinstance(constraint, NonNegative):
        return Limits(entries("", 0.0), entries("", math.inf))
    lower, upper = entries("lower", -math.inf), entries("upper", math.inf)
    if isinstance(constraint, L1Box):
        return Limits(lower, upper, entries("weight", 1.0).abs(), column("radius"))
    return Limits(lower, upper)
