"""The memory that recorded solves hold on a GPU; see `dfwlayer.ops.graphs`."""

from dfwlayer.ops.graphs import clear_graphs

__all__ = ["clear_graphs"]
