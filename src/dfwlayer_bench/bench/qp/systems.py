"""The systems compared on collected quadratic programs, and the one signature they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import dfwlayer
from dfwlayer_bench.bench.qp import rivals
from dfwlayer_bench.bench.qp.problems import Collected
from dfwlayer_bench.bench.qp.rivals import Said
from dfwlayer_bench.bench.turns import Passes
from dfwlayer_bench.systems.base import Packaged

__all__ = ["SYSTEMS", "QpSystem"]

LARGE = 600  # variables; beyond, matrices that are mostly zeros are handed over as sparse tensors


@dataclass(frozen=True)
class QpSystem(Packaged):
    """One row of the registry.

    Attributes:
        name: What ``--systems`` accepts.
        label: What tables print.
        prepare: Makes the forward pass ready; converting numbers is not timed. What the solver
            says of itself is written down at each call.
        packages: Distributions it needs beside torch.
        largest: Variables that it takes at most, as it would take too long.

    """

    name: str
    label: str
    prepare: Callable[[Collected, Said], Passes]
    packages: tuple[str, ...] = ()
    largest: int | None = None


def prepare_ours(problem: Collected, said: Said) -> Passes:
    """The library as it comes."""
    parts = problem.tensors()
    sparse = len(problem.q) > LARGE and rivals.is_thin(problem)
    if sparse:  # as the rivals get them
        parts = {
            name: part.to_sparse() if part.dim() == 2 else part for name, part in parts.items()
        }
    objective = dfwlayer.Quadratic(parts.pop("P"), parts.pop("q"))
    constraint = dfwlayer.Polyhedron(**parts)

    def forward() -> Tensor:
        found = dfwlayer.solve(objective, constraint)
        said.answer, said.gap = dfwlayer.Status(int(found.status)).name, float(found.gap)
        return found.x.detach()

    layout = "sparse" if sparse else "dense"
    return Passes(forward, None, {"dtype": str(torch.float64), "matrices": layout})


SYSTEMS: dict[str, QpSystem] = {
    system.name: system
    for system in (
        QpSystem("dfwlayer", "dfwlayer", prepare_ours),
        QpSystem("proxqp", "ProxQP", rivals.prepare_proxqp, ("proxsuite", "scipy")),
        QpSystem("piqp", "PIQP", rivals.prepare_piqp, ("piqp", "scipy")),
        QpSystem("daqp", "DAQP", rivals.prepare_daqp, ("daqp",), 1000),
        QpSystem("clarabel", "Clarabel", rivals.prepare_clarabel, ("clarabel", "scipy")),
        QpSystem("osqp", "OSQP", rivals.prepare_osqp, ("osqp", "scipy")),
    )
}
