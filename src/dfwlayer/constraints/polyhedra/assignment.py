"""The linear assignment problem, and Sinkhorn's smooth version of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["assign", "assign_one", "potentials", "sinkhorn"]


def assign(cost: Tensor) -> Tensor:  # (..., n, n) -> (..., n)
    """The column for each row in the permutation of least cost, for each problem."""
    n = cost.shape[-1]
    costs = cost.detach().reshape(-1, n, n).cpu().double().numpy()
    costs = np.nan_to_num(costs, posinf=1e300, neginf=-1e300)  # costs that are none decide nothing
    solve = _solver()
    found = np.array([solve(one) for one in costs], dtype=np.int64)
    return torch.from_numpy(found).to(cost.device).reshape(cost.shape[:-1])


@lru_cache
def _solver() -> Callable[[NDArray[np.float64]], NDArray[np.int64]]:
    """SciPy's, which is faster, where there is one."""
    try:
        from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
    except ImportError:
        return assign_one
    return lambda cost: linear_sum_assignment(cost)[1]


def assign_one(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """The same for one problem, by shortest augmenting paths: O(n³).

    Rows are matched one after the other. Dijkstra's algorithm over reduced costs
    c_ij − u_i − v_j ≥ 0 finds the cheapest way to an unmatched column, along which the matching
    is changed; the potentials u and v then keep reduced costs ≥ 0, and 0 on the matching.
    """
    n = len(cost)
    u, v = np.zeros(n), np.zeros(n)
    row_of = np.full(n, -1)
    for start in range(n):
        distance = np.full(n, np.inf)
        before = np.full(n, -1)  # column before this one on the cheapest path, −1 for the start
        done = np.zeros(n, dtype=bool)
        row, column, reach = start, -1, 0.0
        while True:
            through = reach + cost[row] - u[row] - v
            nearer = ~done & (through < distance)
            distance[nearer] = through[nearer]
            before[nearer] = column
            column = int(np.argmin(np.where(done, np.inf, distance)))
            reach = distance[column]
            done[column] = True
            if row_of[column] < 0:
                break
            row = row_of[column]
        u[start] += reach
        passed = done & (row_of >= 0)
        u[row_of[passed]] += reach - distance[passed]
        v[done] += distance[done] - reach
        while column >= 0:
            previous = before[column]
            row_of[column] = start if previous < 0 else row_of[previous]
            column = previous
    return np.argsort(row_of)


def potentials(cost: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """u, v (..., n) with c_ij − u_i − v_j = 0 on a permutation of least cost, > 0 elsewhere.

    (If it is the only one; ≥ 0 otherwise.) Giving row i the column of row k costs
    W_ik = c_i,σ(k) − c_i,σ(i), and no cycle of such exchanges pays. With half the mean of the
    cheapest cycle taken off every W still none does, so there are shortest paths y with
    y_k ≤ y_i + W_ik, which leave that half to spare; they are found by relaxing n times.
    """
    n = cost.shape[-1]
    own = cost.gather(-1, columns.unsqueeze(-1))
    exchange = cost.gather(-1, columns.unsqueeze(-2).expand_as(cost)) - own
    staying = torch.eye(n, dtype=torch.bool, device=cost.device)
    exchange = exchange.masked_fill(staying, torch.inf)
    exchange = exchange - 0.5 * _cheapest_mean(exchange)[..., None, None]
    y = torch.zeros_like(own).squeeze(-1)
    for _ in range(n):
        y = torch.minimum(y, _walk(y, exchange))
    v = torch.zeros_like(y).scatter(-1, columns, y)
    return own.squeeze(-1) - y, v


def _cheapest_mean(cost: Tensor) -> Tensor:  # (..., n, n) -> (...)
    """The least mean cost of a cycle over two or more places, by Karp's formula; 0 for n = 1."""
    n = cost.shape[-1]
    if n == 1:
        return torch.zeros_like(cost[..., 0, 0])
    walks = [torch.zeros_like(cost[..., 0])]  # the cheapest walks of each length, by their end
    for _ in range(n):
        walks.append(_walk(walks[-1], cost))
    means = [(walks[-1] - walk) / (n - k) for k, walk in enumerate(walks[:-1])]
    return torch.stack(means).amax(0).amin(-1).clamp_min(0)


def _walk(y: Tensor, cost: Tensor) -> Tensor:
    """min_i y_i + c_ik for each k."""
    return (y.unsqueeze(-1) + cost).amin(-2)


def sinkhorn(
    cost: Tensor,  # (..., n, n)
    temperature: Tensor,  # (..., 1, 1)
    rounds: int,
) -> Tensor:
    """exp((u_i + v_j − c_ij)/τ) with all row sums and, nearly, all column sums 1; smooth in c.

    It starts from the potentials of the best permutation, so that it is that permutation for
    τ → 0 whatever the number of rounds; beyond that each round divides rows, then columns, by
    their sums, in logarithms.
    """
    with torch.no_grad():
        u, v = potentials(cost, assign(cost))
    scaled = (u.unsqueeze(-1) + v.unsqueeze(-2) - cost) / temperature
    for _ in range(rounds):
        scaled = scaled - scaled.logsumexp(-2, keepdim=True)
        scaled = scaled - scaled.logsumexp(-1, keepdim=True)
    return scaled.exp()
