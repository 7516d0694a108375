"""The local face of a polyhedron, and the linear system on it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dfwlayer.constraints.face import Face
from dfwlayer.linalg.face_system import FaceSystem
from dfwlayer.linalg.quadratic import Answer, Saddle, Thin, ThinFace
from dfwlayer.linalg.sparse import SparseMatrix, tracked_entries
from dfwlayer.ops.matrices import lu_solved
from dfwlayer.ops.rows import column, or_one

if TYPE_CHECKING:
    from dfwlayer.constraints.polyhedra.polyhedron import LinearSet
    from dfwlayer.objectives.base import Objective

__all__ = ["LinearFace", "face_of_answer", "saddle_system"]

ROUNDING = 64 * torch.finfo(torch.float64).eps  # of sums, relative to their terms


@dataclass(frozen=True)
class LinearFace(Face):
    """{x : A x = b, G_j x = h_j for the rows that hold x, x_i at its bound}.

    See `dfwlayer.constraints.Face`. The normals are the k equations and the a rows of G that hold
    the solution, as many as the most that a problem of the batch has.
    """

    constraint: LinearSet  # bound; its tensors are read where a gradient is asked for
    x: Tensor  # (..., n)
    free: Tensor  # (..., n)
    multiplier: Tensor  # (..., k + a)
    position: Tensor  # (..., a), which rows of G
    counts: Tensor  # (..., a), whether there is such a row
    bound: Tensor  # (..., n), 1 for a coordinate held by the upper bound, −1 for the lower one

    @cached_property
    def normals(self) -> tuple[Tensor, ...]:
        """Rows of A and G on the free coordinates."""
        return tuple((self._slopes().detach() * self.free.unsqueeze(-2)).unbind(-2))

    def force(self) -> Tensor:
        """Aᵀν + Gᵀλ."""
        A, _, G, _ = self.constraint.rows_of(self.x)
        k = A.shape[-2]
        nu, own = self.multiplier[..., :k], torch.where(self.counts, self.multiplier[..., k:], 0)
        blank = own.new_zeros(*own.shape[:-1], G.shape[-2])
        return _gathered(A, nu) + _gathered(G, blank.scatter(-1, self.position, own))

    def excess(self) -> Tensor:
        """A x − b and G_j x − h_j, in which coordinates at bounds move with these."""
        x = torch.where(self.free, self.x, self.pinned())
        A, _, G, _ = self.constraint.rows_of(self.x)
        picked = torch.gather(_along(G, x), -1, self.position)
        levels = torch.cat((_along(A, x), torch.where(self.counts, picked, 0)), -1)
        return levels - self._totals()

    def pinned(self) -> Tensor:
        """The bound that holds a coordinate, or 0."""
        lower, upper = self.constraint.bounds(self.x)
        high = torch.where(self.bound > 0, upper, 0)
        return torch.where(self.bound < 0, lower, high)

    def solved(self, target: Tensor) -> Tensor:
        """The point of the face nearest to another one, differentiable in it and in the rows."""
        n, slopes, pinned = self.x.shape[-1], self._slopes(), self.pinned()
        N = slopes * self.free.unsqueeze(-2)
        rest = self._totals() - (slopes @ pinned.unsqueeze(-1)).squeeze(-1)
        # rows that are none, or depend on others, have no force of their own
        ridge = 64 * torch.finfo(N.dtype).eps * or_one(N.detach().square().sum(-1))
        cross = N @ N.mT + torch.diag_embed(ridge)
        inside = torch.where(self.free, target, 0)
        lead = (N @ inside.unsqueeze(-1)).squeeze(-1) - rest
        if n == 0:
            return inside + pinned
        force = lu_solved(cross, lead.unsqueeze(-1))
        found: Tensor = inside - (N.mT @ force).squeeze(-1) + pinned
        return found

    def system(self, objective: Objective) -> FaceSystem | None:
        """By one factorisation, where the Hessian can be written down."""
        return self._sparse_system(objective) or saddle_system(objective, self)

    def _sparse_system(self, objective: Objective) -> FaceSystem | None:
        """That of sparse matrices, where rows and Hessian are."""
        x = self.x.detach()
        if not x.numel() or not self.constraint.takes_sparse(x) or not objective.quadratic:
            return None
        program = self.constraint.linear(x)
        sparse = objective.sparse_model(x)
        hessian = None if sparse is None else sparse.matrix
        if hessian is None and isinstance(program, Thin):
            written = objective.model(x)
            hessian = None if written is None else written.dense().matrix
        if hessian is None:
            return None
        return _SparseSystem(objective, self, x, Thin.of(program, hessian, program.q))

    def _slopes(self) -> Tensor:  # (..., k + a, n)
        A, _, G, _ = self.constraint.rows_of(self.x)
        n = self.x.shape[-1]
        index = self.position.unsqueeze(-1).expand(*self.position.shape, n)
        lead = self.x.shape[:-1]
        picked = torch.gather(G.expand(*lead, *G.shape[-2:]), -2, index)
        picked = torch.where(self.counts.unsqueeze(-1), picked, 0)
        return torch.cat((A.expand(*lead, *A.shape[-2:]), picked), -2)

    def _totals(self) -> Tensor:  # (..., k + a)
        _, b, _, h = self.constraint.rows_of(self.x)
        lead = self.x.shape[:-1]
        picked = torch.gather(h.expand(*lead, h.shape[-1]), -1, self.position)
        return torch.cat((b.expand(*lead, b.shape[-1]), torch.where(self.counts, picked, 0)), -1)


def face_of_answer(
    constraint: LinearSet,
    found: Answer,
    x: Tensor,  # (..., n)
    noise: Tensor,  # (B,), below which a multiplier counts as zero
) -> LinearFace:
    """The rows that hold x beyond doubt.

    A multiplier is compared with slopes, so it counts as the largest force that its row exerts.
    """
    m, n = found.z.shape[-1] - 2 * x.shape[-1], x.shape[-1]
    lead = x.shape[:-1]
    lost = (found.empty | found.endless).unsqueeze(-1)
    # forces that are larger than what they balance, as rows are an equation together, leave more
    noise = noise + ROUNDING * _terms(constraint, found, x)
    lengths = _lengths(constraint.rows_of(x)[2].detach()).to(found.z.dtype)
    pressed = torch.cat((found.z[:, :m] * lengths, found.z[:, m:]), -1)
    holds = found.active & (pressed > noise.unsqueeze(-1)) & ~lost
    rows, above, below = holds[:, :m], holds[:, m : m + n], holds[:, m + n :]
    lower, upper = (part.detach() for part in constraint.bounds(x))
    shut = (lower >= upper).expand(*lead, n).reshape(-1, n)
    above = above | (shut & ~below)
    most = int(rows.sum(-1).amax()) if rows.numel() else 0
    position = torch.argsort(rows.to(torch.int8), dim=-1, descending=True, stable=True)[:, :most]
    counts = torch.gather(rows, 1, position)
    force = torch.where(counts, torch.gather(found.z[:, :m], 1, position), 0)
    multiplier = torch.where(lost, 0, torch.cat((found.nu, force), -1)).to(x.dtype)
    bound = above.to(x.dtype) - below.to(x.dtype)
    return LinearFace(
        constraint,
        x,
        ((bound == 0) & ~lost).reshape(*lead, n),
        multiplier.reshape(*lead, multiplier.shape[-1]),
        position.reshape(*lead, most),
        counts.reshape(*lead, most),
        bound.reshape(*lead, n),
    )


def _terms(constraint: LinearSet, found: Answer, x: Tensor) -> Tensor:  # (..., n) -> (B,)
    """The largest sum of the terms of an entry of Aᵀν + Gᵀz."""
    A, _, G, _ = (part.detach() for part in constraint.rows_of(x))
    forces = found.nu.abs(), found.z[:, : found.z.shape[-1] - 2 * x.shape[-1]].abs()
    total = torch.zeros_like(found.x)
    for rows, force in zip((A, G), forces, strict=True):
        if rows.layout == torch.strided:
            total = total + _gathered(rows.abs().to(force.dtype), force)
            continue
        own = SparseMatrix.of(rows)  # sorted once for all
        size = own.entries.abs().to(force.dtype)
        total = total + SparseMatrix(own.pattern, size).adjoint(size, force)
    largest: Tensor = total.amax(-1) if total.shape[-1] else total.new_zeros(len(total))
    return largest


def _lengths(rows: Tensor) -> Tensor:  # (·, m, n) -> (·, m)
    """The largest entry of each row."""
    if rows.layout == torch.strided:
        return rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    own = SparseMatrix.of(rows)
    none = own.entries.new_zeros(rows.shape[0])
    return none.scatter_reduce(0, own.pattern.row.long(), own.entries.abs(), "amax")


def _along(rows: Tensor, x: Tensor) -> Tensor:  # (·, m, n), (..., n) -> (..., m)
    """The products of rows with x, differentiable in both."""
    if rows.layout == torch.strided:
        return (rows @ x.unsqueeze(-1)).squeeze(-1)
    return SparseMatrix.of(rows).product(tracked_entries(rows), x)


def _gathered(rows: Tensor, force: Tensor) -> Tensor:  # (·, m, n), (..., m) -> (..., n)
    """Σ force_j row_j, differentiable in both."""
    if rows.layout == torch.strided:
        return (force.unsqueeze(-2) @ rows).squeeze(-2)
    return SparseMatrix.of(rows).adjoint(tracked_entries(rows), force)


def saddle_system(
    objective: Objective, face: Face, free: Tensor | None = None
) -> FaceSystem | None:
    """The system on a face by one factorisation, None where the Hessian cannot be written down.

    ``free`` is the mask of a face that pins other directions by its normals.
    """
    x = face.x
    free = face.free if free is None else free
    if x.numel() == 0 or free is None:
        return None
    n = x.shape[-1]
    hessian = torch.eye(n, dtype=torch.float64, device=x.device).unsqueeze(0)
    if not objective.isotropic:
        model = objective.model(x)
        if model is None:
            return None
        hessian = model.dense().matrix.detach().reshape(-1, n, n)
    if face.bends:
        bend = face.curvature_diagonal()
        if bend is None:
            eye = torch.eye(n, dtype=x.dtype, device=x.device)
            units = eye.reshape(n, *[1] * (x.dim() - 1), n).expand(n, *x.shape)
            full = face.curvature(units).movedim(0, -1)
        else:
            full = torch.diag_embed(bend)
        hessian = hessian + full.detach().double().reshape(-1, n, n)
    return _SaddleSystem(objective, face, x, hessian, free)


class _Solved(FaceSystem):
    """The system on a face with many normals, for f with a Hessian that need not be definite."""

    @abstractmethod
    def _solved(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """u and ν for right-hand sides of both kinds of equations."""

    def _blank(self, v: Tensor) -> Tensor:
        return v.new_zeros(*v.shape[:-1], column(self.face.multiplier, v).shape[-1])

    def invert(self, v: Tensor) -> Tensor:
        return self._solved(v, self._blank(v))[0]

    def multiplier(self, rest: Tensor) -> Tensor:
        return self._solved(rest, self._blank(rest))[1]

    def across(self, c: Tensor) -> Tensor:
        return self._solved(torch.zeros_like(self.x), c)[0]


@dataclass(frozen=True)
class _SaddleSystem(_Solved):
    """By one dense factor."""

    matrix: Tensor  # ∇²f + C in double precision, (1, n, n) or (B, n, n)
    free: Tensor  # (..., n)

    @cached_property
    def _saddle(self) -> Saddle:
        n = self.x.shape[-1]
        N = (
            torch.stack(self.face.normals, -2)
            if self.face.normals
            else self.x[..., None, :][..., :0, :]
        )
        free = self.free.reshape(-1, n)
        return Saddle.of(self.matrix, N.double().reshape(len(free), N.shape[-2], n), free)

    def _solved(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        n, k = v.shape[-1], c.shape[-1]
        right = v.double().reshape(-1, n)
        u, nu = self._saddle.solve(right, c.double().reshape(len(right), k))
        return u.to(v.dtype).reshape(v.shape), nu.to(v.dtype).reshape(c.shape)


@dataclass(frozen=True)
class _SparseSystem(_Solved):
    """By one sparse factor, for one problem."""

    program: Thin

    @cached_property
    def _thin(self) -> ThinFace:
        face, program = self.face, self.program
        assert isinstance(face, LinearFace)
        n, rows = self.x.shape[-1], torch.zeros_like(program.h, dtype=torch.bool)
        rows[0, face.position.reshape(-1)[face.counts.reshape(-1)]] = True
        bounds = torch.zeros(1, 2 * n, dtype=torch.bool)  # these coordinates are not free
        return ThinFace(program, torch.cat((rows, bounds), -1), face.free.reshape(1, n))

    def _solved(self, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        face, program = self.face, self.program
        assert isinstance(face, LinearFace)
        k, place = program.b.shape[-1], face.position.reshape(1, -1)
        right = c.detach().double().reshape(1, -1)
        blank = torch.zeros_like(program.h)
        rows = blank.scatter(1, place, torch.where(face.counts.reshape(1, -1), right[:, k:], 0))
        u, nu = self._thin.solve(
            v.detach().double().reshape(1, -1), torch.cat((right[:, :k], rows), -1)
        )
        own = torch.cat((nu[:, :k], torch.gather(nu[:, k:], 1, place)), -1)
        return u.to(v.dtype).reshape(v.shape), own.to(v.dtype).reshape(c.shape)
