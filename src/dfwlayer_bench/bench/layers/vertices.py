"""Sets that are known by an algorithm: the best assignment, the cheapest path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dfwlayer_bench.systems.base import load

__all__ = ["Oracle", "assignment_rows", "best_assignment", "cheapest_path", "edges", "path_rows"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Oracle = Callable[[Array], Array]  # costs (B, n) -> vertices (B, n) with the least ⟨cost, vertex⟩


def best_assignment(costs: Array) -> Array:
    """Permutation matrices, (B, k²) to (B, k²), by SciPy's algorithm."""
    assign = load("scipy.optimize").linear_sum_assignment
    k = math.isqrt(costs.shape[1])
    found = np.zeros_like(costs).reshape(-1, k, k)
    for one, cost in zip(found, costs.reshape(-1, k, k), strict=True):
        one[assign(cost)] = 1
    return found.reshape(costs.shape)


def assignment_rows(k: int) -> tuple[Tensor, Tensor]:
    """Ax = b: every row and every column of a k × k matrix has the sum 1, but for one of them.

    The last column's sum follows from the others. A is (2k − 1, k²).
    """
    eye, ones = torch.eye(k, dtype=torch.float64), torch.ones(1, k, dtype=torch.float64)
    A = torch.cat([torch.kron(eye, ones), torch.kron(ones, eye)])[:-1]
    return A, torch.ones(len(A), dtype=torch.float64)


def edges(side: int) -> list[tuple[int, int]]:
    """The steps right and down on a grid with so many nodes on each side, (from, to)."""
    nodes = [(i, j) for i in range(side) for j in range(side)]
    steps = [(i, j, i, j + 1) for i, j in nodes if j + 1 < side]
    steps += [(i, j, i + 1, j) for i, j in nodes if i + 1 < side]
    return sorted((a * side + b, c * side + d) for a, b, c, d in steps)


def path_rows(side: int) -> tuple[Tensor, Tensor]:
    """Ax = b: one unit leaves the first node, and as much leaves any other as comes in.

    Of the last node it follows from the others. A is (side² − 1, edges).
    """
    steps = edges(side)
    A = torch.zeros(side * side, len(steps), dtype=torch.float64)
    for e, (start, end) in enumerate(steps):
        A[start, e], A[end, e] = 1, -1
    b = torch.zeros(side * side - 1, dtype=torch.float64)
    b[0] = 1
    return A[:-1], b


def cheapest_path(side: int) -> Oracle:
    """Paths from the first to the last node by dynamic programming, for all costs at once."""
    steps = edges(side)
    into: dict[int, list[tuple[int, int]]] = {}
    for e, (start, end) in enumerate(steps):
        into.setdefault(end, []).append((e, start))

    def solve(costs: Array) -> Array:
        count, rows = len(costs), np.arange(len(costs))
        best = np.zeros((side * side, count))
        edge = np.zeros((side * side, count), dtype=int)  # by which the best path comes in
        source = np.zeros((side * side, count), dtype=int)
        for node in range(1, side * side):
            ways = np.stack([best[start] + costs[:, e] for e, start in into[node]])
            choice = ways.argmin(0)
            best[node] = ways[choice, rows]
            edge[node] = np.array([e for e, _ in into[node]])[choice]
            source[node] = np.array([start for _, start in into[node]])[choice]
        found = np.zeros_like(costs)
        at = np.full(count, side * side - 1)
        for _ in range(2 * (side - 1)):
            found[rows, edge[at, rows]] = 1
            at = source[at, rows]
        return found

    return solve
