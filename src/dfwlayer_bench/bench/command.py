"""``dfw bench``: this library, its published method and every rival installed, side by side."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfwlayer_bench.options import check_device, check_names, check_sizes, split

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.bench.run import Plan
    from dfwlayer_bench.bench.store import Cell, Store

__all__ = ["bench"]

WIDE = 160  # columns that the whole table needs
SIZES, QUICK_SIZES = (500, 1000, 2000), (50, 100)
FAMILY, QUICK_FAMILY = ("paper", "active", "ill"), ("active", "ill")


def bench(
    sizes: Annotated[
        list[str] | None, typer.Option(help="Numbers of variables. (default: 500 1000 2000)")
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="paper, active, ill, very, loose, or all. (default: paper active ill)",
        ),
    ] = None,
    systems: Annotated[
        list[str] | None, typer.Option(help="Systems to compare. (default: every one there is)")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    trials: Annotated[
        int | None, typer.Option(min=1, help="Problems for each family and size. (default: 5)")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed calls on each problem. (default: 5)")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first trial; the next ones add 100 each.")
    ] = 100,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds that one call, or building, may take. (default: 60)"),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results; a run that was interrupted goes on there.")
    ] = Path("bench-results"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what the folder holds and start over.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run: n = 50 and 100, one trial, 3 calls.")
    ] = False,
    functional: Annotated[
        str, typer.Option(help="Differentiate the sum of x, or a random functional of it.")
    ] = "sum",
    memory: Annotated[
        bool,
        typer.Option(
            help="Run each system once in a process of its own first, to measure its memory and "
            "to stop it at the time limit."
        ),
    ] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Cores for every system. (default: all)")
    ] = None,
) -> int:
    """Compare this library with its rivals: time, accuracy, gradients, feasibility, memory.

    Every system gets the same problems in the same process, and they take turns. A call is one
    forward and one backward pass; what is done once per problem structure (canonicalising,
    compiling, tuning) is not timed. Every finished call is saved at once.
    """
    from rich.console import Console

    from dfwlayer_bench.bench.run import identity_of
    from dfwlayer_bench.bench.store import Store, StoreError
    from dfwlayer_bench.report.machine import describe
    from dfwlayer_bench.report.machine import threads as hold_threads

    console = Console(stderr=True)
    plan = _plan(
        sizes=split(sizes),
        families=split(family),
        systems=split(systems),
        dtype=dtype,
        device=device,
        trials=trials or (1 if quick else 5),
        repeats=repeats or (3 if quick else 5),
        seed=seed,
        time_limit=time_limit or (20.0 if quick else 60.0),
        functional=functional,
        memory=memory,
        threads=threads,
        quick=quick,
    )
    with hold_threads(threads):
        machine = describe(device)
        store = Store(out)
        identity = identity_of(plan, machine)
        try:
            store.open(identity, fresh=fresh)
            cells, ended = _run(plan, store, console)
            about = {"command": _command(plan), "machine": machine, **identity}
            _finish(out, cells, about, console)
        except (StoreError, OSError) as error:
            console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            return 2
    if not ended:
        console.print("Interrupted; run the same command again to go on.")
        return 130
    return 0


def _plan(
    *,
    sizes: list[str],
    families: list[str],
    systems: list[str],
    dtype: str,
    device: str,
    quick: bool,
    functional: str,
    **rest: Any,
) -> Plan:
    """Check the options, each by name, and fill in the defaults."""
    from dfwlayer_bench.bench.run import Plan
    from dfwlayer_bench.problems.families import FAMILIES
    from dfwlayer_bench.systems import SYSTEMS

    numbers = check_sizes(sizes)
    if families == ["all"]:
        families = list(FAMILIES)
    check_names("--family", families, FAMILIES)
    check_names("--systems", systems, SYSTEMS)
    check_names("--dtype", [dtype], ("float32", "float64"))
    check_names("--functional", [functional], ("sum", "random"))
    check_device(device)
    return Plan(
        families=tuple(families or (QUICK_FAMILY if quick else FAMILY)),
        sizes=tuple(numbers or (QUICK_SIZES if quick else SIZES)),
        systems=tuple(systems or SYSTEMS),
        dtype=dtype,
        device=device,
        functional=functional,
        **rest,
    )


def _run(plan: Plan, store: Store, console: Console) -> tuple[list[Cell], bool]:
    """All cells under a progress bar; after an interruption those saved so far."""
    from dfwlayer_bench.bench.run import run_plan, saved_cells
    from dfwlayer_bench.report.progress import progress

    try:
        with progress(console, plan.cells) as report:
            return run_plan(plan, store, report), True
    except KeyboardInterrupt:
        return saved_cells(plan, store), False


def _finish(out: Path, cells: list[Cell], about: dict[str, Any], console: Console) -> None:
    """Tables on standard output, files in the folder."""
    from rich.console import Console

    from dfwlayer_bench.bench.plots import write_plots
    from dfwlayer_bench.bench.report import groups_of, rows_of, table_of, write_files

    rows = rows_of(cells)
    if not rows:
        return
    output = Console()
    if not output.is_terminal:
        output = Console(width=WIDE + 20)
    for title, group in groups_of(rows):
        output.print(table_of(group, title, compact=output.width < WIDE))
    for name in dict.fromkeys(row.system for row in rows):
        found = dict.fromkeys(r.settings for r in rows if r.system == name and r.settings)
        for settings in found:
            output.print(f"[bold]{name}[/bold]: {settings}", highlight=False)
    write_files(out, cells, rows, about)
    write_plots(out, rows)
    files = "bench.csv, bench.json, bench.md and the figures"
    console.print(f"Wrote {files} to {out}", markup=False, highlight=False, soft_wrap=True)


def _command(plan: Plan) -> str:
    """The command that makes this run anew, whatever was left to defaults."""
    words = ["dfw", "bench", "--sizes", *map(str, plan.sizes), "--family", *plan.families]
    words += ["--systems", *plan.systems, "--dtype", plan.dtype, "--device", plan.device]
    words += ["--trials", str(plan.trials), "--repeats", str(plan.repeats)]
    words += ["--seed", str(plan.seed), "--time-limit", f"{plan.time_limit:g}"]
    words += ["--functional", plan.functional]
    words += [] if plan.memory else ["--no-memory"]
    words += [] if plan.threads is None else ["--threads", str(plan.threads)]
    return shlex.join(words)
