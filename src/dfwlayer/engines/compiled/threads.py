"""Batches spread over the cores that torch may use, by threads without Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import pairwise
from typing import Any

import torch

__all__ = ["spread"]

WORTH = 200_000  # operations, about a tenth of a millisecond, below which a thread costs more

_pools: dict[int, ThreadPoolExecutor] = {}  # by process, as threads do not survive a fork


def spread(run: Callable[..., None], count: int, operations: int, *given: Any) -> None:
    """Call run(first, end, *given) for parts of range(count), each of so many operations in all.

    What no thread has begun by the time that the caller has done its own part the caller does too:
    on a machine that is busy with other things a thread may have to wait for a core.
    """
    parts = 1
    if count > 1 and count * operations >= 2 * WORTH:
        parts = min(count, count * operations // WORTH, torch.get_num_threads())
    if parts < 2:
        run(0, count, *given)
        return
    ends = [count * i // parts for i in range(parts + 1)]
    ranges = list(pairwise(ends))
    pool = _pool()
    futures = [pool.submit(copy_context().run, run, *part, *given) for part in ranges[1:]]
    run(*ranges[0], *given)
    for future, part in zip(reversed(futures), reversed(ranges), strict=False):
        if future.cancel():
            run(*part, *given)
    for future in futures:
        if not future.cancelled():
            future.result()


def _pool() -> ThreadPoolExecutor:
    process = os.getpid()
    if process not in _pools:
        _pools.clear()
        _pools[process] = ThreadPoolExecutor(os.cpu_count(), "dfwlayer")
    return _pools[process]
