"""All points that satisfy linear inequalities and equations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dfwlayer.constraints.base import Constraint
from dfwlayer.constraints.minimum import Minimum
from dfwlayer.constraints.parameters import entries, matrix, merged
from dfwlayer.constraints.plain import Plain, PlainFlat, PlainRows
from dfwlayer.constraints.polyhedra.linear_face import LinearFace, face_of_answer
from dfwlayer.constraints.polyhedra.rows import check_rows, out_of_reach, rows_bound
from dfwlayer.constraints.region import Linear
from dfwlayer.constraints.retraction import moved_to
from dfwlayer.linalg.quadratic import (
    Answer,
    Program,
    Thin,
    duality_gap,
    least_value,
    minimise,
    minimise_on,
    pays,
    thinned,
)
from dfwlayer.linalg.quadratic.thin import DENSE
from dfwlayer.linalg.sparse import check_sparse
from dfwlayer.linalg.sparse_factor import as_csr, no_entries
from dfwlayer.ops.rows import norm
from dfwlayer.ops.scale import Scale
from dfwlayer.ops.values import Value, tensor_of

__all__ = ["LinearSet", "Polyhedron"]

KEPT = 2**22  # entries, zeros included, beyond which sparse rows stay sparse
LARGEST = 2**25  # the same, beyond which they are never made dense
ROUNDING = 64  # units in the last place of the terms of a row by which it may be missed
MET = 2  # the same of points that steps have just found


class LinearSet(Constraint):
    """{x : G x ≤ h, A x = b, l ≤ x ≤ u}, from its rows and bounds; any part may be missing.

    The default method is "sqp".
    """

    @property
    def preferred_method(self) -> str:
        """What "auto" means for it."""
        return "sqp"

    def rows_of(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A, b, G and h for vectors like this one (..., n), differentiable.

        A and G are (m, n) or (B, m, n), where all problems share them maybe sparse; without rows,
        m is 0.
        """
        blank = like.new_zeros(0, like.shape[-1])
        return blank, blank[:, 0], blank, blank[:, 0]

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """l and u, infinite where there are none, differentiable."""
        return like.new_full((), -torch.inf), like.new_full((), torch.inf)

    def linear(self, like: Tensor) -> Program | Thin:
        """The rows and bounds, with f = 0; by sparse matrices where a dense one is too large."""
        n = like.shape[-1]
        q = torch.zeros_like(like.detach(), dtype=torch.float64).reshape(-1, n)
        batch = len(q)
        A, b, G, h = self.rows_of(like)
        h, b = (part.detach().double().expand(batch, part.shape[-1]) for part in (h, b))
        lower, upper = (
            part.detach().double().expand(batch, n).contiguous() for part in self.bounds(like)
        )
        if self._is_sparse(like):
            if not self.takes_sparse(like):
                raise ValueError(
                    "constraint: sparse rows with more than 2²² entries, zeros included, are for "
                    "one problem on the CPU, and for SciPy (pip install dfwlayer[sparse]); found "
                    f"{batch} problems on {like.device}: solve them one by one, or pass "
                    "G.to_dense() and A.to_dense()"
                )
            thin = [as_csr(part if part.dim() == 2 else part[0]) for part in (G, A)]
            return Thin(no_entries(n), thin[0], thin[1], q, h, b, lower, upper)
        G, A = (part.detach().double() for part in (G, A))
        return Program(
            q.new_zeros(1, 1, 1).expand(1, n, n),
            q,
            G if G.dim() == 3 else G.unsqueeze(0),
            h,
            A if A.dim() == 3 else A.unsqueeze(0),
            b,
            lower,
            upper,
        )

    def _is_sparse(self, like: Tensor) -> bool:
        """Whether there are sparse rows, or a dense matrix is too large for one problem."""
        A, _, G, _ = self.rows_of(like)
        large = like.shape[-1] > DENSE and self.takes_sparse(like)
        return large or any(part.layout != torch.strided for part in (A, G))

    def takes_sparse(self, like: Tensor) -> bool:
        """For one problem on the CPU where SciPy is, if rows are sparse too."""
        A, _, G, _ = self.rows_of(like)
        return pays(like, A, G)

    # what a set writes

    def start(self, like: Tensor) -> Tensor:
        """The point next to zero."""
        return self.project(torch.zeros_like(like))

    def vertex(self, g: Tensor) -> Tensor:
        """By interior-point steps; a linear program has no other closed form."""
        program = self.linear(g)
        found = minimise(thinned(program.tilted(g.detach().double().reshape(program.q.shape))))
        if bool(found.endless.any()):
            raise ValueError(
                "constraint: expected a set that is bounded where ⟨g, x⟩ falls, found a "
                f"{type(self).__name__} that is not; add bounds, or use the method 'sqp'"
            )
        return self._met(_placed(found, g))

    def soft_vertex(self, g: Tensor, temperature: float) -> Tensor:
        """The minimiser of ⟨g, s⟩ + τ/2 ‖s‖², the projection of −g/τ."""
        if self._is_sparse(g):
            raise ValueError(
                f"constraint: a {type(self).__name__} with sparse rows, or one of more than "
                f"{DENSE} coordinates, has no soft vertex; use the method 'auto'"
            )
        target = -g / temperature
        with torch.no_grad():
            program = self.linear(g)
            point = target.double().reshape(program.q.shape)
            found = minimise(thinned(program.towards(point)))
            noise = 64 * torch.finfo(g.dtype).eps * (point.abs() + found.x.abs()).amax(-1)
            x = self._met(found.x.to(g.dtype).reshape(g.shape))
            face = face_of_answer(self, found, x, noise)
        if not torch.is_grad_enabled():
            return x
        moves = face.solved(target)  # in value x, but for the digits that a far target takes
        return x + (moves - moves.detach())

    def project(self, z: Tensor, near: Tensor | None = None) -> Tensor:
        """By interior-point steps."""
        return self._met(self._nearest(z))

    def _nearest(self, z: Tensor) -> Tensor:
        """The projection, as exact as the steps make it."""
        program = self.linear(z)
        target = z.detach().double().reshape(program.q.shape)
        return _placed(minimise(thinned(program.towards(target))), z)

    def _met(self, x: Tensor) -> Tensor:
        """x, or where steps from far away have left rows missed, the point of the set next to it.

        A cost or a point that is 1e20 times as large as the set takes the last digits of x.
        """
        missed = self._excess(x, rounding=MET / ROUNDING) > 0
        if not bool(missed.any()):
            return x
        return torch.where(missed.unsqueeze(-1), self._nearest(x), x)

    def settled(self, x: Tensor, z: Tensor) -> Tensor:
        """The projection x of z where a formula has found it; where x misses a row, by steps."""
        missed = ~(self._excess(x) <= 0)
        if not bool(missed.any()):
            return x
        return torch.where(missed.unsqueeze(-1), LinearSet.project(self, z), x)

    def retract(self, x: Tensor) -> Tensor:
        """x between the bounds where that satisfies all rows to rounding, else the projection."""
        at = self.clipped(x.detach())
        outside = self._excess(at) > 0
        if not bool(outside.any()):
            return moved_to(x, at)
        return moved_to(x, torch.where(outside.unsqueeze(-1), self.project(at), at))

    def clipped(self, x: Tensor) -> Tensor:
        """x between the bounds."""
        lower, upper = (part.detach() for part in self.bounds(x))
        return torch.minimum(torch.maximum(x, lower), upper)

    def violation(self, x: Tensor) -> Tensor:
        """The largest amount by which a row or a bound is missed."""
        return self._excess(x.detach(), rounding=0.0)

    def diameter(self, n: int) -> Tensor:
        """‖u − l‖, or infinity."""
        lower, upper = self.bounds(self.blank(n))
        size: Tensor = norm((upper - lower).detach().expand(*lower.shape[:-1], n))
        return size

    def face(self, x: Tensor, g: Tensor, scale: Scale | None = None) -> LinearFace:
        """The rows without slack whose multipliers hold x, found by projecting −g.

        The projection d of −g onto the directions that the rows without slack leave has their
        multipliers; at a solution d = 0.
        """
        program = self.linear(x)
        at = x.detach().double().reshape(program.q.shape)
        limits = program.limits
        slack = torch.where(torch.isfinite(limits), limits - program.across(at), torch.inf)
        tight = slack <= self._rounding(program, at, x.dtype)
        m, n = program.G.shape[-2:]
        cone = program.towards(-g.detach().double().reshape(at.shape)).between(
            torch.where(tight[:, :m], 0, torch.inf).to(at),
            torch.zeros_like(program.b),
            torch.where(tight[:, m + n :], 0, -torch.inf).to(at),
            torch.where(tight[:, m : m + n], 0, torch.inf).to(at),
        )
        found = minimise_on(thinned(cone), tight)
        noise = 64 * torch.finfo(x.dtype).eps * g.detach().abs().amax(-1)
        if scale is not None:
            noise = torch.maximum(noise, scale.noise.amax(-1))
        return face_of_answer(self, found, x, noise.reshape(-1))

    def as_polyhedron(self, like: Tensor) -> Polyhedron:
        """The same rows and bounds."""
        A, b, G, h = self.rows_of(like)
        bounds = (part.expand(*part.shape[:-1], like.shape[-1]) for part in self.bounds(like))
        return Polyhedron(G, h, A, b, *bounds).as_bound()

    def lowest(self, g: Tensor) -> Tensor:
        """What the multipliers of the linear program prove, −∞ where there is no least value."""
        program = self.linear(g)
        slope = g.detach().double().reshape(program.q.shape)
        value = least_value(thinned(program.tilted(slope)))
        return value.to(g.dtype).reshape(g.shape[:-1])

    def minimised(self, P: Tensor, q: Tensor, like: Tensor, most: int) -> _Minimum:
        """By interior-point steps, see `dfwlayer.linalg.quadratic`."""
        program = self.linear(like)
        if isinstance(program, Program) and P.layout == torch.strided:
            n = like.shape[-1]
            program = thinned(program._replace(P=P.reshape(-1, n, n), q=q))
        else:
            program = Thin.of(program, P, q)
        found = minimise(program, most)
        known = found.x, found.exact, found.empty, found.endless, found.steps, found.missed
        return _Minimum(*known, self, program, found)

    def _excess(self, x: Tensor, rounding: float = 1.0) -> Tensor:
        """By how much the worst row is missed, beyond rounding: (..., n) -> (...)."""
        program = self.linear(x)
        at = x.double().reshape(program.q.shape)
        allowed = rounding * self._rounding(program, at, x.dtype)
        limits = program.limits
        over = torch.where(torch.isfinite(limits), program.across(at) - limits, 0)
        worst = (over - allowed).amax(-1)
        if program.b.shape[-1]:
            size = program.absolute().along(_largest(at)) + program.b.abs()
            missed = program.along(at) - program.b
            least = rounding * ROUNDING * torch.finfo(x.dtype).eps * size
            worst = torch.maximum(worst, (missed.abs() - least).amax(-1))
        return worst.clamp_min(0).to(x.dtype).reshape(x.shape[:-1])

    def _rounding(self, program: Program | Thin, x: Tensor, dtype: torch.dtype) -> Tensor:
        """That of the terms of every row."""
        limits = program.limits
        rows = program.absolute().across(_largest(x))[:, : program.h.shape[-1]]
        terms = torch.cat((rows, x.abs(), x.abs()), -1)
        size = terms + torch.where(torch.isfinite(limits), limits.abs(), 0)
        return ROUNDING * torch.finfo(dtype).eps * size


@dataclass(frozen=True)
class Polyhedron(LinearSet):
    """{x : G x ≤ h, A x = b, l ≤ x ≤ u}; any part may be left out.

    Rows may be redundant, depend on each other or be zero. Where no point satisfies all of them the
    problem ends with status INFEASIBLE, and x is NaN; where f falls for ever, with UNBOUNDED.

    The default method is then "sqp".

    Args:
        G: (m, n) or (B, m, n), n the entries of a variable; dense, or if all problems share it
            sparse (COO or CSR).
        h: A number, (m,) or (B, m); infinity for a row that does not count.
        A: (k, n) or (B, k, n), likewise.
        b: A number, (k,) or (B, k).
        lower: l, a number, (*shape) or (B, *shape); None or −∞ where there is none.
        upper: u, likewise; None or ∞ where there is none.

    Sparse rows with up to 2²² entries, zeros included, are made dense. Larger ones stay sparse;
    they are for one problem on the CPU, and for SciPy (the extra ``sparse``).

    """

    G: Tensor | None = field(default=None, metadata=matrix(sparse=True))
    h: Value | None = field(
        default=None, metadata=entries(harmless=math.inf, infinite=True, grows=True, apart=True)
    )
    A: Tensor | None = field(default=None, metadata=matrix(sparse=True))
    b: Value | None = field(default=None, metadata=entries(harmless=0.0, grows=True, apart=True))
    lower: Value | None = field(
        default=None, metadata=entries(harmless=-math.inf, infinite=True, grows=True)
    )
    upper: Value | None = field(
        default=None, metadata=entries(harmless=math.inf, infinite=True, grows=True)
    )

    def __post_init__(self) -> None:
        for name in ("G", "A"):
            value: Any = getattr(self, name)
            if isinstance(value, Tensor) and value.layout != torch.strided:
                check_sparse(name, value)
                small = value.numel() <= KEPT
                value = value.to_dense() if small else value
                if value.layout == torch.sparse_coo:
                    value = value.coalesce()
                object.__setattr__(self, name, value)
        super().__post_init__()
        for left, right in (("G", "h"), ("A", "b")):
            rows, total = getattr(self, left), getattr(self, right)
            if (rows is None) != (total is None):
                missing, given = (left, right) if rows is None else (right, left)
                raise ValueError(f"{missing}: expected a tensor to go with {given}, got None")
            if rows is not None:
                check_rows(left, rows, right, total)

    def check_values(self) -> Tensor | None:
        """No side that is infinite where no point meets it; others are for the solver to tell."""
        sides = ("h", self.h, -math.inf), ("lower", self.lower, math.inf)
        return merged(*(out_of_reach(*side) for side in (*sides, ("upper", self.upper, -math.inf))))

    def bind(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Constraint:
        """Rows that have as many entries as the variable."""
        values = {
            right: rows_bound(left, rows, getattr(self, right), shape, dtype, device)
            for left, right in (("G", "h"), ("A", "b"))
            if (rows := getattr(self, left)) is not None
        }
        given = self.changed(**values) if values else self
        return super(Polyhedron, given).bind(shape, dtype, device)

    def rows_of(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A, b, G and h with no rows where there are none, differentiable."""
        n = like.shape[-1]
        blank = like.new_zeros(0, n)
        A = blank if self.A is None else self.A
        G = blank if self.G is None else self.G
        b = blank[:, 0] if self.b is None else tensor_of(self.b)
        h = blank[:, 0] if self.h is None else tensor_of(self.h)
        return A, b, G, h

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """l and u, infinite where there are none, differentiable."""
        low = like.new_full((), -torch.inf) if self.lower is None else tensor_of(self.lower)
        high = like.new_full((), torch.inf) if self.upper is None else tensor_of(self.upper)
        return low, high

    def is_plain(self, like: Tensor) -> bool:
        """And that rows have as many entries as the variable."""
        fits = (rows is None or rows.shape[-1] == like.shape[-1] for rows in (self.G, self.A))
        return super().is_plain(like) and all(fits)

    def normal_form(self, n: int) -> Sequence[Linear]:
        """The same as it was given."""
        return (
            Linear(
                n,
                -math.inf if self.lower is None else self.lower,
                math.inf if self.upper is None else self.upper,
                self.G,
                0.0 if self.h is None else self.h,
                self.A,
                0.0 if self.b is None else self.b,
            ),
        )

    def as_polyhedron(self, like: Tensor) -> Polyhedron:
        """The set itself, with dense rows."""
        given = {name: rows for name in ("G", "A") if (rows := getattr(self, name)) is not None}
        sparse = {name: rows for name, rows in given.items() if rows.layout != torch.strided}
        for name, rows in sparse.items():
            if rows.numel() > LARGEST:
                raise ValueError(
                    f"{name}: a sparse matrix of shape {tuple(rows.shape)} cannot be made dense, "
                    "as intersections with other sets and 'least-violation' need it; use a "
                    "Polyhedron by itself"
                )
        if not sparse:
            return self
        return self.changed(**{name: rows.to_dense() for name, rows in sparse.items()})

    def plain(self, *, fixed: bool = True) -> Plain:
        """By pivots; bounds alone are clipped to."""
        some = next((rows for rows in (self.G, self.A) if rows is not None), None)
        if some is None:
            lower = -math.inf if self.lower is None else self.lower
            return PlainFlat(lower, math.inf if self.upper is None else self.upper, None, 0.0, ())
        return self.plain_program(None, fixed=fixed)

    def plain_program(self, Q: Tensor | None, *, fixed: bool = True) -> PlainRows:
        """The minimiser of ½ xᵀQx − ⟨z, x⟩ for a Q (n, n) that is constant, None for I."""
        if not fixed:
            raise ValueError(
                "its rows come with the call, and a point that satisfies all of them, from which "
                "an answer is made feasible, has to be found beforehand; give rows that are "
                "constant"
            )
        if self.G is None and self.A is None:
            raise ValueError("it has no rows; give G and h, or A and b")
        (n,) = {rows.shape[-1] for rows in (self.G, self.A) if rows is not None}
        like = torch.zeros(n, dtype=torch.float64)
        A, b, G, h = (p.detach().cpu().double() for p in self.as_polyhedron(like).rows_of(like))
        low, high = (part.detach().cpu().double() for part in self.bounds(like))
        if max(A.dim(), G.dim()) > 2 or max(b.dim(), h.dim(), low.dim(), high.dim()) > 1:
            raise ValueError("its rows have a batch of their own; give rows that all share")
        eye = torch.eye(n, dtype=torch.float64)
        limits = h.expand(len(G)), high.expand(n), -low.expand(n)
        wide = None if Q is None else Q.detach().cpu().double()
        rows = torch.cat((G, eye, -eye)), torch.cat(limits)
        return PlainRows.of(*rows, A, b.expand(len(A)), wide)


@dataclass(frozen=True)
class _Minimum(Minimum):
    constraint: LinearSet
    program: Program | Thin
    answer: Answer

    def gap(self, x: Tensor, gradient: Tensor) -> Tensor:
        return duality_gap(self.program, self.answer, x, gradient)

    def face(self, x: Tensor, noise: Tensor) -> LinearFace:
        return face_of_answer(self.constraint, self.answer, x, noise)


def _largest(x: Tensor) -> Tensor:  # (B, n) -> (B, n)
    """max |x| in the place of each entry: all have its rounding."""
    return x.abs().amax(-1, keepdim=True).expand_as(x) if x.shape[-1] else x


def _placed(found: Answer, like: Tensor) -> Tensor:
    """Points in the dtype and shape of others, NaN where there is none."""
    x = torch.where(found.empty.unsqueeze(-1), torch.nan, found.x)
    return x.to(like.dtype).reshape(like.shape)
