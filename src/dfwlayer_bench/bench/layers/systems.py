"""The systems compared as layers, and the one signature they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dfwlayer_bench.bench.layers import rivals
from dfwlayer_bench.bench.layers.problems import Posed
from dfwlayer_bench.bench.ours import compiled_ahead
from dfwlayer_bench.bench.turns import Passes, TimedSystem
from dfwlayer_bench.systems.rows import layers, solvers
from dfwlayer_bench.systems.rows.from_jax import prepare_qpax
from dfwlayer_bench.systems.rows.problem import Rows

__all__ = ["SYSTEMS", "LayerSystem"]

PROJECTIONS = ("polytope", "simplex", "assignment", "paths")
KINDS = ("program", *PROJECTIONS)
HULLS = ("assignment", "paths")
TOL = 1e-12  # of the gap, relative to f


@dataclass(frozen=True)
class LayerSystem(TimedSystem[Posed]):
    """One that may not take all kinds of problems.

    Attributes:
        kinds: Those of `Posed.kind` that it takes.
        samples: Whether it returns a mean over noise, which is another point than the solution
            and is measured against its own expectation.

    """

    kinds: tuple[str, ...] = KINDS
    samples: bool = False


def _ours(custom: bool) -> Callable[[Posed], Passes]:
    def prepare(posed: Posed) -> Passes:
        return Passes.of(
            lambda data: posed.solve(data, custom=custom, tol=TOL),
            posed.rows.data,
            posed.rows.value,
            {"tol": TOL},
        )

    return compiled_ahead(prepare)


def _on_rows(prepare: Callable[[Rows], Passes]) -> Callable[[Posed], Passes]:
    return lambda posed: prepare(posed.rows)


SYSTEMS: dict[str, LayerSystem] = {
    system.name: system
    for system in (
        LayerSystem("dfwlayer", "dfwlayer", _ours(custom=False), ("numba", "scipy")),
        LayerSystem(
            "dfwlayer-custom",
            "dfwlayer, CustomSet",
            _ours(custom=True),
            ("numba", "scipy"),
            HULLS,
        ),
        LayerSystem("dc3", "DC3", rivals.prepare_dc3),
        LayerSystem("optnet", "OptNet", _on_rows(layers.prepare_optnet)),
        LayerSystem("qpax", "qpax", _on_rows(prepare_qpax), ("qpax", "jax")),
        LayerSystem(
            "proxqp", "QPLayer (proxsuite)", _on_rows(layers.prepare_qplayer), ("proxsuite",)
        ),
        LayerSystem("moreau", "Moreau, batched", _on_rows(layers.prepare_moreau), ("moreau",)),
        LayerSystem(
            "dqp", "dQP over PIQP", _on_rows(layers.prepare_dqp), ("libdqp", "qpsolvers", "piqp")
        ),
        LayerSystem("pinet", "Πnet", rivals.prepare_pinet, ("pinet-hcnn", "jax"), PROJECTIONS),
        LayerSystem(
            "entmax", "entmax (sparsemax)", rivals.prepare_entmax, ("entmax",), ("simplex",)
        ),
        LayerSystem("jaxopt", "jaxopt", rivals.prepare_jaxopt, ("jaxopt", "jax"), ("simplex",)),
        LayerSystem(
            "frank-wolfe",
            "regularised Frank-Wolfe (InferOpt's)",
            rivals.prepare_frank_wolfe,
            ("scipy",),
            HULLS,
        ),
        LayerSystem("pyepo", "PyEPO, regularised", rivals.prepare_pyepo, ("pyepo", "scipy"), HULLS),
        LayerSystem(
            "perturbed", "perturbed", rivals.prepare_perturbed, ("scipy",), HULLS, samples=True
        ),
        LayerSystem(
            "pyepo-perturbed",
            "PyEPO, perturbed",
            rivals.prepare_pyepo_perturbed,
            ("pyepo", "scipy"),
            HULLS,
            samples=True,
        ),
        LayerSystem(
            "clarabel",
            "Clarabel, forward only",
            _on_rows(solvers.prepare_clarabel),
            ("clarabel", "scipy"),
        ),
        LayerSystem(
            "osqp", "OSQP, forward only", _on_rows(solvers.prepare_osqp), ("osqp", "scipy")
        ),
        LayerSystem("piqp", "PIQP, forward only", _on_rows(solvers.prepare_piqp), ("piqp",)),
    )
}
