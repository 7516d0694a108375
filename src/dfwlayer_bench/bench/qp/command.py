"""What ``dfw bench --suite qp PATH`` does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dfwlayer_bench.bench.plan import Asked
from dfwlayer_bench.options import check_names, check_sizes, split
from dfwlayer_bench.report.terminal import PLAIN, output

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.bench.qp.run import QpCell, QpPlan

__all__ = ["bench_qp"]

WIDE = 130  # columns that the table needs
LARGEST, QUICK_LARGEST = 4096, 50  # variables
REPEATS, QUICK_REPEATS, THREADS = 3, 1, 1


def bench_qp(asked: Asked, *, folder: Path | None) -> int:
    """Run the suite, write its files and print its tables; returns the exit code."""
    from rich.console import Console

    from dfwlayer_bench.bench.qp.problems import files_in
    from dfwlayer_bench.bench.qp.run import QpPlan, run_qp, saved_qp, size_or_none
    from dfwlayer_bench.bench.qp.systems import SYSTEMS
    from dfwlayer_bench.bench.suite import conduct, identity_of

    if folder is None or not folder.is_dir():
        raise typer.BadParameter(
            f"PATH: expected a folder with .mat or .npz files for --suite qp, got {folder}"
        )
    files = files_in(folder)
    if not files:
        raise typer.BadParameter(f"PATH: there are no .mat or .npz files in {folder}")
    chosen, own = split(asked.family), split(asked.systems)
    limit = check_sizes(split(asked.sizes))
    if len(limit) > 1:
        raise typer.BadParameter("--sizes: expected one number, the most variables, with qp")
    check_names("--family", chosen, files)
    check_names("--systems", own, SYSTEMS)
    largest = limit[0] if limit else (QUICK_LARGEST if asked.quick else LARGEST)
    counts = {name: size_or_none(files[name]) for name in chosen or files}
    plan = QpPlan(
        folder=folder,
        problems={name: files[name] for name, n in counts.items() if n is None or n <= largest},
        systems=tuple(own) or tuple(SYSTEMS),
        largest=largest,
        seed=0,
        repeats=asked.repeats or (QUICK_REPEATS if asked.quick else REPEATS),
        threads=asked.threads or THREADS,
        clock=asked.clock,
    )
    console = Console(stderr=True)
    return conduct(
        asked.out,
        fresh=asked.fresh,
        threads=plan.threads,
        device="cpu",
        command=_command(plan, chosen),
        identity=lambda machine: identity_of("qp", plan, machine),
        count=plan.cells,
        run=lambda store, report: run_qp(plan, store, report),
        saved=lambda store: saved_qp(plan, store),
        finish=lambda cells, about: _finish(asked.out, cells, about, console),
    )


def _finish(out: Path, cells: list[QpCell], about: dict[str, object], console: Console) -> None:
    """Tables on standard output, files in the folder."""
    from dfwlayer_bench.bench.qp import report
    from dfwlayer_bench.bench.tables import reasons_of

    rows = report.rows_of(cells)
    if not rows:
        return
    shown = output(WIDE)
    for table in report.tables_of(rows):
        shown.print(table)
    for name, settings in report.settings_of(cells).items():
        shown.print(f"[bold]{name}[/bold]: {settings}", highlight=False)
    for line in reasons_of(cells):
        shown.print(line, **PLAIN)
    report.write_files(out, cells, rows, about)
    console.print(f"Wrote qp.csv, qp.json and qp.md to {out}", **PLAIN)


def _command(plan: QpPlan, chosen: list[str]) -> str:
    """The command that makes this run anew, whatever was left to defaults."""
    words = ["dfw", "bench", "--suite", "qp", plan.folder.name, "--sizes", str(plan.largest)]
    words += ["--family", *chosen] if chosen else []
    words += ["--systems", *plan.systems, "--repeats", str(plan.repeats)]
    return shlex.join([*words, *plan.timing()])
