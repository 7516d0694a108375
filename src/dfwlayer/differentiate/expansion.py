"""The solution as a function of the parameters, around a known one and to any order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dfwlayer.constraints.base import Face
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.methods.base import Problem
from dfwlayer.ops.rows import column, dot, or_one, where_rows

__all__ = ["expand", "worth"]


def expand(problem: Problem, x: Tensor, face: Face, order: int) -> Tensor:
    """The solution x, with derivatives in the parameters that are right up to ``order``.

    The free coordinates z and the multiplier λ are the zero of

        F(z, λ; θ) = (∇f(x; θ) + λ ∇h(x; w) on the free coordinates,  h(x; w) − t),

    x being z there and a function of (w, t) on the pinned ones. With K = ∂F/∂(z, λ) at the
    known solution, a constant, the step (z, λ) ← (z, λ) − K⁻¹ F(z, λ; θ) leaves the values as
    they are and makes one more order of derivatives right: if (z, λ) is off by O(‖δθ‖ᵐ), the
    next one is off by O(‖δθ‖ᵐ⁺¹). What F's derivatives are is left to autograd.

    Where the free directions are not coordinates, x is its pinned part and the projection of z
    onto them. That is all for a flat face. A face that bends turns as x moves along it, which
    such a face does not tell; it has first derivatives only.
    """
    if _turns(face) and order > 1:
        raise _too_high(problem)
    return _expanded(problem, x, face, order)[0]


def worth(problem: Problem, x: Tensor, face: Face, order: int) -> Tensor:  # (...)
    """f at the solution x, with derivatives in the parameters that are right up to ``order`` ≥ 1.

    The Lagrangian

        f(x; θ) + Σ λ_j (h_j(x; w) − t_j)

    is stationary in z and λ at the solution. So it is off by O(‖δθ‖²ᵐ⁺²) where (z, λ) is by
    O(‖δθ‖ᵐ⁺¹), and m = 0, the known solution with the pinned coordinates as functions of (w, t),
    suffices for its first derivatives: the envelope theorem. No linear system has to be solved.

    A face that turns tells h up to second order only, as ⟨a, d⟩ and ½⟨d, C d⟩ for a movement d.
    """
    steps = order // 2
    at, multiplier = _expanded(problem, x, face, steps)
    value = problem.objective.value(at)
    if steps == 0 or _still(face):
        value = value + (column(face.multiplier, x) * face.excess()).sum(-1)
    else:
        value = value + (multiplier * _moved(face, at, multiplier).excess()).sum(-1)
    if steps == 0 or not _turns(face):
        return value
    if order > 2 or len(face.normals) > 1:
        raise _too_high(problem)
    d = at - x
    for a in face.normals:
        value = value + dot(face.force(), d)
        # a norm has no curvature along x, which a face may leave out beside the tangent space
        length = dot(a, x)
        along = torch.where(length > 0, dot(a, d) / or_one(length), 0).unsqueeze(-1)
        d = d - along * x
    return value + 0.5 * dot(d, face.curvature(d))


def _turns(face: Face) -> bool:
    """Whether the directions that are left turn as x moves along the face."""
    return face.free is None and face.bends


def _still(face: Face) -> bool:
    """Whether a face need not know how x and λ move: without normals, or for one order only."""
    return face.free is None and (face.bends or not face.normals)


def _too_high(problem: Problem) -> ValueError:
    return ValueError(
        "constraint: only first derivatives of x, and second ones of the value, are to be had of "
        "sets with curved faces that are not aligned with the axes, such as balls of matrices, "
        f"found {type(problem.constraint).__name__}"
    )


def _expanded(problem: Problem, x: Tensor, face: Face, order: int) -> tuple[Tensor, Tensor]:
    """x and λ to an order, 0 for x that moves with what is pinned."""
    still = _still(face)
    moved = face.pinned()
    moved = moved - moved.detach()
    pinned = x + moved  # x itself is feasible to the last bit
    z, multiplier = x, column(face.multiplier, x)
    inverse = _Saddle(FaceSystem.of(problem.objective, face, x)) if order > 0 else None
    for _ in range(order):
        at = _placed(face, z, pinned)
        here = face if still else _moved(face, at, multiplier)
        residual = problem.objective.gradient(at) + here.force()
        if _turns(face):
            residual = residual + face.curvature(moved)
        excess = here.excess()
        change: tuple[Tensor, Tensor] = _Inverse.apply(  # type: ignore[no-untyped-call]
            residual - residual.detach(), excess - excess.detach(), inverse
        )
        z = z - change[0]
        multiplier = multiplier if still else multiplier - change[1]
    return _placed(face, z, pinned), multiplier


def _placed(face: Face, z: Tensor, pinned: Tensor) -> Tensor:
    """z in the free directions, pinned in the others."""
    if face.free is None:
        return pinned + face.restrict(z - pinned)
    return torch.where(face.free, z, pinned)


@dataclass(frozen=True)
class _Saddle:
    """K (u, ν) = (v, c): H u + Σ νa = v on the free coordinates and ⟨a, u⟩ = c, u zero elsewhere.

    K is symmetric.
    """

    system: FaceSystem

    def solve(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """u and ν, zero for the problems where they leave the dtype's range."""
        system = self.system
        across = system.across(c)
        v = v - system.objective.hvp(system.x, across) - self._bend(across)
        along = system.invert(v)
        nu = system.multiplier(v - system.hessian(along))
        u = along + across
        sound = torch.isfinite(u.sum(-1) + nu.sum(-1))
        return where_rows(sound, u, 0), where_rows(sound, nu, 0)

    def _bend(self, u: Tensor) -> Tensor:
        """C u also for u off the tangent space, which a face need not know."""
        face = self.system.face
        if not face.bends:
            return torch.zeros_like(u)
        if face.free is None:
            # C's part along the normal, which a face may leave out, vanishes on the tangent space
            return face.curvature(u)
        with torch.enable_grad():
            at = self.system.x.detach().requires_grad_()
            force = _moved(face, at, column(face.multiplier, at)).force()
            (product,) = torch.autograd.grad(force, at, u, materialize_grads=True)
        return product


class _Inverse(torch.autograd.Function):
    """K⁻¹, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, c: Tensor, saddle: _Saddle) -> tuple[Tensor, Tensor]:
        ctx.saddle = saddle
        return saddle.solve(v, c)

    @staticmethod
    def backward(ctx: Any, u: Tensor, nu: Tensor) -> tuple[Tensor | None, ...]:
        out: tuple[Tensor, Tensor] = _Inverse.apply(u, nu, ctx.saddle)  # type: ignore[no-untyped-call]
        return *out, None


def _moved(face: Face, x: Tensor, multiplier: Tensor) -> Any:
    """The face with x and λ that carry derivatives of their own."""
    if not {"x", "multiplier"} <= getattr(face, "__dataclass_fields__", {}).keys():
        raise ValueError(
            "constraint: beyond first derivatives, and inside of torch.func, its face has to be a "
            f"dataclass with the fields x and multiplier, got {type(face).__name__}"
        )
    return replace(face, x=x, multiplier=multiplier)  # type: ignore[type-var]
