"""Calls of this library as single operators of torch.

A compiler, an exporter or a tracer cannot follow a solve, whose steps depend on the data. It meets
one operator instead (`operators`, `registration`), which is told by a text what to call and with
what (`text`), and given the tensors beside it. `recordable` marks the functions that are called so.
"""

from __future__ import annotations

from dfwlayer.ops.recorded import registration as registration
from dfwlayer.ops.recorded.calls import recordable, uncompiled

__all__ = ["recordable", "uncompiled"]
