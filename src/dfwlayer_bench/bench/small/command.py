"""What ``dfw bench --suite small`` does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dfwlayer_bench.options import check_names, split
from dfwlayer_bench.report.terminal import PLAIN, output

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.bench.small.run import SmallCell, SmallPlan

__all__ = ["bench_small"]

WIDE = 140  # columns that the table needs
SIZES = ((1, 10), (1, 100), (64, 10), (128, 10), (128, 50))
REPEATS, THREADS = 30, 2
QUICK_SETS, QUICK_SIZES, QUICK_REPEATS = ("l1", "box"), ((1, 10), (8, 10)), 2


def bench_small(
    *,
    sizes: list[str] | None,
    sets: list[str] | None,
    systems: list[str] | None,
    repeats: int | None,
    seed: int,
    out: Path,
    fresh: bool,
    quick: bool,
    threads: int | None,
) -> int:
    """Run the suite, write its files and print its tables; returns the exit code."""
    from rich.console import Console

    from dfwlayer_bench.bench.small.problems import SETS
    from dfwlayer_bench.bench.small.run import SmallPlan, run_small, saved_small
    from dfwlayer_bench.bench.small.systems import SYSTEMS
    from dfwlayer_bench.bench.suite import conduct, identity_of

    chosen_sets, chosen = split(sets), split(systems)
    if chosen_sets == ["all"]:
        chosen_sets = list(SETS)
    check_names("--family", chosen_sets, SETS)
    check_names("--systems", chosen, SYSTEMS)
    plan = SmallPlan(
        sets=tuple(chosen_sets) or (QUICK_SETS if quick else tuple(SETS)),
        sizes=_check_sizes(split(sizes)) or (QUICK_SIZES if quick else SIZES),
        systems=tuple(chosen) or tuple(SYSTEMS),
        repeats=repeats or (QUICK_REPEATS if quick else REPEATS),
        seed=seed,
        threads=threads or THREADS,
    )
    console = Console(stderr=True)
    return conduct(
        out,
        fresh=fresh,
        threads=plan.threads,
        device="cpu",
        command=_command(plan),
        identity=lambda machine: identity_of("small", plan.seed, plan.threads, machine),
        count=plan.cells,
        run=lambda store, report: run_small(plan, store, report),
        saved=lambda store: saved_small(plan, store),
        finish=lambda cells, about: _finish(out, cells, about, console),
    )


def _check_sizes(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Sizes such as 64x10, or an error that names the option."""
    found = [re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", size) for size in texts]
    if not all(found):
        raise typer.BadParameter(
            f"--sizes: expected problems x variables such as 1x10 64x10, got {list(texts)}"
        )
    return tuple((int(match[1]), int(match[2])) for match in found if match)


def _finish(out: Path, cells: list[SmallCell], about: dict[str, object], console: Console) -> None:
    """Tables on standard output, files in the folder."""
    from dfwlayer_bench.bench.small.report import (
        groups_of,
        rows_of,
        settings_of,
        table_of,
        write_files,
    )

    rows = rows_of(cells)
    if not rows:
        return
    shown = output(WIDE)
    for title, group in groups_of(rows):
        shown.print(table_of(group, title))
    for name, settings in settings_of(cells).items():
        shown.print(f"[bold]{name}[/bold]: {settings}", highlight=False)
    write_files(out, cells, rows, about)
    console.print(f"Wrote small.csv, small.json, small.md and the figures to {out}", **PLAIN)


def _command(plan: SmallPlan) -> str:
    """The command that makes this run anew, whatever was left to defaults."""
    sizes = [f"{count}x{n}" for count, n in plan.sizes]
    words = ["dfw", "bench", "--suite", "small", "--sizes", *sizes, "--family", *plan.sets]
    words += ["--systems", *plan.systems, "--repeats", str(plan.repeats)]
    words += ["--seed", str(plan.seed), "--threads", str(plan.threads)]
    return shlex.join(words)
