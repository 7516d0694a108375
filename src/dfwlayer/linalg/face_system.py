"""The linear system on the tangent space of a face, for the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dfwlayer.linalg.krylov import Krylov, conjugate_gradient
from dfwlayer.linalg.subspaces import Normals, Orthogonal, Tangent
from dfwlayer.ops.graphs import replay
from dfwlayer.ops.rows import (
    Mask,
    Scalar,
    any_row,
    axpy,
    by_count,
    dot,
    inner,
    number,
    or_one,
    ratio,
    root,
    spread,
    where_rows,
)
from dfwlayer.ops.tensors import filled, static_of, tensors_in

if TYPE_CHECKING:
    from dfwlayer.constraints.base import Face
    from dfwlayer.objectives.base import Objective

__all__ = ["FaceSystem"]

PATIENCE = 200  # steps of conjugate gradients before a factorisation is tried
SEVERAL = 8  # normals, for each of which a factorisation has to solve
# of so many coordinates those that are free are gathered if they are no more than a share; below,
# and for more, products with all coordinates are as fast
LARGE, FEW = 256, 0.6


class Limits(NamedTuple):
    """Of conjugate gradients, see `conjugate_gradient`."""

    tol: float
    max_steps: int
    cap: Scalar | None
    ask: int
    floor: Scalar


@dataclass(frozen=True)
class FaceSystem:
    """H u + Σ ν_j a_j = v for u in the tangent space {u : u = restrict(u), ⟨a_j, u⟩ = 0}.

    H = ∇²f(x) + C, with a_j and C those of the face. Minimising the quadratic model of f on the
    face is this system with v = −∇f(x); the implicit gradient is this system with v the
    gradient in x.
    """

    objective: Objective
    face: Face
    x: Tensor  # (..., n)

    @staticmethod
    def of(objective: Objective, face: Face, x: Tensor) -> FaceSystem:
        """That of a face, which may have a way of its own to solve it."""
        return face.system(objective) or FaceSystem(objective, face, x)

    def hessian(self, v: Tensor) -> Tensor:
        """(∇²f + C) v."""
        product = self.objective.hvp(self.x, v)
        return product + self.face.curvature(v) if self.face.bends else product

    def solve(
        self,
        v: Tensor,
        *,
        tol: float,
        max_steps: int,
        cap: Scalar | None = None,
        stop: Callable[[Tensor], Mask] | None = None,
        ask: int = 8,
        floor: Scalar = 0.0,
    ) -> Krylov:
        """Conjugate gradients on the tangent space; see ``conjugate_gradient``."""
        if (few := by_count(v, lambda: self._few, lambda: None)) is not None:
            return self._solve_few(few, v, stop, Limits(tol, max_steps, cap, ask, floor))
        precondition, unit = self._preconditioner(v) or (None, 1.0)
        return conjugate_gradient(
            self.hessian,
            v,
            tol=tol,
            max_steps=max_steps,
            cap=cap,
            subspace=self.tangent,
            precondition=precondition,
            stop=stop,
            ask=ask,
            floor=floor * unit,
        )

    @cached_property
    def _few(self) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """The free coordinates of one problem and products among them, where these are few.

        Gathering them costs about one product with all.
        """
        free, n = self.face.free, self.x.shape[-1]
        if free is None or n < LARGE or self.face.bends or self._normal is None:
            return None
        index = free.nonzero().squeeze(-1)
        product = self.objective.among(index) if len(index) <= FEW * n else None
        return None if product is None else (index, product)

    def _solve_few(
        self,
        few: tuple[Tensor, Callable[[Tensor], Tensor]],
        v: Tensor,  # (n,)
        stop: Callable[[Tensor], Mask] | None,
        limits: Limits,
    ) -> Krylov:
        """Conjugate gradients with the free coordinates alone."""
        index, product = few

        def whole(u: Tensor) -> Tensor:
            return torch.zeros_like(v).index_copy_(0, index, u)

        tangent = self.tangent
        assert isinstance(tangent, Tangent)
        found = conjugate_gradient(
            product,
            v[index],
            **limits._asdict(),
            subspace=Tangent(tangent.free[index], tangent.unit[index]),
            stop=None if stop is None else lambda u: stop(whole(u)),
        )
        return found._replace(u=whole(found.u))

    def direct(self, v: Tensor) -> Tensor | None:
        """u by a factorisation, for systems too ill conditioned for conjugate gradients."""
        bend = self.face.curvature_diagonal() if self.face.bends else None
        if self.face.free is None or (bend is None and self.face.bends):
            return None
        if len(self.face.normals) > SEVERAL:
            return None
        inverse = self.objective.reduced(self.face.free, bend)
        if inverse is None:
            return None
        onto_tangent = self._onto_tangent(inverse)
        u = torch.zeros_like(v)
        for _ in range(2):  # the second time for what rounding left
            u = u + onto_tangent(inverse(self.tangent(v - self.hessian(u))))
        return u

    def _onto_tangent(self, inverse: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """u ↦ u − Σ c_j H⁻¹a_j, which is in the tangent space."""
        if (a := self._normal) is not None:
            steep = inverse(a)
            width = inner(a, steep)

            def once(u: Tensor) -> Tensor:
                return axpy(u, -ratio(inner(a, u), width, 0.0), steep)

            return lambda u: once(once(u))  # the second time for what rounding left
        normals = torch.stack(self.face.normals, -2)
        steeps = torch.stack([inverse(a) for a in self.face.normals], -2)
        across = torch.linalg.pinv(normals @ steeps.mT, hermitian=True)

        def onto_tangent(u: Tensor) -> Tensor:
            c = across @ (normals @ u.unsqueeze(-1))
            moved: Tensor = u - (steeps.mT @ c).squeeze(-1)
            return moved

        return onto_tangent

    def invert(self, v: Tensor) -> Tensor:
        """u to the rounding of the dtype, and zero for problems that leave its range."""
        tol, most = torch.finfo(v.dtype).eps, 2 * v.shape[-1] + 20
        found = self._recorded(v, tol)
        if found is not None:
            return self._refined(v, *found, tol, most)
        if self.objective.isotropic and not self.face.bends:
            return sound(self.tangent(v))
        if self.objective.diagonal is None:
            first = self.solve(v, tol=tol, max_steps=min(PATIENCE, most))
            if not any_row(first.unfinished):
                return sound(first.u)
        direct = self.direct(v)
        return sound(self.solve(v, tol=tol, max_steps=most).u if direct is None else direct)

    def _refined(self, v: Tensor, u: Tensor, unfinished: Tensor, tol: float, most: int) -> Tensor:
        """u where it is enough, otherwise once more from the graph, or however long it takes."""
        if self.objective.isotropic or not bool(unfinished):
            return u
        floor = tol * root(inner(v, v))
        rest = v - self.hessian(u)
        found = self._recorded(rest, tol, floor)
        if found is not None:
            more, unfinished = found
            u = u + more
            if not bool(unfinished):
                return sound(u)
            rest = v - self.hessian(u)
        return sound(u + self.solve(rest, tol=tol, max_steps=most, floor=floor).u)

    def _recorded(self, v: Tensor, tol: float, floor: Scalar = 0.0) -> tuple[Tensor, Tensor] | None:
        """The first steps from a CUDA graph, and whether they were not enough."""
        objective = self.objective
        if self.face.bends or not objective.quadratic or not objective.recordable:
            return None
        if self.face.free is None or self._normal is None:
            return None
        given = (objective, v, self.face.free, self._normal, spread(floor, v[..., :1]))
        most = 16 if v.dtype == torch.float32 else 32

        def calculate(copies: Sequence[Tensor]) -> tuple[Tensor, ...]:
            own, v, free, normal, floor = filled(given, iter(copies))
            space = tangent_space(free, normal)
            if own.isotropic:
                return sound(space(v)), torch.zeros_like(free[..., 0]).any()
            found = conjugate_gradient(
                lambda d: own.hvp(d, d), v, tol=tol, max_steps=most, subspace=space, floor=floor
            )
            return sound(found.u), torch.as_tensor(found.unfinished).any()

        with torch.no_grad():
            found = replay(("invert", static_of(objective), tol), calculate, tensors_in(given))
        return None if found is None else (found[0], found[1])

    def multiplier(self, rest: Tensor) -> Tensor:  # (..., n) -> (..., m)
        """ν with Σ ν_j a_j ≈ rest = v − H u on the free coordinates."""
        if self._normals is not None:
            return self._normals.coefficients(self.face.restrict(rest))
        if not self.face.normals:
            return rest[..., :0]
        (a,) = self.face.normals
        b = a * self._ease
        length = dot(a, b)
        return (dot(b, rest) / or_one(length)).unsqueeze(-1)

    def across(self, c: Tensor) -> Tensor:  # (..., m) -> (..., n)
        """The shortest u with ⟨a_j, u⟩ = c_j, or with one a_j the one of the least effort."""
        if self._normals is not None:
            inverse = self._normals.inverse
            return self._normals.combine((inverse @ c.unsqueeze(-1)).squeeze(-1))
        if not self.face.normals:
            return torch.zeros_like(self.x)
        (a,) = self.face.normals
        b = a * self._ease
        length = dot(a, b).unsqueeze(-1)
        return b * (c / or_one(length))

    @cached_property
    def _ease(self) -> Tensor | float:
        """How easily a coordinate moves, 1 for the one that the face's curvature holds least.

        What the curvature holds says little of ν: there v − H u is a difference of large numbers.
        """
        bend = self.face.curvature_diagonal() if self.face.bends else None
        if bend is None or self.face.free is None:
            return 1.0
        bend = torch.where(self.face.free, bend, torch.inf)
        least = bend.amin(-1, keepdim=True)
        usable = (least > 0) & torch.isfinite(least)
        return torch.where(usable, torch.where(usable, least, 1) / bend, 1.0)

    @cached_property
    def tangent(self) -> Tangent | Orthogonal:
        """The tangent space."""
        if self.face.free is not None and self._normal is not None:
            return tangent_space(self.face.free, self._normal)
        return Orthogonal(self.face.restrict, self._normals)

    @cached_property
    def _normal(self) -> Tensor | None:
        """The normal where there is one or none, which is most often so, and quicker."""
        normals = self.face.normals
        if not normals:
            return torch.zeros_like(self.x)
        return normals[0] if len(normals) == 1 else None

    @cached_property
    def _normals(self) -> Normals | None:
        """The normals where there are more, or where the face is not aligned with the axes."""
        normals = self.face.normals
        several = len(normals) > 1 or (normals and self.face.free is None)
        return Normals.of(normals) if several else None

    def _preconditioner(self, v: Tensor) -> tuple[Callable[[Tensor], Tensor], Scalar] | None:
        """Inverse of a diagonal that resembles H: f's mean curvature along v, plus C's own.

        And the least that a residual of length one has in its norm.
        """
        bend = self.face.curvature_diagonal() if self.face.bends else None
        a = self._normal
        if bend is None or a is None or self.face.free is None:
            return None
        length = dot(v, v)
        product = dot(v, self.objective.hvp(self.x, v))
        quotient = (product / or_one(length)).clamp_min(0)
        bends = (bend != 0).any(-1)
        diagonal = torch.where(bends, quotient, 1).unsqueeze(-1) + bend
        inverse = torch.where(self.face.free, 1 / or_one(diagonal), 0)
        steep = inverse * a
        width = or_one(dot(a, steep))

        def precondition(r: Tensor) -> Tensor:
            r = inverse * r
            for _ in range(2):  # once more for what rounding left, which may be all there is
                r = r - steep * (dot(a, r) / width).unsqueeze(-1)
            return r

        return precondition, number(diagonal.amax(-1).clamp_min(torch.finfo(v.dtype).tiny) ** -0.5)


def tangent_space(free: Tensor, normal: Tensor) -> Tangent:
    """{u : u = 0 off the free set, ⟨a, u⟩ = 0} for a mask (..., n) and a normal a (..., n)."""
    mask = free.to(normal.dtype)
    if normal.dtype == torch.float32:  # squares of weights may leave its range
        length = torch.linalg.vector_norm(normal, dim=-1, keepdim=True, dtype=torch.float64)
        return Tangent(mask, (normal / length.clamp_min(1e-100)).to(normal.dtype))
    largest = normal.abs().amax(-1, keepdim=True)
    a = normal / or_one(largest)
    return Tangent(mask, a * ratio(1.0, root(inner(a, a)), 0.0))


def sound(u: Tensor) -> Tensor:
    """u, and zero for the problems where it is not finite."""
    return where_rows(torch.isfinite(u.sum(-1)), u, 0)
