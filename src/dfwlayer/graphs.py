"""The memory that recorded solves hold on a GPU; see `dfwlayer.engines.graphs`."""

from dfwlayer.engines.graphs import clear_graphs

__all__ = ["clear_graphs"]
