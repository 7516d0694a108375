"""``dfw bench``: this library, its published method and every rival installed, side by side."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfwlayer_bench import options
from dfwlayer_bench.bench.gpu.command import bench_gpu
from dfwlayer_bench.bench.lasso.command import bench_lasso
from dfwlayer_bench.bench.layers.command import bench_layers
from dfwlayer_bench.bench.plan import Asked, Defaults, Plan, identity_of, plan_of, words_of
from dfwlayer_bench.bench.qp.command import bench_qp
from dfwlayer_bench.bench.small.command import bench_small
from dfwlayer_bench.report.terminal import PLAIN, output

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.bench.store import Cell

__all__ = ["bench"]

WIDE = 160  # columns that the whole table needs
FULL = Defaults(("paper", "active", "ill"), (500, 1000, 2000), trials=5, repeats=5, time_limit=60.0)
ONLY_LARGE = ("device", "trials", "time_limit", "functional", "memory")
OTHERS = {  # the options that a suite does not have
    "small": ("dtype", *ONLY_LARGE),
    "lasso": ("dtype", *ONLY_LARGE, "sizes"),
    "layers": ("dtype", *ONLY_LARGE, "sizes"),
    "gpu": (*ONLY_LARGE, "clock", "sizes", "systems"),
    "qp": ("dtype", *ONLY_LARGE, "seed"),
}
QUICK = Defaults(("active", "ill"), (50, 100), trials=1, repeats=3, time_limit=20.0)
# of each suite, on 2 cores with every rival installed; half of it compiles what is not on disk yet
QUICK_SECONDS = {"large": 60, "small": 50, "lasso": 50, "layers": 60, "gpu": 60, "qp": 50}


def bench(
    context: typer.Context,
    folder: options.Collection = None,
    suite: options.Suite = "large",
    sizes: options.Sizes = None,
    family: options.Family = None,
    systems: options.Systems = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    trials: options.Trials = None,
    repeats: Annotated[int | None, options.repeats(FULL.repeats)] = None,
    seed: options.Seed = 100,
    time_limit: Annotated[float | None, options.time_limit(FULL.time_limit)] = None,
    out: options.Out = Path("bench-results"),
    fresh: options.Fresh = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run: n = 50 and 100, one trial, 3 calls.")
    ] = False,
    functional: Annotated[
        str, typer.Option(help="Differentiate the sum of x, or a random functional of it.")
    ] = "sum",
    memory: options.Memory = None,
    threads: options.Threads = None,
    clock: options.Clock = "wall",
) -> int:
    """Compare this library with its rivals: time, accuracy, gradients, feasibility, memory.

    Every system gets the same problems in the same process, and they take turns. A call is one
    forward and one backward pass; what is done once per problem structure (canonicalising,
    compiling, tuning) is not timed. Every finished call is saved at once.
    """
    from rich.console import Console

    from dfwlayer_bench.report.progress import announce

    options.check_names("--suite", [suite], QUICK_SECONDS)
    console = Console(stderr=True)
    if quick:
        announce(console, QUICK_SECONDS[suite])
    if folder is not None and suite != "qp":
        raise typer.BadParameter(f"PATH: only for --suite qp, got {folder}")
    asked = Asked(sizes, family, systems, dtype, repeats, seed, out, fresh, quick, threads, clock)
    if suite != "large":
        from dfwlayer_bench.systems.base import CLOCKS

        options.check_names("--clock", [clock], CLOCKS)
        if not _given(context, "out"):
            asked = replace(asked, out=Path(f"bench-results-{suite}"))
        _check_given(context, suite, OTHERS[suite])
        options.check_clock(clock)
        if suite == "lasso":
            return bench_lasso(asked)
        if suite == "layers":
            return bench_layers(asked)
        if suite == "small":
            return bench_small(asked)
        if suite == "qp":
            return bench_qp(asked, folder=folder)
        return bench_gpu(asked)
    from dfwlayer_bench.bench.run import run_plan, saved_cells
    from dfwlayer_bench.bench.suite import conduct
    from dfwlayer_bench.systems import SYSTEMS

    plan = plan_of(
        QUICK if quick else FULL,
        SYSTEMS,
        asked,
        trials=trials,
        time_limit=time_limit,
        device=device,
        memory=memory,
        functional=functional,
    )
    return conduct(
        out,
        fresh=fresh,
        threads=threads,
        device=device,
        command=_command(plan),
        identity=lambda machine: identity_of(plan, machine),
        count=plan.cells,
        run=lambda store, report: run_plan(plan, store, report),
        saved=lambda store: saved_cells(plan, store),
        finish=lambda cells, about: _finish(out, cells, about, console),
    )


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option is among the words of the command."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_given(context: typer.Context, suite: str, others: Sequence[str]) -> None:
    """Raise an error that names the options which only other suites have."""
    found = [f"--{name.replace('_', '-')}" for name in others if _given(context, name)]
    if found:
        raise typer.BadParameter(f"{', '.join(found)}: not for --suite {suite}; leave it out")


def _finish(out: Path, cells: list[Cell], about: dict[str, Any], console: Console) -> None:
    """Tables on standard output, files in the folder."""
    from dfwlayer_bench.bench.plots import write_plots
    from dfwlayer_bench.bench.report import groups_of, rows_of, table_of, write_files
    from dfwlayer_bench.bench.tables import reasons_of

    rows = rows_of(cells)
    if not rows:
        return
    shown = output(WIDE + 20)
    for title, group in groups_of(rows):
        shown.print(table_of(group, title, compact=shown.width < WIDE))
    for name in dict.fromkeys(row.system for row in rows):
        found = dict.fromkeys(r.settings for r in rows if r.system == name and r.settings)
        for settings in found:
            shown.print(f"[bold]{name}[/bold]: {settings}", highlight=False)
    for line in reasons_of(cells):
        shown.print(line, **PLAIN)
    write_files(out, cells, rows, about)
    write_plots(out, rows)
    files = "bench.csv, bench.json, bench.md and the figures"
    console.print(f"Wrote {files} to {out}", **PLAIN)


def _command(plan: Plan) -> str:
    """The command that makes this run anew, whatever was left to defaults."""
    words = ["dfw", "bench", "--sizes", *map(str, plan.sizes), "--family", *plan.families]
    words += ["--trials", str(plan.trials), "--functional", plan.functional, *words_of(plan)]
    return shlex.join(words)
