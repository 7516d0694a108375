"""Batches spread over the cores that torch may use, by threads without Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

import torch

__all__ = ["spread"]

WORTH = 200_000  # operations, about a tenth of a millisecond, below which a thread costs more

_pools: dict[int, ThreadPoolExecutor] = {}  # by process, as threads do not survive a fork


def spread(run: Callable[..., None], count: int, operations: int, *given: Any) -> None:
    """Call run(first, end, *given) for parts of range(count), each of so many operations in all."""
    parts = min(count, count * operations // WORTH) if count > 1 else 1
    if parts > 1:
        parts = min(parts, torch.get_num_threads())
    if parts < 2:
        run(0, count, *given)
        return
    ends = [count * i // parts for i in range(parts + 1)]
    futures = [
        _pool().submit(copy_context().run, run, ends[i], ends[i + 1], *given)
        for i in range(1, parts)
    ]
    run(0, ends[1], *given)
    wait(futures)
    for future in futures:
        future.result()


def _pool() -> ThreadPoolExecutor:
    process = os.getpid()
    if process not in _pools:
        _pools.clear()
        _pools[process] = ThreadPoolExecutor(os.cpu_count(), "dfwlayer")
    return _pools[process]
