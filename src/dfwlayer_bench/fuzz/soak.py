"""Many calls in one process, with an eye on its memory."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dfwlayer import DFWLayer
from dfwlayer_bench.fuzz.data import Draw
from dfwlayer_bench.fuzz.objectives import QuadraticRow, Units
from dfwlayer_bench.fuzz.problems import SETS, Problem

__all__ = ["CHUNK", "flat", "memory", "soak"]

CHUNK = 500  # calls between two looks at the memory
SHARE = 10  # of the calls, one solves a problem over one of the sets
ALLOWED = 8e6  # bytes: pages that an allocator keeps for itself


def soak(seed: int) -> tuple[int, int, float]:
    """One chunk of calls, forwards and backwards; (calls, the process, its memory in bytes).

    The problems are the same in every chunk, so that nothing but a leak can grow. One call in ten
    solves a problem over a set, of all sets in turn, the others are steps of a training loop with
    a projection layer.
    """
    problems, (layer, actions, limits) = _problems(seed), _training(seed)
    for k in range(CHUNK):
        if k % SHARE:
            layer(None, actions, None, limits).square().sum().backward()
            actions.grad = limits.grad = None
            continue
        problem = problems[k // SHARE % len(problems)]
        tensors = problem.tensors(learned=True)
        x = problem.solve(tensors).x
        if x.requires_grad:
            x.sum().backward()
    return CHUNK, os.getpid(), memory()


def _training(seed: int) -> tuple[DFWLayer, torch.Tensor, torch.Tensor]:
    """A layer, the actions it limits, and the limits."""
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randn(4, 6, generator=generator).requires_grad_()
    limits = torch.rand(4, generator=generator).requires_grad_()
    return DFWLayer(p=1), actions, limits


_KEPT: dict[int, list[Problem]] = {}


def _problems(seed: int) -> list[Problem]:
    """Two small problems of every set in a call, with and without a P."""
    if seed not in _KEPT:
        rng = np.random.default_rng([seed, 5])
        _KEPT[seed] = [_small(rng, name, form) for form in ("own", "none") for name in SETS]
    return _KEPT[seed]


def _small(rng: np.random.Generator, name: str, form: str) -> Problem:
    row = SETS[name](rng, 6)
    objective = QuadraticRow(row.n, form)
    draw = Draw(rng, 2)
    params, target = objective.draw(draw)
    params |= row.draw(replace(draw, target=target))
    params = {k: p.rounded("float32") for k, p in params.items()}
    about = f"{row.code()}, quadratic, {form}"
    return Problem(0, 0, name, about, row, objective, params, Units(), "float32", "auto", 2, {}, ())


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
