"""Graphs of solves for backward passes that come later, under tickets that are numbers.

A program that records no graph of torch, such as one of JAX, hands the ticket of a solve from its
forward pass to its backward pass. What is answered is never a matter of the ticket: the numbers
have to be those of the solve.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Graph", "gradients_of", "keep"]


class Graph(NamedTuple):
    """A solve as autograd has recorded it."""

    of: Hashable  # what was called
    given: Sequence[Tensor]  # and with what, in memory of its own
    outs: Sequence[Tensor]

    def gradients(
        self, at: Sequence[Tensor], wanted: Sequence[int], seeds: dict[int, Tensor]
    ) -> tuple[Tensor, ...] | None:
        """Those in some tensors; None unless it was called with these numbers."""
        for own, t in zip(self.given, at, strict=False):  # the start is another one
            if own.shape != t.shape or not torch.equal(own, t):
                return None
        if any(seed.shape != self.outs[i].shape for i, seed in seeds.items()):
            return None
        inputs, outs = [self.given[i] for i in wanted], [self.outs[i] for i in seeds]
        if not all(t.requires_grad for t in (*inputs, *outs)):
            return None
        return torch.autograd.grad(
            outs, inputs, list(seeds.values()), retain_graph=True, materialize_grads=True
        )


class _Graphs:
    """The last solves of which a gradient is going to be asked for, by their tickets.

    A backward pass that comes later, or with other numbers, solves once more.
    """

    MOST = 2**23  # numbers in all, and a quarter of them for one

    def __init__(self) -> None:
        self._known: dict[int, Graph] = {}
        self._sizes: dict[int, int] = {}
        self._last, self._lock = 0, threading.Lock()
        self.get = self._known.get

    def keep(self, graph: Graph) -> int:
        """The ticket, 0 for what is too large."""
        size = sum([t.numel() for t in graph.given])
        if 4 * size > self.MOST:
            return 0
        with self._lock:
            self._last = self._last % (2**31 - 1) + 1
            self._known[self._last], self._sizes[self._last] = graph, size
            while sum(self._sizes.values()) > self.MOST or len(self._known) > 64:
                first = next(iter(self._known))
                del self._known[first], self._sizes[first]
            return self._last


_graphs = _Graphs()


def keep(graph: Graph) -> int:
    """The ticket of a graph, 0 for what is too large."""
    return _graphs.keep(graph)


def gradients_of(
    ticket: Tensor,
    of: Hashable,
    at: Sequence[Tensor],
    wanted: Sequence[int],
    seeds: dict[int, Tensor],
) -> tuple[Tensor, ...] | None:
    """Gradients in some tensors from those in outputs, None where no graph is kept for these."""
    number = int(ticket.reshape(-1)[0].item()) if ticket.numel() else 0
    graph = _graphs.get(number)
    if graph is None or graph.of != of:
        return None
    return graph.gradients(at, wanted, seeds)
