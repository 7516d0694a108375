"""Methods: one file each; a name in ``METHODS`` is what ``method=`` accepts."""

from __future__ import annotations

from dfwlayer.methods.active_set import ActiveSet
from dfwlayer.methods.base import Method, Outcome, Problem, Settings
from dfwlayer.methods.dfw import DFW
from dfwlayer.methods.frank_wolfe import FrankWolfe
from dfwlayer.methods.polyhedral import InteriorPoint
from dfwlayer.methods.projected_newton import ProjectedNewton

__all__ = [
    "DFW",
    "METHODS",
    "ActiveSet",
    "FrankWolfe",
    "InteriorPoint",
    "Method",
    "Outcome",
    "Problem",
    "ProjectedNewton",
    "Settings",
]

METHODS: dict[str, Method] = {
    "active-set": ActiveSet(),
    "auto": ProjectedNewton(),
    "dfw": DFW(),
    "frank-wolfe": FrankWolfe(),
    "interior-point": InteriorPoint(),
    "projected-newton": ProjectedNewton(),
}
