"""Projection onto a weighted ℓ1 ball as one autograd function, for layers that want x alone.

Without a P the solution is the projection of −q. `dfwlayer.solve` gives it a certificate, a face
and the machinery of derivatives of any order; in a training step of a small network all that
costs more than the network. Here the projection is computed at once, and with u and ν those of
`implicit` for ∇²f = I,

    u + νa = v on the free coordinates,  ⟨a, u⟩ = 0,  a = sign(x) w,

a gradient v in x becomes −u in q, ν in t and −sign(w)(λ sign(x) u + ν|x|) in w.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from dfwlayer.constraints import LpBall
from dfwlayer.constraints.balls.l1_nearest import Nearest, nearest_l1
from dfwlayer.differentiate.implicit import gradients_nearby
from dfwlayer.differentiate.transforms import in_transform
from dfwlayer.objectives import Quadratic
from dfwlayer.ops.kernels import nearest as kernels
from dfwlayer.ops.kernels.common import accepts_narrow
from dfwlayer.ops.tensors import tensors_in
from dfwlayer.ops.tracing import refuse_capture

__all__ = ["project", "project_and_back"]

Pull = Callable[[Tensor, Sequence[bool]], list[Tensor | None]]

DTYPES = (torch.float32, torch.float64)


def project(
    q: Tensor,  # (n,) or (B, n)
    weight: Tensor | None,  # (n,) or (B, n)
    radius: float | Tensor,  # number, () or (B,)
    verify: bool,
) -> Tensor | None:
    """The point of Σ |w x| ≤ t nearest to −q, None where only `solve` knows what to do.

    That is for arguments that do not fit together, values that are not finite, and inside of
    transforms; it also has the words for what is wrong.
    """
    found = _found(q, weight, radius, verify)
    if found is None:
        return None
    nearest, t = found
    wanted = q.requires_grad or t.requires_grad or (weight is not None and weight.requires_grad)
    if not (wanted and torch.is_grad_enabled()):
        return nearest.x
    x: Tensor = _Project.apply(q, weight, t, nearest)  # type: ignore[no-untyped-call]
    return x


def project_and_back(
    q: Tensor, weight: Tensor | None, radius: float | Tensor, verify: bool
) -> tuple[Tensor, Pull] | None:
    """The same without autograd: the point, and what makes gradients of one in it.

    These are for the tensors among (q, weight, radius), in this order.
    """
    found = _found(q, weight, radius, verify)
    if found is None:
        return None
    nearest, _ = found
    given = [t if isinstance(t, Tensor) else None for t in (q, weight, radius)]

    def pull(v: Tensor, asked: Sequence[bool]) -> list[Tensor | None]:
        needs = iter(asked)
        wanted = [t is not None and next(needs) for t in given]
        pulled = _gradients(nearest, given, wanted, v)
        return [g for g, t in zip(pulled, given, strict=True) if t is not None]

    return nearest.x, pull


def _found(
    q: Tensor, weight: Tensor | None, radius: float | Tensor, verify: bool
) -> tuple[_Nearest, Tensor] | None:
    """The projection, and the radius as a tensor."""
    if not _plain(q, weight, radius) or in_transform((q, weight, radius)):
        return None
    if torch.is_autocast_enabled(q.device.type):
        return None
    if verify:
        refuse_capture()  # what the kernels found suspicious could not be read
    t = radius if isinstance(radius, Tensor) else q.new_tensor(float(radius))
    nearest = _nearest(q.detach(), weight, t, verify)
    return None if nearest is None else (nearest, t)


def _plain(q: Tensor, weight: Tensor | None, radius: float | Tensor) -> bool:
    """Whether shapes, dtypes and devices leave no question open."""
    if type(q) not in (Tensor, Parameter) or q.is_nested or q.dtype not in DTYPES:
        return False
    if (
        q.dim() not in (1, 2)
        or q.numel() == 0
        or q.device.type not in ("cpu", "cuda")
        or q.layout != torch.strided
    ):
        return False
    if isinstance(radius, Tensor):
        if not _alike(radius, q) or tuple(radius.shape) not in ((), tuple(q.shape[:-1])):
            return False
    elif (
        isinstance(radius, bool)
        or not isinstance(radius, int | float)
        or not 0 <= radius <= sys.float_info.max
    ):
        return False
    if weight is None:
        return True
    if not isinstance(weight, Tensor) or not _alike(weight, q):
        return False
    return tuple(weight.shape) in (tuple(q.shape), tuple(q.shape[-1:]))


def _alike(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and a.device == b.device
    return same and a.layout == torch.strided and not a.is_nested


def _nearest(q: Tensor, weight: Tensor | None, t: Tensor, verify: bool) -> _Nearest | None:
    """The projection of −q by the means of its device."""
    w = None if weight is None else weight.detach()
    if q.device.type == "cpu":
        found = nearest_l1(-q.numpy(), None if w is None else w.numpy(), t.detach().numpy())
        return None if found is None else _OnHost(found, w)
    if not accepts_narrow(q):
        return None
    found_there = kernels.nearest_l1(q, w, t.detach())
    if verify and bool(found_there.suspect.cpu().any()):
        return None
    return _OnDevice(found_there, w, t.detach())


class _Nearest(Protocol):
    """A projection that knows its gradient."""

    @property
    def x(self) -> Tensor:
        """(..., n), in memory of its own."""

    def pullback(
        self, v: Tensor, to_weight: bool, to_radius: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients in q (..., n), in each problem's weight (..., n), and in its radius (...)."""


@dataclass(frozen=True)
class _OnHost:
    found: Nearest
    weight: Tensor | None

    @property
    def x(self) -> Tensor:
        return torch.from_numpy(self.found.x.copy())

    def pullback(
        self, v: Tensor, to_weight: bool, to_radius: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        at, dtype = self.found, self.found.x.dtype
        u, nu = at.pullback(v.numpy())
        slope = torch.from_numpy(nu[..., 0].astype(dtype)) if to_radius else None
        force: Tensor | None = None
        if to_weight and self.weight is not None:
            force_each = at.multiplier * np.sign(at.x) * u + nu * np.abs(at.x)
            force = torch.from_numpy((-np.sign(self.weight.numpy()) * force_each).astype(dtype))
        return torch.from_numpy((-u).astype(dtype)), force, slope


@dataclass(frozen=True)
class _OnDevice:
    found: kernels.NearestL1
    weight: Tensor | None
    radius: Tensor

    @property
    def x(self) -> Tensor:
        return self.found.x

    def pullback(
        self, v: Tensor, to_weight: bool, to_radius: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return kernels.pull_back_l1(self.found, v, self.weight, self.radius, to_weight, to_radius)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, weight: Tensor | None, radius: Tensor, nearest: _Nearest
    ) -> Tensor:
        ctx.nearest = nearest
        ctx.save_for_backward(q, weight, radius)
        return nearest.x

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        asked: tuple[bool, ...] = ctx.needs_input_grad[:3]
        given: tuple[Tensor | None, ...] = ctx.saved_tensors
        if torch.is_grad_enabled() or in_transform(v):
            return *_differentiably(given, asked, ctx.nearest.x, v), None
        return *_gradients(ctx.nearest, given, asked, v), None


def _gradients(
    nearest: _Nearest, given: Sequence[Tensor | None], asked: Sequence[bool], v: Tensor
) -> list[Tensor | None]:
    """In q, weight and radius, summed up for what problems share."""
    pulled = nearest.pullback(v, *asked[1:])
    return [
        g if g is None or of is None else g.sum_to_size(of.shape)
        for g, of in zip(pulled, given, strict=True)
    ]


def _differentiably(
    given: tuple[Tensor | None, ...], asked: tuple[bool, ...], x: Tensor, v: Tensor
) -> list[Tensor | None]:
    """The same gradients with derivatives of their own."""
    q, weight, radius = given
    assert q is not None and radius is not None  # noqa: PT018
    objective = Quadratic(None, q).bind(len(q) if q.dim() == 2 else None)
    constraint = LpBall(1.0, radius, weight).bind(q.shape[-1:], q.dtype, q.device)
    tensors = tensors_in((objective, constraint))
    needed = dict(zip(map(id, given), asked, strict=True))
    found = gradients_nearby(
        objective, constraint, x, v, tensors, [needed.get(id(t), False) for t in tensors]
    )
    by_name = dict(zip(map(id, tensors), found, strict=True))
    return [by_name.get(id(t)) if need else None for t, need in zip(given, asked, strict=True)]
