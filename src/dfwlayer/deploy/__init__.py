"""Layers as modules of plain tensor operations, and the files they are exported to.

``layer.deploy(max_steps=k)`` makes the module, `deployed` replaces all layers of a model by
theirs, and `export` writes a file and checks it.
"""

from dfwlayer.deploy.check import Report, export
from dfwlayer.deploy.files import Call
from dfwlayer.deploy.module import (
    DeployedBall,
    DeployedProgram,
    DeployedSet,
    deployed,
)

__all__ = [
    "Call",
    "DeployedBall",
    "DeployedProgram",
    "DeployedSet",
    "Report",
    "deployed",
    "export",
]
