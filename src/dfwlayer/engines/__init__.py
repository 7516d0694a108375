"""How a bound task is run.

An engine takes a `Task` and locates its solutions; `dfwlayer.solve` attaches the gradient and
certifies what any of them found. They are asked in the order of ``ENGINES``; the last one takes
everything. Another engine is one more module with a ``locate`` and one more entry here.

- `graph`: implicit solves by a recordable method over a recordable set on CUDA, from the second
  call with the same shapes on.
- `eager`: everything.

Before all of them `solve` asks `compiled`, which takes arguments as they were given and answers for
single problems of a batch, on a GPU by `programs`; what they leave becomes a task. Small ones that
are left on a GPU are taken to the CPU by `host`, where all of this is asked once more.
"""

from dfwlayer.engines import eager, graph
from dfwlayer.engines.base import Engine

__all__ = ["ENGINES"]

ENGINES: tuple[Engine, ...] = (graph, eager)
