"""A set of the user's own, known by minimising linear functions over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dfwlayer.arguments import as_flag, as_integer, check_tensor
from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.constraints.perturbed import mean_vertex
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.linalg.hull import Descent, descend_over_hull, span
from dfwlayer.objectives.quadratic import Quadratic
from dfwlayer.ops.rows import dot, norm, or_one, where_rows
from dfwlayer.ops.scale import ROUNDING, Scale, scale_of_terms

__all__ = ["CustomSet"]

COMFORT = 20  # power of two of a cost beyond which a function gets it in other units
MOST = 1000  # calls of the oracle for one projection


@dataclass(frozen=True, init=False)
class CustomSet(Constraint):
    """The convex hull of whatever ``vertex`` returns: a shortest path, a matching, a schedule.

    The default method is then "active-set". The implicit gradient is that of the solution on the
    face of all points s with ⟨∇f(x), s − x⟩ = 0. For a polytope that is right wherever the
    solution is differentiable; it is zero where the solution is a single vertex. For sets that
    are curved it is not, and the smooth alternative is the soft vertex: ``method="dfw"``. Tensors
    inside of ``vertex`` are constants.

    Args:
        vertex: A function from a cost, a tensor of the variable's shape, to a point of the set with
            the least ⟨cost, point⟩, a tensor of the same shape.
        batched: Whether ``vertex`` takes costs with a batch in front, (B, *shape), and returns as
            many points; otherwise it is called for one problem after the other.
        samples: For the soft vertex of the method "dfw", which is a mean of vertices for costs
            with Gaussian noise of size τ (Berthet et al., 2020): how many.

    """

    vertex_of: Callable[[Tensor], Tensor]
    batched: bool = False
    samples: int = 16
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def __init__(
        self,
        vertex: Callable[[Tensor], Tensor],
        *,
        batched: bool = False,
        samples: int = 16,
    ) -> None:
        if not callable(vertex) or isinstance(vertex, type):
            raise ValueError(
                f"vertex: expected a function of the cost, got {type(vertex).__name__}"
            )
        batched = as_flag("batched", batched)
        samples = as_integer("samples", samples, 1)
        given = (("vertex_of", vertex), ("batched", batched), ("samples", samples))
        for name, value in (*given, ("shape", None), ("dtype", None)):
            object.__setattr__(self, name, value)

    @property
    def preferred_method(self) -> str:
        """What "auto" means for it."""
        return "active-set"

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Remember the shape and the dtype of the variable, which ``vertex`` is made for."""
        seen = self.changed(shape=self.shape or shape, dtype=dtype)
        return super(CustomSet, seen).bind(shape, dtype, device)

    def flattened(self, shape: tuple[int, ...], lead: tuple[int, ...]) -> Constraint:
        """The same function, which is asked with costs of the variable's shape."""
        return self.changed(shape=shape)

    def rows(self, index: Tensor) -> Constraint | None:
        """The set itself where each cost is asked alone, and so does not tell whose it is.

        None where a batch is: what ``vertex`` holds of single problems is its own affair.
        """
        return None if self.batched else self

    def start(self, like: Tensor) -> Tensor:
        """The vertex for the cost zero."""
        return self.vertex(torch.zeros_like(like))

    def vertex(self, g: Tensor) -> Tensor:
        """What the function returns for the cost g, flattened."""
        shape = self.shape or (g.shape[-1],)
        costs = g.detach()
        if costs.numel() == 0:
            return torch.zeros_like(g)
        # in units of their own, as the function computes with numbers of the set's dtype
        _, power = torch.frexp(costs.abs().amax(-1, keepdim=True))
        far = power.abs() > COMFORT
        costs = torch.where(far, torch.ldexp(costs, -power), costs)
        costs = costs.to(self.dtype or g.dtype).reshape(math.prod(g.shape[:-1]), *shape)
        if self.batched:
            points = self._checked(self.vertex_of(costs), costs)
        else:
            points = torch.stack([self._checked(self.vertex_of(cost), cost) for cost in costs])
        if not bool(torch.isfinite(points).all()):
            raise ValueError("vertex: returned NaN or infinity; expected a point of a bounded set")
        return points.reshape(g.shape).to(g.dtype)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """The mean of the vertices for g + τ·noise, always the same noise."""
        return mean_vertex(self.vertex, g, temperature, self.samples)

    def violation(self, x: Tensor) -> Tensor:
        """The distance to the projection."""
        return norm(x.double() - self._nearest(x).x).to(x.dtype)

    def retract(self, x: Tensor) -> Tensor:
        """The projection, as a constant shift for autograd.

        A point as near to the set as rounding puts one of its own stays where it is. On its way to
        the set, an entry that is zero would become one of the rounding of the others.
        """
        at = x.detach()
        near = self.project(at)
        within = norm((near - at).double()) <= torch.finfo(x.dtype).eps * norm(at.double())
        return moved_to(x, where_rows(within, at, near))

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """By as many calls of ``vertex`` as it takes."""
        return self._nearest(z).x.to(z.dtype)

    def diameter(self, n: int) -> Tensor:
        """Infinity: nobody knows."""
        return torch.tensor(torch.inf)

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> HullFace:
        """The affine hull of the vertices of which x is found to be a combination, and more.

        See `face_of_hull`. Without a scale g itself stands in for what it is the sum of, and f
        bends as one whose slope is that at a distance of x.
        """
        if scale is None:
            size = or_one(x.abs().amax(-1, keepdim=True))
            scale = scale_of_terms(g.abs().amax(-1, keepdim=True) / size, x, g.abs())
        return self.face_of_hull(self._nearest(x)._replace(x=x, gradient=g, scale=scale))

    def hull_faces(self) -> Callable[[Descent], Face]:
        """By the vertices in use."""
        return self.face_of_hull

    def face_of_hull(self, found: Descent) -> HullFace:
        """The affine hull of all points s of the set with ⟨g, s − x⟩ = 0, g = ∇f(x).

        These are a face of the set, the one that f's slope does not tell apart. The vertices in
        use are among them. They span it unless x happens to be on the hull of fewer: the middle
        of a square is on a diagonal. So the set is asked for points of least ⟨g + εc, s⟩, c
        at right angles to what is known; as long as an answer has ⟨g, s − x⟩ = 0 to rounding
        and lies beside the known span, it joins it. Where x is inside of that face, which is
        strict complementarity, nearby solutions are on the face too, and this is its tangent space.
        Where x is on its boundary the solution has a kink, and this is the derivative on the side
        on which the constraints let go.
        """
        hull, x = found.hull, found.hull.mean()
        eps = torch.finfo(self.dtype or found.x.dtype).eps  # of what ``vertex`` is asked in
        points, used = hull.points.double(), hull.in_use(eps)
        g, scale = found.gradient.double(), Scale(*(part.double() for part in found.scale))
        basis = span(points, used, eps)
        # what the slope does to points in use is what is left of the solver's own rounding
        noise = torch.where(used, ((points - x.unsqueeze(-2)) @ g.unsqueeze(-1)).squeeze(-1), 0)
        noise = 2 * noise.abs().amax(-1)
        own = torch.finfo(found.x.dtype).eps
        unit = or_one(scale.noise.amax(-1, keepdim=True) / (ROUNDING * own))
        generator = torch.Generator().manual_seed(0)
        for _ in range(x.shape[-1]):
            draw = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
            beside = draw - _onto(basis, draw)
            beside = torch.where(norm(beside) > 1e-8 * norm(draw), 1.0, 0.0).unsqueeze(-1) * beside
            if not bool((beside != 0).any()):
                break
            beside = beside / beside.abs().amax(-1, keepdim=True).clamp_min(1e-300)
            grown = torch.zeros_like(used[..., :1])
            for sign in (1, -1):
                cost = g / unit + sign * eps**0.5 * beside
                point = self.vertex((cost * unit).to(found.x.dtype)).double()
                way = point - x
                even = dot(g, way) <= noise + 2 * eps / own * scale.blur(way).squeeze(-1)
                size = torch.maximum(norm(point), norm(x))
                off = norm(way - _onto(basis, way)) > (1e-8 * norm(way)).clamp_min(256 * eps * size)
                new = (even & off & (beside != 0).any(-1)).unsqueeze(-1)
                points = torch.cat((points, point.unsqueeze(-2)), -2)
                used, grown = torch.cat((used, new), -1), grown | new
            if not bool(grown.any()):
                break
            basis = span(points, used, eps)
        return HullFace(found.x, basis.to(found.x.dtype), x.new_zeros(x[..., :0].shape))

    def _nearest(self, z: Tensor) -> Descent:
        """The projection in double precision, as a combination of vertices."""

        def vertex(cost: Tensor) -> Tensor:
            return self.vertex(cost.to(z.dtype)).double()

        with torch.no_grad():
            z = z.detach()
            away = Quadratic(None, -z.double())
            return descend_over_hull(away, vertex, vertex(-z), 0.0, MOST)

    def _checked(self, point: Any, cost: Tensor) -> Tensor:
        if not isinstance(point, Tensor) or point.shape != cost.shape:
            got = tuple(point.shape) if isinstance(point, Tensor) else type(point).__name__
            raise ValueError(
                f"vertex: expected a tensor of the cost's shape {tuple(cost.shape)}, got {got}"
            )
        check_tensor("vertex", point)
        if point.is_complex():
            raise ValueError(f"vertex: expected real numbers, got {point.dtype}")
        return point.detach().to(cost)


def _onto(basis: Tensor, v: Tensor) -> Tensor:  # (..., n, r), (..., n) -> (..., n)
    """The part of v in the span of orthonormal columns."""
    return (basis @ (basis.mT @ v.unsqueeze(-1))).squeeze(-1)


@dataclass(frozen=True)
class HullFace(Face):
    """The affine hull of points; see `dfwlayer.constraints.Face`."""

    x: Tensor
    directions: Tensor  # (..., n, r), orthonormal columns, or zero
    multiplier: Tensor  # (..., 0), there is no other constraint

    def restrict(self, v: Tensor) -> Tensor:
        """Onto the directions."""
        return _onto(self.directions, v)
