"""Positive semidefinite matrices of a given trace: density matrices, relaxed rank-one matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dfwlayer.constraints.balls.singular import completed, spectral_function, split
from dfwlayer.constraints.base import Constraint, Face, measured
from dfwlayer.constraints.parameters import as_column, number
from dfwlayer.constraints.plain import Plain, PlainSpectraplex
from dfwlayer.constraints.polyhedra.simplex import Simplex
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.ops.rows import or_one
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.values import Value, tensor_of

__all__ = ["Spectraplex"]


@dataclass(frozen=True)
class Spectraplex(Constraint):
    """{X = Xᵀ ⪰ 0 : tr X = t}, the convex hull of t v vᵀ over unit vectors v.

    The variable is (n, n), or a vector of n² entries, row after row; used on its own, outside of
    `solve`, it takes matrices (..., n, n). Of ∇f only the symmetric part matters.

    Args:
        trace: t ≥ 0, a number, a 0-d tensor or (B,).

    """

    trace: Value = field(default=1.0, metadata=number(least=0, grows=True))

    variable_dims = 2

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Over flattened square matrices."""
        n = math.isqrt(math.prod(shape))
        if shape not in ((n, n), (n * n,)) or n == 0:
            raise ValueError(
                "trace: a Spectraplex is a set of square matrices; expected variables of shape "
                f"(n, n) or (n·n,), got {shape}"
            )
        return super().bind(shape, dtype, device)

    @measured
    def _simplex(self) -> Simplex:
        """That of the eigenvalues."""
        return Simplex(tensor_of(self.trace)).as_bound()

    def start(self, like: Tensor) -> Tensor:
        """t I / n."""
        n = math.isqrt(like.shape[-1])
        eye = torch.eye(n, dtype=like.dtype, device=like.device).flatten()
        return (as_column(self.trace, like).detach() / n * eye).expand_as(like)

    def vertex(self, g: Tensor) -> Tensor:
        """t v vᵀ for the least eigenvalue of the symmetric part of g."""
        vectors = _eigen(_symmetric(g))[1][..., :1]
        return as_column(self.trace, g) * (vectors @ vectors.mT).flatten(-2)

    def lowest(self, g: Tensor) -> Tensor:
        """t times that eigenvalue."""
        least = _eigen(_symmetric(g).double())[0][..., 0]
        return (tensor_of(self.trace).detach().double() * least).to(g.dtype)

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """t exp(−tG/τ) divided by its trace, G the symmetric part of g."""
        matrix = _symmetric(g)
        values = _eigen(matrix)[0]
        spread = or_one(values[..., -1:] - values[..., :1])
        # of a positive definite matrix singular values are eigenvalues; a shift changes nothing
        shift = torch.diag_embed((spread - values[..., :1]).expand_as(values))
        soft = spectral_function(
            matrix + shift, lambda values: self._simplex.soft_vertex(values, temperature)
        )
        return (0.5 * (soft + soft.mT)).flatten(-2)

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """V diag(s) Vᵀ with s the projection of the eigenvalues onto the simplex."""
        values, vectors = _eigen(_symmetric(z).double())
        t = tensor_of(self.trace).detach().double()
        found = _product(vectors, Simplex(t).as_bound().project(values))
        return self._traced(found).to(z.dtype).flatten(-2)

    def plain(self, *, fixed: bool = True) -> Plain:
        """By the eigenvalues."""
        return PlainSpectraplex(self.trace)

    def retract(self, x: Tensor) -> Tensor:
        """x with the last digits of its trace put right where it is one to rounding.

        Otherwise the projection.
        """
        outside = self._excess(x) > self._allowed(x)
        at = x.detach()
        near = self._traced(_square(at).double()).to(x.dtype).flatten(-2)
        if bool(outside.any()):
            near = torch.where(outside.unsqueeze(-1), self.project(at), near)
        return moved_to(x, near)

    def _traced(self, square: Tensor) -> Tensor:  # (..., n, n)
        """A multiple of trace t, of a matrix that has it to rounding."""
        t = tensor_of(self.trace).detach()
        eps = torch.finfo(t.dtype).eps
        t = t.double()
        trace = square.diagonal(dim1=-2, dim2=-1).sum(-1)
        off = (trace > 0) & ((trace - t).abs() > 2 * eps * t)
        return square * torch.where(off, t / or_one(trace), 1)[..., None, None]

    def violation(self, x: Tensor) -> Tensor:
        """The largest of −λ_min, |tr X − t| and |X_ij − X_ji|."""
        return self._excess(x).to(x.dtype)

    def diameter(self, n: int) -> Tensor:
        """2^½ t, 0 for one entry."""
        return self._simplex.diameter(math.isqrt(n))

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> SpectraplexFace:
        """Matrices of the rank of x, told like a face of the simplex from the eigenvalues.

        What a coordinate and its slope are there are here λ_i and v_iᵀ g v_i.
        """
        values, vectors = _eigen(_symmetric(x))
        slope = _symmetric(g.detach())
        n = values.shape[-1]
        unit = torch.finfo(x.dtype).eps * n
        largest = values[..., -1:].clamp_min(0)
        values = torch.where(values > 4 * unit * largest, values, 0)
        pull = (vectors * (slope @ vectors)).sum(-2)
        if scale is not None:
            scale = scale.whole()
            # rounding of the entries of x moves every eigenvalue
            scale = scale.noisier(scale.curvature * unit * largest)
        outer = self._simplex.face(values, pull, scale)
        frozen = (tensor_of(self.trace).detach() == 0).unsqueeze(-1).expand_as(x[..., :1])
        alive = outer.free & (values > 0) & ~frozen
        multiplier = torch.where(frozen, 0, outer.multiplier)
        basis = vectors * alive.unsqueeze(-2)
        eye = torch.eye(n, dtype=x.dtype, device=x.device)
        beside = eye - basis @ basis.mT
        held = beside @ (slope + multiplier.unsqueeze(-1) * eye) @ beside
        # away from a solution x may be of too low a rank; negative curvature is for f alone
        strength, axes = _eigen(0.5 * (held + held.mT))
        outside = _product(axes, strength.clamp_min(0))
        values = torch.where(alive, values, 1)
        return SpectraplexFace(tensor_of(self.trace), x, basis, values, multiplier, outside, frozen)

    def _excess(self, x: Tensor) -> Tensor:  # (..., n²) -> (...), in double precision
        square = _square(x.detach()).double()
        least = -_eigen(0.5 * (square + square.mT))[0][..., 0]
        trace = square.diagonal(dim1=-2, dim2=-1).sum(-1)
        missed = (trace - tensor_of(self.trace).detach().double()).abs()
        apart = (square - square.mT).abs().amax((-2, -1))
        return torch.maximum(torch.maximum(least, missed), apart)

    def _allowed(self, x: Tensor) -> Tensor:  # (...)
        """The rounding of n² entries, and that of eigenvalues."""
        units = 4 + 2 * math.sqrt(math.isqrt(x.shape[-1]))
        trace = tensor_of(self.trace).detach().double()
        return units * torch.finfo(x.dtype).eps * trace


@dataclass(frozen=True)
class SpectraplexFace(Face):
    """Positive semidefinite matrices of X's rank k and its trace.

    With X = V diag(λ) Vᵀ, a direction D is symmetric and has no part beside V on both sides.
    X + D is of rank k only with B diag(1/λ) Bᵀ there, B the part of D V beside V. With W ⪰ 0 the
    part of ∇f + μI there, μ the multiplier of the trace, that adds 2⟨W, B diag(1/λ) Bᵀ⟩ to the
    second derivative of the Lagrangian.
    """

    trace: Tensor
    x: Tensor  # (..., n²)
    basis: Tensor  # V (..., n, n), columns beyond the rank are zero
    values: Tensor  # λ (..., n), one beyond the rank
    multiplier: Tensor  # μ (..., 1)
    outside: Tensor  # W (..., n, n)
    frozen: Tensor  # (..., 1), trace 0

    bends = True

    def restrict(self, v: Tensor) -> Tensor:
        """The symmetric part of v without what is beside V on both sides."""
        matrix = _symmetric(v)
        along = self.basis @ (self.basis.mT @ matrix)
        return (along + along.mT - (along @ self.basis) @ self.basis.mT).flatten(-2)

    @cached_property
    def normals(self) -> tuple[Tensor, ...]:
        """V Vᵀ, the identity restricted."""
        return ((self.basis @ self.basis.mT).flatten(-2),)

    def curvature(self, v: Tensor) -> Tensor:
        """W B diag(1/λ) Vᵀ and its transpose."""
        bent = self.outside @ (_symmetric(v) @ self.basis)  # W has no part along V
        bent = (bent / self.values.unsqueeze(-2)) @ self.basis.mT
        return (bent + bent.mT).flatten(-2)

    def bent(self, u: Tensor) -> Tensor:
        """u + B (diag(λ) + VᵀuV)⁻¹ Bᵀ, of X's rank together with X."""
        along, across, down = split(_symmetric(u), self.basis, self.basis)
        return u + (down @ completed(self.values, along, across)).flatten(-2)

    def force(self) -> Tensor:
        """μ V Vᵀ, which does not depend on t."""
        return self.multiplier * self.normals[0]

    def excess(self) -> Tensor:
        """tr X − t, 0 where t = 0 and nothing moves."""
        trace = _square(self.x).diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        return torch.where(self.frozen, 0, trace - self.trace.unsqueeze(-1))


def _square(x: Tensor) -> Tensor:  # (..., n²) -> (..., n, n)
    n = math.isqrt(x.shape[-1])
    return x.reshape(*x.shape[:-1], n, n)


def _symmetric(x: Tensor) -> Tensor:  # (..., n²) -> (..., n, n)
    square = _square(x)
    return 0.5 * (square + square.mT)


def _eigen(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and vectors of the constant x; of zero where it is not finite."""
    finite = torch.isfinite(x.detach()).all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, x.detach(), 0))
    return values, vectors


def _product(vectors: Tensor, values: Tensor) -> Tensor:
    """V diag(λ) Vᵀ, symmetric to the last bit."""
    found = (vectors * values.unsqueeze(-2)) @ vectors.mT
    return 0.5 * (found + found.mT)
