"""A set of the user's own, known by minimising linear functions over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dfwlayer.arguments import as_flag, as_integer, check_tensor
from dfwlayer.constraints.base import Atoms
from dfwlayer.hull import Descent, Hull, descend_over_hull
from dfwlayer.linalg import dot, norm
from dfwlayer.objectives.quadratic import Quadratic

__all__ = ["CustomSet"]

MOST = 1000  # calls of the oracle for one projection


@dataclass(frozen=True, init=False)
class CustomSet:
    """The convex hull of whatever ``vertex`` returns: a shortest path, a matching, a schedule.

    The default method is then "active-set". The implicit gradient is that of the solution on the
    affine hull of the vertices in use. For a polytope that is right wherever the solution is
    differentiable, but for few points of measure zero; it is zero where the solution is a single
    vertex. For sets that are curved it is not, and the smooth alternative is the soft vertex:
    ``method="dfw"``. Tensors inside of ``vertex`` are constants. First derivatives only.

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
        for name, value in (("vertex_of", vertex), ("batched", batched), ("samples", samples)):
            object.__setattr__(self, name, value)

    @property
    def preferred_method(self) -> str:
        """What "auto" means for it."""
        return "active-set"

    def batch_sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """None: what ``vertex`` holds is its own affair."""
        return {}

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> CustomSet:
        """Remember the shape of the variable."""
        return self._with_shape(shape)

    def float32(self) -> CustomSet:
        """Itself."""
        return self

    def verified(self) -> tuple[CustomSet, None]:
        """Vertices are checked as they come."""
        return self, None

    def replace_rows(self, bad: Tensor) -> CustomSet:
        """Itself."""
        return self

    def start(self, like: Tensor) -> Tensor:
        """The vertex for the cost zero."""
        return self.vertex(torch.zeros_like(like))

    def unbounded(self) -> None:
        """None."""

    def vertex(self, g: Tensor) -> Tensor:
        """What the function returns for the cost g, flattened."""
        shape = self.shape or (g.shape[-1],)
        costs = g.detach().reshape(math.prod(g.shape[:-1]), *shape)
        if len(costs) == 0:
            return torch.zeros_like(g)
        if self.batched:
            points = self._checked(self.vertex_of(costs), costs)
        else:
            points = torch.stack([self._checked(self.vertex_of(cost), cost) for cost in costs])
        return points.reshape(g.shape)

    def lowest(self, g: Tensor) -> Tensor:
        """⟨g, vertex⟩."""
        return dot(g, self.vertex(g))

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """The mean of the vertices for g + τ·noise, always the same noise."""
        soft: Tensor = _Perturbed.apply(g, temperature, self)  # type: ignore[no-untyped-call]
        return soft

    def atoms(self) -> Atoms | None:
        """None: nobody knows how many there are."""
        return None

    def violation(self, x: Tensor) -> Tensor:
        """The distance to the projection."""
        return norm(x - self.project(x))

    def retract(self, x: Tensor) -> Tensor:
        """The projection, as a constant shift for autograd."""
        nearest = self.project(x.detach())
        return x + (nearest - x.detach()) if x.requires_grad else nearest

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """By as many calls of ``vertex`` as it takes."""
        return self._nearest(z).x

    def diameter(self, n: int) -> Tensor:
        """Infinity: nobody knows."""
        return torch.tensor(torch.inf)

    def face(self, x: Tensor, g: Tensor, scale: Tensor | None = None) -> HullFace:
        """The affine hull of the vertices of which x is found to be a combination."""
        return self.face_of_hull(self._nearest(x).hull)

    def face_of_hull(self, hull: Hull) -> HullFace:
        """The affine hull of the points in use."""
        return HullFace(hull.combination(), hull.directions())

    def _nearest(self, z: Tensor) -> Descent:
        with torch.no_grad():
            away = Quadratic(None, -z.detach())
            return descend_over_hull(away, self.vertex, self.vertex(-z), 0.0, MOST)

    def _checked(self, point: Any, cost: Tensor) -> Tensor:
        if not isinstance(point, Tensor) or point.shape != cost.shape:
            got = tuple(point.shape) if isinstance(point, Tensor) else type(point).__name__
            raise ValueError(
                f"vertex: expected a tensor of the cost's shape {tuple(cost.shape)}, got {got}"
            )
        check_tensor("vertex", point)
        if point.is_complex():
            raise ValueError(f"vertex: expected real numbers, got {point.dtype}")
        found: Tensor = point.detach().to(cost)
        if not bool(torch.isfinite(found).all()):
            raise ValueError("vertex: returned NaN or infinity; expected a point of a bounded set")
        return found

    def _with_shape(self, shape: tuple[int, ...]) -> CustomSet:
        copy = CustomSet(self.vertex_of, batched=self.batched, samples=self.samples)
        object.__setattr__(copy, "shape", shape)
        return copy


class _Perturbed(torch.autograd.Function):
    """E vertex(g + τZ), whose derivative is E (vertex(g + τZ) − vertex(g)) Zᵀ / τ."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, temperature: float, constraint: CustomSet) -> Tensor:
        size = max(temperature, torch.finfo(g.dtype).tiny)
        generator = torch.Generator().manual_seed(0)
        shape = (constraint.samples, g.shape[-1])
        noise = torch.randn(shape, generator=generator, dtype=g.dtype).to(g.device)
        points = torch.stack([constraint.vertex(g + size * z) for z in noise])
        ctx.size = size
        ctx.save_for_backward(noise, points - constraint.vertex(g))
        return points.mean(0)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        noise, moves = ctx.saved_tensors
        share = dot(moves, v) / (ctx.size * len(noise))  # (samples, ...)
        return torch.tensordot(share, noise, ([0], [0])), None, None


@dataclass(frozen=True)
class HullFace:
    """The affine hull of points; see `dfwlayer.constraints.Face`."""

    x: Tensor
    directions: Tensor  # (..., n, r), orthonormal columns, or zero

    @property
    def free(self) -> None:
        return None

    def restrict(self, v: Tensor) -> Tensor:
        """Onto the directions."""
        along = self.directions.mT @ v.unsqueeze(-1)
        return (self.directions @ along).squeeze(-1)

    @property
    def bends(self) -> bool:
        return False

    @property
    def normals(self) -> tuple[Tensor, ...]:
        return ()

    def curvature(self, v: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(v)

    def curvature_diagonal(self) -> Tensor:
        """Zero."""
        return torch.zeros_like(self.x)

    def force(self) -> Tensor:
        """Zero: there are no parameters."""
        return torch.zeros_like(self.x)

    def excess(self) -> Tensor:
        """Of no constraint."""
        return self.x[..., :0]

    def pinned(self) -> Tensor:
        """Zero, likewise."""
        return torch.zeros_like(self.x)
