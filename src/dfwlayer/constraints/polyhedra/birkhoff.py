"""Doubly stochastic matrices, the convex hull of the permutations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dfwlayer.arguments import as_integer
from dfwlayer.constraints.base import Constraint, Face
from dfwlayer.constraints.parameters import variable_of
from dfwlayer.constraints.plain import Plain, PlainSums
from dfwlayer.constraints.polyhedra.assignment import assign, sinkhorn
from dfwlayer.constraints.polyhedra.birkhoff_projection import (
    balanced,
    filled_up,
    laplacian_solve,
    project_birkhoff,
)
from dfwlayer.constraints.region import Region
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.scale import ROUNDING, Scale

__all__ = ["Birkhoff"]

CLOSE = 1e-3  # up to this violation a matrix is repaired, beyond it is projected


@dataclass(frozen=True)
class Birkhoff(Constraint):
    """{X ≥ 0 : X 1 = 1, Xᵀ1 = 1}, whose vertices are the permutation matrices.

    The vertex is a linear assignment (by SciPy where it is installed, otherwise by an own O(n³)
    method, on the CPU and one problem after the other); the soft vertex is Sinkhorn's matrix at
    that temperature, after ``rounds`` of scaling, made feasible to rounding.

    Args:
        n: Rows and columns; the variable is (n, n), or (n·n,), row after row.
        rounds: Of Sinkhorn's scaling.

    """

    n: int
    rounds: int = 20

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("rounds", 0)):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least))

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Check that the variable is a matrix of this size."""
        if shape not in ((self.n, self.n), (self.n**2,)):
            raise ValueError(
                f"n: {self.n} goes with variables of shape {(self.n, self.n)} or {(self.n**2,)}, "
                f"got {shape}"
            )
        return super().bind(shape, dtype, device)

    def variable(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Matrices, unless they are given row by row."""
        return variable_of((self.n, self.n), sizes)

    def start(self, like: Tensor) -> Tensor:
        """1/n everywhere."""
        return torch.full_like(like, 1 / self.n)

    def vertex(self, g: Tensor) -> Tensor:
        """The permutation of least cost g."""
        columns = assign(self._square(g))
        return torch.nn.functional.one_hot(columns, self.n).to(g.dtype).reshape(g.shape)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """Sinkhorn's matrix for the cost g, that is exp((u_i + v_j − g_ij)/τ)."""
        finfo, cost = torch.finfo(g.dtype), self._square(g)
        # below the rounding of the costs soft and hard are the same
        floor = cost.detach().abs().amax((-2, -1), keepdim=True) * finfo.eps
        floor = floor.clamp_min(max(temperature, finfo.tiny / finfo.eps))
        return filled_up(sinkhorn(cost, floor, self.rounds)).reshape(g.shape)

    def violation(self, x: Tensor) -> Tensor:
        """The largest of |row sum − 1|, |column sum − 1| and −x_ij."""
        return self._lacking(self._square(x.double())).to(x.dtype)

    def retract(self, x: Tensor) -> Tensor:
        """X with its sums brought to 1; zeros stay if X is close to the set.

        Entries below the rounding of the sums count as zeros, and become zero.
        """
        eps = torch.finfo(x.dtype).eps
        at = self._square(x.detach()).double()
        # rounding the entries makes no more than this of the sums
        dust = (at > 0) & (at <= eps)
        outside = (self._lacking(at) > eps) | dust.any(-1).any(-1)
        if not bool(outside.any()):
            return x
        near = torch.where(dust, 0, at).reshape(-1, self.n, self.n)
        far = self._lacking(near) > CLOSE
        if bool(far.any()):
            near = near.index_copy(0, far.nonzero().squeeze(-1), project_birkhoff(near[far]))
        inner = balanced(near.clamp_min(0))
        rough = self._lacking(inner) > 4 * torch.finfo(inner.dtype).eps
        inner = torch.where(rough[:, None, None], filled_up(inner), inner)
        flat = inner.reshape(x.shape).to(x.dtype)
        return moved_to(x, torch.where(outside.unsqueeze(-1), flat, x.detach()))

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """See `dfwlayer.constraints.polyhedra.birkhoff_projection`."""
        flat = self._square(z).reshape(-1, self.n, self.n)
        return project_birkhoff(flat).to(z.dtype).reshape(z.shape)

    def plain(self, *, fixed: bool = True) -> Plain:
        """Turns of thresholds for rows and columns."""
        return PlainSums(1.0, 1.0, (self.n, self.n))

    def diameter(self, n: int) -> Tensor:
        """√(2n) of the matrix's n, unless it has one entry only."""
        return torch.tensor(math.sqrt(2 * self.n) if self.n > 1 else 0.0)

    def region(self, like: Tensor) -> Region:
        """X ≥ 0 with the sums of rows and columns 1."""
        eye, one = torch.eye(self.n).to(like), torch.ones(1, self.n).to(like)
        sums = torch.cat((torch.kron(eye, one), torch.kron(one, eye)))
        return Region.of(like, 0.0, math.inf, equations=[(a, one[0, :1]) for a in sums])

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> BirkhoffFace:
        """Entries that are zero stay; with a scale also those about to be.

        At a solution ∇f = −u_i − v_j where x_ij > 0, and ≥ that elsewhere. u and v are the least
        squares fit to ∇f with the weights x.
        """
        weight, cost = self._square(x).double(), self._square(g).double()
        pull = weight * cost
        u, v = laplacian_solve(weight, -pull.sum(-1), -pull.sum(-2))
        u, v = u + v[..., -1:], v - v[..., -1:]  # the last column needs no multiplier of its own
        free = x > 0
        if scale is not None:
            potential = u.unsqueeze(-1) + v.unsqueeze(-2)
            force = (cost + potential).reshape(x.shape).to(x.dtype)
            blur = ROUNDING * torch.finfo(x.dtype).eps * potential.reshape(x.shape).abs()
            free = free & ~scale.holds(force, x, blur.to(x.dtype))
        multiplier = torch.cat((u, v[..., :-1]), -1).to(x.dtype)
        return BirkhoffFace(self.n, x, free, multiplier)

    def _square(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.n, self.n)

    @staticmethod
    def _lacking(x: Tensor) -> Tensor:  # (..., n, n) -> (...)
        sums = torch.maximum((x.sum(-1) - 1).abs().amax(-1), (x.sum(-2) - 1).abs().amax(-1))
        return torch.maximum(sums, -x.amin((-2, -1)))


@dataclass(frozen=True)
class BirkhoffFace(Face):
    """Zeros that stay, and the sums of n rows and n − 1 columns; the last one follows."""

    n: int
    x: Tensor
    free: Tensor
    multiplier: Tensor  # (..., 2n − 1), rows first

    @property
    def normals(self) -> tuple[Tensor, ...]:
        """Ones in a row, or in a column, where they are free."""
        eye = torch.eye(self.n, dtype=self.x.dtype, device=self.x.device)
        rows = eye.repeat_interleave(self.n, 1)
        columns = eye.repeat(1, self.n)[:-1]
        return tuple(a * self.free for a in torch.cat((rows, columns)))

    def force(self) -> Tensor:
        """u_i + v_j."""
        u, v = self.multiplier[..., : self.n], self.multiplier[..., self.n :]
        v = torch.nn.functional.pad(v, (0, 1))
        return (u.unsqueeze(-1) + v.unsqueeze(-2)).flatten(-2).expand_as(self.x)

    def excess(self) -> Tensor:
        """What the sums have beyond 1."""
        x = self.x.reshape(*self.x.shape[:-1], self.n, self.n)
        return torch.cat((x.sum(-1), x.sum(-2)[..., :-1]), -1) - 1
