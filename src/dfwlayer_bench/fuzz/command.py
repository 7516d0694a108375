"""``dfw fuzz``: random problems, gradients, bad inputs and a soak, against what is promised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from dfwlayer_bench.report.progress import bar as bar_of

__all__ = ["fuzz"]


def fuzz(
    problems: Annotated[int, typer.Option(min=0, help="Problems to solve and check.")] = 20_000,
    gradients: Annotated[int, typer.Option(min=0, help="Gradients to check.")] = 2_000,
    bad_inputs: Annotated[int, typer.Option(min=0, help="Calls with bad arguments.")] = 2_000,
    soak: Annotated[int, typer.Option(min=0, help="Calls while memory is watched.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same problems.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, of one thread each.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many seconds.", show_default="none")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder for results.json and failures/; a run there is continued."),
    ] = Path("out/fuzz"),
) -> int:
    """Try what is promised on random problems; each failure leaves a script that shows it."""
    console = Console(highlight=False)
    with console.status("Loading PyTorch"):
        from dfwlayer_bench.fuzz.report import summary
        from dfwlayer_bench.fuzz.run import Options, execute
    wanted = {"problems": problems, "gradients": gradients, "bad-inputs": bad_inputs, "soak": soak}
    found = TextColumn("{task.fields[failures]} failures")
    with bar_of(console, found, TimeRemainingColumn()) as bar:
        tasks = {
            phase: bar.add_task(phase, total=count, failures=0)
            for phase, count in wanted.items()
            if count
        }

        def report(phase: str, done: int, total: int, failures: int) -> None:
            bar.update(tasks[phase], completed=min(done, total), failures=failures)

        try:
            state, whole = execute(Options(wanted, seed, jobs, time_limit, out), report)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    console.print(summary(state, whole), markup=False, soft_wrap=True)
    return 1 if state.failed else 0
