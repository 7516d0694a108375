"""The systems compared on small problems, and the one signature they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import dfwlayer
from dfwlayer_bench.bench.ours import compiled_ahead, not_compiled
from dfwlayer_bench.bench.small import rivals
from dfwlayer_bench.bench.small.problems import SETS, Ball, Problem, reference_of, rows_of
from dfwlayer_bench.bench.turns import Passes, TimedSystem
from dfwlayer_bench.systems.base import load
from dfwlayer_bench.systems.rows import layers, solvers
from dfwlayer_bench.systems.rows.from_jax import jax_passes, prepare_qpax
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = ["SYSTEMS", "SmallSystem"]


@dataclass(frozen=True)
class SmallSystem(TimedSystem[Problem]):
    """One that may not take all sets: ``sets`` are the keys of ``SETS`` that it does."""

    sets: tuple[str, ...] = tuple(SETS)


def _ours(problem: Problem) -> Passes:
    constraint = problem.set.constraint()

    def x_of(q: Tensor) -> Tensor:
        return dfwlayer.solve(dfwlayer.Quadratic(problem.P, q), constraint, tol=TOL).x

    return Passes.of(x_of, problem.q, problem.value, {"tol": TOL})


class _Known(torch.autograd.Function):
    """A solution and a gradient that were there before, handed on."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient.clone(), None, None


def _floor(problem: Problem) -> Passes:
    """What PyTorch takes for any function that is written in Python."""
    found = reference_of(problem)

    def x_of(q: Tensor) -> Tensor:
        x: Tensor = _Known.apply(q, found.x, found.gradient)  # type: ignore[no-untyped-call]
        return x

    return Passes.of(x_of, problem.q, problem.value, {})


def _from_jax(problem: Problem) -> Passes:
    library, given = load("dfwlayer.integrations.jax"), problem.set
    parameters = (given.radius,) if isinstance(given, Ball) else ()

    def x_of(q: Any, P: Any, *radius: Any) -> Any:
        body = replace(given, radius=radius[0]) if radius else given
        return library.solve(library.Quadratic(P, q), body.constraint(library), tol=TOL).x

    return jax_passes(x_of, problem.q, problem.v, (problem.P, *parameters), {"tol": TOL})


def _on_rows(prepare: Callable[[Rows], Passes]) -> Callable[[Problem], Passes]:
    return lambda problem: _narrowed(prepare(rows_of(problem)), problem.n)


def _narrowed(passes: Passes, n: int) -> Passes:
    """The first n variables, where rows have more of them."""
    forward, both = passes.forward, passes.both

    def narrowed() -> tuple[Tensor, Tensor]:
        assert both is not None
        x, gradient = both()
        return x[..., :n], gradient[..., :n]

    return replace(
        passes, forward=lambda: forward()[..., :n], both=None if both is None else narrowed
    )


TOL = 1e-12  # of the gap, relative to f
POLYHEDRA = ("box", "simplex", "capped-simplex", "portfolio", "turnover")
DEFINITE = POLYHEDRA[:-1]  # whose P is, with rows
PROJECTED = tuple(name for name in SETS if name != "turnover")  # in JAX

SYSTEMS: dict[str, SmallSystem] = {
    system.name: system
    for system in (
        SmallSystem("dfwlayer", "dfwlayer", compiled_ahead(_ours), ("numba",)),
        SmallSystem("dfwlayer-eager", "dfwlayer, not compiled", not_compiled(_ours)),
        SmallSystem("floor", "autograd alone, x known", _floor),
        SmallSystem(
            "dfwlayer-jax",
            "dfwlayer from JAX",
            compiled_ahead(_from_jax),
            ("jax", "numba"),
            PROJECTED,
        ),
        SmallSystem("jaxopt", "jaxopt", rivals.prepare_jaxopt, ("jaxopt", "jax"), PROJECTED),
        SmallSystem("qpax", "qpax", _on_rows(prepare_qpax), ("qpax", "jax"), POLYHEDRA),
        SmallSystem(
            "proxqp",
            "QPLayer (proxsuite)",
            _on_rows(layers.prepare_qplayer),
            ("proxsuite",),
            POLYHEDRA,
        ),
        SmallSystem(
            "moreau", "Moreau, batched", _on_rows(layers.prepare_moreau), ("moreau",), POLYHEDRA
        ),
        SmallSystem(
            "dqp",
            "dQP over PIQP",
            _on_rows(layers.prepare_dqp),
            ("libdqp", "qpsolvers", "piqp"),
            POLYHEDRA,
        ),
        SmallSystem("optnet", "OptNet", _on_rows(layers.prepare_optnet), (), DEFINITE),
        SmallSystem("daqp", "DAQP, forward only", rivals.prepare_daqp, ("daqp",), POLYHEDRA),
        SmallSystem(
            "piqp", "PIQP, forward only", _on_rows(solvers.prepare_piqp), ("piqp",), POLYHEDRA
        ),
        SmallSystem(
            "clarabel",
            "Clarabel, forward only",
            _on_rows(solvers.prepare_clarabel),
            ("clarabel", "scipy"),
            POLYHEDRA,
        ),
        SmallSystem(
            "osqp",
            "OSQP, forward only",
            _on_rows(solvers.prepare_osqp),
            ("osqp", "scipy"),
            POLYHEDRA,
        ),
    )
}
