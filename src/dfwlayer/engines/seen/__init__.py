"""Projections in tensor operations that a compiler sees through.

The operator by which a solve is recorded calls Python from inside of the graph, which costs more
than the projection of a small batch. Here nothing is asked for a value, so torch.compile makes
machine code of it together with the network around it.
"""

from dfwlayer.engines.seen.budget import project_in_sight
from dfwlayer.engines.seen.sets import set_in_sight

__all__ = ["project_in_sight", "set_in_sight"]
