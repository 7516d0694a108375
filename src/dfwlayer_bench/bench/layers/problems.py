"""The problems of the suite: programs, projections, and points of a hull nearest to a score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import dfwlayer
from dfwlayer_bench.baselines.vertex_layers import Perturbed
from dfwlayer_bench.bench.layers.vertices import (
    Oracle,
    assignment_rows,
    best_assignment,
    cheapest_path,
    edges,
    path_rows,
)
from dfwlayer_bench.systems.base import load
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = ["PROBLEMS", "QUICK", "SIGMA", "Posed", "Reference", "make", "reference_of"]

F64 = torch.float64
SIGMA = 0.5  # of the noise in perturbed layers
MANY = 2000  # samples of the expectation that perturbed layers are measured against


@dataclass(frozen=True)
class Reference:
    """The answer to measure against, and how well it satisfies the optimality conditions."""

    x: Tensor  # (B, n)
    gradient: Tensor  # like the data, d(v·x)/d(data)
    residual: float


@dataclass(frozen=True)
class Posed:
    """A batch of programs, and what more is known of their kind.

    Attributes:
        kind: "program", "polytope", "simplex", "assignment" or "paths".
        rows: The programs; P is the identity but for "program".
        draw: Data of so many further problems, from the same distribution.
        constraint: The set as the library has it, with b as given.
        oracle: The vertices, for sets that have one.

    """

    kind: str
    rows: Rows
    draw: Callable[[int, torch.Generator], Tensor]
    constraint: Callable[[Tensor], Any]
    oracle: Oracle | None = None

    def vertex(self, costs: Tensor) -> Tensor:  # (B, n) -> (B, n)
        """The vertices with the least ⟨cost, vertex⟩."""
        assert self.oracle is not None
        return torch.from_numpy(self.oracle(costs.detach().numpy())).to(costs)

    def solve(self, data: Tensor, *, custom: bool = False, tol: float = 1e-12) -> Tensor:
        """The library's answer (B, n), over its own set or over one that is known by vertices."""
        q, b = self.rows.split(data)
        P = self.rows.P if self.kind == "program" else None
        body = dfwlayer.CustomSet(self.vertex, batched=True) if custom else self.constraint(b)
        return dfwlayer.solve(dfwlayer.Quadratic(P, q), body, tol=tol).x

    @cached_property
    def expectation(self) -> tuple[Tensor, Tensor]:
        """E argmin ⟨q + σZ, v⟩ by many samples, and the gradient of v·x in q."""
        layer = Perturbed(self.vertex, SIGMA, MANY, seed=1)
        theta = (-self.rows.q).requires_grad_()
        x = layer(theta)
        (gradient,) = torch.autograd.grad(self.rows.value(x), theta)
        return x.detach(), -gradient


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=F64)


def _uniform(*shape: int, generator: torch.Generator) -> Tensor:
    """In (−1, 1)."""
    return 2 * torch.rand(*shape, generator=generator, dtype=F64) - 1


def _polyhedron(rows: Rows) -> Callable[[Tensor], Any]:
    if torch.equal(rows.G, torch.eye(rows.n, dtype=F64)):
        return lambda b: dfwlayer.Polyhedron(A=rows.A, b=b, lower=rows.low, upper=rows.high)
    G, h = rows.one_sided()
    return lambda b: dfwlayer.Polyhedron(G=G, h=h, A=rows.A, b=b)


def _program(count: int, n: int, seed: int, projects: bool) -> Posed:
    """n/2 equations and n/2 inequalities of normal numbers, as in the convex programs of DC3.

    P is diagonal, P and q are uniform in (0, 1), b in (−1, 1), and h = Σ |G A⁺| row by row, so
    that A⁺b is feasible for every b. Problems differ in b. A projection has the identity for P,
    one b, and −q normal with the deviation 2.
    """
    generator = torch.Generator().manual_seed(seed)
    k = n // 2
    A, G = _normal(k, n, generator=generator), _normal(k, n, generator=generator)
    high = (G @ torch.linalg.pinv(A)).abs().sum(-1)
    P = torch.diag((_uniform(n, generator=generator) + 1) / 2)
    one = (_uniform(n, generator=generator) + 1) / 2

    def draw(size: int, generator: torch.Generator) -> Tensor:
        if projects:
            return 2 * _normal(size, n, generator=generator)
        return _uniform(size, k, generator=generator)

    v = _normal(count, n, generator=generator)
    b = _uniform(k, generator=generator) if projects else draw(count, generator)
    rows = Rows(
        P=torch.eye(n, dtype=F64) if projects else P,
        q=draw(count, generator) if projects else one.expand(count, n).contiguous(),
        G=G,
        low=torch.full_like(high, -math.inf),
        high=high,
        A=A,
        b=b,
        v=v,
        given="q" if projects else "b",
    )
    return Posed("polytope" if projects else "program", rows, draw, _polyhedron(rows))


def _random(count: int, n: int, m: int, k: int, seed: int) -> Posed:
    """m inequalities and k equations of normal numbers that a normal point satisfies, one for all.

    P = RᵀR/n + 0.1, R normal, and h leaves that point a slack in (0, 1). Problems differ in q, of
    normal numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    R, G = _normal(n, n, generator=generator), _normal(m, n, generator=generator)
    A, point = _normal(k, n, generator=generator), _normal(n, generator=generator)
    slack = (_uniform(m, generator=generator) + 1) / 2

    def draw(size: int, generator: torch.Generator) -> Tensor:
        return _normal(size, n, generator=generator)

    rows = Rows(
        P=R.mT @ R / n + 0.1 * torch.eye(n, dtype=F64),
        q=draw(count, generator),
        G=G,
        low=torch.full((m,), -math.inf, dtype=F64),
        high=G @ point + slack,
        A=A,
        b=A @ point,
        v=_normal(count, n, generator=generator),
        given="q",
    )
    return Posed("program", rows, draw, _polyhedron(rows))


def _hull(
    kind: str,
    n: int,
    A: Tensor,
    b: Tensor,
    constraint: Callable[[Tensor], Any] | None,
    oracle: Oracle | None,
    count: int,
    seed: int,
) -> Posed:
    """x ≥ 0 and Ax = b, and the point nearest to −q, of normal numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int, generator: torch.Generator) -> Tensor:
        return _normal(size, n, generator=generator)

    rows = Rows(
        P=torch.eye(n, dtype=F64),
        q=draw(count, generator),
        G=torch.eye(n, dtype=F64),
        low=torch.zeros(n, dtype=F64),
        high=torch.full((n,), math.inf, dtype=F64),
        A=A,
        b=b,
        v=_normal(count, n, generator=generator),
    )
    return Posed(kind, rows, draw, constraint or _polyhedron(rows), oracle)


def _simplex(count: int, n: int, seed: int) -> Posed:
    ones = torch.ones(1, n, dtype=F64)
    of = lambda _: dfwlayer.Simplex(1.0)  # noqa: E731
    return _hull("simplex", n, ones, ones[0, :1], of, None, count, seed)


def _assignment(count: int, side: int, seed: int) -> Posed:
    of = lambda _: dfwlayer.Birkhoff(side)  # noqa: E731
    rows = assignment_rows(side)
    return _hull("assignment", side * side, *rows, of, best_assignment, count, seed)


def _paths(count: int, side: int, seed: int) -> Posed:
    n, rows = len(edges(side)), path_rows(side)
    return _hull("paths", n, *rows, None, cheapest_path(side), count, seed)


# how each kind is made, its sizes in the suite, and those of `--quick`
KINDS: dict[str, tuple[Callable[..., Posed], tuple[int, ...], tuple[int, ...]]] = {
    "program": (partial(_program, projects=False), (100, 100), (4, 8)),
    "polytope": (partial(_program, projects=True), (100, 100), (4, 8)),
    "random": (_random, (128, 50, 50, 10), (4, 8, 8, 2)),
    "simplex": (_simplex, (128, 100), (4, 6)),
    "assignment": (_assignment, (32, 8), (4, 3)),
    "paths": (_paths, (32, 6), (4, 3)),
}
Made = dict[str, Callable[[int], Posed]]  # by name, from a seed
FULL: Made = {name: partial(made, *sizes) for name, (made, sizes, _) in KINDS.items()}
TINY: Made = {f"tiny-{name}": partial(made, *sizes) for name, (made, _, sizes) in KINDS.items()}
PROBLEMS: Made = FULL | TINY
QUICK = tuple(TINY)


def make(name: str, seed: int) -> Posed:
    """The problem of that name."""
    return PROBLEMS[name](seed)


def reference_of(posed: Posed, *, tol: float = 1e-9) -> Reference:
    """One dense solve on the rows that are active at the library's answer.

    With C the active rows and the equations and d their sides, x and the multipliers solve

        Px + q + Cᵀλ = 0,  Cx = d,

    and u, w solve the same system for v in place of −q and 0 in place of d: the gradient of v·x
    is −u in q and w in d. The answer is accepted only if x is feasible and there are multipliers
    λ ≥ 0 of the inequalities with which the first equation holds, found by non-negative least
    squares; the residual is what is missing, against the largest entry of ∇f.

    Raises:
        RuntimeError: If the residual is above ``tol``.

    """
    rows = posed.rows
    near = posed.solve(rows.data)
    G, h = rows.one_sided()
    q, b = rows.split(rows.data)
    found, gradients, residual = [], [], 0.0
    for i in range(rows.count):
        active = h - G @ near[i] <= 1e-7
        C = torch.cat([rows.A, G[active]])
        d = torch.cat([b[i], h[active]])
        system = torch.cat(
            [torch.cat([rows.P, C.mT], 1), torch.cat([C, C.new_zeros(len(C), len(C))], 1)]
        )
        # rows may depend on each other, as they do at the vertices of many polytopes
        inverse = torch.linalg.pinv(system, hermitian=True, rtol=1e-11)
        x = (inverse @ torch.cat([-q[i], d]))[: rows.n]
        adjoint = inverse @ torch.cat([rows.v[i], torch.zeros_like(d)])
        right = adjoint[rows.n : rows.n + len(rows.A)]
        gradients.append(-adjoint[: rows.n] if rows.given == "q" else right)
        found.append(x)
        force = rows.P @ x + q[i]
        missing = _unbalanced(force, rows.A, G[active]) / float(force.abs().max())
        outside = float((G @ x - h).max().clamp_min(0))
        residual = max(residual, missing, outside, float((C @ x - d).abs().max()))
    if not residual <= tol:
        raise RuntimeError(
            f"the reference leaves a residual of {residual:.1e}, above {tol:.1e}; try another seed"
        )
    return Reference(torch.stack(found), torch.stack(gradients), residual)


def _unbalanced(force: Tensor, A: Tensor, G: Tensor) -> float:
    """min ‖force + Aᵀν + Gᵀμ‖ over ν and μ ≥ 0."""
    columns = torch.cat([A, -A, G]).mT.numpy()
    return float(load("scipy.optimize").nnls(columns, -force.numpy())[1])
