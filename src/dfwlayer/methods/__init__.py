"""Methods: one file each; a name in ``METHODS`` is what ``method=`` accepts."""

from __future__ import annotations

from dfwlayer.methods.active_set import ActiveSet
from dfwlayer.methods.base import Method, Outcome, Problem, Settings
from dfwlayer.methods.dfw import DFW
from dfwlayer.methods.frank_wolfe import FrankWolfe
from dfwlayer.methods.projected_newton import ProjectedNewton
from dfwlayer.methods.sequential import SequentialQP

__all__ = [
    "DFW",
    "METHODS",
    "ActiveSet",
    "FrankWolfe",
    "Method",
    "Outcome",
    "Problem",
    "ProjectedNewton",
    "SequentialQP",
    "Settings",
]

METHODS: dict[str, Method] = {
    "active-set": ActiveSet(),
    "auto": ProjectedNewton(),
    "dfw": DFW(),
    "frank-wolfe": FrankWolfe(),
    "projected-newton": ProjectedNewton(),
    "sqp": SequentialQP(),
}
