"""Many calls in one process, with an eye on its memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from dfwlayer_bench.fuzz.problems import SETS, Problem, draw_problem

__all__ = ["CHUNK", "flat", "memory", "soak"]

CHUNK = 500  # calls between two looks at the memory
ALLOWED = 8e6  # bytes: pages that an allocator keeps for itself


def soak(seed: int) -> tuple[int, int, float]:
    """One chunk of calls, forwards and backwards; (calls, the process, its memory in bytes).

    The problems are the same in every chunk, so that nothing but a leak can grow.
    """
    problems = _problems(seed)
    for k in range(CHUNK):
        problem = problems[k % len(problems)]
        tensors = problem.tensors(learned=True)
        x = problem.solve(tensors).x
        if k % 2 and x.requires_grad:
            x.sum().backward()
    return CHUNK, os.getpid(), memory()


_KEPT: dict[int, list[Problem]] = {}


def _problems(seed: int) -> list[Problem]:
    """Small problems of every set, the default method."""
    if seed not in _KEPT:
        kept: list[Problem] = []
        index = 0
        while len(kept) < 2 * len(SETS):
            problem = draw_problem(seed, index)
            index += 1
            wanted = list(SETS)[len(kept) % len(SETS)]
            if problem.name == wanted and problem.method == "auto" and problem.units.value == 1:
                small = (
                    problem if problem.rows is None else problem.some(range(min(2, problem.rows)))
                )
                try:
                    with torch.no_grad():
                        small.solve()
                except Exception:
                    continue  # that is for the other checks to say
                kept.append(small)
        _KEPT[seed] = kept
    return _KEPT[seed]


def memory() -> float:
    """Bytes of this process that are in memory."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def flat(series: list[float]) -> tuple[bool, float]:
    """Whether memory stays level from the second quarter of a run to its last; the growth."""
    if len(series) < 8:
        return True, 0.0
    quarter = len(series) // 4
    growth = float(np.mean(series[-quarter:]) - np.mean(series[quarter : 2 * quarter]))
    return growth <= ALLOWED, growth
