"""What ``dfw bench --suite lasso`` does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dfwlayer_bench.options import check_names, split
from dfwlayer_bench.report.terminal import PLAIN, output

if TYPE_CHECKING:
    from rich.console import Console

    from dfwlayer_bench.bench.lasso.run import LassoCell, LassoPlan

__all__ = ["bench_lasso"]

WIDE = 120  # columns that the table needs
REPEATS, QUICK_REPEATS, THREADS = 7, 2, 2


def bench_lasso(
    *,
    problems: list[str] | None,
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

    from dfwlayer_bench.bench.lasso.problems import PROBLEMS, QUICK
    from dfwlayer_bench.bench.lasso.run import LassoPlan, run_lasso, saved_lasso
    from dfwlayer_bench.bench.lasso.systems import SYSTEMS
    from dfwlayer_bench.bench.suite import conduct, identity_of

    chosen, own = split(problems), split(systems)
    full = tuple(name for name in PROBLEMS if name not in QUICK)
    if chosen == ["all"]:
        chosen = list(full)
    check_names("--family", chosen, PROBLEMS)
    check_names("--systems", own, SYSTEMS)
    plan = LassoPlan(
        problems=tuple(chosen) or (QUICK if quick else full),
        systems=tuple(own) or tuple(SYSTEMS),
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
        identity=lambda machine: identity_of("lasso", plan.seed, plan.threads, machine),
        count=plan.cells,
        run=lambda store, report: run_lasso(plan, store, report),
        saved=lambda store: saved_lasso(plan, store),
        finish=lambda cells, about: _finish(out, cells, about, console),
    )


def _finish(out: Path, cells: list[LassoCell], about: dict[str, object], console: Console) -> None:
    """Tables on standard output, files in the folder."""
    from dfwlayer_bench.bench.lasso import report

    rows = report.rows_of(cells)
    if not rows:
        return
    shown = output(WIDE)
    for title, group in report.groups_of(rows):
        shown.print(report.table_of(group, title))
    for name, settings in report.settings_of(cells).items():
        shown.print(f"[bold]{name}[/bold]: {settings}", highlight=False)
    report.write_files(out, cells, rows, about)
    console.print(f"Wrote lasso.csv, lasso.json and lasso.md to {out}", **PLAIN)


def _command(plan: LassoPlan) -> str:
    """The command that makes this run anew, whatever was left to defaults."""
    words = ["dfw", "bench", "--suite", "lasso", "--family", *plan.problems]
    words += ["--systems", *plan.systems, "--repeats", str(plan.repeats)]
    words += ["--seed", str(plan.seed), "--threads", str(plan.threads)]
    return shlex.join(words)
