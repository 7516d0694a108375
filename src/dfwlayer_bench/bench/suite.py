"""What ``dfw bench`` does for every suite: open the folder, run under a progress bar, report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dfwlayer_bench.bench.plan import Asked, machine_identity
from dfwlayer_bench.bench.store import Store, StoreError
from dfwlayer_bench.bench.tables import Tables
from dfwlayer_bench.bench.turns import (
    NamedPlan,
    Passes,
    TimedCell,
    TimedPlan,
    cells_of,
    run_groups,
)
from dfwlayer_bench.options import check_names, split
from dfwlayer_bench.report.progress import Report, progress
from dfwlayer_bench.report.terminal import interrupted, refuse

__all__ = ["conduct", "identity_of", "take_named", "take_turns"]

REPEATS, QUICK_REPEATS, THREADS = 7, 2, 2  # of suites whose problems have names

Cells = TypeVar("Cells")
Own = TypeVar("Own", bound=TimedCell)


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


def take_turns(
    asked: Asked,
    tables: Tables[Own, Any],
    plan: TimedPlan,
    words: Sequence[str],  # of the command, for the problems of the plan
    ready: Callable[[Own], Callable[[Own], Passes | None]],  # see `run_groups`
) -> int:
    """Run a suite whose systems take turns at each problem, on the CPU; returns the exit code."""

    def cells(store: Store) -> list[list[Own]]:
        return cells_of(plan, store, tables.cell, tables.systems)

    def begun(store: Store) -> list[Own]:
        return [cell for group in cells(store) for cell in group if cell.status != "pending"]

    return conduct(
        asked.out,
        fresh=asked.fresh,
        threads=plan.threads,
        device="cpu",
        command=shlex.join(["dfw", "bench", "--suite", tables.name, *words, *plan.words()]),
        identity=lambda machine: identity_of(tables.name, plan, machine),
        count=plan.cells,
        run=lambda store, report: run_groups(plan, cells(store), store, report, ready),
        saved=begun,
        finish=lambda found, about: tables.finish(asked.out, found, about),
    )


def take_named(
    asked: Asked,
    tables: Tables[Own, Any],
    known: Iterable[str],
    tiny: Sequence[str],  # those of them that a quick run has, and no other
    ready: Callable[[int, Own], Callable[[Own], Passes | None]],  # of the seed; see `run_groups`
) -> int:
    """`take_turns` for problems that are known by a name alone; returns the exit code."""
    chosen, own, known = split(asked.family), split(asked.systems), tuple(known)
    full = tuple(name for name in known if name not in tiny)
    if chosen == ["all"]:
        chosen = list(full)
    check_names("--family", chosen, known)
    check_names("--systems", own, tables.systems)
    plan = NamedPlan(
        problems=tuple(chosen) or (tuple(tiny) if asked.quick else full),
        systems=tuple(own) or tuple(tables.systems),
        repeats=asked.repeats or (QUICK_REPEATS if asked.quick else REPEATS),
        seed=asked.seed,
        threads=asked.threads or THREADS,
        clock=asked.clock,
    )
    words = ["--family", *plan.problems]
    return take_turns(asked, tables, plan, words, lambda cell: ready(plan.seed, cell))


def identity_of(suite: str, plan: TimedPlan, machine: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same for a run to go on where another one was interrupted."""
    own = {"suite": suite, "seed": plan.seed, "threads": plan.threads, "clock": plan.clock}
    return {**own, **machine_identity(machine)}
