"""What ``dfw bench`` does for every suite: open the folder, run under a progress bar, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dfwlayer_bench.bench.store import Store, StoreError
from dfwlayer_bench.report.progress import Report, progress
from dfwlayer_bench.report.terminal import interrupted, refuse

__all__ = ["conduct", "identity_of"]

Cells = TypeVar("Cells")


def conduct(
    out: Path,
    *,
    fresh: bool,
    threads: int | None,
    device: str,
    command: str,
    identity: Callable[[dict[str, Any]], dict[str, Any]],  # of a run, on that machine
    count: int,  # cells
    run: Callable[[Store, Report], Cells],
    saved: Callable[[Store], Cells],  # those on disk, after an interruption
    finish: Callable[[Cells, dict[str, Any]], None],
) -> int:
    """Run a suite and hand its cells on; returns the exit code."""
    from rich.console import Console

    from dfwlayer_bench.report.machine import describe
    from dfwlayer_bench.report.machine import threads as hold_threads

    console = Console(stderr=True)
    with hold_threads(threads):
        machine = describe(device)
        who = identity(machine)
        store, ended = Store(out), True
        try:
            store.open(who, fresh=fresh)
            try:
                with progress(console, count) as report:
                    cells = run(store, report)
            except KeyboardInterrupt:
                cells, ended = saved(store), False
            finish(cells, {"command": command, "machine": machine, **who})
        except (StoreError, OSError) as error:
            return refuse(console, str(error), 2)
    return 0 if ended else interrupted(console)


def identity_of(suite: str, seed: int, threads: int, machine: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same for a run to go on where another one was interrupted."""
    return {
        "suite": suite,
        "seed": seed,
        "threads": threads,
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "torch": machine["versions"]["torch"],
        "dfwlayer": machine["versions"]["dfwlayer"],
    }
