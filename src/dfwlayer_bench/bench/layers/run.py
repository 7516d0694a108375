"""The cells of the layer suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dfwlayer_bench.bench.layers.problems import Posed, Reference, make, reference_of
from dfwlayer_bench.bench.layers.systems import SYSTEMS
from dfwlayer_bench.bench.small.problems import largest_error
from dfwlayer_bench.bench.turns import NamedCell, Passes, no_problem, prepared
from dfwlayer_bench.systems.base import absent

__all__ = ["LayerCell", "ready"]


@dataclass
class LayerCell(NamedCell):
    """One system on one problem."""

    count: int | None = None
    n: int | None = None
    error: float | None = None  # the largest of x, see `largest_error`
    gradient_error: float | None = None
    violation: float | None = None  # of a row
    excess: float | None = None  # the largest f(x) − f*, against max(1, |f*|)
    residual: float | None = None  # of the reference


def ready(seed: int, first: LayerCell) -> Callable[[LayerCell], Passes | None]:
    """What prepares the systems for the problem of a cell."""
    try:
        posed = make(first.problem, seed)
        reference = reference_of(posed)
    except ModuleNotFoundError as error:
        return no_problem("missing", absent([error.name or "a package"]))
    return lambda cell: _prepare(cell, posed, reference)


def _prepare(cell: LayerCell, posed: Posed, reference: Reference) -> Passes | None:
    system, rows = SYSTEMS[cell.system], posed.rows
    cell.count, cell.n = rows.q.shape

    def measure(x: Tensor, gradient: Tensor | None) -> None:
        cell.residual = reference.residual
        cell.violation = rows.violation(x)
        exact, slope = reference.x, reference.gradient
        if system.samples:
            exact, slope = posed.expectation
        else:
            q, _ = rows.split(rows.data)
            least = rows.objective(reference.x, q)
            above = (rows.objective(x, q) - least) / least.abs().clamp_min(1)
            cell.excess = float(above.max())
        cell.error = largest_error(x, exact)
        if gradient is not None:
            cell.gradient_error = largest_error(gradient, slope)

    unsupported = "" if posed.kind in system.kinds else "takes " + ", ".join(system.kinds)
    return prepared(cell, system, unsupported, lambda: system.prepare(posed), measure)
