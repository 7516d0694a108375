"""What one process of ``dfw scaling`` does; started by torchrun, or alone."""

from __future__ import annotations

import argparse
import json
import os
import resource
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import dfwlayer as dfw
from dfwlayer_bench.scaling.problem import Shape, own_rows, radius_of

__all__ = ["main"]

SUMS = 20  # of which a median is taken


def main() -> None:
    """Measure, and have the first process write what was found."""
    parser = argparse.ArgumentParser()
    for name in ("rows", "columns", "entries", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    shape = Shape(given.rows, given.columns, given.entries)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dfw.warm_up()
    before = peak()
    A, b = own_rows(shape, rank, size)
    ball = dfw.LpBall(1, radius_of(shape))
    first, again, x, memory = [], [], None, 0.0
    for turn in range(given.repeats):
        if turn:
            A = A.clone()  # nothing is known of it
        first.append(timed(A, b, ball)[0])
        memory = memory or peak()  # of one solve; those that follow have two matrices
        found, x = timed(A, b, ball)
        again.append(found)
    own = {
        "first": middle(first),
        "again": middle(again),
        "libraries": before,
        "memory": memory,
        **network(shape.columns),
    }
    everyone: list[Any] = [own]
    if dist.is_initialized():
        everyone = [None] * size
        dist.all_gather_object(everyone, own)
    if rank == 0:
        given.out.write_text(json.dumps({"processes": size, "each": everyone}))
        torch.save(x, given.out.with_suffix(".pt"))
    if dist.is_initialized():
        dist.destroy_process_group()


def timed(A: torch.Tensor, b: torch.Tensor, ball: dfw.LpBall) -> tuple[dict[str, Any], Any]:
    """One solve: seconds, those of them in sums over the processes, and what was summed."""
    if dist.is_initialized():
        dist.barrier()
    begin = perf_counter()
    f = dfw.LeastSquares(A, b, group=dist.group.WORLD if dist.is_initialized() else None)
    solution = dfw.solve(f, ball)
    seconds, shards = perf_counter() - begin, f.shards
    seen: dict[str, Any] = {"seconds": seconds, "exchanging": 0.0, "kinds": {}, "bytes": 0}
    if shards is not None:
        traffic = shards.traffic
        seen |= {"exchanging": traffic.seconds, "kinds": traffic.kinds, "bytes": traffic.bytes}
    seen |= {"gap": float(solution.gap / solution.value), "status": int(solution.status)}
    return seen, solution.x


def middle(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The call of the median time."""
    seconds = median(call["seconds"] for call in calls)
    return min(calls, key=lambda call: abs(call["seconds"] - seconds))


def network(columns: int) -> dict[str, float]:
    """Seconds of a sum of one number, and of one for each column."""
    if not dist.is_initialized():
        return {}
    found = {}
    for name, numbers in (("short", 1), ("long", columns)):
        message, calls = torch.zeros(numbers, dtype=torch.float64), []
        for _ in range(SUMS):
            dist.barrier()
            begin = perf_counter()
            dist.all_reduce(message)
            calls.append(perf_counter() - begin)
        found[name] = median(calls)
    return found


def peak() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
